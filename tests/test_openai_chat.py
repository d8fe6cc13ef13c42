"""``/v1/chat/completions`` through the official client and as raw HTTP."""

from __future__ import annotations

import msgspec
import pytest

from tests.openai_fixtures import server_fixture, shared_server_fixture, tokenizer_fixture  # noqa: F401
from tests.openai_server import MODEL, error_of

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]


def prompt_text(server) -> str:
    return server.engine.tokenizer.decode(server.engine.seen[-1].prompt_token_ids, skip_special_tokens=False)


def test_whole_answer(server):
    answer = server.client.chat.completions.create(model=MODEL, messages=HELLO)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Hello world", "stop")
    assert (answer.model, answer.object) == (MODEL, "chat.completion")
    assert answer.usage.prompt_tokens == len(server.engine.seen[0].prompt_token_ids)
    assert answer.usage.completion_tokens == len("Hello world") + 1  # the end-of-text token was computed too
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@pytest.mark.parametrize("cached", [0, 64])
@pytest.mark.parametrize("stream", [False, True])
def test_cached_tokens_are_always_in_usage(server, cached, stream):
    server.engine.cached = cached
    if stream:
        options = {"include_usage": True}
        *_, last = server.client.chat.completions.create(
            model=MODEL, messages=HELLO, stream=True, stream_options=options
        )
        assert last.choices == []
        usage = last.usage
    else:
        usage = server.client.chat.completions.create(model=MODEL, messages=HELLO).usage
    assert usage.prompt_tokens_details.cached_tokens == cached


def test_stream_equals_the_whole_answer(server):
    server.engine.reply = "grüße \U0001f680 世界"
    chunks = list(server.client.chat.completions.create(model=MODEL, messages=HELLO, stream=True, max_tokens=100))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == server.engine.reply
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert len({chunk.id for chunk in chunks}) == 1
    whole = server.client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=100)
    assert whole.choices[0].message.content == server.engine.reply


def test_raw_stream_has_the_shape_of_server_sent_events(server):
    events = server.events(CHAT, model=MODEL, messages=HELLO)
    assert events[-1] == "[DONE]"
    assert all("usage" not in event for event in events[:-1])
    first = events[0]
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    *chunks, last, done = server.events(CHAT, model=MODEL, messages=HELLO, stream_options={"include_usage": True})
    assert done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 12


def test_a_stream_sends_nothing_for_tokens_without_text(server):
    server.engine.reply = "\U0001f680"
    events = server.events(CHAT, model=MODEL, messages=HELLO)
    assert [event["choices"][0]["delta"].get("content") for event in events[:-1]] == ["", "\U0001f680", ""]


@pytest.mark.parametrize("stream", [False, True])
def test_n_answers(server, stream):
    answer = server.client.chat.completions.create(model=MODEL, messages=HELLO, n=3, stream=stream, seed=1)
    if stream:
        texts, roles = [""] * 3, []
        for chunk in answer:
            choice = chunk.choices[0]
            texts[choice.index] += choice.delta.content
            roles += [choice.index] if choice.delta.role else []
        assert roles == [0, 1, 2]
    else:
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        texts = [choice.message.content for choice in answer.choices]
        assert answer.usage.completion_tokens == 36
        assert answer.usage.prompt_tokens == len(server.engine.seen[0].prompt_token_ids)
    assert texts == ["Hello world"] * 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", ["wor", ["zzz", "lo wo"]])
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_never_leak(server, stream, stop, include):
    matched = stop if isinstance(stop, str) else stop[-1]
    expected = "Hello world"[: "Hello world".index(matched) + (len(matched) if include else 0)]
    extra = {"include_stop_str_in_output": include}
    answer = server.client.chat.completions.create(
        model=MODEL, messages=HELLO, stop=stop, stream=stream, extra_body=extra
    )
    if stream:
        chunks = list(answer)
        assert "".join(chunk.choices[0].delta.content for chunk in chunks) == expected
        choice = chunks[-1].choices[0]
    else:
        choice = answer.choices[0]
        assert choice.message.content == expected
    assert choice.finish_reason == "stop"
    assert choice.stop_reason == matched


def test_length(server):
    answer = server.client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=3)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("Hel", "length")
    answer = server.client.chat.completions.create(model=MODEL, messages=HELLO, max_completion_tokens=2, max_tokens=9)
    assert answer.choices[0].message.content == "He"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(server, stream):
    answer = server.client.chat.completions.create(
        model=MODEL, messages=HELLO, logprobs=True, top_logprobs=2, max_tokens=3, stream=stream
    )
    if stream:
        content = [
            entry for chunk in answer if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content
        ]
    else:
        content = answer.choices[0].logprobs.content
    assert [entry.token for entry in content] == ["H", "e", "l"]
    assert [entry.logprob for entry in content] == [-3.0] * 3
    assert [entry.bytes for entry in content] == [[72], [101], [108]]
    for entry in content:
        assert [top.logprob for top in entry.top_logprobs] == [-0.1, -0.2]
        assert all(top.bytes == list(top.token.encode()) for top in entry.top_logprobs)


def test_logprobs_of_the_sampled_token_alone_and_of_split_characters(server):
    server.engine.reply = "é"
    answer = server.client.chat.completions.create(model=MODEL, messages=HELLO, logprobs=True)
    content = answer.choices[0].logprobs.content
    assert [entry.top_logprobs for entry in content] == [[], [], []]
    assert [entry.bytes for entry in content[:2]] == [None, None]
    assert server.client.chat.completions.create(model=MODEL, messages=HELLO).choices[0].logprobs is None


def test_an_impossible_alternative_is_still_a_number(server):
    answer = server.client.chat.completions.create(
        model=MODEL, messages=HELLO, logprobs=True, top_logprobs=20, max_tokens=1
    )
    tops = answer.choices[0].logprobs.content[0].top_logprobs
    assert len(tops) == 20
    assert [top.logprob for top in tops[10:]] == [-9999.0] * 10


def test_every_sampling_field_reaches_the_engine(server):
    server.client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        temperature=0.5,
        top_p=0.9,
        n=2,
        stop="x",
        max_tokens=7,
        presence_penalty=0.1,
        frequency_penalty=-0.2,
        logit_bias={"5": -1},
        seed=9,
        user="somebody",
        extra_body={
            "top_k": 4,
            "min_p": 0.1,
            "repetition_penalty": 1.5,
            "stop_token_ids": [3],
            "ignore_eos": True,
            "min_tokens": 2,
            "skip_special_tokens": False,
            "include_stop_str_in_output": True,
            "cache_salt": "tenant",
            "something_else": 1,
        },
    )
    seen = server.engine.seen[0]
    assert seen.cache_salt == "tenant"
    assert msgspec.to_builtins(seen.params, str_keys=True) == {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "min_p": 0.1,
        "seed": 9,
        "presence_penalty": 0.1,
        "frequency_penalty": -0.2,
        "repetition_penalty": 1.5,
        "stop": ["x"],
        "stop_token_ids": [3],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "max_tokens": 7,
        "min_tokens": 2,
        "logprobs": None,
        "logit_bias": {"5": -1.0},
        "skip_special_tokens": False,
    }


def test_without_a_limit_the_answer_may_fill_the_context(server):
    server.client.chat.completions.create(model=MODEL, messages=HELLO)
    seen = server.engine.seen[0]
    assert seen.params.max_tokens == server.engine.max_model_len - len(seen.prompt_token_ids)
    assert seen.params.temperature == 1.0


def test_nulls_are_as_absent(server):
    fields = [
        "temperature",
        "top_p",
        "n",
        "stop",
        "max_tokens",
        "max_completion_tokens",
        "logit_bias",
        "seed",
        "stream",
    ]
    fields += ["stream_options", "logprobs", "top_logprobs", "tools", "tool_choice", "response_format", "top_k", "user"]
    fields += ["priority", "best_of", "model", "cache_salt"]
    response = server.post(CHAT, messages=HELLO, **dict.fromkeys(fields))
    assert response.json()["choices"][0]["message"]["content"] == "Hello world"


def test_harmless_values_of_unsupported_fields_are_accepted(server):
    response = server.post(
        CHAT, messages=HELLO, priority=0, best_of=1, response_format={"type": "text"}, tool_choice="auto", echo=False
    )
    assert response.status_code == 200


# --- messages --------------------------------------------------------------------------------------------------------


def test_template_and_parts(server):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    server.post(CHAT, messages=[{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}])
    assert prompt_text(server) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n"
    )


def test_template_arguments(server):
    server.post(CHAT, messages=HELLO, add_generation_prompt=False, chat_template_kwargs={"mark": "MARK"})
    assert prompt_text(server) == "<|im_start|>user\nhi<|im_end|>\nMARK"


def test_tools_reach_the_template(server):
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]
    server.client.chat.completions.create(model=MODEL, messages=HELLO, tools=tools)
    assert "look_up" in prompt_text(server)
    server.client.chat.completions.create(model=MODEL, messages=HELLO, tools=tools, tool_choice="none")
    assert "look_up" not in prompt_text(server)


def test_earlier_tool_calls_are_accepted(server):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    ]
    assert server.post(CHAT, messages=messages).status_code == 200
    assert prompt_text(server).endswith("tool\n42<|im_end|>\n<|im_start|>assistant\n")
    call["function"]["arguments"] = "{"
    assert "messages[1]" in error_of(server.post(CHAT, messages=messages), 400)["message"]


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], "empty"),
        ([{"content": "x"}], "messages[0]"),
        ([{"role": "user"}], "messages[0]"),
        ([{"role": "user", "content": None}], "messages[0]"),
        ([{"role": "user", "content": 5}], "messages[0]"),
        ([*HELLO, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[1]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [5]}], "messages[0].content[0]"),
        ([{"role": "assistant", "tool_calls": {"a": 1}}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [1]}], "messages[0].tool_calls[0]"),
        ("hello", "array"),
        ([1], "object"),
        (None, "array"),
    ],
)
def test_bad_messages(server, messages, named):
    error = error_of(server.post(CHAT, messages=messages), 400)
    assert named in error["message"]
    assert error["param"] == "messages"
    assert server.post(CHAT, messages=HELLO).status_code == 200


@pytest.mark.parametrize("name", ["tokenize", "messages", "tools", "chat_template"])
def test_reserved_template_arguments(server, name):
    error = error_of(server.post(CHAT, messages=HELLO, chat_template_kwargs={name: 1}), 400)
    assert error["param"] == "chat_template_kwargs"

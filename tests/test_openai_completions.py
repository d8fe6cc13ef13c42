"""``/v1/completions`` through the official client and as raw HTTP."""

from __future__ import annotations

import pytest

from tests.openai_fixtures import server_fixture, shared_server_fixture, tokenizer_fixture  # noqa: F401
from tests.openai_server import MODEL, error_of

PATH = "/v1/completions"


def test_whole_text(server):
    answer = server.client.completions.create(model=MODEL, prompt="hi", max_tokens=50)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("Hello world", "stop")
    assert answer.object == "text_completion"
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (2, 12, 14)
    assert usage.prompt_tokens_details.cached_tokens == 0


def test_the_default_limit_is_sixteen(server):
    server.engine.reply = "x" * 40
    assert server.client.completions.create(model=MODEL, prompt="hi").choices[0].text == "x" * 16
    assert len(server.post(PATH, prompt="hi", max_tokens=None).json()["choices"][0]["text"]) == 40


def test_stream_equals_the_whole(server):
    server.engine.cached = 1
    *chunks, last = server.client.completions.create(
        model=MODEL, prompt="hi", stream=True, stream_options={"include_usage": True}
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello world"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert last.choices == []
    assert last.usage.prompt_tokens_details.cached_tokens == 1
    assert server.events(PATH, prompt="hi")[-1] == "[DONE]"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", ["ab"]),
        (["ab"], ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([3, 4], [[3, 4]]),
        ([[3, 4]], [[3, 4]]),
        ([[3, 4], [5]], [[3, 4], [5]]),
        (["ab", [5]], ["ab", [5]]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_prompt_shapes(server, prompt, expected, stream):
    if stream:
        texts = [""] * len(expected) * 2
        for event in server.events(PATH, prompt=prompt, n=2)[:-1]:
            texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    else:
        body = server.post(PATH, prompt=prompt, n=2).json()
        assert [choice["index"] for choice in body["choices"]] == list(range(len(expected) * 2))
        texts = [choice["text"] for choice in body["choices"]]
        encode = server.engine.tokenizer.encode
        wanted = [encode(item) if isinstance(item, str) else item for item in expected]
        assert [seen.prompt_token_ids for seen in server.engine.seen] == wanted
        assert body["usage"]["prompt_tokens"] == sum(map(len, wanted))
        assert body["usage"]["completion_tokens"] == 12 * 2 * len(expected)
    assert texts == ["Hello world"] * len(expected) * 2


def test_cached_tokens_of_several_prompts_add_up(server):
    server.engine.cached = 1
    body = server.post(PATH, prompt=["ab", "cd", "ef"]).json()
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(server, stream):
    answer = server.client.completions.create(model=MODEL, prompt="hi", logprobs=2, max_tokens=3, stream=stream)
    parts = [chunk.choices[0].logprobs for chunk in answer] if stream else [answer.choices[0].logprobs]

    def joined(name: str) -> list:
        return [item for part in parts for item in getattr(part, name)]

    assert joined("tokens") == ["H", "e", "l"]
    assert joined("token_logprobs") == [-3.0] * 3
    assert joined("text_offset") == [0, 1, 2]
    tops = joined("top_logprobs")
    assert [list(top.values()) for top in tops] == [[-3.0, -0.2, -0.1]] * 3


@pytest.mark.parametrize(
    "prompt", ["", [], [[]], ["a", ""], [1, []], [1.5], [True], {"a": 1}, 5, None, [["a"]], [[[1]]], [None]], ids=str
)
def test_bad_prompts(server, prompt):
    error = error_of(server.post(PATH, prompt=prompt), 400)
    assert error["param"] == "prompt"
    assert server.engine.seen == []
    assert server.post(PATH, prompt="next").status_code == 200


def test_without_prompt(server):
    assert error_of(server.post(PATH, model=MODEL), 400)["param"] == "prompt"


@pytest.mark.parametrize(
    ("field", "value"),
    [("echo", True), ("suffix", "end"), ("best_of", 3), ("prompt_logprobs", 1), ("use_beam_search", True)],
)
def test_unsupported_fields_are_refused_by_name(server, field, value):
    error = error_of(server.post(PATH, prompt="a", **{field: value}), 400)
    assert error["param"] == field and field in error["message"]
    assert server.engine.seen == []


def test_best_of_equal_to_n_is_no_choice_at_all(server):
    assert len(server.post(PATH, prompt="a", n=2, best_of=2).json()["choices"]) == 2


def test_one_failing_prompt_ends_the_others(server):
    server.engine.break_after = 2
    error = error_of(server.post(PATH, prompt=["a", "b"]), 500)
    assert error["code"] == "generation_failed"

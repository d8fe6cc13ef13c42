"""Whatever a client sends, it gets an error in OpenAI's shape, and the next request works."""

from __future__ import annotations

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atom.model_engine.async_engine import EngineDeadError
from tests.openai_fixtures import server_fixture, shared_server_fixture, tokenizer_fixture  # noqa: F401
from tests.openai_server import MODEL, ScriptedEngine, error_of

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture(params=[CHAT, TEXT])
def path(request) -> str:
    return request.param


def body_for(path: str, **fields) -> dict:
    return ({"messages": HELLO} if path == CHAT else {"prompt": "hi"}) | fields


def works(server) -> bool:
    return server.post(TEXT, prompt="next").json()["choices"][0]["text"] == "Hello world"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.5),
        ("n", 0),
        ("n", 1.5),
        ("n", 10**30),
        ("top_k", -2),
        ("top_k", 2**63),
        ("min_p", 2),
        ("seed", 2**63),
        ("seed", True),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 16.0),
        ("min_tokens", -1),
        ("stop", 5),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [1]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [320]),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", 2),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"320": 1}),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"1": "x"}),
        ("logit_bias", [1]),
        ("logprobs", 21),
        ("top_logprobs", 21),
        ("top_logprobs", -1),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("stream_options", 5),
        ("cache_salt", ""),
        ("priority", 1),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}),
        ("guided_json", {}),
    ],
    ids=str,
)
def test_bad_values_name_the_field(server, path, field, value):
    fields = {field: value}
    if path == CHAT and field == "logprobs":
        fields = {"logprobs": "many"}
    if field == "top_logprobs":
        if path == TEXT:
            pytest.skip("a field of chat alone")
        fields["logprobs"] = True
    error = error_of(server.post(path, **body_for(path, **fields)), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == ("logprobs" if field == "top_logprobs" else field)
    assert server.engine.seen == []
    assert works(server)


def test_top_logprobs_without_logprobs(server):
    assert error_of(server.post(CHAT, messages=HELLO, top_logprobs=2), 400)["param"] == "top_logprobs"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b'{"prompt": "a"} trailing',
        b'{"prompt": NaN}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a\\ud800"}',
        b'{"prompt": "\\udc00a"}',
        b'{"prompt": ["\\ud83d"]}',
        b'{"prompt": "a", "stop": ["\\ud800"]}',
        b'{"prompt": "a", "cache_salt": "\\ud800"}',
        b'{"prompt": "\xff"}',
        b'{"prompt": ' + b"[" * 100_000,
        b'{"prompt": "a", "user": ' + b"[" * 100_000,
    ],
    ids=lambda raw: repr(raw[:40]),
)
def test_bad_json(server, path, raw):
    raw = raw.replace(b'"prompt": "a"', b'"messages": [{"role": "user", "content": "a"}]') if path == CHAT else raw
    error_of(server.http.post(path, content=raw), 400)
    assert server.engine.seen == []
    assert works(server)


@pytest.mark.parametrize("token", [-1, 320, 2**40, -(2**63), 10**30])
@pytest.mark.parametrize("shape", [lambda t: [1, t], lambda t: [[1], [1, t]]])
def test_token_ids_outside_the_vocabulary(server, token, shape):
    error = error_of(server.post(TEXT, prompt=shape(token)), 400)
    assert str(token) in error["message"] and "319" in error["message"]
    assert works(server)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("length", [200, 201, 5000])
def test_longer_than_the_context(server, path, stream, length):
    text = "x" * length
    fields = {"prompt": text} if path == TEXT else {"messages": [{"role": "user", "content": text}]}
    error = error_of(server.post(path, stream=stream, **fields), 400)
    assert error["code"] == "context_length_exceeded"
    assert "200" in error["message"]
    assert (str(length) if path == TEXT else "tokens") in error["message"]
    assert works(server)


def test_the_longest_prompt_that_fits(server):
    body = server.post(TEXT, prompt=[1] * 199).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 1


def test_unknown_model(server, path):
    error = error_of(server.post(path, **body_for(path, model="other")), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "other" in error["message"] and MODEL in error["message"]
    with pytest.raises(openai.NotFoundError):
        server.client.chat.completions.create(model="other", messages=HELLO)


def test_unknown_routes_and_methods(server):
    assert "/v1/nothing" in error_of(server.http.get("/v1/nothing"), 404)["message"]
    assert "/docs" in error_of(server.http.get("/docs"), 404)["message"]
    response = server.http.get(CHAT)
    error_of(response, 405)
    assert response.headers["allow"] == "POST"
    error_of(server.http.get("/reset_prefix_cache"), 405)


@pytest.mark.parametrize("stream", [False, True])
def test_dead_engine(server, path, stream):
    server.engine.alive = False
    error = error_of(server.post(path, **body_for(path, stream=stream)), 503)
    assert error["code"] == "engine_dead" and "killed by a test" in error["message"]
    with pytest.raises(openai.InternalServerError):
        server.client.completions.create(model=MODEL, prompt="a")


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses_is_a_bad_request(server, path, stream):
    server.engine.fail_after, server.engine.failure = 0, ValueError("not this one")
    assert error_of(server.post(path, **body_for(path, stream=stream)), 400)["message"] == "not this one"
    server.engine.fail_after = None
    assert works(server)


@pytest.mark.parametrize("failure", [RuntimeError("secret"), ValueError("secret"), EngineDeadError("gone")], ids=repr)
@pytest.mark.parametrize("after", [0, 2])
def test_failures_while_generating(server, path, failure, after):
    server.engine.fail_after, server.engine.failure = after, failure
    if after == 0 and isinstance(failure, ValueError):
        pytest.skip("a refusal")
    status = 503 if isinstance(failure, EngineDeadError) else 500
    error = error_of(server.post(path, **body_for(path)), status)
    assert "secret" not in error["message"]
    if after:
        *_, last = server.events(path, **body_for(path))
        assert set(last) == {"error"} and set(last["error"]) == {"message", "type", "param", "code"}
        assert last["error"]["type"] == "server_error"
        with pytest.raises(openai.APIError):
            list(server.client.completions.create(model=MODEL, prompt="a", stream=True))
    server.engine.fail_after = None
    assert works(server)


def test_a_row_that_cannot_be_sampled(server, path):
    server.engine.break_after = 2
    error = error_of(server.post(path, **body_for(path)), 500)
    assert error["code"] == "generation_failed" and "not finite" in error["message"]
    events = server.events(path, **body_for(path))
    assert events[-1]["error"]["code"] == "generation_failed"
    assert "[DONE]" not in events
    server.engine.break_after = None
    assert works(server)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=6,
)
known = [
    "temperature",
    "top_p",
    "n",
    "stop",
    "max_tokens",
    "logit_bias",
    "seed",
    "stream",
    "stream_options",
    "logprobs",
]
known += [
    "top_logprobs",
    "top_k",
    "min_p",
    "stop_token_ids",
    "min_tokens",
    "tools",
    "tool_choice",
    "cache_salt",
    "model",
]
known += ["chat_template_kwargs", "messages", "prompt", "best_of", "priority", "response_format"]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(known), json_values, max_size=4), st.sampled_from([CHAT, TEXT]))
def test_no_body_makes_the_server_fail(server, fields, path):
    server.engine.__dict__.update(ScriptedEngine(server.engine.tokenizer, reply="a").__dict__)
    response = server.post(path, **body_for(path, **fields))
    if response.status_code != 200:
        assert response.status_code in (400, 404)
        error_of(response, response.status_code)

"""The whole way: official client, HTTP, the engine core in its own process, the shipped model."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from atom.config import EngineConfig
from atom.model_engine.async_engine import AsyncEngine
from tests.openai_server import Server, error_of, wait_until

LONG = "The cache keeps the state at the end of a shared prefix. " * 12


@pytest.fixture(scope="module", name="server")
def server_fixture():
    engine = AsyncEngine(
        EngineConfig(
            threads=1,
            block_size=64,
            max_model_len=2048,
            kv_cache_memory="64MiB",
            max_num_batched_tokens=256,
            max_num_seqs=8,
        )
    )
    with Server(engine, start=engine.start, stop=engine.shutdown) as server:
        yield server


@pytest.fixture(autouse=True)
def _idle_engine(server):
    """Every test leaves the engine idle."""
    yield
    wait_until(lambda: figure(server, "requests_running") == figure(server, "requests_waiting") == 0)
    assert figure(server, "pages_live") == 0


def figure(server: Server, name: str) -> float:
    lines = server.http.get("/metrics").text.splitlines()
    (value,) = [line.split()[1] for line in lines if line.startswith(f"atom:{name} ")]
    return float(value)


def complete(server: Server, prompt, **fields):
    fields = {"max_tokens": 12, "temperature": 0} | fields
    return server.client.completions.create(model=server.engine.model_name, prompt=prompt, **fields)


def streamed(server: Server, prompt, **fields) -> tuple[str, object]:
    """The text of a stream and its usage."""
    chunks = list(complete(server, prompt, stream=True, stream_options={"include_usage": True}, **fields))
    return "".join(chunk.choices[0].text for chunk in chunks[:-1]), chunks[-1].usage


@pytest.mark.parametrize(
    "fields",
    [{}, {"temperature": 0.8, "seed": 4}, {"temperature": 1.0, "seed": 1, "top_p": 0.9, "extra_body": {"top_k": 20}}],
    ids=str,
)
def test_a_stream_equals_the_whole(server, fields):
    whole = complete(server, "Once upon a time", max_tokens=40, **fields)
    text, usage = streamed(server, "Once upon a time", max_tokens=40, **fields)
    assert text == whole.choices[0].text
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_a_repeated_prompt_is_resumed_and_says_so(server):
    assert server.http.post("/reset_prefix_cache").status_code == 200
    told = figure(server, "prefix_cache_cached_tokens_total")
    cold = complete(server, LONG)
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    warm = complete(server, LONG)
    cached = warm.usage.prompt_tokens_details.cached_tokens
    assert 0 < cached < warm.usage.prompt_tokens
    assert warm.choices[0].text == cold.choices[0].text
    text, usage = streamed(server, LONG)
    assert (text, usage.prompt_tokens_details.cached_tokens) == (cold.choices[0].text, cached)
    salted = complete(server, LONG, extra_body={"cache_salt": "tenant"})
    assert salted.usage.prompt_tokens_details.cached_tokens == 0
    assert figure(server, "prefix_cache_cached_tokens_total") - told == 2 * cached


def test_stop_strings(server):
    text = complete(server, "Once upon a time", max_tokens=40).choices[0].text
    stop = text[len(text) // 2 :][:4]
    expected = text[: text.index(stop)]
    whole = complete(server, "Once upon a time", max_tokens=40, stop=stop)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (expected, "stop")
    assert streamed(server, "Once upon a time", max_tokens=40, stop=stop)[0] == expected


def test_chat(server):
    messages = [{"role": "user", "content": "Say something."}]
    model = server.engine.model_name
    whole = server.client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=20)
    chunks = server.client.chat.completions.create(
        model=model, messages=messages, temperature=0, max_tokens=20, stream=True
    )
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == whole.choices[0].message.content
    assert whole.usage.completion_tokens <= 20


def test_several_prompts_and_choices(server):
    prompts = ["One", "Two", "Three"]
    alone = [complete(server, prompt).choices[0].text for prompt in prompts]
    together = complete(server, prompts, n=2)
    assert [choice.text for choice in together.choices] == [text for text in alone for _ in range(2)]


def test_logprobs_rank_the_greedy_token_first(server):
    logprobs = complete(server, "Once upon", logprobs=3).choices[0].logprobs
    for value, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert value == max(top.values())


def test_a_prompt_longer_than_a_step_is_chunked_and_one_longer_than_the_context_is_refused(server):
    ids = server.engine.tokenizer.encode(LONG)
    assert len(ids) > 256
    assert complete(server, ids).usage.prompt_tokens == len(ids)
    limit = server.engine.max_model_len
    error = error_of(server.post("/v1/completions", prompt=[1] * limit), 400)
    assert error["code"] == "context_length_exceeded" and str(limit) in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_gives_its_pages_back(server, stream):
    async def run() -> None:
        body = {"prompt": LONG, "max_tokens": 1000, "ignore_eos": True, "stream": stream}
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
            tasks = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(3)]
            await asyncio.sleep(0.3)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    asyncio.run(run())
    assert complete(server, "still here").choices[0].text


def test_bad_requests_leave_the_engine_working(server):
    vocab_size = server.engine.vocab_size
    for fields in ({"prompt": ""}, {"prompt": [vocab_size]}, {"prompt": [-1]}):
        error_of(server.post("/v1/completions", **fields), 400)
    error_of(server.post("/v1/completions", prompt="a", stop_token_ids=[vocab_size]), 400)
    error_of(server.post("/v1/completions", prompt="a", logit_bias={str(vocab_size): 1}), 400)
    error_of(server.http.post("/v1/completions", content=b'{"prompt": "\\ud800"}'), 400)
    assert complete(server, "next").choices[0].text

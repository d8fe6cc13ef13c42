"""The shipped model through both front ends: in this process, and behind a process border."""

import asyncio

import pytest

from atom import LLM, SamplingParams
from atom.config import EngineConfig
from atom.model_engine.async_engine import AsyncEngine

SETTINGS = {"threads": 1, "max_model_len": 512, "max_num_seqs": 4, "kv_cache_memory": "64MiB"}
PROMPTS = ["The cache", "Hello, ", "日本語 😀"]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, logprobs=1),
    SamplingParams(temperature=1, seed=5, n=2, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=24, stop=["e", "a"], min_tokens=4),
]
PATIENCE_S = 120


@pytest.fixture(scope="module")
def offline():
    with LLM(EngineConfig().model, **SETTINGS) as llm:
        return llm.generate(PROMPTS, PARAMS, use_tqdm=False)


async def stream(engine, prompt, params, request_id):
    """Text, token ids, log-probabilities and ends of a request's continuations."""
    parts = [["", [], [], None, None] for _ in range(params.n)]
    async for delta in engine.generate(prompt, params, request_id):
        for output in delta.outputs:
            part = parts[output.index]
            part[0] += output.text
            part[1] += output.token_ids
            part[2] += output.logprobs or []
            part[3:] = output.finish_reason, output.stop_reason
    return parts


async def served(test):
    engine = AsyncEngine(EngineConfig(**SETTINGS))
    await engine.start()
    try:
        return await asyncio.wait_for(test(engine), PATIENCE_S)
    finally:
        engine.shutdown()


def test_streams_join_to_the_offline_results(offline):
    async def test(engine):
        requests = zip(PROMPTS, PARAMS, map(str, range(len(PROMPTS))), strict=True)
        return await asyncio.gather(*(stream(engine, *request) for request in requests))

    for whole, parts in zip(offline, asyncio.run(served(test)), strict=True):
        for output, (text, token_ids, logprobs, *end) in zip(whole.outputs, parts, strict=True):
            assert (output.text, output.token_ids) == (text, token_ids)
            assert [output.finish_reason, output.stop_reason] == end
            # Which requests share a batch differs, and with it the last bits of a product on some CPUs.
            for expected, found in zip(output.logprobs or [], logprobs, strict=True):
                assert found.keys() == expected.keys()
                for token, value in expected.items():
                    assert found[token].logprob == pytest.approx(value.logprob, abs=1e-4)
                    assert found[token].decoded_token == value.decoded_token


def test_a_client_that_leaves_gives_its_pages_back():
    async def test(engine):
        params = SamplingParams(max_tokens=400, ignore_eos=True, n=2)
        outputs = engine.generate("The cache", params, "r")
        await anext(outputs)
        assert (await engine.metrics())["pages_live"] > 0
        await outputs.aclose()
        metrics = await engine.metrics()
        assert (metrics["pages_live"], metrics["slots_live"], metrics["requests_finished_abort_total"]) == (0, 0, 2)

    asyncio.run(served(test))

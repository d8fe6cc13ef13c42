import asyncio
import os
import signal

import pytest

from atom.sampling_params import SamplingParams
from tests.engine_fixtures import (  # noqa: F401
    LONG,
    collect,
    folder_fixture,
    idle,
    serve_fixture,
    socket_dirs_fixture,
    until,
)
from tests.fake_core import REFUSED_TOKEN
from tests.tiny_tokenizer import VOCAB_SIZE


def test_requests_side_by_side(serve):
    async def test(engine):
        assert (engine.model_name, engine.vocab_size, engine.max_model_len) == ("fake", VOCAB_SIZE, 4096)
        assert engine.info["block_size"] == 64
        assert engine.is_alive()
        results = await asyncio.gather(*(collect(engine, f"{i}é", f"r{i}", max_tokens=9) for i in range(8)))
        for i, (text, token_ids, last) in enumerate(results):
            assert text == f"{i}é" * 3
            assert token_ids == engine.tokenizer.encode(text)
            assert (last.outputs[0].finish_reason, last.num_cached_tokens) == ("length", 7)
        metrics = await engine.metrics()
        assert (metrics["added"], metrics["aborted"], metrics["running"]) == (8, 0, 0)

    serve(test)


def test_cached_tokens_are_known_at_the_first_output(serve):
    async def test(engine):
        stream = engine.generate("abc", SamplingParams(n=2, max_tokens=3), "r")
        assert (await anext(stream)).num_cached_tokens == 7
        await stream.aclose()

    serve(test)


def test_a_slow_consumer_gets_steps_together(serve):
    async def test(engine):
        stream = engine.generate("abc", SamplingParams(max_tokens=300), "r")
        first = await anext(stream)
        await until(lambda: idle(engine))
        rest = [output async for output in stream]
        assert len(rest) <= 2
        assert first.outputs[0].text + "".join(output.outputs[0].text for output in rest) == "abc" * 100

    serve(test)


def test_an_output_that_came_before_the_death_is_not_lost(serve):
    async def test(engine):
        stream = engine.generate("abc", SamplingParams(max_tokens=6), "r")
        text = (await anext(stream)).outputs[0].text
        await until(lambda: idle(engine))
        os.kill(engine.pid, signal.SIGKILL)

        async def dead():
            return not engine.is_alive()

        await until(dead)
        assert text + "".join([output.outputs[0].text async for output in stream]) == "abcabc"

    serve(test)


def test_a_stop_string_frees_the_core_with_one_abort(serve):
    async def test(engine):
        text, token_ids, last = await collect(engine, "hello world ", "r", max_tokens=4000, stop=["o w"])
        assert (text, token_ids) == ("hell", engine.tokenizer.encode("hello w"))
        assert (last.outputs[0].finish_reason, last.outputs[0].stop_reason) == ("stop", "o w")
        metrics = await engine.metrics()
        assert (metrics["running"], metrics["aborted"]) == (0, 1)

    serve(test)


@pytest.mark.parametrize("n", [1, 3])
def test_a_consumer_that_leaves_aborts_exactly_once(serve, n):
    async def test(engine):
        params = SamplingParams(max_tokens=4000, n=n)
        closed = engine.generate("abc", params, "closed")
        await anext(closed)
        await closed.aclose()

        async def consume():
            async for _ in engine.generate("abc", params, "cancelled"):
                started.set()

        started = asyncio.Event()
        task = asyncio.create_task(consume())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        metrics = await engine.metrics()
        assert metrics["running"] == 0
        assert (metrics["added"], metrics["aborted"], metrics["aborted_twice"]) == (2 * n, 2 * n, 0)

    serve(test, step_seconds=0.005)


def test_a_consumer_that_leaves_before_the_first_output(serve):
    async def test(engine):
        task = asyncio.create_task(collect(engine, "abc", "r", max_tokens=5))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        metrics = await engine.metrics()
        assert metrics["running"] == 0 and metrics["aborted"] == metrics["added"] == 1

    serve(test, step_seconds=0.5)


def test_leaving_after_the_last_output_is_not_an_abort(serve):
    async def test(engine):
        stream = engine.generate("abc", SamplingParams(max_tokens=1), "r")
        assert (await anext(stream)).finished
        await stream.aclose()
        assert (await engine.metrics())["aborted"] == 0

    serve(test)


def test_abort_ends_the_stream_with_a_last_output(serve):
    async def test(engine):
        async def consume():
            return [output async for output in engine.generate("abc", LONG, "r")]

        task = asyncio.create_task(consume())
        await until(lambda: started(engine))
        await engine.abort("r")
        await engine.abort("r")
        await engine.abort("unknown")
        outputs = await task
        assert [output.outputs[0].finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
        assert outputs[-1].outputs[0].finish_reason == "abort"
        metrics = await engine.metrics()
        assert (metrics["running"], metrics["aborted"]) == (0, 1)

    async def started(engine):
        return (await engine.metrics())["steps"] > 2

    serve(test, step_seconds=0.005)


def test_a_bad_request_raises_and_the_next_one_works(serve):
    async def test(engine):
        for prompt in ("", "\ud800", [], [-1], [VOCAB_SIZE], [1] * 4096, "x" * 5000, [REFUSED_TOKEN]):
            with pytest.raises(ValueError):
                await collect(engine, prompt, "r")
            assert (await collect(engine, "abc", "r", max_tokens=3))[0] == "abc"
        assert (await engine.metrics())["aborted"] == 0

    serve(test)


def test_a_refused_request_with_several_continuations(serve):
    async def test(engine):
        with pytest.raises(ValueError, match="cannot be taken"):
            await collect(engine, [REFUSED_TOKEN], "r", n=3)
        assert (await collect(engine, "abc", "r", max_tokens=3))[0] == "abc"

    serve(test)


def test_an_id_in_use_is_refused(serve):
    async def test(engine):
        stream = engine.generate("abc", SamplingParams(max_tokens=300), "r")
        text = (await anext(stream)).outputs[0].text
        with pytest.raises(ValueError, match="in use"):
            await collect(engine, "abc", "r")
        async for output in stream:
            text += output.outputs[0].text
        assert text == "abc" * 100

    serve(test)


def test_calls_and_their_errors(serve):
    async def test(engine):
        assert await engine.reset_prefix_cache() is True
        assert await engine.cache_stats() == {"requests": 0, "hit_rate": 0.5}

    async def broken(engine):
        with pytest.raises(RuntimeError, match="LookupError: no counters"):
            await engine.cache_stats()
        with pytest.raises(RuntimeError, match="TypeError"):
            await engine.metrics()
        assert (await collect(engine, "abc", "r", max_tokens=3))[0] == "abc"

    serve(test)
    serve(broken, core_class="tests.fake_core:BrokenCallsCore")


def test_an_output_that_cannot_be_used_touches_its_own_request_alone(serve):
    async def test(engine):
        other = asyncio.create_task(collect(engine, "abc", "other", max_tokens=300))
        with pytest.raises(RuntimeError, match="cannot be used"):
            await collect(engine, "abc", "r", logprobs=1, max_tokens=4000)
        assert (await other)[0] == "abc" * 100
        metrics = await engine.metrics()
        assert (metrics["running"], metrics["aborted"]) == (0, 1)

    serve(test, core_class="tests.fake_core:BrokenOutputCore")

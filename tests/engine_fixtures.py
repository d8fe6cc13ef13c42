"""An engine core that computes nothing, in a process of its own, and ways to drive it."""

import asyncio
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from atom.model_engine.async_engine import AsyncEngine, EngineDeadError
from atom.sampling_params import SamplingParams
from tests.fake_core import FAKE_CORE, FakeConfig
from tests.tiny_tokenizer import save_tokenizer

LONG = SamplingParams(max_tokens=4000, ignore_eos=True)
PATIENCE_S = 60


@pytest.fixture(scope="module", name="folder")
def folder_fixture(tmp_path_factory):
    return str(save_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(name="socket_dirs")
def socket_dirs_fixture(monkeypatch):
    """The temporary directory of this process and of those it starts; empty when no engine left anything.

    Its path is short, as engines keep away from one that is too long for a socket.
    """
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


@pytest.fixture(name="serve")
def serve_fixture(folder, socket_dirs):
    """Run a coroutine function with a started engine; nothing of the engine may be left afterwards."""

    def serve(test, core_class=FAKE_CORE, **settings):
        async def main():
            engine = AsyncEngine(FakeConfig(folder, **settings), core_class)
            await engine.start()
            process = psutil.Process(engine.pid)
            try:
                await asyncio.wait_for(test(engine), PATIENCE_S)
            finally:
                started = time.monotonic()
                engine.shutdown()
                assert time.monotonic() - started < 10
                assert not engine.is_alive()
                assert not process.is_running()
                assert list(socket_dirs.iterdir()) == []

        asyncio.run(main())

    return serve


async def collect(engine, prompt, request_id, **params):
    """Joined text, token ids and last output of a request."""
    text, token_ids, last = "", [], None
    async for last in engine.generate(prompt, SamplingParams(**params), request_id):
        text += last.outputs[0].text
        token_ids += last.outputs[0].token_ids
    return text, token_ids, last


async def until(condition):
    """Wait for an awaitable condition to be true."""
    while not await condition():
        await asyncio.sleep(0.01)


async def fails(engine, request_id, error=EngineDeadError):
    """Iterate a request until it raises; return the error."""
    with pytest.raises(error) as caught:
        async for _ in engine.generate("abc", LONG, request_id):
            pass
    return caught.value


async def idle(engine):
    return (await engine.metrics())["running"] == 0

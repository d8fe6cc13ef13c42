import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import psutil
import pytest

from atom.model_engine.async_engine import AsyncEngine, EngineDeadError
from tests.engine_fixtures import (  # noqa: F401
    PATIENCE_S,
    collect,
    fails,
    folder_fixture,
    serve_fixture,
    socket_dirs_fixture,
    until,
)
from tests.fake_core import FAKE_CORE, FakeConfig


def test_a_failed_step_ends_its_requests_and_the_engine_serves_on(serve):
    async def test(engine):
        results = await asyncio.gather(*(collect(engine, "abc", f"r{i}", max_tokens=400, n=2) for i in range(3)))
        for _, _, last in results:
            assert [output.finish_reason for output in last.outputs] == ["error"] * 2
            assert last.outputs[0].stop_reason == "ArithmeticError: step 20 failed"
        assert (await collect(engine, "abc", "again", max_tokens=3))[0] == "abc"
        assert (await engine.metrics())["running"] == 0

    serve(test, failing_steps=(20,), step_seconds=0.005)


def test_steps_that_fail_apart_are_survived(serve):
    async def test(engine):
        for request_id, reason in (("a", "error"), ("b", "length"), ("c", "error"), ("d", "length")):
            _, _, last = await collect(engine, "abc", request_id, max_tokens=1)
            assert last.outputs[0].finish_reason == reason

    serve(test, failing_steps=(0, 2))


def test_two_failed_steps_in_a_row_end_the_process(serve):
    async def test(engine):
        await collect(engine, "abc", "r")
        try:
            _, _, last = await collect(engine, "abc", "again")
            assert last.outputs[0].finish_reason == "error"
        except EngineDeadError:
            pass  # the death may be seen before the last message

        async def dead():
            return not engine.is_alive()

        await until(dead)
        assert "exit code 4" in str(await fails(engine, "after"))

    serve(test, failing_steps=(0, 1))


def test_a_killed_process_is_noticed_by_everyone(serve):
    async def test(engine):
        waiting = [asyncio.create_task(fails(engine, f"r{i}")) for i in range(3)]
        call = asyncio.create_task(engine.metrics())
        await call
        os.kill(engine.pid, signal.SIGKILL)
        for error in await asyncio.gather(*waiting):
            assert "exit code -9" in str(error)
        assert not engine.is_alive()
        with pytest.raises(EngineDeadError):
            await engine.cache_stats()
        assert "exit code -9" in str(await fails(engine, "late"))
        await engine.abort("r0")

    serve(test, step_seconds=0.01)


def test_a_call_that_waits_when_the_process_is_killed(serve):
    async def test(engine):
        request = asyncio.create_task(fails(engine, "r"))
        await asyncio.sleep(0.2)  # the core is inside its long step and answers no call
        call = asyncio.create_task(engine.metrics())
        await asyncio.sleep(0)
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            await call
        await request

    serve(test, step_seconds=30)


def test_shutdown_ends_what_waits_even_inside_a_long_step(serve):
    async def test(engine):
        waiting = asyncio.create_task(fails(engine, "r"))
        await asyncio.sleep(0.2)
        engine.shutdown()
        assert "shut down" in str(await waiting)
        assert "shut down" in str(await fails(engine, "late"))

    serve(test, step_seconds=30)


def test_an_interrupt_from_the_terminal_does_not_reach_the_core(serve):
    async def test(engine):
        os.kill(engine.pid, signal.SIGINT)
        assert (await collect(engine, "abc", "r", max_tokens=3))[0] == "abc"

    serve(test)


def test_an_idle_core_does_not_spin(serve):
    async def test(engine):
        await collect(engine, "abc", "r", max_tokens=3)
        process = psutil.Process(engine.pid)
        before = process.cpu_times()
        await asyncio.sleep(1)
        after = process.cpu_times()
        assert (after.user + after.system) - (before.user + before.system) < 0.5
        assert (await engine.metrics())["steps"] == 3

    serve(test)


# Start-up


def start(folder, core_class=FAKE_CORE, **settings):
    async def main():
        engine = AsyncEngine(FakeConfig(folder, **settings), core_class)
        await asyncio.wait_for(engine.start(), PATIENCE_S)

    asyncio.run(main())


def core_processes():
    """Processes of engine cores that this one has; multiprocessing's resource tracker stays by design."""
    children = psutil.Process().children(recursive=True)
    return [process for process in children if "spawn_main" in " ".join(process.cmdline())]


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"startup_error": ValueError("--block-size=3: use 64")}, ValueError, "^--block-size=3: use 64$"),
        ({"startup_error": OSError("disk gone")}, RuntimeError, "^disk gone$"),
        ({"startup_exit": 9}, EngineDeadError, "while starting, with exit code 9"),
        ({"core_class": "tests.fake_core:Missing"}, RuntimeError, "Missing"),
    ],
)
def test_a_core_that_cannot_start_says_why(folder, socket_dirs, settings, error, message):
    with pytest.raises(error, match=message):
        start(folder, **settings)
    assert list(socket_dirs.iterdir()) == []
    assert core_processes() == []


def test_a_folder_without_a_tokenizer_ends_the_core_again(tmp_path_factory, socket_dirs):
    with pytest.raises(ValueError, match="no usable tokenizer"):
        start(str(tmp_path_factory.mktemp("empty")))
    assert list(socket_dirs.iterdir()) == []
    assert core_processes() == []


def test_a_start_that_is_cancelled_leaves_nothing(folder, socket_dirs):
    async def main():
        engine = AsyncEngine(FakeConfig(folder, startup_seconds=300), FAKE_CORE)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(engine.start(), 1)
        assert not engine.is_alive()

    asyncio.run(main())
    assert list(socket_dirs.iterdir()) == []
    assert core_processes() == []


def test_a_long_temporary_directory_is_no_obstacle(folder, tmp_path, monkeypatch):
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))

    async def main():
        engine = AsyncEngine(FakeConfig(folder), FAKE_CORE)
        await engine.start()
        assert (await collect(engine, "abc", "r", max_tokens=3))[0] == "abc"
        engine.shutdown()

    asyncio.run(main())
    assert list(deep.iterdir()) == []


# The parent's end

PARENT = """
    import asyncio, sys, time
    from atom.model_engine.async_engine import AsyncEngine
    from atom.sampling_params import SamplingParams
    from tests.fake_core import FAKE_CORE, FakeConfig

    async def main():
        engine = AsyncEngine(FakeConfig(sys.argv[1], step_seconds=float(sys.argv[2])), FAKE_CORE)
        await engine.start()
        stream = engine.generate("abc", SamplingParams(max_tokens=4000), "r")
        if sys.argv[2] == "0":
            await anext(stream)
        else:
            asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0.5)
        print(engine.pid, flush=True)
        if sys.argv[3] == "wait":
            time.sleep(300)

    if __name__ == "__main__":
        asyncio.run(main())
"""


@pytest.fixture
def run_parent(folder, tmp_path, socket_dirs):
    """Start a program with an engine in it; return it and the engine core's process."""
    programs = []

    def run_parent(step_seconds, end):
        script = tmp_path / "parent.py"
        script.write_text(textwrap.dedent(PARENT))
        root = str(Path(__file__).parent.parent)
        program = subprocess.Popen(
            [sys.executable, str(script), folder, step_seconds, end],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": root},
        )
        programs.append(program)
        return program, psutil.Process(int(program.stdout.readline()))

    yield run_parent
    for program in programs:
        program.kill()
        program.wait()
        program.stdout.close()


@pytest.mark.parametrize("step_seconds", ["0", "100"], ids=["between steps", "inside a step"])
def test_the_core_ends_when_its_parent_is_killed(run_parent, socket_dirs, step_seconds):
    program, core = run_parent(step_seconds, "wait")
    assert core.is_running() and len(list(socket_dirs.iterdir())) == 1
    program.kill()
    program.wait()
    core.wait(PATIENCE_S)
    assert not core.is_running()
    assert list(socket_dirs.iterdir()) == []


def test_a_program_that_forgets_to_shut_down_ends_cleanly(run_parent, socket_dirs):
    program, core = run_parent("0", "leave")
    assert program.wait(PATIENCE_S) == 0
    assert not core.is_running()
    assert list(socket_dirs.iterdir()) == []

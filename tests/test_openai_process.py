"""``serve`` as a process of its own, with the engine core in another: start, signals, and a core that dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.openai_server import error_of, wait_until
from tests.tiny_tokenizer import save_tokenizer

ROOT = Path(__file__).parent.parent
SCRIPT = """
import sys
from atom.entrypoints.openai import serve
from atom.model_engine.async_engine import AsyncEngine
from tests.fake_core import FAKE_CORE, FakeConfig

if __name__ == "__main__":
    config = FakeConfig(sys.argv[1], **eval(sys.argv[2]))
    serve(AsyncEngine(config, FAKE_CORE), port=int(sys.argv[3]), shutdown_timeout=int(sys.argv[4]), log_level="warning")
"""


class Process:
    """A server process; ``url`` is what it printed."""

    def __init__(self, tmp_path: Path, config: str = "{}", port: int = 0, timeout: int = 20) -> None:
        (tmp_path / "script.py").write_text(SCRIPT)
        folder = tmp_path / "tokenizer"
        if not folder.exists():
            save_tokenizer(folder)
        self.popen = subprocess.Popen(
            [sys.executable, "script.py", str(folder), config, str(port), str(timeout)],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.popen.kill()
        self.popen.wait()
        self.popen.stdout.close()
        self.popen.stderr.close()

    def wait_ready(self) -> None:
        line = self.popen.stdout.readline()
        assert line.startswith("Listening on http://127.0.0.1:"), (line, self.popen.poll())
        self.url = line.split()[-1]

    def core(self) -> psutil.Process:
        children = psutil.Process(self.popen.pid).children()
        (core,) = [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]
        return core

    def start_stream(self, max_tokens: int) -> tuple[threading.Thread, list[str]]:
        """Read a stream in a thread; returns when its first chunk is there."""
        chunks: list[str] = []

        def read() -> None:
            body = {"prompt": "a", "stream": True, "max_tokens": max_tokens}
            try:
                with httpx.stream("POST", self.url + "/v1/completions", json=body, timeout=60) as response:
                    for chunk in response.iter_text():
                        chunks.append(chunk)
            except httpx.HTTPError as error:
                chunks.append(repr(error))

        thread = threading.Thread(target=read)
        thread.start()
        wait_until(lambda: bool(chunks), 30)
        return thread, chunks


def test_serves_and_ends_in_good_order(tmp_path):
    with Process(tmp_path, "{'step_seconds': 0.02}") as process:
        process.wait_ready()
        core = process.core()
        assert httpx.get(process.url + "/health").status_code == 200
        answer = httpx.post(process.url + "/v1/completions", json={"prompt": "abc", "max_tokens": 5}).json()
        assert answer["choices"][0]["text"] == "abcab"
        thread, chunks = process.start_stream(60)
        process.popen.send_signal(signal.SIGTERM)
        assert process.popen.wait(30) == 0
        thread.join(10)
        assert "".join(chunks).endswith("data: [DONE]\n\n"), "a running stream is served to its end"
        assert "".join(chunks).count('"text":"a"') == 60
        wait_until(lambda: not core.is_running())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_at_once(tmp_path, number):
    with Process(tmp_path, "{'step_seconds': 0.05}") as process:
        process.wait_ready()
        core = process.core()
        thread, chunks = process.start_stream(4000)
        process.popen.send_signal(number)
        time.sleep(0.5)
        assert process.popen.poll() is None
        process.popen.send_signal(number)
        assert process.popen.wait(15) == 0
        thread.join(10)
        assert "[DONE]" not in "".join(chunks)
        wait_until(lambda: not core.is_running())


def test_requests_that_do_not_end_are_cut_off(tmp_path):
    with Process(tmp_path, "{'step_seconds': 0.05}", timeout=1) as process:
        process.wait_ready()
        thread, _ = process.start_stream(4000)
        process.popen.send_signal(signal.SIGTERM)
        assert process.popen.wait(15) == 0
        thread.join(10)


def test_interrupted_while_starting(tmp_path):
    with Process(tmp_path, "{'startup_seconds': 30}") as process:
        wait_until(lambda: bool(psutil.Process(process.popen.pid).children()), 30)
        time.sleep(0.3)
        children = psutil.Process(process.popen.pid).children()
        process.popen.send_signal(signal.SIGTERM)
        assert process.popen.wait(15) == 0
        wait_until(lambda: not any(child.is_running() for child in children))


def test_a_core_that_cannot_start(tmp_path):
    with Process(tmp_path, "{'startup_error': ValueError('no such weights')}") as process:
        _, errors = process.popen.communicate(timeout=60)
        assert process.popen.returncode not in (0, None)
        assert "no such weights" in errors


def test_a_port_in_use(tmp_path):
    with Process(tmp_path) as process:
        process.wait_ready()
        with Process(tmp_path, port=int(process.url.rsplit(":", 1)[1])) as second:
            _, errors = second.popen.communicate(timeout=60)
            assert second.popen.returncode not in (0, None)
            assert "Address already in use" in errors


def test_a_core_that_is_killed(tmp_path):
    with Process(tmp_path, "{'step_seconds': 0.05}") as process:
        process.wait_ready()
        thread, chunks = process.start_stream(4000)
        process.core().kill()
        thread.join(10)
        assert '"code":"engine_dead"' in chunks[-1] and "[DONE]" not in chunks[-1]
        error = error_of(httpx.get(process.url + "/health"), 503)
        assert error["code"] == "engine_dead"
        error_of(httpx.post(process.url + "/v1/completions", json={"prompt": "a"}), 503)
        assert "atom:engine_up 0.0" in httpx.get(process.url + "/metrics").text
        process.popen.send_signal(signal.SIGTERM)
        assert process.popen.wait(15) == 0


def test_a_client_that_leaves_is_one_abort_in_the_core(tmp_path):
    def figure(name: str) -> float:
        text = httpx.get(process.url + "/metrics").text
        (line,) = [line for line in text.splitlines() if line.startswith(f"atom:{name} ")]
        return float(line.split()[1])

    with Process(tmp_path, "{'step_seconds': 0.02}") as process:
        process.wait_ready()
        url = process.url + "/v1/completions"
        for _ in range(3):
            with httpx.stream("POST", url, json={"prompt": "a", "stream": True, "max_tokens": 4000}) as response:
                next(response.iter_raw())
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(url, json={"prompt": "a", "max_tokens": 4000}, timeout=0.3)
            httpx.post(url, json={"prompt": "a", "max_tokens": 3})
        wait_until(lambda: figure("running") == 0)
        assert (figure("added"), figure("aborted"), figure("aborted_twice")) == (9, 6, 0)

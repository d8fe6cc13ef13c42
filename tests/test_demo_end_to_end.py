"""``atom demo`` as a user runs it: real servers, the shipped model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from atom.entrypoints.demo.conversation import SCRIPT
from atom.entrypoints.demo.errors import DemoError
from atom.entrypoints.demo.player import Player
from atom.entrypoints.demo.server_process import ServerProcess

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["--threads=1", "--kv-cache-memory=256MiB", "--max-model-len=16384", "--max-num-seqs=4"]


def demo(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "atom.entrypoints.cli", "demo", *SMALL, *flags]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600)


def test_demo_resumes_the_resent_prompt_and_gives_the_same_tokens() -> None:
    done = demo("--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    data = json.loads(done.stdout)
    assert set(data) == {"requests", "cache_stats"}
    requests = {request["name"]: request for request in data["requests"]}
    assert list(requests) == [turn.name for turn in SCRIPT]
    for request in requests.values():
        assert set(request) == {"name", "prompt_tokens", "cached_tokens", "ttft_ms", "same_as_uncached"}
        assert request["same_as_uncached"] is True and request["ttft_ms"] > 0
    cold, resent = requests["cold"], requests["resent"]
    assert cold["prompt_tokens"] >= 3000 and cold["cached_tokens"] == 0
    assert resent["cached_tokens"] == (resent["prompt_tokens"] - 1) // 64 * 64
    anchor = resent["cached_tokens"]
    for name in ("continued", "continued again"):
        assert requests[name]["cached_tokens"] >= anchor, name
    assert requests["sibling A"]["cached_tokens"] == 0, "no state was kept in the middle"
    shared = SCRIPT[4].messages({})[-1]["content"].split("Stop here")[0]
    assert len(shared) < requests["sibling B"]["cached_tokens"] < requests["sibling B"]["prompt_tokens"]
    assert requests["unrelated"]["cached_tokens"] == 0
    cached = sum(request["cached_tokens"] for request in requests.values())
    assert data["cache_stats"]["cached_tokens"] == cached
    assert data["cache_stats"]["requests"] == len(SCRIPT) + 1, "and the warm-up"


def test_trace_reaches_the_ideal_when_it_is_compared(tmp_path: Path) -> None:
    text = "".join(f"line {number} of a file that grows\n" for number in range(40))
    lines = [
        {"timestamp": number, "session_id": "one", "input": text[: 300 * (number + 1)], "output": ""}
        for number in range(4)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    done = demo("--json", "--compare", f"--trace={trace}")
    assert done.returncode == 0, done.stderr
    total = json.loads(done.stdout)["total"]
    assert total["requests"] == 4 and total["share_of_ideal"] >= 0.98


def test_a_server_that_dies_is_named() -> None:
    with pytest.raises(DemoError, match=r"the server died \(exit code -9\)"), ServerProcess(SMALL) as server:
        player = Player(server.host, server.port)
        player.complete("alive", 1)
        [process] = [child for child in psutil.Process().children() if "serve" in child.cmdline()]
        process.kill()
        player.complete("dead", 1)

"""What a server records of its requests, replayed, has the server's own [Cache Stats]."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from atom.config import SHIPPED_MODEL, ConfigError, EngineConfig
from atom.model_engine import trace_recorder
from atom.model_engine.cache_stats import cache_stats_line
from atom.model_engine.engine_core import EngineCore
from atom.model_engine.messages import EngineRequest
from atom.model_engine.step_plan import StepPlan, StepResult
from atom.replay.cost_model import NS, CostModel
from atom.replay.geometry import Geometry
from atom.replay.simulate import ReplaySettings, replay
from atom.replay.trace import prepare
from atom.replay.traces import read_trace
from atom.sampling_params import SamplingParams
from tests.recording import RecordingRunner
from tests.test_oracle import random_prompt

FAST = CostModel(prefill_rate=1e12, decode_step=1e-9, restore_rate=1e18)
"""Faster than any real run, so that requests that came one after the other do so again."""


class Clock:
    """Ticks a second with each request and, as the replay does, a nanosecond with each step."""

    def __init__(self) -> None:
        # The first request comes at 0, as in the replay: differences of times round alike.
        self.nanoseconds = -1

    def monotonic(self) -> float:
        return self.nanoseconds / NS


class ClockedRunner(RecordingRunner):
    """Moves the clock while the forward runs."""

    clock: Clock

    def execute(self, plan: StepPlan) -> StepResult:
        self.clock.nanoseconds += FAST.step_ns(plan, self.geometry.image_bytes)
        return super().execute(plan)


def serve(core: EngineCore, prompts: list[tuple[list[int], int]], clock: Clock | None = None) -> None:
    for number, (prompt, count) in enumerate(prompts):
        params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
        if clock is not None:
            clock.nanoseconds = (clock.nanoseconds // NS + 1) * NS
        core.add_request(EngineRequest(str(number), prompt, params))
        while core.has_unfinished():
            core.step()
    core.shutdown()


def replay_of(core: EngineCore, path: Path):
    """The recording of ``core`` replayed with its own geometry and settings."""
    trace = read_trace(path)
    prepare(trace, "echoed")
    geometry, manager = core.runner.geometry, core.block_manager
    settings = ReplaySettings(
        Geometry("own", geometry.page_bytes / geometry.block_size, geometry.image_bytes),
        manager.pool.num_blocks * geometry.block_size,
        core.config.max_num_seqs,
        "default",
        manager.placement,
        FAST,
        core.config.max_num_batched_tokens,
    )
    return replay(trace, settings)


@pytest.mark.parametrize("seed", range(6))
def test_cache_stats_equal_those_of_the_replay(tmp_path, seed, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(trace_recorder, "time", clock)
    rng = random.Random(seed)
    path, size = tmp_path / "trace.jsonl", 4
    config = EngineConfig(
        model="recording",
        block_size=size,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        state_checkpoint_interval_tokens=16,
        record_trace=str(path),
        cache_stats_interval=0,
    )
    runner = ClockedRunner(size, 40, 2 + 4, 96, interior_grid=size)
    runner.clock = clock
    core = EngineCore(config, runner)
    core.block_manager.pool.now = clock.monotonic
    prompts: list[tuple[list[int], int]] = []
    for _ in range(60):
        prompts.append((random_prompt(rng, [prompt for prompt, _ in prompts], 70), rng.randrange(1, 20)))
    serve(core, prompts, clock)
    result = replay_of(core, path)
    assert result.stats.as_dict() == core.block_manager.stats.as_dict()
    assert cache_stats_line(result.stats) == core.cache_stats_lines()[0]
    states = core.block_manager.states
    assert states is not None and result.fates.as_dict() == states.cache.fates.as_dict()
    assert result.stats.cached_tokens > 0 and result.fates.evicted > 0


def test_samples_aborts_and_stop_strings_are_played_as_they_were(tmp_path):
    """Two samples of one prompt, an answer that is aborted, one that a stop string ends, and what follows each of these."""
    path, size = tmp_path / "trace.jsonl", 4
    config = EngineConfig(model="recording", block_size=size, max_num_seqs=2, record_trace=str(path))
    core = EngineCore(config, RecordingRunner(size, 80, 2 + 4, 96, interior_grid=size))

    def ask(name: str, prompt: list[int], count: int, steps: int = 1000, counted: bool = True) -> None:
        params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
        core.add_request(EngineRequest(name, prompt, params, counted=counted))
        for _ in range(steps):
            core.step()

    first, other, third = list(range(12)), list(range(15, 27)), list(range(30, 42))
    ask("a", first, 9, steps=0)
    ask("a again", first, 9, counted=False)
    ask("aborted", other, 30, steps=12)
    core.abort_requests(["aborted"])
    ask("stopped", third, 30, steps=12)
    core.abort_requests(["stopped"], "stop")
    for name, prompt in (("b", other), ("c", third)):
        ask(name, prompt + [1] * 20, 1)
    core.shutdown()
    lines = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    assert [line["stop"] for line in lines] == ["length", "length", "abort", "stop", "length", "length"]
    assert [line.get("counted", True) for line in lines].count(False) == 1
    result = replay_of(core, path)
    assert result.stats.as_dict() == core.block_manager.stats.as_dict()
    assert result.summary()["requests"] == result.stats.as_dict()["requests"] == 5
    assert core.block_manager.answers.share < 1, "the stopped answer was followed, and not held"


def test_a_real_model_is_recorded(tmp_path):
    if not (Path(SHIPPED_MODEL) / "config.json").exists():
        pytest.skip("no model is shipped here")
    path = tmp_path / "trace.jsonl"
    config = EngineConfig(block_size=16, record_trace=str(path), max_model_len=512, num_kvcache_blocks=64)
    core = EngineCore(config)
    first = list(range(100, 190))
    serve(
        core, [(first, 30), ([*first, 5, 6, 7], 4), ([*first[:50], *range(40)], 4), ([*first[:50], *range(9, 60)], 4)]
    )
    result = replay_of(core, path)
    assert result.stats.as_dict() == core.block_manager.stats.as_dict()
    assert result.stats.cached_tokens > 0


def test_lines_hold_times_lengths_and_keys_and_no_tokens(tmp_path):
    path = tmp_path / "trace.jsonl"
    config = EngineConfig(
        model="recording", block_size=4, max_num_seqs=1, record_trace=str(path), cache_stats_interval=0
    )
    core = EngineCore(config, RecordingRunner(4, 40, 5, 96, None))
    assert not path.exists(), "the file is made when a request comes"
    for name in ("done", "aborted", "never"):
        core.add_request(EngineRequest(name, list(range(10)), SamplingParams(max_tokens=7, ignore_eos=True)))
    while len(core.scheduler.waiting) > 1:
        core.step()
    core.abort_requests(["aborted", "never"])
    core.shutdown()
    header, done, aborted = map(json.loads, path.read_text().splitlines())
    assert header == {"atom_trace": 1, "block_size": 4, "model": "recording"}
    assert set(done) == {"t", "end", "in", "out", "cached", "stop", "keys"}
    assert (done["in"], done["out"], done["cached"], done["stop"], len(done["keys"])) == (10, 7, 0, "length", 4)
    assert 0 <= done["t"] <= done["end"]
    assert (aborted["stop"], aborted["cached"]) == ("abort", 8)


def test_a_failure_to_write_ends_the_recording_and_nothing_else(tmp_path, caplog):
    path = tmp_path / "trace.jsonl"
    config = EngineConfig(model="recording", block_size=4, record_trace=str(path), cache_stats_interval=0)
    path.mkdir()
    serve(EngineCore(config, RecordingRunner(4, 40, 36, 96, None)), [([1] * 9, 3), ([2] * 9, 3)])
    assert caplog.text.count("recording to") == 1


def test_settings_that_cannot_record_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no block keys"):
        EngineConfig(record_trace=str(tmp_path / "t"), enable_prefix_caching=False)
    with pytest.raises(ConfigError, match="a folder that exists"):
        EngineConfig(record_trace=str(tmp_path / "no" / "t"))

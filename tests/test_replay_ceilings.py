"""What each placement reaches with unlimited room, against figures of a separate program, and what a replay costs."""

from __future__ import annotations

import resource

import pytest

from atom.replay.cost_model import CostModel
from atom.replay.geometry import read_geometry
from atom.replay.placements import parse_placement
from atom.replay.simulate import ReplaySettings, replay
from atom.replay.trace import Trace, prepare
from atom.replay.traces import read_trace
from tests.replay_traces import SHARED

AT_ONCE = CostModel(prefill_rate=1e9, decode_step=1e-6, restore_rate=1e18)
CONVERSATION, SYNTHETIC, AGENTS = "mooncake_conversation", "mooncake_synthetic", "claude_code_160"
slow = pytest.mark.slow

# Share of the ideal in percent, and checkpoints a request.
CEILINGS = [
    (SYNTHETIC, "prompt", 78.2, 0.40),
    (SYNTHETIC, "demand", 76.6, 0.10),
    (SYNTHETIC, "prompt+demand", 89.5, 0.43),
    (SYNTHETIC, "interval=8192", 83.2, 0.51),
    (SYNTHETIC, "prompt+demand+interval=8192", 98.7, 0.91),
    (CONVERSATION, "prompt", 93.7, 0.80),
    pytest.param(CONVERSATION, "prompt+demand", 96.0, 0.85, marks=slow),
    pytest.param(CONVERSATION, "interval=2048", 86.0, 3.48, marks=slow),
    pytest.param(CONVERSATION, "prompt+demand+interval=8192", 98.0, 1.51, marks=slow),
    pytest.param(AGENTS, "prompt", 99.3, 1.00, marks=slow),
    pytest.param(AGENTS, "demand", 96.3, 0.98, marks=slow),
    pytest.param(AGENTS, "prompt+demand", 99.5, 1.06, marks=slow),
    pytest.param(AGENTS, "interval=8192", 96.5, 0.53, marks=slow),
    pytest.param(AGENTS, "prompt+demand+interval=8192", 99.9, 1.59, marks=slow),
]


def read(name: str, answers: str) -> Trace:
    path = SHARED / f"{name}.jsonl.gz"
    if not path.exists():
        pytest.skip("the shared traces are not here")
    trace = read_trace(path)
    prepare(trace, answers)
    return trace


@pytest.mark.parametrize(("name", "rules", "share", "kept"), CEILINGS)
def test_ceilings(name, rules, share, kept):
    trace = read(name, "none")
    placement = parse_placement(rules, trace.block_size)
    settings = ReplaySettings(read_geometry("kimi-k3"), 500_000_000, 8, "default", placement, AT_ONCE)
    summary = replay(trace, settings).summary()
    assert summary["share_of_ideal"] * 100 == pytest.approx(share, abs=0.25)
    assert summary["checkpoints_per_request"] == pytest.approx(kept, abs=0.04)
    assert summary["lost_to_eviction"] == 0


@slow
def test_a_thousand_million_tokens_in_two_gib():
    trace = read(AGENTS, "echoed")
    settings = ReplaySettings(read_geometry("kimi-k3"), 4_000_000, 8, "default", parse_placement("default", 64))
    assert len(replay(trace, settings).outcomes) == 9386
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2 * 2**20

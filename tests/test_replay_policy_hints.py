"""What a policy is told: admissions, releases with how the answer ended, claims, the time, and what it may look at."""

from __future__ import annotations

import pytest

from atom.model_engine.eviction import Ending, GuessesFirst
from atom.replay import policies
from atom.replay.simulate import replay
from tests.replay_traces import make_trace, tiny_settings


class Spy(GuessesFirst):
    """Notes every hint, with the virtual time, and looks at each page it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple] = []

    def attach(self, pool) -> None:
        self.pool = pool

    def admitted(self, keys, matched, cached) -> None:
        self.seen.append(("admitted", round(self.pool.now(), 2), len(keys), matched, cached))

    def add_blocks(self, blocks, ending) -> None:
        depths = [self.pool.depth_of(block) for block in blocks]
        for block in blocks:
            key = self.pool.key_of(block)
            assert key is not None and self.pool.block_of(key) == block and not self.pool.is_live(block)
        self.seen.append(("released", round(self.pool.now(), 2), depths, ending))
        super().add_blocks(blocks, ending)

    def remove_blocks(self, blocks) -> None:
        self.seen.append(("claimed", round(self.pool.now(), 2), [self.pool.depth_of(block) for block in blocks]))
        super().remove_blocks(blocks)


@pytest.fixture(name="spy")
def spy_fixture(monkeypatch):
    made = []
    entry = policies.NamedPolicy(lambda context: made.append(Spy()) or made[-1])
    monkeypatch.setitem(policies.POLICIES, "spy", entry)
    return made


def test_hints(spy):
    trace = make_trace([(0, 0.0, "abc", 1, 1), (0, 100.0, "abcd", 1, 1)])
    trace.requests[0].ending, trace.requests[1].ending = Ending.TOOL_CALL, None
    replay(trace, tiny_settings(policy="spy"))
    # A step of 13 tokens takes 23 ms; releases come at its end.
    assert spy[0].seen == [
        ("admitted", 0.0, 3, 0, 0),
        ("released", 0.02, [2, 1, 0], Ending.TOOL_CALL),
        ("admitted", 100.0, 4, 3, 3),
        ("claimed", 100.0, [0, 1, 2]),
        ("released", pytest.approx(100.01, abs=0.011), [3, 2, 1, 0], None),
    ]


def test_a_preempted_request_has_not_ended(spy):
    trace = make_trace([(i, 0.0, name * 3, 1, 60) for i, name in enumerate("ab")], timed=True)
    for request in trace.requests:
        request.ending = Ending.END_TURN
    result = replay(trace, tiny_settings(24, "spy"))
    assert result.preemptions > 0
    endings = [entry[3] for entry in spy[0].seen if entry[0] == "released"]
    assert None in endings and endings.count(Ending.END_TURN) == 2

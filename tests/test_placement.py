"""Where chunks are cut and what is kept, as tables worked by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom.model_engine.placement import Placement, RungKind, plan_chunk, resumable_limit, snap_interval


@pytest.mark.parametrize(
    ("num_tokens", "limit"), [(1, 0), (15, 0), (16, 0), (17, 16), (31, 16), (32, 16), (33, 32), (3000, 2992)]
)
def test_resumable_limit(num_tokens: int, limit: int) -> None:
    assert resumable_limit(num_tokens, 16) == limit


@pytest.mark.parametrize(("asked", "step"), [(-1, None), (0, None), (63, None), (64, 64), (100, 64), (8192, 8192)])
def test_snap_interval(asked: int, step: int | None) -> None:
    assert snap_interval(asked, 64) == step


A, L = RungKind.ANCHOR, RungKind.INTERVAL
TABLE = [
    # interval, interior grid, start, tokens, budget -> end, rungs
    (None, None, 0, 10, 64, 8, [(8, A)]),
    (None, None, 8, 10, 64, 10, []),
    (None, None, 0, 8, 64, 4, [(4, A)]),
    (None, None, 0, 3, 64, 3, []),
    (None, None, 0, 40, 10, 8, []),
    (None, None, 8, 40, 10, 16, []),
    (None, None, 0, 40, 3, 3, []),
    (None, None, 3, 40, 3, 4, []),
    (16, None, 0, 40, 64, 16, [(16, L)]),
    (16, None, 16, 40, 64, 32, [(32, L)]),
    (16, None, 32, 40, 64, 36, [(36, A)]),
    (16, None, 0, 33, 64, 16, [(16, L)]),
    (16, None, 16, 33, 64, 32, [(32, A)]),
    (16, None, 0, 16, 64, 12, [(12, A)]),
    (16, None, 12, 16, 64, 16, []),
    (16, 4, 0, 40, 64, 40, [(16, L), (32, L), (36, A)]),
    (16, 8, 0, 40, 64, 36, [(16, L), (32, L), (36, A)]),
    (16, 8, 4, 40, 64, 16, [(16, L)]),
    (16, 4, 0, 40, 22, 20, [(16, L)]),
]


@pytest.mark.parametrize(("interval", "grid", "start", "tokens", "budget", "end", "rungs"), TABLE)
def test_plan_chunk(interval, grid, start, tokens, budget, end, rungs) -> None:
    chunk = plan_chunk(Placement(4, interval, grid), start, tokens, budget)
    assert (chunk.start, chunk.end) == (start, end)
    assert [(rung.position, rung.kind) for rung in chunk.rungs] == rungs


def test_disabled_places_nothing() -> None:
    assert plan_chunk(Placement(4, 16, enabled=False), 0, 40, 64).rungs == ()


@given(
    block=st.integers(1, 8),
    steps=st.integers(1, 4) | st.none(),
    grid=st.sampled_from([None, 1, 2, 3, 4, 8]),
    tokens=st.integers(1, 100),
    budget=st.integers(1, 50),
)
def test_every_rung_is_kept_once_and_legally(block, steps, grid, tokens, budget) -> None:
    """Chunks cover the prompt; the anchor and each ladder rung come out once, at a place the forward can give out."""
    placement = Placement(block, steps and steps * block, grid)
    position, kept = 0, []
    while position < tokens:
        chunk = plan_chunk(placement, position, tokens, budget)
        assert position < chunk.end <= min(tokens, position + budget)
        for rung in chunk.rungs:
            inside = rung.position < chunk.end
            assert rung.position % block == 0 and position < rung.position <= chunk.end
            assert not inside or (grid and (rung.position - position) % grid == 0)
            kept.append(rung.position)
        position = chunk.end
    anchor = resumable_limit(tokens, block)
    expected = {anchor} - {0}
    if placement.interval:
        expected |= set(range(placement.interval, tokens, placement.interval))
    assert kept == sorted(expected)

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


A, D, L = RungKind.ANCHOR, RungKind.DEMAND, RungKind.INTERVAL
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


DEMANDS = [
    # interval, interior grid, demand, interior, start -> end, rungs, cut; 40 tokens, budget 64, page 4
    (None, None, 20, None, 0, 20, [(20, D)], D),
    (None, None, 20, None, 20, 36, [(36, A)], A),
    (None, None, 20, None, 24, 36, [(36, A)], A),
    (None, None, 36, None, 0, 36, [(36, A)], A),
    (None, 4, 20, None, 0, 40, [(20, D), (36, A)], None),
    (None, 8, 20, None, 0, 20, [(20, D)], D),
    (None, 8, 20, None, 4, 40, [(20, D), (36, A)], None),
    (16, None, 16, None, 0, 16, [(16, D)], D),
    (16, None, 20, None, 0, 16, [(16, L)], L),
    (16, 4, 16, None, 0, 40, [(16, D), (32, L), (36, A)], None),
    (16, 4, 36, None, 0, 40, [(16, L), (32, L), (36, A)], None),
    # Places inside chunks: none, one, two; the next rung without one cuts the chunk.
    (16, 4, 20, 0, 0, 16, [(16, L)], L),
    (16, 4, 20, 1, 0, 20, [(16, L), (20, D)], D),
    (16, 4, 20, 2, 0, 32, [(16, L), (20, D), (32, L)], L),
    (16, 4, 20, 3, 0, 36, [(16, L), (20, D), (32, L), (36, A)], A),
    (16, 4, 20, 4, 0, 40, [(16, L), (20, D), (32, L), (36, A)], None),
]


@pytest.mark.parametrize(("interval", "grid", "demand", "interior", "start", "end", "rungs", "cut"), DEMANDS)
def test_demands_and_places_inside(interval, grid, demand, interior, start, end, rungs, cut) -> None:
    """A demand wins over the ladder and yields to the anchor; a chunk is cut where the forward cannot give the state out."""
    chunk = plan_chunk(Placement(4, interval, grid), start, 40, 64, demand, interior)
    assert (chunk.start, chunk.end, chunk.cut) == (start, end, cut)
    assert [(rung.position, rung.kind) for rung in chunk.rungs] == rungs


@pytest.mark.parametrize(("budget", "end", "rungs"), [(16, 16, [(16, L)]), (17, 16, [(16, L)]), (20, 20, [(16, L)])])
def test_a_rung_at_the_end_needs_no_place_inside_and_no_cut(budget: int, end: int, rungs: list) -> None:
    chunk = plan_chunk(Placement(4, 16, 4), 0, 40, budget, interior=int(end > 16))
    assert (chunk.end, chunk.cut) == (end, None)
    assert [(rung.position, rung.kind) for rung in chunk.rungs] == rungs


@pytest.mark.parametrize("grid", [None, 4])
def test_without_room_no_chunk_is_cut_and_each_rung_is_counted(grid: int | None) -> None:
    chunk = plan_chunk(Placement(4, 16, grid), 0, 40, 64, demand=20, room=False)
    assert (chunk.end, chunk.rungs, chunk.cut, chunk.passed_over) == (40, (), None, 4)
    assert plan_chunk(Placement(4, 16, grid), 0, 40, 64, demand=20).passed_over == 0


def test_disabled_places_nothing() -> None:
    chunk = plan_chunk(Placement(4, 16, enabled=False), 0, 40, 64, demand=20)
    assert (chunk.end, chunk.rungs, chunk.cut, chunk.passed_over) == (40, (), None, 0)


@given(
    block=st.integers(1, 8),
    steps=st.integers(1, 4) | st.none(),
    grid=st.sampled_from([None, 1, 2, 3, 4, 8]),
    tokens=st.integers(1, 100),
    budget=st.integers(1, 50),
    wanted=st.none() | st.integers(1, 100),
    interior=st.none() | st.integers(0, 3),
    data=st.data(),
)
def test_every_rung_is_kept_once_and_legally(block, steps, grid, tokens, budget, wanted, interior, data) -> None:
    """Chunks cover what is left of the prompt; the anchor, the demand and each ladder rung come out once.

    Each at a place the forward can give out, of the kind that comes first among anchor, demand, interval; a chunk is cut
    for its last rung alone; where nothing can be kept, as many are passed over.
    """
    placement = Placement(block, steps and steps * block, grid)
    anchor = resumable_limit(tokens, block)
    # A request resumes on a boundary and demands one further on, which a resend of it could match.
    first = data.draw(st.integers(0, anchor // block)) * block
    demand = None if wanted is None or first == anchor else first + block * (1 + wanted % ((anchor - first) // block))
    expected: dict[int, RungKind] = {}
    if placement.interval:
        expected |= dict.fromkeys(range(placement.interval, tokens, placement.interval), L)
    if demand is not None:
        expected[demand] = D
    if anchor:
        expected[anchor] = A
    position, kept, passed = first, [], 0
    while position < tokens:
        chunk = plan_chunk(placement, position, tokens, budget, demand, interior)
        assert position < chunk.end <= min(tokens, position + budget)
        inside = [rung for rung in chunk.rungs if rung.position < chunk.end]
        assert interior is None or len(inside) <= interior
        assert all(grid and (rung.position - position) % grid == 0 for rung in inside)
        assert all(rung.position % block == 0 and position < rung.position <= chunk.end for rung in chunk.rungs)
        if chunk.cut is not None:
            assert (chunk.rungs[-1].position, chunk.rungs[-1].kind) == (chunk.end, chunk.cut) and chunk.end < tokens
        kept += [(rung.position, rung.kind) for rung in chunk.rungs]
        position = chunk.end
    position = first
    while position < tokens:
        chunk = plan_chunk(placement, position, tokens, budget, demand, interior, room=False)
        assert chunk.rungs == () and chunk.cut is None
        passed, position = passed + chunk.passed_over, chunk.end
    assert kept == sorted((position, kind) for position, kind in expected.items() if position > first)
    assert passed == len(kept)

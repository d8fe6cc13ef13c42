"""Where to keep a checkpoint. Pure functions over positions in tokens; nothing here knows a pool."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class RungKind(Enum):
    """Why a checkpoint is kept."""

    ANCHOR = "anchor"
    DEMAND = "demand"
    INTERVAL = "interval"


@dataclass(frozen=True, slots=True)
class Rung:
    """A position, in tokens from the start of the request, where a checkpoint is to be kept."""

    position: int
    kind: RungKind


@dataclass(frozen=True, slots=True)
class Placement:
    """The rules of one engine.

    block_size: the grid of every rung. interval: tokens between ladder rungs, a multiple of block_size; None: no ladder.
    interior_grid: the forward gives out the state at ``chunk start + k * interior_grid``; None: only at a chunk's end.
    demand: keep a boundary that a request was refused at. prompts, answers: keep the ends of prompts, of answers.
    enabled: False keeps nothing.
    """

    block_size: int
    interval: int | None = None
    interior_grid: int | None = None
    demand: bool = True
    prompts: bool = True
    answers: bool = True
    enabled: bool = True


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens ``[start, end)`` to compute, and the rungs in ``(start, end]`` whose state this forward can give out.

    ``cut``: the rung that the chunk ends early for, if it does. ``passed_over``: rungs in it that nothing can be kept at.
    """

    start: int
    end: int
    rungs: tuple[Rung, ...]
    cut: RungKind | None = None
    passed_over: int = 0


def resumable_limit(num_tokens: int, block_size: int) -> int:
    """Last boundary that a resend of ``num_tokens`` tokens can resume at: the last token is always computed."""
    return (num_tokens - 1) // block_size * block_size


def snap_interval(interval_tokens: int, block_size: int) -> int | None:
    """The ladder's step on the block grid; None if there is no ladder: -1, or nothing left after snapping down."""
    return interval_tokens // block_size * block_size or None if interval_tokens > 0 else None


def plan_chunk(
    placement: Placement,
    start: int,
    num_tokens: int,
    budget: int,
    demand: int | None = None,
    interior: int | None = None,
    room: bool = True,
) -> Chunk:
    """The next chunk of a prefill of ``num_tokens`` tokens of which ``start`` are computed, at most ``budget`` long.

    The only place that decides where a chunk is cut and what is kept. ``demand``: the boundary that this request was
    refused at. ``interior``: how many states the forward has places for inside a chunk; None: any number. ``room``: False
    when nothing could be kept, so that no chunk is cut in vain. A chunk that does not finish the prompt ends on a
    boundary where it can, so that the next one starts on the grid; it always makes progress.
    """
    block = placement.block_size
    end = min(num_tokens, start + budget)
    if end < num_tokens and end // block * block > start:
        end = end // block * block
    if not placement.enabled:
        return Chunk(start, end, ())
    candidates = _rungs_between(placement, start, end, num_tokens, demand)
    if not room:
        return Chunk(start, end, (), passed_over=len(candidates))
    rungs: list[Rung] = []
    inside = 0
    for rung in candidates:
        if rung.position < end:
            grid = placement.interior_grid
            if grid is None or (rung.position - start) % grid or inside == interior:
                return Chunk(start, rung.position, (*rungs, rung), cut=rung.kind)
            inside += 1
        rungs.append(rung)
    return Chunk(start, end, tuple(rungs))


def _rungs_between(placement: Placement, start: int, end: int, num_tokens: int, demand: int | None) -> list[Rung]:
    """Rungs in ``(start, end]``, in order; where kinds meet, anchor goes before demand before interval. O(rungs)."""
    kinds: dict[int, RungKind] = {}
    if placement.interval is not None:
        step = placement.interval
        for position in range(start // step * step + step, min(end, num_tokens - 1) + 1, step):
            kinds[position] = RungKind.INTERVAL
    if demand is not None and start < demand <= end:
        kinds[demand] = RungKind.DEMAND
    anchor = resumable_limit(num_tokens, placement.block_size)
    if placement.prompts and start < anchor <= end:
        kinds[anchor] = RungKind.ANCHOR
    return [Rung(position, kinds[position]) for position in sorted(kinds)]

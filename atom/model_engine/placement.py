"""Where to keep a checkpoint. Pure functions over positions in tokens; nothing here knows a pool."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class RungKind(Enum):
    """Why a checkpoint is kept."""

    ANCHOR = "anchor"
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
    enabled: False keeps nothing.
    """

    block_size: int
    interval: int | None = None
    interior_grid: int | None = None
    enabled: bool = True


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens ``[start, end)`` to compute, and the rungs in ``(start, end]`` whose state this forward can give out."""

    start: int
    end: int
    rungs: tuple[Rung, ...]


def resumable_limit(num_tokens: int, block_size: int) -> int:
    """Last boundary that a resend of ``num_tokens`` tokens can resume at: the last token is always computed."""
    return (num_tokens - 1) // block_size * block_size


def snap_interval(interval_tokens: int, block_size: int) -> int | None:
    """The ladder's step on the block grid; None if there is no ladder: -1, or nothing left after snapping down."""
    return interval_tokens // block_size * block_size or None if interval_tokens > 0 else None


def plan_chunk(placement: Placement, start: int, num_tokens: int, budget: int) -> Chunk:
    """The next chunk of a prefill of ``num_tokens`` tokens of which ``start`` are computed, at most ``budget`` long.

    The only place that decides where a chunk is cut and what is kept. A chunk that does not finish the prompt ends on a
    boundary where it can, so that the next one starts on the grid; it always makes progress.
    """
    block = placement.block_size
    end = min(num_tokens, start + budget)
    if end < num_tokens and end // block * block > start:
        end = end // block * block
    rungs: list[Rung] = []
    for rung in _rungs_between(placement, start, end, num_tokens):
        grid = placement.interior_grid
        if rung.position == end or (grid is not None and (rung.position - start) % grid == 0):
            rungs.append(rung)
        else:
            return Chunk(start, rung.position, (*rungs, rung))
    return Chunk(start, end, tuple(rungs))


def _rungs_between(placement: Placement, start: int, end: int, num_tokens: int) -> list[Rung]:
    """Rungs in ``(start, end]``, in order; a position that is both anchor and ladder is an anchor. O(rungs)."""
    if not placement.enabled:
        return []
    anchor = resumable_limit(num_tokens, placement.block_size)
    rungs = []
    if placement.interval is not None:
        first = start // placement.interval * placement.interval + placement.interval
        rungs = [
            Rung(position, RungKind.INTERVAL)
            for position in range(first, end + 1, placement.interval)
            if position < num_tokens and position != anchor
        ]
    if start < anchor <= end:
        rungs.append(Rung(anchor, RungKind.ANCHOR))
        rungs.sort(key=lambda rung: rung.position)
    return rungs

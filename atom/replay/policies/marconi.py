"""Marconi (MLSys 2025), after the paper."""

from __future__ import annotations

from collections.abc import Sequence

from atom.model_engine.eviction_forest import Segment
from atom.model_engine.ids import BlockKey
from atom.model_engine.state_cache import Checkpoint
from atom.replay.policies.leaves import Leaves

BOOTSTRAP = 200
"""Admissions of the window that alpha is tuned on."""

ALPHAS = (0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0)


class Marconi(Leaves):
    """Gives up the node of least recency + alpha x FLOPs saved per byte, both scaled to [0, 1] over the candidates.

    Candidates have at most one child: a leaf with its state, or a state whose page has one child. FLOPs are the tokens
    behind the next state below. Alpha is 0 in the bootstrap window, then the one that would have hit most in it, replayed
    over whole paths. Its placement: the last decoded token and branch points, two states a request.
    """

    def __init__(self, pool_blocks: int) -> None:
        super().__init__()
        self.alpha = 0.0
        self._pool_blocks = pool_blocks
        self._going: Segment | None = None
        self._window: list[tuple[Sequence[BlockKey], float]] = []

    def admitted(self, keys: Sequence[BlockKey], matched: int, cached: int) -> None:
        if len(self._window) < BOOTSTRAP:
            self._window.append((tuple(keys), self.pool.now()))
            if len(self._window) == BOOTSTRAP:
                self.alpha = tune(self._window, self._pool_blocks, self.pool.pages_per_image)

    def choose(self, for_image: bool) -> Segment | Checkpoint:
        going = self._going
        if going is not None and going in self.leaves and going.end not in [end for end, _ in going.images]:
            # A node goes whole.
            return going
        leaves = {segment: (segment.released, *_saved(segment, self.pool.pages_per_image)) for segment in self.leaves}
        inner = {
            image: (self.held[image], end - below, max(self.pool.pages_per_image, 1))
            for segment in self.forest
            for (below, _), (end, image) in zip([(segment.base, None), *segment.images], segment.images, strict=False)
            if end < segment.end and end not in segment.joints
        }
        if not leaves and not inner:
            return self.oldest_image()
        return self._least(leaves, inner)

    def _least(
        self,
        leaves: dict[Segment, tuple[float, int, int]],
        inner: dict[Checkpoint, tuple[float, int, int]],
    ) -> Segment | Checkpoint:
        nodes = [*leaves.items(), *inner.items()]
        node = nodes[least([entry for _, entry in nodes], self.alpha)][0]
        if isinstance(node, Segment):
            self._going = node
        return node


def _saved(segment: Segment, pages_per_image: int) -> tuple[int, int]:
    """Blocks that the end of a leaf saves, and pages it takes; nothing saved where no state makes it resumable."""
    if not segment.images or segment.images[-1][0] < segment.end:
        return 0 if pages_per_image else 1, 1
    below = segment.images[-2][0] if len(segment.images) > 1 else segment.base
    return segment.end - below, segment.end - below + pages_per_image


def least(nodes: Sequence[tuple[float, int, int]], alpha: float) -> int:
    """Index of the node of least recency + alpha x efficiency; a node is (time of use, blocks saved, pages)."""
    times = [used for used, _, _ in nodes]
    worth = [saved / pages for _, saved, pages in nodes]
    first, span = min(times), (max(times) - min(times)) or 1.0
    most = max(worth) or 1.0
    return min(range(len(nodes)), key=lambda i: (times[i] - first) / span + alpha * worth[i] / most)


def tune(window: Sequence[tuple[Sequence[BlockKey], float]], pool_blocks: int, pages_per_image: int) -> float:
    """The alpha of most hits over ``window``, of requests by (block keys, time), whole paths being kept or given up."""
    return max(ALPHAS, key=lambda alpha: _hits(window, pool_blocks, pages_per_image, alpha))


def _hits(
    window: Sequence[tuple[Sequence[BlockKey], float]], pool_blocks: int, pages_per_image: int, alpha: float
) -> int:
    kept: dict[BlockKey, tuple[float, int, int]] = {}
    used = hits = 0
    for keys, now in window:
        known = next((i for i in range(len(keys), 0, -1) if keys[i - 1] in kept), 0)
        if known:
            hits += known
            used -= kept.pop(keys[known - 1])[2]
        if not keys:
            continue
        kept[keys[-1]] = (now, len(keys), len(keys) + pages_per_image)
        used += len(keys) + pages_per_image
        while used > pool_blocks and len(kept) > 1:
            others = [key for key in kept if key != keys[-1]]
            victim = others[least([kept[key] for key in others], alpha)]
            used -= kept.pop(victim)[2]
    return hits

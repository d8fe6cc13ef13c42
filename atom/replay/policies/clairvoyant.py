"""Foresight: what is next used furthest in the future goes first."""

from __future__ import annotations

from collections.abc import Sequence

from atom.model_engine.eviction_value import ByValue
from atom.model_engine.ids import BlockId
from atom.model_engine.state_cache import Checkpoint
from atom.replay.future import NEVER, Future


class Clairvoyant(ByValue):
    """Units and lone checkpoints as `default` sees them, in the order of their next use, the furthest first.

    A checkpoint is next used when its block is, unless the request then uses the next checkpoint above it, too. A strong
    heuristic, not a proven optimum: it does not weigh how much is saved.
    """

    def __init__(self, future: Future) -> None:
        super().__init__()
        self.future = future

    def pop(self) -> BlockId | Checkpoint:
        lost = self.units.unresumable()
        if lost is not None:
            return self.forest.pop_last(lost)
        leaf, leaf_use = None, -1.0
        for segment in self.forest:
            if segment.is_leaf:
                key = self.pool.key_of(segment.blocks[-1])
                use = self.future.next_use(key) if key is not None else NEVER
                if use > leaf_use:
                    leaf, leaf_use = segment, use
        image = self._useless(leaf_use)
        if image is not None:
            self.remove_image(image)
            return image
        if leaf is not None:
            return self.forest.pop_last(leaf)
        image = next(filter(_has_another, self.queues), None) or next(iter(self.queues), None)
        if image is None:
            raise KeyError("nothing may be given up")
        self.remove_image(image)
        return image

    def _useless(self, leaf_use: float) -> Checkpoint | None:
        """A checkpoint that its path does without, used after every leaf, if at all."""
        for image in self.queues:
            if _has_another(image) and self._use(image) >= leaf_use:
                return image
        return None

    def _use(self, image: Checkpoint) -> float:
        use = self.future.next_use(image.key)
        block = self.forest.block_of(image)
        owner = self.forest.owner(block) if block is not None else None
        if use == NEVER or owner is None:
            return use
        above = self._above(owner.images, image)
        return NEVER if above is not None and self.future.next_use(above.key) == use else use

    def _above(self, images: Sequence[tuple[int, Checkpoint]], image: Checkpoint) -> Checkpoint | None:
        found = False
        for _, other in images:
            if found:
                return other
            found = other is image
        return None


def _has_another(image: Checkpoint) -> bool:
    """Whether its path has another newest anchor, or never hung on it."""
    return image.superseded or image.is_guess

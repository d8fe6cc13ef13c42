"""What baselines share: the leaves of the forest of cached pages, and checkpoints in order of use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from atom.model_engine.eviction import Ending, EvictionPolicy, PoolView
from atom.model_engine.eviction_forest import Forest, Segment
from atom.model_engine.ids import BlockId
from atom.model_engine.state_cache import Checkpoint


class Leaves(EvictionPolicy):
    """Pages go from the ends of paths; a subclass says which leaf and which checkpoint, and when. O(leaves) a decision."""

    def __init__(self) -> None:
        self.leaves: dict[Segment, None] = {}
        self.held: OrderedDict[Checkpoint, float] = OrderedDict()

    def attach(self, pool: PoolView) -> None:
        self.pool = pool
        self.forest = Forest(pool, self._changed)

    def _changed(self, segment: Segment) -> None:
        if segment.is_leaf:
            self.leaves[segment] = None
        else:
            self.leaves.pop(segment, None)

    @property
    def num_blocks(self) -> int:
        return self.forest.num_blocks

    @property
    def num_images(self) -> int:
        return len(self.held)

    def add_block(self, block: BlockId) -> None:
        self.add_blocks((block,), None)

    def add_blocks(self, blocks: Sequence[BlockId], ending: Ending | None) -> None:
        self.forest.add(blocks)

    def remove_block(self, block: BlockId) -> None:
        self.remove_blocks((block,))

    def remove_blocks(self, blocks: Sequence[BlockId]) -> None:
        self.forest.remove(blocks)
        self._forget_gone()

    def withdrawn(self, block: BlockId) -> None:
        self.forest.orphan(block)

    def _forget_gone(self) -> None:
        for segment in [s for s in self.leaves if s not in self.forest]:
            del self.leaves[segment]

    def add_image(self, image: Checkpoint) -> None:
        self.held[image] = self.pool.now()
        self.forest.add_image(image)

    def remove_image(self, image: Checkpoint) -> None:
        del self.held[image]
        self.forest.remove_image(image)

    def supersede_image(self, image: Checkpoint) -> None:
        # To be superseded is no use: its place in the order stays.
        image.superseded = True

    def pop_leaf(self, segment: Segment) -> BlockId:
        """Give up the last page of a leaf."""
        block = self.forest.pop_last(segment)
        if not segment.blocks:
            del self.leaves[segment]
        return block

    def pop_image(self, image: Checkpoint) -> Checkpoint:
        """Give up a checkpoint and keep its page."""
        self.remove_image(image)
        return image

    def blocks(self) -> Iterator[BlockId]:
        for segment in self.forest:
            yield from segment.blocks

    def images(self) -> Iterator[Checkpoint]:
        return iter(self.held)

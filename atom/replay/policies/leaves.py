"""What baselines share: the leaves of the forest of cached pages, and checkpoints in order of use."""

from __future__ import annotations

from abc import abstractmethod
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

    @abstractmethod
    def choose(self, for_image: bool) -> Segment | Checkpoint:
        """The leaf that its next page goes from, or the checkpoint that goes and leaves its page. KeyError if there is none.

        A leaf stays the choice down to its next checkpoint or joint, however many of its pages are wanted.
        """

    def pop(self) -> BlockId | Checkpoint:
        victim = self.pop_many(1, for_image=False)
        return victim if isinstance(victim, Checkpoint) else victim[0]

    def pop_for_image(self) -> BlockId | Checkpoint:
        victim = self.pop_many(1, for_image=True)
        return victim if isinstance(victim, Checkpoint) else victim[0]

    def pop_many(self, limit: int, for_image: bool) -> Sequence[BlockId] | Checkpoint:
        victim = self.choose(for_image)
        if isinstance(victim, Checkpoint):
            self.remove_image(victim)
            return victim
        blocks = self.forest.pop_tail(victim, limit)
        if not victim.blocks:
            del self.leaves[victim]
        return blocks

    def oldest_image(self) -> Checkpoint:
        """The checkpoint used longest ago. KeyError if there is none."""
        if not self.held:
            raise KeyError("nothing may be given up")
        return next(iter(self.held))

    def blocks(self) -> Iterator[BlockId]:
        for segment in self.forest:
            yield from segment.blocks

    def images(self) -> Iterator[Checkpoint]:
        return iter(self.held)

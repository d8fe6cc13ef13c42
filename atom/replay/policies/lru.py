"""The least recently used first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from atom.model_engine.eviction import Ending, EvictionPolicy
from atom.model_engine.ids import BlockId
from atom.model_engine.state_cache import Checkpoint


class LRU(EvictionPolicy):
    """Pages by their own order of use and images by theirs; whichever head is older goes. Every operation is O(1).

    To be superseded is no use of an image.
    """

    def __init__(self) -> None:
        self._clock = 0
        self._blocks: OrderedDict[BlockId, int] = OrderedDict()
        self._images: OrderedDict[Checkpoint, int] = OrderedDict()

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def num_images(self) -> int:
        return len(self._images)

    def add_block(self, block: BlockId) -> None:
        self._clock += 1
        self._blocks[block] = self._clock

    def add_blocks(self, blocks: Sequence[BlockId], ending: Ending | None) -> None:
        self._clock += 1
        self._blocks.update(dict.fromkeys(blocks, self._clock))

    def remove_block(self, block: BlockId) -> None:
        del self._blocks[block]

    def add_image(self, image: Checkpoint) -> None:
        self._clock += 1
        self._images[image] = self._clock

    def remove_image(self, image: Checkpoint) -> None:
        del self._images[image]

    def supersede_image(self, image: Checkpoint) -> None:
        # Its place in the order stays.
        image.superseded = True

    def pop(self) -> BlockId | Checkpoint:
        if not self._images:
            return self._blocks.popitem(last=False)[0]
        image, used = next(iter(self._images.items()))
        if self._blocks and next(iter(self._blocks.values())) < used:
            return self._blocks.popitem(last=False)[0]
        del self._images[image]
        return image

    def blocks(self) -> Iterator[BlockId]:
        return iter(self._blocks)

    def images(self) -> Iterator[Checkpoint]:
        return iter(self._images)

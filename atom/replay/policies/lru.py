"""The least recently used first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice
from math import inf

from atom.model_engine.eviction import Ending, EvictionPolicy, PoolView
from atom.model_engine.ids import BlockId, BlockKey
from atom.model_engine.state_cache import Checkpoint


class LRU(EvictionPolicy):
    """Pages by their own order of use and images by theirs; whichever head is older goes. Every operation is O(1) a page.

    To be superseded is no use of an image.
    """

    def __init__(self) -> None:
        self._clock = 0
        self._blocks: OrderedDict[BlockId, int] = OrderedDict()
        self._images: OrderedDict[Checkpoint, int] = OrderedDict()
        self._image_keys: set[BlockKey | None] = set()

    def attach(self, pool: PoolView) -> None:
        self._pool = pool

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
        self._image_keys.add(image.key)

    def remove_image(self, image: Checkpoint) -> None:
        del self._images[image]
        self._image_keys.remove(image.key)

    def supersede_image(self, image: Checkpoint) -> None:
        # Its place in the order stays.
        image.superseded = True

    def pop(self) -> BlockId | Checkpoint:
        victim = self.pop_many(1, for_image=False)
        return victim if isinstance(victim, Checkpoint) else victim[0]

    def pop_many(self, limit: int, for_image: bool) -> Sequence[BlockId] | Checkpoint:
        image = next(iter(self._images), None)
        oldest_use = self._images[image] if image is not None else inf
        going = []
        for block, used in islice(self._blocks.items(), limit):
            if used > oldest_use:
                break
            going.append(block)
            if self._pool.key_of(block) in self._image_keys:
                # It takes its checkpoint along, whose pages may be all that is wanted.
                break
        for block in going:
            del self._blocks[block]
        if going:
            return going
        if image is None:
            raise KeyError("nothing may be given up")
        self.remove_image(image)
        return image

    def blocks(self) -> Iterator[BlockId]:
        return iter(self._blocks)

    def images(self) -> Iterator[Checkpoint]:
        return iter(self._images)

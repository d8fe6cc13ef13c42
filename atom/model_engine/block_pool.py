"""Pages: who holds them, which are findable under a key, which may be given up."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sequence
from itertools import filterfalse

from atom.model_engine.eviction import Ending, EvictionPolicy
from atom.model_engine.eviction_value import ByValue
from atom.model_engine.ids import BlockId, BlockKey
from atom.model_engine.state_cache import Checkpoint


class _Run:
    """Keys filed together: those of consecutive blocks of one path, the first behind ``base`` others, of which ``parent`` is
    the last."""

    __slots__ = ("base", "keys", "parent")

    def __init__(self, keys: Sequence[BlockKey], base: int, parent: BlockKey | None) -> None:
        self.keys = keys
        self.base = base
        self.parent = parent


class BlockPool:
    """Reference counts and the prefix index over ``num_blocks`` pages. It moves no bytes.

    A page is *vacant* (nobody wants its bytes), *live* (at least one request holds it), *cached* (nobody holds it, a key
    finds it) or part of an *image*. Vacant pages are handed out first; then ``policy`` says which cached page leaves the
    index or which image is given up. A request gives its pages back tail first, so a prefix outlives what was built on
    it. ``on_evict(keys)`` is called when keys leave the index.
    """

    def __init__(
        self,
        num_blocks: int,
        on_evict: Callable[[Sequence[BlockKey]], None] = lambda keys: None,
        policy: EvictionPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_blocks = num_blocks
        self.on_evict = on_evict
        self.policy: EvictionPolicy = policy or ByValue()
        self.now = clock
        # Set by whoever keeps images here: how many pages each takes, and how one is given up.
        self.pages_per_image = 0
        self.give_up_image: Callable[[Checkpoint], None] = _no_images
        self.num_image_pages = 0
        self._references = [0] * num_blocks
        self._keys: list[BlockKey | None] = [None] * num_blocks
        self._depths = [0] * num_blocks
        # Of a page that is not indexed, what it was filed with last.
        self._runs = [_Run((), 0, None)] * num_blocks
        self._index: dict[BlockKey, BlockId] = {}
        # Popped from the end: the lowest ids go first, so fresh pages tend to be neighbours.
        self._vacant = [BlockId(i) for i in range(num_blocks - 1, -1, -1)]
        self.policy.attach(self)

    @property
    def num_vacant(self) -> int:
        return len(self._vacant)

    @property
    def num_cached(self) -> int:
        return self.policy.num_blocks

    @property
    def num_live(self) -> int:
        return self.num_blocks - len(self._vacant) - self.policy.num_blocks - self.num_image_pages

    @property
    def num_available(self) -> int:
        """Pages that :meth:`take` could hand out now: vacant, cached, and those of images that nobody reads."""
        policy = self.policy
        return len(self._vacant) + policy.num_blocks + policy.num_images * self.pages_per_image

    @property
    def num_indexed(self) -> int:
        return len(self._index)

    def holds(self, key: BlockKey) -> bool:
        """Whether a page is findable under ``key``."""
        return key in self._index

    def key_of(self, block: BlockId) -> BlockKey | None:
        """The key that finds ``block``; None if none does."""
        return self._keys[block]

    def depth_of(self, block: BlockId) -> int:
        """How many blocks precede an indexed ``block`` in its prompt."""
        return self._depths[block]

    def parent_of(self, block: BlockId) -> BlockKey | None:
        """Key of the block before an indexed ``block`` in its prompt; None for the first."""
        run = self._runs[block]
        index = self._depths[block] - run.base
        return run.keys[index - 1] if index else run.parent

    def nearest_above(self, block: BlockId, known: Container[BlockKey]) -> BlockKey | None:
        """Of the keys before an indexed ``block`` in its prompt the last one that is in ``known``.

        O(blocks between) of a C loop, and a step for each run of blocks that was filed at once.
        """
        above: BlockId | None = block
        while above is not None:
            run = self._runs[above]
            before = run.keys[: self._depths[above] - run.base]
            found = next(filter(known.__contains__, reversed(before)), None)
            if found is not None or run.parent is None:
                return found
            if run.parent in known:
                return run.parent
            above = self._index.get(run.parent)
        return None

    def block_of(self, key: BlockKey) -> BlockId | None:
        """The page found under ``key``."""
        return self._index.get(key)

    def is_live(self, block: BlockId) -> bool:
        """Whether a request holds ``block``."""
        return self._references[block] > 0

    def longest_prefix(self, keys: Sequence[BlockKey], limit: int) -> list[BlockId]:
        """Pages of the longest indexed run ``keys[0], keys[1], ...`` of at most ``limit``. Changes nothing. O(run)."""
        found = map(self._index.get, keys[:limit] if limit < len(keys) else keys)
        return list(iter(found.__next__, None))

    def num_cached_among(self, blocks: Sequence[BlockId]) -> int:
        """How many of ``blocks`` nobody holds; claiming them takes that many from what is available."""
        return list(map(self._references.__getitem__, blocks)).count(0)

    def claim(self, blocks: Sequence[BlockId]) -> None:
        """Hold pages found by :meth:`longest_prefix` once more. O(blocks)."""
        references = self._references
        idle = list(filterfalse(references.__getitem__, blocks))
        if idle:
            self.policy.remove_blocks(idle)
        for block in blocks:
            references[block] += 1

    def take(self, count: int) -> list[BlockId]:
        """``count`` pages nobody else holds, their bytes undefined. ValueError if fewer are available. O(count)."""
        self._make_vacant(count)
        references, taken = self._references, self._pop_vacant(count)
        for block in taken:
            references[block] = 1
        return taken

    def take_for_image(self) -> list[BlockId]:
        """The pages of one image. ValueError if they are not available."""
        self._make_vacant(self.pages_per_image, for_image=True)
        self.num_image_pages += self.pages_per_image
        return self._pop_vacant(self.pages_per_image)

    def release_image(self, pages: Sequence[BlockId]) -> None:
        """An image's pages are vacant again."""
        self.num_image_pages -= len(pages)
        self._vacant.extend(reversed(pages))

    def withdraw(self, blocks: Sequence[BlockId]) -> None:
        """Take pages that one request alone holds out of the index: what is in them is not to be trusted. O(blocks)."""
        for block in blocks:
            key = self._keys[block]
            if key is not None and self._references[block] == 1:
                del self._index[key]
                self._keys[block] = None
                self.policy.withdrawn(block)
                self.on_evict((key,))

    def publish(
        self, blocks: Sequence[BlockId], keys: Sequence[BlockKey], depth: int = 0, parent: BlockKey | None = None
    ) -> int:
        """File computed live pages of one path, each under its key. O(blocks).

        ``keys``, which are kept and must not change, are as many. ``depth``: the blocks before the first one in its prompt,
        the last being ``parent``. Returns how many are found here now; where another page has a key, this one stays private.
        """
        index, key_of, depths, runs = self._index, self._keys, self._depths, self._runs
        run = _Run(keys, depth, parent)
        found = 0
        for block, key, holder in zip(blocks, keys, map(index.setdefault, keys, blocks), strict=True):
            if holder == block:
                found += 1
                key_of[block], depths[block], runs[block] = key, depth, run
            depth += 1
        return found

    def release(self, blocks: Sequence[BlockId], ending: Ending | None = None) -> None:
        """Give back one hold on each of ``blocks``, in the order of the request; the tail becomes the first to go.

        ``ending``: how the answer ended, for the policy.
        """
        references, keys, vacate = self._references, self._keys, self._vacant.append
        idle: list[BlockId] = []
        for block in reversed(blocks):
            left = references[block] = references[block] - 1
            if left == 0:
                if keys[block] is None:
                    vacate(block)
                else:
                    idle.append(block)
            elif left < 0:
                raise AssertionError(f"page {block} was given back more often than taken")
        if idle:
            self.policy.add_blocks(idle, ending)

    def clear(self) -> None:
        """Forget every key. Live pages stay with their holders, findable no more. O(pool)."""
        for block in list(self.policy.blocks()):
            self.policy.remove_block(block)
            self._vacant.append(block)
        for block in self._index.values():
            self._keys[block] = None
        self.on_evict(list(self._index))
        self._index.clear()

    def _make_vacant(self, count: int, for_image: bool = False) -> None:
        if count > self.num_available:
            raise ValueError(f"{count} pages wanted, {self.num_available} available")
        vacant, keys, index = self._vacant, self._keys, self._index
        while (missing := count - len(vacant)) > 0:
            victims = self.policy.pop_many(missing, for_image)
            if isinstance(victims, Checkpoint):
                self.give_up_image(victims)
                continue
            gone = [key for block in victims if (key := keys[block]) is not None]
            for block, key in zip(victims, gone, strict=True):
                keys[block] = None
                del index[key]
            vacant.extend(victims)
            self.on_evict(gone)

    def _pop_vacant(self, count: int) -> list[BlockId]:
        """``count`` of the vacant pages, the last one first."""
        if not count:
            return []
        taken = self._vacant[: -count - 1 : -1]
        del self._vacant[-count:]
        return taken

    def check(self) -> None:
        """AssertionError unless every page is in exactly one place (I5) and the index is consistent. O(pool)."""
        vacant, cached = set(self._vacant), set(self.policy.blocks())
        assert len(vacant) == len(self._vacant), "a page is vacant twice"
        in_images = 0
        for block in map(BlockId, range(self.num_blocks)):
            places = (block in vacant) + (block in cached) + (self._references[block] > 0)
            assert places <= 1, f"page {block} is in {places} places"
            in_images += places == 0
            key = self._keys[block]
            assert key is None or self._index.get(key) == block, f"page {block} is filed under a key that finds another"
            assert block not in cached or key is not None, f"page {block} is cached without a key"
            assert block not in vacant or key is None, f"page {block} is vacant but findable"
        assert in_images == self.num_image_pages, f"{in_images} pages are nowhere, {self.num_image_pages} are in images"
        assert len(self._index) == sum(key is not None for key in self._keys)


def _no_images(image: Checkpoint) -> None:
    raise AssertionError("no image is kept in this pool")

"""Cached pages as a forest of segments: runs of pages that were given back together, each hanging on the page before it."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator, Sequence

from atom.model_engine.eviction import PoolView
from atom.model_engine.ids import BlockId
from atom.model_engine.state_cache import Checkpoint


class Segment:
    """Consecutive cached pages of one path, the shallowest first.

    ``base``: blocks before the first one. ``parent``: the page before it, live or cached; None at the start of a prompt or
    where that page is gone. ``images``: (boundary in blocks, checkpoint) of those that may be given up, ascending. ``joints``:
    boundaries that other segments hang on. ``released``: when, in seconds. ``version``: changes
    whenever the segment does, or goes.
    """

    __slots__ = ("base", "blocks", "images", "joints", "parent", "released", "version")

    def __init__(self, blocks: list[BlockId], base: int, parent: BlockId | None, released: float) -> None:
        self.blocks = blocks
        self.base = base
        self.parent = parent
        self.released = released
        self.images: list[tuple[int, Checkpoint]] = []
        self.joints: list[int] = []
        self.version = 0

    @property
    def end(self) -> int:
        """Blocks from the start of the prompt to the end of the segment."""
        return self.base + len(self.blocks)

    @property
    def is_leaf(self) -> bool:
        """Whether nothing hangs on its last page."""
        return not self.joints or self.joints[-1] < self.base + len(self.blocks)

    @property
    def is_lost(self) -> bool:
        """Whether a page before it is gone, so that nobody finds it."""
        return self.parent is None and self.base > 0


class Forest:
    """The segments of a pool. ``changed(segment)`` is told whenever a segment's pages, images or joints are not what they were.

    Adding and removing costs O(pages) of C loops and O(1) a segment; taking the last page of a segment is O(1).
    """

    def __init__(self, pool: PoolView, changed: Callable[[Segment], None]) -> None:
        self.pool = pool
        self.changed = changed
        self.num_blocks = 0
        self._owner: dict[BlockId, Segment] = {}
        self._children: dict[BlockId, int] = {}
        self._image_at: dict[BlockId, Checkpoint] = {}
        self._block_of: dict[Checkpoint, BlockId] = {}
        self._segments: dict[Segment, None] = {}

    def __contains__(self, segment: object) -> bool:
        return segment in self._segments

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._segments)

    def owner(self, block: BlockId) -> Segment | None:
        """The segment of a cached page; None of any other."""
        segment = self._owner.get(block)
        if segment is None or segment not in self._segments:
            return None
        index = self.pool.depth_of(block) - segment.base
        return segment if 0 <= index < len(segment.blocks) and segment.blocks[index] == block else None

    # Pages

    def add(self, blocks: Sequence[BlockId]) -> list[Segment]:
        """Pages of one path, the deepest first; returns the segments made of them, likewise."""
        depth_of = self.pool.depth_of
        made = []
        start = 0
        while start < len(blocks):
            top = depth_of(blocks[start])
            stop = len(blocks)
            if top - depth_of(blocks[-1]) != stop - start - 1:
                # A page between them is filed as somebody else's: each run hangs on the page before it.
                stop = start + 1
                while stop < len(blocks) and depth_of(blocks[stop]) == top - (stop - start):
                    stop += 1
            made.append(self._add_run(list(reversed(blocks[start:stop]))))
            start = stop
        return made

    def _add_run(self, run: list[BlockId]) -> Segment:
        base = self.pool.depth_of(run[0])
        key = self.pool.parent_of(run[0])
        parent = self.pool.block_of(key) if key is not None else None
        segment = Segment(run, base, parent, self.pool.now())
        self._segments[segment] = None
        self.num_blocks += len(run)
        self._owner.update(dict.fromkeys(run, segment))
        depth_of = self.pool.depth_of
        segment.joints = [depth_of(block) + 1 for block in filter(self._children.__contains__, run)]
        images = self._image_at
        segment.images = [(depth_of(block) + 1, images[block]) for block in filter(images.__contains__, run)]
        if parent is not None:
            self._link(parent)
        self.changed(segment)
        return segment

    def remove(self, blocks: Sequence[BlockId]) -> None:
        """Pages of one path, the shallowest first. KeyError if one is not here."""
        index, blocks = 0, list(blocks)
        while index < len(blocks):
            segment = self.owner(blocks[index])
            if segment is None:
                raise KeyError(blocks[index])
            if segment.blocks[0] != blocks[index]:
                segment = self._split(segment, self.pool.depth_of(blocks[index]) - segment.base)
            count = min(len(segment.blocks), len(blocks) - index)
            if segment.blocks[:count] != blocks[index : index + count]:
                count = next(i for i in range(count) if segment.blocks[i] != blocks[index + i])
            self._behead(segment, count)
            index += count

    def _behead(self, segment: Segment, count: int) -> None:
        """The first ``count`` pages are no longer cached."""
        self.num_blocks -= count
        if segment.parent is not None:
            self._unlink(segment.parent)
        if count == len(segment.blocks):
            self._drop(segment)
            return
        segment.parent = segment.blocks[count - 1]
        del segment.blocks[:count]
        segment.base += count
        segment.joints = [joint for joint in segment.joints if joint > segment.base]
        segment.images = [entry for entry in segment.images if entry[0] > segment.base]
        self._link(segment.parent)
        self.changed(segment)

    def _split(self, segment: Segment, count: int) -> Segment:
        """Make a segment of its own of all but the first ``count`` pages, and return that."""
        tail = Segment(segment.blocks[count:], segment.base + count, segment.blocks[count - 1], segment.released)
        tail.joints = [joint for joint in segment.joints if joint > tail.base]
        tail.images = [entry for entry in segment.images if entry[0] > tail.base]
        segment.joints = [joint for joint in segment.joints if joint <= tail.base]
        segment.images = [entry for entry in segment.images if entry[0] <= tail.base]
        del segment.blocks[count:]
        self._segments[tail] = None
        self._owner.update(dict.fromkeys(tail.blocks, tail))
        assert tail.parent is not None
        self._link(tail.parent)
        self.changed(tail)
        return tail

    def pop_last(self, segment: Segment) -> BlockId:
        """Take the last page of a leaf, and the checkpoint filed under it out of ``images``."""
        block = segment.blocks.pop()
        self.num_blocks -= 1
        if segment.images and segment.images[-1][0] > segment.end:
            segment.images.pop()
            del self._block_of[self._image_at.pop(block)]
        self._shortened(segment)
        return block

    def pop_tail(self, segment: Segment, limit: int) -> list[BlockId]:
        """Take the last pages of a leaf, the deepest first: 1 to ``limit``, down to the next checkpoint or joint."""
        floor = max(
            segment.base, segment.images[-1][0] if segment.images else 0, segment.joints[-1] if segment.joints else 0
        )
        count = min(limit, segment.end - floor)
        if count <= 1:
            return [self.pop_last(segment)]
        taken = segment.blocks[: -count - 1 : -1]
        del segment.blocks[-count:]
        self.num_blocks -= count
        self._shortened(segment)
        return taken

    def _shortened(self, segment: Segment) -> None:
        """Its last pages were taken."""
        if segment.blocks:
            self.changed(segment)
            return
        self._drop(segment)
        if segment.parent is not None:
            self._unlink(segment.parent)

    def _drop(self, segment: Segment) -> None:
        del self._segments[segment]
        segment.version += 1

    def _link(self, parent: BlockId) -> None:
        count = self._children[parent] = self._children.get(parent, 0) + 1
        if count == 1 and (owner := self.owner(parent)) is not None:
            insort(owner.joints, self.pool.depth_of(parent) + 1)
            self.changed(owner)

    def _unlink(self, parent: BlockId) -> None:
        self._children[parent] -= 1
        if not self._children[parent]:
            del self._children[parent]
            if (owner := self.owner(parent)) is not None:
                owner.joints.remove(self.pool.depth_of(parent) + 1)
                self.changed(owner)

    def orphan(self, page: BlockId) -> None:
        """What hangs on ``page``, which is not cached, is lost: nobody finds the way to it. O(segments) if anything does."""
        if self._children.pop(page, None) is None:
            return
        for segment in [segment for segment in self._segments if segment.parent == page]:
            segment.parent = None
            self.changed(segment)

    # Images

    def add_image(self, image: Checkpoint) -> None:
        """A checkpoint may be given up from now on."""
        block = self.pool.block_of(image.key)
        if block is None:
            return
        self._image_at[block] = image
        self._block_of[image] = block
        if (owner := self.owner(block)) is not None:
            insort(owner.images, (self.pool.depth_of(block) + 1, image), key=lambda entry: entry[0])
            self.changed(owner)

    def remove_image(self, image: Checkpoint) -> None:
        """It may not be given up any more; no error if its page has just gone."""
        block = self._block_of.pop(image, None)
        if block is None:
            return
        del self._image_at[block]
        if (owner := self.owner(block)) is not None:
            owner.images = [entry for entry in owner.images if entry[1] is not image]
            self.changed(owner)

    def block_of(self, image: Checkpoint) -> BlockId | None:
        """The page that a checkpoint is filed under, as long as both may be given up or the page is held."""
        return self._block_of.get(image)

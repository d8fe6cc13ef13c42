"""BlockPool against a plain model of it: dictionaries and lists, checked after every step."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from atom.model_engine.block_pool import BlockPool
from atom.model_engine.ids import BlockId
from atom.model_engine.placement import RungKind
from atom.model_engine.state_cache import Checkpoint
from tests.test_eviction import Detached, NaivePolicy

SIZE = 8
IMAGE = 2
KEYS = st.binary(min_size=1, max_size=1)


class BlockPoolMachine(RuleBasedStateMachine):
    """Requests claim, take, publish and release, images come and go; the model knows who holds each page."""

    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[bytes] = []
        self.given_up: list[Checkpoint] = []
        self.pool = BlockPool(SIZE, on_evict=self.evicted.extend, policy=Detached())
        self.pool.pages_per_image = IMAGE
        self.pool.give_up_image = self.give_up
        self.tables: list[list[BlockId]] = []
        self.filed: dict[bytes, BlockId] = {}
        self.images: list[Checkpoint] = []
        self.idle = NaivePolicy()

    def give_up(self, image: Checkpoint) -> None:
        """What the owner of images does when the pool asks for one."""
        self.given_up.append(image)
        self.pool.release_image(image.pages)

    def held(self, block: BlockId) -> int:
        return sum(table.count(block) for table in self.tables)

    def in_use(self) -> set[BlockId]:
        """Pages that must not be handed out: live ones, and those of images that somebody reads."""
        read = [image for image in self.images if image not in self.idle.images]
        return {b for table in self.tables for b in table} | {b for image in read for b in image.pages}

    @property
    def vacant(self) -> int:
        return (
            SIZE - len({b for table in self.tables for b in table}) - len(self.idle.blocks) - len(self.images) * IMAGE
        )

    @property
    def available(self) -> int:
        return self.vacant + len(self.idle.blocks) + IMAGE * len(self.idle.images)

    def lose(self, count: int) -> None:
        """The model makes ``count`` pages vacant; what was lost is what the pool said it lost, in that order."""
        keys, images = list(self.evicted), list(self.given_up)
        self.evicted.clear()
        self.given_up.clear()
        vacant = self.vacant
        while vacant < count:
            victim = self.idle.victim()
            self.idle.drop(victim)
            if isinstance(victim, Checkpoint):
                assert images.pop(0) is victim
                self.images.remove(victim)
                vacant += IMAGE
            else:
                assert self.filed.pop(keys.pop(0)) == victim
                vacant += 1
        assert not keys and not images, "more was given up than was needed"

    @rule(count=st.integers(1, 4))
    def take(self, count: int) -> None:
        if count > self.available:
            with pytest.raises(ValueError, match=f"{count} pages wanted, {self.available} available"):
                self.pool.take(count)
            return
        busy = self.in_use()
        taken = self.pool.take(count)
        assert len(set(taken)) == count and not busy & set(taken)
        self.lose(count)
        self.tables.append(list(taken))

    @rule(kind=st.sampled_from(RungKind))
    def take_for_image(self, kind: RungKind) -> None:
        if self.available < IMAGE:
            with pytest.raises(ValueError, match="available"):
                self.pool.take_for_image()
            return
        busy = self.in_use()
        pages = self.pool.take_for_image()
        assert len(set(pages)) == IMAGE and not busy & set(pages)
        self.lose(IMAGE)
        self.images.append(Checkpoint(b"image", kind, pages=list(pages)))

    @precondition(lambda self: self.images)
    @rule(data=st.data())
    def publish_or_pin(self, data) -> None:
        """What nobody reads may be given up; what somebody reads may not."""
        image = data.draw(st.sampled_from(self.images))
        if image in self.idle.images:
            self.pool.policy.remove_image(image)
            self.idle.drop(image)
        else:
            self.pool.policy.add_image(image)
            self.idle.use(image)

    @precondition(lambda self: len(self.images) > len(self.idle.images))
    @rule(data=st.data())
    def release_image(self, data) -> None:
        image = data.draw(st.sampled_from([image for image in self.images if image not in self.idle.images]))
        self.images.remove(image)
        self.pool.release_image(image.pages)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), key=KEYS)
    def publish(self, data, key: bytes) -> None:
        block = data.draw(st.sampled_from(data.draw(st.sampled_from(self.tables))))
        if block in self.filed.values():
            return
        accepted = self.pool.publish((block,), (key,)) == 1
        assert accepted == (key not in self.filed)
        if accepted:
            self.filed[key] = block

    @rule(keys=st.lists(KEYS, max_size=4, unique=True), limit=st.integers(0, 4))
    def claim(self, keys: list[bytes], limit: int) -> None:
        found = self.pool.longest_prefix(keys, limit)
        expected = []
        for key in keys[:limit]:
            if key not in self.filed:
                break
            expected.append(self.filed[key])
        assert found == expected
        assert self.pool.num_cached_among(found) == sum(self.held(b) == 0 for b in set(found))
        self.pool.claim(found)
        for block in found:
            self.idle.drop(block)
        if found:
            self.tables.append(list(found))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)
        for block in reversed(table):
            if not self.held(block) and block in self.filed.values():
                self.idle.use(block)

    @rule()
    def clear(self) -> None:
        self.pool.clear()
        assert sorted(self.evicted) == sorted(self.filed) and not self.given_up
        self.evicted.clear()
        self.filed.clear()
        for block in self.idle.blocks:
            self.idle.drop(block)

    @invariant()
    def conserved(self) -> None:
        self.pool.check()
        assert self.pool.num_live == sum(self.held(b) > 0 for b in map(BlockId, range(SIZE)))
        assert self.pool.num_cached == len(self.idle.blocks)
        assert self.pool.num_image_pages == IMAGE * len(self.images)
        assert (self.pool.num_vacant, self.pool.num_available) == (self.vacant, self.available)
        assert self.pool.num_indexed == len(self.filed)
        assert all(self.pool.holds(key) for key in self.filed)


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_release_too_often_is_refused() -> None:
    pool = BlockPool(2)
    table = pool.take(1)
    pool.release(table)
    with pytest.raises(AssertionError, match="more often"):
        pool.release(table)


def test_tail_goes_first() -> None:
    """A prefix outlives what was built on it."""
    lost: list[bytes] = []
    pool = BlockPool(3, on_evict=lost.extend)
    table = pool.take(3)
    for block, key in zip(table, (b"a", b"ab", b"abc"), strict=True):
        pool.publish((block,), (key,))
    pool.release(table)
    pool.take(2)
    assert lost == [b"abc", b"ab"]


PIECES = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=5)


@given(st.lists(PIECES, min_size=1, max_size=6), st.sets(st.text("ab", min_size=1, max_size=9)))
def test_every_indexed_page_knows_the_way_to_the_root(paths: list[list[str]], known: set[str]) -> None:
    """Paths share prefixes and are filed in pieces, as chunks of a prompt and blocks of an answer are."""
    pool = BlockPool(200)
    for pieces in paths:
        path = ""
        for piece in pieces:
            keys = [(path + piece[: i + 1]).encode() for i in range(len(piece))]
            pool.publish(pool.take(len(keys)), keys, len(path), path.encode() or None)
            path += piece
    for path in {"".join(pieces)[:n] for pieces in paths for n in range(1, 21)}:
        block = pool.block_of(path.encode())
        assert block is not None and pool.depth_of(block) == len(path) - 1
        assert pool.parent_of(block) == (path[:-1].encode() or None)
        above = [path[:n].encode() for n in range(len(path) - 1, 0, -1) if path[:n] in known]
        assert pool.nearest_above(block, {key.encode() for key in known}) == next(iter(above), None)


def test_fresh_pages_are_neighbours() -> None:
    """An image in a fresh pool is one range of pages, so that it is copied at once."""
    pool = BlockPool(9)
    pool.pages_per_image = 4
    assert (pool.take(2), pool.take_for_image()) == ([0, 1], [2, 3, 4, 5])


def test_an_image_in_a_pool_that_keeps_none_is_a_fault() -> None:
    pool = BlockPool(1)
    pool.policy.add_image(Checkpoint(b"k", RungKind.ANCHOR))
    pool.pages_per_image = 1
    pool.take(1)
    with pytest.raises(AssertionError, match="no image"):
        pool.take(1)

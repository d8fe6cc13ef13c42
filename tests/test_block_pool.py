"""BlockPool against a plain model of it: dictionaries and sets, checked after every step."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from atom.model_engine.block_pool import BlockPool

SIZE = 7


class BlockPoolMachine(RuleBasedStateMachine):
    """Requests claim, take, publish and release; the model knows holders and keys by page."""

    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[bytes] = []
        self.pool = BlockPool(SIZE, on_evict=self.evicted.append)
        self.tables: list[list[int]] = []
        self.filed: dict[bytes, int] = {}
        self.released: list[int] = []

    def held(self, block: int) -> int:
        return sum(table.count(block) for table in self.tables)

    def forget_evicted(self) -> None:
        for key in self.evicted:
            block = self.filed.pop(key)
            assert self.held(block) == 0, "a live page was evicted"
        self.evicted.clear()

    @rule(count=st.integers(1, 4))
    def take(self, count: int) -> None:
        available = sum(self.held(b) == 0 for b in range(SIZE))
        if count > available:
            with pytest.raises(ValueError, match="available"):
                self.pool.take(count)
            return
        vacant = self.pool.num_vacant
        cached = [b for b in self.released if self.held(b) == 0 and b in self.filed.values()]
        taken = self.pool.take(count)
        assert len(set(taken)) == count and all(self.held(b) == 0 for b in taken)
        lost = [self.filed[key] for key in self.evicted]
        assert len(lost) == max(0, count - vacant), "vacant pages go before cached ones"
        assert lost == cached[: len(lost)], "the longest unused goes first"
        self.forget_evicted()
        self.tables.append(list(taken))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), key=st.binary(min_size=1, max_size=1))
    def publish(self, data, key: bytes) -> None:
        block = data.draw(st.sampled_from(data.draw(st.sampled_from(self.tables))))
        if block in self.filed.values():
            return
        accepted = self.pool.publish(block, key)
        assert accepted == (key not in self.filed)
        if accepted:
            self.filed[key] = block

    @rule(keys=st.lists(st.binary(min_size=1, max_size=1), max_size=4, unique=True), limit=st.integers(0, 4))
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
        if found:
            self.tables.append(list(found))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)
        for block in reversed(table):
            if block in self.released:
                self.released.remove(block)
            self.released.append(block)

    @rule()
    def clear(self) -> None:
        self.pool.clear()
        assert sorted(self.evicted) == sorted(self.filed)
        self.evicted.clear()
        self.filed.clear()

    @invariant()
    def conserved(self) -> None:
        self.pool.check()
        cached = sum(self.held(b) == 0 for b in self.filed.values())
        assert self.pool.num_live == sum(self.held(b) > 0 for b in range(SIZE))
        assert self.pool.num_cached == cached
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
    pool = BlockPool(3, on_evict=lost.append)
    table = pool.take(3)
    for block, key in zip(table, (b"a", b"ab", b"abc"), strict=True):
        pool.publish(block, key)
    pool.release(table)
    pool.take(2)
    assert lost == [b"abc", b"ab"]

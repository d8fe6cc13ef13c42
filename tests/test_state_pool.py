"""StateSlotPool: random life cycles against a plain model, and the corners that random walks rarely meet."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from atom.model_engine.state_pool import StateSlotPool

SIZE = 4
KEYS = [bytes([i]) for i in range(6)]


class StatePoolMachine(RuleBasedStateMachine):
    """The model: what each key's checkpoint is, who is pinned, which slots are live, in order of use."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = StateSlotPool(SIZE)
        self.live: list[int] = []
        self.reserved: list = []
        self.ready: dict[bytes, object] = {}
        self.pinned: list = []

    def pins(self, checkpoint) -> int:
        return sum(pinned is checkpoint for pinned in self.pinned)

    def in_use(self) -> set[int]:
        """Slots that must not be handed out."""
        return {*self.live, *(c.slot for c in self.reserved), *(c.slot for c in self.pinned)}

    def unpinned(self) -> list[bytes]:
        return [key for key, checkpoint in self.ready.items() if not self.pins(checkpoint)]

    def lose_victim(self, vacant: int) -> None:
        """Without a vacant slot, the longest unused checkpoint that nobody reads was given up."""
        if not vacant:
            del self.ready[self.unpinned()[0]]

    @rule()
    def take_live(self) -> None:
        vacant, can = self.pool.num_vacant, self.pool.can_take_live()
        assert can == bool(vacant or self.unpinned())
        before = self.in_use()
        slot = self.pool.take_live()
        assert (slot is not None) == can
        if slot is not None:
            assert slot not in before
            self.lose_victim(vacant)
            self.live.append(slot)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release_live(self, data) -> None:
        slot = data.draw(st.sampled_from(self.live))
        self.live.remove(slot)
        self.pool.release_live(slot)

    @rule(key=st.sampled_from(KEYS))
    def reserve(self, key: bytes) -> None:
        vacant, before, dropped = self.pool.num_vacant, self.in_use(), self.pool.fates.dropped
        known = key in self.ready or any(c.key == key for c in self.reserved)
        room = bool(vacant or self.unpinned())
        checkpoint = self.pool.reserve(key)
        assert (checkpoint is not None) == (not known and room)
        assert self.pool.fates.dropped - dropped == (not known and not room)
        if checkpoint is not None:
            assert checkpoint.slot not in before
            self.lose_victim(vacant)
            self.reserved.append(checkpoint)
        elif key in self.ready and not self.pins(self.ready[key]):
            self.ready[key] = self.ready.pop(key)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), good=st.booleans())
    def finish(self, data, good: bool) -> None:
        checkpoint = self.reserved.pop(data.draw(st.integers(0, len(self.reserved) - 1)))
        if good:
            self.pool.publish(checkpoint)
            self.ready[checkpoint.key] = checkpoint
        else:
            self.pool.cancel(checkpoint)

    @precondition(lambda self: self.ready)
    @rule(data=st.data())
    def pin(self, data) -> None:
        key = data.draw(st.sampled_from(sorted(self.ready)))
        checkpoint = self.pool.pin(key)
        assert checkpoint is self.ready[key]
        self.pinned.append(checkpoint)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data) -> None:
        checkpoint = self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1)))
        self.pool.unpin(checkpoint)
        if self.ready.get(checkpoint.key) is checkpoint and not self.pins(checkpoint):
            self.ready[checkpoint.key] = self.ready.pop(checkpoint.key)

    @rule(key=st.sampled_from(KEYS))
    def adopt(self, key: bytes) -> None:
        free = key in self.unpinned()
        slot = self.pool.adopt(key)
        assert slot == (self.ready.pop(key).slot if free else None)
        if slot is not None:
            self.live.append(slot)

    @rule(key=st.sampled_from(KEYS))
    def orphan(self, key: bytes) -> None:
        self.pool.orphan(key)
        self.ready.pop(key, None)

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=5), limit=st.integers(0, 6))
    def rightmost(self, keys: list[bytes], limit: int) -> None:
        found = [n for n in range(1, min(limit, len(keys)) + 1) if keys[n - 1] in self.ready]
        assert self.pool.rightmost(keys, limit) == max(found, default=0)

    @invariant()
    def conserved(self) -> None:
        self.pool.check()
        assert self.pool.ready_slots() == {key: checkpoint.slot for key, checkpoint in self.ready.items()}
        assert (self.pool.num_live, self.pool.num_reserved) == (len(self.live), len(self.reserved))
        held = len(self.in_use() | {c.slot for c in self.ready.values()})
        assert self.pool.num_vacant == SIZE - held


TestStatePool = StatePoolMachine.TestCase
TestStatePool.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)


def test_orphan_keeps_its_bytes_until_read() -> None:
    """A block leaves the index while two restores read its checkpoint: the slot goes back with the last of them."""
    pool = StateSlotPool(1)
    checkpoint = pool.reserve(b"k")
    pool.publish(checkpoint)
    readers = [pool.pin(b"k"), pool.pin(b"k")]
    pool.orphan(b"k")
    assert pool.rightmost([b"k"], 1) == 0
    for reader in readers:
        assert pool.take_live() is None
        pool.unpin(reader)
    assert pool.take_live() == checkpoint.slot


def test_beside_counts_the_source_itself() -> None:
    pool = StateSlotPool(1)
    pool.publish(pool.reserve(b"k"))
    assert pool.can_take_live() and not pool.can_take_live_beside(b"k")

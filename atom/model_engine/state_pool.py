"""Slots: live states of running requests, and checkpoints kept as slots."""

from __future__ import annotations

from collections.abc import Sequence

from atom.model_engine.eviction import LeastRecentlyUsed
from atom.model_engine.ids import BlockKey, SlotId
from atom.model_engine.state_cache import Checkpoint, CheckpointFates


class StateSlotPool:
    """``num_slots`` slots, each vacant, live (one request's state), reserved (being written) or a checkpoint.

    A vacant slot goes first, then the longest unused checkpoint that nobody reads: live work never waits for a finished
    checkpoint (I6). It fulfils :class:`~atom.model_engine.state_cache.StateCache` and moves no bytes.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.fates = CheckpointFates()
        # Popped from the end: the lowest ids go first.
        self._vacant = [SlotId(i) for i in range(num_slots - 1, -1, -1)]
        self._live: set[SlotId] = set()
        self._checkpoints: dict[BlockKey, Checkpoint] = {}
        self._evictable: LeastRecentlyUsed[BlockKey] = LeastRecentlyUsed()
        # Pinned checkpoints whose key is gone; they hold their slot until the last reader is done.
        self._orphans: set[Checkpoint] = set()
        self._reserved = 0

    @property
    def num_vacant(self) -> int:
        return len(self._vacant)

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def num_reserved(self) -> int:
        return self._reserved

    @property
    def num_checkpoints(self) -> int:
        """Checkpoints that are findable."""
        return len(self._checkpoints) - self._reserved

    def take_live(self) -> SlotId | None:
        """A slot for a request's state, its bytes undefined; None if every slot is live, reserved or pinned."""
        slot = self._take()
        if slot is not None:
            self._live.add(slot)
        return slot

    def can_take_live(self) -> bool:
        return bool(self._vacant) or bool(self._evictable)

    def can_take_live_beside(self, key: BlockKey) -> bool:
        """Whether :meth:`take_live` finds a slot other than that of the checkpoint under ``key``."""
        return bool(self._vacant) or len(self._evictable) - (key in self._evictable) > 0

    def adopt(self, key: BlockKey) -> SlotId | None:
        """Turn an unpinned checkpoint into a request's live slot, its bytes as they are; the checkpoint is gone.

        The way to resume when no other slot is free. None if the checkpoint is being read.
        """
        if key not in self._evictable:
            return None
        self._evictable.remove(key)
        slot = self._checkpoints.pop(key).slot
        self._live.add(slot)
        self.fates.read_back += 1
        self.fates.evicted += 1
        return slot

    def release_live(self, slot: SlotId) -> None:
        """Give back a request's slot. KeyError if it was not live."""
        self._live.remove(slot)
        self._vacant.append(slot)

    def rightmost(self, keys: Sequence[BlockKey], limit: int) -> int:
        checkpoints = self._checkpoints
        if not checkpoints:
            return 0
        for count in range(min(limit, len(keys)), 0, -1):
            checkpoint = checkpoints.get(keys[count - 1])
            if checkpoint is not None and checkpoint.ready:
                return count
        return 0

    def reserve(self, key: BlockKey) -> Checkpoint | None:
        kept = self._checkpoints.get(key)
        if kept is not None:
            if key in self._evictable:
                self._evictable.add(key)
            return None
        slot = self._take()
        if slot is None:
            self.fates.dropped += 1
            return None
        checkpoint = self._checkpoints[key] = Checkpoint(key, slot)
        self._reserved += 1
        return checkpoint

    def publish(self, checkpoint: Checkpoint) -> None:
        assert not checkpoint.ready, "published twice"
        checkpoint.ready = True
        self._reserved -= 1
        self._evictable.add(checkpoint.key)
        self.fates.kept += 1

    def cancel(self, checkpoint: Checkpoint) -> None:
        assert not checkpoint.ready, "a published checkpoint cannot be cancelled"
        del self._checkpoints[checkpoint.key]
        self._reserved -= 1
        self._vacant.append(checkpoint.slot)

    def pin(self, key: BlockKey) -> Checkpoint:
        checkpoint = self._checkpoints[key]
        assert checkpoint.ready, "only a published checkpoint can be read"
        if not checkpoint.pins:
            self._evictable.remove(key)
        checkpoint.pins += 1
        self.fates.read_back += 1
        return checkpoint

    def unpin(self, checkpoint: Checkpoint) -> None:
        assert checkpoint.pins > 0, "unpinned more often than pinned"
        checkpoint.pins -= 1
        if checkpoint.pins:
            return
        if checkpoint.filed:
            self._evictable.add(checkpoint.key)
        else:
            self._orphans.remove(checkpoint)
            self._vacant.append(checkpoint.slot)

    def orphan(self, key: BlockKey) -> None:
        checkpoint = self._checkpoints.get(key)
        if checkpoint is None or not checkpoint.ready:
            # A reservation belongs to a request that is computing this block again: it decides at its publish.
            return
        del self._checkpoints[key]
        checkpoint.filed = False
        self.fates.orphaned += 1
        if checkpoint.pins:
            self._orphans.add(checkpoint)
        else:
            self._evictable.remove(key)
            self._vacant.append(checkpoint.slot)

    def _take(self) -> SlotId | None:
        if self._vacant:
            return self._vacant.pop()
        if not self._evictable:
            return None
        self.fates.evicted += 1
        checkpoint = self._checkpoints.pop(self._evictable.pop())
        checkpoint.filed = False
        return checkpoint.slot

    def ready_slots(self) -> dict[BlockKey, SlotId]:
        """Where each findable checkpoint is. O(checkpoints); for checks and reports."""
        return {key: checkpoint.slot for key, checkpoint in self._checkpoints.items() if checkpoint.ready}

    def check(self) -> None:
        """AssertionError unless every slot is in exactly one place (I5). O(pool)."""
        held = [checkpoint.slot for checkpoint in (*self._checkpoints.values(), *self._orphans)]
        places = sorted([*self._vacant, *self._live, *held])
        assert places == list(range(self.num_slots)), f"slots are not conserved: {places}"
        assert self._reserved == sum(not checkpoint.ready for checkpoint in self._checkpoints.values())
        for key, checkpoint in self._checkpoints.items():
            assert (key in self._evictable) == (checkpoint.ready and not checkpoint.pins)

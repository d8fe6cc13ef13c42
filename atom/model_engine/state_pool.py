"""Slots: live states of running requests, and checkpoints kept as slots."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from atom.model_engine.checkpoint_index import CheckpointIndex
from atom.model_engine.eviction import EvictionPolicy, GuessesFirst
from atom.model_engine.ids import BlockKey, SlotId
from atom.model_engine.placement import RungKind
from atom.model_engine.state_cache import Checkpoint, CheckpointStatus


class StateSlotPool(CheckpointIndex):
    """``num_slots`` slots, each vacant, live (a request's state or scratch), reserved or a checkpoint.

    A vacant slot goes first, the lowest index first; then the checkpoint that the policy names and nobody reads: live
    work never waits for a finished checkpoint (I6). It fulfils :class:`~atom.model_engine.state_cache.StateCache`, keeping
    each checkpoint as one slot, and moves no bytes. Where checkpoints are images it holds live slots alone.
    """

    def __init__(self, num_slots: int) -> None:
        super().__init__()
        self.num_slots = num_slots
        self._vacant = [SlotId(i) for i in range(num_slots)]
        self._live: set[SlotId] = set()
        self._policy = GuessesFirst()

    @property
    def num_vacant(self) -> int:
        return len(self._vacant)

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def num_available(self) -> int:
        """Slots that :meth:`take_live` could hand out now."""
        return len(self._vacant) + self._policy.num_images

    # Live slots

    def take_live(self, count: int = 1) -> list[SlotId] | None:
        """``count`` slots, not adjacent, their bytes undefined; None, and nothing taken, if fewer are available."""
        if count > self.num_available:
            return None
        slots = [self._take() for _ in range(count)]
        self._live.update(slots)
        return slots

    def release_live(self, slots: Sequence[SlotId]) -> None:
        """Give back live slots. KeyError if one was not live."""
        for slot in slots:
            self._live.remove(slot)
            heapq.heappush(self._vacant, slot)

    def adopt(self, checkpoint: Checkpoint) -> SlotId | None:
        """Turn an unpinned checkpoint into a live slot, its bytes as they are; the checkpoint is gone.

        The way to resume when no other slot is free. None if the checkpoint is being read.
        """
        if not self.is_free(checkpoint):
            return None
        slot = checkpoint.slot
        assert slot is not None
        self.use_up(checkpoint)
        self._live.add(slot)
        return slot

    def hand_over(self, checkpoint: Checkpoint, live: SlotId) -> SlotId:
        """Fork: the live slot, whose bytes the checkpoint wants, becomes the checkpoint's; returns the reserved one.

        The request goes on in the returned slot, and its next forward reads the old one: pin it until then.
        """
        assert checkpoint.status is CheckpointStatus.RESERVED and checkpoint.slot is not None
        self._live.remove(live)
        fresh, checkpoint.slot = checkpoint.slot, live
        self._live.add(fresh)
        return fresh

    # Checkpoints

    @property
    def policy(self) -> EvictionPolicy:
        return self._policy

    def has_room(self) -> bool:
        return self.num_available > 0

    def _take_place(self, key: BlockKey, kind: RungKind) -> Checkpoint:
        return Checkpoint(key, kind, slot=self._take())

    def _give_back(self, checkpoint: Checkpoint) -> None:
        assert checkpoint.slot is not None
        heapq.heappush(self._vacant, checkpoint.slot)

    # Size

    def resize(self, num_slots: int) -> dict[SlotId, SlotId]:
        """Grow or shrink at the top; returns where the states of slots that go have to be moved, lower slots all.

        A live, reserved or pinned slot at the top moves to a vacant one or takes the place of a checkpoint that may go;
        a checkpoint at the top moves to a vacant one or is given up. Only between steps. ValueError, and nothing
        changed, if more slots than ``num_slots`` cannot go. O(slots that go + checkpoints).
        """
        bound = self.num_slots - self.num_available
        if num_slots < max(bound, 1):
            raise ValueError(f"{num_slots} slots cannot hold the {bound} that are in use; use {max(bound, 1)} or more")
        for slot in range(self.num_slots, num_slots):
            heapq.heappush(self._vacant, SlotId(slot))
        self.num_slots = num_slots
        self._vacant = [slot for slot in self._vacant if slot < num_slots]
        heapq.heapify(self._vacant)
        moves: dict[SlotId, SlotId] = {}
        for slot in sorted(slot for slot in self._live if slot >= num_slots):
            moves[slot] = self._take_below(num_slots)
        self._live = {moves.get(slot, slot) for slot in self._live}
        held = [c for c in self.held() if c.slot is not None and c.slot >= num_slots]
        for checkpoint in sorted(held, key=self.is_free):
            if checkpoint.status is CheckpointStatus.GONE:
                continue
            assert checkpoint.slot is not None
            if self.is_free(checkpoint) and not self._vacant:
                self._policy.remove_image(checkpoint)
                self._forget(checkpoint)
                self.fates.evicted += 1
                continue
            target = self._take_below(num_slots)
            moves[checkpoint.slot] = target
            checkpoint.slot = target
        return moves

    def _take_below(self, num_slots: int) -> SlotId:
        """A slot below ``num_slots``; checkpoints above it that the policy gives up on the way are gone."""
        while True:
            slot = self._take()
            if slot < num_slots:
                return slot

    def _take(self) -> SlotId:
        if self._vacant:
            return heapq.heappop(self._vacant)
        victim = self._policy.pop()
        assert isinstance(victim, Checkpoint) and victim.slot is not None
        self.fates.evicted += 1
        self._forget(victim)
        return victim.slot

    def check(self) -> None:
        """AssertionError unless every slot is in exactly one place (I5). O(pool)."""
        super().check()
        places = sorted([*self._vacant, *self._live, *(checkpoint.slot for checkpoint in self.held())])
        assert places == list(range(self.num_slots)), f"slots are not conserved: {places}"

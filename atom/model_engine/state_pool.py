"""Slots: live states of running requests, and checkpoints kept as slots."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from atom.model_engine.eviction import GuessesFirst
from atom.model_engine.ids import BlockKey, SlotId
from atom.model_engine.placement import RungKind
from atom.model_engine.state_cache import Checkpoint, CheckpointFates, CheckpointStatus


class StateSlotPool:
    """``num_slots`` slots, each vacant, live (a request's state or scratch), reserved or a checkpoint.

    A vacant slot goes first, the lowest index first; then the checkpoint that the policy names and nobody reads: live
    work never waits for a finished checkpoint (I6). It fulfils :class:`~atom.model_engine.state_cache.StateCache`, keeping
    each checkpoint as one slot, and moves no bytes. Where checkpoints are images it holds live slots alone.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.fates = CheckpointFates()
        self._vacant = [SlotId(i) for i in range(num_slots)]
        self._live: set[SlotId] = set()
        self._checkpoints: dict[BlockKey, Checkpoint] = {}
        self._evicting: set[Checkpoint] = set()
        self._policy = GuessesFirst()
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
        return len(self._checkpoints) - self._reserved

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
        if not self._is_free(checkpoint):
            return None
        slot = checkpoint.slot
        assert slot is not None
        self._policy.remove_image(checkpoint)
        self._forget(checkpoint)
        self._live.add(slot)
        self.fates.read_back[checkpoint.kind] += 1
        self.fates.evicted += 1
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

    def rightmost(self, keys: Sequence[BlockKey], limit: int) -> int:
        checkpoints = self._checkpoints
        if not checkpoints:
            return 0
        for count in range(min(limit, len(keys)), 0, -1):
            checkpoint = checkpoints.get(keys[count - 1])
            if checkpoint is not None and checkpoint.status is CheckpointStatus.READY:
                return count
        return 0

    def find(self, key: BlockKey) -> Checkpoint | None:
        checkpoint = self._checkpoints.get(key)
        return checkpoint if checkpoint is not None and checkpoint.status is CheckpointStatus.READY else None

    def has_room(self) -> bool:
        return self.num_available > 0

    def reserve(self, key: BlockKey, kind: RungKind, replace: Checkpoint | None = None) -> Checkpoint | None:
        kept = self._checkpoints.get(key)
        if kept is not None:
            self._keep_longer(kept, kind)
            return None
        if replace is not None and replace.shared:
            self.supersede(replace)
        elif replace is not None and self._is_free(replace):
            self._policy.remove_image(replace)
            self._vacate(replace)
            self.fates.superseded += 1
        if not self.has_room():
            self.fates.dropped += 1
            return None
        checkpoint = self._checkpoints[key] = Checkpoint(key, kind, slot=self._take())
        self._reserved += 1
        return checkpoint

    def publish(self, checkpoint: Checkpoint) -> None:
        assert checkpoint.status in (CheckpointStatus.RESERVED, CheckpointStatus.COPYING)
        checkpoint.status = CheckpointStatus.READY
        self._reserved -= 1
        self._policy.add_image(checkpoint)
        self.fates.kept += 1
        if checkpoint.predecessor is not None:
            self.supersede(checkpoint.predecessor)
            checkpoint.predecessor = None

    def cancel(self, checkpoint: Checkpoint) -> None:
        assert checkpoint.status in (CheckpointStatus.RESERVED, CheckpointStatus.COPYING)
        self._reserved -= 1
        self._vacate(checkpoint)

    def pin(self, checkpoint: Checkpoint) -> None:
        assert checkpoint.status is CheckpointStatus.READY, "only a published checkpoint can be read"
        self.hold(checkpoint)
        checkpoint.shared = True
        self.fates.read_back[checkpoint.kind] += 1

    def hold(self, checkpoint: Checkpoint) -> None:
        """Pin without counting a use: the request that handed the slot over reads it once more itself."""
        if not checkpoint.pins:
            self._policy.remove_image(checkpoint)
        checkpoint.pins += 1

    def unpin(self, checkpoint: Checkpoint) -> None:
        assert checkpoint.pins > 0, "unpinned more often than pinned"
        checkpoint.pins -= 1
        if checkpoint.pins:
            return
        if checkpoint.status is CheckpointStatus.READY:
            self._policy.add_image(checkpoint)
        else:
            self._evicting.remove(checkpoint)
            self._free(checkpoint)

    def supersede(self, checkpoint: Checkpoint) -> None:
        if checkpoint.superseded or checkpoint.is_guess or checkpoint.status is not CheckpointStatus.READY:
            return
        if checkpoint.pins:
            checkpoint.superseded = True
            return
        self._policy.remove_image(checkpoint)
        checkpoint.superseded = True
        self._policy.add_image(checkpoint)

    def orphan(self, key: BlockKey) -> None:
        checkpoint = self._checkpoints.get(key)
        if checkpoint is None or checkpoint.status is not CheckpointStatus.READY:
            # A reservation belongs to a request that is computing this block again and publishes it with the state.
            return
        self.fates.orphaned += 1
        if checkpoint.pins:
            del self._checkpoints[key]
            checkpoint.status = CheckpointStatus.EVICTING
            self._evicting.add(checkpoint)
        else:
            self._policy.remove_image(checkpoint)
            self._vacate(checkpoint)

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
        held = [c for c in (*self._checkpoints.values(), *self._evicting) if c.slot is not None and c.slot >= num_slots]
        for checkpoint in sorted(held, key=self._is_free):
            if checkpoint.status is CheckpointStatus.GONE:
                continue
            assert checkpoint.slot is not None
            if self._is_free(checkpoint) and not self._vacant:
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

    def _is_free(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.status is CheckpointStatus.READY and not checkpoint.pins

    def _keep_longer(self, checkpoint: Checkpoint, kind: RungKind) -> None:
        """The same state is wanted again: it is as good as new, and an anchor if this request knows it to be one."""
        free = self._is_free(checkpoint)
        if free:
            self._policy.remove_image(checkpoint)
        checkpoint.shared = True
        checkpoint.superseded = False
        if kind is RungKind.ANCHOR:
            checkpoint.kind = kind
        if free:
            self._policy.add_image(checkpoint)

    def _take(self) -> SlotId:
        if self._vacant:
            return heapq.heappop(self._vacant)
        victim = self._policy.pop()
        assert isinstance(victim, Checkpoint) and victim.slot is not None
        self.fates.evicted += 1
        self._forget(victim)
        return victim.slot

    def _forget(self, checkpoint: Checkpoint) -> None:
        del self._checkpoints[checkpoint.key]
        checkpoint.status = CheckpointStatus.GONE

    def _vacate(self, checkpoint: Checkpoint) -> None:
        del self._checkpoints[checkpoint.key]
        self._free(checkpoint)

    def _free(self, checkpoint: Checkpoint) -> None:
        checkpoint.status = CheckpointStatus.GONE
        assert checkpoint.slot is not None
        heapq.heappush(self._vacant, checkpoint.slot)

    def ready(self) -> dict[BlockKey, Checkpoint]:
        """Findable checkpoints by key. O(checkpoints); for checks and reports."""
        return {key: c for key, c in self._checkpoints.items() if c.status is CheckpointStatus.READY}

    def check(self) -> None:
        """AssertionError unless every slot is in exactly one place (I5). O(pool)."""
        held = [checkpoint.slot for checkpoint in (*self._checkpoints.values(), *self._evicting)]
        places = sorted([*self._vacant, *self._live, *held])
        assert places == list(range(self.num_slots)), f"slots are not conserved: {places}"
        free = {checkpoint for checkpoint in self._checkpoints.values() if self._is_free(checkpoint)}
        assert free == set(self._policy.images()), "exactly the published and unpinned may be given up"
        assert self._reserved == sum(c.status is not CheckpointStatus.READY for c in self._checkpoints.values())

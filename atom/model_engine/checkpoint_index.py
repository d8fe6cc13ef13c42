"""What every backend does alike: checkpoints by key, their life, who reads them, and what may be given up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from atom.model_engine.eviction import EvictionPolicy
from atom.model_engine.ids import BlockKey
from atom.model_engine.placement import RungKind
from atom.model_engine.state_cache import Checkpoint, CheckpointFates, CheckpointStatus

_UNWRITTEN = (CheckpointStatus.RESERVED, CheckpointStatus.COPYING)


class CheckpointIndex(ABC):
    """Fulfils :class:`~atom.model_engine.state_cache.StateCache` over places that a backend takes and gives back.

    ``policy`` is told of every published checkpoint that nobody reads; what it names may be given up at any time.
    """

    def __init__(self) -> None:
        self.fates = CheckpointFates()
        self._checkpoints: dict[BlockKey, Checkpoint] = {}
        self._evicting: set[Checkpoint] = set()
        self._reserved = 0

    @property
    @abstractmethod
    def policy(self) -> EvictionPolicy:
        """What decides who goes first."""

    @abstractmethod
    def has_room(self) -> bool:
        """Whether a new checkpoint would find a place. O(1)."""

    @abstractmethod
    def _take_place(self, key: BlockKey, kind: RungKind) -> Checkpoint:
        """A checkpoint in a place of its own; called where there is room."""

    @abstractmethod
    def _give_back(self, checkpoint: Checkpoint) -> None:
        """The place of ``checkpoint`` is vacant."""

    @property
    def num_checkpoints(self) -> int:
        return len(self._checkpoints) - self._reserved

    @property
    def num_reserved(self) -> int:
        return self._reserved

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

    def reserve(self, key: BlockKey, kind: RungKind, replace: Checkpoint | None = None) -> Checkpoint | None:
        kept = self._checkpoints.get(key)
        if kept is not None:
            self._keep_longer(kept, kind)
            return None
        if replace is not None and replace.shared:
            self.supersede(replace)
        elif replace is not None and self.is_free(replace):
            self.policy.remove_image(replace)
            self._remove(replace)
            self.fates.superseded += 1
        if not self.has_room():
            self.fates.dropped += 1
            return None
        checkpoint = self._checkpoints[key] = self._take_place(key, kind)
        self._reserved += 1
        return checkpoint

    def publish(self, checkpoint: Checkpoint) -> None:
        assert checkpoint.status in _UNWRITTEN
        checkpoint.status = CheckpointStatus.READY
        self._reserved -= 1
        self.policy.add_image(checkpoint)
        self.fates.kept += 1
        if checkpoint.predecessor is not None:
            self.supersede(checkpoint.predecessor)
            checkpoint.predecessor = None

    def cancel(self, checkpoint: Checkpoint) -> None:
        assert checkpoint.status in _UNWRITTEN
        self._reserved -= 1
        self._remove(checkpoint)

    def pin(self, checkpoint: Checkpoint) -> None:
        assert checkpoint.status is CheckpointStatus.READY, "only a published checkpoint can be read"
        self.hold(checkpoint)
        checkpoint.shared = True
        self.fates.read_back[checkpoint.kind] += 1

    def hold(self, checkpoint: Checkpoint) -> None:
        """Pin without counting a use: the request that left it reads it once more itself."""
        if not checkpoint.pins:
            self.policy.remove_image(checkpoint)
        checkpoint.pins += 1

    def unpin(self, checkpoint: Checkpoint) -> None:
        assert checkpoint.pins > 0, "unpinned more often than pinned"
        checkpoint.pins -= 1
        if checkpoint.pins:
            return
        if checkpoint.status is CheckpointStatus.READY:
            self.policy.add_image(checkpoint)
        else:
            self._evicting.remove(checkpoint)
            self._end(checkpoint)

    def use_up(self, checkpoint: Checkpoint) -> None:
        """Read an unpinned checkpoint for the last time: it is no longer findable, its place is the caller's to settle."""
        assert self.is_free(checkpoint), "a checkpoint that others read cannot be used up"
        self.fates.read_back[checkpoint.kind] += 1
        self.fates.evicted += 1
        self.policy.remove_image(checkpoint)
        self._forget(checkpoint)

    def supersede(self, checkpoint: Checkpoint) -> None:
        if checkpoint.superseded or checkpoint.is_guess or checkpoint.status is not CheckpointStatus.READY:
            return
        if self.is_free(checkpoint):
            self.policy.supersede_image(checkpoint)
        else:
            checkpoint.superseded = True
        if checkpoint.companion is not None:
            self.supersede(checkpoint.companion)

    def orphan(self, keys: Sequence[BlockKey]) -> None:
        for key in list(filter(self._checkpoints.__contains__, keys)):
            checkpoint = self._checkpoints[key]
            if checkpoint.status is not CheckpointStatus.READY:
                # A reservation belongs to a request that is computing this block again and publishes it with the state.
                continue
            self.fates.orphaned += 1
            if checkpoint.pins:
                del self._checkpoints[key]
                checkpoint.status = CheckpointStatus.EVICTING
                self._evicting.add(checkpoint)
            else:
                self.policy.remove_image(checkpoint)
                self._remove(checkpoint)

    def is_free(self, checkpoint: Checkpoint) -> bool:
        """Whether it is published and nobody reads it."""
        return checkpoint.status is CheckpointStatus.READY and not checkpoint.pins

    def given_up(self, checkpoint: Checkpoint) -> None:
        """The policy named it: its place is vacant."""
        self.fates.evicted += 1
        self._remove(checkpoint)

    def _keep_longer(self, checkpoint: Checkpoint, kind: RungKind) -> None:
        """The same state is wanted again: it is as good as new, and an anchor if this request knows it to be one."""
        checkpoint.shared = True
        free = self.is_free(checkpoint)
        if free:
            self.policy.remove_image(checkpoint)
        checkpoint.superseded = False
        if kind is RungKind.ANCHOR:
            checkpoint.kind = kind
        if free:
            self.policy.add_image(checkpoint)

    def _forget(self, checkpoint: Checkpoint) -> None:
        del self._checkpoints[checkpoint.key]
        checkpoint.status = CheckpointStatus.GONE

    def _remove(self, checkpoint: Checkpoint) -> None:
        self._forget(checkpoint)
        self._give_back(checkpoint)

    def _end(self, checkpoint: Checkpoint) -> None:
        checkpoint.status = CheckpointStatus.GONE
        self._give_back(checkpoint)

    def held(self) -> list[Checkpoint]:
        """Every checkpoint that has a place. O(checkpoints)."""
        return [*self._checkpoints.values(), *self._evicting]

    def ready(self) -> dict[BlockKey, Checkpoint]:
        """Findable checkpoints by key. O(checkpoints); for checks and reports."""
        return {key: c for key, c in self._checkpoints.items() if c.status is CheckpointStatus.READY}

    def check(self) -> None:
        """AssertionError unless the policy knows exactly what may go, and reservations are counted. O(checkpoints)."""
        free = {checkpoint for checkpoint in self._checkpoints.values() if self.is_free(checkpoint)}
        assert free == set(self.policy.images()), "exactly the published and unpinned may be given up"
        assert self._reserved == sum(c.status is not CheckpointStatus.READY for c in self._checkpoints.values())

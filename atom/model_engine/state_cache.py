"""The contract of checkpoint storage: what the block manager asks of whoever keeps states, in slots or in pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from atom.model_engine.ids import BlockId, BlockKey, SlotId
from atom.model_engine.placement import RungKind


class CheckpointStatus(Enum):
    """Life of a checkpoint. RESERVED: a place, no bytes. COPYING: its bytes are on their way there. READY: findable.

    EVICTING: no longer findable, and held by the restores that still read it. GONE: its place is somebody else's.
    """

    RESERVED = "reserved"
    COPYING = "copying"
    READY = "ready"
    EVICTING = "evicting"
    GONE = "gone"


@dataclass(slots=True, eq=False)
class Checkpoint:
    """The state at the boundary that ``key`` ends, kept for the reason ``kind``.

    ``slot``: where it is when it is kept as a slot. ``pages``: where it is when it is an image, in order. ``pins``:
    restores and forwards that still read it. ``superseded``: a later anchor of the same path exists. ``shared``:
    another request than the one that keeps it moving has used it, or wants it too. ``predecessor``:
    the anchor before it on its path, superseded once this one is published. ``companion``: the other end of the same
    turn, prompt's or answer's; a turn's anchors are superseded together, by the next turn's.
    """

    key: BlockKey
    kind: RungKind
    slot: SlotId | None = None
    pages: list[BlockId] = field(default_factory=list)
    status: CheckpointStatus = CheckpointStatus.RESERVED
    pins: int = 0
    superseded: bool = False
    shared: bool = False
    predecessor: Checkpoint | None = None
    companion: Checkpoint | None = None

    @property
    def is_guess(self) -> bool:
        """Anchors are knowledge; demand and ladder rungs are guesses, and go first."""
        return self.kind is not RungKind.ANCHOR


@dataclass(slots=True)
class CheckpointFates:
    """What became of checkpoints; counters only grow.

    kept: published. dropped: no room to keep one. evicted: given up for live work or for another. orphaned: its block
    went first. superseded: overwritten by a later one of the same answer. read_back: resumes, by kind of rung.
    """

    kept: int = 0
    dropped: int = 0
    evicted: int = 0
    orphaned: int = 0
    superseded: int = 0
    read_back: dict[RungKind, int] = field(default_factory=lambda: dict.fromkeys(RungKind, 0))

    def as_dict(self) -> dict[str, int]:
        """Counters by name, read-backs by kind."""
        plain = {name: getattr(self, name) for name in ("kept", "dropped", "evicted", "orphaned", "superseded")}
        return plain | {f"read_back_{kind.value}": count for kind, count in self.read_back.items()}


class StateCache(Protocol):
    """Checkpoints by the key of the last block before their boundary.

    Life of one: :meth:`reserve` (a place to write, found by nobody), then :meth:`publish` once its
    bytes are there, or :meth:`cancel`. A published one may be given up at any time unless pinned: it always counts as
    room for live work (I6). Whoever reads one pins it from the decision until the bytes are read.
    """

    fates: CheckpointFates

    @property
    def num_checkpoints(self) -> int:
        """Checkpoints that are findable."""
        ...

    @property
    def num_reserved(self) -> int:
        """Checkpoints that have a place and are not findable yet."""
        ...

    def rightmost(self, keys: Sequence[BlockKey], limit: int) -> int:
        """Largest ``n <= limit`` with a published checkpoint under ``keys[n - 1]``; 0 if there is none. O(limit)."""
        ...

    def find(self, key: BlockKey) -> Checkpoint | None:
        """The published checkpoint under ``key``. Changes nothing."""
        ...

    def has_room(self) -> bool:
        """Whether :meth:`reserve` would find a place for a new key. Changes nothing. O(1)."""
        ...

    def reserve(self, key: BlockKey, kind: RungKind, replace: Checkpoint | None = None) -> Checkpoint | None:
        """A place for the state at ``key``'s boundary. None: it is kept or being written already, or no room.

        ``replace``: an own checkpoint that the new one supersedes; its place is taken over where nobody else used it.
        """
        ...

    def publish(self, checkpoint: Checkpoint) -> None:
        """Its bytes are there: findable from now on; its predecessor is superseded."""
        ...

    def cancel(self, checkpoint: Checkpoint) -> None:
        """Its bytes will not come: the place is free again."""
        ...

    def pin(self, checkpoint: Checkpoint) -> None:
        """Keep a published checkpoint's bytes until :meth:`unpin`; counts as a use. Several pins add up."""
        ...

    def unpin(self, checkpoint: Checkpoint) -> None:
        """Give back one pin."""
        ...

    def supersede(self, checkpoint: Checkpoint) -> None:
        """A later anchor of the same path is published: this one goes before the newest of any path."""
        ...

    def orphan(self, keys: Sequence[BlockKey]) -> None:
        """The blocks under ``keys`` left the index: free their checkpoints at once, or when the last pin goes. O(keys)."""
        ...

    def ready(self) -> dict[BlockKey, Checkpoint]:
        """Findable checkpoints by key. O(checkpoints); for checks and reports."""
        ...

    def check(self) -> None:
        """AssertionError unless the storage is conserved (I5). O(pool)."""
        ...

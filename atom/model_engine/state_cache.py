"""The contract of checkpoint storage: what the block manager asks of whoever keeps states, in slots or in pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from atom.model_engine.ids import BlockKey, SlotId


@dataclass(slots=True)
class CheckpointFates:
    """What became of checkpoints; counters only grow. ``dropped``: there was no room to keep one."""

    kept: int = 0
    dropped: int = 0
    evicted: int = 0
    orphaned: int = 0
    read_back: int = 0


@dataclass(slots=True, eq=False)
class Checkpoint:
    """The state at the boundary that ``key`` ends, in slot ``slot``.

    ``ready``: its bytes are there. ``pins``: restores that still read it. ``filed``: findable under ``key``.
    """

    key: BlockKey
    slot: SlotId
    ready: bool = False
    filed: bool = True
    pins: int = 0


class StateCache(Protocol):
    """Checkpoints by the key of the last block before their boundary.

    Life of one: :meth:`reserve` (a place to write, found by nobody), then :meth:`publish` once its bytes are there, or
    :meth:`cancel`. A published one may be given up at any time unless pinned. A restore pins its source from the
    admission that chose it until the copy has run.
    """

    fates: CheckpointFates

    def rightmost(self, keys: Sequence[BlockKey], limit: int) -> int:
        """Largest ``n <= limit`` with a published checkpoint under ``keys[n - 1]``; 0 if there is none. O(limit)."""
        ...

    def reserve(self, key: BlockKey) -> Checkpoint | None:
        """A place for the state at ``key``'s boundary. None: it is kept or being written already, or no room."""
        ...

    def publish(self, checkpoint: Checkpoint) -> None:
        """The reserved bytes are written: findable from now on."""
        ...

    def cancel(self, checkpoint: Checkpoint) -> None:
        """The reserved bytes will not be written: the place is free again."""
        ...

    def pin(self, key: BlockKey) -> Checkpoint:
        """Keep a published checkpoint's bytes until :meth:`unpin`; counts as a use. Several pins add up."""
        ...

    def unpin(self, checkpoint: Checkpoint) -> None:
        """Give back one pin."""
        ...

    def orphan(self, key: BlockKey) -> None:
        """The block under ``key`` left the index: free its checkpoint at once, or when the last pin goes."""
        ...

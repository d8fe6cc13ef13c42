"""What the model runner is told to move: restores before a forward, states to keep during and after it."""

from __future__ import annotations

from dataclasses import dataclass

from atom.model_engine.ids import SlotId


@dataclass(frozen=True, slots=True)
class SlotCopy:
    """Copy the whole slot ``source`` to ``target``."""

    source: SlotId
    target: SlotId


@dataclass(frozen=True, slots=True)
class StateWrite:
    """Keep the state after the request's first ``position`` tokens in slot ``target``."""

    position: int
    target: SlotId


@dataclass(frozen=True, slots=True)
class StateMaintenanceOps:
    """Moves that happen before the forward, in any order: no target is another's source, and sources stay pinned."""

    restores: tuple[SlotCopy, ...] = ()

"""How states move: what the model runner is told to copy, and what is held until it has."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from enum import Enum

from atom.model_engine.ids import BlockId, BlockKey, SlotId
from atom.model_engine.page_unit_checkpoint import PagedStateCheckpointCoordinator
from atom.model_engine.placement import Rung, RungKind
from atom.model_engine.sequence import Sequence
from atom.model_engine.state_cache import Checkpoint, CheckpointStatus, StateCache
from atom.model_engine.state_pool import StateSlotPool


class StateTransfer(Enum):
    """How a state gets into a checkpoint and back.

    COPY: bytes are copied between a slot and an image's pages. FORK: the slot itself becomes the checkpoint, its owner
    goes on in a fresh one, and the next forward reads the old slot and writes the new.
    """

    COPY = "copy"
    FORK = "fork"


@dataclass(frozen=True, slots=True)
class ImageRestore:
    """Copy an image's pages, in order, over slot ``slot``."""

    pages: SequenceOf[BlockId]
    slot: SlotId


@dataclass(frozen=True, slots=True)
class ImageStore:
    """Copy slot ``slot`` over an image's pages, in order."""

    slot: SlotId
    pages: SequenceOf[BlockId]


@dataclass(frozen=True, slots=True)
class StateMaintenanceOps:
    """Moves before the forward, in any order: an image may be read by several, and no target is another's source."""

    restores: tuple[ImageRestore, ...] = ()


@dataclass(frozen=True, slots=True)
class ReservedRung:
    """A place for the state at ``position``. ``slot``: where the forward leaves it when that is inside the chunk."""

    position: int
    checkpoint: Checkpoint
    slot: SlotId | None = None


class StateRuntime:
    """The states of running requests: their slots, what they resume from, and how checkpoints are filled.

    ``slots_per_request``: the committed slot and one of rollback scratch per speculated token. ``scratch``: slots beside
    those of requests, for states that a forward gives out inside a chunk before they are copied to an image. A step is
    :meth:`start` for newcomers, :meth:`take_maintenance`, the forward, :meth:`keep` and :meth:`advance`, the
    :attr:`stores`, :meth:`finish`.
    """

    def __init__(self, slots: StateSlotPool, cache: StateCache, slots_per_request: int = 1, scratch: int = 0) -> None:
        self.slots = slots
        self.cache = cache
        self.transfer = StateTransfer.FORK if cache is slots else StateTransfer.COPY
        self.slots_per_request = slots_per_request
        self._num_scratch = scratch
        self._scratch: list[SlotId] = []
        self._restores: list[ImageRestore] = []
        self._read: list[Checkpoint] = []
        self._stores: list[tuple[ImageStore, Checkpoint]] = []

    # Resuming

    @property
    def interior_room(self) -> int | None:
        """How many more states this step's forward can give out inside chunks; None: as many as find a slot."""
        return None if self.transfer is StateTransfer.FORK else self._num_scratch - len(self._scratch)

    def can_start(self) -> bool:
        """Whether a request finds its slots. O(1)."""
        # A source that nobody reads counts as available: when it is the last one, the request adopts it.
        return self.slots.num_available >= self.slots_per_request

    def start(self, seq: Sequence, source: Checkpoint | None, consume: bool) -> None:
        """Give ``seq`` its slots, the committed one resuming from ``source``; see the coordinator for ``consume``."""
        if source is None:
            taken = self.slots.take_live(self.slots_per_request)
        elif self.transfer is StateTransfer.FORK:
            taken = self._start_forked(seq, source)
        else:
            taken = self.slots.take_live(self.slots_per_request)
            assert taken is not None
            self._restores.append(ImageRestore(tuple(source.pages), taken[0]))
        assert taken is not None, "can_start promised slots"
        seq.state_slots = taken
        seq.last_anchor = source if source is not None and not source.is_guess and not consume else None

    def hold(self, source: Checkpoint, consume: bool) -> None:
        """Keep ``source`` from being given up by what its reader takes next; a consumed one is given up already."""
        if self.transfer is StateTransfer.COPY:
            if consume:
                assert isinstance(self.cache, PagedStateCheckpointCoordinator)
                self.cache.consume(source)
            else:
                self.cache.pin(source)
                self._read.append(source)

    def _start_forked(self, seq: Sequence, source: Checkpoint) -> list[SlotId] | None:
        beside = self.slots.num_available - (not source.pins)
        if beside < self.slots_per_request:
            adopted = self.slots.adopt(source)
            others = self.slots.take_live(self.slots_per_request - 1)
            assert adopted is not None and others is not None
            return [adopted, *others]
        self.cache.pin(source)
        seq.reading = source
        return self.slots.take_live(self.slots_per_request)

    def take_maintenance(self) -> StateMaintenanceOps:
        """What to move before the next forward."""
        ops = StateMaintenanceOps(tuple(self._restores))
        self._restores.clear()
        return ops

    # Keeping

    def reserve(self, seq: Sequence, key: BlockKey, rung: Rung, inside: bool) -> ReservedRung | None:
        """A place for the state at ``rung``; ``inside``: it comes out in the middle of the chunk. None: not kept."""
        checkpoint = self.cache.reserve(key, rung.kind)
        if rung.kind is RungKind.ANCHOR:
            if checkpoint is not None:
                checkpoint.predecessor = seq.last_anchor
            seq.last_anchor = checkpoint or self.cache.find(key) or seq.last_anchor
        if checkpoint is None:
            return None
        if not inside:
            return ReservedRung(rung.position, checkpoint)
        if self.transfer is StateTransfer.FORK:
            return ReservedRung(rung.position, checkpoint, checkpoint.slot)
        scratch = self.slots.take_live()
        if scratch is None:
            self.cache.cancel(checkpoint)
            return None
        self._scratch += scratch
        return ReservedRung(rung.position, checkpoint, scratch[0])

    def advance(self, seq: Sequence) -> None:
        """A forward of ``seq`` is over: what it resumed from is read."""
        if seq.reading is not None:
            self.slots.unpin(seq.reading)
            seq.reading = None

    def fill(self, seq: Sequence, reserved: ReservedRung) -> None:
        """The forward left the state that ``reserved`` wants: in its slot, or as ``seq``'s committed state."""
        checkpoint = reserved.checkpoint
        if self.transfer is StateTransfer.COPY:
            checkpoint.status = CheckpointStatus.COPYING
            source = seq.state_slots[0] if reserved.slot is None else reserved.slot
            self._stores.append((ImageStore(source, checkpoint.pages), checkpoint))
            return
        if reserved.slot is None:
            seq.state_slots[0] = self.slots.hand_over(checkpoint, seq.state_slots[0])
        self.cache.publish(checkpoint)
        if reserved.slot is None:
            # The owner reads the slot it handed over once more: in its next forward.
            self.slots.hold(checkpoint)
            seq.reading = checkpoint

    def keep_answer(self, seq: Sequence, key: BlockKey, position: int) -> None:
        """An answer passed the boundary ``position``: keep its state in place of the one before it."""
        checkpoint = self.cache.reserve(key, RungKind.ANCHOR, replace=seq.answer_anchor)
        if checkpoint is not None:
            seq.answer_anchor = checkpoint
            if seq.last_anchor is not None:
                # The next turn resumes from the answer's end, or from the prompt's where it edits the answer.
                checkpoint.companion, seq.last_anchor.companion = seq.last_anchor, checkpoint
            self.fill(seq, ReservedRung(position, checkpoint))

    @property
    def stores(self) -> list[ImageStore]:
        """What to move after the forward, before anything else is decided."""
        return [store for store, _ in self._stores]

    def cancel(self, reserved: SequenceOf[ReservedRung]) -> None:
        """The forward that was to leave these states failed; what was filled already is settled by :meth:`finish`."""
        for rung in reserved:
            if rung.checkpoint.status is CheckpointStatus.RESERVED:
                self.cache.cancel(rung.checkpoint)

    def finish(self, is_indexed: Callable[[BlockKey], bool], stored: bool = True) -> None:
        """The step is over: publish what was stored whose block is still findable, let go of what was read."""
        for _, checkpoint in self._stores:
            if stored and is_indexed(checkpoint.key):
                self.cache.publish(checkpoint)
            else:
                self.cache.cancel(checkpoint)
        for checkpoint in self._read:
            self.cache.unpin(checkpoint)
        self.slots.release_live(self._scratch)
        self._stores, self._read, self._scratch = [], [], []

    def end(self, seq: Sequence) -> None:
        """``seq`` gives back its slots; unread sources are let go."""
        self.advance(seq)
        self.slots.release_live(seq.state_slots)
        seq.state_slots = []
        seq.last_anchor = seq.answer_anchor = None

    def resize(self, num_slots: int, running: SequenceOf[Sequence]) -> dict[SlotId, SlotId]:
        """Grow or shrink the pool; see :meth:`StateSlotPool.resize`. ``running`` go on in the slots they are moved to."""
        moves = self.slots.resize(num_slots)
        for seq in running:
            seq.state_slots = [moves.get(slot, slot) for slot in seq.state_slots]
        return moves

    def check(self) -> None:
        """AssertionError unless slots and checkpoints are conserved (I5). O(pool)."""
        self.slots.check()
        self.cache.check()

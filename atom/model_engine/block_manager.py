"""Admission, the gated hit, publishing, and the life of checkpoints. It owns the pools and moves no bytes."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from atom.model_engine.block_pool import BlockPool
from atom.model_engine.cache_stats import CacheStats
from atom.model_engine.ids import BlockId, BlockKey
from atom.model_engine.placement import Chunk, Placement, resumable_limit
from atom.model_engine.prefix_hash import PrefixHasher
from atom.model_engine.sequence import Sequence
from atom.model_engine.state_cache import Checkpoint
from atom.model_engine.state_pool import StateSlotPool
from atom.model_engine.state_runtime import SlotCopy, StateMaintenanceOps

ResumeGate = Callable[[SequenceOf[BlockKey], int], int]
"""Rightmost boundary, in blocks, at most the given one, that a state class can resume from."""


@dataclass(frozen=True, slots=True)
class Hit:
    """What a prompt finds, in blocks. cached <= wanted <= matched <= reusable (I8).

    reusable: all but the trailing block that no request can match. matched: indexed pages. wanted: where it would resume
    if every checkpoint had been kept. blocks: the pages up to where it does resume.
    """

    reusable: int
    matched: int
    wanted: int
    blocks: tuple[BlockId, ...] = ()

    @property
    def cached(self) -> int:
        return len(self.blocks)


@dataclass(frozen=True, slots=True)
class ReservedRung:
    """A place that this step's forward writes a state to, published or cancelled with the step."""

    position: int
    checkpoint: Checkpoint


class BlockManager:
    """Gives requests pages and slots, and files what was computed where the next request finds it.

    ``slots`` is None for a model without per-request state. ``enabled`` False: every request starts cold and nothing is
    filed. The plain flow is :meth:`can_allocate`, :meth:`allocate`, then per step :meth:`reserve_room` or
    :meth:`reserve_rungs`, :meth:`take_maintenance`, the forward, :meth:`commit`, :meth:`finish_step`; at any time between
    steps :meth:`release`.
    """

    def __init__(
        self,
        num_blocks: int,
        slots: StateSlotPool | None,
        hasher: PrefixHasher,
        placement: Placement,
        enabled: bool = True,
    ) -> None:
        self.block_size = hasher.block_size
        self.slots = slots
        self.hasher = hasher
        self.placement = placement
        self.enabled = enabled
        self.stats = CacheStats()
        self.pool = BlockPool(num_blocks, on_evict=slots.orphan if slots is not None else lambda key: None)
        self._gates: tuple[ResumeGate, ...] = (slots.rightmost,) if slots is not None else ()
        self._restores: list[SlotCopy] = []
        self._pinned: list[Checkpoint] = []

    @property
    def can_resume(self) -> bool:
        """Whether a request may ever resume: caching is on, and states, if the model has any, are kept."""
        return self.enabled and (self.slots is None or self.placement.enabled)

    # Admission

    def compute_keys(self, seq: Sequence) -> None:
        """Compute the prompt's block keys, once a request. O(prompt)."""
        if self.enabled:
            self.hasher.extend(seq.block_keys, seq.key_root, seq.token_ids, seq.num_tokens // self.block_size)

    def find(self, seq: Sequence) -> Hit:
        """Longest published prefix, then the rightmost boundary every state class resumes from. O(blocks)."""
        reusable = resumable_limit(seq.num_tokens, self.block_size) // self.block_size
        if not self.enabled:
            return Hit(0, 0, 0)
        blocks = self.pool.longest_prefix(seq.block_keys, reusable)
        matched = len(blocks)
        cached = self._gated(seq.block_keys, matched)
        # Every state class of today is repaired by a checkpoint, so all of the match could have been resumed.
        return Hit(reusable, matched, wanted=matched, blocks=tuple(blocks[:cached]))

    def _gated(self, keys: SequenceOf[BlockKey], limit: int) -> int:
        """Ask the gates round until none of them lowers the answer: no class is monotone in another's."""
        while limit:
            answer = limit
            for gate in self._gates:
                answer = gate(keys, answer)
            if answer == limit:
                return limit
            limit = answer
        return 0

    def can_allocate(self, seq: Sequence, headroom: int = 0) -> Hit | None:
        """The hit that :meth:`allocate` takes, or None while there is no room for the request.

        ``headroom``: pages to leave available besides. Changes nothing. O(blocks of the hit).
        """
        total = self._blocks_for(seq.num_tokens)
        available = self.pool.num_available - headroom
        hit = self.find(seq)
        if total - hit.cached + self.pool.num_cached_among(hit.blocks) > available:
            return None
        if self.slots is not None and not self.slots.can_take_live():
            return None
        return hit

    def allocate(self, seq: Sequence, hit: Hit) -> None:
        """Claim the hit's pages, take fresh ones for the rest of the tokens and a slot, queue the restore."""
        self.pool.claim(hit.blocks)
        seq.block_table = [*hit.blocks, *self.pool.take(self._blocks_for(seq.num_tokens) - hit.cached)]
        seq.num_computed_tokens = hit.cached * self.block_size
        seq.num_published_blocks = hit.cached
        if self.slots is not None:
            self._take_slot(seq, hit)
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = seq.num_computed_tokens
            self.stats.record(hit.reusable, hit.matched, hit.wanted, hit.cached, self.block_size)

    def _take_slot(self, seq: Sequence, hit: Hit) -> None:
        slots = self.slots
        assert slots is not None
        if not hit.cached:
            slot = slots.take_live()
        else:
            key = seq.block_keys[hit.cached - 1]
            if slots.can_take_live_beside(key):
                source = slots.pin(key)
                slot = slots.take_live()
                assert slot is not None
                self._pinned.append(source)
                self._restores.append(SlotCopy(source.slot, slot))
            else:
                slot = slots.adopt(key)
        assert slot is not None, "can_allocate promised a slot"
        seq.state_slots = [slot]

    # One step

    def reserve_room(self, seq: Sequence) -> bool:
        """Make sure that the last token has a page. False if one is needed and none is available. O(1)."""
        if len(seq.block_table) * self.block_size >= len(seq.token_ids):
            return True
        if not self.pool.num_available:
            return False
        seq.block_table += self.pool.take(1)
        return True

    def reserve_rungs(self, seq: Sequence, chunk: Chunk) -> list[ReservedRung]:
        """Places for the states that ``chunk`` gives out; a rung without room, or kept already, is left out."""
        if self.slots is None or not self.enabled:
            return []
        reserved = []
        for rung in chunk.rungs:
            checkpoint = self.slots.reserve(seq.block_keys[rung.position // self.block_size - 1])
            if checkpoint is not None:
                reserved.append(ReservedRung(rung.position, checkpoint))
        return reserved

    def take_maintenance(self) -> StateMaintenanceOps:
        """The moves queued since the last step; their sources stay pinned until :meth:`finish_step`."""
        ops = StateMaintenanceOps(tuple(self._restores))
        self._restores.clear()
        return ops

    def commit(self, seq: Sequence, num_computed: int, reserved: SequenceOf[ReservedRung] = ()) -> None:
        """The forward computed tokens up to ``num_computed`` and wrote ``reserved``: publish them. O(new blocks)."""
        seq.num_computed_tokens = num_computed
        full = num_computed // self.block_size
        if self.enabled and full > seq.num_published_blocks:
            keys, table, publish = seq.block_keys, seq.block_table, self.pool.publish
            self.hasher.extend(keys, seq.key_root, seq.token_ids, full)
            for i in range(seq.num_published_blocks, full):
                publish(table[i], keys[i])
            seq.num_published_blocks = full
        for rung in reserved:
            assert self.slots is not None
            # Its block was published above, if not by an equal request before: it is findable.
            self.slots.publish(rung.checkpoint)

    def cancel(self, reserved: SequenceOf[ReservedRung]) -> None:
        """The forward that was to write ``reserved`` failed."""
        for rung in reserved:
            assert self.slots is not None
            self.slots.cancel(rung.checkpoint)

    def finish_step(self) -> None:
        """The step's moves have run (or will never run): their sources may go."""
        for checkpoint in self._pinned:
            assert self.slots is not None
            self.slots.unpin(checkpoint)
        self._pinned.clear()

    # End

    def release(self, seq: Sequence) -> None:
        """Give back every page and slot of ``seq``, which then has nothing computed. O(blocks)."""
        self.pool.release(seq.block_table)
        seq.block_table = []
        if self.slots is not None:
            for slot in seq.state_slots:
                self.slots.release_live(slot)
        seq.state_slots = []
        seq.num_computed_tokens = seq.num_published_blocks = 0

    def clear(self) -> None:
        """Forget every cached prefix and checkpoint. Running requests go on. Only between steps. O(pool)."""
        self.pool.clear()

    def check(self) -> None:
        """AssertionError unless pages and slots are conserved (I5). O(pool)."""
        self.pool.check()
        if self.slots is not None:
            self.slots.check()
            for key in self.slots.ready_slots():
                assert self.pool.holds(key), "a checkpoint outlived its block"

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

"""Admission, the gated hit, publishing, and where checkpoints are kept. It owns pages and states and moves no bytes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from enum import Enum

from atom.model_engine.answer_reuse import AnswerReuse
from atom.model_engine.block_pool import BlockPool
from atom.model_engine.cache_stats import CacheStats
from atom.model_engine.ids import BlockId, BlockKey
from atom.model_engine.placement import Chunk, Placement, plan_chunk, resumable_limit
from atom.model_engine.prefix_hash import PrefixHasher
from atom.model_engine.sequence import Sequence
from atom.model_engine.state_cache import Checkpoint
from atom.model_engine.state_runtime import ReservedRung, StateMaintenanceOps, StateRuntime

logger = logging.getLogger(__name__)

ResumeGate = Callable[[SequenceOf[BlockKey], int], int]
"""Rightmost boundary, in blocks, at most the given one, that a state class can resume from."""


class MissReason(Enum):
    """Why a request resumed less than it might have, the nearest cause first.

    MISSING_CHECKPOINT: pages matched further, but no state was kept there. BEYOND_REPAIR: nor could a checkpoint have
    helped. NOT_CACHED: the next block was never computed here, or is gone.
    """

    MISSING_CHECKPOINT = "missing_checkpoint"
    BEYOND_REPAIR = "beyond_repair"
    NOT_CACHED = "not_cached"


@dataclass(frozen=True, slots=True)
class Hit:
    """What a prompt finds, in blocks. cached <= wanted <= matched <= reusable (I8).

    reusable: all but the trailing block that no request can match. matched: indexed pages. wanted: where it would resume
    if every checkpoint had been kept. blocks: the pages up to where it does resume. source: the checkpoint there, None
    for a cold start or a stateless model. consume: the pool cannot hold it beside the request, which uses it up.
    """

    reusable: int
    matched: int
    wanted: int
    blocks: tuple[BlockId, ...] = ()
    source: Checkpoint | None = None
    consume: bool = False

    @property
    def cached(self) -> int:
        return len(self.blocks)

    @property
    def miss_reason(self) -> MissReason | None:
        """Why fewer blocks are resumed than could have been; None when all are."""
        if self.cached < self.wanted:
            return MissReason.MISSING_CHECKPOINT
        if self.wanted < self.matched:
            return MissReason.BEYOND_REPAIR
        return MissReason.NOT_CACHED if self.matched < self.reusable else None


class BlockManager:
    """Gives requests pages and slots, and files what was computed where the next request finds it.

    ``states`` is None for a model without per-request state. ``enabled`` False: every request starts cold and nothing is
    filed. The flow of a step is :meth:`can_allocate` and :meth:`allocate` for newcomers, :meth:`reserve_room`,
    :meth:`plan_chunk`, :meth:`reserve_rungs`, the forward, :meth:`commit`, the stores of ``states``, :meth:`finish_step`;
    between steps :meth:`release` at any time.
    """

    def __init__(
        self,
        pool: BlockPool,
        states: StateRuntime | None,
        hasher: PrefixHasher,
        placement: Placement,
        enabled: bool = True,
    ) -> None:
        self.block_size = hasher.block_size
        self.pool = pool
        self.states = states
        self.hasher = hasher
        self.placement = placement
        self.enabled = enabled
        self.stats = CacheStats()
        self.answers = AnswerReuse(hasher.block_size)
        self._gates: tuple[ResumeGate, ...] = ()
        if states is not None:
            pool.on_evict = states.cache.orphan
            self._gates = (states.cache.rightmost,)

    @property
    def can_resume(self) -> bool:
        """Whether a request may ever resume: caching is on, and states, if the model has any, are kept."""
        return self.enabled and (self.states is None or self.placement.enabled)

    @property
    def keeps_states(self) -> bool:
        return self.states is not None and self.placement.enabled

    # Admission

    def queue(self, seq: Sequence, first: bool = False) -> None:
        """``seq`` waits to be admitted, behind all others or ``first``. Computes its keys where it has none. O(prompt)."""
        if self.enabled:
            self.hasher.extend(seq.block_keys, seq.key_root, seq.token_ids, seq.num_tokens // self.block_size)
            self.pool.policy.queued(seq.request_id, seq.block_keys, first)

    def unqueue(self, seq: Sequence) -> None:
        """``seq`` is dropped while it waits."""
        self.pool.policy.unqueued(seq.request_id, admitted=False)

    def find(self, seq: Sequence) -> Hit:
        """Longest published prefix, then the rightmost boundary every state class resumes from. O(blocks)."""
        if not self.enabled:
            return Hit(0, 0, 0)
        reusable = resumable_limit(seq.num_tokens, self.block_size) // self.block_size
        blocks = self.pool.longest_prefix(seq.block_keys, reusable)
        matched = len(blocks)
        cached = self._gated(seq.block_keys, matched)
        source = self.states.cache.find(seq.block_keys[cached - 1]) if cached and self.states is not None else None
        # Every state class of today is repaired by a checkpoint, so all of the match could have been resumed.
        return Hit(reusable, matched, matched, tuple(blocks[:cached]), source)

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
        hit = self.find(seq)
        if self.states is not None and not self.states.can_start():
            return None
        spare = self.pool.num_available - headroom
        spare -= self._blocks_for(seq.num_tokens) - hit.cached + self.pool.num_cached_among(hit.blocks)
        if spare < 0:
            return None
        source = hit.source
        if source is not None and not source.pins and len(source.pages) > spare:
            # A finished image never makes live work wait (I6): it is read for the last time.
            return Hit(hit.reusable, hit.matched, hit.wanted, hit.blocks, source, consume=True)
        return hit

    def allocate(self, seq: Sequence, hit: Hit) -> None:
        """Claim the hit's pages, take fresh ones for the rest of the tokens and slots, queue the restore."""
        first = seq.num_cached_tokens is None
        policy = self.pool.policy
        policy.unqueued(seq.request_id, admitted=True)
        if first and seq.counted:
            policy.admitted(seq.block_keys, hit.matched, hit.cached)
            self.answers.admitted(seq.block_keys, seq.token_ids)
        else:
            policy.readmitted(seq.block_keys[: seq.num_prompt_tokens // self.block_size])
        self.pool.claim(hit.blocks)
        if hit.source is not None:
            assert self.states is not None
            self.states.hold(hit.source, hit.consume)
        seq.block_table = [*hit.blocks, *self.pool.take(self._blocks_for(seq.num_tokens) - hit.cached)]
        seq.num_computed_tokens = hit.cached * self.block_size
        seq.num_published_blocks = hit.cached
        if self.states is not None:
            self.states.start(seq, hit.source, hit.consume)
        if first:
            seq.num_cached_tokens = seq.num_computed_tokens
            seq.hit = hit
        first = first and seq.counted
        if first:
            self.stats.record(hit.reusable, hit.matched, hit.wanted, hit.cached, self.block_size)
            if logger.isEnabledFor(logging.DEBUG):
                self._log_admission(seq, hit)
        if self.keeps_states and hit.wanted > hit.cached:
            self._demand(seq, hit, first)

    def _log_admission(self, seq: Sequence, hit: Hit) -> None:
        logger.debug(
            "request %s: %d prompt tokens, matched %d, wanted %d, cached %d%s",
            seq.request_id,
            seq.num_prompt_tokens,
            hit.matched * self.block_size,
            hit.wanted * self.block_size,
            hit.cached * self.block_size,
            f" ({hit.miss_reason.value})" if hit.miss_reason is not None else "",
        )

    def _demand(self, seq: Sequence, hit: Hit, first: bool) -> None:
        """The gates cut the hit short of a boundary that a checkpoint would have delivered: keep it for the next one.

        Not where the pool cannot hold it beside the request, whose pages are taken by now. Counted at the first admission.
        """
        assert self.states is not None
        room = self.states.cache.has_room()
        if first and room:
            self.stats.demands_recorded += 1
        elif first:
            self.stats.demands_declined += 1
        if room and self.placement.demand:
            seq.demand = hit.wanted * self.block_size

    # One step

    def reserve_room(self, seq: Sequence, num_tokens: int) -> bool:
        """Make sure that ``num_tokens`` tokens have pages. False, and nothing taken, if too few are available."""
        missing = self._blocks_for(num_tokens) - len(seq.block_table)
        if missing <= 0:
            return True
        if self.pool.num_available < missing:
            return False
        seq.block_table += self.pool.take(missing)
        return True

    def plan_chunk(self, seq: Sequence, budget: int, interior_taken: int) -> Chunk:
        """``seq``'s next chunk of at most ``budget`` tokens; ``interior_taken``: places inside chunks spoken for."""
        if not self.keeps_states:
            return plan_chunk(self.placement, seq.num_computed_tokens, seq.num_tokens, budget, room=False)
        assert self.states is not None
        interior = self.states.interior_room
        if interior is not None:
            interior -= interior_taken
        room = self.states.cache.has_room()
        chunk = plan_chunk(self.placement, seq.num_computed_tokens, seq.num_tokens, budget, seq.demand, interior, room)
        if chunk.cut is not None:
            self.stats.cuts[chunk.cut] += 1
        self.states.cache.fates.dropped += chunk.passed_over
        return chunk

    def reserve_rungs(self, seq: Sequence, chunk: Chunk) -> list[ReservedRung]:
        """Places for the states that ``chunk`` gives out; a rung without room, or kept already, is left out."""
        if not chunk.rungs:
            return []
        assert self.states is not None
        reserved = []
        for rung in chunk.rungs:
            key = seq.block_keys[rung.position // self.block_size - 1]
            place = self.states.reserve(seq, key, rung, inside=rung.position < chunk.end)
            if place is not None:
                reserved.append(place)
        return reserved

    def take_maintenance(self) -> StateMaintenanceOps:
        """What to move before the forward."""
        return self.states.take_maintenance() if self.states is not None else StateMaintenanceOps()

    def commit(self, seq: Sequence, num_computed: int, reserved: SequenceOf[ReservedRung] = ()) -> None:
        """The forward computed tokens up to ``num_computed`` and left the states ``reserved``. O(new blocks)."""
        seq.num_computed_tokens = num_computed
        full = num_computed // self.block_size
        if self.enabled and full > seq.num_published_blocks:
            keys, start = seq.block_keys, seq.num_published_blocks
            self.hasher.extend(keys, seq.key_root, seq.token_ids, full)
            parent = keys[start - 1] if start else None
            self.pool.publish(seq.block_table[start:full], keys[start:full], start, parent)
            seq.num_published_blocks = full
        if self.states is not None:
            self.states.advance(seq)
            for rung in reserved:
                self.states.fill(seq, rung)

    def commit_prompt(self, seq: Sequence, num_computed: int, reserved: SequenceOf[ReservedRung] = ()) -> None:
        """Like :meth:`commit` for a chunk of a prefill. A prompt that ends on a boundary keeps that one, too: a resend
        stops a block before it, but the next turn does not.
        """
        self.commit(seq, num_computed, reserved)
        if self.keeps_states and self.placement.prompts and num_computed == seq.num_prompt_tokens:
            self._keep_end(seq, num_computed)

    def commit_answer(self, seq: Sequence, num_computed: int) -> None:
        """Like :meth:`commit` for decoded tokens; a boundary that the state stands at is kept for the next turn,
        unless next turns hardly ever hold answers as they were (:class:`~atom.model_engine.answer_reuse.AnswerReuse`).
        """
        self.commit(seq, num_computed)
        if self.keeps_states and self.placement.answers and self.answers.pays:
            self._keep_end(seq, num_computed)

    def _keep_end(self, seq: Sequence, num_computed: int) -> None:
        """If the state of ``seq`` stands at a boundary, keep it in place of the one before it behind the prompt's."""
        if num_computed % self.block_size == 0:
            assert self.states is not None
            key = seq.block_keys[num_computed // self.block_size - 1]
            self.states.keep_answer(seq, key, num_computed)

    def finish_step(self, stored: bool = True) -> None:
        """The step's moves have run (``stored`` False: its stores have not)."""
        if self.states is not None:
            self.states.finish(self.pool.holds, stored)

    def distrust(self, seq: Sequence) -> None:
        """``seq``'s logits were not finite: what it computed is not offered to others. O(blocks)."""
        self.pool.withdraw(seq.block_table)

    # End

    def release(self, seq: Sequence) -> None:
        """Give back every page and slot of ``seq``, which then has nothing computed. O(blocks)."""
        if seq.is_finished:
            published = seq.block_keys[: seq.num_published_blocks]
            self.answers.ended(published, seq.token_ids, seq.num_prompt_tokens)
        self.pool.release(seq.block_table, seq.ending)
        seq.block_table = []
        if self.states is not None:
            self.states.end(seq)
        seq.num_computed_tokens = seq.num_published_blocks = 0
        seq.demand = None

    def clear(self, running: SequenceOf[Sequence] = ()) -> None:
        """Forget every cached prefix and checkpoint. Only between steps. O(pool).

        ``running`` go on, and publish their prefix again with the next block that they fill.
        """
        self.pool.clear()
        for seq in running:
            seq.num_published_blocks = 0
            seq.last_anchor = seq.answer_anchor = None

    def check(self) -> None:
        """AssertionError unless pages and slots are conserved (I5). O(pool)."""
        self.pool.check()
        if self.states is not None:
            self.states.check()
            for key in self.states.cache.ready():
                assert self.pool.holds(key), "a checkpoint outlived its block"

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

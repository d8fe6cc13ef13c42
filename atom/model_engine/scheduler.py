"""Which tokens run in this step: decodes, then running prefills, then admissions; preemption by recomputation."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as SequenceOf

from atom.model_engine.block_manager import BlockManager
from atom.model_engine.ids import BlockKey
from atom.model_engine.messages import EngineOutput
from atom.model_engine.placement import resumable_limit
from atom.model_engine.sequence import Sequence
from atom.model_engine.speculation import Drafter
from atom.model_engine.step_plan import PrefillChunk, StepPlan, StepResult, Verification
from atom.model_engine.step_update import StepUpdate


class Scheduler:
    """Queues of waiting and running requests over a :class:`BlockManager`.

    First come, first served. A running request that finds no page preempts the youngest one, which gives everything back
    and waits at the front; its tokens are kept and computed again. A step costs O(running requests + admitted blocks),
    whatever the pools' size; while a request waits for room, also its hit's blocks.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        drafter: Drafter | None = None,
    ) -> None:
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.drafter = drafter
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.updates = StepUpdate(block_manager)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, seq: Sequence) -> None:
        """Queue a request. ValueError if the pool could never hold it."""
        capacity = self.block_manager.pool.num_blocks * self.block_manager.block_size
        if seq.max_tokens > capacity:
            raise ValueError(f"the request may grow to {seq.max_tokens} tokens and the pool holds {capacity}")
        self.block_manager.queue(seq)
        self.waiting.append(seq)

    def abort(self, request_ids: SequenceOf[str], complete: bool = False) -> list[Sequence]:
        """Drop requests, giving back what they hold; unknown ids are no error. Returns those dropped.

        ``complete``: their answers are, though the tokens do not say so.
        """
        wanted = set(request_ids)
        dropped = [seq for seq in self.running if seq.request_id in wanted]
        for seq in dropped:
            if complete:
                seq.is_finished = True
            self.block_manager.release(seq)
        if dropped:
            self.running = [seq for seq in self.running if seq.request_id not in wanted]
        if len(dropped) < len(wanted):
            queued = [seq for seq in self.waiting if seq.request_id in wanted]
            if queued:
                for seq in queued:
                    self.block_manager.unqueue(seq)
                self.waiting = deque(seq for seq in self.waiting if seq.request_id not in wanted)
            dropped += queued
        return dropped

    # Planning

    def schedule(self) -> StepPlan | None:
        """The next step, its pages and slots reserved; None if there is nothing to run."""
        plan = StepPlan()
        self._schedule_decodes(plan)
        budget = self._schedule_prefills(plan, self.max_num_batched_tokens - len(plan.decodes))
        if self.waiting and budget > 0:
            budget = self._admit(plan, budget)
        if not plan.decodes and not plan.prefills:
            return None
        # Live work has what it needs by now: what is left is room for guesses.
        if self.drafter is not None and plan.decodes:
            self._draft(plan, self.drafter, budget)
        for prefill in plan.prefills:
            prefill.reserved = self.block_manager.reserve_rungs(prefill.seq, prefill.chunk)
        plan.maintenance = self.block_manager.take_maintenance()
        return plan

    def _schedule_decodes(self, plan: StepPlan) -> None:
        running, manager = self.running, self.block_manager
        decodes, size = plan.decodes, manager.block_size
        index = 0
        # The list shrinks at its end while it is walked: a victim is always younger than the one that needs a page.
        while index < len(running):
            seq = running[index]
            index += 1
            num_tokens = len(seq.token_ids)
            if seq.num_computed_tokens != num_tokens - 1 or num_tokens == 1:
                continue
            if len(seq.block_table) * size < num_tokens and not self._make_room(seq):
                continue
            decodes.append(seq)
        if manager.states is not None:
            # Neighbouring slots in order are one range of the arena: the forward updates them in place.
            decodes.sort(key=_committed_slot)

    def _draft(self, plan: StepPlan, drafter: Drafter, spare: int) -> None:
        """Turn decodes that somebody has an idea for into verifications, with ``spare`` tokens and the pages left."""
        decodes, plan.decodes = plan.decodes, []
        for seq in decodes:
            num_tokens = len(seq.token_ids)
            limit = min(drafter.num_speculative_tokens, spare, seq.max_tokens - num_tokens - 1)
            drafts = drafter.propose(seq, limit) if limit > 0 else []
            if drafts and self.block_manager.reserve_room(seq, num_tokens + len(drafts)):
                spare -= len(drafts)
                plan.verifications.append(Verification(seq, drafts))
            else:
                plan.decodes.append(seq)

    def _make_room(self, seq: Sequence) -> bool:
        """Find a page for ``seq``'s last token, preempting the youngest; False if that was ``seq`` itself."""
        while not self.block_manager.reserve_room(seq, len(seq.token_ids)):
            victim = self.running.pop()
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _preempt(self, seq: Sequence) -> None:
        self.block_manager.release(seq)
        self.block_manager.queue(seq, first=True)
        self.waiting.appendleft(seq)
        self.num_preemptions += 1

    def _schedule_prefills(self, plan: StepPlan, budget: int) -> int:
        """Continue running prefills; returns the budget left."""
        if len(plan.decodes) == len(self.running):
            return budget
        for seq in self.running:
            left = len(seq.token_ids) - seq.num_computed_tokens
            if (left > 1 or seq.num_computed_tokens == 0) and self._has_room_for_chunk(plan, left, budget):
                budget -= self._plan_prefill(plan, seq, budget)
        return budget

    def _has_room_for_chunk(self, plan: StepPlan, left: int, budget: int) -> bool:
        """Whether a prefill with ``left`` tokens to go gets a chunk of ``budget``.

        Less than a block, and not the rest of the prompt, would put the next chunk off the grid, where states inside a
        chunk are not to be had: better none while other prefills take the budget. Where decodes alone leave less than
        a block, no later step leaves more.
        """
        if budget >= min(left, self.block_manager.block_size):
            return True
        return budget > 0 and not plan.prefills

    def _plan_prefill(self, plan: StepPlan, seq: Sequence, budget: int) -> int:
        """Add ``seq``'s next chunk; returns its length."""
        chunk = self.block_manager.plan_chunk(seq, budget, plan.num_interior)
        plan.prefills.append(PrefillChunk(seq, chunk))
        plan.num_interior += sum(rung.position < chunk.end for rung in chunk.rungs)
        return chunk.end - chunk.start

    def _admit(self, plan: StepPlan, budget: int) -> int:
        """Admit waiting requests, first come first served; returns the budget left."""
        manager = self.block_manager
        computing = {key for seq in self.running if (key := self._anchor_key(seq)) is not None}
        deferred: list[Sequence] = []
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            seq = self.waiting[0]
            anchor = self._anchor_key(seq)
            if anchor is not None and anchor in computing:
                # The same prompt is being computed right now: wait for its state instead of computing it twice.
                deferred.append(self.waiting.popleft())
                continue
            # One page a running request is left for its next block, unless nothing else runs.
            hit = manager.can_allocate(seq, headroom=len(self.running))
            if hit is None:
                break
            if not self._has_room_for_chunk(plan, seq.num_tokens - hit.cached * manager.block_size, budget):
                break
            self.waiting.popleft()
            manager.allocate(seq, hit)
            self.running.append(seq)
            if anchor is not None and seq.num_computed_tokens < resumable_limit(seq.num_tokens, manager.block_size):
                computing.add(anchor)
            budget -= self._plan_prefill(plan, seq, budget)
        self.waiting.extendleft(reversed(deferred))
        return budget

    def _anchor_key(self, seq: Sequence) -> BlockKey | None:
        """Key of the anchor that computing ``seq`` will file; None if it has none or is past it."""
        manager = self.block_manager
        limit = resumable_limit(seq.num_tokens, manager.block_size)
        if not manager.can_resume or seq.num_computed_tokens >= limit:
            return None
        return seq.block_keys[limit // manager.block_size - 1]

    # After the forward

    def update(self, plan: StepPlan, result: StepResult) -> list[EngineOutput]:
        """Publish what ``plan`` computed, append what was sampled, and end requests that are done."""
        outputs = self.updates.apply(plan, result)
        finished = [output.request_id for output in outputs if output.finish_reason is not None]
        if finished:
            self.abort(finished)
        return outputs

    def fail(self, plan: StepPlan, error: str) -> list[EngineOutput]:
        """The forward of ``plan`` raised: cancel what it reserved and end its requests with ``error``."""
        states = self.block_manager.states
        if states is not None:
            for prefill in plan.prefills:
                states.cancel(prefill.reserved)
        failed = plan.sequences
        self.abort([seq.request_id for seq in failed])
        return [EngineOutput(s.request_id, [], s.num_cached_tokens or 0, "error", error=error) for s in failed]


def _committed_slot(seq: Sequence) -> int:
    return seq.state_slots[0]

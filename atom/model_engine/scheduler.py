"""Which tokens run in this step: decodes, then running prefills, then admissions; preemption by recomputation."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from atom.model_engine.block_manager import BlockManager, ReservedRung
from atom.model_engine.ids import BlockKey
from atom.model_engine.messages import EngineOutput, TokenLogprobs
from atom.model_engine.placement import Chunk, plan_chunk, resumable_limit
from atom.model_engine.sequence import Sequence
from atom.model_engine.state_runtime import StateMaintenanceOps


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """A chunk of a prompt in one forward, and the places for the states it gives out."""

    seq: Sequence
    chunk: Chunk
    reserved: SequenceOf[ReservedRung] = ()

    @property
    def is_last(self) -> bool:
        """Whether the chunk computes the request's last token, so that the next one can be sampled."""
        return self.chunk.end == self.seq.num_tokens


@dataclass(slots=True)
class StepPlan:
    """One forward. Each of ``decodes`` computes its last token; ``samples`` are those that get a next token, in order."""

    decodes: list[Sequence] = field(default_factory=list)
    prefills: list[PrefillChunk] = field(default_factory=list)
    maintenance: StateMaintenanceOps = field(default_factory=StateMaintenanceOps)

    @property
    def samples(self) -> list[Sequence]:
        return self.decodes + [prefill.seq for prefill in self.prefills if prefill.is_last]

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(prefill.chunk.end - prefill.chunk.start for prefill in self.prefills)


class Scheduler:
    """Queues of waiting and running requests over a :class:`BlockManager`.

    First come, first served. A running request that finds no page preempts the youngest one, which gives everything back
    and waits at the front; its tokens are kept and computed again. A step costs O(running requests + admitted blocks),
    whatever the pools' size.
    """

    def __init__(self, block_manager: BlockManager, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, seq: Sequence) -> None:
        """Queue a request. ValueError if the pool could never hold it."""
        capacity = self.block_manager.pool.num_blocks * self.block_manager.block_size
        if seq.max_tokens > capacity:
            raise ValueError(f"the request may grow to {seq.max_tokens} tokens and the pool holds {capacity}")
        self.block_manager.compute_keys(seq)
        self.waiting.append(seq)

    def abort(self, request_ids: SequenceOf[str]) -> list[Sequence]:
        """Drop requests, giving back what they hold; unknown ids are no error. Returns those dropped."""
        wanted = set(request_ids)
        dropped = [seq for seq in self.running if seq.request_id in wanted]
        for seq in dropped:
            self.block_manager.release(seq)
        dropped += [seq for seq in self.waiting if seq.request_id in wanted]
        if dropped:
            self.running = [seq for seq in self.running if seq.request_id not in wanted]
            self.waiting = deque(seq for seq in self.waiting if seq.request_id not in wanted)
        return dropped

    # Planning

    def schedule(self) -> StepPlan | None:
        """The next step, its pages and slots reserved; None if there is nothing to run."""
        plan = StepPlan()
        self._schedule_decodes(plan)
        budget = self._schedule_prefills(plan, self.max_num_batched_tokens - len(plan.decodes))
        if self.waiting and budget > 0:
            self._admit(plan, budget)
        if not plan.decodes and not plan.prefills:
            return None
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

    def _make_room(self, seq: Sequence) -> bool:
        """Find a page for ``seq``'s last token, preempting the youngest; False if that was ``seq`` itself."""
        while not self.block_manager.reserve_room(seq):
            victim = self.running.pop()
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _preempt(self, seq: Sequence) -> None:
        self.block_manager.release(seq)
        self.waiting.appendleft(seq)
        self.num_preemptions += 1

    def _schedule_prefills(self, plan: StepPlan, budget: int) -> int:
        if len(plan.decodes) == len(self.running):
            return budget
        for seq in self.running:
            left = len(seq.token_ids) - seq.num_computed_tokens
            if budget > 0 and (left > 1 or seq.num_computed_tokens == 0):
                budget -= self._plan_prefill(plan, seq, budget)
        return budget

    def _plan_prefill(self, plan: StepPlan, seq: Sequence, budget: int) -> int:
        """Add ``seq``'s next chunk; returns its length."""
        manager = self.block_manager
        chunk = plan_chunk(manager.placement, seq.num_computed_tokens, len(seq.token_ids), budget)
        plan.prefills.append(PrefillChunk(seq, chunk, manager.reserve_rungs(seq, chunk)))
        return chunk.end - chunk.start

    def _admit(self, plan: StepPlan, budget: int) -> None:
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
            self.waiting.popleft()
            manager.allocate(seq, hit)
            self.running.append(seq)
            if anchor is not None and seq.num_computed_tokens < resumable_limit(seq.num_tokens, manager.block_size):
                computing.add(anchor)
            budget -= self._plan_prefill(plan, seq, budget)
        self.waiting.extendleft(reversed(deferred))

    def _anchor_key(self, seq: Sequence) -> BlockKey | None:
        """Key of the anchor that computing ``seq`` will file; None if it has none or is past it."""
        manager = self.block_manager
        limit = resumable_limit(seq.num_tokens, manager.block_size)
        if not manager.can_resume or seq.num_computed_tokens >= limit:
            return None
        return seq.block_keys[limit // manager.block_size - 1]

    # After the forward

    def update(
        self, plan: StepPlan, tokens: SequenceOf[int | None], logprobs: SequenceOf[TokenLogprobs | None]
    ) -> list[EngineOutput]:
        """Publish what ``plan`` computed and append the sampled ``tokens``, one for each of ``plan.samples``.

        A token None ends its request with an error: its logits were not finite.
        """
        manager, size = self.block_manager, self.block_manager.block_size
        for seq in plan.decodes:
            computed = seq.num_computed_tokens = seq.num_computed_tokens + 1
            if computed % size == 0:
                manager.commit(seq, computed)
        for prefill in plan.prefills:
            manager.commit(prefill.seq, prefill.chunk.end, prefill.reserved)
        manager.finish_step()
        outputs: list[EngineOutput] = []
        finished: set[str] = set()
        for seq, token, logprob in zip(plan.samples, tokens, logprobs, strict=True):
            output = self._append(seq, token, logprob)
            outputs.append(output)
            if output.finish_reason is not None:
                finished.add(seq.request_id)
        if finished:
            self.abort(list(finished))
        return outputs

    def _append(self, seq: Sequence, token: int | None, logprob: TokenLogprobs | None) -> EngineOutput:
        cached = seq.num_cached_tokens or 0
        if token is None:
            return EngineOutput(seq.request_id, [], cached, "error", error="the model's logits are not finite")
        seq.token_ids.append(token)
        output = EngineOutput(seq.request_id, [token], cached, logprobs=None if logprob is None else [logprob])
        if token in seq.stop_ids and seq.num_output_tokens > seq.params.min_tokens:
            output.finish_reason = "stop"
            output.stop_reason = token if token in seq.params.stop_token_ids else None
        elif len(seq.token_ids) >= seq.max_tokens:
            output.finish_reason = "length"
        return output

    def fail(self, plan: StepPlan, error: str) -> list[EngineOutput]:
        """The forward of ``plan`` raised: cancel what it reserved and end its requests with ``error``."""
        for prefill in plan.prefills:
            self.block_manager.cancel(prefill.reserved)
        self.block_manager.finish_step()
        failed = plan.decodes + [prefill.seq for prefill in plan.prefills]
        self.abort([seq.request_id for seq in failed])
        return [EngineOutput(s.request_id, [], s.num_cached_tokens or 0, "error", error=error) for s in failed]

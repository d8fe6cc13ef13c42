"""After the forward: publish what was computed, append what was sampled, see who is done."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from atom.model_engine.block_manager import BlockManager
from atom.model_engine.messages import EngineOutput, TokenLogprobs
from atom.model_engine.sequence import Sequence
from atom.model_engine.step_plan import StepPlan, StepResult, Verification


class StepUpdate:
    """Applies the result of a forward to its requests. Counts what speculation proposed and what was accepted."""

    def __init__(self, block_manager: BlockManager) -> None:
        self.block_manager = block_manager
        self.drafted_tokens = 0
        self.accepted_tokens = 0

    def apply(self, plan: StepPlan, result: StepResult) -> list[EngineOutput]:
        """One output for each request that got tokens; those with a finish_reason are to be released. O(requests)."""
        manager, size = self.block_manager, self.block_manager.block_size
        for seq in plan.decodes:
            computed = seq.num_computed_tokens = seq.num_computed_tokens + 1
            if computed % size == 0 or seq.reading is not None:
                manager.commit_answer(seq, computed)
        for prefill in plan.prefills:
            manager.commit_prompt(prefill.seq, prefill.chunk.end, prefill.reserved)
        outputs = [
            _append(seq, (token,), (logprob,))
            for seq, token, logprob in zip(plan.samples, result.tokens, result.logprobs, strict=True)
        ]
        for verification, (tokens, logprobs) in zip(plan.verifications, result.verified, strict=True):
            outputs.append(self._verify(verification, tokens, logprobs))
        failed = {output.request_id for output in outputs if output.error is not None}
        if failed:
            for seq in plan.sequences:
                if seq.request_id in failed:
                    manager.distrust(seq)
        return outputs

    def _verify(
        self, verification: Verification, tokens: list[int] | None, logprobs: SequenceOf[TokenLogprobs | None]
    ) -> EngineOutput:
        """Append the accepted drafts and one token more; the state after the last accepted one is the committed one."""
        seq = verification.seq
        if tokens is None:
            return _append(seq, (None,), (None,))
        accepted = len(tokens) - 1
        self.drafted_tokens += len(verification.drafts)
        self.accepted_tokens += accepted
        if seq.state_slots:
            slots = seq.state_slots
            slots[0], slots[accepted] = slots[accepted], slots[0]
        computed = seq.num_tokens + accepted
        output = _append(seq, tokens, logprobs)
        if computed < seq.num_tokens:
            self.block_manager.commit_answer(seq, computed)
        else:
            # A stop cut the answer short of what the state consumed: its pages are right, its state is nobody's.
            self.block_manager.commit(seq, seq.num_tokens)
        return output


def _append(seq: Sequence, tokens: SequenceOf[int | None], logprobs: SequenceOf[TokenLogprobs | None]) -> EngineOutput:
    """Append ``tokens`` up to the one that ends the request. None stands for logits that were not finite."""
    output = EngineOutput(seq.request_id, [], seq.num_cached_tokens or 0)
    for token, logprob in zip(tokens, logprobs, strict=True):
        if token is None:
            output.finish_reason, output.error = "error", "the model's logits are not finite"
            return output
        seq.token_ids.append(token)
        output.new_token_ids.append(token)
        if logprob is not None:
            output.logprobs = [*(output.logprobs or ()), logprob]
        if token in seq.stop_ids and seq.num_output_tokens > seq.params.min_tokens:
            output.finish_reason = "stop"
            output.stop_reason = token if token in seq.params.stop_token_ids else None
            return output
        if len(seq.token_ids) >= seq.max_tokens:
            output.finish_reason = "length"
            return output
    return output

"""What a step computes and what it returns: the border between scheduler and model runner."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from atom.model_engine.messages import TokenLogprobs
from atom.model_engine.placement import Chunk
from atom.model_engine.sequence import Sequence
from atom.model_engine.state_runtime import ReservedRung, StateMaintenanceOps


@dataclass(slots=True)
class PrefillChunk:
    """A chunk of a prompt in one forward, and the places for the states it gives out."""

    seq: Sequence
    chunk: Chunk
    reserved: SequenceOf[ReservedRung] = ()

    @property
    def is_last(self) -> bool:
        """Whether the chunk computes the request's last token, so that the next one can be sampled."""
        return self.chunk.end == self.seq.num_tokens


@dataclass(frozen=True, slots=True)
class Verification:
    """A request's last token and ``drafts`` behind it, computed at once; the state after each goes to its own slot."""

    seq: Sequence
    drafts: list[int]


@dataclass(slots=True)
class StepPlan:
    """One forward. Each of ``decodes`` computes its last token; a verification its last token and its drafts.

    ``num_interior``: states that come out inside chunks.
    """

    decodes: list[Sequence] = field(default_factory=list)
    verifications: list[Verification] = field(default_factory=list)
    prefills: list[PrefillChunk] = field(default_factory=list)
    maintenance: StateMaintenanceOps = field(default_factory=StateMaintenanceOps)
    num_interior: int = 0

    @property
    def samples(self) -> list[Sequence]:
        """Requests that get exactly one token: decodes, then prefills that end. Verifications come besides."""
        return self.decodes + [prefill.seq for prefill in self.prefills if prefill.is_last]

    @property
    def sequences(self) -> list[Sequence]:
        return [*self.decodes, *(v.seq for v in self.verifications), *(p.seq for p in self.prefills)]


@dataclass(slots=True)
class StepResult:
    """What a forward sampled.

    ``tokens[i]`` and ``logprobs[i]`` belong to ``plan.samples[i]``; a token None: its logits were not finite.
    ``verified[i]``: for ``plan.verifications[i]``, the drafts that were accepted and one token more, or None, and their
    log-probabilities.
    """

    tokens: SequenceOf[int | None]
    logprobs: SequenceOf[TokenLogprobs | None]
    verified: SequenceOf[tuple[list[int] | None, list[TokenLogprobs | None]]] = ()

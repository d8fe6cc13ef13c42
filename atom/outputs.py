"""What a request returns, in the shape that users of offline engines know."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token under the model's distribution before temperature and filters.

    ``rank`` is 1 for the most likely token of the vocabulary.
    """

    logprob: float
    rank: int
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """One sampled continuation. ``logprobs[i]`` maps token id to :class:`Logprob` for position i."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Seconds on ``time.monotonic``'s clock, and durations derived from them. None: not reached yet."""

    arrival_time: float
    first_token_at: float | None = None
    finished_at: float | None = None

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_at is None else self.first_token_at - self.arrival_time

    @property
    def time_to_finish(self) -> float | None:
        """Seconds from arrival to the last token."""
        return None if self.finished_at is None else self.finished_at - self.arrival_time


@dataclass(slots=True)
class RequestOutput:
    """A request's prompt, what of it was served from the prefix cache, and its ``n`` continuations.

    ``cache_miss_reason``: with ``report_cache_miss_reason``, why less was resumed than could have been.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    num_cached_tokens: int = 0
    cache_miss_reason: str | None = None
    metrics: RequestMetrics | None = None

    @property
    def finished(self) -> bool:
        return bool(self.outputs) and all(output.finished for output in self.outputs)

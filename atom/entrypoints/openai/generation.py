"""What one HTTP request generates: its prompts' continuations as they come, and the usage that they add up to."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from msgspec import UNSET

from atom.entrypoints.openai.errors import ApiError, bad_request
from atom.entrypoints.openai.metrics import HttpMetrics
from atom.entrypoints.openai.responses import PromptTokensDetails, Usage
from atom.entrypoints.openai.streaming import merge
from atom.model_engine.async_engine import AsyncEngine
from atom.outputs import CompletionOutput
from atom.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Job:
    """Checked input of a generation. ``arrival``: when the request came, on ``time.monotonic``'s clock."""

    request_id: str
    prompts: list[list[int]]
    params: SamplingParams
    cache_salt: str | None
    arrival: float

    @property
    def num_choices(self) -> int:
        """Continuations of all prompts together."""
        return len(self.prompts) * self.params.n


class Generation:
    """Runs a job once. Choice ``p * n + i`` is continuation i of prompt p."""

    def __init__(self, engine: AsyncEngine, metrics: HttpMetrics, job: Job) -> None:
        self.job = job
        self._engine = engine
        self._metrics = metrics
        self._completion_tokens = 0
        self._cached = [0] * len(job.prompts)
        self._miss_reason: str | None = None
        self._unfinished = job.num_choices

    async def steps(self) -> AsyncGenerator[list[tuple[int, CompletionOutput]], None]:
        """What each engine step adds, by choice; choices without news are left out.

        Raises :class:`ApiError` for what the engine refuses or cannot compute, ``EngineDeadError`` when it is gone.
        Closing the generator, or cancelling the task that reads it, aborts what still runs in the engine.
        """
        started = False
        outcome = "abort"
        try:
            async with aclosing(merge(self._sources())) as outputs:
                async for prompt, output in outputs:
                    if not started:
                        started = True
                        self._metrics.first_token(time.monotonic() - self.job.arrival)
                    self._cached[prompt] = output.num_cached_tokens
                    self._miss_reason = self._miss_reason or output.cache_miss_reason
                    first = prompt * self.job.params.n
                    news = [(first + part.index, part) for part in output.outputs if self._account(part)]
                    if news:
                        yield news
            self._metrics.completed(time.monotonic() - self.job.arrival)
        except ValueError as error:
            outcome = "error"
            if started:
                raise
            raise bad_request(str(error)) from error
        except Exception:
            outcome = "error"
            raise
        finally:
            for _ in range(self._unfinished):
                self._metrics.finished(outcome)

    def usage(self) -> Usage:
        """Tokens so far."""
        prompt_tokens = sum(map(len, self.job.prompts))
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=self._completion_tokens,
            total_tokens=prompt_tokens + self._completion_tokens,
            prompt_tokens_details=PromptTokensDetails(sum(self._cached), self._miss_reason or UNSET),
        )

    def _sources(self) -> list[AsyncGenerator]:
        job = self.job
        several = len(job.prompts) > 1
        return [
            self._engine.generate(
                prompt,
                job.params,
                f"{job.request_id}-{index}" if several else job.request_id,
                cache_salt=job.cache_salt,
            )
            for index, prompt in enumerate(job.prompts)
        ]

    def _account(self, part: CompletionOutput) -> bool:
        """Count ``part``; return whether it has anything to tell."""
        self._completion_tokens += len(part.token_ids)
        reason = part.finish_reason
        if reason == "error":
            raise ApiError(500, f"the generation failed: {part.stop_reason}", code="generation_failed")
        if reason is not None:
            self._unfinished -= 1
            self._metrics.finished(reason)
        return bool(part.text or part.token_ids) or reason is not None


class Collected:
    """One choice put together from its parts."""

    def __init__(self, index: int) -> None:
        self._text: list[str] = []
        self.output = CompletionOutput(index, "", [])

    def add(self, part: CompletionOutput) -> None:
        """Append a part."""
        self._text.append(part.text)
        self.output.token_ids += part.token_ids
        if part.logprobs is not None:
            if self.output.logprobs is None:
                self.output.logprobs = []
            self.output.logprobs += part.logprobs
        self.output.finish_reason = part.finish_reason
        self.output.stop_reason = part.stop_reason

    def whole(self) -> CompletionOutput:
        """The choice, once all parts are there."""
        self.output.text = "".join(self._text)
        return self.output


async def collect(generation: Generation) -> list[CompletionOutput]:
    """Every choice in whole, in order. Raises what :meth:`Generation.steps` raises."""
    choices = [Collected(index) for index in range(generation.job.num_choices)]
    async with aclosing(generation.steps()) as steps:
        async for step in steps:
            for index, part in step:
                choices[index].add(part)
    return [choice.whole() for choice in choices]

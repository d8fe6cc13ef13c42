"""What the engine core computed, made into what users read: text, log-probabilities, finish reasons, times."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from atom.model_engine.detokenizer import IncrementalDetokenizer, StopChecker, TextDecoder
from atom.model_engine.messages import EngineOutput, TokenLogprobs
from atom.model_engine.request_input import PreparedRequest
from atom.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput


class OutputTokenizer(TextDecoder, Protocol):
    """What output processing needs of a tokenizer."""

    def token_text(self, token_id: int) -> str: ...


class OutputKind(Enum):
    """What a request's outputs hold: what is new since the last, everything so far, or one output at the end."""

    DELTA = "delta"
    CUMULATIVE = "cumulative"
    FINAL = "final"


class _Continuation:
    """One continuation: collects text, tokens and log-probabilities until they are taken."""

    def __init__(self, index: int, prepared: PreparedRequest, tokenizer: OutputTokenizer) -> None:
        params = prepared.params
        self.index = index
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.final_taken = False
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens)
        self._stop = StopChecker(params.stop, params.include_stop_str_in_output) if params.stop else None
        self._min_tokens = params.min_tokens
        self._show_stop_token = params.include_stop_str_in_output
        self._num_tokens = 0
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self._cumulative_logprob = None if params.logprobs is None else 0.0

    def add(self, output: EngineOutput) -> int:
        """Take one step's output; return how many of its tokens count. A stop string drops those after it."""
        shown = len(output.new_token_ids)
        if output.finish_reason == "stop" and not self._show_stop_token:
            shown -= 1  # the token that ended the text is returned, its text is not part of the text
        used = len(output.new_token_ids)
        matched = None
        if self._stop is None:
            self._text.append(self._detokenizer.feed(output.new_token_ids[: max(shown, 0)]))
        else:
            for position, token in enumerate(output.new_token_ids[: max(shown, 0)]):
                matched = self._add_checked(token, self._num_tokens + position + 1)
                if matched is not None:
                    used = position + 1
                    break
        self._num_tokens += used
        self._token_ids += output.new_token_ids[:used]
        if self._logprobs is not None and output.logprobs is not None:
            self._add_logprobs(output.logprobs[:used])
        if matched is not None:
            self.finish_reason, self.stop_reason = "stop", matched
        elif output.finish_reason is not None:
            self.finish(output.finish_reason, output.error if output.error is not None else output.stop_reason)
        return used

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        """End the text here: hand out what waited for a character's or a stop string's remainder.

        The rest of a character cannot complete a stop string, except one that holds U+FFFD.
        """
        rest = self._detokenizer.flush()
        self.finish_reason, self.stop_reason = reason, stop_reason
        if self._stop is not None and self._num_tokens > self._min_tokens:
            result = self._stop.feed(rest)
            rest = result.text
            if result.matched is not None:
                self.finish_reason, self.stop_reason = "stop", result.matched
            else:
                rest += self._stop.flush()
        self._text.append(rest)

    def take(self, keep: bool) -> CompletionOutput:
        """What was collected; ``keep`` it to be part of the next result too, or start afresh."""
        text = "".join(self._text)
        output = CompletionOutput(
            index=self.index,
            text=text,
            token_ids=list(self._token_ids) if keep else self._token_ids,
            logprobs=list(self._logprobs) if keep and self._logprobs is not None else self._logprobs,
            cumulative_logprob=self._cumulative_logprob,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )
        self._text = [text] if keep else []
        if not keep:
            self._token_ids = []
            self._logprobs = None if self._logprobs is None else []
        self.final_taken = self.finish_reason is not None
        return output

    def _add_checked(self, token: int, count: int) -> str | None:
        """Add the ``count``-th token; return the stop string that it completes."""
        text = self._detokenizer.feed([token])
        if count <= self._min_tokens:
            self._text.append(text)
            return None
        result = self._stop.feed(text)
        self._text.append(result.text)
        return result.matched

    def _add_logprobs(self, positions: list[TokenLogprobs]) -> None:
        for position in positions:
            self._cumulative_logprob += position.logprobs[0]
            self._logprobs.append(
                {
                    token: Logprob(logprob, rank, self._tokenizer.token_text(token))
                    for token, logprob, rank in zip(position.token_ids, position.logprobs, position.ranks, strict=True)
                }
            )


class RequestState:
    """A running request: its continuations and what was not taken of them yet."""

    def __init__(self, prepared: PreparedRequest, tokenizer: OutputTokenizer, kind: OutputKind) -> None:
        self.request_id = prepared.request_id
        self.child_ids = prepared.child_ids()
        self.kind = kind
        self.metrics = RequestMetrics(arrival_time=time.monotonic())
        self.num_cached_tokens = 0
        self.cache_miss_reason: str | None = None
        self._prompt = prepared.prompt
        self._prompt_token_ids = prepared.prompt_token_ids
        self.continuations = [_Continuation(index, prepared, tokenizer) for index in range(prepared.params.n)]

    @property
    def finished(self) -> bool:
        """Whether every continuation has ended; their last output may still have to be taken."""
        return all(continuation.finish_reason is not None for continuation in self.continuations)

    def running_child_ids(self) -> list[str]:
        """Ids of the continuations that the engine core still computes."""
        return [
            child_id
            for child_id, continuation in zip(self.child_ids, self.continuations, strict=True)
            if continuation.finish_reason is None
        ]

    def finish(self, reason: str, stop_reason: str | None = None) -> None:
        """End every running continuation here."""
        for continuation in self.continuations:
            if continuation.finish_reason is None:
                continuation.finish(reason, stop_reason)
        self.metrics.finished_at = time.monotonic()

    def take(self) -> RequestOutput:
        """The request's next output.

        A delta has every continuation whose end was not reported before, those without news too, so that
        ``finished`` is true of the last delta alone and a finish reason is reported once.
        """
        delta = self.kind is OutputKind.DELTA
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=[
                continuation.take(keep=self.kind is OutputKind.CUMULATIVE)
                for continuation in self.continuations
                if not (delta and continuation.final_taken)
            ],
            num_cached_tokens=self.num_cached_tokens,
            cache_miss_reason=self.cache_miss_reason,
            metrics=self.metrics,
        )


@dataclass(slots=True)
class Processed:
    """Requests with news by id, and ids of continuations that a stop string ended, for the core to abort."""

    states: dict[str, RequestState] = field(default_factory=dict)
    abort_ids: list[str] = field(default_factory=list)


class OutputProcessor:
    """Every running request of one front end. A request leaves when all its continuations have ended.

    ``num_generated_tokens`` counts the tokens of all requests so far.
    """

    def __init__(self, tokenizer: OutputTokenizer) -> None:
        self._tokenizer = tokenizer
        self._requests: dict[str, RequestState] = {}
        self._children: dict[str, tuple[RequestState, int]] = {}
        self.num_generated_tokens = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def add(self, prepared: PreparedRequest, kind: OutputKind) -> RequestState:
        """Start to follow a request. Raises ``ValueError`` if its id, or that of a continuation, is in use."""
        child_ids = prepared.child_ids()
        if prepared.request_id in self._requests or any(child_id in self._children for child_id in child_ids):
            raise ValueError(f"request id {prepared.request_id!r} is in use by a running request")
        state = RequestState(prepared, self._tokenizer, kind)
        self._requests[prepared.request_id] = state
        self._children.update((child_id, (state, index)) for index, child_id in enumerate(child_ids))
        return state

    def process(self, outputs: list[EngineOutput]) -> Processed:
        """Take a step's outputs. Those of requests that already ended are ignored."""
        now = time.monotonic()
        processed = Processed()
        for output in outputs:
            state, index = self._children.get(output.request_id, (None, 0))
            if state is None or state.continuations[index].finish_reason is not None:
                continue
            if output.new_token_ids and state.metrics.first_token_at is None:
                state.metrics.first_token_at = now
            if index == 0:
                state.num_cached_tokens = output.num_cached_tokens
                state.cache_miss_reason = output.cache_miss_reason
            continuation = state.continuations[index]
            self.num_generated_tokens += continuation.add(output)
            if continuation.finish_reason is not None and output.finish_reason is None:
                processed.abort_ids.append(output.request_id)
            if state.finished:
                state.metrics.finished_at = now
                self._forget(state)
            processed.states[state.request_id] = state
        return processed

    def parent_of(self, child_id: str) -> RequestState | None:
        """The running request that a continuation belongs to."""
        return self._children.get(child_id, (None, 0))[0]

    def abort(self, request_id: str, reason: str = "abort", stop_reason: str | None = None) -> list[str]:
        """End a request here; return the continuations for the core to abort. Unknown ids are ignored."""
        state = self._requests.get(request_id)
        if state is None:
            return []
        running = state.running_child_ids()
        state.finish(reason, stop_reason)
        self._forget(state)
        return running

    def _forget(self, state: RequestState) -> None:
        del self._requests[state.request_id]
        for child_id in state.child_ids:
            del self._children[child_id]

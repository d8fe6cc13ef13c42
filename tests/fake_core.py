"""An engine core that computes nothing: every request's output repeats its prompt. Faults are settings."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

from atom.model_engine.messages import EngineOutput, EngineRequest, TokenLogprobs
from tests.tiny_tokenizer import VOCAB_SIZE

FAKE_CORE = "tests.fake_core:FakeCore"
REFUSED_TOKEN = 300  # a prompt with it is refused


@dataclass
class FakeConfig:
    """What a front end needs of the engine's settings, and the faults to show."""

    model: str
    tokenizer: str | None = None
    max_model_len: int = 4096
    tokens_per_step: int = 1
    step_seconds: float = 0.0
    failing_steps: tuple[int, ...] = ()  # by number, from 0
    startup_error: Exception | None = None
    startup_exit: int | None = None
    startup_seconds: float = 0.0


class FakeCore:
    def __init__(self, config: FakeConfig) -> None:
        time.sleep(config.startup_seconds)
        if config.startup_error is not None:
            raise config.startup_error
        if config.startup_exit is not None:
            os._exit(config.startup_exit)
        self.config = config
        self.requests: dict[str, EngineRequest] = {}
        self.done: dict[str, int] = {}
        self.aborted: list[str] = []
        self.num_added = self.num_steps = self.num_shutdowns = 0

    def add_request(self, request: EngineRequest) -> None:
        if REFUSED_TOKEN in request.prompt_token_ids:
            raise ValueError(f"{request.request_id} cannot be taken")
        self.num_added += 1
        self.requests[request.request_id] = request
        self.done[request.request_id] = 0

    def abort_requests(self, request_ids: list[str], reason: str = "abort") -> None:
        for request_id in request_ids:
            self.aborted.append(request_id)
            self.requests.pop(request_id, None)

    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[EngineOutput]:
        number = self.num_steps
        self.num_steps += 1
        time.sleep(self.config.step_seconds)
        if number in self.config.failing_steps:
            raise ArithmeticError(f"step {number} failed")
        return [self._advance(request) for request in list(self.requests.values())]

    def _advance(self, request: EngineRequest) -> EngineOutput:
        output = EngineOutput(
            request.request_id, [], num_cached_tokens=7 + int(request.request_id.partition("#")[2] or 0)
        )
        prompt, params = request.prompt_token_ids, request.params
        for _ in range(self.config.tokens_per_step):
            token = prompt[self.done[request.request_id] % len(prompt)]
            output.new_token_ids.append(token)
            self.done[request.request_id] += 1
            count = self.done[request.request_id]
            if token in params.stop_token_ids and count >= params.min_tokens:
                output.finish_reason, output.stop_reason = "stop", token
            elif token in request.eos_token_ids and not params.ignore_eos and count >= params.min_tokens:
                output.finish_reason = "stop"
            elif count == params.max_tokens:
                output.finish_reason = "length"
            if output.finish_reason is not None:
                del self.requests[request.request_id]
                break
        if params.logprobs is not None:
            output.logprobs = [TokenLogprobs([t, 0, t], [-0.5, -0.1, -0.5], [2, 1, 2]) for t in output.new_token_ids]
        return output

    def reset_prefix_cache(self) -> bool:
        return not self.requests

    def cache_stats(self) -> dict[str, int | float]:
        return {"requests": self.num_added, "hit_rate": 0.5}

    def metrics(self) -> dict[str, int | float]:
        return {
            "added": self.num_added,
            "aborted": len(self.aborted),
            "aborted_twice": len(self.aborted) - len(set(self.aborted)),
            "running": len(self.requests),
            "steps": self.num_steps,
        }

    def info(self) -> dict[str, Any]:
        return {
            "model_name": "fake",
            "vocab_size": VOCAB_SIZE,
            "max_model_len": self.config.max_model_len,
            "block_size": 64,
        }

    def shutdown(self) -> None:
        self.num_shutdowns += 1


class BrokenOutputCore(FakeCore):
    """Its log-probabilities lack a rank."""

    def step(self) -> list[EngineOutput]:
        outputs = super().step()
        for position in (position for output in outputs for position in output.logprobs or []):
            position.ranks.pop()
        return outputs


class BrokenCallsCore(FakeCore):
    """Its counters raise or cannot be sent."""

    def cache_stats(self) -> dict[str, int | float]:
        raise LookupError("no counters")

    def metrics(self) -> dict[str, int | float]:
        return {"running": object()}

"""The engine for offline use: requests in, outputs out, with the engine core in the same process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atom.model_engine.core_protocol import ENGINE_CORE, make_core
from atom.model_engine.output_processor import OutputKind, OutputProcessor
from atom.model_engine.request_input import PreparedRequest, Prompt, prepare_request
from atom.outputs import RequestOutput
from atom.sampling_params import SamplingParams
from atom.tokenizer import Tokenizer

if TYPE_CHECKING:
    from atom.config import EngineConfig


class LLMEngine:
    """Runs requests step by step. Not for use from several threads.

    Raises what the core raises when it cannot start, such as ``ValueError`` on a setting that does not fit the model.
    """

    def __init__(self, config: EngineConfig, core_class: str = ENGINE_CORE) -> None:
        self.tokenizer = Tokenizer(config.tokenizer or config.model)
        self._core = make_core(config, core_class)
        info = self._core.info()
        self.model_name: str = info["model_name"]
        self.vocab_size: int = info["vocab_size"]
        self.max_model_len: int = info["max_model_len"]
        self._processor = OutputProcessor(self.tokenizer)

    @property
    def num_generated_tokens(self) -> int:
        """Tokens generated since the start, of all requests together."""
        return self._processor.num_generated_tokens

    def prepare(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> PreparedRequest:
        """Tokenize and check a request without starting it. Raises ``ValueError`` on one that cannot run."""
        return prepare_request(
            request_id,
            prompt,
            params if params is not None else SamplingParams(),
            tokenizer=self.tokenizer,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            cache_salt=cache_salt,
            adapter=adapter,
        )

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        kind: OutputKind = OutputKind.CUMULATIVE,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> None:
        """Check a request and queue it. Raises ``ValueError`` and queues nothing if it cannot run."""
        self.add_prepared(self.prepare(request_id, prompt, params, cache_salt=cache_salt, adapter=adapter), kind)

    def add_prepared(self, prepared: PreparedRequest, kind: OutputKind = OutputKind.CUMULATIVE) -> None:
        """Queue a prepared request. Raises ``ValueError`` and queues nothing if the core refuses it."""
        self._processor.add(prepared, kind)
        try:
            for child in prepared.children():
                self._core.add_request(child)
        except BaseException:
            self.abort(prepared.request_id)
            raise

    def step(self) -> list[RequestOutput]:
        """Run one step; return the outputs of requests with news. Those of kind FINAL have one, at their end."""
        processed = self._processor.process(self._core.step())
        if processed.abort_ids:
            self._core.abort_requests(processed.abort_ids, "stop")
        return [
            state.take() for state in processed.states.values() if state.kind is not OutputKind.FINAL or state.finished
        ]

    def abort(self, request_id: str) -> None:
        """End a request; no output follows. Unknown ids are ignored."""
        running = self._processor.abort(request_id)
        if running:
            self._core.abort_requests(running)

    def has_unfinished_requests(self) -> bool:
        """Whether a request has not ended."""
        return len(self._processor) > 0

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; False if running requests keep some of it."""
        return self._core.reset_prefix_cache()

    def resize_state_slots(self, num_slots: int) -> None:
        """Grow or shrink the slot arena; ``ValueError`` where that is not possible."""
        self._core.resize_state_slots(num_slots)

    def get_cache_stats(self) -> dict[str, int | float]:
        """Counters of the prefix cache since the start."""
        return self._core.cache_stats()

    def shutdown(self) -> None:
        """Give back what the engine core holds."""
        self._core.shutdown()

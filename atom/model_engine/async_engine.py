"""The engine for servers: asynchronous requests, with the engine core in its own process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from atom.model_engine.core_client import CoreClient, EngineDeadError
from atom.model_engine.core_messages import AbortRequests, AddRequests, FromCore, Outputs, Refused
from atom.model_engine.core_protocol import ENGINE_CORE
from atom.model_engine.messages import EngineOutput
from atom.model_engine.output_processor import OutputKind, OutputProcessor, RequestState
from atom.model_engine.request_input import PreparedRequest, Prompt, prepare_request
from atom.outputs import RequestOutput
from atom.sampling_params import SamplingParams
from atom.tokenizer import Tokenizer

if TYPE_CHECKING:
    from atom.config import EngineConfig

__all__ = ["AsyncEngine", "EngineDeadError"]

logger = logging.getLogger(__name__)

# Longer texts are tokenized in a thread, as they would hold up every other request; in characters.
_TOKENIZE_IN_THREAD = 4096


class _Waiter:
    """Wakes the consumer of one request; ``error`` is for it to raise."""

    def __init__(self) -> None:
        self.news = asyncio.Event()
        self.error: Exception | None = None

    def fail(self, error: Exception) -> None:
        self.error = error
        self.news.set()


class AsyncEngine:
    """Requests from one event loop to one engine core. ``start`` it before anything else.

    model_name, vocab_size (tokens), max_model_len (tokens of prompt and output together), ``info`` (the settings as
    they took effect) and tokenizer are there after :meth:`start`.
    """

    model_name: str
    max_model_len: int
    vocab_size: int
    tokenizer: Tokenizer
    info: dict[str, Any]

    def __init__(self, config: EngineConfig, core_class: str = ENGINE_CORE) -> None:
        self._config = config
        self._client = CoreClient(config, core_class, self._on_message, self._on_death)
        self._waiters: dict[str, _Waiter] = {}

    @property
    def pid(self) -> int | None:
        """Process id of the engine core; None while there is none."""
        return self._client.pid

    async def start(self) -> None:
        """Start the engine core and wait until it serves.

        Raises ``ValueError`` or ``RuntimeError`` with the core's own words if it cannot start. After an error
        nothing is left to shut down.
        """
        self.tokenizer = await asyncio.to_thread(Tokenizer, self._config.tokenizer or self._config.model)
        self._processor = OutputProcessor(self.tokenizer)
        self.info = await self._client.start()
        self.model_name = self.info["model_name"]
        self.vocab_size = self.info["vocab_size"]
        self.max_model_len = self.info["max_model_len"]

    def shutdown(self) -> None:
        """End the engine core within 5 seconds; waiting consumers get :class:`EngineDeadError`."""
        self._client.shutdown()
        self._on_death(EngineDeadError("the engine was shut down"))

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        *,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Continue a prompt; yield what is new since the last yield, several steps together for a slow consumer.

        An output has every continuation whose ``finish_reason`` was not yielded before; one without news is empty.
        A continuation that fails ends with ``finish_reason`` "error" and the error's text as ``stop_reason``. Raises
        ``ValueError`` before the first yield if the request cannot be used, and :class:`EngineDeadError`. Closing
        or cancelling the iteration aborts the request.
        """
        prepared = await self._prepare(request_id, prompt, params, cache_salt, adapter)
        state = self._processor.add(prepared, OutputKind.DELTA)
        waiter = self._waiters[request_id] = _Waiter()
        try:
            self._client.send(AddRequests(prepared.children()))
            while True:
                await waiter.news.wait()
                waiter.news.clear()
                if waiter.error is not None:
                    raise waiter.error
                output = state.take()
                yield output
                if output.finished:
                    return
        finally:
            del self._waiters[request_id]
            self._abort_in_core(self._processor.abort(request_id))

    async def abort(self, request_id: str) -> None:
        """End a request; its consumer gets a last output with ``finish_reason`` "abort". Unknown ids are ignored."""
        self._abort_in_core(self._processor.abort(request_id))
        if request_id in self._waiters:
            self._waiters[request_id].news.set()

    async def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; False if running requests keep some of it."""
        return await self._client.call("reset_prefix_cache")

    async def cache_stats(self) -> dict[str, int | float]:
        """Counters of the prefix cache since the start."""
        return await self._client.call("cache_stats")

    async def metrics(self) -> dict[str, int | float]:
        """Every counter and gauge of the engine core."""
        return await self._client.call("metrics")

    def is_alive(self) -> bool:
        """Whether the engine core's process serves."""
        return self._client.is_alive()

    async def _prepare(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        cache_salt: str | None,
        adapter: str | None,
    ) -> PreparedRequest:
        def prepare() -> PreparedRequest:
            return prepare_request(
                request_id,
                prompt,
                params,
                tokenizer=self.tokenizer,
                vocab_size=self.vocab_size,
                max_model_len=self.max_model_len,
                cache_salt=cache_salt,
                adapter=adapter,
            )

        if isinstance(prompt, str) and len(prompt) > _TOKENIZE_IN_THREAD:
            return await asyncio.to_thread(prepare)
        return prepare()

    def _on_message(self, message: FromCore) -> None:
        match message:
            case Outputs(outputs=outputs):
                # One by one: what cannot be used of one request does not touch the others.
                for output in outputs:
                    self._process(output)
            case Refused(request_id=child_id, reason=reason):
                state = self._processor.parent_of(child_id)
                if state is not None:
                    self._fail(state, child_id, ValueError(reason))

    def _process(self, output: EngineOutput) -> None:
        try:
            processed = self._processor.process([output])
        except Exception as error:
            logger.exception("an output of request %s cannot be used", output.request_id)
            state = self._processor.parent_of(output.request_id)
            if state is not None:
                self._fail(state, None, RuntimeError(f"the engine's output cannot be used: {error}"))
            return
        self._abort_in_core(processed.abort_ids, "stop")
        for request_id in processed.states:
            self._waiters[request_id].news.set()

    def _fail(self, state: RequestState, ended_child_id: str | None, error: Exception) -> None:
        """Let the request's consumer raise ``error``; the core no longer has its continuation ``ended_child_id``."""
        running = self._processor.abort(state.request_id, "error", str(error))
        self._abort_in_core([child_id for child_id in running if child_id != ended_child_id])
        self._waiters[state.request_id].fail(error)

    def _abort_in_core(self, child_ids: list[str], reason: str = "abort") -> None:
        if child_ids and self._client.is_alive():
            self._client.send(AbortRequests(child_ids, reason))

    def _on_death(self, error: EngineDeadError) -> None:
        for request_id, waiter in self._waiters.items():
            if request_id in self._processor:  # of one that has ended, the last output is still good
                waiter.fail(error)

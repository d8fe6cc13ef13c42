"""A real HTTP server in a thread over a scripted engine: what the tests of the OpenAI endpoints talk to."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import uvicorn

from atom.entrypoints.openai import build_app
from atom.model_engine.async_engine import EngineDeadError
from atom.model_engine.messages import EngineOutput, EngineRequest, TokenLogprobs
from atom.model_engine.output_processor import OutputKind, OutputProcessor
from atom.model_engine.request_input import PreparedRequest, prepare_request
from atom.outputs import RequestOutput
from atom.sampling_params import SamplingParams
from atom.tokenizer import Tokenizer

MODEL = "scripted"


@dataclass
class ScriptedEngine:
    """Answers every request with the tokens of ``reply``, one a step, then an end-of-text token.

    hold_after: wait for ever once so many tokens of a request are out. fail_after: raise ``failure`` then instead;
    break_after: end with finish reason "error". A request is in ``aborted`` once each time it is taken out early.
    """

    tokenizer: Tokenizer
    model_name: str = MODEL
    max_model_len: int = 200
    vocab_size: int = 320
    reply: str | list[int] = "Hello world"
    cached: int = 0
    hold_after: int | None = None
    fail_after: int | None = None
    failure: Exception | None = None
    break_after: int | None = None
    alive: bool = True
    reset_result: bool = True
    figures: dict[str, int | float] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)
    seen: list[PreparedRequest] = field(default_factory=list)
    running: int = 0

    async def generate(
        self, prompt: Any, params: SamplingParams, request_id: str, *, cache_salt: str | None = None, adapter=None
    ) -> AsyncIterator[RequestOutput]:
        self._check_alive()
        prepared = prepare_request(
            request_id,
            prompt,
            params,
            tokenizer=self.tokenizer,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            cache_salt=cache_salt,
        )
        self.seen.append(prepared)
        processor = OutputProcessor(self.tokenizer)
        state = processor.add(prepared, OutputKind.DELTA)
        self.running += 1
        try:
            count = 0
            while True:
                if self.hold_after == count:
                    await asyncio.Event().wait()
                if self.fail_after == count:
                    raise self.failure
                children = {child.request_id: child for child in prepared.children()}
                live = [children[child_id] for child_id in state.running_child_ids()]
                processor.process([self._step(child, count) for child in live])
                count += 1
                output = state.take()
                yield output
                if output.finished:
                    return
                await asyncio.sleep(0)
        finally:
            self.running -= 1
            if not state.finished:
                self.aborted.append(request_id)

    def _step(self, request: EngineRequest, count: int) -> EngineOutput:
        reply = self.tokenizer.encode(self.reply) if isinstance(self.reply, str) else self.reply
        token = reply[count] if count < len(reply) else self.tokenizer.eos_token_ids[0]
        output = EngineOutput(request.request_id, [token], num_cached_tokens=self.cached)
        params = request.params
        if count < len(reply):
            if token in params.stop_token_ids:
                output.finish_reason, output.stop_reason = "stop", token
        elif not params.ignore_eos:
            output.finish_reason = "stop"
        if output.finish_reason is None and count + 1 == params.max_tokens:
            output.finish_reason = "length"
        if self.break_after == count:
            output.finish_reason, output.error = "error", "not finite"
        if params.logprobs is not None:
            others = self.tokenizer.encode("abcdefghijklmnopqrst")[: params.logprobs]
            ids, values = [token, *others], [-3.0, *(-0.1 * (i + 1) for i in range(len(others)))]
            values = [-math.inf if i > 10 else value for i, value in enumerate(values)]
            output.logprobs = [TokenLogprobs(ids, values, [len(others) + 1, *range(1, len(others) + 1)])]
        return output

    def _check_alive(self) -> None:
        if not self.alive:
            raise EngineDeadError("killed by a test")

    async def reset_prefix_cache(self) -> bool:
        self._check_alive()
        return self.reset_result

    async def metrics(self) -> dict[str, int | float]:
        self._check_alive()
        return self.figures

    def is_alive(self) -> bool:
        return self.alive


class Server:
    """``build_app(engine)`` on a loopback port. ``start`` and ``stop`` run in the server's event loop."""

    def __init__(self, engine: Any, start: Callable | None = None, stop: Callable | None = None, **options) -> None:
        self.engine = engine
        self._start, self._stop, self._options = start, stop, options
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    async def _run(self) -> None:
        try:
            if self._start is not None:
                await self._start()
            app = build_app(self.engine, **self._options)
            config = uvicorn.Config(app, port=0, log_level="warning", lifespan="off", timeout_graceful_shutdown=3)
            self._uvicorn = uvicorn.Server(config)
            serving = asyncio.create_task(self._uvicorn.serve())
            while not self._uvicorn.started:
                await asyncio.sleep(0.01)
            port = self._uvicorn.servers[0].sockets[0].getsockname()[1]
            self.url = f"http://127.0.0.1:{port}"
            self._ready.set()
            await serving
        except BaseException as error:
            self._error = error
        finally:
            self._ready.set()
            if self._stop is not None:
                self._stop()

    def __enter__(self) -> Server:
        self._thread.start()
        assert self._ready.wait(60), "the server did not start"
        if self._error is not None:
            raise self._error
        self.http = httpx.Client(base_url=self.url, timeout=30)
        self.client = openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=30)
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self.client.close()
        self._uvicorn.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error

    def post(self, path: str, **body: Any) -> httpx.Response:
        """A JSON request, without anything that a client library would add or check."""
        return self.http.post(path, json=body)

    def events(self, path: str, **body: Any) -> list[Any]:
        """A stream's events, decoded; ``[DONE]`` as it is."""
        response = self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.text.endswith("\n\n")
        lines = response.text.split("\n\n")[:-1]
        assert all(line.startswith("data: ") for line in lines)
        return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> None:
    """Poll until the condition holds; fail after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.005)


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a response, checked to have the status and exactly OpenAI's fields."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    return error

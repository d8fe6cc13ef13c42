"""What both endpoints do with a request: check it, tokenize it, generate, and answer whole or as a stream."""

from __future__ import annotations

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from http import HTTPStatus
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
from fastapi import Request, Response
from starlette.requests import ClientDisconnect

from atom.entrypoints.openai.errors import ApiError, ClientGone, as_api_error, bad_request
from atom.entrypoints.openai.generation import Generation, Job
from atom.entrypoints.openai.metrics import HttpMetrics
from atom.entrypoints.openai.protocol import ChatRequest, CompletionRequest, decode_body
from atom.entrypoints.openai.streaming import EventStream, until_disconnect
from atom.model_engine.async_engine import AsyncEngine

Body = TypeVar("Body", ChatRequest, CompletionRequest)


class Serving(ABC, Generic[Body]):
    """One endpoint. Subclasses say how a body becomes prompts and how choices become JSON."""

    body_type: ClassVar[type[ChatRequest | CompletionRequest]]
    id_prefix: ClassVar[str]
    prompt_field: ClassVar[str]

    def __init__(self, engine: AsyncEngine, model_name: str, metrics: HttpMetrics) -> None:
        self.engine = engine
        self.model_name = model_name
        self.metrics = metrics

    @abstractmethod
    def tokenize(self, body: Body) -> list[list[int]]:
        """Prompts as token ids; runs outside the event loop's thread. Raises :class:`ApiError` or ``ValueError``."""

    @abstractmethod
    async def answer(self, generation: Generation, body: Body) -> msgspec.Struct:
        """The whole response."""

    @abstractmethod
    def chunks(self, generation: Generation, body: Body) -> AsyncGenerator[bytes, None]:
        """The response as server-sent events, ``[DONE]`` included. The first comes with the first token."""

    async def respond(self, request: Request) -> Response:
        """Serve one HTTP request. Raises :class:`ApiError`, or what tells that the client left."""
        try:
            return await self._respond(request)
        except (ClientGone, ClientDisconnect):
            raise
        except Exception as error:
            raise as_api_error(error) from error

    def check_model(self, name: str | None) -> None:
        """Raise :class:`ApiError` (404) unless ``name`` is the served model or left out."""
        if name is not None and name != self.model_name:
            message = f"the model {name!r} does not exist; this server has {self.model_name!r}"
            raise ApiError(HTTPStatus.NOT_FOUND, message, param="model", code="model_not_found")

    def head(self, generation: Generation) -> dict[str, Any]:
        """Fields that every body and chunk of one response share."""
        return {"id": generation.job.request_id, "created": int(time.time()), "model": self.model_name}

    async def _respond(self, request: Request) -> Response:
        arrival = time.monotonic()
        body: Body = decode_body(await request.body(), self.body_type)
        body.check()
        self.check_model(body.model)
        params = body.to_params(self.engine.vocab_size)
        prompts = await self._prompts(body)
        request_id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        job = Job(request_id, prompts, params, body.cache_salt, arrival)
        generation = Generation(self.engine, self.metrics, job)
        if not body.stream:
            result = await until_disconnect(request.receive, self.answer(generation, body))
            return Response(msgspec.json.encode(result), media_type="application/json")
        chunks = self.chunks(generation, body)
        # The status line waits for the first token: what the engine refuses is still an HTTP error then.
        try:
            first = await until_disconnect(request.receive, _first(chunks))
        except BaseException:
            # The first chunk may have come just as the wait for it was cancelled.
            await chunks.aclose()
            raise
        return EventStream(first, chunks)

    async def _prompts(self, body: Body) -> list[list[int]]:
        try:
            # A long prompt takes a while to tokenize, during which other clients' tokens have to go out.
            prompts = await asyncio.to_thread(self.tokenize, body)
        except ValueError as error:
            raise bad_request(str(error), self.prompt_field) from error
        for prompt in prompts:
            self._check_prompt(prompt)
        return prompts

    def _check_prompt(self, prompt: list[int]) -> None:
        if not prompt:
            raise bad_request("the prompt is empty; it must have at least one token", self.prompt_field)
        vocab_size, limit = self.engine.vocab_size, self.engine.max_model_len
        wrong = min(prompt) if min(prompt) < 0 else max(prompt)
        if not 0 <= wrong < vocab_size:
            message = f"token id {wrong} is not in the vocabulary; ids are from 0 to {vocab_size - 1}"
            raise bad_request(message, self.prompt_field)
        if len(prompt) >= limit:
            message = f"the prompt has {len(prompt)} tokens; prompt and answer together have room for {limit}"
            raise bad_request(message, self.prompt_field, "context_length_exceeded")


async def _first(chunks: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(chunks)

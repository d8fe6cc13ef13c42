"""The application: routes, and nothing that a route does not need."""

from __future__ import annotations

import time
from http import HTTPStatus

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

import atom
from atom.entrypoints.openai.errors import ApiError, install_error_handlers
from atom.entrypoints.openai.metrics import CONTENT_TYPE, HttpMetrics
from atom.entrypoints.openai.serving_chat import ChatServing
from atom.entrypoints.openai.serving_completions import CompletionServing
from atom.model_engine.async_engine import AsyncEngine, EngineDeadError


def build_app(engine: AsyncEngine, *, model_name: str | None = None) -> FastAPI:
    """An application over a started engine. ``model_name``: the model's name in the API; default: the engine's."""
    name = model_name or engine.model_name
    created = int(time.time())
    metrics = HttpMetrics()
    chat = ChatServing(engine, name, metrics)
    completions = CompletionServing(engine, name, metrics)
    # Bodies are decoded by the endpoints, so a generated schema would say nothing of them.
    app = FastAPI(title="atom", version=atom.__version__, openapi_url=None)
    install_error_handlers(app)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await chat.respond(request)

    @app.post("/v1/completions")
    async def text_completions(request: Request) -> Response:
        return await completions.respond(request)

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_card(name, created, engine)]})

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        chat.check_model(model)
        return JSONResponse(_card(name, created, engine))

    @app.get("/health")
    async def health() -> Response:
        if not engine.is_alive():
            # The engine knows why it died and tells whoever asks it for anything.
            await engine.metrics()
            raise EngineDeadError("the engine process has ended")
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def prometheus() -> Response:
        try:
            figures = await engine.metrics()
        except EngineDeadError:
            figures = None
        return Response(metrics.render(figures), media_type=CONTENT_TYPE)

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        if not await engine.reset_prefix_cache():
            message = "the prefix cache is in use by running requests; try again when they have ended"
            raise ApiError(HTTPStatus.CONFLICT, message, code="cache_in_use")
        return JSONResponse({"status": "ok"})

    @app.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": atom.__version__})

    return app


def _card(name: str, created: int, engine: AsyncEngine) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "atom",
        "max_model_len": engine.max_model_len,
    }

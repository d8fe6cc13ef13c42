"""Failures in the shape that OpenAI clients read: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import logging
from http import HTTPStatus

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from atom.model_engine.async_engine import EngineDeadError

logger = logging.getLogger(__name__)

# Not a registered status: what proxies log for a client that left. Nobody receives it.
CLIENT_CLOSED_REQUEST = 499


class ApiError(Exception):
    """A request that ends with an HTTP error. ``param`` is the field at fault, ``code`` a name that programs match."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> bytes:
        """The error as JSON."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def response(self, headers: dict[str, str] | None = None) -> Response:
        """The error as an HTTP response."""
        return Response(self.body(), self.status, headers, media_type="application/json")


class ClientGone(Exception):
    """The client closed its connection before its response began."""


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400 for a request that cannot be served as it is."""
    return ApiError(HTTPStatus.BAD_REQUEST, message, param=param, code=code)


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of any failure; the details of an unexpected one go to the log alone."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineDeadError):
        return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, f"the engine is dead: {error}", code="engine_dead")
    logger.error("a request failed unexpectedly", exc_info=error)
    return _internal_error()


def install_error_handlers(app: FastAPI) -> None:
    """Make ``app`` answer every failure, unknown routes included, in the shape above."""

    async def known(_: Request, error: Exception) -> Response:
        return as_api_error(error).response()

    async def routing(request: Request, error: HTTPException) -> Response:
        message = f"{error.detail}: {request.method} {request.url.path}"
        return ApiError(error.status_code, message).response(error.headers)

    async def gone(_: Request, __: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    async def unexpected(_: Request, __: Exception) -> Response:
        # The application raises the failure again once this is sent, and the server logs it.
        return _internal_error().response()

    for kind in (ApiError, EngineDeadError):
        app.add_exception_handler(kind, known)
    for kind in (ClientGone, ClientDisconnect):
        app.add_exception_handler(kind, gone)
    app.add_exception_handler(HTTPException, routing)
    app.add_exception_handler(Exception, unexpected)


def _internal_error() -> ApiError:
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, "internal server error", code="internal_error")

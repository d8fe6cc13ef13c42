"""What crosses the border between a front end's process and the engine core's, in msgpack."""

from __future__ import annotations

from typing import Any

import msgspec

from atom.model_engine.messages import EngineOutput, EngineRequest


class AddRequests(msgspec.Struct, tag=True):
    """Front end to core: start these; each is answered by outputs or by :class:`Refused`."""

    requests: list[EngineRequest]


class AbortRequests(msgspec.Struct, tag=True):
    """Front end to core: stop these; ``reason`` is what they count as."""

    request_ids: list[str]
    reason: str = "abort"


class UtilityCall(msgspec.Struct, tag=True):
    """Front end to core: call a method without arguments; answered by a :class:`UtilityResult` with the same id."""

    call_id: int
    method: str


class Shutdown(msgspec.Struct, tag=True):
    """Front end to core: end the process."""


class Outputs(msgspec.Struct, tag=True):
    """Core to front end: what one step computed."""

    outputs: list[EngineOutput]


class Refused(msgspec.Struct, tag=True):
    """Core to front end: the request cannot be taken, and why."""

    request_id: str
    reason: str


class UtilityResult(msgspec.Struct, tag=True):
    """Core to front end: what a call returned, or the text of its error."""

    call_id: int
    result: Any = None
    error: str | None = None


class Ready(msgspec.Struct, tag=True):
    """Core to front end, once, over the start-up pipe: the engine serves."""

    info: dict[str, Any]


class StartupFailed(msgspec.Struct, tag=True):
    """Core to front end, once, over the start-up pipe: the error; ``bad_setting`` if it was a ``ValueError``."""

    reason: str
    bad_setting: bool


ToCore = AddRequests | AbortRequests | UtilityCall | Shutdown
FromCore = Outputs | Refused | UtilityResult
Startup = Ready | StartupFailed
UTILITIES = frozenset({"reset_prefix_cache", "cache_stats", "metrics", "info"})

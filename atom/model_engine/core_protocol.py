"""What front ends need of an engine core, and how they get one."""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING, Any, Protocol

from atom.model_engine.messages import EngineOutput, EngineRequest
from atom.utils.threads import yield_idle_cores

if TYPE_CHECKING:
    from atom.config import EngineConfig

ENGINE_CORE = "atom.model_engine.engine_core:EngineCore"


class EngineCoreProtocol(Protocol):
    """An engine core, driven by one caller.

    ``add_request`` raises ``ValueError`` on a request that it cannot take. No output follows for a request once
    ``abort_requests`` named it; unknown ids are ignored. ``step`` is called only while ``has_unfinished``, without a
    pause, so a core that can only wait for something waits inside it. ``info`` has ``model_name``, ``vocab_size`` and
    ``max_model_len`` (tokens).
    """

    def add_request(self, request: EngineRequest) -> None: ...
    def abort_requests(self, request_ids: list[str], reason: str = "abort") -> None: ...
    def has_unfinished(self) -> bool: ...
    def step(self) -> list[EngineOutput]: ...
    def reset_prefix_cache(self) -> bool: ...
    def resize_state_slots(self, num_slots: int) -> None: ...
    def cache_stats(self) -> dict[str, int | float]: ...
    def metrics(self) -> dict[str, int | float]: ...
    def info(self) -> dict[str, Any]: ...
    def shutdown(self) -> None: ...


def make_core(config: EngineConfig, core_class: str = ENGINE_CORE) -> EngineCoreProtocol:
    """Build the engine core named ``module:class``. Imports it only now, as it brings torch."""
    yield_idle_cores()
    return pkgutil.resolve_name(core_class)(config)

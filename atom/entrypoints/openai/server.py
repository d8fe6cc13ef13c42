"""The process around the application: starts the engine, listens, and ends both in order on a signal."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator

import uvicorn

from atom.entrypoints.openai.app import build_app
from atom.model_engine.async_engine import AsyncEngine

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def serve(
    engine: AsyncEngine,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    model_name: str | None = None,
    shutdown_timeout: int = 30,
    log_level: str = "info",
) -> None:
    """Start ``engine`` and serve it until SIGINT or SIGTERM; call from the main thread.

    port: 0 picks a free one; the address is printed once requests are taken. shutdown_timeout: seconds that running
    requests get to end after the first signal; a second signal ends them at once. Raises ``OSError`` if the address
    cannot be listened on, and what ``engine.start`` raises.
    """
    with (
        socket.create_server((host, port), family=_family(host), backlog=2048) as listener,
        contextlib.suppress(asyncio.CancelledError),
    ):
        asyncio.run(_serve(engine, listener, model_name, shutdown_timeout, log_level))


async def _serve(
    engine: AsyncEngine, listener: socket.socket, model_name: str | None, shutdown_timeout: int, log_level: str
) -> None:
    loop, starting = asyncio.get_running_loop(), asyncio.current_task()
    for number in _SIGNALS:
        loop.add_signal_handler(number, starting.cancel)
    try:
        await engine.start()
        config = uvicorn.Config(
            build_app(engine, model_name=model_name),
            log_level=log_level,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=shutdown_timeout,
        )
        server = _Server(config, listener)
        await server.serve(sockets=[listener])
        # What the timeout or a second signal cut short still has to take its requests out of the engine.
        running = list(server.server_state.tasks)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    finally:
        engine.shutdown()


class _Server(uvicorn.Server):
    """Leaves signals to the event loop: the base class re-raises them and would end the process before the engine."""

    def __init__(self, config: uvicorn.Config, listener: socket.socket) -> None:
        super().__init__(config)
        self._listener = listener

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Turn the first signal into a graceful end and the second into an immediate one."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen, and say where."""
        await super().startup(sockets)
        host, port = self._listener.getsockname()[:2]
        print(f"Listening on http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)

    def _on_signal(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]

"""A front end's side of the engine core's process: starts it, talks to it, notices its death, ends it."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import logging
import multiprocessing
import shutil
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from atom.model_engine.core_messages import (
    FromCore,
    Ready,
    Shutdown,
    Startup,
    StartupFailed,
    ToCore,
    UtilityCall,
    UtilityResult,
)
from atom.model_engine.core_process import INPUT_SOCKET, OUTPUT_SOCKET, run_core_process

if TYPE_CHECKING:
    from atom.config import EngineConfig

logger = logging.getLogger(__name__)

# Time for the core to end in good order before it is killed, in seconds; while it starts it takes no messages.
_SHUTDOWN_GRACE_S = 4.0
_START_GRACE_S = 1.0
# The path of a local socket is limited by the system to 107 bytes.
_MAX_SOCKET_DIR = 90


class EngineDeadError(RuntimeError):
    """The engine core's process is gone; nothing that ran in it can be completed."""


class CoreClient:
    """One engine core in its own process. All methods belong to the thread of the event loop that runs :meth:`start`.

    on_message: called with every message except results of calls. on_death: called once when the process has died
    by itself, with the error that tells how.
    """

    def __init__(
        self,
        config: EngineConfig,
        core_class: str,
        on_message: Callable[[FromCore], None],
        on_death: Callable[[EngineDeadError], None],
    ) -> None:
        self._config = config
        self._core_class = core_class
        self._on_message = on_message
        self._on_death = on_death
        self._process: multiprocessing.process.BaseProcess | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._serving = False
        self._error: EngineDeadError | None = None
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count()
        self._decoder = msgspec.msgpack.Decoder(FromCore)

    @property
    def pid(self) -> int | None:
        """Process id of the engine core; None before the start."""
        return None if self._process is None else self._process.pid

    def is_alive(self) -> bool:
        """Whether the process runs and was not told to end."""
        return self._error is None and self._process is not None and self._process.is_alive()

    async def start(self) -> dict[str, Any]:
        """Start the process; return the core's info once it serves.

        Raises ``ValueError`` or ``RuntimeError`` with the core's own words if it cannot start, and
        :class:`EngineDeadError` if its process ends without any. After an error nothing is left to shut down.
        """
        self._loop = asyncio.get_running_loop()
        self._socket_dir = _make_socket_dir()
        self._context = zmq.Context()
        self._input = self._context.socket(zmq.PUSH)
        self._output = self._context.socket(zmq.PULL)
        for socket in (self._input, self._output):
            socket.set_hwm(0)  # sending must never block the event loop
        self._output.bind(f"ipc://{self._socket_dir / OUTPUT_SOCKET}")
        # A connecting socket queues what is sent before the other side listens.
        self._input.connect(f"ipc://{self._socket_dir / INPUT_SOCKET}")
        # Runs before multiprocessing's own exit handler, which would wait for the process for ever.
        atexit.register(self.shutdown)
        try:
            info = await self._launch()
        except BaseException:
            self.shutdown()
            raise
        self._serving = True
        self._loop.add_reader(self._process.sentinel, self._on_exit)
        self._loop.add_reader(self._output.FD, self._on_readable)
        self._on_readable()
        return info

    def send(self, message: ToCore) -> None:
        """Send a message, without waiting. Raises :class:`EngineDeadError` if the process is gone."""
        if self._error is not None:
            raise self._error
        if self._process is None:
            raise EngineDeadError("the engine core was not started")
        self._input.send(msgspec.msgpack.encode(message))

    async def call(self, method: str) -> Any:
        """Call a method of the core without arguments. Raises ``RuntimeError`` with the text of its error."""
        call_id = next(self._call_ids)
        self.send(UtilityCall(call_id, method))
        self._calls[call_id] = asyncio.get_running_loop().create_future()
        try:
            return await self._calls[call_id]
        finally:
            del self._calls[call_id]

    def shutdown(self) -> None:
        """End the process and remove what it left, within 5 seconds. Calling it again does nothing."""
        if self._loop is None or self._context.closed:
            return
        atexit.unregister(self.shutdown)
        process = self._process
        self._close(EngineDeadError("the engine was shut down"))
        if process is not None:
            self._input.send(msgspec.msgpack.encode(Shutdown()))
            grace = _SHUTDOWN_GRACE_S if self._serving else _START_GRACE_S
            process.join(grace)
            if process.is_alive():
                logger.warning("the engine core did not end within %.0f s and is killed", grace)
                process.kill()
            process.join()
        self._release()

    async def _launch(self) -> dict[str, Any]:
        spawn = multiprocessing.get_context("spawn")
        reader, writer = spawn.Pipe(duplex=False)
        log_level = logging.getLogger().getEffectiveLevel()
        process = spawn.Process(
            target=run_core_process,
            args=(self._config, self._core_class, str(self._socket_dir), writer, log_level),
            name="atom-engine-core",
        )
        with reader:
            with writer:
                process.start()
            self._process = process
            frame = await self._read_startup(reader)
        if frame is None:
            process.join()
            raise EngineDeadError(f"the engine core ended while starting, with exit code {process.exitcode}")
        match msgspec.msgpack.decode(frame, type=Startup):
            case Ready(info=info):
                return info
            case StartupFailed(reason=reason, bad_setting=bad_setting):
                raise ValueError(reason) if bad_setting else RuntimeError(reason)

    async def _read_startup(self, reader: Connection) -> bytes | None:
        """The process's first message; None if it ended without one."""
        readable = self._loop.create_future()
        self._loop.add_reader(reader.fileno(), lambda: readable.done() or readable.set_result(None))
        try:
            await readable
            return reader.recv_bytes()
        except EOFError:
            return None
        finally:
            self._loop.remove_reader(reader.fileno())

    def _on_readable(self) -> None:
        # The descriptor signals a change, not a state: read until nothing is left.
        while not self._output.closed:
            try:
                frame = self._output.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._dispatch(self._decoder.decode(frame))
            except Exception:
                logger.exception("a message of the engine core cannot be used")

    def _dispatch(self, message: FromCore) -> None:
        if not isinstance(message, UtilityResult):
            self._on_message(message)
            return
        future = self._calls.get(message.call_id)
        if future is None or future.done():
            return
        if message.error is not None:
            future.set_exception(RuntimeError(message.error))
        else:
            future.set_result(message.result)

    def _on_exit(self) -> None:
        self._process.join()
        error = EngineDeadError(f"the engine core died with exit code {self._process.exitcode}")
        logger.error("%s", error)
        self._on_readable()
        atexit.unregister(self.shutdown)
        self._close(error)
        self._release()
        self._on_death(error)

    def _close(self, error: EngineDeadError) -> None:
        """Stop listening; from now on every call raises ``error``."""
        self._error = error
        if not self._loop.is_closed():
            if self._process is not None:
                self._loop.remove_reader(self._process.sentinel)
            self._loop.remove_reader(self._output.FD)
            for future in self._calls.values():
                if not future.done():
                    future.set_exception(error)

    def _release(self) -> None:
        self._context.destroy(linger=0)
        if self._process is not None:
            self._process.close()
            self._process = None
        shutil.rmtree(self._socket_dir, ignore_errors=True)


def _make_socket_dir() -> Path:
    """A new private directory whose path is short enough for sockets in it."""
    path = tempfile.mkdtemp(prefix="atom-")
    if len(path) > _MAX_SOCKET_DIR:
        shutil.rmtree(path)
        path = tempfile.mkdtemp(prefix="atom-", dir="/tmp")
    return Path(path)

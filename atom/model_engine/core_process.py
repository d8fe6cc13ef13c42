"""The engine core's own process: takes messages, steps, sends outputs, and ends with its parent."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
import threading
import time
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

from atom.model_engine.core_messages import (
    UTILITIES,
    AbortRequests,
    AddRequests,
    FromCore,
    Outputs,
    Ready,
    Refused,
    Shutdown,
    StartupFailed,
    ToCore,
    UtilityCall,
    UtilityResult,
)
from atom.model_engine.core_protocol import EngineCoreProtocol, make_core
from atom.model_engine.messages import EngineOutput, EngineRequest

if TYPE_CHECKING:
    from atom.config import EngineConfig

logger = logging.getLogger(__name__)

INPUT_SOCKET = "input"
OUTPUT_SOCKET = "output"
EXIT_STARTUP_FAILED = 3
EXIT_STEP_FAILED = 4
# How long a process whose parent is gone may take to end in good order, in seconds.
_ORPHAN_GRACE_S = 3.0


def run_core_process(
    config: EngineConfig, core_class: str, socket_dir: str, startup: Connection, log_level: int
) -> None:
    """Entry point of the process: build the core, report on ``startup``, serve until told to end or orphaned."""
    # A Ctrl-C in the terminal reaches the whole process group; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A stop that reaches the whole process group is the front end's to carry out: requests get their time to end.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    threading.Thread(target=_end_with_parent, args=(socket_dir,), daemon=True).start()
    encode = msgspec.msgpack.encode
    try:
        core = make_core(config, core_class)
        server = _CoreServer(core, Path(socket_dir))
        ready = encode(Ready(core.info()))
    except Exception as error:
        # A setting that cannot be used explains itself; anything else needs its traceback.
        if not isinstance(error, ValueError):
            logger.exception("the engine core cannot start")
        reason = str(error) or type(error).__name__
        startup.send_bytes(encode(StartupFailed(reason, isinstance(error, ValueError))))
        raise SystemExit(EXIT_STARTUP_FAILED) from None
    # What lives as long as the engine is not looked at again by the collector, whose pauses would show in a step.
    gc.collect()
    gc.freeze()
    startup.send_bytes(ready)
    startup.close()
    raise SystemExit(server.serve())


def _end_with_parent(socket_dir: str) -> None:
    """Wait for the parent's death. The serving loop sees it too and ends; a loop stuck in a step is ended here."""
    wait([parent_process().sentinel])
    time.sleep(_ORPHAN_GRACE_S)
    shutil.rmtree(socket_dir, ignore_errors=True)
    os._exit(1)


class _CoreServer:
    """Drives one core by the messages of one front end."""

    def __init__(self, core: EngineCoreProtocol, socket_dir: Path) -> None:
        self._core = core
        self._socket_dir = socket_dir
        self._context = zmq.Context()
        self._input = self._context.socket(zmq.PULL)
        self._output = self._context.socket(zmq.PUSH)
        for socket in (self._input, self._output):
            socket.set_hwm(0)  # a full queue would block the loop, or lose an abort
        self._input.bind(f"ipc://{socket_dir / INPUT_SOCKET}")
        self._output.connect(f"ipc://{socket_dir / OUTPUT_SOCKET}")
        self._parent = parent_process().sentinel
        self._poller = zmq.Poller()
        self._poller.register(self._input, zmq.POLLIN)
        self._poller.register(self._parent, zmq.POLLIN)
        self._decoder = msgspec.msgpack.Decoder(ToCore)
        self._running: set[str] = set()
        self._step_failed = False
        self._stopping = False

    def serve(self) -> int:
        """Serve until told to end or orphaned; return the process's exit code."""
        code = 0
        while not self._stopping:
            self._receive(0 if self._core.has_unfinished() else None)
            if not self._stopping and self._core.has_unfinished() and not self._step():
                code = EXIT_STEP_FAILED
                break
        self._core.shutdown()
        self._context.destroy(linger=1000)
        return code

    def _receive(self, timeout_ms: int | None) -> None:
        """Handle every waiting message; with ``timeout_ms`` None, wait for the first."""
        ready = dict(self._poller.poll(timeout_ms))
        if self._parent in ready:
            shutil.rmtree(self._socket_dir, ignore_errors=True)
            self._stopping = True
        while not self._stopping:
            try:
                frame = self._input.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(self._decoder.decode(frame))

    def _handle(self, message: ToCore) -> None:
        match message:
            case AddRequests(requests=requests):
                for request in requests:
                    self._add(request)
            case AbortRequests(request_ids=request_ids, reason=reason):
                self._running.difference_update(request_ids)
                self._core.abort_requests(request_ids, reason)
            case UtilityCall():
                self._send(self._call(message))
            case Shutdown():
                self._stopping = True

    def _add(self, request: EngineRequest) -> None:
        try:
            self._core.add_request(request)
            self._running.add(request.request_id)
        except ValueError as error:
            self._send(Refused(request.request_id, str(error)))
        except Exception as error:
            logger.exception("request %s cannot be added", request.request_id)
            self._fail([request.request_id], error)

    def _call(self, call: UtilityCall) -> UtilityResult:
        try:
            if call.method not in UTILITIES:
                raise ValueError(f"no such call: {call.method}")
            result = getattr(self._core, call.method)()
            return UtilityResult(call.call_id, msgspec.to_builtins(result))  # raises on what cannot be sent
        except Exception as error:
            logger.exception("call %s failed", call.method)
            return UtilityResult(call.call_id, error=_describe(error))

    def _step(self) -> bool:
        """Run one step. One that raises ends the running requests; False if the step before it raised too."""
        try:
            outputs = self._core.step()
        except Exception as error:
            logger.exception("a step failed; its %d requests end with an error", len(self._running))
            failed = sorted(self._running)
            self._running.clear()
            self._fail(failed, error)
            if self._step_failed:
                logger.error("two steps in a row failed; the engine core ends")
                return False
            self._step_failed = True
            self._core.abort_requests(failed, "error")
            return True
        self._step_failed = False
        self._running.difference_update(output.request_id for output in outputs if output.finish_reason is not None)
        if outputs:
            self._send(Outputs(outputs))
        return True

    def _fail(self, request_ids: list[str], error: Exception) -> None:
        text = _describe(error)
        self._send(
            Outputs([EngineOutput(request_id, [], finish_reason="error", error=text) for request_id in request_ids])
        )

    def _send(self, message: FromCore) -> None:
        self._output.send(msgspec.msgpack.encode(message))


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"

"""An ``atom serve`` of the demo's own, in a process of its own, on a free loopback port."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from types import TracebackType

from atom.entrypoints.demo.errors import DemoError

_READY = re.compile(r"Listening on http://(\S+):(\d+)")
_READY_TIMEOUT_S = 300.0
# The server lets running requests end, its engine says what the cache did, and both have their own limits below this.
_STOP_TIMEOUT_S = 20.0
# A request fails a moment before the death of its server can be seen.
_DEATH_TIMEOUT_S = 1.0
_LOG_TAIL_LINES = 15
_CACHE_LINES = re.compile(r"\[(?:Cache Stats|Cache Pools|Checkpoint Fates)\].*")


class ServerProcess:
    """A context manager: ready to take requests when entered, gone when left. ``flags``: those of ``atom serve``.

    Raises :class:`DemoError` with the server's own words if it does not get ready.
    """

    host: str
    port: int

    def __init__(self, flags: Sequence[str]) -> None:
        # The last lines of the log are the cache's summary: no periodic one comes before it, unless flags ask for it.
        own = ["--host=127.0.0.1", "--port=0", "--log-level=INFO", "--cache-stats-interval=0"]
        self._command = [sys.executable, "-m", "atom.entrypoints.cli", "serve", *own, *flags]
        self._ready = threading.Event()

    def __enter__(self) -> ServerProcess:
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        threading.Thread(target=self._read_output, daemon=True).start()
        try:
            if not self._ready.wait(_READY_TIMEOUT_S):
                raise DemoError(f"the server did not get ready within {_READY_TIMEOUT_S:.0f} s\n{self._log_tail()}")
            if not hasattr(self, "port"):
                raise DemoError(f"the server did not start (exit code {self._process.wait()}):\n{self._log_tail()}")
        except BaseException:
            self.stop()
            self._log.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        died = self._exit_code() if isinstance(error, DemoError) else None
        self.stop()
        tail = self._log_tail()
        self._log.close()
        if died is not None:
            raise DemoError(f"the server died (exit code {died}):\n{tail}") from error

    def stop(self) -> None:
        """End the process, gently first. Calling it again does nothing."""
        self._process.terminate()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def cache_lines(self) -> list[str]:
        """What the log says of the cache; its summary is there once the server was stopped."""
        return [match.group() for line in self._read_log() if (match := _CACHE_LINES.search(line))]

    def _exit_code(self) -> int | None:
        """The process's exit code if it ended by itself; None if it still runs."""
        try:
            return self._process.wait(_DEATH_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return None

    def _read_output(self) -> None:
        # Read to the end, so that the server never blocks on a full pipe.
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                match = _READY.search(line)
                if match is not None:
                    self.host, self.port = match.group(1), int(match.group(2))
                    self._ready.set()
        self._ready.set()

    def _read_log(self) -> list[str]:
        self._log.seek(0)
        return self._log.read().splitlines()

    def _log_tail(self) -> str:
        return "\n".join(f"  {line}" for line in self._read_log()[-_LOG_TAIL_LINES:])

"""Writes what was served as a trace that ``atom replay`` reads: times, lengths and block keys, no text."""

from __future__ import annotations

import json
import logging
import time
from typing import Any, TextIO

from atom.model_engine.sequence import Sequence

logger = logging.getLogger(__name__)


class TraceRecorder:
    """One JSON object a line: a header, then each request when it ends, about 35 bytes for every block of it.

    ``t``, ``end``: seconds from the recorder's start to the request's arrival and end. ``in``, ``out``: tokens of prompt
    and answer. ``cached``: tokens resumed at the first admission. ``keys``: hex keys of the full blocks of prompt and
    answer. ``stop``: tool_call or end_turn, else why it ended: stop, length, abort, error. ``counted``: only on lines of
    further samples of a prompt, which statistics do not count, as false. Requests that were never admitted leave no line.
    The file is made, or emptied, when the first request arrives. A failure to write ends the recording and nothing else.
    """

    def __init__(self, path: str, block_size: int, model: str) -> None:
        self._path = path
        self._header = {"atom_trace": 1, "block_size": block_size, "model": model}
        self._file: TextIO | None = None
        self._failed = False
        self._start = time.monotonic()
        self._requests: dict[str, tuple[float, Sequence]] = {}

    def arrived(self, seq: Sequence) -> None:
        """``seq`` was queued."""
        if self._file is None:
            self._write(self._header)
        self._requests[seq.request_id] = (time.monotonic() - self._start, seq)

    def ended(self, request_id: str, reason: str) -> None:
        """A request is over. O(blocks)."""
        arrival, seq = self._requests.pop(request_id)
        if seq.num_cached_tokens is not None:
            self._write(
                {
                    "t": round(arrival, 9),
                    "end": round(time.monotonic() - self._start, 9),
                    "in": seq.num_prompt_tokens,
                    "out": seq.num_output_tokens,
                    "cached": seq.num_cached_tokens,
                    "stop": seq.ending.value if seq.ending is not None else reason,
                    **({} if seq.counted else {"counted": False}),
                    "keys": [key.hex() for key in seq.block_keys],
                }
            )

    def close(self) -> None:
        """No more is recorded."""
        if self._file is not None:
            self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        if self._failed:
            return
        try:
            if self._file is None:
                self._file = open(self._path, "w", encoding="utf-8", buffering=1)  # noqa: SIM115
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        except OSError as error:
            logger.error("recording to %s ends: %s", self._path, error)
            self._failed = True

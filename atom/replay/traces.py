"""Readers of trace files: the format is told from the first line, and a bad line is refused with its number."""

from __future__ import annotations

import gzip
import json
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from atom.model_engine.eviction import Ending
from atom.model_engine.ids import BlockKey
from atom.model_engine.prefix_hash import PrefixHasher
from atom.replay.trace import Trace, TraceRequest, number_keys

MOONCAKE_BLOCK = 512
DEFAULT_BLOCK = 64
RECORDED = "atom_trace"
ENDINGS = {ending.value: ending for ending in Ending} | {"tool_use": Ending.TOOL_CALL, "tool_calls": Ending.TOOL_CALL}

Encode = Callable[[str], list[int]]
Lines = Iterator[tuple[int, dict[str, Any]]]


class TraceError(ValueError):
    """A trace that cannot be read; the text names file, line and what was expected."""


def read_trace(path: Path, encode: Callable[[], Encode] | None = None, block_size: int = DEFAULT_BLOCK) -> Trace:
    """Read a trace of any known format, plain or gzipped.

    ``encode`` makes the tokenizer when a trace holds text; ``block_size`` counts where the trace has tokens or text.
    Raises :class:`TraceError` on a bad line and OSError where the file cannot be read.
    """
    lines = _Lines(path)
    first = lines.peek()
    reader = _reader_of(first)
    if reader is None:
        raise TraceError(f"{path}:1: of no known format; expected the fields of one of {', '.join(_FIELDS)}")
    make = _Builder(path, block_size, encode)
    try:
        for number, line in lines:
            make.line = number
            reader(make, line)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        if isinstance(error, TraceError):
            raise
        what = f"the field {error} is missing" if isinstance(error, KeyError) else str(error)
        raise TraceError(f"{path}:{lines.number}: {what}") from error
    return make.trace()


class _Lines:
    """Parsed lines of a file, counted from 1; empty ones are skipped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.number = 0
        with open(path, "rb") as file:
            zipped = file.read(2) == b"\x1f\x8b"
        self._file = gzip.open(path, "rt", encoding="utf-8") if zipped else open(path, encoding="utf-8")  # noqa: SIM115
        self._ahead: dict[str, Any] | None = None

    def peek(self) -> dict[str, Any]:
        line = next(self, None)
        if line is None:
            raise TraceError(f"{self.path}: holds no request")
        self._ahead = line[1]
        return line[1]

    def __iter__(self) -> Lines:
        return self

    def __next__(self) -> tuple[int, dict[str, Any]]:
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            return self.number, ahead
        try:
            for text in self._file:
                self.number += 1
                if text.strip():
                    return self.number, self._parse(text)
        except (EOFError, gzip.BadGzipFile, UnicodeDecodeError) as error:
            raise TraceError(f"{self.path}:{self.number + 1}: {error}") from error
        self._file.close()
        raise StopIteration

    def _parse(self, text: str) -> dict[str, Any]:
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            raise TraceError(f"{self.path}:{self.number}: not JSON: {error}") from error
        if not isinstance(line, dict):
            raise TraceError(f"{self.path}:{self.number}: a line must be a JSON object")
        return line


class _Builder:
    """Collects requests, numbering blocks as they come."""

    def __init__(self, path: Path, block_size: int, encode: Callable[[], Encode] | None) -> None:
        self.path = path
        self.line = 0
        self.block_size = block_size
        self.timed = True
        self.requests: list[TraceRequest] = []
        self.num_blocks = 0
        self.keys: dict[BlockKey, int] = {}
        self._make_encode, self._encode = encode, None
        self._sessions: dict[object, int] = {}
        self.global_ids = self.numbering()
        self._hasher = PrefixHasher(("trace",), block_size)

    def numbering(self) -> defaultdict[int, int]:
        """A table from ids of one scope to block numbers, filled as it is asked."""
        return defaultdict(self._next_number)

    def _next_number(self) -> int:
        self.num_blocks += 1
        return self.num_blocks - 1

    def session(self, name: object) -> int:
        return self._sessions.setdefault(name, len(self._sessions))

    def add(
        self,
        session: int,
        time: float,
        prompt: int,
        output: int,
        blocks: array[int],
        ending: Ending | None = None,
        answer: array[int] | None = None,
    ) -> None:
        full = prompt // self.block_size
        if prompt < 1 or output < 0:
            raise ValueError(f"a request of {prompt} prompt and {output} answer tokens")
        if len(blocks) < full:
            raise ValueError(f"{len(blocks)} block ids, and {prompt} tokens have {full} full blocks")
        if not 0 <= time < float("inf"):
            raise ValueError(f"a time of {time}")
        self.requests.append(
            TraceRequest(
                len(self.requests), session, time, prompt, max(output, 1), blocks[:full], ending, answer or array("I")
            )
        )

    def add_tokens(self, session: int, time: float, tokens: list[int], output: int, ending: Ending | None) -> None:
        keys: list[BlockKey] = []
        self._hasher.extend(keys, self._hasher.root(), tokens, len(tokens) // self.block_size)
        self.add(session, time, len(tokens), output, self.numbers_of(keys), ending)

    def numbers_of(self, keys: list[BlockKey]) -> array[int]:
        table = self.keys
        return array("I", [table.setdefault(key, len(table)) for key in keys])

    def encode(self, text: str) -> list[int]:
        if self._encode is None:
            if self._make_encode is None:
                raise ValueError("this trace holds text; name a tokenizer")
            self._encode = self._make_encode()
        return self._encode(text)

    def trace(self) -> Trace:
        keys = list(self.keys) if self.keys else number_keys(self.num_blocks)
        # Within a session, or in the whole trace, requests come in the order of time; the sort is stable.
        if self.timed:
            start = min((request.time for request in self.requests), default=0.0)
            for request in self.requests:
                request.time -= start
        self.requests.sort(key=lambda request: (0 if self.timed else request.session, request.time))
        for index, request in enumerate(self.requests):
            request.index = index
        return Trace(self.path.name, self.block_size, self.timed, keys, self.requests)


def _read_mooncake(make: _Builder, line: dict[str, Any]) -> None:
    make.block_size = MOONCAKE_BLOCK
    blocks = array("I", map(make.global_ids.__getitem__, line["hash_ids"]))
    make.add(0, line["timestamp"] / 1e3, line["input_length"], line["output_length"], blocks)


def _read_session(make: _Builder, line: dict[str, Any]) -> None:
    make.timed = False
    if make.requests and make.block_size != line["block_size"]:
        raise ValueError(f"a block size of {line['block_size']} after one of {make.block_size}")
    make.block_size = line["block_size"]
    number = (make.numbering() if line["hash_id_scope"] == "local" else make.global_ids).__getitem__
    session = make.session(make.line)
    for time, request in sorted(_flatten(line["requests"], 0.0), key=lambda pair: pair[0]):
        blocks = array("I", map(number, request["hash_ids"]))
        make.add(session, time, request["in"], request["out"], blocks, ENDINGS.get(request.get("stop", "")))


def _flatten(requests: list[dict[str, Any]], start: float) -> Iterator[tuple[float, dict[str, Any]]]:
    for request in requests:
        if request["type"] == "subagent":
            yield from _flatten(request["requests"], start + request["t"])
        else:
            yield start + request["t"], request


def _read_text(make: _Builder, line: dict[str, Any]) -> None:
    make.timed = False
    tokens, output = make.encode(line["input"]), len(make.encode(line["output"]))
    make.add_tokens(make.session(line["session_id"]), line["timestamp"] / 1e6, tokens, output, None)


def _read_plain(make: _Builder, line: dict[str, Any]) -> None:
    tokens = line["tokens"] if "tokens" in line else make.encode(line["text"])
    if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < 2**32 for token in tokens):
        raise ValueError("tokens must be a list of token ids")
    time = line.get("t", line.get("timestamp"))
    make.timed = make.timed and time is not None and "session" not in line
    session = make.session(line.get("session", ("line", make.line)))
    make.add_tokens(session, time or 0.0, tokens, line.get("out", 1), ENDINGS.get(line.get("stop", "")))


def _read_recorded(make: _Builder, line: dict[str, Any]) -> None:
    if RECORDED in line:
        make.block_size = line["block_size"]
        return
    numbers = make.numbers_of([bytes.fromhex(key) for key in line["keys"]])
    full = line["in"] // make.block_size
    ending = ENDINGS.get(line.get("stop", ""))
    make.add(0, line["t"], line["in"], line["out"], numbers[:full], ending, numbers[full:])


_FIELDS: dict[str, tuple[tuple[str, ...], Callable[[_Builder, dict[str, Any]], None]]] = {
    "a recorded trace (atom_trace, block_size)": ((RECORDED, "block_size"), _read_recorded),
    "sessions (block_size, hash_id_scope, requests)": (("block_size", "hash_id_scope", "requests"), _read_session),
    "Mooncake (timestamp, input_length, output_length, hash_ids)": (
        ("timestamp", "input_length", "output_length", "hash_ids"),
        _read_mooncake,
    ),
    "session texts (timestamp, session_id, input, output)": (
        ("timestamp", "session_id", "input", "output"),
        _read_text,
    ),
    "tokens": (("tokens",), _read_plain),
    "text": (("text",), _read_plain),
}


def _reader_of(first: dict[str, Any]) -> Callable[[_Builder, dict[str, Any]], None] | None:
    return next((reader for names, reader in _FIELDS.values() if all(name in first for name in names)), None)

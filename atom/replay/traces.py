"""Readers of trace files: the format is told from the first line, and a bad line is refused with its number."""

from __future__ import annotations

import gzip
import json
import zlib
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from atom.model_engine.eviction import Ending
from atom.model_engine.ids import BlockKey
from atom.model_engine.prefix_hash import PrefixHasher
from atom.replay import fields
from atom.replay.trace import Trace, TraceRequest, number_keys

MOONCAKE_BLOCK = 512
DEFAULT_BLOCK = 64
LARGEST_BLOCK = 1_000_000
LONGEST_REQUEST = 1_000_000_000
"""Tokens of a prompt, and of an answer, at most: each takes a byte while it is replayed."""
LATEST = 10**12
"""Seconds that a time is at most. Today in milliseconds from 1970 on is later, so that a wrong unit is refused."""
RECORDED, RECORDED_VERSION = "atom_trace", 1
SCOPES = ("local", "global")
ENDINGS = {ending.value: ending for ending in Ending} | {"tool_use": Ending.TOOL_CALL, "tool_calls": Ending.TOOL_CALL}

Encode = Callable[[str], list[int]]
Lines = Iterator[tuple[int, dict[str, Any]]]


class TraceError(ValueError):
    """A trace that cannot be read; the text names file, line and what was expected."""


def read_trace(path: Path, encode: Callable[[], Encode] | None = None, block_size: int = DEFAULT_BLOCK) -> Trace:
    """Read a trace of any known format, plain or gzipped.

    ``encode`` makes the tokenizer when a trace holds text; ``block_size``, in tokens, counts where the trace has tokens or
    text. Raises :class:`TraceError` on a bad line and on a trace without requests, OSError where the file cannot be read.
    """
    lines = _Lines(path)
    first = lines.peek()
    reader = _reader_of(first)
    if reader is None:
        raise TraceError(f"{path}:{lines.number}: of no known format; use the fields of one of {', '.join(_FIELDS)}")
    make = _Builder(path, block_size, encode)
    try:
        for number, line in lines:
            make.line = number
            reader(make, line)
    except TraceError:
        raise
    except ValueError as error:
        raise TraceError(f"{path}:{lines.number}: {error}") from error
    if not make.requests:
        raise _no_requests(path)
    return make.trace()


def _no_requests(path: Path) -> TraceError:
    return TraceError(f"{path}: the trace holds no requests")


class _Lines:
    """Parsed lines of a file, counted from 1; empty ones are skipped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.number = 0
        self._texts = self._read()
        self._ahead: dict[str, Any] | None = None

    def peek(self) -> dict[str, Any]:
        line = next(self, None)
        if line is None:
            raise _no_requests(self.path)
        self._ahead = line[1]
        return line[1]

    def __iter__(self) -> Lines:
        return self

    def __next__(self) -> tuple[int, dict[str, Any]]:
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            return self.number, ahead
        for encoded in self._texts:
            self.number += 1
            if encoded.strip():
                return self.number, self._parse(encoded)
        raise StopIteration

    def _read(self) -> Iterator[bytes]:
        with open(self.path, "rb") as file:
            zipped = file.peek(2)[:2] == b"\x1f\x8b"
            try:
                with gzip.open(file) if zipped else file as lines:
                    yield from lines
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise TraceError(f"{self.path}:{self.number + 1}: not a whole gzip file: {error}") from error

    def _parse(self, encoded: bytes) -> dict[str, Any]:
        try:
            line = json.loads(encoded.decode("utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise self._error(f"not JSON: {error}") from error
        except ValueError as error:
            # The only other one: Python limits how long a number's text may be.
            raise self._error("a number has too many digits") from error
        except RecursionError as error:
            raise self._error("objects or lists are nested too deeply") from error
        if not isinstance(line, dict):
            raise self._error("a line must be a JSON object")
        return line

    def _error(self, what: str) -> TraceError:
        return TraceError(f"{self.path}:{self.number}: {what}")


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
        # By block number, the number before it plus 2; 1: it begins prompts, 0: it is new.
        self._before = np.zeros(1024, np.int64)
        self.global_ids = self.numbering()
        self._hasher = PrefixHasher(("trace",), block_size)

    def numbering(self) -> defaultdict[int | str, int]:
        """A table from ids of one scope to block numbers, filled as it is asked."""
        return defaultdict(self._next_number)

    def _next_number(self) -> int:
        self.num_blocks += 1
        return self.num_blocks - 1

    def session(self, name: object) -> int:
        return self._sessions.setdefault(name, len(self._sessions))

    def set_block_size(self, line: dict[str, Any]) -> None:
        """Blocks are of as many tokens as ``line`` says."""
        size = fields.whole(line, "block_size", 1, LARGEST_BLOCK)
        if self.requests and size != self.block_size:
            raise ValueError(f"a block size of {size} after one of {self.block_size}")
        self.block_size = size

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
        if len(blocks) < full:
            raise ValueError(f"{len(blocks)} block ids, and {prompt} tokens have {full} full blocks")
        self._check_chain(blocks[:full] + (answer or array("I")))
        self.requests.append(
            TraceRequest(
                len(self.requests), session, time, prompt, max(output, 1), blocks[:full], ending, answer or array("I")
            )
        )

    def _check_chain(self, blocks: array[int]) -> None:
        """A block names its whole prefix, so the same one comes before it wherever it is. O(blocks)."""
        if not blocks:
            return
        numbers = np.frombuffer(blocks, np.uint32)
        most = int(numbers.max())
        if most >= len(self._before):
            self._before = np.concatenate([self._before, np.zeros(most + 1, np.int64)])
        before = np.concatenate([[1], numbers[:-1] + np.int64(2)])
        known = self._before[numbers]
        self._before[numbers] = np.where(known, known, before)
        wrong = np.flatnonzero(self._before[numbers] != before)
        if len(wrong):
            raise ValueError(
                f"block {wrong[0] + 1} comes after another one elsewhere; an id must name its whole prefix"
            )

    def add_tokens(self, session: int, time: float, tokens: list[int], output: int, ending: Ending | None) -> None:
        if not tokens:
            raise ValueError("a prompt without tokens")
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
        # Requests come in the order of time within a session, and a timed trace is one; the sort is stable.
        if self.timed:
            start = min(request.time for request in self.requests)
            for request in self.requests:
                request.time -= start
                request.session = 0
        self.requests.sort(key=lambda request: (request.session, request.time))
        for index, request in enumerate(self.requests):
            request.index = index
        return Trace(self.path.name, self.block_size, self.timed, keys, self.requests)


def _read_mooncake(make: _Builder, line: dict[str, Any]) -> None:
    make.block_size = MOONCAKE_BLOCK
    blocks = array("I", map(make.global_ids.__getitem__, _ids(line)))
    time = fields.number(line, "timestamp", 0, LATEST * 1000) / 1e3
    make.add(0, time, _tokens(line, "input_length", 1), _tokens(line, "output_length", 0), blocks)


def _read_session(make: _Builder, line: dict[str, Any]) -> None:
    make.timed = False
    make.set_block_size(line)
    scope = fields.field(line, "hash_id_scope")
    if scope not in SCOPES:
        raise fields.refused("hash_id_scope", scope, " or ".join(SCOPES))
    ids = make.numbering() if scope == "local" else make.global_ids
    session = make.session(make.line)
    for time, request in sorted(_flatten(_requests(line)), key=lambda pair: pair[0]):
        blocks = array("I", map(ids.__getitem__, _ids(request)))
        make.add(session, time, _tokens(request, "in", 1), _tokens(request, "out", 0), blocks, _ending(request))


def _flatten(requests: list[dict[str, Any]]) -> Iterator[tuple[float, dict[str, Any]]]:
    waiting = [(0.0, request) for request in reversed(requests)]
    while waiting:
        start, request = waiting.pop()
        time = start + fields.number(request, "t", 0, LATEST)
        if request.get("type") == "subagent":
            waiting += [(time, nested) for nested in reversed(_requests(request))]
        else:
            yield time, request


def _requests(holder: dict[str, Any]) -> list[dict[str, Any]]:
    return fields.items(holder, "requests", "objects", dict)


def _ids(line: dict[str, Any]) -> list[int | str]:
    return fields.items(line, "hash_ids", "ids, whole numbers or texts", int, str)


def _tokens(line: dict[str, Any], name: str, low: int) -> int:
    return fields.whole(line, name, low, LONGEST_REQUEST)


def _ending(line: dict[str, Any]) -> Ending | None:
    """How the answer ended; None where the line does not say, or says something else."""
    return ENDINGS.get(fields.text(line, "stop")) if line.get("stop") is not None else None


def _session_name(line: dict[str, Any], name: str) -> object:
    value = fields.field(line, name)
    if isinstance(value, list | dict):
        raise fields.refused(name, value, "a text or a number")
    return value


def _read_text(make: _Builder, line: dict[str, Any]) -> None:
    make.timed = False
    tokens, output = make.encode(fields.text(line, "input")), len(make.encode(fields.text(line, "output")))
    time = fields.number(line, "timestamp", 0, LATEST * 1_000_000) / 1e6
    make.add_tokens(make.session(_session_name(line, "session_id")), time, tokens, output, None)


def _read_plain(make: _Builder, line: dict[str, Any]) -> None:
    if "tokens" in line:
        tokens = fields.items(line, "tokens", "token ids", int)
        if tokens and not 0 <= min(tokens) <= max(tokens) < 2**32:
            raise fields.refused("tokens", tokens, "token ids from 0 to 2**32 - 1")
    else:
        tokens = make.encode(fields.text(line, "text"))
    name = "t" if "t" in line else "timestamp"
    time = fields.number(line, name, 0, LATEST) if line.get(name) is not None else None
    make.timed = make.timed and time is not None and "session" not in line
    session = make.session(_session_name(line, "session") if "session" in line else ("line", make.line))
    make.add_tokens(session, time or 0.0, tokens, _tokens({"out": 1} | line, "out", 0), _ending(line))


def _read_recorded(make: _Builder, line: dict[str, Any]) -> None:
    if RECORDED in line:
        if line[RECORDED] != RECORDED_VERSION:
            raise fields.refused(RECORDED, line[RECORDED], f"{RECORDED_VERSION}, the only version there is")
        make.set_block_size(line)
        return
    prompt, output = _tokens(line, "in", 1), _tokens(line, "out", 0)
    full, most = prompt // make.block_size, (prompt + output) // make.block_size
    keys = fields.items(line, "keys", "texts", str)
    if not full <= len(keys) <= most:
        raise ValueError(f"{len(keys)} keys, and {prompt} + {output} tokens have {full} to {most} full blocks")
    try:
        numbers = make.numbers_of([bytes.fromhex(key) for key in keys])
    except ValueError:
        raise fields.refused("keys", keys, "hex digits, two for each byte") from None
    make.add(0, fields.number(line, "t", 0, LATEST), prompt, output, numbers[:full], _ending(line), numbers[full:])
    make.requests[-1].counted = line.get("counted") is not False
    make.requests[-1].complete = line.get("stop") not in ("abort", "error")


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

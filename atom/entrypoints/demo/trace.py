"""Reads recorded sessions: JSON lines with ``timestamp``, ``session_id`` and ``input``, plain or gzipped."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec

from atom.entrypoints.demo.errors import DemoError

_GZIP_MAGIC = b"\x1f\x8b"


class TraceRequest(msgspec.Struct, frozen=True):
    """One recorded request. ``input`` is the whole prompt; ``timestamp`` orders requests, in whatever unit."""

    timestamp: float
    session_id: str
    input: Annotated[str, msgspec.Meta(min_length=1)]


def read_trace(path: Path, max_sessions: int | None = None) -> list[TraceRequest]:
    """The requests in the order of their times, of the ``max_sessions`` sessions that start first (None: of all).

    Raises :class:`DemoError` with the number of a line that is no request, and on a file without any.
    """
    decoder = msgspec.json.Decoder(TraceRequest)
    requests: list[TraceRequest] = []
    for number, line in enumerate(_lines(path), start=1):
        try:
            requests.append(decoder.decode(line))
        except (msgspec.DecodeError, UnicodeError) as error:
            raise DemoError(f"{path}, line {number}: {error}") from error
    if not requests:
        raise DemoError(f"{path} holds no request")
    requests.sort(key=lambda request: request.timestamp)
    sessions = list(dict.fromkeys(request.session_id for request in requests))[:max_sessions]
    return [request for request in requests if request.session_id in sessions]


def _lines(path: Path) -> Iterator[bytes]:
    number = 0
    try:
        with _open(path) as file:
            for line in file:
                number += 1
                yield line
    except (OSError, EOFError, zlib.error) as error:
        place = f"{path}, after line {number}" if number else path
        raise DemoError(f"{place}: {getattr(error, 'strerror', None) or error}") from error


def _open(path: Path) -> BinaryIO:
    with path.open("rb") as file:
        zipped = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
    return gzip.open(path) if zipped else path.open("rb")

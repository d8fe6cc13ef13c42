"""A request trace in memory: who asks when, which blocks its prompt has, what its answer adds."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from atom.model_engine.eviction import Ending
from atom.model_engine.ids import BlockKey


@dataclass(slots=True)
class TraceRequest:
    """One request.

    ``time``: arrival in seconds, from the start of its session or, in a trace without sessions, of the trace.
    ``blocks``: numbers of the prompt's full blocks, each naming its whole prefix. ``answer``: numbers of the blocks that
    the answer fills, as far as later prompts name them. ``ideal``: blocks that an unbounded cache would resume after.
    ``counted``: False for a further sample of a prompt, which runs and is in no figure. ``complete``: whether its answer
    came to its end.
    """

    index: int
    session: int
    time: float
    prompt_tokens: int
    output_tokens: int
    blocks: array[int]
    ending: Ending | None = None
    answer: array[int] = field(default_factory=lambda: array("I"))
    ideal: int = 0
    counted: bool = True
    complete: bool = True


@dataclass(slots=True)
class Trace:
    """Requests in order of session and time. ``keys[i]`` is the key of block number i.

    ``timed``: arrival times count from one common start; otherwise each session is played by a seat.
    """

    name: str
    block_size: int
    timed: bool
    keys: list[BlockKey]
    requests: list[TraceRequest]

    @property
    def prompt_tokens(self) -> int:
        return sum(request.prompt_tokens for request in self.requests)

    @property
    def sessions(self) -> list[list[TraceRequest]]:
        """Requests by session, in the order of the trace."""
        grouped: dict[int, list[TraceRequest]] = {}
        for request in self.requests:
            grouped.setdefault(request.session, []).append(request)
        return list(grouped.values())


def keep_sessions(trace: Trace, count: int | None, shuffle: random.Random | None) -> None:
    """Keep the first ``count`` sessions (None: all), after shuffling them. A trace without sessions has one."""
    sessions = trace.sessions
    if shuffle is not None:
        shuffle.shuffle(sessions)
    trace.requests = [request for session in sessions[:count] for request in session]
    for index, request in enumerate(trace.requests):
        request.index = index


def number_keys(count: int) -> list[BlockKey]:
    """Keys of ``count`` blocks that are known by number alone."""
    return [number.to_bytes(8, "big") for number in range(count)]


FASTEST_TOKEN = 0.01
"""Seconds that a token of an answer takes at least. In the coding-agent sessions no next turn comes sooner."""


def prepare(trace: Trace, answers: str) -> None:
    """Decide what answers leave in the cache (see :func:`name_answers`) and compute each request's ideal. O(blocks)."""
    if answers == "echoed":
        name_answers(trace)
    else:
        for request in trace.requests:
            request.answer = array("I")
            if answers == "none":
                request.output_tokens = 1
    set_ideals(trace)


def name_answers(trace: Trace) -> None:
    """Name each answer's blocks by the next prompt that extends its request, where that has room for the answer.

    The rule: the first later prompt that has all the full blocks of this prompt, if it is longer by at least the answer
    and comes when that can be done. Its blocks behind this prompt's then hold the rest of this prompt and the answer.
    """
    following: dict[int, TraceRequest] = {}
    for request in reversed(trace.requests):
        blocks = request.blocks
        later = following.get(blocks[-1]) if blocks and not request.answer else None
        tokens = request.prompt_tokens + request.output_tokens
        done = request.time + request.output_tokens * FASTEST_TOKEN
        if later is not None and later.prompt_tokens >= tokens and later.time >= done:
            request.answer = later.blocks[len(blocks) : tokens // trace.block_size]
        following.update(dict.fromkeys(blocks, request))


def set_ideals(trace: Trace) -> None:
    """What a cache that forgets nothing and resumes at any boundary would resume, in the order of the trace."""
    seen = bytearray(len(trace.keys))
    for request in trace.requests:
        blocks = request.blocks
        first_new = bytes(map(seen.__getitem__, blocks)).find(0)
        known = len(blocks) if first_new < 0 else first_new
        request.ideal = min(known, (request.prompt_tokens - 1) // trace.block_size)
        _mark(seen, blocks[known:])
        _mark(seen, request.answer)


def _mark(seen: bytearray, blocks: Iterable[int]) -> None:
    for block in blocks:
        seen[block] = 1

"""When a block is used next: foresight over a trace, for policies that stand for a ceiling."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from atom.model_engine.ids import BlockKey
from atom.replay.trace import Trace, TraceRequest

NEVER = float("inf")


class Future:
    """Uses of each block by the requests of a trace. Built when first asked: O(blocks of all prompts) memory and time.

    Times are seconds of the virtual clock. In a trace of sessions a session's future arrivals are estimated from its
    latest one and the recorded gaps, which delays by queueing do not change; a session that has not begun counts as if it
    began now. A request that waits to be admitted is still to come, and due.
    """

    def __init__(self, trace: Trace, due: Sequence[float]) -> None:
        """``due``: arrival of each request by number, in seconds from its session's start, as the clock would have it."""
        self._trace = trace
        self._due = due
        # Per session: how much later than planned its latest request arrived, the number of the latest one admitted.
        self._delay: dict[int, float] = {}
        self._admitted: dict[int, int] = {}
        self._last = {request.session: request.index for request in trace.requests}
        self._now = 0.0

    def arrived(self, request: TraceRequest, now: float) -> None:
        """``request`` arrived at ``now``, in seconds."""
        self._now = now
        self._delay[request.session] = now - self._due[request.index]

    def admitted(self, request: TraceRequest) -> None:
        """``request`` found what it will resume, or was refused for good; requests of a session come in order."""
        self._admitted[request.session] = request.index

    def next_use(self, key: BlockKey) -> float:
        """Time at which a request that is not admitted yet uses the block under ``key``; infinity: none does.

        O(log uses) for each session that has the block.
        """
        number = self._numbers.get(key)
        if number is None:
            return NEVER
        offsets, users = self._uses
        low, high = offsets[number], offsets[number + 1]
        requests, soonest = self._trace.requests, NEVER
        while low < high:
            session = requests[users[low]].session
            end = bisect_right(users, self._last[session], low, high)
            index = bisect_right(users, self._admitted.get(session, -1), low, end)
            if index < end:
                soonest = min(soonest, self._due[users[index]] + self._delay.get(session, self._now))
            low = end
        return soonest

    @cached_property
    def _numbers(self) -> dict[BlockKey, int]:
        return {key: number for number, key in enumerate(self._trace.keys)}

    @cached_property
    def _uses(self) -> tuple[list[int], array[int]]:
        """Users of block i, in order: the slice between offsets i and i + 1 of one array."""
        requests = self._trace.requests
        blocks = np.concatenate([np.frombuffer(r.blocks, dtype=np.uint32) for r in requests])
        users = np.repeat(np.arange(len(requests), dtype=np.uint32), [len(r.blocks) for r in requests])
        users = users[np.argsort(blocks, kind="stable")]
        counts = np.bincount(blocks, minlength=len(self._trace.keys))
        return [0, *np.cumsum(counts).tolist()], array("I", users.astype(np.uint32).tobytes())

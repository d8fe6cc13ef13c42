"""When requests arrive: as their trace says, or as sessions are played on seats."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

from atom.replay.cost_model import NS
from atom.replay.trace import Trace, TraceRequest

LONGEST_GAP = 600 * NS
SEAT_OFFSET = 3 * NS
SESSION_GAP = 5 * NS


class Arrivals(Protocol):
    """Requests in the order of time; times in nanoseconds of the virtual clock."""

    @property
    def next_time(self) -> int | None:
        """When the next request arrives, as far as is known; None: none is to come before one ends."""
        ...

    def pop(self) -> tuple[int, TraceRequest]:
        """The next request and its time."""
        ...

    def ended(self, request: TraceRequest, now: int) -> None:
        """``request`` got its last token."""
        ...


class TimedArrivals:
    """Each request at its own time, whatever became of the others."""

    def __init__(self, trace: Trace) -> None:
        self._waiting = deque((round(request.time * NS), request) for request in trace.requests)

    @property
    def next_time(self) -> int | None:
        return self._waiting[0][0] if self._waiting else None

    def pop(self) -> tuple[int, TraceRequest]:
        return self._waiting.popleft()

    def ended(self, request: TraceRequest, now: int) -> None:
        pass


class SeatArrivals:
    """N seats, each playing one session after the other.

    Seat i starts at 3 i seconds. A session's next request comes at the recorded distance from the one before it, at most
    600 s, and not before that one ended; 5 s after a session's last answer the seat starts the next session.
    """

    def __init__(self, sessions: Sequence[list[TraceRequest]], seats: int) -> None:
        self._left = deque(sessions)
        self._heap: list[tuple[int, int, TraceRequest]] = []
        self._rest: dict[int, deque[TraceRequest]] = {}
        self._arrived: dict[int, int] = {}
        self._count = 0
        for seat in range(seats):
            self._start_session(seat * SEAT_OFFSET)

    @property
    def next_time(self) -> int | None:
        return self._heap[0][0] if self._heap else None

    def pop(self) -> tuple[int, TraceRequest]:
        time, _, request = heapq.heappop(self._heap)
        self._arrived[request.session] = time
        return time, request

    def ended(self, request: TraceRequest, now: int) -> None:
        rest = self._rest[request.session]
        if not rest:
            self._start_session(now + SESSION_GAP)
            return
        following = rest.popleft()
        gap = gap_ns(request, following)
        self._push(max(self._arrived[request.session] + gap, now), following)

    def _start_session(self, time: int) -> None:
        if self._left:
            session = self._left.popleft()
            self._rest[session[0].session] = deque(session[1:])
            self._push(time, session[0])

    def _push(self, time: int, request: TraceRequest) -> None:
        self._count += 1
        heapq.heappush(self._heap, (time, self._count, request))


def gap_ns(request: TraceRequest, following: TraceRequest) -> int:
    """Nanoseconds from the arrival of a session's request to that of the next one, as seats play it."""
    return min(round((following.time - request.time) * NS), LONGEST_GAP)


def due_times(trace: Trace) -> list[float]:
    """Arrival of each request by number in seconds from its session's start, or the trace's, had nothing to wait."""
    due = [request.time for request in trace.requests]
    if not trace.timed:
        for session in trace.sessions:
            time = 0
            due[session[0].index] = 0.0
            for request, following in pairwise(session):
                time += gap_ns(request, following)
                due[following.index] = time / NS
    return due

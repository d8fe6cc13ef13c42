"""Requests that wait to be admitted: what the queue already tells of what is used next."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence

from atom.model_engine.eviction_returns import Boundary
from atom.model_engine.ids import BlockKey

MOST_AWAITED = 256
"""Requests from the front of the queue that are looked at."""

GAP_WEIGHT = 1 / 16
"""Weight of the latest time between two admissions in their running mean."""

LEAST_WAIT = 0.05
"""Seconds until the first in the queue is admitted, as far as anybody knows."""


class Ticket:
    """A place in the queue. ``number``: ascending from the front. ``boundary``: where it would resume now, if anywhere."""

    __slots__ = ("boundary", "keys", "number")

    def __init__(self, number: int, keys: Sequence[BlockKey]) -> None:
        self.number = number
        self.keys = keys
        self.boundary: Boundary | None = None


class WaitingRequests:
    """The queue in order, and when each of its first requests is expected to be admitted.

    Every operation is O(1) amortised but :meth:`through`, which is O(requests looked at).
    """

    def __init__(self) -> None:
        self._tickets: dict[str, Ticket] = {}
        self._near: OrderedDict[Ticket, None] = OrderedDict()
        self._far: deque[Ticket] = deque()
        self._gone: set[Ticket] = set()
        self._next = 0
        # Running mean of the seconds between admissions while others wait, and the time of the latest such admission.
        self._gap = LEAST_WAIT
        self._admitted: float | None = None

    def add(self, request_id: str, keys: Sequence[BlockKey], first: bool) -> None:
        """A request queues behind all others, or in front of them."""
        front = next(iter(self._near), None)
        if first and front is not None:
            ticket = Ticket(front.number - 1, keys)
            self._far.appendleft(ticket)
        else:
            ticket = Ticket(self._next, keys)
            self._far.append(ticket)
            self._next += 1
        self._tickets[request_id] = ticket

    def leave(self, request_id: str, now: float, admitted: bool) -> Ticket | None:
        """A request is admitted, or dropped; None if it never queued."""
        ticket = self._tickets.pop(request_id, None)
        if ticket is None:
            return None
        if ticket in self._near:
            del self._near[ticket]
        else:
            self._gone.add(ticket)
        if admitted:
            if self._admitted is not None:
                self._gap += (now - self._admitted - self._gap) * GAP_WEIGHT
            self._admitted = now if self._tickets else None
        return ticket

    def come_near(self) -> Iterator[Ticket]:
        """Tickets that are looked at from now on: those that queued in front, and others that moved up."""
        while self._far:
            front = next(iter(self._near), None)
            before = front is not None and self._far[0].number < front.number
            if len(self._near) >= MOST_AWAITED and not before:
                return
            ticket = self._far.popleft()
            if ticket in self._gone:
                self._gone.remove(ticket)
                continue
            self._near[ticket] = None
            if before:
                self._near.move_to_end(ticket, last=False)
            yield ticket

    def through(self, key: BlockKey, depth: int) -> list[Ticket]:
        """Of the first requests those whose block ``depth``, counted from 0, has ``key``, in order."""
        return [ticket for ticket in self._near if depth < len(ticket.keys) and ticket.keys[depth] == key]

    def wait(self, ticket: Ticket) -> float:
        """Seconds until ``ticket`` is expected to be admitted, above 0."""
        front = next(iter(self._near), ticket)
        return max(ticket.number - front.number, 0) * self._gap + LEAST_WAIT

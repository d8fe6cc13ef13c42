"""How likely a boundary is to be resumed soon, learned from what came back and when."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from enum import Enum
from itertools import islice
from math import inf
from typing import TYPE_CHECKING

from atom.model_engine.eviction import Ending, PoolView
from atom.model_engine.ids import BlockId, BlockKey
from atom.model_engine.state_cache import Checkpoint, CheckpointStatus

if TYPE_CHECKING:
    from atom.model_engine.eviction_waiting import Ticket

EDGES = tuple(0.5 * 2.0**i for i in range(11))
"""Idle times, in seconds, between the buckets: half a second to 512 seconds."""

PRIOR_WEIGHT = 4.0
"""Boundaries that what is assumed of a bucket of idle time counts for."""

SHORTEST_WAIT = 10.0
"""Seconds; what began to wait less than this long ago is hardly told apart."""

MOST_RETURNS = 3
"""Paths that came back more often behave alike."""

HALF_LIFE = 512.0
"""Events of a kind, returns and buckets passed idle, for each bucket that halve the weight of what was learned before."""


FORGET_TRIES = 8
"""Boundaries that are looked at to forget one whose checkpoint is gone."""

GAP_WEIGHT = 1 / 4
"""Weight of the latest time between two returns to a boundary in their running mean."""

SHORTEST_WAITS = tuple(SHORTEST_WAIT / 4**pace for pace in range(5))
"""By pace: what many resume at comes back sooner than a single conversation does, and the sooner counts the more."""


def pace_of(gap: float) -> int:
    """The pace of a boundary that is resumed every ``gap`` seconds: the first of the shortest waits that is at most twice that."""
    return next(
        (pace for pace in range(len(SHORTEST_WAITS) - 1) if gap * 2 >= SHORTEST_WAITS[pace]), len(SHORTEST_WAITS) - 1
    )


class Role(Enum):
    """What a boundary is to its path: the end of the latest prompt or answer, an end before that, or a guess."""

    PROMPT = "prompt"
    ANSWER = "answer"
    OLDER = "older"
    DEMAND = "demand"
    INTERVAL = "interval"


PRIOR = {Role.PROMPT: 0.3, Role.ANSWER: 0.3, Role.OLDER: 0.01, Role.DEMAND: 0.02, Role.INTERVAL: 0.01}
"""Chance per bucket of idle time that a boundary is resumed, before anything was seen: anchors are knowledge."""

Kind = tuple[Role, int, Ending | None]
"""Boundaries that are expected to behave alike: role, how often its path came back (at most 3), how the answer ended."""


class Boundary:
    """One boundary that a checkpoint was kept at, remembered for a while after the checkpoint is gone.

    ``end``: blocks before it. ``image``: its latest checkpoint. ``since``: when it began to wait, in seconds, as ``kind``,
    and ``bucket``: how many edges of idle time it has passed. ``returns``: how often its path has come back. ``below``: the
    next checkpoint on the way to the root. ``lost``: ends of paths whose checkpoint is gone, so that they resume here.
    ``heir``: where it is itself such an end. ``times``: what is known of its kind. ``tickets``: of queued requests that would
    resume here, in order.
    ``sibling``: the other end of the same request. ``gap``: running mean of the time between returns, in seconds, and
    ``pace`` its class when it began to wait. ``turn``: counts its waits; not above 0 while it does not wait.
    """

    __slots__ = (
        "below",
        "bucket",
        "end",
        "ending",
        "gap",
        "heir",
        "image",
        "kind",
        "lost",
        "pace",
        "returns",
        "role",
        "sibling",
        "since",
        "tickets",
        "times",
        "turn",
    )

    times: _Times

    def __init__(self, role: Role, returns: int) -> None:
        self.role = role
        self.returns = returns
        self.ending: Ending | None = None
        self.below: Boundary | None = None
        self.end = 0
        self.lost: list[Boundary] = []
        self.heir: Boundary | None = None
        self.image: Checkpoint | None = None
        self.since = 0.0
        self.bucket = 0
        self.turn = 0
        self.kind: Kind = (role, min(returns, MOST_RETURNS), None)
        self.sibling: Boundary | None = None
        self.gap = SHORTEST_WAIT
        self.pace = 0
        self.tickets: list[Ticket] = []

    @property
    def is_kept(self) -> bool:
        """Whether its checkpoint can still be resumed from."""
        return self.image is not None and self.image.status is CheckpointStatus.READY

    @property
    def ticket(self) -> Ticket | None:
        """Of the queued requests that would resume here the first. O(1) amortised."""
        tickets = self.tickets
        while tickets and tickets[0].boundary is not self:
            del tickets[0]
        return tickets[0] if tickets else None

    @property
    def gain(self) -> int:
        """Blocks that only this checkpoint saves: those behind the next one below it."""
        below = self.below
        while below is not None and not below.is_kept:
            below = self.below = below.below
        return self.end - (below.end if below is not None else 0)


class _Times:
    """Of one kind: how many boundaries came back in each bucket of idle time and how many stayed idle through it."""

    __slots__ = ("_share", "came", "inside", "prior", "stayed", "weight")

    def __init__(self, prior: float) -> None:
        size = len(EDGES) + 1
        self.prior = prior
        self.came = [0.0] * size
        self.stayed = [0.0] * size
        self.inside = [0] * size
        self.weight = 0.0
        self._share: float | None = None

    def add(self, counts: list[float], bucket: int) -> None:
        counts[bucket] += 1.0
        self._share = None
        self.weight += 1.0
        if self.weight >= HALF_LIFE * len(EDGES):
            self.weight /= 2
            self.came = [count / 2 for count in self.came]
            self.stayed = [count / 2 for count in self.stayed]

    @property
    def share(self) -> float:
        """Share that comes back before the last edge (Kaplan-Meier, each bucket drawn to the hazard before it)."""
        if self._share is None:
            stay, hazard = 1.0, self.prior
            for came, stayed, inside in zip(self.came[:-1], self.stayed[:-1], self.inside[:-1], strict=True):
                hazard = (came + PRIOR_WEIGHT * hazard) / (came + stayed + inside / 2 + PRIOR_WEIGHT)
                stay *= 1.0 - hazard
            self._share = 1.0 - stay
        return self._share


class ReturnTimes:
    """The boundaries that are waiting, by key, and what is known of their kinds. O(1) amortised an event."""

    def __init__(self, capacity: int = 1 << 15) -> None:
        self.capacity = capacity
        self._known: OrderedDict[BlockKey, Boundary] = OrderedDict()
        # Of those that are remembered, whose checkpoint was there when anybody looked last.
        self._standing: set[BlockKey] = set()
        self._times: dict[Kind, _Times] = {}
        # Before this nobody reaches another edge.
        self._due = inf
        self._aging: list[deque[tuple[float, int, Boundary]]] = [deque() for _ in EDGES]

    def nearest_kept(self, block: BlockId, pool: PoolView) -> Boundary | None:
        """Before an indexed ``block`` in its prompt the last boundary with a checkpoint. O(blocks between)."""
        above: BlockId | None = block
        while above is not None and (key := pool.nearest_above(above, self._standing)) is not None:
            if self._known[key].is_kept:
                return self._known[key]
            self._standing.remove(key)
            above = pool.block_of(key)
        return None

    def get(self, key: BlockKey) -> Boundary | None:
        """The boundary that ``key`` ends, if it is remembered."""
        return self._known.get(key)

    def remember(self, key: BlockKey, role: Role, returns: int, now: float) -> Boundary:
        """A checkpoint is kept there from ``now`` on; ``returns``: how often its path came back so far."""
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = Boundary(role, returns)
            if len(self._known) > self.capacity:
                self._forget_one()
        else:
            self._known.move_to_end(key)
            self.stop(known)
            known.returns = max(known.returns, returns)
            known.role = role
            known.lost = []
        self._standing.add(key)
        known.kind = (role, min(known.returns, MOST_RETURNS), None)
        known.times = self._of(known.kind)
        known.since = now
        return known

    def forget(self, key: BlockKey) -> None:
        """It is not waiting any more and will not be recognised."""
        self.stop(self._known.pop(key))
        self._standing.discard(key)

    def _forget_one(self) -> None:
        """Forget what was neither kept nor resumed for longest, if the first few are not all kept."""
        for key in islice(self._known, FORGET_TRIES):
            if not self._known[key].is_kept:
                self.forget(key)
                return
        for _ in range(FORGET_TRIES):
            self._known.move_to_end(next(iter(self._known)))

    def deepest(self, keys: Sequence[BlockKey]) -> Boundary | None:
        """The deepest boundary known on this path. O(blocks behind it)."""
        known = self._known
        return next((known[key] for key in reversed(keys) if key in known), None)

    def wait(self, boundary: Boundary, now: float) -> None:
        """It waits from now on, as what it is now."""
        self.stop(boundary)
        boundary.turn = 1 - boundary.turn
        boundary.since = now
        boundary.bucket = 0
        boundary.kind = (boundary.role, min(boundary.returns, MOST_RETURNS), boundary.ending)
        boundary.pace = pace_of(boundary.gap)
        boundary.times = self._of(boundary.kind)
        boundary.times.inside[0] += 1
        self._aging[0].append((now, boundary.turn, boundary))
        self._due = min(self._due, now + EDGES[0])

    def stop(self, boundary: Boundary) -> None:
        """It does not wait any more, and nothing is learned of it."""
        if boundary.turn > 0:
            boundary.times.inside[boundary.bucket] -= 1
            boundary.turn = -boundary.turn

    def came_back(self, boundary: Boundary, now: float) -> None:
        """It was resumed, or would have been."""
        self.advance(now)
        if boundary.turn > 0:
            boundary.times.add(boundary.times.came, boundary.bucket)
        if boundary.image is not None and boundary.image.key in self._known:
            self._known.move_to_end(boundary.image.key)
        boundary.returns += 1
        boundary.gap += (min(now - boundary.since, SHORTEST_WAIT) - boundary.gap) * GAP_WEIGHT

    def advance(self, now: float) -> None:
        """Count those that stayed idle through another bucket. O(those); O(1) if none did."""
        if now < self._due:
            return
        self._due = inf
        for bucket, edge in enumerate(EDGES):
            queue = self._aging[bucket]
            while queue and queue[0][0] + edge <= now:
                _, turn, boundary = entry = queue.popleft()
                if boundary.turn != turn:
                    continue
                times = boundary.times
                times.add(times.stayed, bucket)
                times.inside[bucket] -= 1
                times.inside[bucket + 1] += 1
                boundary.bucket = bucket + 1
                if bucket + 1 < len(EDGES):
                    self._aging[bucket + 1].append(entry)
            if queue:
                self._due = min(self._due, queue[0][0] + edge)

    def urgency(self, boundary: Boundary, now: float) -> float:
        """How soon it is expected to be resumed: the share of its kind that comes back at all, over how long it has waited.

        Return times of every kind have a heavy tail, for which the chance of a return in the next moment falls as
        1 / idle time.
        """
        return boundary.times.share / (max(now - boundary.since, 0.0) + SHORTEST_WAITS[boundary.pace])

    def _of(self, kind: Kind) -> _Times:
        times = self._times.get(kind)
        if times is None:
            times = self._times[kind] = _Times(PRIOR[kind[0]])
        return times

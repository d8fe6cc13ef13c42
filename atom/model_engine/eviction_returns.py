"""How likely a boundary is to be resumed soon, learned from what came back and when."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Sequence
from enum import Enum

from atom.model_engine.eviction import Ending
from atom.model_engine.ids import BlockKey

EDGES = tuple(0.5 * 2.0**i for i in range(13))
"""Idle times, in seconds, between the buckets: half a second to half an hour."""

HALF_LIFE = 512.0
"""Boundaries of a kind that halve the weight of what was learned before them."""


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

    ``since``: when it began to wait, in seconds. ``returns``: how often its path has come back. ``gain``: blocks that only
    this checkpoint saves. ``waiting``: whether it still waits for its next use as ``kind``. ``sibling``: the other end of
    the same request.
    """

    __slots__ = ("bucket", "ending", "gain", "kind", "returns", "role", "sibling", "since", "turn")

    def __init__(self, role: Role, returns: int) -> None:
        self.role = role
        self.returns = returns
        self.ending: Ending | None = None
        self.gain = 0
        self.since = 0.0
        self.bucket = 0
        self.turn = 0
        self.kind: Kind = (role, min(returns, 3), None)
        self.sibling: Boundary | None = None


class _Times:
    """Of one kind: how many boundaries came back in each bucket of idle time and how many stayed idle through it."""

    __slots__ = ("came", "stayed", "survival", "weight")

    def __init__(self, prior: float) -> None:
        size = len(EDGES) + 1
        self.came = [prior] * size
        self.stayed = [1.0 - prior] * size
        self.weight = 0.0
        self.survival: list[float] | None = None

    def add(self, counts: list[float], bucket: int) -> None:
        counts[bucket] += 1.0
        self.survival = None
        self.weight += 1.0
        if self.weight >= HALF_LIFE * len(EDGES):
            self.weight /= 2
            self.came = [count / 2 for count in self.came]
            self.stayed = [count / 2 for count in self.stayed]

    def log_survival(self, idle: float) -> float:
        """log P(still idle after ``idle`` seconds), linear in between edges."""
        table = self.survival
        if table is None:
            table = self.survival = [0.0]
            for came, stayed in zip(self.came[:-1], self.stayed[:-1], strict=True):
                table.append(table[-1] + math.log((stayed + 1e-6) / (came + stayed + 1e-6)))
        bucket = bisect_right(EDGES, idle)
        if bucket == len(EDGES):
            slope = table[-1] - table[-2]
            return table[-1] + slope * math.log2(idle / EDGES[-1])
        low = EDGES[bucket - 1] if bucket else 0.0
        return table[bucket] + (table[bucket + 1] - table[bucket]) * (idle - low) / (EDGES[bucket] - low)


class ReturnTimes:
    """The boundaries that are waiting, by key, and what is known of their kinds. O(1) amortised an event."""

    def __init__(self, capacity: int = 1 << 15) -> None:
        self.capacity = capacity
        self._known: OrderedDict[BlockKey, Boundary] = OrderedDict()
        self._times: dict[Kind, _Times] = {}
        self._aging: list[deque[tuple[float, int, Boundary]]] = [deque() for _ in EDGES]

    def get(self, key: BlockKey) -> Boundary | None:
        return self._known.get(key)

    def remember(self, key: BlockKey, role: Role, returns: int) -> Boundary:
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = Boundary(role, returns)
            if len(self._known) > self.capacity:
                _, gone = self._known.popitem(last=False)
                gone.turn += 1
        else:
            self._known.move_to_end(key)
            known.returns = max(known.returns, returns)
            known.role = role
        return known

    def deepest(self, keys: Sequence[BlockKey]) -> int:
        """Blocks up to the deepest boundary known on this path; 0 if there is none. O(blocks behind it)."""
        known = self._known
        for index in range(len(keys) - 1, -1, -1):
            if keys[index] in known:
                return index + 1
        return 0

    def wait(self, boundary: Boundary, now: float) -> None:
        """It waits from now on, as what it is now."""
        boundary.turn += 1
        boundary.since = now
        boundary.bucket = 0
        boundary.kind = (boundary.role, min(boundary.returns, 3), boundary.ending)
        self._aging[0].append((now, boundary.turn, boundary))

    def came_back(self, boundary: Boundary, now: float) -> None:
        """It was resumed, or would have been."""
        self.advance(now)
        if boundary.turn:
            times = self._of(boundary.kind)
            times.add(times.came, boundary.bucket)
        boundary.returns += 1

    def advance(self, now: float) -> None:
        """Count those that stayed idle through another bucket."""
        for bucket, edge in enumerate(EDGES):
            queue = self._aging[bucket]
            while queue and queue[0][0] + edge <= now:
                since, turn, boundary = entry = queue.popleft()
                if boundary.turn != turn:
                    continue
                times = self._of(boundary.kind)
                times.add(times.stayed, bucket)
                boundary.bucket = bucket + 1
                if bucket + 1 < len(EDGES):
                    self._aging[bucket + 1].append(entry)

    def chance(self, boundary: Boundary, now: float, horizon: float) -> float:
        """Probability that it is resumed within ``horizon`` seconds."""
        times = self._of(boundary.kind)
        idle = max(now - boundary.since, 0.0)
        return -math.expm1(times.log_survival(idle + horizon) - times.log_survival(idle))

    def _of(self, kind: Kind) -> _Times:
        times = self._times.get(kind)
        if times is None:
            times = self._times[kind] = _Times(PRIOR[kind[0]])
        return times

"""Variants of the policy ``default``, kept to be measured beside it."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from atom.model_engine.eviction import Ending
from atom.model_engine.eviction_forest import Segment
from atom.model_engine.eviction_queues import CheckpointQueues
from atom.model_engine.eviction_returns import SHORTEST_WAIT, Boundary, ReturnTimes, Role
from atom.model_engine.eviction_value import ByValue
from atom.model_engine.ids import BlockKey
from atom.model_engine.state_cache import Checkpoint
from atom.replay.policies.leaves import Leaves


class WeakFirst(ByValue):
    """Superseded anchors and guesses go before any page that can be resumed."""

    def _least_image(self, now: float) -> tuple[Checkpoint | None, float]:
        image, _ = super()._least_image(now)
        return image, -1.0 if image is not None else inf


class OldestUnit(WeakFirst):
    """The same, and units by age alone: nothing is learned."""

    def _unit_value(self, segment: Segment, now: float) -> float:
        return segment.released


class ByDensity(ByValue):
    """A unit counts by what it saves over the next checkpoint below, for each page that it takes."""

    def _unit_value(self, segment: Segment, now: float) -> float:
        boundary = self._top(segment)
        if boundary is None:
            return 0.0
        below = segment.images[-2][0] if len(segment.images) > 1 else segment.base
        pages = segment.end - max(below, segment.joints[-1] if segment.joints else 0) + self.pool.pages_per_image
        return self._urgency(boundary, now) * boundary.gain / pages


class Superlinear(ByValue):
    """Blocks cost more to compute the deeper they are: attention doubles the cost at ``DOUBLED`` blocks."""

    DOUBLED = 2048

    def _urgency(self, boundary: Boundary, now: float) -> float:
        return super()._urgency(boundary, now) * (1 + boundary.end / self.DOUBLED)


class NoEnding(ByValue):
    """How an answer ended is not looked at."""

    def _ending_that_counts(self, ending: Ending | None) -> Ending | None:
        return None


class NoQueue(ByValue):
    """Who waits to be admitted is not looked at."""

    def queued(self, request_id: str, keys: Sequence[BlockKey], first: bool = False) -> None:
        return


class _OneSize(CheckpointQueues):
    def size_class(self, boundary: Boundary) -> int:
        return 0


class OneQueue(ByValue):
    """Checkpoints of one kind wait in one queue whatever they save."""

    queues_type = _OneSize


class _Together(CheckpointQueues):
    def may_go_alone(self, image: Checkpoint, boundary: Boundary) -> bool:
        return image.superseded or image.is_guess


class Together(ByValue):
    """The end of an answer does not go alone."""

    queues_type = _Together


class NoHeirs(ByValue):
    """A checkpoint that is given up leaves its returns to nobody."""

    def _bequeath(self, boundary: Boundary) -> None:
        pass


class SumOfHeirs(ByValue):
    """Each of the ends that fall back on a checkpoint counts, and not the most urgent alone."""

    def _urgency(self, boundary: Boundary, now: float) -> float:
        urgency = self.returns.urgency
        lost = sum(urgency(end, now) for end in boundary.lost if end.role is not Role.OLDER)
        return urgency(boundary, now) + lost


class _OnePace(ReturnTimes):
    def wait(self, boundary: Boundary, now: float) -> None:
        boundary.gap = SHORTEST_WAIT
        super().wait(boundary, now)


class OnePace(ByValue):
    """How often a shared boundary is resumed at does not count."""

    returns_type = _OnePace


class Recent(ByValue):
    """Nothing is learned: every kind comes back alike, the sooner the shorter it has waited."""

    def _urgency(self, boundary: Boundary, now: float) -> float:
        return 1 / (max(now - boundary.since, 0.0) + 10.0)


class Patient(ByValue):
    """An end that has only just begun to wait is not the safest: hardly anything returns within four seconds."""

    def _urgency(self, boundary: Boundary, now: float) -> float:
        urgency = super()._urgency(boundary, now)
        return urgency / 2 if now - boundary.since < 4.0 and boundary.role is not Role.OLDER else urgency


class Frequent(ByValue):
    """A path counts once for every time it came back, as in caches that weigh by frequency."""

    def _urgency(self, boundary: Boundary, now: float) -> float:
        return super()._urgency(boundary, now) * (1 + boundary.returns)


class Sticky(Leaves):
    """The first paths stay: the most recently used leaf goes, then the most recent checkpoint."""

    def choose(self, for_image: bool) -> Segment | Checkpoint:
        weak = next((image for image in self.held if image.superseded or image.is_guess), None)
        if weak is not None:
            return weak
        if self.leaves:
            return max(self.leaves, key=lambda segment: segment.released)
        return next(reversed(self.held), None) or self.oldest_image()

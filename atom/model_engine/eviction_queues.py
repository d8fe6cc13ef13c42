"""Checkpoints that may be given up, in queues by what they are expected to save."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from math import inf

from atom.model_engine.eviction_returns import Boundary, Kind, Role
from atom.model_engine.state_cache import Checkpoint

Queue = OrderedDict[Checkpoint, Boundary]


class CheckpointQueues:
    """Guesses, superseded anchors and the ends of answers may go alone, the ends of the newest prompts only in need.

    Those that may go alone wait in one queue for each kind and size of what they save, the longest waiting first, so that
    the heads are enough to find the least. What a queued request would resume from waits apart, the latest filed going
    first. Every operation is O(1) amortised but :meth:`least`, which is O(queues).
    """

    def __init__(self) -> None:
        self._weak: dict[tuple[Kind, int], Queue] = {}
        self._newest: Queue = OrderedDict()
        self._awaited: Queue = OrderedDict()
        self._awaited_newest: Queue = OrderedDict()
        self._queue_of: dict[Checkpoint, Queue] = {}

    def __len__(self) -> int:
        return len(self._queue_of)

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self._queue_of)

    def __contains__(self, image: object) -> bool:
        return image in self._queue_of

    def file(self, image: Checkpoint, boundary: Boundary) -> None:
        """Put ``image`` where it belongs now, behind all that is there."""
        before = self._queue_of.get(image)
        if before is not None:
            del before[image]
        if self.may_go_alone(image, boundary):
            queue = self._weak_queue(boundary) if boundary.ticket is None else self._awaited
        else:
            queue = self._newest if boundary.ticket is None else self._awaited_newest
        queue[image] = boundary
        self._queue_of[image] = queue

    def remove(self, image: Checkpoint) -> Boundary:
        """Take ``image`` out. KeyError if it is not here."""
        return self._queue_of.pop(image).pop(image)

    def boundary_of(self, image: Checkpoint) -> Boundary:
        """The boundary that ``image`` was filed with."""
        return self._queue_of[image][image]

    def least(self, value: Callable[[Boundary], float]) -> tuple[Checkpoint | None, float]:
        """Of what may go alone, the one of least ``value``; None and infinity if there is none."""
        self._move_grown()
        least, least_value = None, inf
        for queue in self._weak.values():
            image, boundary = next(iter(queue.items()))
            if (worth := value(boundary)) < least_value:
                least, least_value = image, worth
        for image in reversed(self._awaited):
            if (worth := value(self._awaited[image])) < least_value:
                least, least_value = image, worth
            break
        return least, least_value

    def in_need(self) -> Checkpoint | None:
        """What goes when nothing else is left: the newest anchor that was filed longest ago, those awaited last."""
        return next(iter(self._newest), None) or next(reversed(self._awaited_newest), None)

    def may_go_alone(self, image: Checkpoint, boundary: Boundary) -> bool:
        """Whether its path has another newest anchor, or never hung on it."""
        return image.superseded or image.is_guess or boundary.role in (Role.ANSWER, Role.OLDER)

    def size_class(self, boundary: Boundary) -> int:
        """Checkpoints of one queue save about the same: a head that saves much must not hide one that saves little."""
        return 64 * boundary.pace + 2 * boundary.gain.bit_length() + bool(boundary.lost)

    def _weak_queue(self, boundary: Boundary) -> Queue:
        return self._weak.setdefault((boundary.kind, self.size_class(boundary)), OrderedDict())

    def _move_grown(self) -> None:
        """Heads that save more than they did, since what was below them went, move on; each O(log blocks) times."""
        moved = True
        while moved:
            moved = False
            for place, queue in list(self._weak.items()):
                while queue:
                    image, boundary = next(iter(queue.items()))
                    if (boundary.kind, self.size_class(boundary)) == place:
                        break
                    del queue[image]
                    other = self._queue_of[image] = self._weak_queue(boundary)
                    other[image] = boundary
                    other.move_to_end(image, last=False)
                    moved = True
                if not queue:
                    del self._weak[place]

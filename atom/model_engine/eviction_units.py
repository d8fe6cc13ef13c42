"""Ends of paths in heaps: those that nobody can resume at, and the others by what they are alike in."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator

from atom.model_engine.eviction_forest import Segment

SWEEP = 4096
"""Segments are filed this often between two sweeps of what was filed before and holds no more."""

Entry = tuple[float, int, Segment, int]


class UnitHeaps:
    """Leaves of the forest, the least first in each heap. An entry holds while its segment's ``version`` is what it was.

    Filing is O(log n) amortised, and so is finding the head of a heap.
    """

    def __init__(self) -> None:
        self._count = 0
        self._unresumable: list[Entry] = []
        self._places: dict[Hashable, list[Entry]] = {}

    def file_unresumable(self, segment: Segment) -> None:
        """Nobody can be resumed at its end: the longest released goes first."""
        self._push(self._unresumable, segment.released, segment)

    def file(self, segment: Segment, place: Hashable, order: float) -> None:
        """With those of its ``place``, that of the least ``order`` first."""
        self._push(self._places.setdefault(place, []), order, segment)

    def unresumable(self) -> Segment | None:
        """The first of those that nobody can be resumed at."""
        return _head(self._unresumable)

    def heads(self) -> Iterator[Segment]:
        """The first one of each place."""
        for place, heap in list(self._places.items()):
            segment = _head(heap)
            if segment is None:
                del self._places[place]
            else:
                yield segment

    def _push(self, heap: list[Entry], order: float, segment: Segment) -> None:
        self._count += 1
        if self._count % SWEEP == 0:
            self._sweep()
        heapq.heappush(heap, (order, self._count, segment, segment.version))

    def _sweep(self) -> None:
        """Drop entries that hold no more."""
        for heap in (self._unresumable, *self._places.values()):
            heap[:] = [entry for entry in heap if entry[2].version == entry[3]]
            heapq.heapify(heap)


def _head(heap: list[Entry]) -> Segment | None:
    """The first segment whose entry still holds; stale ones before it are dropped."""
    while heap:
        segment, version = heap[0][2:]
        if segment.version == version:
            return segment
        heapq.heappop(heap)
    return None

"""What to give up first; one small class a policy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class LeastRecentlyUsed(Generic[T]):
    """Things that may be given up, the longest unused first. Every operation is O(1)."""

    def __init__(self) -> None:
        self._order: OrderedDict[T, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, item: T) -> bool:
        return item in self._order

    def __iter__(self) -> Iterator[T]:
        """From the first to be given up to the last."""
        return iter(self._order)

    def add(self, item: T) -> None:
        """``item`` may be given up from now on, as the most recently used."""
        self._order[item] = None
        self._order.move_to_end(item)

    def remove(self, item: T) -> None:
        """``item`` may no longer be given up. KeyError if it was not here."""
        del self._order[item]

    def pop(self) -> T:
        """Give up the longest unused. KeyError when empty."""
        return self._order.popitem(last=False)[0]

    def pop_first(self, allowed: Callable[[T], bool]) -> T | None:
        """Give up the longest unused that ``allowed`` accepts; None if it accepts none. O(refused)."""
        for item in self._order:
            if allowed(item):
                del self._order[item]
                return item
        return None

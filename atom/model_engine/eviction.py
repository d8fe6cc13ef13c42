"""What to give up first; one small class a policy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterator, Sequence
from enum import Enum
from typing import Protocol

from atom.model_engine.ids import BlockId, BlockKey
from atom.model_engine.state_cache import Checkpoint


class Ending(Enum):
    """How an answer ended, as far as anybody said: a hint about when its context comes back."""

    TOOL_CALL = "tool_call"
    END_TURN = "end_turn"


class PoolView(Protocol):
    """What a policy may look at in the pool it serves. Every look is O(1) but :meth:`nearest_above`."""

    pages_per_image: int

    def now(self) -> float:
        """Seconds on the engine's clock; differences alone mean something."""
        ...

    def key_of(self, block: BlockId) -> BlockKey | None:
        """The key that finds ``block``; None if none does."""
        ...

    def depth_of(self, block: BlockId) -> int:
        """How many blocks precede an indexed ``block`` in its prompt."""
        ...

    def parent_of(self, block: BlockId) -> BlockKey | None:
        """Key of the block before an indexed ``block`` in its prompt; None for the first."""
        ...

    def nearest_above(self, block: BlockId, known: Container[BlockKey]) -> BlockKey | None:
        """Of the keys before an indexed ``block`` in its prompt the last one that is in ``known``. O(blocks between)."""
        ...

    def block_of(self, key: BlockKey) -> BlockId | None:
        """The page found under ``key``."""
        ...

    def is_live(self, block: BlockId) -> bool:
        """Whether a request holds ``block``."""
        ...


class EvictionPolicy(Protocol):
    """The order in which cached pages and unpinned checkpoints are given up. What is added may be popped.

    The methods with a body are hints that a policy may ignore; a policy that subclasses this one inherits them.
    """

    def attach(self, pool: PoolView) -> None:
        """Called once, before anything else, with the pool that this policy serves."""

    def admitted(self, keys: Sequence[BlockKey], matched: int, cached: int) -> None:
        """A request with these block keys is admitted for the first time; it found ``matched`` blocks and resumes after
        ``cached`` of them. Called before its pages are claimed."""

    def queued(self, request_id: str, keys: Sequence[BlockKey], first: bool = False) -> None:
        """A request waits to be admitted, behind all others or ``first``; ``keys``: of its blocks, not changed while it does."""

    def unqueued(self, request_id: str, admitted: bool) -> None:
        """It waits no longer: it is about to be admitted, or dropped."""

    def readmitted(self, keys: Sequence[BlockKey]) -> None:
        """A request that was preempted, or another sample of an admitted one, runs; ``keys`` are those of its prompt."""

    def withdrawn(self, block: BlockId) -> None:
        """A live page is found under no key any more; what is cached behind it is lost."""

    def add_blocks(self, blocks: Sequence[BlockId], ending: Ending | None) -> None:
        """One request let go of these pages and nobody else holds them; the deepest first.

        ``ending``: how its answer ended; None for a request that was preempted or aborted, or where nobody said.
        """
        for block in blocks:
            self.add_block(block)

    def remove_blocks(self, blocks: Sequence[BlockId]) -> None:
        """One request claims these pages, the shallowest first; nobody else held them."""
        for block in blocks:
            self.remove_block(block)

    def supersede_image(self, image: Checkpoint) -> None:
        """Mark a checkpoint that is here as superseded: a later anchor of its path is published.

        It becomes the most recently used, unless a policy leaves it where it is.
        """
        self.remove_image(image)
        image.superseded = True
        self.add_image(image)

    def pop_for_image(self) -> BlockId | Checkpoint:
        """Like :meth:`pop`, where the pages are wanted for an image and not for live work."""
        return self.pop()

    def pop_many(self, limit: int, for_image: bool) -> Sequence[BlockId] | Checkpoint:
        """Give up what goes next: a checkpoint, or pages that go one after another, 1 to ``limit``.

        ``for_image``: their place is wanted for an image. KeyError when there is nothing.
        """
        victim = self.pop_for_image() if for_image else self.pop()
        return victim if isinstance(victim, Checkpoint) else (victim,)

    @property
    def num_blocks(self) -> int:
        """Cached pages that may be given up."""
        ...

    @property
    def num_images(self) -> int:
        """Checkpoints that may be given up."""
        ...

    def add_block(self, block: BlockId) -> None:
        """A page is cached, as the most recently used."""
        ...

    def remove_block(self, block: BlockId) -> None:
        """A page is claimed or gone. KeyError if it was not here."""
        ...

    def add_image(self, image: Checkpoint) -> None:
        """A checkpoint is published or read to its end, as the most recently used."""
        ...

    def remove_image(self, image: Checkpoint) -> None:
        """A checkpoint is pinned or gone. KeyError if it was not here."""
        ...

    def pop(self) -> BlockId | Checkpoint:
        """Give up the next one. KeyError when there is none."""
        ...

    def blocks(self) -> Iterator[BlockId]:
        """Every cached page, for checks."""
        ...

    def images(self) -> Iterator[Checkpoint]:
        """Every checkpoint that may be given up, for checks."""
        ...


ANCHORS_OF_A_PATH = 2
"""The prompt's end and the answer's: what the next turn resumes from."""


class GuessesFirst(EvictionPolicy):
    """Least recently used over pages and checkpoints together, with an order among checkpoints.

    The longest unused thing decides whether a page or a checkpoint goes. Of checkpoints a superseded anchor goes before a
    guess, and a guess before an anchor (anchors are knowledge); both go before a page that takes an anchor along. When a request lets go of its path, the path's last
    anchors are as fresh as its pages: a checkpoint is older than the pages behind it, and would else always go first.
    Every operation is O(1), but for a release, which looks its blocks up until those anchors are found.
    """

    def __init__(self) -> None:
        self._clock = 0
        self._pool: PoolView | None = None
        self._by_key: dict[BlockKey, Checkpoint] = {}
        self._blocks: OrderedDict[BlockId, int] = OrderedDict()
        self._superseded: OrderedDict[Checkpoint, int] = OrderedDict()
        self._guesses: OrderedDict[Checkpoint, int] = OrderedDict()
        self._anchors: OrderedDict[Checkpoint, int] = OrderedDict()

    def attach(self, pool: PoolView) -> None:
        self._pool = pool

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def num_images(self) -> int:
        return len(self._superseded) + len(self._guesses) + len(self._anchors)

    def add_block(self, block: BlockId) -> None:
        self._clock += 1
        self._blocks[block] = self._clock

    def add_blocks(self, blocks: Sequence[BlockId], ending: Ending | None) -> None:
        # No page is here twice, and what one request lets go of is older in this order than anything added later.
        self._clock += 1
        self._blocks.update(dict.fromkeys(blocks, self._clock))
        if self._by_key and self._pool is not None:
            self._refresh_anchors(blocks, self._pool)

    def _refresh_anchors(self, blocks: Sequence[BlockId], pool: PoolView) -> None:
        found, images, key_of = 0, self._by_key, pool.key_of
        for block in blocks:
            image = images.get(key_of(block) or b"")
            if image is not None and not image.is_guess:
                self.remove_image(image)
                self.add_image(image)
                found += 1
                if found == ANCHORS_OF_A_PATH:
                    return

    def remove_block(self, block: BlockId) -> None:
        del self._blocks[block]

    def _class_of(self, image: Checkpoint) -> OrderedDict[Checkpoint, int]:
        if image.superseded:
            return self._superseded
        return self._guesses if image.is_guess else self._anchors

    def add_image(self, image: Checkpoint) -> None:
        self._clock += 1
        self._class_of(image)[image] = self._clock
        self._by_key[image.key] = image

    def remove_image(self, image: Checkpoint) -> None:
        del self._class_of(image)[image]
        self._by_key.pop(image.key, None)

    def pop(self) -> BlockId | Checkpoint:
        # Called for every page that is given up: no call is made here that can be saved.
        blocks, images = self._blocks, (self._superseded, self._guesses, self._anchors)
        if blocks:
            block, used = next(iter(blocks.items()))
            for order in images:
                if order and next(iter(order.values())) < used:
                    break
            else:
                if not (self._superseded or self._guesses) or not self._carries_anchor(block):
                    del blocks[block]
                    return block
        for order in images:
            if order:
                image = order.popitem(last=False)[0]
                self._by_key.pop(image.key, None)
                return image
        raise KeyError("nothing may be given up")

    def _carries_anchor(self, block: BlockId) -> bool:
        """Whether the page takes an anchor along that no later one of its path supersedes."""
        if self._pool is None:
            return False
        image = self._by_key.get(self._pool.key_of(block) or b"")
        return image is not None and not image.is_guess and not image.superseded

    def blocks(self) -> Iterator[BlockId]:
        return iter(self._blocks)

    def images(self) -> Iterator[Checkpoint]:
        yield from self._superseded
        yield from self._guesses
        yield from self._anchors

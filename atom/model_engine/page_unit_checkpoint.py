"""Checkpoints kept as images: a slot's bytes cut into pages that come from the same free list as KV."""

from __future__ import annotations

from atom.model_engine.block_pool import BlockPool
from atom.model_engine.checkpoint_index import CheckpointIndex
from atom.model_engine.eviction import EvictionPolicy
from atom.model_engine.ids import BlockKey
from atom.model_engine.placement import RungKind
from atom.model_engine.state_cache import Checkpoint


class PagedStateCheckpointCoordinator(CheckpointIndex):
    """Images of ``pages_per_image`` pages each in ``pool``; fulfils :class:`~atom.model_engine.state_cache.StateCache`.

    A published image that nobody reads is among what the pool's policy may give up, so its pages are room for live work.
    An image that cannot fit is dropped, costs nothing and is counted. It moves no bytes.
    """

    def __init__(self, pool: BlockPool, pages_per_image: int) -> None:
        assert pages_per_image > 0
        super().__init__()
        self.pool = pool
        self.pages_per_image = pages_per_image
        pool.pages_per_image = pages_per_image
        pool.give_up_image = self.given_up

    @property
    def policy(self) -> EvictionPolicy:
        return self.pool.policy

    def has_room(self) -> bool:
        return self.pool.num_available >= self.pages_per_image

    def consume(self, checkpoint: Checkpoint) -> None:
        """Read an unpinned image for the last time: its pages are vacant as soon as the queued restore has run.

        The way to resume when the pool cannot hold image and request together. The restore runs before the forward, so
        the forward may write these pages already.
        """
        self.use_up(checkpoint)
        self._give_back(checkpoint)

    def _take_place(self, key: BlockKey, kind: RungKind) -> Checkpoint:
        return Checkpoint(key, kind, pages=self.pool.take_for_image())

    def _give_back(self, checkpoint: Checkpoint) -> None:
        self.pool.release_image(checkpoint.pages)

    def check(self) -> None:
        """AssertionError unless images and the pool agree on every page (I5). O(pool)."""
        super().check()
        held = [page for image in self.held() for page in image.pages]
        assert len(set(held)) == len(held) == self.pool.num_image_pages, "a page is in two images or in none"
        assert not set(held) & set(self.pool._vacant) and not any(self.pool._references[page] for page in held)

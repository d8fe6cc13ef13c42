"""Checkpoints kept as images: a slot's bytes cut into pages that come from the same free list as KV."""

from __future__ import annotations

from collections.abc import Sequence

from atom.model_engine.block_pool import BlockPool
from atom.model_engine.ids import BlockKey
from atom.model_engine.placement import RungKind
from atom.model_engine.state_cache import Checkpoint, CheckpointFates, CheckpointStatus


class PagedStateCheckpointCoordinator:
    """Images of ``pages_per_image`` pages each in ``pool``; fulfils :class:`~atom.model_engine.state_cache.StateCache`.

    A published image that nobody reads is among what the pool's policy may give up, so its pages are room for live work.
    An image that cannot fit is dropped, costs nothing and is counted. It moves no bytes.
    """

    def __init__(self, pool: BlockPool, pages_per_image: int) -> None:
        assert pages_per_image > 0
        self.pool = pool
        self.pages_per_image = pages_per_image
        self.fates = CheckpointFates()
        self._images: dict[BlockKey, Checkpoint] = {}
        self._evicting: set[Checkpoint] = set()
        self._reserved = 0
        pool.pages_per_image = pages_per_image
        pool.give_up_image = self._give_up

    @property
    def num_checkpoints(self) -> int:
        return len(self._images) - self._reserved

    @property
    def num_reserved(self) -> int:
        return self._reserved

    def rightmost(self, keys: Sequence[BlockKey], limit: int) -> int:
        images = self._images
        if not images:
            return 0
        for count in range(min(limit, len(keys)), 0, -1):
            image = images.get(keys[count - 1])
            if image is not None and image.status is CheckpointStatus.READY:
                return count
        return 0

    def find(self, key: BlockKey) -> Checkpoint | None:
        image = self._images.get(key)
        return image if image is not None and image.status is CheckpointStatus.READY else None

    def has_room(self) -> bool:
        return self.pool.num_available >= self.pages_per_image

    def reserve(self, key: BlockKey, kind: RungKind, replace: Checkpoint | None = None) -> Checkpoint | None:
        kept = self._images.get(key)
        if kept is not None:
            self._keep_longer(kept, kind)
            return None
        if replace is not None and replace.shared:
            self.supersede(replace)
        elif replace is not None and self._is_free(replace):
            self.pool.policy.remove_image(replace)
            self._remove(replace)
            self.fates.superseded += 1
        if not self.has_room():
            self.fates.dropped += 1
            return None
        image = self._images[key] = Checkpoint(key, kind, pages=self.pool.take_for_image())
        self._reserved += 1
        return image

    def publish(self, checkpoint: Checkpoint) -> None:
        assert checkpoint.status in (CheckpointStatus.RESERVED, CheckpointStatus.COPYING)
        checkpoint.status = CheckpointStatus.READY
        self._reserved -= 1
        self.pool.policy.add_image(checkpoint)
        self.fates.kept += 1
        if checkpoint.predecessor is not None:
            self.supersede(checkpoint.predecessor)
            checkpoint.predecessor = None

    def cancel(self, checkpoint: Checkpoint) -> None:
        assert checkpoint.status in (CheckpointStatus.RESERVED, CheckpointStatus.COPYING)
        self._reserved -= 1
        self._remove(checkpoint)

    def pin(self, checkpoint: Checkpoint) -> None:
        assert checkpoint.status is CheckpointStatus.READY, "only a published image can be read"
        if not checkpoint.pins:
            self.pool.policy.remove_image(checkpoint)
        checkpoint.pins += 1
        checkpoint.shared = True
        self.fates.read_back[checkpoint.kind] += 1

    def unpin(self, checkpoint: Checkpoint) -> None:
        assert checkpoint.pins > 0, "unpinned more often than pinned"
        checkpoint.pins -= 1
        if checkpoint.pins:
            return
        if checkpoint.status is CheckpointStatus.READY:
            self.pool.policy.add_image(checkpoint)
        else:
            self._evicting.remove(checkpoint)
            self._free(checkpoint)

    def consume(self, checkpoint: Checkpoint) -> None:
        """Read an unpinned image for the last time: its pages are vacant as soon as the queued restore has run.

        The way to resume when the pool cannot hold image and request together. The restore runs before the forward, so
        the forward may write these pages already.
        """
        assert self._is_free(checkpoint), "an image that others read cannot be consumed"
        self.fates.read_back[checkpoint.kind] += 1
        self.fates.evicted += 1
        self.pool.policy.remove_image(checkpoint)
        self._remove(checkpoint)

    def supersede(self, checkpoint: Checkpoint) -> None:
        if checkpoint.superseded or checkpoint.is_guess or checkpoint.status is not CheckpointStatus.READY:
            return
        if checkpoint.pins:
            checkpoint.superseded = True
            return
        self.pool.policy.remove_image(checkpoint)
        checkpoint.superseded = True
        self.pool.policy.add_image(checkpoint)

    def orphan(self, key: BlockKey) -> None:
        image = self._images.get(key)
        if image is None or image.status is not CheckpointStatus.READY:
            # A reservation belongs to a request that is computing this block again and publishes it with the image.
            return
        self.fates.orphaned += 1
        if image.pins:
            del self._images[key]
            image.status = CheckpointStatus.EVICTING
            self._evicting.add(image)
        else:
            self.pool.policy.remove_image(image)
            self._remove(image)

    def _is_free(self, image: Checkpoint) -> bool:
        return image.status is CheckpointStatus.READY and not image.pins

    def _keep_longer(self, image: Checkpoint, kind: RungKind) -> None:
        """The same state is wanted again: it is as good as new, and an anchor if this request knows it to be one."""
        free = self._is_free(image)
        if free:
            self.pool.policy.remove_image(image)
        image.shared = True
        image.superseded = False
        if kind is RungKind.ANCHOR:
            image.kind = kind
        if free:
            self.pool.policy.add_image(image)

    def _give_up(self, image: Checkpoint) -> None:
        self.fates.evicted += 1
        self._remove(image)

    def _remove(self, image: Checkpoint) -> None:
        del self._images[image.key]
        self._free(image)

    def _free(self, image: Checkpoint) -> None:
        image.status = CheckpointStatus.GONE
        self.pool.release_image(image.pages)

    def ready(self) -> dict[BlockKey, Checkpoint]:
        """Findable images by key. O(images); for checks and reports."""
        return {key: image for key, image in self._images.items() if image.status is CheckpointStatus.READY}

    def check(self) -> None:
        """AssertionError unless images and the pool agree on every page (I5). O(pool)."""
        held = [page for image in (*self._images.values(), *self._evicting) for page in image.pages]
        assert len(set(held)) == len(held) == self.pool.num_image_pages, "a page is in two images or in none"
        assert not set(held) & set(self.pool._vacant) and not any(self.pool._references[page] for page in held)
        free = {image for image in self._images.values() if self._is_free(image)}
        assert free == set(self.pool.policy.images()), "exactly the published and unpinned may be given up"
        assert self._reserved == sum(i.status is not CheckpointStatus.READY for i in self._images.values())

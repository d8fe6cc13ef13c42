"""Where each layer's bytes sit in a page and in a slot: pure arithmetic over what a model declares.

Both arenas are unit-major: a page holds one block of every paged layer, a slot one request's state of every stateful
layer, each as one contiguous range. A region starts at a multiple of ``REGION_ALIGNMENT`` so that typed views are legal.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass

REGION_ALIGNMENT = 64
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}


@dataclass(frozen=True, slots=True)
class PagedSpec:
    """A tensor that a layer keeps per token, e.g. keys ``(num_kv_heads, head_dim)``."""

    layer: int
    name: str
    token_shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class StateSpec:
    """A tensor that a layer keeps per request, e.g. the recurrent state ``(heads, key_dim, value_dim)``."""

    layer: int
    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """What a model keeps: ``paged`` per token, ``state`` per request (empty for a stateless model)."""

    paged: tuple[PagedSpec, ...]
    state: tuple[StateSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class Region:
    """A typed range inside a unit: ``offset`` in bytes from the unit's start, ``shape`` per unit."""

    layer: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Geometry of pages and slots, made once and read by runner and block manager alike.

    ``page_bytes`` is the size of one block over all paged layers, ``slot_bytes`` of one request's state (0: stateless).
    """

    block_size: int
    paged: tuple[Region, ...]
    state: tuple[Region, ...]
    page_bytes: int
    slot_bytes: int

    @classmethod
    def of(cls, spec: CacheSpec, block_size: int) -> CacheLayout:
        paged, page_bytes = _pack([(s.layer, s.name, (block_size, *s.token_shape), s.dtype) for s in spec.paged])
        state, slot_bytes = _pack([(s.layer, s.name, s.shape, s.dtype) for s in spec.state])
        return cls(block_size, paged, state, page_bytes, slot_bytes)

    @property
    def layout_id(self) -> str:
        """Hex digest of every region; equal exactly when the bytes of pages and slots mean the same."""
        regions = [[[r.layer, r.name, r.shape, r.dtype, r.offset] for r in part] for part in (self.paged, self.state)]
        text = json.dumps([self.block_size, regions], separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """What the block manager needs to know of the arenas, as the model runner laid them out; sizes in bytes.

    ``image_bytes``: a checkpoint's bytes, 0 for a model without per-request state.
    """

    block_size: int
    page_bytes: int
    slot_bytes: int
    image_bytes: int
    layout_id: str

    @classmethod
    def of(cls, layout: CacheLayout) -> CacheGeometry:
        return cls(layout.block_size, layout.page_bytes, layout.slot_bytes, layout.slot_bytes, layout.layout_id)

    @property
    def pages_per_image(self) -> int:
        """Pages that an image takes; 0 for a model without per-request state."""
        return -(-self.image_bytes // self.page_bytes)

    def validate(self, block_size: int, page_bytes: int, slot_bytes: int) -> None:
        """RuntimeError where runner and block manager would not mean the same bytes."""
        if self.block_size != block_size:
            raise RuntimeError(f"the runner's pages hold {self.block_size} tokens, the block manager's {block_size}")
        if (self.page_bytes, self.slot_bytes) != (page_bytes, slot_bytes):
            raise RuntimeError(
                f"the runner's pages and slots have {self.page_bytes} and {self.slot_bytes} bytes, the pools were sized for "
                f"{page_bytes} and {slot_bytes}"
            )
        if self.page_bytes <= 0:
            raise RuntimeError(f"a page of {self.page_bytes} bytes cannot hold a block")
        if self.image_bytes != self.slot_bytes:
            raise RuntimeError(f"an image of {self.image_bytes} bytes is not a copy of a slot of {self.slot_bytes}")


def _pack(parts: list[tuple[int, str, tuple[int, ...], str]]) -> tuple[tuple[Region, ...], int]:
    """Lay parts one behind the other, aligned; returns the regions and the unit's size in bytes."""
    regions, end = [], 0
    for layer, name, shape, dtype in parts:
        offset = -(-end // REGION_ALIGNMENT) * REGION_ALIGNMENT
        region = Region(layer, name, tuple(shape), dtype, offset)
        regions.append(region)
        end = offset + region.nbytes
    return tuple(regions), -(-end // REGION_ALIGNMENT) * REGION_ALIGNMENT

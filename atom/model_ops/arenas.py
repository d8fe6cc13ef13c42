"""The two arenas' memory and the typed views that layers read and write."""

from __future__ import annotations

import torch

from atom.model_engine.cache_layout import CacheLayout, Region

LayerCache = dict[str, torch.Tensor]


class Arena:
    """``num_units`` units of ``unit_bytes`` bytes in one allocation, ``bytes``: ``[num_units, unit_bytes]`` uint8."""

    def __init__(self, num_units: int, unit_bytes: int, device: torch.device | str = "cpu") -> None:
        # Not filled: nothing reads a byte that no request wrote, and memory is taken as it is used.
        self.bytes = torch.empty(num_units, unit_bytes, dtype=torch.uint8, device=device)

    def view(self, region: Region) -> torch.Tensor:
        """``[num_units, *region.shape]`` over the region's bytes of every unit; strided, shares memory."""
        start = region.offset
        flat = self.bytes[:, start : start + region.nbytes].view(getattr(torch, region.dtype))
        # Splitting the last dimension of a strided view needs no copy.
        return flat.unflatten(1, region.shape) if len(region.shape) != 1 else flat


def layer_caches(layout: CacheLayout, num_layers: int, pages: Arena, slots: Arena | None) -> list[LayerCache]:
    """One dict a layer, name to view: paged ``[num_blocks, block_size, ...]``, state ``[num_slots, ...]``."""
    caches: list[LayerCache] = [{} for _ in range(num_layers)]
    for region in layout.paged:
        caches[region.layer][region.name] = pages.view(region)
    for region in layout.state:
        assert slots is not None, "a stateful layout needs a slot arena"
        caches[region.layer][region.name] = slots.view(region)
    return caches

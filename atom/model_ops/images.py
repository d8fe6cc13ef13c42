"""Images: a slot's bytes cut into pages of the page arena, and back.

Both ways move all whole pages in one indexed copy of 8-byte words, which runs at the speed of a plain copy wherever the
pages are; the last page's part follows. Slots and pages are multiples of 64 bytes long.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from atom.model_engine.ids import BlockId


def save_image(slot: torch.Tensor, pages: torch.Tensor, ids: Sequence[BlockId]) -> None:
    """Copy ``slot [slot_bytes]`` uint8 over pages ``ids`` of ``pages [num_blocks, page_bytes]``, the last one in part."""
    whole, rest, index = _parts(slot, pages, ids)
    if len(index):
        pages.view(torch.int64).index_copy_(0, index, whole)
    if len(rest):
        pages[ids[-1], : len(rest)].copy_(rest)


def load_image(pages: torch.Tensor, ids: Sequence[BlockId], slot: torch.Tensor) -> None:
    """The way back: fill ``slot`` from pages ``ids``."""
    whole, rest, index = _parts(slot, pages, ids)
    if len(index):
        torch.ops.aten.index.Tensor_out(pages.view(torch.int64), [index], out=whole)
    if len(rest):
        rest.copy_(pages[ids[-1], : len(rest)])


def _parts(
    slot: torch.Tensor, pages: torch.Tensor, ids: Sequence[BlockId]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The slot's whole pages ``[n, page words]`` int64, what is left of it in bytes, and the n pages' ids."""
    page_bytes = pages.shape[1]
    count = len(slot) // page_bytes
    whole = slot[: count * page_bytes].view(torch.int64).view(count, page_bytes // 8)
    return whole, slot[count * page_bytes :], torch.tensor(ids[:count], dtype=torch.int64, device=pages.device)

"""Images: a slot's bytes cut into pages of the page arena, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from atom.model_engine.ids import BlockId


def save_image(slot: torch.Tensor, pages: torch.Tensor, ids: Sequence[BlockId]) -> None:
    """Copy ``slot [slot_bytes]`` uint8 over pages ``ids`` of ``pages [num_blocks, page_bytes]``, the last one in part.

    One copy for each run of neighbouring pages, so a fresh pool takes an image in one.
    """
    for first, count, start, end in _runs(ids, slot.shape[0], pages.shape[1]):
        pages[first : first + count].view(-1)[: end - start].copy_(slot[start:end])


def load_image(pages: torch.Tensor, ids: Sequence[BlockId], slot: torch.Tensor) -> None:
    """The way back: fill ``slot`` from pages ``ids``."""
    for first, count, start, end in _runs(ids, slot.shape[0], pages.shape[1]):
        slot[start:end].copy_(pages[first : first + count].view(-1)[: end - start])


def _runs(ids: Sequence[BlockId], slot_bytes: int, page_bytes: int) -> list[tuple[int, int, int, int]]:
    """(first page, pages, start byte, end byte) of each run of neighbouring pages."""
    runs, begin = [], 0
    for i in range(1, len(ids) + 1):
        if i == len(ids) or ids[i] != ids[i - 1] + 1:
            runs.append((ids[begin], i - begin, begin * page_bytes, min(i * page_bytes, slot_bytes)))
            begin = i
    return runs

"""A slot cut into pages and put together again, byte for byte, wherever the pages are."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from atom.model_ops.images import load_image, save_image


@given(words=st.integers(1, 40), page_words=st.integers(1, 12), seed=st.integers(0, 1000), neighbours=st.booleans())
def test_round_trip_touches_nothing_else(words: int, page_words: int, seed: int, neighbours: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    slot_bytes, page_bytes = 64 * words, 64 * page_words
    count = -(-slot_bytes // page_bytes)
    pages = torch.randint(0, 256, (count + 5, page_bytes), dtype=torch.uint8, generator=generator)
    slots = torch.randint(0, 256, (3, slot_bytes), dtype=torch.uint8, generator=generator)
    ids = list(range(2, 2 + count)) if neighbours else torch.randperm(count + 5, generator=generator)[:count].tolist()
    before, original = pages.clone(), slots.clone()
    save_image(slots[1], pages, ids)
    assert torch.equal(torch.cat([pages[i] for i in ids])[:slot_bytes], original[1])
    untouched = [i for i in range(count + 5) if i not in ids]
    assert torch.equal(pages[untouched], before[untouched])
    tail = slot_bytes - (count - 1) * page_bytes
    assert torch.equal(pages[ids[-1], tail:], before[ids[-1], tail:]), "the last page in part"
    assert torch.equal(slots, original)
    load_image(pages, ids, slots[2])
    assert torch.equal(slots[2], original[1]) and torch.equal(slots[:2], original[:2])

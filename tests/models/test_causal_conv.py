"""The convolution of chunks and single tokens against the token-by-token definition, with states in slots."""

from __future__ import annotations

import pytest
import torch

from atom.model_ops.causal_conv import conv_chunks, conv_reference, conv_step
from atom.model_ops.chunk_plan import ChunkPlan, unpad_rows
from atom.model_ops.forward_batch import ForwardBatch, InteriorState

CHANNELS, WIDTH = 32, 4


def batch_of(rows, contexts, slots, interior=()):
    """A batch of prefill chunks; only what a chunk plan reads is filled in."""
    starts = [0]
    for count in rows:
        starts.append(starts[-1] + count)
    nothing = torch.zeros(starts[-1], dtype=torch.int64)
    tables = torch.zeros(len(rows), 1, dtype=torch.int64)
    where = (tables, nothing, nothing, torch.tensor(slots))
    return ForwardBatch(nothing, nothing, tuple(starts), tuple(contexts), 0, *where, tuple(interior))


@pytest.mark.parametrize(
    "rows, contexts", [([200], [0]), ([64], [5]), ([1], [9]), ([2], [0]), ([3, 130, 1, 64], [0, 7, 8, 0])]
)
def test_chunks(rows, contexts):
    slots = [4, 0, 6, 2][: len(rows)]
    states = torch.randn(8, WIDTH - 1, CHANNELS)
    weight = torch.randn(WIDTH, CHANNELS)
    x = torch.randn(sum(rows), CHANNELS)
    before = states.clone()
    for slot, context in zip(slots, contexts, strict=True):
        if context == 0:
            states[slot] = float("nan")
    plan = ChunkPlan.of(batch_of(rows, contexts, slots))
    out = torch.empty_like(x)
    unpad_rows(conv_chunks(x, states, weight, plan), plan, out)
    start = 0
    for count, context, slot in zip(rows, contexts, slots, strict=True):
        initial = before[slot] if context else torch.zeros_like(before[slot])
        expected, state = conv_reference(x[start : start + count], initial, weight)
        torch.testing.assert_close(out[start : start + count], expected)
        assert torch.equal(states[slot], state)
        start += count
    untouched = [slot for slot in range(8) if slot not in slots]
    assert torch.equal(states[untouched], before[untouched])


def test_interior_states():
    states = torch.zeros(8, WIDTH - 1, CHANNELS)
    x = torch.randn(300, CHANNELS)
    interior = [InteriorState(0, 64, 5), InteriorState(1, 128, 6), InteriorState(1, 64, 7)]
    plan = ChunkPlan.of(batch_of([100, 200], [0, 0], [1, 2], interior))
    conv_chunks(x, states, torch.randn(WIDTH, CHANNELS), plan)
    for slot, end in ((5, 64), (6, 228), (7, 164), (1, 100), (2, 300)):
        assert torch.equal(states[slot], x[end - WIDTH + 1 : end])


def places(slots):
    """Neighbours are given as a slice, as a plan gives them."""
    first, last = int(slots[0]), int(slots[-1])
    return slice(first, last + 1) if slots.tolist() == list(range(first, last + 1)) else slots


@pytest.mark.parametrize("neighbours", [False, True])
@pytest.mark.parametrize("forked", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_step(dtype, n, forked, neighbours):
    states = torch.randn(8, WIDTH - 1, CHANNELS).to(dtype)
    before = states.clone()
    weight, x, reads = (
        torch.randn(WIDTH, CHANNELS),
        torch.randn(n, CHANNELS).to(dtype),
        torch.tensor([2, 3, 4][:n] if neighbours else [5, 1, 2][:n]),
    )
    writes = torch.tensor([5, 6, 7] if neighbours else [0, 7, 3])[:n] if forked else reads
    out = conv_step(x, states, *map(places, (reads, writes)), weight)
    assert out.dtype == torch.float32
    for row, (read, write) in enumerate(zip(reads.tolist(), writes.tolist(), strict=True)):
        expected, state = conv_reference(x[row : row + 1], before[read], weight)
        torch.testing.assert_close(out[row : row + 1], expected)
        assert torch.equal(states[write], state)
    untouched = [slot for slot in range(8) if slot not in writes.tolist()]
    assert torch.equal(states[untouched], before[untouched])

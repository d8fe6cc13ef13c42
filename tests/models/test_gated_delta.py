"""The chunked and single-token gated delta rule against the token-by-token definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.model_ops.gated_delta import (
    chunk_gated_delta_rule,
    gated_delta_reference,
    gated_delta_step,
    unit_lower_inverse,
)

CHUNK = 64


def inputs(length, key_heads, groups, width, dim, rate, seed):
    """Random q, k, v, g, beta and an initial state; ``rate`` scales how fast the state decays."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    heads = key_heads * groups
    g = -rate * torch.rand(length, heads, generator=generator)
    beta = torch.rand(length, heads, generator=generator)
    q, k, v = (normal(length, n, d) for n, d in ((key_heads, width), (key_heads, width), (heads, dim)))
    return q, k, v, g, beta, normal(heads, width, dim)


def in_chunks(x):
    """``[T, ...]`` to ``[chunks, 64, ...]``, padded with zeros."""
    padded = x.new_zeros(-(-len(x) // CHUNK) * CHUNK, *x.shape[1:])
    padded[: len(x)] = x
    return padded.unflatten(0, (-1, CHUNK))


@settings(max_examples=25, deadline=None)
@given(
    length=st.integers(1, 1500),
    key_heads=st.sampled_from([1, 2, 3]),
    groups=st.sampled_from([1, 2]),
    width=st.sampled_from([16, 24]),
    dim=st.sampled_from([16, 40]),
    rate=st.sampled_from([0.0, 0.05, 1.0, 20.0]),
    seed=st.integers(0, 2**16),
)
def test_chunked_equals_token_by_token(length, key_heads, groups, width, dim, rate, seed):
    *rows, state = inputs(length, key_heads, groups, width, dim, rate, seed)
    expected, expected_state = gated_delta_reference(*rows, state)
    chunks = [in_chunks(x) for x in rows]
    out, final, kept = chunk_gated_delta_rule(*chunks, state[None], [1] * len(chunks[0]))
    torch.testing.assert_close(out.flatten(0, 1)[:length], expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(final[0], expected_state, rtol=1e-4, atol=1e-4)
    assert kept == []


def test_several_sequences_and_kept_states():
    """Sequences of falling length side by side; kept states are those of shorter runs, bit for bit."""
    lengths = [300, 190, 64, 10]
    runs = [inputs(n, 2, 2, 16, 16, 0.3, n) for n in lengths]
    padded = [[in_chunks(x) for x in run[:5]] for run in runs]
    widths = [sum(len(p[0]) > step for p in padded) for step in range(5)]
    packed = [
        torch.stack([padded[p][i][step] for step, width in enumerate(widths) for p in range(width)]) for i in range(5)
    ]
    keep = [(2, 1), (1, 0), (4, 0)]
    states = torch.stack([run[5] for run in runs])
    before = states.clone()
    out, final, kept = chunk_gated_delta_rule(*packed, states, widths, keep)
    assert torch.equal(states, before)
    place = [[sum(widths[:step]) + p for step in range(len(padded[p][0]))] for p in range(4)]
    for p, run in enumerate(runs):
        expected, expected_state = gated_delta_reference(*run)
        torch.testing.assert_close(out[place[p]].flatten(0, 1)[: lengths[p]], expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(final[p], expected_state, rtol=1e-4, atol=1e-4)
    for (chunks, p), state in zip(keep, kept, strict=True):
        stopped = [x[:chunks] for x in padded[p]]
        assert torch.equal(state, chunk_gated_delta_rule(*stopped, runs[p][5][None], [1] * chunks)[1][0])


def places(slots):
    """Neighbours are given as a slice, as a plan gives them."""
    first, last = int(slots[0]), int(slots[-1])
    return slice(first, last + 1) if slots.tolist() == list(range(first, last + 1)) else slots


@pytest.mark.parametrize("neighbours", [False, True])
@pytest.mark.parametrize("forked", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_single_token_step(n, forked, neighbours):
    states = torch.randn(7, 4, 16, 24)
    reads = torch.tensor([1, 2, 3][:n] if neighbours else [5, 0, 3][:n])
    writes = torch.tensor([4, 5, 6] if neighbours else [1, 6, 2])[:n] if forked else reads
    q, k, v, g, beta, _ = inputs(n, 2, 2, 16, 24, 1.0, 4)
    before = states.clone()
    out = gated_delta_step(q, k, v, g, beta, states, *map(places, (reads, writes)))
    for row, (read, write) in enumerate(zip(reads.tolist(), writes.tolist(), strict=True)):
        one = slice(row, row + 1)
        expected, state = gated_delta_reference(q[one], k[one], v[one], g[one], beta[one], before[read])
        torch.testing.assert_close(out[one], expected)
        torch.testing.assert_close(states[write], state)
    untouched = [slot for slot in range(7) if slot not in writes.tolist()]
    assert torch.equal(states[untouched], before[untouched])


@pytest.mark.parametrize("size", [8, 16, 32, 64])
def test_unit_lower_inverse_ignores_the_upper_part(size):
    system = torch.randn(5, size, size) * 0.3
    identity = torch.eye(size)
    product = unit_lower_inverse(system) @ (system.tril(-1) + identity)
    torch.testing.assert_close(product, identity.expand_as(product), rtol=0, atol=1e-3)

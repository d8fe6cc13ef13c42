"""Depthwise causal convolution with SiLU: ``y[t] = silu(sum_j weight[j] * x[t - K + 1 + j])`` per channel.

The state is the last K - 1 inputs, one row each, in the model's dtype: channels are neighbours there as they are in x.
Sums are float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from atom.model_ops.chunk_plan import CHUNK, ChunkPlan

# Chunks convolved together: their float32 copy stays in the cache.
GROUP = 8


def conv_reference(x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, token by token. ``x [T, C]``, ``state [K-1, C]``, ``weight [K, C]``; output and new state."""
    window = state
    outputs = []
    for row in x:
        window = torch.cat((window, row[None]))
        outputs.append(F.silu((window.float() * weight).sum(0)))
        window = window[1:]
    return torch.stack(outputs), window


def conv_step(
    x: torch.Tensor,
    states: torch.Tensor,
    reads: torch.Tensor | slice,
    writes: torch.Tensor | slice,
    weight: torch.Tensor,
) -> torch.Tensor:
    """One token of n sequences. ``x [n, C]``; states in ``states [num_slots, K-1, C]``, read at ``reads``, written at
    ``writes``: int64 ``[n]``, or slices of neighbours.

    ``weight [K, C]`` float32; returns ``[n, C]`` float32.
    """
    before = states[reads] if isinstance(reads, slice) else states.index_select(0, reads)
    window = torch.cat((before, x.unsqueeze(1)), dim=1)
    if isinstance(writes, slice):
        states[writes] = window[:, 1:]
    else:
        states.index_copy_(0, writes, window[:, 1:])
    return F.silu((window * weight).sum(1))


def conv_chunks(x: torch.Tensor, states: torch.Tensor, weight: torch.Tensor, plan: ChunkPlan) -> torch.Tensor:
    """The plan's prefill chunks. ``x [prefill rows, C]``, ``states [num_slots, K-1, C]`` read, then updated in place.

    Final and interior states go to their slots. Returns ``[chunks, 64, C]`` float32; padded places are finite.
    """
    halo = weight.shape[0] - 1
    inputs = (_one_sequence if plan.padded_rows is None else _several_sequences)(x, states, plan, halo)
    _store_states(x, states, plan, halo)
    out = torch.empty(plan.num_chunks, CHUNK, x.shape[1], dtype=torch.float32, device=x.device)
    for part, source in zip(out.split(GROUP), inputs.split(GROUP), strict=True):
        rows = source.float()
        torch.mul(rows[:, :CHUNK], weight[0], out=part)
        for j in range(1, halo + 1):
            part.addcmul_(rows[:, j : j + CHUNK], weight[j])
        F.silu(part, inplace=True)
    return out


def _one_sequence(x: torch.Tensor, states: torch.Tensor, plan: ChunkPlan, halo: int) -> torch.Tensor:
    """``[chunks, halo + 64, C]``: every chunk behind the inputs before it; overlapping views of one buffer."""
    (span,) = plan.spans
    channels = x.shape[1]
    rows = x.new_empty(halo + plan.num_chunks * CHUNK, channels)
    rows[:halo] = 0 if span.fresh else states[span.read]
    rows[halo : halo + span.rows] = x
    rows[halo + span.rows :] = 0
    return rows.as_strided((plan.num_chunks, halo + CHUNK, channels), (CHUNK * channels, channels, 1))


def _several_sequences(x: torch.Tensor, states: torch.Tensor, plan: ChunkPlan, halo: int) -> torch.Tensor:
    """The same for several sequences, whose chunks alternate."""
    inputs = x.new_zeros(plan.num_chunks, halo + CHUNK, x.shape[1])
    assert plan.padded_rows is not None
    inputs[plan.padded_rows // CHUNK, halo + plan.padded_rows % CHUNK] = x
    for order, span in enumerate(plan.spans):
        if not span.fresh:
            inputs[order, :halo] = states[span.read]
        for step in range(1, span.chunks):
            end = span.first + step * CHUNK
            inputs[plan.starts[step] + order, :halo] = x[end - halo : end]
    return inputs


def _store_states(x: torch.Tensor, states: torch.Tensor, plan: ChunkPlan, halo: int) -> None:
    for span in plan.spans:
        for offset, slot in span.interior:
            end = span.first + offset
            states[slot] = x[end - halo : end]
        state, rows = states[span.slot], min(span.rows, halo)
        if rows < halo:
            before = states[span.read][rows:]
            kept = torch.zeros_like(before) if span.fresh else before.clone()
            state[: halo - rows] = kept
        state[halo - rows :] = x[span.last - rows : span.last]

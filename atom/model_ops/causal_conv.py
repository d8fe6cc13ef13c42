"""Depthwise causal convolution with SiLU: ``y[t] = silu(sum_j weight[j] * x[t - K + 1 + j])`` per channel.

The state is the last K - 1 inputs, one column each, in the model's dtype; sums are float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from atom.model_ops.chunk_plan import CHUNK, ChunkPlan


def conv_reference(x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, token by token. ``x [T, C]``, ``state [C, K-1]``, ``weight [K, C]``; output and new state."""
    window = state
    outputs = []
    for row in x:
        window = torch.cat((window, row[:, None]), dim=1)
        outputs.append(F.silu((window.float() * weight.t()).sum(1)))
        window = window[:, 1:]
    return torch.stack(outputs), window


def conv_step(x: torch.Tensor, states: torch.Tensor, slots: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """One token of n sequences. ``x [n, C]``, ``states [num_slots, C, K-1]`` updated in place at ``slots [n]``.

    ``weight [K, C]`` float32; returns ``[n, C]`` float32.
    """
    window = torch.cat((states.index_select(0, slots), x.unsqueeze(-1)), dim=-1)
    states.index_copy_(0, slots, window[..., 1:])
    return F.silu((window * weight.t()).sum(-1))


def conv_chunks(x: torch.Tensor, states: torch.Tensor, weight: torch.Tensor, plan: ChunkPlan) -> torch.Tensor:
    """The plan's prefill chunks. ``x [prefill rows, C]``, ``states [num_slots, C, K-1]`` read, then updated in place.

    Final and interior states go to their slots. Returns ``[chunks, 64, C]`` float32; padded places are finite.
    """
    halo = weight.shape[0] - 1
    if plan.padded_rows is None:
        inputs = _one_sequence(x, states, plan, halo)
    else:
        inputs = _several_sequences(x, states, plan, halo)
    _store_states(x, states, plan, halo)
    length = inputs.shape[1] - halo
    out = inputs[:, :length] * weight[0]
    for j in range(1, halo + 1):
        out.addcmul_(inputs[:, j : j + length], weight[j])
    return F.silu(out, inplace=True).view(plan.num_chunks, CHUNK, -1)


def _one_sequence(x: torch.Tensor, states: torch.Tensor, plan: ChunkPlan, halo: int) -> torch.Tensor:
    """``[1, halo + padded rows, C]`` float32: state, rows, zeros."""
    (span,) = plan.spans
    inputs = torch.empty(1, halo + plan.num_chunks * CHUNK, x.shape[1], dtype=torch.float32, device=x.device)
    inputs[0, :halo] = 0 if span.fresh else states[span.slot].t()
    inputs[0, halo : halo + span.rows] = x
    inputs[0, halo + span.rows :] = 0
    return inputs


def _several_sequences(x: torch.Tensor, states: torch.Tensor, plan: ChunkPlan, halo: int) -> torch.Tensor:
    """``[chunks, halo + 64, C]`` float32: every chunk behind the inputs before it."""
    inputs = torch.zeros(plan.num_chunks, halo + CHUNK, x.shape[1], dtype=torch.float32, device=x.device)
    assert plan.padded_rows is not None
    chunk, place = plan.padded_rows // CHUNK, plan.padded_rows % CHUNK
    inputs[chunk, halo + place] = x.float()
    for order, span in enumerate(plan.spans):
        if not span.fresh:
            inputs[order, :halo] = states[span.slot].t()
        for step in range(1, span.chunks):
            end = span.first + step * CHUNK
            inputs[plan.starts[step] + order, :halo] = x[end - halo : end]
    return inputs


def _store_states(x: torch.Tensor, states: torch.Tensor, plan: ChunkPlan, halo: int) -> None:
    for span in plan.spans:
        for offset, slot in span.interior:
            end = span.first + offset
            states[slot] = x[end - halo : end].t()
        state, rows = states[span.slot], min(span.rows, halo)
        if rows < halo:
            kept = torch.zeros_like(state[:, rows:]) if span.fresh else state[:, rows:].clone()
            state[:, : halo - rows] = kept
        state[:, halo - rows :] = x[span.last - rows : span.last].t()

"""How the shipped model learns: fast training kernels, initial weights, optimizers, schedule, evaluation.

The kernels replace two functions of transformers by equal ones that are cheaper on one CPU core with heads of 32. They
serve training only; the saved model is a plain ``Qwen3_5ForCausalLM``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers.models.qwen3_5.modeling_qwen3_5 as reference
from torch import nn
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

CHUNK = 32
"""Tokens a chunk of the delta rule. With heads of 32 a chunk of 64 spends most of its time in 64 x 64 decay tables."""


def chunk_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The gated delta rule from an empty state, chunk by chunk; equal to transformers' function of that name.

    Shapes: query, key ``[B, T, Hk, D]``, value ``[B, T, Hv, D]``, g, beta ``[B, T, Hv]``; T a multiple of ``CHUNK``.
    Query and key are L2-normalised here. The final state is not returned: training has no use for it.
    """
    batch, length, key_heads, key_dim = key.shape
    heads, value_dim = value.shape[2:]
    if length % CHUNK:
        raise ValueError(f"sequence length {length} is not a multiple of {CHUNK}")
    dtype = query.dtype
    # The recurrence stays in fp32, as the family defines it, also where autocast makes bf16 of other products.
    with torch.autocast(query.device.type, enabled=False):
        groups = heads // key_heads
        query, key = (x.repeat_interleave(groups, dim=2) for x in (query, key))
        query, key, value = (
            x.float().view(batch, -1, CHUNK, heads, x.shape[-1]).permute(0, 3, 1, 2, 4) for x in (query, key, value)
        )
        g, beta = (x.float().view(batch, -1, CHUNK, heads).permute(0, 3, 1, 2) for x in (g, beta))
        query = query * (torch.rsqrt((query * query).sum(-1, keepdim=True) + 1e-6) * key_dim**-0.5)
        key = key * torch.rsqrt((key * key).sum(-1, keepdim=True) + 1e-6)

        log_decay = g.cumsum(-1)
        future = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=key.device).triu(1)
        pairwise = (log_decay.unsqueeze(-1) - log_decay.unsqueeze(-2)).masked_fill(future, -math.inf).exp()
        since_start = log_decay.exp().unsqueeze(-1)
        key_beta = key * beta.unsqueeze(-1)
        system = (key_beta @ key.mT) * pairwise
        attention = (query @ key.mT) * pairwise
        # One solve for both right-hand sides.
        right = torch.cat([value * beta.unsqueeze(-1), key_beta * since_start], dim=-1)
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        new_values, key_read = (x.unbind(2) for x in solved.split([value_dim, key_dim], dim=-1))
        key_write = (key * (log_decay[..., -1:] - log_decay).exp().unsqueeze(-1)).mT.unbind(2)
        chunk_decay = log_decay[..., -1].exp()[..., None, None].unbind(2)

        state = key.new_zeros(batch, heads, key_dim, value_dim)
        states, corrections = [], []
        for chunk in range(length // CHUNK):
            correction = new_values[chunk] - key_read[chunk] @ state
            states.append(state)
            corrections.append(correction)
            state = state * chunk_decay[chunk] + key_write[chunk] @ correction
        out = (query * since_start) @ torch.stack(states, 2) + attention @ torch.stack(corrections, 2)
        return out.permute(0, 2, 3, 1, 4).reshape(batch, length, heads, value_dim).to(dtype), None


def causal_conv1d(hidden_states: torch.Tensor, weight: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Depthwise causal convolution and SiLU as a sum of shifted products.

    Shapes: hidden_states ``[B, channels, T]``, weight ``[channels, K]``.
    """
    width, length = weight.shape[-1], hidden_states.shape[-1]
    padded = F.pad(hidden_states, (width - 1, 0))
    out = padded[..., :length] * weight[:, :1]
    for tap in range(1, width):
        out = out + padded[..., tap : tap + length] * weight[:, tap : tap + 1]
    return F.silu(out).to(hidden_states.dtype)


def install_fast_kernels() -> float:
    """Put the fast kernels in place of transformers' and return the largest difference between the two on noise."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, 128, 2, 32, generator=generator) for _ in range(2))
    value = torch.randn(2, 128, 4, 32, generator=generator)
    g, beta = -torch.rand(2, 128, 4, generator=generator), torch.rand(2, 128, 4, generator=generator)
    expected, _ = reference.torch_chunk_gated_delta_rule(query, key, value, g, beta, use_qk_l2norm_in_kernel=True)
    delta_error = (chunk_gated_delta_rule(query, key, value, g, beta)[0] - expected).abs().max().item()
    mixed, taps = torch.randn(2, 96, 128, generator=generator), torch.randn(96, 4, generator=generator)
    expected = reference.causal_conv1d_fn(mixed, taps, activation="silu")
    conv_error = (causal_conv1d(mixed, taps) - expected).abs().max().item()
    worst = max(delta_error, conv_error)
    if worst > 1e-5:
        raise RuntimeError(f"the training kernels differ from the reference by {worst:.1e}")
    reference.torch_chunk_gated_delta_rule = chunk_gated_delta_rule
    reference.causal_conv1d_fn = causal_conv1d
    return worst


def build_model(config: Qwen3_5TextConfig, seed: int) -> Qwen3_5ForCausalLM:
    """A freshly initialised model."""
    torch.manual_seed(seed)
    model = Qwen3_5ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                parameter.zero_()  # every block starts as the identity
            elif "embed_tokens" in name:
                parameter.normal_(0.0, 0.05)
            elif parameter.ndim == 2:
                parameter.normal_(0.0, 0.5 * parameter.shape[1] ** -0.5)
            elif name.endswith("A_log"):
                parameter.copy_(torch.empty_like(parameter).uniform_(1.0, 8.0).log())
            elif name.endswith("dt_bias"):
                # Time steps between 0.001 and 0.1 let some heads remember thousands of bytes from the start;
                # the family's default forgets within two.
                step = torch.empty_like(parameter).uniform_(math.log(1e-3), math.log(1e-1)).exp()
                parameter.copy_(step + torch.log(-torch.expm1(-step)))
    return model


def build_optimizers(model: nn.Module, learning_rate: float, muon_learning_rate: float) -> list[torch.optim.Optimizer]:
    """AdamW for embeddings, gains, gates and convolutions; Muon for the large matrices (AdamW too if its rate is 0).

    Every group carries its peak rate as ``initial_lr``.
    """
    matrices, decayed, plain = [], [], []
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and min(parameter.shape) >= 32 and "embed" not in name:
            matrices.append(parameter)
        else:
            (decayed if parameter.ndim >= 2 else plain).append(parameter)
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}]
    if not muon_learning_rate:
        groups.append({"params": matrices, "weight_decay": 0.1})
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.98))]
    if muon_learning_rate:
        optimizers.append(torch.optim.Muon(matrices, lr=muon_learning_rate, momentum=0.95, weight_decay=0.05))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return optimizers


def schedule(progress: float, warm_up: float = 0.02, floor: float = 0.01) -> float:
    """The share of the peak learning rate at ``progress`` in [0, 1]: linear warm-up, then cosine decay to ``floor``."""
    if progress < warm_up:
        return max(progress / warm_up, 0.02)
    done = min(1.0, (progress - warm_up) / (1.0 - warm_up))
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * done))


def next_token_loss(model: nn.Module, tokens: torch.Tensor, bf16: bool = False) -> torch.Tensor:
    """Mean cross entropy in nats of ``tokens[:, 1:]`` given what stands before each."""
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: nn.Module, windows: np.ndarray, rows: int = 8) -> float:
    """Mean loss in nats over ``windows`` ``[N, T + 1]``, in fp32 and without compilation."""
    model.eval()
    with torch.compiler.set_stance("force_eager"):
        losses = [
            next_token_loss(model, torch.from_numpy(part)).item() * len(part)
            for part in np.split(windows, range(rows, len(windows), rows))
        ]
    model.train()
    return sum(losses) / len(windows)

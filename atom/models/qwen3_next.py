"""Qwen3-Next: the hybrid layers of Qwen3.5 with projections published interleaved per key head."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from atom.model_ops.gated_delta_net import GatedDeltaNet
from atom.model_ops.mlp import GatedMLP
from atom.model_ops.moe import SparseMoE
from atom.models.qwen3_5 import Qwen3_5ForCausalLM


class Qwen3NextForCausalLM(Qwen3_5ForCausalLM):
    """Mixture of experts, except in the layers that the configuration leaves dense."""

    @staticmethod
    def make_linear(config: Any, dtype: torch.dtype) -> GatedDeltaNet:
        heads, width = config.linear_num_key_heads, config.linear_key_head_dim
        groups = config.linear_num_value_heads // heads
        values = groups * config.linear_value_head_dim
        orders = {
            "in_proj_qkvz": deinterleave(heads, (width, width, values, values)),
            "in_proj_ba": deinterleave(heads, (groups, groups)),
        }
        return GatedDeltaNet(config, dtype, {part: len(order) for part, order in orders.items()}, orders)

    @staticmethod
    def make_mlp(config: Any, layer: int, dtype: torch.dtype) -> nn.Module:
        sparse = config.num_experts > 0 and (layer + 1) % config.decoder_sparse_step == 0
        if layer in config.mlp_only_layers or not sparse:
            return GatedMLP(config.hidden_size, config.intermediate_size, dtype)
        return SparseMoE(
            config.hidden_size,
            config.num_experts,
            config.num_experts_per_tok,
            config.moe_intermediate_size,
            config.shared_expert_intermediate_size,
            renormalize=config.norm_topk_prob,
            dtype=dtype,
        )


def deinterleave(heads: int, widths: tuple[int, ...]) -> torch.Tensor:
    """Row order that turns ``heads`` groups of (part 0, part 1, ...) into all of part 0, then all of part 1, ..."""
    rows = torch.arange(heads * sum(widths), device="cpu").view(heads, -1)
    return torch.cat([part.flatten() for part in rows.split(widths, dim=1)])

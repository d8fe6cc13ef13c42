"""Qwen3.5, dense and mixture of experts: three Gated DeltaNet layers to one gated attention layer."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from atom.model_ops.gated_delta_net import GatedDeltaNet
from atom.model_ops.mlp import GatedMLP
from atom.model_ops.moe import SparseMoE
from atom.model_ops.norms import RMSNorm
from atom.model_ops.self_attention import SelfAttention
from atom.models.causal_lm import CausalLM, DecoderLayer, head_dim, is_linear


class Qwen3_5ForCausalLM(CausalLM):
    """The dense model."""

    @staticmethod
    def make_norm(config: Any, size: int, dtype: torch.dtype) -> RMSNorm:
        return RMSNorm(size, config.rms_norm_eps, dtype, zero_centered=True)

    @classmethod
    def make_layer(cls, config: Any, layer: int, dtype: torch.dtype) -> DecoderLayer:
        mixer: SelfAttention | GatedDeltaNet
        if is_linear(config, layer):
            mixer = cls.make_linear(config, dtype)
        else:
            bias = getattr(config, "attention_bias", False)
            mixer = SelfAttention(config, dtype, head_dim(config), gated=True, head_norms="zero_centered", bias=bias)
        norm = partial(cls.make_norm, config, config.hidden_size, dtype)
        return DecoderLayer(norm, mixer, cls.make_mlp(config, layer, dtype))

    @staticmethod
    def make_linear(config: Any, dtype: torch.dtype) -> GatedDeltaNet:
        """The linear-attention layer, whose projections are published apart."""
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        heads = config.linear_num_value_heads
        values = heads * config.linear_value_head_dim
        parts = {
            "in_proj_qkv": 2 * keys + values,
            "in_proj_z": values,
            "in_proj_b": heads,
            "in_proj_a": heads,
        }
        return GatedDeltaNet(config, dtype, parts)

    @staticmethod
    def make_mlp(config: Any, layer: int, dtype: torch.dtype) -> nn.Module:
        """The feed-forward part of a layer."""
        return GatedMLP(config.hidden_size, config.intermediate_size, dtype)


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):
    """The mixture-of-experts model."""

    @staticmethod
    def make_mlp(config: Any, layer: int, dtype: torch.dtype) -> nn.Module:
        return SparseMoE(
            config.hidden_size,
            config.num_experts,
            config.num_experts_per_tok,
            config.moe_intermediate_size,
            config.shared_expert_intermediate_size,
            renormalize=True,
            dtype=dtype,
        )

"""Llama: dense attention layers, no state beside keys and values."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from atom.model_ops.mlp import GatedMLP
from atom.model_ops.self_attention import SelfAttention
from atom.models.causal_lm import CausalLM, DecoderLayer, head_dim


class LlamaForCausalLM(CausalLM):
    """Llama 2 and 3, SmolLM2 and others of this architecture."""

    head_norms: str | None = None

    @classmethod
    def make_layer(cls, config: Any, layer: int, dtype: torch.dtype) -> DecoderLayer:
        attention = SelfAttention(
            config, dtype, head_dim(config), head_norms=cls.head_norms, bias=config.attention_bias
        )
        mlp = GatedMLP(config.hidden_size, config.intermediate_size, dtype, getattr(config, "mlp_bias", False))
        return DecoderLayer(partial(cls.make_norm, config, config.hidden_size, dtype), attention, mlp)

"""What every decoder-only family here shares: embedding, layers with residuals, final norm, output head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from atom.model_engine.cache_layout import CacheSpec, PagedSpec, StateSpec
from atom.model_ops.arenas import LayerCache
from atom.model_ops.attention import AttentionPlan
from atom.model_ops.chunk_plan import ChunkPlan
from atom.model_ops.forward_batch import ForwardBatch
from atom.model_ops.gated_delta_net import GatedDeltaNet
from atom.model_ops.module import Module
from atom.model_ops.norms import RMSNorm
from atom.model_ops.rotary import RotaryEmbedding
from atom.model_ops.self_attention import SelfAttention
from atom.model_ops.weights import empty_parameter


@dataclass(frozen=True, slots=True)
class Step:
    """What the layers of one forward share: plans made once, rotary tables of the rows' positions."""

    attention: AttentionPlan
    chunks: ChunkPlan | None
    cos: torch.Tensor
    sin: torch.Tensor


class DecoderLayer(Module):
    """``x + mixer(norm(x))``, then ``x + mlp(norm(x))``; the mixer is published as self_attn or linear_attn."""

    def __init__(self, norm: Callable[[], RMSNorm], mixer: SelfAttention | GatedDeltaNet, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = norm()
        self.is_linear = isinstance(mixer, GatedDeltaNet)
        if self.is_linear:
            self.linear_attn = mixer
        else:
            self.self_attn = mixer
        self.post_attention_layernorm = norm()
        self.mlp = mlp

    def forward(self, x: torch.Tensor, step: Step, cache: LayerCache) -> torch.Tensor:
        """``[T, hidden]`` to ``[T, hidden]``; reads and writes ``cache``."""
        normed = self.input_layernorm(x)
        if self.is_linear:
            assert step.chunks is not None
            x = x + self.linear_attn(normed, step.chunks, cache)
        else:
            x = x + self.self_attn(normed, step.cos, step.sin, step.attention, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Embedding(Module):
    """Token embeddings ``[vocab, hidden]``."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = empty_parameter(vocab_size, hidden_size, dtype=dtype)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """``[T]`` to ``[T, hidden]``."""
        return F.embedding(token_ids, self.weight)


class Decoder(Module):
    """Embedding, layers and final norm, published under ``model.``."""

    def __init__(self, embed_tokens: Embedding, layers: list[DecoderLayer], norm: RMSNorm) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens
        self.layers = nn.ModuleList(layers)
        self.norm = norm


class CausalLM(Module):
    """A language model over paged keys and values and per-request states.

    A family gives ``make_layer``. ``config`` is the text configuration as transformers parses it; its ``dtype`` is the
    dtype of the weights (float32 if None). Weights are uninitialised until loaded. ValueError for a setting that is not
    supported.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        check_supported(config)
        dtype = config.dtype or torch.float32
        self.dtype = dtype
        self.num_layers: int = config.num_hidden_layers
        self.vocab_size: int = config.vocab_size
        self.hidden_size: int = config.hidden_size
        self.max_position: int = config.max_position_embeddings
        self.tied: bool = config.tie_word_embeddings
        # model.cache_spec() and Model.cache_spec(config, dtype) are the same question, with and without weights.
        self.cache_spec = partial(type(self).cache_spec, config, dtype)
        spec = self.cache_spec()
        self.has_state = bool(spec.state)
        paged = spec.paged[0]
        self.key_shape = paged.token_shape
        self.key_bytes = paged.token_shape[0] * paged.token_shape[1] * dtype.itemsize
        self.attention_layer = paged.layer
        embedding = Embedding(config.vocab_size, config.hidden_size, dtype)
        layers = [self.make_layer(config, layer, dtype) for layer in range(config.num_hidden_layers)]
        self.model = Decoder(embedding, layers, self.make_norm(config, config.hidden_size, dtype))
        self.lm_head = None if self.tied else Embedding(config.vocab_size, config.hidden_size, dtype)
        self.rotary = RotaryEmbedding(config.rope_parameters, head_dim(config), config.max_position_embeddings)

    @staticmethod
    def cache_spec(config: Any, dtype: torch.dtype) -> CacheSpec:
        """What a model of this configuration keeps; on an instance it is called without arguments."""
        name = str(dtype).removeprefix("torch.")
        shape = (config.num_key_value_heads, head_dim(config))
        paged: list[PagedSpec] = []
        state: list[StateSpec] = []
        for layer in range(config.num_hidden_layers):
            if is_linear(config, layer):
                state += GatedDeltaNet.state_specs(config, layer, name)
            else:
                paged += (PagedSpec(layer, "k", shape, name), PagedSpec(layer, "v", shape, name))
        return CacheSpec(tuple(paged), tuple(state))

    @staticmethod
    def make_norm(config: Any, size: int, dtype: torch.dtype) -> RMSNorm:
        """A norm of the family's kind over ``size`` components."""
        return RMSNorm(size, config.rms_norm_eps, dtype)

    @classmethod
    def make_layer(cls, config: Any, layer: int, dtype: torch.dtype) -> DecoderLayer:
        """Layer number ``layer`` of the family."""
        raise NotImplementedError

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, caches: list[LayerCache]) -> torch.Tensor:
        """Hidden states ``[T, hidden]`` after the final norm; keys, values and states go to ``caches``."""
        block_size = caches[self.attention_layer]["k"].shape[1]
        cos, sin = self.rotary(batch.positions)
        step = Step(
            AttentionPlan.of(batch, block_size, self.key_bytes, self.dtype),
            ChunkPlan.of(batch) if self.has_state else None,
            cos,
            sin,
        )
        x = self.model.embed_tokens(batch.token_ids)
        for layer, cache in zip(self.model.layers, caches, strict=True):
            x = layer(x, step, cache)
        return self.model.norm(x)

    @torch.inference_mode()
    def compute_logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """``[rows, hidden]`` to float32 logits ``[rows, vocab]``."""
        head = self.lm_head or self.model.embed_tokens
        return F.linear(hidden_rows, head.weight).float()


def head_dim(config: Any) -> int:
    """Width of an attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def is_linear(config: Any, layer: int) -> bool:
    """Whether the layer is linear attention, by the configuration's layer_types (none: all attend)."""
    types = getattr(config, "layer_types", None)
    return bool(types) and types[layer] == "linear_attention"


def check_supported(config: Any) -> None:
    """ValueError for layer types or activations that the layers here do not compute."""
    types = set(getattr(config, "layer_types", None) or ())
    unknown = sorted(types - {"full_attention", "linear_attention"})
    if unknown:
        raise ValueError(f"layer types {', '.join(unknown)} are not supported; supported: full, linear attention")
    if config.hidden_act != "silu":
        raise ValueError(f"activation {config.hidden_act!r} is not supported; supported: silu")

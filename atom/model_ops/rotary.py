"""Rotary position embedding over the first ``rotary_dim`` components of a head (RoFormer, half-split layout).

A position is text only: the sections of a multimodal rope all carry the same position, and it reduces to this one.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from atom.model_ops.module import Module


class RotaryEmbedding(Module):
    """Tables of cosines and signed sines for positions ``0 .. max_position - 1``, built as they are needed."""

    def __init__(self, rope: dict[str, Any], head_dim: int, max_position: int) -> None:
        """``rope``: a configuration's rope_parameters. ValueError for a rope type that is not supported."""
        super().__init__()
        inv_freq, self.scale = rope_frequencies(rope, head_dim, max_position)
        self.inv_freq = nn.Buffer(inv_freq, persistent=False)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``positions [T]`` to cosine and signed sine, each ``[T, 1, rotary_dim]`` float32, for :func:`rotate`."""
        angles = positions[:, None].float() * self.inv_freq
        cos, sin = angles.cos(), angles.sin()
        if self.scale != 1.0:
            cos, sin = cos * self.scale, sin * self.scale
        return torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate ``x [T, H, D]`` float32 in place; components from ``rotary_dim`` on stay as they are."""
    rotary_dim = cos.shape[-1]
    head = x[..., :rotary_dim]
    swapped = torch.roll(head, rotary_dim // 2, -1).mul_(sin)
    head.mul_(cos).add_(swapped)


def rope_frequencies(rope: dict[str, Any], head_dim: int, max_position: int) -> tuple[torch.Tensor, float]:
    """Inverse frequencies ``[rotary_dim / 2]`` float32 and the factor on cosine and sine.

    Types default, linear (positions divided by ``factor``), llama3 (Llama 3.1's smooth change from unscaled high to
    scaled low frequencies) and yarn (Peng et al. 2023, section 3.2). ValueError for any other type.
    """
    kind = rope.get("rope_type", "default")
    dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    inv_freq = 1.0 / rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if kind == "default":
        return inv_freq, 1.0
    if kind == "linear":
        return inv_freq / rope["factor"], 1.0
    if kind == "llama3":
        return _llama3(inv_freq, rope), 1.0
    if kind == "yarn":
        return _yarn(inv_freq, rope, dim, max_position)
    raise ValueError(f"rope type {kind!r} is not supported; supported: default, linear, llama3, yarn")


def _llama3(inv_freq: torch.Tensor, rope: dict[str, Any]) -> torch.Tensor:
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * inv_freq / (2 * math.pi)
    unscaled = ((turns - low) / (high - low)).clamp(0, 1)
    return inv_freq / rope["factor"] * (1 - unscaled) + inv_freq * unscaled


def _yarn(inv_freq: torch.Tensor, rope: dict[str, Any], dim: int, max_position: int) -> tuple[torch.Tensor, float]:
    original = rope["original_max_position_embeddings"]
    factor = rope.get("factor") or max_position / original

    def component(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

    first, last = component(rope.get("beta_fast") or 32), component(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - first) / max(last - first, 0.001)
    unscaled = 1 - ramp.clamp(0, 1)
    scaled = inv_freq / factor * (1 - unscaled) + inv_freq * unscaled

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention = rope.get("attention_factor")
    if attention is None:
        mscale, mscale_all = rope.get("mscale"), rope.get("mscale_all_dim")
        attention = temperature(mscale) / temperature(mscale_all) if mscale and mscale_all else temperature(1.0)
    return scaled, float(attention)

"""The softmax attention layer: fused projections, optional per-head norms and output gate, rotary embedding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from atom.model_ops.arenas import LayerCache
from atom.model_ops.attention import AttentionPlan, paged_attention
from atom.model_ops.linear import Linear
from atom.model_ops.module import Module
from atom.model_ops.norms import one_plus
from atom.model_ops.rotary import rotate
from atom.model_ops.weights import WeightTarget, empty_parameter


class HeadNorms(Module):
    """RMSNorm of every query and key head with the query's or the key's scale; float32 ``[Hq + Hkv, D]``."""

    def __init__(self, heads: int, kv_heads: int, size: int, eps: float, zero_centered: bool) -> None:
        super().__init__()
        self.heads, self.size, self.eps, self.zero_centered = heads, size, eps, zero_centered
        self.weight = empty_parameter(heads + kv_heads, size, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x [T, Hq + Hkv, D]`` float32, queries first."""
        return F.rms_norm(x, (self.size,), eps=self.eps).mul_(self.weight)

    def published(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        transform = one_plus if self.zero_centered else None
        yield "q_norm.weight", WeightTarget((self.size,), self.weight.data[: self.heads], transform)
        yield "k_norm.weight", WeightTarget((self.size,), self.weight.data[self.heads :], transform)


class SelfAttention(Module):
    """Grouped-query attention over pages.

    ``gated``: the published q_proj holds, per head, a query and an output gate. ``head_norms``: None, "plain" or
    "zero_centered" (scale ``1 + weight``).
    """

    def __init__(
        self,
        config: Any,
        dtype: torch.dtype,
        size: int,
        gated: bool = False,
        head_norms: str | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = config.num_attention_heads, config.num_key_value_heads, size
        self.gated = gated
        queries, keys = self.heads * size, self.kv_heads * size
        # Own row order: gates, queries, keys, values. Queries and keys are adjacent for norm and rotation.
        parts = {"q_proj": queries * (1 + gated), "k_proj": keys, "v_proj": keys}
        orders = {}
        if gated:
            rows = torch.arange(2 * queries, device="cpu").view(self.heads, 2, size)
            orders["q_proj"] = torch.cat((rows[:, 1].flatten(), rows[:, 0].flatten()))
        self.qkv = Linear(config.hidden_size, parts, dtype, bias, orders)
        self.o = Linear(queries, {"o_proj": config.hidden_size}, dtype, bias)
        self.head_norms = (
            HeadNorms(self.heads, self.kv_heads, size, config.rms_norm_eps, head_norms == "zero_centered")
            if head_norms
            else None
        )

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, plan: AttentionPlan, cache: LayerCache
    ) -> torch.Tensor:
        """``x [T, hidden]``; writes keys and values to the plan's pages; returns ``[T, hidden]``."""
        projected = self.qkv(x).unflatten(-1, (-1, self.size))
        gates, qk, v = projected.split((self.heads * self.gated, self.heads + self.kv_heads, self.kv_heads), dim=1)
        turned = qk.to(torch.float32, copy=self.head_norms is None)
        if self.head_norms is not None:
            turned = self.head_norms(turned)
        rotate(turned, cos, sin)
        q, k = turned.to(x.dtype).split((self.heads, self.kv_heads), dim=1)
        attended = paged_attention(q, k, v, cache["k"], cache["v"], plan, self.size**-0.5)
        if self.gated:
            attended.mul_(gates.sigmoid())
        return self.o(attended.flatten(1))

"""The Gated DeltaNet layer of Qwen3-Next and Qwen3.5: convolution, gated delta rule, gated norm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from atom.model_engine.cache_layout import StateSpec
from atom.model_ops.arenas import LayerCache
from atom.model_ops.causal_conv import conv_chunks, conv_step
from atom.model_ops.chunk_plan import CHUNK, ChunkPlan, StateStep, pad_rows, unpad_rows
from atom.model_ops.gated_delta import chunk_gated_delta_rule, gated_delta_step
from atom.model_ops.linear import Linear
from atom.model_ops.module import Module
from atom.model_ops.norms import GatedRMSNorm
from atom.model_ops.weights import WeightTarget, empty_parameter


class DeltaGates(Module):
    """``g = -exp(A_log) * softplus(a + dt_bias)`` and ``beta = sigmoid(b)``, in float32."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.negative_rate = empty_parameter(heads, dtype=torch.float32)
        self.dt_bias = empty_parameter(heads, dtype=torch.float32)

    def forward(self, ba: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``ba [..., 2 heads]`` float32, b first; returns ``g`` and ``beta``, each ``[..., heads]``."""
        b, a = ba.split(self.heads, dim=-1)
        return F.softplus(a + self.dt_bias).mul_(self.negative_rate), b.sigmoid()

    def published(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        yield "A_log", WeightTarget((self.heads,), self.negative_rate.data, lambda a_log: -a_log.float().exp())
        yield "dt_bias", WeightTarget((self.heads,), self.dt_bias.data)


class DepthwiseWeight(Module):
    """A depthwise convolution's weight, published ``[C, 1, K]``, kept ``[K, C]`` float32."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = empty_parameter(width, channels, dtype=torch.float32)

    def published(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        width, channels = self.weight.shape
        yield f"{name}.weight", WeightTarget((channels, 1, width), self.weight.data, lambda w: w.squeeze(1).t())


class GatedDeltaNet(Module):
    """One layer. State per request: ``conv (K-1, channels)`` and ``recurrent (Hv, Dk, Dv)``, the latter float32.

    ``parts`` and ``orders`` describe the published input projections, whose rows must come out as q, k, v, z, b, a.
    """

    def __init__(
        self,
        config: Any,
        dtype: torch.dtype,
        parts: Mapping[str, int],
        orders: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.key_heads, self.value_heads = config.linear_num_key_heads, config.linear_num_value_heads
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self.keys, self.values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        self.channels = 2 * self.keys + self.values
        self.in_proj = Linear(config.hidden_size, parts, dtype, orders=orders)
        self.conv1d = DepthwiseWeight(self.channels, config.linear_conv_kernel_dim)
        self.gates = DeltaGates(self.value_heads)
        self.norm = GatedRMSNorm(self.value_dim, config.rms_norm_eps)
        self.out_proj = Linear(self.values, {"out_proj": config.hidden_size}, dtype)

    @staticmethod
    def state_specs(config: Any, layer: int, dtype: str) -> tuple[StateSpec, StateSpec]:
        """What the layer keeps per request."""
        heads, key_dim = config.linear_num_value_heads, config.linear_key_head_dim
        value_dim = config.linear_value_head_dim
        channels = 2 * config.linear_num_key_heads * key_dim + heads * value_dim
        return (
            StateSpec(layer, "conv", (config.linear_conv_kernel_dim - 1, channels), dtype),
            StateSpec(layer, "recurrent", (heads, key_dim, value_dim), "float32"),
        )

    def forward(self, x: torch.Tensor, plan: ChunkPlan, cache: LayerCache) -> torch.Tensor:
        """``x [T, hidden]``; reads and updates the slots that ``plan`` names; returns ``[T, hidden]``."""
        mixed, z, ba = self.in_proj(x).split((self.channels, self.values, 2 * self.value_heads), dim=-1)
        if len(plan.steps) == 1 and not plan.spans:
            core = self._step(mixed, ba, plan.steps[0], cache)
        else:
            core = self._mixed_step(mixed, ba, plan, cache)
        return self.out_proj(self.norm(core, z.unflatten(-1, (self.value_heads, self.value_dim))).flatten(1))

    def _mixed_step(self, mixed: torch.Tensor, ba: torch.Tensor, plan: ChunkPlan, cache: LayerCache) -> torch.Tensor:
        """Decodes, verifications and prefill chunks in one forward; ``[T, Hv, Dv]`` float32."""
        core = torch.empty(len(mixed), self.value_heads, self.value_dim, dtype=torch.float32, device=mixed.device)
        for step in plan.steps:
            core[step.rows] = self._step(mixed[step.rows], ba[step.rows], step, cache)
        if plan.spans:
            n = plan.first_prefill_row
            self._prefill(mixed[n:], ba[n:], plan, cache, core[n:])
        return core

    def _heads(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = mixed.split((self.keys, self.keys, self.values), dim=-1)
        key_shape, value_shape = (self.key_heads, self.key_dim), (self.value_heads, self.value_dim)
        return q.unflatten(-1, key_shape), k.unflatten(-1, key_shape), v.unflatten(-1, value_shape)

    def _step(self, mixed: torch.Tensor, ba: torch.Tensor, step: StateStep, cache: LayerCache) -> torch.Tensor:
        q, k, v = self._heads(conv_step(mixed, cache["conv"], step.reads, step.writes, self.conv1d.weight))
        g, beta = self.gates(ba.float())
        return gated_delta_step(q, k, v, g, beta, cache["recurrent"], step.reads, step.writes)

    def _prefill(
        self, mixed: torch.Tensor, ba: torch.Tensor, plan: ChunkPlan, cache: LayerCache, out: torch.Tensor
    ) -> None:
        q, k, v = self._heads(conv_chunks(mixed, cache["conv"], self.conv1d.weight, plan))
        # Places without a token: sigmoid(-inf) = softplus(-inf) = 0, they leave the state alone. The gates are computed
        # in the padded layout so that no element's value depends on where a vector register's last lanes fall.
        g, beta = self.gates(pad_rows(ba, plan, float("-inf")))
        states = cache["recurrent"]
        initial = torch.zeros(len(plan.spans), *states.shape[1:], dtype=torch.float32, device=mixed.device)
        for order, span in enumerate(plan.spans):
            if not span.fresh:
                initial[order] = states[span.read]
        wanted = [(offset, order, slot) for order, span in enumerate(plan.spans) for offset, slot in span.interior]
        keep = [(offset // CHUNK, order) for offset, order, _ in wanted]
        padded, final, kept = chunk_gated_delta_rule(q, k, v, g, beta, initial, plan.widths, keep)
        unpad_rows(padded, plan, out)
        for (_, _, slot), state in zip(wanted, kept, strict=True):
            states[slot] = state
        for order, span in enumerate(plan.spans):
            states[span.slot] = final[order]

"""Mixture of experts: softmax router, grouped expert loop, gated shared expert."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from atom.model_ops.chunk_plan import CHUNK
from atom.model_ops.linear import Linear
from atom.model_ops.mlp import GatedMLP, silu_and_mul
from atom.model_ops.module import Module
from atom.model_ops.weights import WeightTarget, empty_parameter

# In float32, a product of a few rows rounds each row differently than a product of many. A forward that keeps or leaves
# a state on the chunk grid has at least CHUNK rows; there an expert's rows are padded, so that they round alike however
# many tokens chose it.
MIN_ROWS = 32


class Experts(Module):
    """``num_experts`` gated MLPs in two stacked weights."""

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up_proj = empty_parameter(num_experts, 2 * intermediate_size, hidden_size, dtype=dtype)
        self.down_proj = empty_parameter(num_experts, hidden_size, intermediate_size, dtype=dtype)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """``x [T, hidden]``, ``chosen [T, k]`` expert ids, ``weights [T, k]`` float32; the weighted sum, float32."""
        num_experts, top_k = len(self.gate_up_proj), chosen.shape[1]
        order = chosen.flatten().argsort(stable=True)
        tokens = order // top_k
        rows = x[tokens]
        outputs = torch.empty_like(rows)
        pad = x.dtype == torch.float32 and len(x) >= CHUNK
        first = 0
        for expert, count in enumerate(torch.bincount(chosen.flatten(), minlength=num_experts).tolist()):
            if count:
                last = first + count
                own = rows[first:last]
                if pad and count < MIN_ROWS:
                    own = F.pad(own, (0, 0, 0, MIN_ROWS - count))
                hidden = silu_and_mul(F.linear(own, self.gate_up_proj[expert]))
                outputs[first:last] = F.linear(hidden, self.down_proj[expert])[:count]
                first = last
        # Back in the order of tokens and choices, so that the sum's order depends on the token alone.
        back = torch.empty_like(outputs)
        back[order] = outputs
        return (back.unflatten(0, chosen.shape).float() * weights.unsqueeze(-1)).sum(1)

    def published(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        """One name an expert and projection, the form in which checkpoints are saved."""
        intermediate = self.down_proj.shape[-1]
        for expert, (gate_up, down) in enumerate(zip(self.gate_up_proj.data, self.down_proj.data, strict=True)):
            for part, dest in (
                ("gate_proj", gate_up[:intermediate]),
                ("up_proj", gate_up[intermediate:]),
                ("down_proj", down),
            ):
                yield f"{name}.{expert}.{part}.weight", WeightTarget(tuple(dest.shape), dest)

    def published_stacked(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        """The other published form: one weight for all experts."""
        for part in ("gate_up_proj", "down_proj"):
            dest = getattr(self, part).data
            yield f"{name}.{part}", WeightTarget(tuple(dest.shape), dest)


class SparseMoE(Module):
    """Top-k of a softmax over experts, plus a shared expert behind a sigmoid gate."""

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        intermediate_size: int,
        shared_size: int,
        renormalize: bool,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.top_k, self.renormalize = top_k, renormalize
        # One weight for router and shared gate: a product with a single column would round by its number of rows.
        self.gate = Linear(hidden_size, {"gate": num_experts, "shared_expert_gate": 1}, dtype)
        self.experts = Experts(num_experts, hidden_size, intermediate_size, dtype)
        self.shared_expert = GatedMLP(hidden_size, shared_size, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, hidden]`` to ``[T, hidden]``."""
        logits = self.gate(x).float()
        chosen, weights = route(logits[:, :-1], self.top_k, self.renormalize)
        shared = logits[:, -1:].sigmoid() * self.shared_expert(x)
        return self.experts(x, chosen, weights).add_(shared).to(x.dtype)


def route(logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert ids and float32 weights ``[T, top_k]`` from router logits ``[T, experts]``, float32.

    Weights are softmax probabilities over all experts; ``renormalize`` makes those of the chosen sum to 1.
    """
    weights, chosen = logits.softmax(-1).topk(top_k, dim=-1)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return chosen, weights

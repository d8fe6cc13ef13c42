"""The gated feed-forward layer (SwiGLU)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from atom.model_ops.linear import Linear
from atom.model_ops.module import Module


class GatedMLP(Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, hidden_size: int, intermediate_size: int, dtype: torch.dtype, bias: bool = False) -> None:
        super().__init__()
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up = Linear(hidden_size, parts, dtype, bias)
        self.down = Linear(intermediate_size, {"down_proj": hidden_size}, dtype, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, hidden]`` to ``[T, hidden]``."""
        return self.down(silu_and_mul(self.gate_up(x)))


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``[..., 2 n]`` with gate first to ``silu(gate) * up``, ``[..., n]``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)

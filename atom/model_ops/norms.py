"""RMS normalisation: ``x / sqrt(mean(x^2) + eps) * scale``, over the last dimension."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from atom.model_ops.module import Module
from atom.model_ops.weights import WeightTarget, empty_parameter


class RMSNorm(Module):
    """RMSNorm. ``zero_centered`` is the Qwen3-Next form, whose scale is ``1 + weight`` with the weight near 0.

    A zero-centred scale is kept in float32: near 1, bfloat16 has too few bits for the weight that was added.
    """

    def __init__(self, size: int, eps: float, dtype: torch.dtype, zero_centered: bool = False) -> None:
        super().__init__()
        self.size, self.eps, self.zero_centered = size, eps, zero_centered
        self.weight = empty_parameter(size, dtype=torch.float32 if zero_centered else dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., size]``, same dtype out."""
        if x.dtype == self.weight.dtype:
            return F.rms_norm(x, (self.size,), self.weight, self.eps)
        return F.rms_norm(x.to(self.weight.dtype), (self.size,), self.weight, self.eps).to(x.dtype)

    def published(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        yield f"{name}.weight", WeightTarget((self.size,), self.weight.data, one_plus if self.zero_centered else None)


class GatedRMSNorm(Module):
    """``rms_norm(x) * weight * silu(gate)``, computed in float32 (Qwen3-Next's output norm of a linear-attention head)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.size, self.eps = size, eps
        self.weight = empty_parameter(size, dtype=torch.float32)

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """``x [..., size]`` float32 and ``gate`` of the same shape in any dtype; returns the gate's dtype."""
        normed = F.rms_norm(x, (self.size,), self.weight, self.eps)
        return normed.mul_(F.silu(gate.float())).to(gate.dtype)


def one_plus(weight: torch.Tensor) -> torch.Tensor:
    """The scale of a zero-centred weight, float32."""
    return weight.float() + 1

"""Linear layers that hold several published projections in one weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
import torch.nn.functional as F

from atom.model_ops.module import Module
from atom.model_ops.weights import WeightTarget, empty_parameter


class Linear(Module):
    """``y = x W^T (+ b)`` where W stacks the rows of one or more published projections.

    ``parts`` maps a published name to its number of rows, in order. ``orders`` gives, for a part whose published rows
    are interleaved, the published row that each own row comes from.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        dtype: torch.dtype,
        bias: bool = False,
        orders: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.parts = dict(parts)
        self.orders = dict(orders or {})
        rows = sum(parts.values())
        self.weight = empty_parameter(rows, in_features, dtype=dtype)
        self.bias = empty_parameter(rows, dtype=dtype) if bias else None
        self.packed: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in_features]`` to ``[..., sum of parts]``."""
        if self.packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)

    def pack(self) -> None:
        """Bring a bfloat16 weight on a CPU into oneDNN's own order, in place of the plain one.

        The results are the same to the bit; without it every product reorders the weight first. Once, after loading. Does
        nothing where oneDNN has no bfloat16 products, as on a CPU without AVX-512.
        """
        plain = self.weight.dtype is not torch.bfloat16 or self.weight.device.type != "cpu"
        if not plain and torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported():
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.data)
            self.weight = None

    def published(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        start = 0
        for part, rows in self.parts.items():
            order = self.orders.get(part)
            reorder = None if order is None else partial(_take_rows, order)
            weight = self.weight.data[start : start + rows]
            yield f"{part}.weight", WeightTarget(tuple(weight.shape), weight, reorder)
            if self.bias is not None:
                yield f"{part}.bias", WeightTarget((rows,), self.bias.data[start : start + rows], reorder)
            start += rows


def _take_rows(order: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight[order.to(weight.device)]

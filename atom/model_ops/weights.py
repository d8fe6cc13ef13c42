"""Published weight names, and where in a module's own parameters each of them goes."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class WeightTarget:
    """The destination of one published weight.

    ``shape`` is the shape as published. ``transform`` (identity by default) turns the published tensor into one of
    ``dest``'s shape; the copy converts the dtype.
    """

    shape: tuple[int, ...]
    dest: torch.Tensor
    transform: Callable[[torch.Tensor], torch.Tensor] | None = None

    def load(self, source: torch.Tensor) -> None:
        """Copy ``source`` in. ValueError when its shape is not the published one."""
        if tuple(source.shape) != self.shape:
            raise ValueError(f"has shape {list(source.shape)}, expected {list(self.shape)}")
        self.dest.copy_(self.transform(source) if self.transform else source)


@runtime_checkable
class Publishes(Protocol):
    """A module whose parameters differ from the published ones; names are relative to the module's parent."""

    def published(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        """Published names and targets of a module that its parent holds under ``name``."""
        ...


@runtime_checkable
class PublishesStacked(Protocol):
    """A module with a second published form, which a checkpoint uses instead of the first."""

    def published_stacked(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        """The names and targets of the second form."""
        ...


def published_weights(model: nn.Module, available: Container[str] = ()) -> dict[str, WeightTarget]:
    """Every published name that ``model`` consumes, with its target. A module without ``published`` publishes itself.

    ``available``: names that the checkpoint has; they decide between a module's two forms.
    """
    targets: dict[str, WeightTarget] = {}
    for path, module in model.named_modules():
        parent, _, name = path.rpartition(".")
        prefix = f"{parent}." if parent else ""
        if isinstance(module, PublishesStacked):
            stacked = {prefix + key: target for key, target in module.published_stacked(name)}
            if any(key in available for key in stacked):
                targets.update(stacked)
                continue
        if isinstance(module, Publishes):
            targets.update((prefix + key, target) for key, target in module.published(name))
        else:
            for key, param in module.named_parameters(recurse=False):
                targets[f"{path}.{key}" if path else key] = WeightTarget(tuple(param.shape), param.data)
    return targets


def empty_parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """An uninitialised parameter without gradient."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)

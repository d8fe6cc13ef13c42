"""The base of every layer: an ``nn.Module`` without the cost of hooks and attribute look-ups.

A decode step calls some hundred small layers; what torch spends on each call and look-up adds up to a tenth of it.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import nn


@runtime_checkable
class Packs(Protocol):
    """A module with a faster form of its weights."""

    def pack(self) -> None:
        """Change to that form. Once, after loading."""
        ...


class Module(nn.Module):
    """Calls ``forward`` straight: there are no hooks in inference."""

    def __call__(self, *args: Any) -> Any:
        return self.forward(*args)

    def settle(self) -> None:
        """Make children and parameters plain attributes, found without a search. Once, after loading."""
        for module in self.modules():
            if isinstance(module, Packs):
                module.pack()
        for module in self.modules():
            module.__dict__.update(module._modules)
            module.__dict__.update(module._parameters)

"""Architectures, as named in a checkpoint's config.json, and the classes that implement them."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from atom.models.causal_lm import CausalLM

# Architecture to module and class; a module is imported when its architecture is asked for.
ARCHITECTURES: dict[str, tuple[str, str]] = {
    "LlamaForCausalLM": ("atom.models.llama", "LlamaForCausalLM"),
    "Qwen3ForCausalLM": ("atom.models.qwen3", "Qwen3ForCausalLM"),
    "Qwen3NextForCausalLM": ("atom.models.qwen3_next", "Qwen3NextForCausalLM"),
    "Qwen3_5ForCausalLM": ("atom.models.qwen3_5", "Qwen3_5ForCausalLM"),
    "Qwen3_5ForConditionalGeneration": ("atom.models.qwen3_5", "Qwen3_5ForCausalLM"),
    "Qwen3_5MoeForCausalLM": ("atom.models.qwen3_5", "Qwen3_5MoeForCausalLM"),
    "Qwen3_5MoeForConditionalGeneration": ("atom.models.qwen3_5", "Qwen3_5MoeForCausalLM"),
}


def model_class(architectures: Sequence[str] | None) -> type[CausalLM]:
    """The class of the first supported architecture. ValueError that lists the supported ones if there is none."""
    for architecture in architectures or ():
        if architecture in ARCHITECTURES:
            module, name = ARCHITECTURES[architecture]
            return getattr(import_module(module), name)
    named = ", ".join(architectures or ()) or "none named"
    raise ValueError(f"unsupported architecture: {named}; supported: {', '.join(sorted(ARCHITECTURES))}")

"""Qwen3, dense: Llama with a norm on every query and key head."""

from __future__ import annotations

from atom.models.llama import LlamaForCausalLM


class Qwen3ForCausalLM(LlamaForCausalLM):
    """The dense model."""

    head_norms = "plain"

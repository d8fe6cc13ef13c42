"""Drives a model by hand, with page tables and slots of its own, against transformers on tiny random configurations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers

from atom.model_engine.cache_layout import CacheLayout
from atom.model_loader.loader import load_model
from atom.model_ops.arenas import Arena, layer_caches
from atom.model_ops.forward_batch import ForwardBatch, InteriorState
from atom.models.causal_lm import CausalLM

BLOCK = 64
HYBRID = ["linear_attention"] * 3 + ["full_attention"]
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
}
LINEAR = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": HYBRID,
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
DENSE = {"intermediate_size": 96}

REFERENCES: dict[str, Callable[[], transformers.PreTrainedModel]] = {
    "qwen3_5": lambda: transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**SIZES, **DENSE, **LINEAR)),
    "qwen3_5_moe": lambda: transformers.Qwen3_5MoeForCausalLM(
        transformers.Qwen3_5MoeTextConfig(**SIZES, **EXPERTS, **LINEAR)
    ),
    "qwen3_next": lambda: transformers.Qwen3NextForCausalLM(
        transformers.Qwen3NextConfig(**SIZES, **DENSE, **EXPERTS, **LINEAR, mlp_only_layers=[1])
    ),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **DENSE)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, **DENSE)),
}


def make_reference(family: str, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    """A random reference model whose every parameter differs from its neutral value; logits spread about 1.6."""
    torch.manual_seed(0)
    model = REFERENCES[family]()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, param in model.named_parameters():
            noise = torch.randn(param.shape, generator=generator)
            if param.ndim >= 2:
                scale = {"embed": 1.0, "conv1d": 0.5, "lm_head": 1.6 / 8}
                param.copy_(noise * next((s for key, s in scale.items() if key in name), param.shape[-1] ** -0.5))
            elif name.endswith("A_log"):
                param.copy_(noise * 0.5)
            else:
                param.add_(noise * 0.2)
        ids = torch.arange(64)[None] * 2 % 128
        spread = model(ids).logits.std()
        model.lm_head.weight.mul_(1.6 / spread)
    return model.to(dtype).eval()


def save(reference: transformers.PreTrainedModel, folder: Path) -> Path:
    """Save a reference as a checkpoint folder."""
    reference.save_pretrained(folder)
    return folder


@dataclass
class Sequence_:
    """A sequence by hand: its pages, its slot, and how many tokens both hold."""

    tokens: list[int]
    pages: list[int]
    slot: int
    done: int = 0


@dataclass
class Chunk:
    """Rows of one sequence in a forward; ``interior``: (offset, slot)."""

    sequence: Sequence_
    rows: int
    interior: Sequence[tuple[int, int]] = field(default_factory=tuple)
    decode: bool = False


class Driver:
    """A model with an arena of ``num_pages`` scattered pages and ``num_slots`` slots, all poisoned with NaN."""

    def __init__(self, model: CausalLM, num_pages: int = 64, num_slots: int = 16) -> None:
        self.model = model
        layout = CacheLayout.of(model.cache_spec(), BLOCK)
        self.pages = Arena(num_pages, layout.page_bytes)
        self.slots = Arena(num_slots, layout.slot_bytes) if layout.slot_bytes else None
        self.caches = layer_caches(layout, model.num_layers, self.pages, self.slots)
        generator = torch.Generator().manual_seed(3)
        self.free_pages = torch.randperm(num_pages, generator=generator).tolist()
        self.free_slots = torch.randperm(num_slots, generator=generator).tolist()
        for cache in self.caches:
            for view in cache.values():
                view.fill_(float("nan"))

    def sequence(self, tokens: Sequence[int]) -> Sequence_:
        """A sequence with room for all its tokens."""
        pages = [self.free_pages.pop() for _ in range(-(-len(tokens) // BLOCK))]
        return Sequence_(list(tokens), pages, self.free_slots.pop())

    def forward(self, chunks: Sequence[Chunk]) -> list[torch.Tensor]:
        """Run one batch, decodes first; logits of every chunk's rows."""
        chunks = list(chunks)
        assert [c.decode for c in chunks] == sorted((c.decode for c in chunks), reverse=True)
        tokens, positions, pages, offsets, starts, interior = [], [], [], [], [0], []
        width = max(len(c.sequence.pages) for c in chunks)
        for index, chunk in enumerate(chunks):
            sequence = chunk.sequence
            span = range(sequence.done, sequence.done + chunk.rows)
            tokens += sequence.tokens[span.start : span.stop]
            positions += span
            pages += [sequence.pages[p // BLOCK] for p in span]
            offsets += [p % BLOCK for p in span]
            starts.append(starts[-1] + chunk.rows)
            interior += [InteriorState(index, offset, slot) for offset, slot in chunk.interior]
        batch = ForwardBatch(
            torch.tensor(tokens),
            torch.tensor(positions),
            tuple(starts),
            tuple(c.sequence.done for c in chunks),
            sum(c.decode for c in chunks),
            torch.tensor([c.sequence.pages + [0] * (width - len(c.sequence.pages)) for c in chunks]),
            torch.tensor(pages),
            torch.tensor(offsets),
            torch.tensor([c.sequence.slot for c in chunks]),
            tuple(interior),
        )
        logits = self.model.compute_logits(self.model(batch, self.caches))
        for chunk in chunks:
            chunk.sequence.done += chunk.rows
        return list(logits.split([c.rows for c in chunks]))

    def prefill(self, sequence: Sequence_, rows: int) -> torch.Tensor:
        """The next ``rows`` tokens of one sequence as a prefill chunk."""
        return self.forward([Chunk(sequence, rows)])[0]

    def decode(self, *sequences: Sequence_) -> list[torch.Tensor]:
        """The next token of each sequence."""
        return self.forward([Chunk(s, 1, decode=True) for s in sequences])

    def state(self, slot: int) -> list[torch.Tensor]:
        """Copies of every state region of a slot."""
        return [view[slot].clone() for cache in self.caches for name, view in cache.items() if name not in "kv"]


def tokens_of(length: int, seed: int) -> list[int]:
    """Random token ids."""
    return torch.randint(0, 128, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def load(folder: Path, dtype: str = "float32") -> CausalLM:
    """Load a checkpoint folder that a reference was saved to."""
    return load_model(folder, dtype)

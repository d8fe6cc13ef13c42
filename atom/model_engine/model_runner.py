"""Arenas, batch tensors, the forward and sampling. The only file of the engine core that knows tensors."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import psutil
import torch

from atom.config import FREE_MEMORY_SHARE, EngineConfig
from atom.model_engine.cache_layout import CacheLayout
from atom.model_engine.messages import TokenLogprobs
from atom.model_engine.scheduler import PrefillChunk, StepPlan
from atom.model_engine.sequence import Sequence
from atom.model_engine.sizing import Sizing, size_arenas
from atom.model_engine.state_runtime import SlotCopy
from atom.model_loader.loader import load_model
from atom.model_ops.arenas import Arena, layer_caches
from atom.model_ops.batch_builder import BlockTables, RowSource, build_batch
from atom.model_ops.chunk_plan import CHUNK
from atom.model_ops.sampler import Sampler


class ModelRunner:
    """Executes plans: moves states, runs the forward, samples. Owns both arenas' bytes and decides nothing."""

    def __init__(self, config: EngineConfig) -> None:
        if config.device == "cpu":
            torch.set_num_threads(config.num_threads)
        self.device = config.device
        self.block_size = config.block_size
        self.model = load_model(config.model, dtype=config.dtype, device=config.device)
        self.vocab_size: int = self.model.vocab_size
        self.interior_grid = CHUNK if self.model.has_state else None
        self.layout = CacheLayout.of(self.model.cache_spec(), config.block_size)
        self.sizing: Sizing = size_arenas(config, self.layout, self.model.max_position, self._memory_share())
        self.pages = Arena(self.sizing.num_blocks, self.layout.page_bytes, config.device)
        self.slots = Arena(self.sizing.num_slots, self.layout.slot_bytes, config.device)
        self.caches = layer_caches(self.layout, self.model.num_layers, self.pages, self.slots)
        self.sampler = Sampler(self.vocab_size, config.seed, config.device)
        self._tables = BlockTables(config.max_num_seqs)

    def _memory_share(self) -> int:
        """Bytes for pages and slots when no budget is set: a share of what is free now."""
        free = torch.cuda.mem_get_info()[0] if self.device == "cuda" else psutil.virtual_memory().available
        return int(free * FREE_MEMORY_SHARE)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> tuple[SequenceOf[int | None], SequenceOf[TokenLogprobs | None]]:
        """Run one step; returns a token and its log-probabilities for each of ``plan.samples``, in order."""
        for copy in plan.maintenance.restores:
            self._copy_slot(copy)
        batch = build_batch(
            [self._row(seq, seq.num_computed_tokens, seq.num_tokens) for seq in plan.decodes],
            [self._prefill_row(prefill) for prefill in plan.prefills],
            self._tables,
            self.block_size,
            self.device,
        )
        hidden = self.model(batch, self.caches)
        for prefill in plan.prefills:
            for rung in prefill.reserved:
                if rung.position == prefill.chunk.end:
                    self._copy_slot(SlotCopy(prefill.seq.state_slots[0], rung.checkpoint.slot))
        samples = plan.samples
        if not samples:
            return (), ()
        rows = [*range(len(plan.decodes))]
        for index, prefill in enumerate(plan.prefills, start=len(plan.decodes)):
            if prefill.is_last:
                rows.append(batch.query_starts[index + 1] - 1)
        if len(rows) != hidden.shape[0]:
            hidden = hidden[torch.tensor(rows, device=hidden.device)]
        return self.sampler.sample(self.model.compute_logits(hidden), samples)

    def forget(self, request_id: str) -> None:
        """Drop what is kept by request; unknown ids are no error."""
        self.sampler.forget(request_id)
        self._tables.forget(request_id)

    def _row(self, seq: Sequence, start: int, end: int, interior: SequenceOf[tuple[int, int]] = ()) -> RowSource:
        slot = seq.state_slots[0] if seq.state_slots else 0
        row = self._tables.row(seq.request_id, seq.block_table)
        return RowSource(seq.token_ids, start, end, row, slot, interior)

    def _prefill_row(self, prefill: PrefillChunk) -> RowSource:
        chunk = prefill.chunk
        interior = [(r.position, r.checkpoint.slot) for r in prefill.reserved if r.position < chunk.end]
        return self._row(prefill.seq, chunk.start, chunk.end, interior)

    def _copy_slot(self, copy: SlotCopy) -> None:
        self.slots.bytes[copy.target].copy_(self.slots.bytes[copy.source])

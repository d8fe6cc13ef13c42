"""Arenas, batch tensors, the forward and sampling. The only file of the engine core that knows tensors."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

import psutil
import torch

from atom.config import FREE_MEMORY_SHARE, EngineConfig
from atom.model_engine.cache_layout import CacheGeometry, CacheLayout
from atom.model_engine.ids import SlotId
from atom.model_engine.messages import TokenLogprobs
from atom.model_engine.sequence import Sequence
from atom.model_engine.sizing import Sizing, size_arenas
from atom.model_engine.state_runtime import ImageStore
from atom.model_engine.step_plan import PrefillChunk, StepPlan, StepResult
from atom.model_loader.loader import fingerprint, load_model
from atom.model_ops.arenas import Arena, layer_caches
from atom.model_ops.batch_builder import BlockTables, RowSource, build_batch
from atom.model_ops.chunk_plan import CHUNK
from atom.model_ops.images import load_image, save_image
from atom.model_ops.sampler import Sampler
from atom.model_ops.verifier import verify
from atom.utils.malloc import keep_freed_memory


class ModelRunner:
    """Executes plans: moves states, runs the forward, samples. Owns both arenas' bytes and decides nothing."""

    def __init__(self, config: EngineConfig) -> None:
        if config.device == "cpu":
            torch.set_num_threads(config.num_threads)
            keep_freed_memory()
        self.device = config.device
        self.block_size = config.block_size
        self.model = load_model(config.model, dtype=config.dtype, device=config.device)
        self.vocab_size: int = self.model.vocab_size
        self.dtype = str(self.model.dtype).removeprefix("torch.")
        self.fingerprint = fingerprint(config.model)
        self.interior_grid = CHUNK if self.model.has_state else None
        self.layout = CacheLayout.of(self.model.cache_spec(), config.block_size)
        self.geometry = CacheGeometry.of(self.layout)
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
    def execute(self, plan: StepPlan) -> StepResult:
        """Restore states, run one forward, sample."""
        for restore in plan.maintenance.restores:
            load_image(self.pages.bytes, restore.pages, self.slots.bytes[restore.slot])
        # The state scan of verifications walks rows in step: the longest first.
        order = sorted(range(len(plan.verifications)), key=lambda i: -len(plan.verifications[i].drafts))
        verifications = [plan.verifications[i] for i in order]
        batch = build_batch(
            [self._source(seq, [seq.token_ids[-1]]) for seq in plan.decodes],
            [
                self._source(v.seq, [v.seq.token_ids[-1], *v.drafts], scratch=v.seq.state_slots[1:])
                for v in verifications
            ],
            [self._prefill_source(prefill) for prefill in plan.prefills],
            self._tables,
            self.block_size,
            self.device,
        )
        hidden = self.model(batch, self.caches)
        singles, first_prefill = len(plan.decodes), len(plan.decodes) + len(verifications)
        rows = list(range(singles))
        for index, prefill in enumerate(plan.prefills, start=first_prefill):
            if prefill.is_last:
                rows.append(batch.query_starts[index + 1] - 1)
        drafted = range(singles, batch.query_starts[first_prefill])
        wanted = [*rows, *drafted]
        if not wanted:
            return StepResult((), ())
        # Verified rows come before those of prefills in the batch, and after them here.
        if wanted != list(range(hidden.shape[0])):
            hidden = hidden[torch.tensor(wanted, device=hidden.device)]
        logits = self.model.compute_logits(hidden)
        tokens, logprobs = self.sampler.sample(logits[: len(rows)], plan.samples) if rows else ((), ())
        verified: list[tuple[list[int] | None, list[TokenLogprobs | None]]] = [(None, [])] * len(order)
        if drafted:
            seqs, drafts = [v.seq for v in verifications], [v.drafts for v in verifications]
            for i, outcome in zip(order, verify(self.sampler, logits[len(rows) :], seqs, drafts), strict=True):
                verified[i] = outcome
        return StepResult(tokens, logprobs, verified)

    @torch.inference_mode()
    def store(self, stores: SequenceOf[ImageStore]) -> None:
        """Copy slots to images."""
        for store in stores:
            save_image(self.slots.bytes[store.slot], self.pages.bytes, store.pages)

    def resize_slots(self, num_slots: int, moves: Mapping[SlotId, SlotId]) -> None:
        """Make the slot arena ``num_slots`` long. Costs a copy of what stays."""
        resized = Arena(num_slots, self.layout.slot_bytes, self.device)
        kept = min(num_slots, len(self.slots.bytes))
        resized.bytes[:kept].copy_(self.slots.bytes[:kept])
        for source, target in moves.items():
            resized.bytes[target].copy_(self.slots.bytes[source])
        self.slots = resized
        self.caches = layer_caches(self.layout, self.model.num_layers, self.pages, self.slots)

    def forget(self, request_id: str) -> None:
        """Drop what is kept by request; unknown ids are no error."""
        self.sampler.forget(request_id)
        self._tables.forget(request_id)

    def _source(
        self,
        seq: Sequence,
        tokens: list[int],
        interior: SequenceOf[tuple[int, int]] = (),
        scratch: SequenceOf[int] = (),
    ) -> RowSource:
        slot = seq.state_slots[0] if seq.state_slots else 0
        read = slot if seq.reading is None or seq.reading.slot is None else seq.reading.slot
        row = self._tables.row(seq.request_id, seq.block_table)
        return RowSource(tokens, seq.num_computed_tokens, row, read, slot, interior, scratch)

    def _prefill_source(self, prefill: PrefillChunk) -> RowSource:
        chunk = prefill.chunk
        interior = [(rung.position, rung.slot) for rung in prefill.reserved if rung.slot is not None]
        return self._source(prefill.seq, prefill.seq.token_ids[chunk.start : chunk.end], interior)

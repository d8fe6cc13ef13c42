"""A runner that computes nothing: what scheduling and block management cost, or would do, without a model."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

from atom.model_engine.cache_layout import CacheGeometry
from atom.model_engine.ids import SlotId
from atom.model_engine.sizing import Sizing
from atom.model_engine.state_runtime import ImageStore
from atom.model_engine.step_plan import StepPlan, StepResult


class NullRunner:
    """Answers every request with token 0. ``num_slots`` 0: a model without per-request state."""

    def __init__(self, block_size: int, num_blocks: int, num_slots: int, max_model_len: int, vocab_size: int) -> None:
        slot_bytes = 64 if num_slots else 0
        self.geometry = CacheGeometry(block_size, 64, slot_bytes, slot_bytes, "null")
        self.sizing = Sizing(num_blocks, num_slots, max_model_len, 64, slot_bytes)
        self.vocab_size = vocab_size
        self.dtype, self.fingerprint = "none", "null"
        self.interior_grid = block_size

    def execute(self, plan: StepPlan) -> StepResult:
        """Token 0 for each of ``plan.samples``; drafts are refused."""
        count = len(plan.samples)
        return StepResult([0] * count, [None] * count, [([0], [None])] * len(plan.verifications))

    def store(self, stores: SequenceOf[ImageStore]) -> None:
        """There are no bytes."""

    def resize_slots(self, num_slots: int, moves: Mapping[SlotId, SlotId]) -> None:
        """There are no bytes."""

    def forget(self, request_id: str) -> None:
        """Nothing is kept by request."""

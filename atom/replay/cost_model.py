"""How long a step takes, by a simple stated model."""

from __future__ import annotations

from dataclasses import dataclass

from atom.model_engine.step_plan import StepPlan

NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class CostModel:
    """A step takes ``decode_step`` seconds, a second for every ``prefill_rate`` prompt tokens in it, and a second for
    every ``restore_rate`` bytes of images restored.

    Times are whole nanoseconds, so that many equal steps taken at once add up to what they are one by one.
    """

    prefill_rate: float = 100_000.0
    decode_step: float = 0.02
    restore_rate: float = 1e11

    @property
    def decode_ns(self) -> int:
        """Nanoseconds of a step that only decodes."""
        return round(self.decode_step * NS)

    def step_ns(self, plan: StepPlan, image_bytes: int) -> int:
        """Nanoseconds of ``plan``."""
        prefill = sum(part.chunk.end - part.chunk.start for part in plan.prefills)
        moved = len(plan.maintenance.restores) * image_bytes
        return self.decode_ns + round(prefill / self.prefill_rate * NS) + round(moved / self.restore_rate * NS)

"""What a replay found, and the figures made from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from atom.model_engine.cache_stats import CacheStats
from atom.model_engine.placement import RungKind
from atom.model_engine.state_cache import CheckpointFates
from atom.replay.trace import TraceRequest


@dataclass(slots=True)
class Outcome:
    """What one request found at its first admission, in engine blocks, and when it got its first token.

    ``ever_kept``: the rightmost boundary in (cached, ideal] that was resumable at some time; ``cached`` if none was.
    ``ttft``: seconds from its arrival. ``refused``: longer than the pool; it did not run.
    """

    request: TraceRequest
    matched: int = 0
    wanted: int = 0
    cached: int = 0
    ever_kept: int = 0
    ttft: float | None = None
    refused: bool = False


@dataclass(slots=True)
class Sample:
    """Pages by holder at ``time`` seconds: requests' KV, cached KV, and images by kind."""

    time: float
    live: int
    cached: int
    images: dict[RungKind, int]


@dataclass(slots=True)
class Replay:
    """The outcome of every request and the engine's own counters.

    ``ideal_stride``: trace blocks in an engine block. ``kept``, ``used``: checkpoints by kind, and those of them that were
    resumed from at least once. ``seconds``: virtual time. ``images_resident``: at the end.
    """

    trace: str
    geometry: str
    policy: str
    seats: int
    pool_tokens: int
    block_size: int
    ideal_stride: int = 1
    seconds: float = 0.0
    steps: int = 0
    preemptions: int = 0
    images_resident: int = 0
    kept: dict[RungKind, int] = field(default_factory=dict)
    used: dict[RungKind, int] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    stats: CacheStats = field(default_factory=CacheStats)
    fates: CheckpointFates = field(default_factory=CheckpointFates)

    @property
    def counted(self) -> list[Outcome]:
        """Outcomes of the requests that figures speak of."""
        return [outcome for outcome in self.outcomes if outcome.request.counted]

    def lost(self, outcome: Outcome) -> dict[str, int]:
        """Prompt tokens that ``outcome`` lost against the ideal, by cause.

        eviction: a state further on was once kept, and it or its pages were given up. missing_checkpoint: no state had
        been kept beyond, or the request that computes it was not done. beyond_repair: no checkpoint helps.
        """
        size = self.block_size
        beyond = outcome.matched - outcome.wanted
        missing = self.ideal(outcome) - max(outcome.ever_kept, outcome.cached) - beyond
        return {
            "missing_checkpoint": max(0, missing) * size,
            "eviction": (outcome.ever_kept - outcome.cached) * size,
            "beyond_repair": beyond * size,
        }

    def ideal(self, outcome: Outcome) -> int:
        """Engine blocks that an unbounded cache with a state at every boundary would resume after."""
        return outcome.request.ideal // self.ideal_stride

    def summary(self) -> dict[str, Any]:
        """Every figure by name; rates are shares of all prompt tokens, times are virtual seconds."""
        outcomes, size = self.counted, self.block_size
        prompt = sum(o.request.prompt_tokens for o in outcomes)

        def rate(tokens: int) -> float:
            return tokens / prompt if prompt else 0.0

        cached = sum(o.cached for o in outcomes) * size
        matched = sum(o.matched for o in outcomes) * size
        ideal = sum(map(self.ideal, outcomes)) * size
        lost = {"missing_checkpoint": 0, "eviction": 0, "beyond_repair": 0}
        for outcome in outcomes:
            for cause, tokens in self.lost(outcome).items():
                lost[cause] += tokens
        waits = sorted(o.ttft for o in outcomes if o.ttft is not None)
        return {
            "trace": self.trace,
            "geometry": self.geometry,
            "seats": self.seats,
            "pool_tokens": self.pool_tokens,
            "policy": self.policy,
            "block_size": size,
            "requests": len(outcomes),
            "refused": sum(o.refused for o in outcomes),
            "prompt_tokens": prompt,
            "hit_rate": rate(cached),
            "ideal_hit_rate": rate(ideal),
            "share_of_ideal": cached / ideal if ideal else 1.0,
            "matched_rate": rate(matched),
            "state_rate": cached / matched if matched else 1.0,
            **{
                f"lost_to_{cause}" if cause != "beyond_repair" else "lost_beyond_repair": rate(tokens)
                for cause, tokens in lost.items()
            },
            "checkpoints_kept": self.fates.kept - self.fates.superseded,
            "checkpoints_per_request": (self.fates.kept - self.fates.superseded) / max(1, len(outcomes)),
            "checkpoints_evicted": self.fates.evicted,
            "checkpoints_orphaned": self.fates.orphaned,
            "checkpoints_dropped": self.fates.dropped,
            "read_back": {kind.value: count for kind, count in self.fates.read_back.items()},
            "kept_by_kind": {kind.value: count for kind, count in self.kept.items()},
            "used_by_kind": {kind.value: count for kind, count in self.used.items()},
            "images_resident": self.images_resident,
            "ttft_p50": quantile(waits, 0.5),
            "ttft_p90": quantile(waits, 0.9),
            "extra_forwards": sum(self.stats.cuts.values()),
            "preemptions": self.preemptions,
            "steps": self.steps,
            "seconds": self.seconds,
        }


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """The smallest value that at least ``share`` of ``ordered`` do not exceed; None of nothing."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None

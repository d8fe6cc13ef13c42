"""What prefix caching did: counters, the ratios people read, and the lines of the log."""

from __future__ import annotations

from dataclasses import dataclass, field

from atom.model_engine.placement import RungKind
from atom.model_engine.state_cache import CheckpointFates


@dataclass(slots=True)
class CacheStats:
    """Counters in tokens, once a request at its first admission; they only grow (I8).

    reusable_tokens: prompt tokens but for the trailing block that no request can match. matched_tokens: had indexed
    pages. wanted_tokens: would have been resumed had every checkpoint been kept. cached_tokens: were resumed.
    demands_recorded: requests refused at a boundary that the pool had room to keep; demands_declined: had no room for.
    cuts: chunks that ended early for a rung, by its kind.
    """

    requests: int = 0
    reusable_tokens: int = 0
    matched_tokens: int = 0
    wanted_tokens: int = 0
    cached_tokens: int = 0
    demands_recorded: int = 0
    demands_declined: int = 0
    cuts: dict[RungKind, int] = field(default_factory=lambda: dict.fromkeys(RungKind, 0))

    def record(self, reusable: int, matched: int, wanted: int, cached: int, block_size: int) -> None:
        """Count one request; arguments in blocks."""
        assert cached <= wanted <= matched <= reusable, (cached, wanted, matched, reusable)
        self.requests += 1
        self.reusable_tokens += reusable * block_size
        self.matched_tokens += matched * block_size
        self.wanted_tokens += wanted * block_size
        self.cached_tokens += cached * block_size

    @property
    def hit_rate(self) -> float:
        """Cached share of the reusable tokens; 0 before any."""
        return self.cached_tokens / self.reusable_tokens if self.reusable_tokens else 0.0

    def as_dict(self) -> dict[str, int | float]:
        """The counters, the ratios and the two kinds of loss, by name."""
        return {
            "requests": self.requests,
            "reusable_tokens": self.reusable_tokens,
            "matched_tokens": self.matched_tokens,
            "wanted_tokens": self.wanted_tokens,
            "cached_tokens": self.cached_tokens,
            "lost_to_missing_checkpoint_tokens": self.wanted_tokens - self.cached_tokens,
            "lost_beyond_repair_tokens": self.matched_tokens - self.wanted_tokens,
            "hit_rate": self.hit_rate,
            "demands_recorded": self.demands_recorded,
            "demands_declined": self.demands_declined,
            **{f"chunks_cut_{kind.value}": count for kind, count in self.cuts.items()},
        }


def cache_stats_line(stats: CacheStats) -> str:
    """``[Cache Stats]``: of what could be reused, what was, and where the rest was lost."""
    return (
        f"[Cache Stats] requests {stats.requests} | cached {stats.cached_tokens} of {stats.reusable_tokens} reusable "
        f"tokens ({stats.hit_rate:.1%}) | matched {stats.matched_tokens} | lost to a missing checkpoint "
        f"{stats.wanted_tokens - stats.cached_tokens} | lost beyond repair {stats.matched_tokens - stats.wanted_tokens}"
    )


def cache_pools_line(stats: CacheStats, occupancy: dict[str, int]) -> str:
    """``[Cache Pools]``: paged rate x state rate = combined rate, and who holds the units.

    The paged rate is matched / reusable, the state rate cached / matched.
    """
    paged = stats.matched_tokens / stats.reusable_tokens if stats.reusable_tokens else 0.0
    state = stats.cached_tokens / stats.matched_tokens if stats.matched_tokens else 0.0
    held = " | ".join(f"{name.replace('_', ' ')} {count}" for name, count in occupancy.items())
    return f"[Cache Pools] paged {paged:.1%} x state {state:.1%} = {stats.hit_rate:.1%} | {held}"


def checkpoint_fates_line(stats: CacheStats, fates: CheckpointFates) -> str:
    """``[Checkpoint Fates]``: what became of checkpoints, who read them back, what placing them cost."""
    by_kind = ", ".join(f"{kind.value} {count}" for kind, count in fates.read_back.items())
    cuts = ", ".join(f"{kind.value} {count}" for kind, count in stats.cuts.items())
    return (
        f"[Checkpoint Fates] kept {fates.kept} | dropped {fates.dropped} | evicted {fates.evicted} | orphaned "
        f"{fates.orphaned} | superseded {fates.superseded} | read back: {by_kind} | chunks cut: {cuts} | demands recorded "
        f"{stats.demands_recorded}, declined {stats.demands_declined}"
    )

"""What prefix caching did: counters, the ratios people read, and the [Cache Stats] line."""

from __future__ import annotations

from dataclasses import dataclass

from atom.model_engine.state_cache import CheckpointFates


@dataclass(slots=True)
class CacheStats:
    """Counters in tokens, once a request at its first admission; they only grow (I8).

    reusable_tokens: prompt tokens but for the trailing block that no request can match. matched_tokens: had indexed
    pages. wanted_tokens: would have been resumed had every checkpoint been kept. cached_tokens: were resumed.
    """

    requests: int = 0
    reusable_tokens: int = 0
    matched_tokens: int = 0
    wanted_tokens: int = 0
    cached_tokens: int = 0

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
        }

    def lines(self, fates: CheckpointFates | None) -> list[str]:
        """The ``[Cache Stats]`` lines of the log; the second only for models with checkpoints."""
        lines = [
            f"[Cache Stats] requests {self.requests} | cached {self.cached_tokens} of {self.reusable_tokens} reusable "
            f"tokens ({self.hit_rate:.1%}) | matched {self.matched_tokens} | lost to a missing checkpoint "
            f"{self.wanted_tokens - self.cached_tokens} | lost beyond repair {self.matched_tokens - self.wanted_tokens}"
        ]
        if fates is not None:
            lines.append(
                f"[Cache Stats] checkpoints kept {fates.kept} | read back {fates.read_back} | dropped {fates.dropped} | "
                f"evicted {fates.evicted} | orphaned {fates.orphaned}"
            )
        return lines

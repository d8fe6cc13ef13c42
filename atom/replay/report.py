"""Results for people: the table and what the worst requests lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from atom.replay.results import Outcome, Replay

CAUSES = {
    "missing_checkpoint": "no state had been kept there",
    "eviction": "state or pages were given up",
    "beyond_repair": "no checkpoint could help",
}


def results_table(results: Sequence[dict[str, Any]]) -> Table:
    """One row a replay; percentages are shares of all prompt tokens."""
    first = results[0]
    title = f"{first['trace']}: {first['requests']:,} requests, {first['prompt_tokens']:,} prompt tokens; "
    title += f"{first['geometry']}, {first['seats']} seats, blocks of {first['block_size']}"
    table = Table(title=title)
    for name in (
        "policy",
        "pool",
        "hit",
        "of ideal",
        "matched x state",
        "lost: missing / evicted / beyond",
        "kept",
        "read back",
        "resident",
        "TTFT p50 / p90",
        "extra",
        "refused",
    ):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for r in results:
        read = r["read_back"]
        table.add_row(
            r["policy"],
            tokens_text(r["pool_tokens"]),
            f"{r['hit_rate']:.2%}",
            f"{r['share_of_ideal']:.1%}",
            f"{r['matched_rate']:.1%} x {r['state_rate']:.1%}",
            f"{r['lost_to_missing_checkpoint']:.2%} / {r['lost_to_eviction']:.2%} / {r['lost_beyond_repair']:.2%}",
            f"{r['checkpoints_kept']:,} ({r['checkpoints_per_request']:.2f})",
            " ".join(f"{kind[0]}{count:,}" for kind, count in read.items() if count) or "0",
            f"{r['images_resident']:,}",
            f"{seconds_text(r['ttft_p50'])} / {seconds_text(r['ttft_p90'])}",
            f"{r['extra_forwards']:,}",
            f"{r['refused']:,}",
        )
    return table


def explain(replay: Replay, count: int) -> Table:
    """The ``count`` requests that lost most against the ideal, and to what."""
    lost: list[tuple[int, Outcome, dict[str, int]]] = []
    for outcome in replay.outcomes:
        causes = replay.lost(outcome)
        lost.append((sum(causes.values()), outcome, causes))
    lost.sort(key=lambda entry: -entry[0])
    table = Table(title=f"{replay.policy}, {tokens_text(replay.pool_tokens)}: the requests that lost most")
    for name in ("request", "session", "prompt", "ideal", "matched", "resumed", "lost", "why"):
        table.add_column(name, justify="left" if name == "why" else "right")
    size = replay.block_size
    for total, outcome, causes in lost[:count]:
        if not total:
            break
        request = outcome.request
        why = "; ".join(f"{tokens:,}: {CAUSES[cause]}" for cause, tokens in causes.items() if tokens)
        if outcome.refused:
            why = "longer than the pool"
        table.add_row(
            str(request.index),
            str(request.session),
            f"{request.prompt_tokens:,}",
            f"{replay.ideal(outcome) * size:,}",
            f"{outcome.matched * size:,}",
            f"{outcome.cached * size:,}",
            f"{total:,}",
            why,
        )
    return table


def tokens_text(tokens: int) -> str:
    """``1500000`` as ``1.5M``."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if tokens >= size:
            return f"{tokens / size:.4g}{unit}"
    return str(tokens)


def seconds_text(seconds: float | None) -> str:
    """A duration with a fitting unit."""
    if seconds is None:
        return "-"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"

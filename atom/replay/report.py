"""Results for people: the table and what the worst requests lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from atom.replay.results import Replay

CAUSES = {
    "missing_checkpoint": "no state had been kept there",
    "eviction": "state or pages were given up",
    "beyond_repair": "no checkpoint could help",
}


def results_table(results: Sequence[dict[str, Any]]) -> Table:
    """One row a replay; percentages are shares of all prompt tokens."""
    first = results[0]
    title = f"{first['trace']}: {first['requests']:,} requests, {first['prompt_tokens']:,} prompt tokens; "
    title += f"{first['geometry']}, {first['seats']} seats"
    table = Table(title=title)
    for name in (
        "policy",
        "placement",
        "block",
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
        table.add_column(name, justify="left" if name in ("policy", "placement") else "right")
    for r in results:
        read = r["read_back"]
        table.add_row(
            r["policy"],
            r["placement"],
            f"{r['block_size']:,}",
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


def explained(replay: Replay, count: int) -> list[dict[str, Any]]:
    """The ``count`` requests that lost most against the ideal, the worst first; without those that lost nothing.

    ``request``: its number in the order of play. ``session``: its number in the order of the file. ``refused``: longer
    than the pool. All others are tokens; ``lost`` has them by cause.
    """
    size = replay.block_size
    entries = []
    for outcome in replay.counted:
        causes = replay.lost(outcome)
        entries.append(
            {
                "request": outcome.request.index,
                "session": outcome.request.session,
                "prompt_tokens": outcome.request.prompt_tokens,
                "ideal_tokens": replay.ideal(outcome) * size,
                "matched_tokens": outcome.matched * size,
                "resumed_tokens": outcome.cached * size,
                "lost_tokens": sum(causes.values()),
                "lost": causes,
                "refused": outcome.refused,
            }
        )
    entries.sort(key=lambda entry: -entry["lost_tokens"])
    return [entry for entry in entries[:count] if entry["lost_tokens"]]


def explain(replay: Replay, entries: Sequence[dict[str, Any]]) -> Table:
    """What :func:`explained` found, one row a request."""
    table = Table(title=f"{replay.policy}, {tokens_text(replay.pool_tokens)}: the requests that lost most")
    names = ("request", "session", "prompt", "ideal", "matched", "resumed", "lost")
    for name in names:
        table.add_column(name, justify="right")
    table.add_column("why", justify="left")
    for entry in entries:
        why = "; ".join(f"{tokens:,}: {CAUSES[cause]}" for cause, tokens in entry["lost"].items() if tokens)
        tokens = [f"{entry[f'{name}_tokens']:,}" for name in names[2:]]
        why = "longer than the pool" if entry["refused"] else why
        table.add_row(str(entry["request"]), str(entry["session"]), *tokens, why)
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

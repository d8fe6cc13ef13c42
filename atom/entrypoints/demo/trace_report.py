"""A played trace as a table and as JSON: each session, and all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from atom.entrypoints.demo.report import TABLE_STYLE
from atom.entrypoints.demo.trace_play import Played, TraceReport


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of one session or of all. Rates are shares of the prompt tokens; ``share_of_ideal`` is their quotient."""

    session: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    ideal_tokens: int
    hit_rate: float
    ideal_hit_rate: float
    share_of_ideal: float
    seconds_saved: float


def summaries(report: TraceReport) -> list[Summary]:
    """One a session, in the order of their first requests, and one of them all at the end."""
    sessions: dict[str, list[Played]] = {}
    for item in report.played:
        sessions.setdefault(item.session_id, []).append(item)
    return [_summary(report, name, items) for name, items in sessions.items()] + [
        _summary(report, "all", report.played)
    ]


def as_json(report: TraceReport) -> dict[str, Any]:
    """What ``atom demo --trace FILE --json`` prints."""
    *sessions, total = summaries(report)
    return {
        "sessions": [asdict(summary) for summary in sessions],
        "total": asdict(total),
        "seconds_saved_are": "measured" if report.compared else "estimated",
        "cache_stats": report.cache_stats,
    }


def as_table(report: TraceReport) -> Table:
    """What ``atom demo --trace FILE`` prints."""
    table = Table(title="Recorded sessions over HTTP", **TABLE_STYLE, caption_justify="left")
    table.add_column("session", no_wrap=True)
    for name in ("requests", "tokens", "cached", "hits", "ideal", "of ideal", "saved"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = summaries(report)
    for row in rows:
        table.add_row(
            row.session[:8],
            str(row.requests),
            f"{row.prompt_tokens:,}",
            f"{row.cached_tokens:,}",
            f"{row.hit_rate:.1%}",
            f"{row.ideal_hit_rate:.1%}",
            f"{row.share_of_ideal:.1%}",
            f"{row.seconds_saved:.1f} s",
            end_section=row is rows[-2],
        )
    table.caption = (
        "saved: time to first token without caching less the one with it, measured"
        if report.compared
        else "saved: estimated by what one more computed token cost; --compare measures it"
    )
    return table


def _summary(report: TraceReport, name: str, items: Sequence[Played]) -> Summary:
    prompt = sum(item.answer.prompt_tokens for item in items)
    cached = sum(item.answer.cached_tokens for item in items)
    ideal = sum(item.ideal_tokens for item in items)
    return Summary(
        session=name,
        requests=len(items),
        prompt_tokens=prompt,
        cached_tokens=cached,
        ideal_tokens=ideal,
        hit_rate=cached / prompt,
        ideal_hit_rate=ideal / prompt,
        share_of_ideal=cached / ideal if ideal else 1.0,
        seconds_saved=report.seconds_saved(items),
    )

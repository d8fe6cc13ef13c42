"""The conversation's results as a table and as JSON."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table

from atom.entrypoints.demo.play import Report

# Fits 80 columns without cutting a figure.
TABLE_STYLE: dict[str, Any] = {
    "title_justify": "left",
    "box": box.SIMPLE_HEAD,
    "padding": (0, 1, 0, 0),
    "pad_edge": False,
}


def as_json(report: Report) -> dict[str, Any]:
    """What ``atom demo --json`` prints."""
    return {
        "requests": [
            {
                "name": result.name,
                "prompt_tokens": result.answer.prompt_tokens,
                "cached_tokens": result.answer.cached_tokens,
                "ttft_ms": round(1e3 * result.answer.seconds_to_first_token, 2),
                "same_as_uncached": result.same_output,
            }
            for result in report.results
        ],
        "cache_stats": report.cache_stats,
    }


def as_table(report: Report) -> Table:
    """What ``atom demo`` prints."""
    table = Table(title="A coding agent's conversation over HTTP", **TABLE_STYLE)
    table.add_column("request", no_wrap=True)
    for name in ("tokens", "cached", "first token", "cache off", "saved"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("same tokens", no_wrap=True)
    for result in report.results:
        answer = result.answer
        table.add_row(
            result.name,
            str(answer.prompt_tokens),
            str(answer.cached_tokens),
            _milliseconds(answer.seconds_to_first_token),
            _milliseconds(result.uncached.seconds_to_first_token),
            _milliseconds(result.seconds_saved),
            "yes" if result.same_output else "NO",
        )
    return table


def _milliseconds(seconds: float) -> str:
    """Seconds as whole milliseconds, with the unit."""
    return f"{1e3 * seconds:.0f} ms"

"""What ``atom bench`` runs. Every figure that involves time is printed as data, beside what it is to be compared with."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of ``atom bench``; see :mod:`atom.benchmarks.cli`."""
    from atom.benchmarks.cli import main as run

    return run(argv)

"""``atom demo``: what resuming a shared prefix saves, seen over HTTP on this machine."""

from __future__ import annotations

import argparse

SUMMARY = "Play a coding agent's conversation, or a recorded trace, and show what prefix caching saves."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The demo's own flags; those of the engine reach the server that it starts."""
    parser.add_argument("--json", action="store_true", help="Print the results as JSON and nothing else.")
    parser.add_argument(
        "--trace", metavar="FILE", help="Play recorded sessions instead: JSON lines, perhaps gzipped, with input etc."
    )
    parser.add_argument("--sessions", type=int, metavar="N", help="Play the first N sessions of the trace only.")
    parser.add_argument(
        "--compare", action="store_true", help="Play the trace with caching off too (the conversation always is)."
    )


def run(args: argparse.Namespace) -> int:
    """Run the demo; returns 0, or 1 when something went wrong."""
    from atom.entrypoints.demo.main import run_demo

    return run_demo(args)

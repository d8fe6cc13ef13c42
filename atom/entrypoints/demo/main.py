"""Runs a demo from its flags: plays, shows, and decides the exit code."""

from __future__ import annotations

import argparse
import json
import signal
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from atom.config import ConfigError, EngineConfig
from atom.entrypoints.arguments import as_flags, read_settings
from atom.entrypoints.demo import report, trace_report
from atom.entrypoints.demo.play import check, play_conversation
from atom.entrypoints.demo.trace import read_trace
from atom.entrypoints.demo.trace_play import check_trace, play_trace


def run_demo(args: argparse.Namespace) -> int:
    """Play, print and check. Raises :class:`DemoError` for what went wrong, after whatever results there are."""
    settings = read_settings(args, EngineConfig)
    # Unusable settings are refused here, before a server takes its time to refuse them.
    config = EngineConfig(**settings)
    if not config.enable_prefix_caching:
        raise ConfigError("enable_prefix_caching", False, "leave it out; the demo compares with caching off by itself")
    # Without this a terminated demo would leave its server behind.
    signal.signal(signal.SIGTERM, _end)
    if args.trace is None:
        _run_conversation(args, config, as_flags(settings))
    else:
        _run_trace(args, config, as_flags(settings))
    return 0


def _run_conversation(args: argparse.Namespace, config: EngineConfig, flags: list[str]) -> None:
    for name in ("sessions", "compare"):
        if getattr(args, name):
            raise ConfigError(name, getattr(args, name), "needs --trace=FILE")
    console = Console(stderr=True, quiet=args.json)
    with console.status("") as status:
        result = play_conversation(flags, lambda text: status.update(f"{text} ..."))
    _show(args, report.as_json(result), report.as_table(result), result.cache_lines)
    check(result, config)
    if not args.json:
        print("Every output is token for token the one without prefix caching.")


def _run_trace(args: argparse.Namespace, config: EngineConfig, flags: list[str]) -> None:
    if args.sessions is not None and args.sessions < 1:
        raise ConfigError("sessions", args.sessions, "use 1 or more, or leave it out to play all")
    requests = read_trace(Path(args.trace), args.sessions)
    result = play_trace(
        requests,
        config,
        flags,
        args.compare,
        lambda text, items: tqdm(items, desc=text, unit="request", disable=True if args.json else None),
    )
    _show(args, trace_report.as_json(result), trace_report.as_table(result), result.cache_lines)
    check_trace(result)


def _show(args: argparse.Namespace, data: dict[str, Any], table: Table, log_lines: list[str]) -> None:
    if args.json:
        print(json.dumps(data))
        return
    Console().print(table)
    for line in log_lines:
        print(line)


def _end(number: int, _: object) -> None:
    raise SystemExit(128 + number)

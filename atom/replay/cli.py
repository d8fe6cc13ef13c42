"""``atom replay``: what would my hit rate be with this pool, this model, these flags?"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from atom.entrypoints.arguments import ArgumentParser, flag_name
from atom.replay import fields, plots
from atom.replay.cost_model import CostModel
from atom.replay.geometry import GEOMETRIES, Geometry, read_geometry
from atom.replay.placements import parse_placement
from atom.replay.policies import POLICIES, check_policy, placement_and_block
from atom.replay.report import explain, explained, results_table, tokens_text
from atom.replay.results import Replay
from atom.replay.simulate import ReplaySettings, replay
from atom.replay.trace import Trace, keep_sessions, prepare
from atom.replay.traces import DEFAULT_BLOCK, LARGEST_BLOCK, Encode, read_trace

SUMMARY = "Play a request trace through scheduler and cache, without a model, and say what was resumed."
DEFAULT_POOL = "2M"
MOST_BLOCKS = 100_000_000
"""Of a pool: each takes about 70 bytes."""
LIMITS: dict[str, tuple[float, float]] = {
    "seats": (1, 1_000_000),
    "block_size": (1, LARGEST_BLOCK),
    "block_multiple": (1, 1_000_000),
    "max_num_batched_tokens": (1, 1_000_000_000),
    "sessions": (1, 1_000_000_000),
    "explain": (0, 1_000_000_000),
    "pool_gib": (0, 1_000_000_000),
    "prefill_rate": (1e-3, 1_000_000_000_000),
    "decode_ms": (1e-6, 1_000_000_000),
    "restore_gbps": (1e-6, 1_000_000_000),
}
"""The least and the most that a flag takes. Within them no sum of a replay is too large and no step takes no time."""


def main(argv: Sequence[str]) -> int:
    """Replay a trace once for each policy and pool and print what came out; returns the exit code.

    Raises ValueError on a setting or a trace that cannot be used, OSError where a file cannot be read; both come before
    anything is replayed.
    """
    parser = ArgumentParser(prog="atom replay", description=SUMMARY)
    add_arguments(parser)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.refuse(unknown)
    return _run(args)


def _check(args: argparse.Namespace) -> None:
    for name, (low, high) in LIMITS.items():
        value = getattr(args, name)
        if value is not None and not low <= value <= high:
            raise ValueError(f"{flag_name(name)}={value}: use {low:,} to {high:,}")
    if args.max_num_batched_tokens < args.seats:
        raise ValueError(f"--max-num-batched-tokens={args.max_num_batched_tokens}: use at least --seats={args.seats}")
    for policy in args.policy:
        check_policy(policy)
    pools = [name for name in ("pool_tokens", "pool_gib", "sweep") if getattr(args, name) is not None]
    if len(pools) > 1:
        raise ValueError(f"{' and '.join(_given(args, name) for name in pools)}: use one of them")
    if args.tokenizer is not None and not Path(args.tokenizer).is_dir():
        raise ValueError(f"{_given(args, 'tokenizer')}: use the folder of a model or tokenizer")
    if args.plot is not None:
        plots.check(Path(args.plot))


def _given(args: argparse.Namespace, name: str) -> str:
    """A flag as it was given."""
    return f"{flag_name(name)}={getattr(args, name)}"


def _check_trace(args: argparse.Namespace, trace: Trace) -> None:
    """Flags that say nothing to the trace that was read."""
    for name in ("sessions", "seed"):
        if trace.timed and getattr(args, name) is not None:
            raise ValueError(
                f"{_given(args, name)}: {trace.name} has no sessions, its requests have times; leave it out"
            )
    if args.block_size not in (None, trace.block_size):
        raise ValueError(
            f"{_given(args, 'block_size')}: {trace.name} has blocks of {trace.block_size} tokens; use --block-multiple"
        )


def _run(args: argparse.Namespace) -> int:
    _check(args)
    geometry = read_geometry(args.model_geometry, args.ranks)
    trace = read_trace(Path(args.trace), lambda: _encoder(args.tokenizer), args.block_size or DEFAULT_BLOCK)
    _check_trace(args, trace)
    plan = _plan(args, geometry, trace)
    keep_sessions(trace, args.sessions, random.Random(args.seed) if args.seed is not None else None)
    prepare(trace, args.answers)
    replays, results = [], []
    for rules, settings in plan:
        replays.append(_replay(trace, settings))
        extra = {"placement": rules, "answers": args.answers, "seed": args.seed}
        if args.explain:
            extra["explained"] = explained(replays[-1], args.explain)
        results.append(replays[-1].summary() | extra)
    if args.plot is not None:
        plots.write(Path(args.plot), replays, results)
    if args.json:
        print(json.dumps({"results": results}, indent=2))
        return 0
    console = Console(width=None if sys.stdout.isatty() else 220)
    console.print(results_table(results))
    if args.explain:
        for played, result in zip(replays, results, strict=True):
            console.print(explain(played, result["explained"]))
    return 0


def _plan(args: argparse.Namespace, geometry: Geometry, trace: Trace) -> list[tuple[str, ReplaySettings]]:
    """The replays to be done, each with the rules of its placement."""
    block = trace.block_size * args.block_multiple
    cost = CostModel(args.prefill_rate, args.decode_ms / 1e3, args.restore_gbps * 1e9)
    plan = []
    for given, pool in _pools(args, geometry, geometry.block_size_for(block)):
        for policy in args.policy:
            rules, size = placement_and_block(policy, geometry, block)
            if args.placement is not None:
                rules = args.placement
            _check_pool(given, pool, geometry, size)
            placement = parse_placement(rules, size)
            settings = ReplaySettings(geometry, pool, args.seats, policy, placement, cost, args.max_num_batched_tokens)
            plan.append((rules, settings))
    return plan


def _replay(trace: Trace, settings: ReplaySettings) -> Replay:
    text = f"{settings.policy}, {tokens_text(settings.pool_tokens)}"
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        total = len(trace.requests)
        task = progress.add_task(text, total=total)

        def show(ended: int) -> None:
            # Called every step, and drawing costs more than a step.
            if ended >= shown[0] + total // 100:
                shown[0] = ended
                progress.update(task, completed=ended)

        shown = [0]
        return replay(trace, settings, show)


def _pools(args: argparse.Namespace, geometry: Geometry, block_size: int) -> list[tuple[str, int]]:
    """Pool sizes in tokens of KV, each with the flag that asks for it."""
    if args.sweep is not None:
        given = _given(args, "sweep")
        name, equals, values = args.sweep.partition("=")
        if name != "pool" or not equals:
            raise ValueError(f"{given}: use e.g. pool=0.5M,1M,2M")
        return [(given, parse_tokens(given, value)) for value in values.split(",")]
    if args.pool_gib is not None:
        pages = int(args.pool_gib * 2**30 // geometry.page_bytes(block_size))
        return [(_given(args, "pool_gib"), pages * block_size)]
    text = DEFAULT_POOL if args.pool_tokens is None else args.pool_tokens
    given = f"--pool-tokens={text}"
    return [(given, parse_tokens(given, text))]


def parse_tokens(given: str, text: str) -> int:
    """``1.5M`` as 1500000. Raises ValueError that begins with ``given``, the flag and its value."""
    units = {"k": 10**3, "m": 10**6, "g": 10**9}
    scale = units.get(text[-1:].lower(), 1)
    try:
        tokens = int(float(text[:-1] if scale > 1 else text) * scale)
    except (ValueError, OverflowError):
        tokens = 0
    if tokens <= 0:
        raise ValueError(f"{given}: {text!r} is no number of tokens; use one such as 2M or 500000")
    return tokens


def _check_pool(given: str, pool: int, geometry: Geometry, block_size: int) -> None:
    """Raises ValueError if ``pool`` tokens have no room for an image and a block, or need more memory than there is."""
    least, gib = 1 + geometry.pages_per_image(block_size), geometry.page_bytes(block_size) / 2**30
    # Gigabytes are rounded to the side on which what is named works.
    if pool < least * block_size:
        raise ValueError(
            f"{given}: a block is {block_size} tokens, and it and an image take {least} blocks; "
            f"use at least {least * block_size} tokens ({math.ceil(least * gib * 1000) / 1000} GiB), or smaller blocks"
        )
    if pool > MOST_BLOCKS * block_size:
        raise ValueError(
            f"{given}: use at most {MOST_BLOCKS:,} blocks, that is {MOST_BLOCKS * block_size} tokens "
            f"({math.floor(MOST_BLOCKS * gib * 1000) / 1000} GiB)"
        )


def _encoder(folder: str | None) -> Encode:
    from atom.config import SHIPPED_MODEL
    from atom.tokenizer import Tokenizer

    try:
        return Tokenizer(folder or SHIPPED_MODEL).encode
    except ValueError as error:
        raise ValueError(f"--tokenizer={folder}: {fields.one_line(error)}") from error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``atom replay``."""
    add: Any = parser.add_argument
    names = ", ".join(GEOMETRIES)
    cost = CostModel()
    add("--trace", required=True, metavar="FILE", help="Requests: any format of docs/replay.md, plain or gzipped.")
    add("--model-geometry", required=True, metavar="NAME", help=f"One of {names}, a FILE.json or a model's folder.")
    add("--ranks", type=int, default=None, metavar="N", help="Ranks the model is split over (default: the geometry's).")
    add(
        "--pool-tokens",
        default=None,
        metavar="N",
        help=f"Tokens of KV the pool would hold alone (default: {DEFAULT_POOL}).",
    )
    add("--pool-gib", type=float, default=None, metavar="X", help="Bytes of the pool on one rank, instead.")
    add("--sweep", metavar="pool=N,N,...", help="Several pool sizes in tokens, instead.")
    add("--seats", type=int, default=8, metavar="N", help="Sessions, and requests, at the same time (default: 8).")
    add(
        "--policy",
        nargs="+",
        default=["default"],
        metavar="NAME",
        help=f"What is given up first, one replay each: {', '.join(POLICIES)} (default: default).",
    )
    add(
        "--placement",
        default=None,
        metavar="RULES",
        help="default, or of prompt, answer, demand, interval[=N] joined by + (default: what the policy's engine keeps).",
    )
    add(
        "--answers",
        choices=("echoed", "private", "none"),
        default="echoed",
        help="What answers leave (default: echoed).",
    )
    add(
        "--block-size",
        type=int,
        default=None,
        metavar="N",
        help=f"Tokens a block in a trace of tokens or text (default: {DEFAULT_BLOCK}).",
    )
    add("--block-multiple", type=int, default=1, metavar="N", help="Blocks of the trace that make one of the engine.")
    add(
        "--tokenizer",
        default=None,
        metavar="FOLDER",
        help="Tokenizer of a trace of text (default: the shipped model's).",
    )
    add("--sessions", type=int, default=None, metavar="N", help="Replay the first N sessions only.")
    add("--seed", type=int, default=None, metavar="N", help="Shuffle the sessions first, the same way for the same N.")
    add(
        "--prefill-rate", type=float, default=cost.prefill_rate, metavar="X", help="Cost model: prompt tokens a second."
    )
    add("--decode-ms", type=float, default=cost.decode_step * 1e3, metavar="X", help="Cost model: ms of a step.")
    add(
        "--restore-gbps", type=float, default=cost.restore_rate / 1e9, metavar="X", help="Cost model: GB/s of restores."
    )
    add("--max-num-batched-tokens", type=int, default=8192, metavar="N", help="Tokens a forward (default: 8192).")
    add("--explain", type=int, default=0, metavar="N", help="List the N requests that lost most, and why.")
    add("--json", action="store_true", help="Print the results as JSON.")
    add(
        "--plot",
        default=None,
        metavar="FILE.png",
        help="Draw hit rates and the pool over time, also as .svg or .pdf (needs matplotlib).",
    )

"""``atom replay``: what would my hit rate be with this pool, this model, these flags?"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from atom.entrypoints.arguments import ArgumentParser, flag_name
from atom.replay import plots
from atom.replay.cost_model import CostModel
from atom.replay.geometry import GEOMETRIES, Geometry, read_geometry
from atom.replay.placements import parse_placement
from atom.replay.policies import POLICIES, check_policy
from atom.replay.report import explain, results_table, tokens_text
from atom.replay.results import Replay
from atom.replay.simulate import ReplaySettings, replay
from atom.replay.trace import Trace, keep_sessions, prepare
from atom.replay.traces import Encode, read_trace

SUMMARY = "Play a request trace through scheduler and cache, without a model, and say what was resumed."


def main(argv: Sequence[str]) -> int:
    """Replay a trace once for each policy and pool and print what came out; returns the exit code.

    Raises ValueError on a setting or a trace that cannot be used, OSError where a file cannot be read.
    """
    parser = ArgumentParser(prog="atom replay", description=SUMMARY)
    add_arguments(parser)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.refuse(unknown)
    return _run(args)


def _check(args: argparse.Namespace) -> None:
    for name in ("seats", "block_size", "block_multiple", "max_num_batched_tokens", "sessions"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"{flag_name(name)}={value}: use 1 or more")
    for name in ("prefill_rate", "decode_ms", "restore_gbps", "pool_gib"):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{flag_name(name)}={value}: use a number above 0")
    if args.max_num_batched_tokens < args.seats:
        raise ValueError(f"--max-num-batched-tokens={args.max_num_batched_tokens}: use at least --seats={args.seats}")
    for policy in args.policy:
        check_policy(policy)


def _run(args: argparse.Namespace) -> int:
    _check(args)
    if args.plot:
        plots.require()
    geometry = read_geometry(args.model_geometry, args.ranks)
    trace = read_trace(Path(args.trace), lambda: _encoder(args.tokenizer), args.block_size)
    keep_sessions(trace, args.sessions, random.Random(args.seed) if args.seed is not None else None)
    prepare(trace, args.answers)
    size = geometry.block_size_for(trace.block_size * args.block_multiple)
    placement = parse_placement(args.placement, size)
    pools = _pools(args, geometry, size)
    cost = CostModel(args.prefill_rate, args.decode_ms / 1e3, args.restore_gbps * 1e9)
    replays = []
    for pool in pools:
        for policy in args.policy:
            settings = ReplaySettings(geometry, pool, args.seats, policy, placement, cost, args.max_num_batched_tokens)
            replays.append(_replay(trace, settings))
    extra = {"placement": args.placement, "answers": args.answers, "seed": args.seed}
    results = [result.summary() | extra for result in replays]
    if args.plot:
        plots.write(Path(args.plot), replays, results)
    if args.json:
        print(json.dumps({"results": results}, indent=2))
        return 0
    console = Console(width=None if sys.stdout.isatty() else 220)
    console.print(results_table(results))
    if args.explain:
        for result in replays:
            console.print(explain(result, args.explain))
    return 0


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


def _pools(args: argparse.Namespace, geometry: Geometry, block_size: int) -> list[int]:
    """Pool sizes in tokens of KV."""
    if args.sweep:
        name, equals, values = args.sweep.partition("=")
        if name != "pool" or not equals:
            raise ValueError(f"--sweep={args.sweep}: use e.g. pool=0.5M,1M,2M")
        return [parse_tokens("sweep", value) for value in values.split(",")]
    if args.pool_gib is not None:
        return [int(args.pool_gib * 2**30 // geometry.page_bytes(block_size)) * block_size]
    return [parse_tokens("pool-tokens", args.pool_tokens)]


def parse_tokens(flag: str, text: str) -> int:
    """``1.5M`` as 1500000. Raises ValueError naming ``flag``."""
    units = {"k": 10**3, "m": 10**6, "g": 10**9}
    scale = units.get(text[-1:].lower(), 1)
    try:
        tokens = int(float(text[:-1] if scale > 1 else text) * scale)
    except (ValueError, OverflowError):
        tokens = 0
    if tokens <= 0:
        raise ValueError(f"--{flag}={text}: use a number of tokens such as 2M or 500000")
    return tokens


def _encoder(folder: str | None) -> Encode:
    from atom.config import SHIPPED_MODEL
    from atom.tokenizer import Tokenizer

    return Tokenizer(folder or SHIPPED_MODEL).encode


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``atom replay``."""
    add: Any = parser.add_argument
    names = ", ".join(GEOMETRIES)
    cost = CostModel()
    add("--trace", required=True, metavar="FILE", help="Requests: any format of docs/replay.md, plain or gzipped.")
    add("--model-geometry", required=True, metavar="NAME", help=f"One of {names}, a FILE.json or a model's folder.")
    add("--ranks", type=int, default=None, metavar="N", help="Ranks the model is split over (default: the geometry's).")
    add("--pool-tokens", default="2M", metavar="N", help="Tokens of KV the pool would hold alone (default: 2M).")
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
        default="default",
        metavar="RULES",
        help="default, or of prompt, answer, demand, interval[=N] joined by +.",
    )
    add(
        "--answers",
        choices=("echoed", "private", "none"),
        default="echoed",
        help="What answers leave (default: echoed).",
    )
    add("--block-size", type=int, default=64, metavar="N", help="Tokens a block in a trace of tokens or text.")
    add("--block-multiple", type=int, default=1, metavar="N", help="Blocks of the trace that make one of the engine.")
    add(
        "--tokenizer",
        default=None,
        metavar="FOLDER",
        help="Tokenizer of a trace of text (default: the shipped model's).",
    )
    add("--sessions", type=int, default=None, metavar="N", help="Replay N sessions only.")
    add("--seed", type=int, default=None, metavar="N", help="Shuffle the sessions first.")
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
    add("--plot", default=None, metavar="FILE.png", help="Draw hit rates and the pool over time (needs matplotlib).")

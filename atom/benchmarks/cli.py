"""``atom bench``: engine overhead, resuming against computing, and a peer on the same files."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import atom
from atom.config import SHIPPED_MODEL

WORKER = Path(__file__).parent / "offline_worker.py"


def run_worker(python: str, engine: str, args: argparse.Namespace, batches: Sequence[int]) -> dict[str, Any]:
    """Time ``engine`` under interpreter ``python``. RuntimeError with the end of its output if it fails."""
    command = [python, str(WORKER), engine, args.model, "--threads", str(args.threads)]
    command += ["--prompt-tokens", str(args.prompt_tokens), "--repeats", str(args.repeats)]
    command += ["--batches", *map(str, batches)]
    # The worker runs by its path, so a checkout that is not installed has to be named; a peer must not see it.
    environment = {**os.environ, "PYTHONPATH": str(Path(atom.__file__).parents[1])} if engine == "atom" else None
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    except OSError as error:
        raise RuntimeError(f"{python} cannot be run: {error.strerror}; --peer-python takes an interpreter") from error
    if done.returncode:
        raise RuntimeError(f"{engine} failed: {(done.stderr or done.stdout)[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def bench_engine(args: argparse.Namespace) -> dict[str, Any]:
    """Overhead of scheduling and block management."""
    from atom.benchmarks import engine

    return engine.run(args.quick)


def bench_resume(args: argparse.Namespace) -> dict[str, Any]:
    """Time to first token of a resent prompt as a share of a cold one."""
    result = run_worker(sys.executable, "atom", args, [])
    result["resent_over_cold"] = round(result["resent_ttft_ms"] / result["cold_ttft_ms"], 4)
    return result


def bench_checkpoints(args: argparse.Namespace) -> dict[str, Any]:
    """Cost of storing, restoring and giving out a state."""
    from atom.benchmarks import checkpoints

    return checkpoints.run(args.model, args.threads, args.repeats)


def bench_profile(args: argparse.Namespace) -> dict[str, Any]:
    """What a cold prompt's time is spent on."""
    from atom.benchmarks import profile

    return profile.run(args.model, args.threads, args.prompt_tokens)


def bench_peer(args: argparse.Namespace) -> dict[str, Any]:
    """atom and vLLM on the same files, one behind the other; ratios above 1 favour atom."""
    rounds = []
    for _ in range(args.rounds):
        ours = run_worker(sys.executable, "atom", args, [1, 16])
        theirs = run_worker(args.peer_python, "vllm", args, [1, 16])
        ratios = {"cold_ttft": theirs["cold_ttft_ms"] / ours["cold_ttft_ms"]}
        ratios["resent_ttft"] = theirs["resent_ttft_ms"] / ours["resent_ttft_ms"]
        for batch in (1, 16):
            key = f"decode_step_ms_batch_{batch}"
            ratios[f"decode_batch_{batch}"] = theirs[key] / ours[key]
        rounds.append({"atom": ours, "vllm": theirs, "speedup": {k: round(v, 3) for k, v in ratios.items()}})
    return {"rounds": rounds}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark and print its result as JSON."""
    parser = argparse.ArgumentParser(prog="atom bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    engine = commands.add_parser("engine", help="cost of keys, admission and a decode step, without a model")
    engine.add_argument("--quick", action="store_true", help="fewer repeats")
    engine.set_defaults(run=bench_engine)
    resume = commands.add_parser("resume", help="time to first token: resent against cold")
    peer = commands.add_parser("peer", help="beside vLLM on the same model files")
    peer.add_argument("--peer-python", required=True, help="interpreter of an environment with vLLM")
    peer.add_argument("--rounds", type=int, default=2, help="times that the pair is run")
    profile = commands.add_parser("profile", help="what a cold prompt's time is spent on")
    checkpoints = commands.add_parser("checkpoints", help="cost of storing, restoring and giving out a state")
    for command, run in (
        (resume, bench_resume),
        (peer, bench_peer),
        (checkpoints, bench_checkpoints),
        (profile, bench_profile),
    ):
        command.add_argument("--model", default=SHIPPED_MODEL, help="folder of the model")
        command.add_argument("--threads", type=int, default=2, help="threads of a forward")
        if command is not checkpoints:
            command.add_argument("--prompt-tokens", type=int, default=3000, help="length of the prompt")
        if command is not profile:
            command.add_argument("--repeats", type=int, default=5, help="measurements of which the median counts")
        command.set_defaults(run=run)
    args = parser.parse_args(argv)
    try:
        result = args.run(args)
    except RuntimeError as error:
        print(f"atom bench: {error}", file=sys.stderr)
        return 1
    print(json.dumps(result, indent=2))
    return 0

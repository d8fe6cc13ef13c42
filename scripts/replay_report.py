"""Write the tables of docs/eviction.md: hit rates of every policy over traces, geometries, seats and pools.

The whole matrix takes hours on one core; ``--quick`` takes part of the coding-agent sessions and one geometry.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from atom.replay.geometry import read_geometry
from atom.replay.placements import parse_placement
from atom.replay.policies import POLICIES
from atom.replay.simulate import ReplaySettings, replay
from atom.replay.trace import Trace, keep_sessions, prepare
from atom.replay.traces import read_trace

DOC = Path(__file__).parents[1] / "docs" / "eviction.md"
CODING = "claude_code_160"
TRACES = (CODING, "mooncake_conversation", "mooncake_synthetic")
POLICY_ROW = ("lru", "vllm-align", "sglang", "marconi", "default", "clairvoyant")
PLACEMENTS = {"vllm-align": "prompt+demand", "sglang": "prompt+answer+demand", "marconi": "answer+demand"}
"""What the engines of these policies keep."""
ONLINE = ("lru", "vllm-align", "sglang", "marconi")
VARIANTS = tuple(name for name in POLICIES if name.startswith("value-") or name == "most-recent")
VARIANT_POINTS = ((CODING, 8, 1.0), (TRACES[1], 32, 2.0), (TRACES[2], 32, 8.0))
"""Always with some of the coding-agent sessions."""
KINDS = ("anchor", "demand", "interval")
PUBLISHED_POOL = 113_393 * 16
UNLIMITED = 200_000_000


@dataclass(frozen=True)
class Point:
    """One replay. ``pool``: tokens; ``sessions``: how many of the file, None: all."""

    trace: str
    geometry: str
    seats: int
    pool: int
    policy: str
    placement: str = "default"
    sessions: int | None = None
    answers: str = "echoed"


class Runner:
    """Replays points, remembering results in a file so that a broken-off run goes on where it was."""

    def __init__(self, folder: Path, cache: Path | None) -> None:
        self.folder, self.cache = folder, cache
        self.results: dict[Point, dict[str, Any]] = {}
        self._trace: tuple[tuple[str, int | None, str], Trace] | None = None
        if cache is not None and cache.exists():
            for line in cache.read_text().splitlines():
                entry = json.loads(line)
                self.results[Point(**entry["point"])] = entry["result"]

    def trace(self, name: str, sessions: int | None, answers: str) -> Trace:
        """A prepared trace; the last one stays in memory."""
        if self._trace is None or self._trace[0] != (name, sessions, answers):
            trace = read_trace(self.folder / f"{name}.jsonl.gz")
            keep_sessions(trace, sessions, random.Random(1))
            prepare(trace, answers)
            self._trace = (name, sessions, answers), trace
        return self._trace[1]

    def run(self, point: Point) -> dict[str, Any]:
        """The summary of one replay."""
        if point not in self.results:
            start = time.monotonic()
            trace = self.trace(point.trace, point.sessions, point.answers)
            geometry = read_geometry(point.geometry)
            size = geometry.block_size_for(trace.block_size)
            if point.policy == "vllm-align":
                # Its blocks are at least as large as a state.
                size *= geometry.pages_per_image(size)
            rules = PLACEMENTS.get(point.policy, point.placement)
            settings = ReplaySettings(geometry, point.pool, point.seats, point.policy, parse_placement(rules, size))
            result = self.results[point] = replay(trace, settings).summary()
            print(f"{point} {result['hit_rate']:.4f} {time.monotonic() - start:.0f} s", file=sys.stderr)
            if self.cache is not None:
                with self.cache.open("a") as file:
                    file.write(json.dumps({"point": asdict(point), "result": result}) + "\n")
        return self.results[point]


def matrix(quick: bool) -> Iterator[tuple[str, str, int, int, int | None]]:
    """Trace, geometry, seats, pool and sessions of every point."""
    for trace in TRACES:
        for geometry in ("kimi-k3",) if quick else ("kimi-k3", "qwen3-next"):
            for seats in (8, 32):
                sessions = (40 if seats == 8 else 60) if quick and trace == CODING else None
                for pool in (500_000, 1_000_000, 2_000_000, 4_000_000, 8_000_000):
                    yield trace, geometry, seats, pool, sessions


def main_table(runner: Runner, quick: bool) -> str:
    """A row a point; the recovered share over the points where lru is below 90 %."""
    rows, shares, behind = [], [], []
    for trace, geometry, seats, pool, sessions in matrix(quick):
        rates = {}
        for policy in POLICY_ROW:
            result = runner.run(Point(trace, geometry, seats, pool, policy, sessions=sessions))
            rates[policy] = 100 * result["hit_rate"]
        ideal = 100 * result["ideal_hit_rate"]
        share = None
        if rates["lru"] < 90 and rates["clairvoyant"] > rates["lru"]:
            share = (rates["default"] - rates["lru"]) / (rates["clairvoyant"] - rates["lru"])
            # Where the ceiling is none, all of the distance counts as recovered, not more.
            shares.append(min(share, 1.0))
        best = max(rates[name] for name in ONLINE)
        if rates["default"] < best - 0.2:
            behind.append(f"{trace} {geometry} {seats} seats {pool / 1e6:g} M ({rates['default'] - best:+.1f})")
        cells = [f"{rates[policy]:.1f}" for policy in POLICY_ROW]
        recovered = f"{share:.0%}" if share is not None else ""
        rows.append([trace, geometry, seats, f"{pool / 1e6:g} M", *cells, f"{ideal:.1f}", recovered])
    head = ["trace", "geometry", "seats", "pool", *POLICY_ROW, "ideal", "recovered"]
    mean = sum(shares) / max(1, len(shares))
    return (
        f"{markdown(head, rows)}\n\nOver the {len(shares)} points where `lru` is below 90 %, `default` recovers {mean:.0%} "
        f"of the distance from `lru` to `clairvoyant`, on average, a point counting 100 % at most. Points "
        f"where it is more than 0.2 below an online "
        f"baseline: {', '.join(behind) or 'none'}."
    )


def variants_table(runner: Runner, quick: bool) -> str:
    """A row a variant, at some points."""
    names = ("lru", "guesses-first", *VARIANTS, "default", "clairvoyant")
    rows = []
    for policy in names:
        cells = []
        for trace, seats, pool in VARIANT_POINTS:
            sessions = 40 if trace == CODING else None
            point = Point(trace, "kimi-k3", seats, int(pool * 1e6), policy, sessions=sessions)
            cells.append(f"{100 * runner.run(point)['hit_rate']:.1f}")
        rows.append([f"`{policy}`", *cells])
    return markdown(["policy", *(f"{trace}, {seats} seats, {pool:g} M" for trace, seats, pool in VARIANT_POINTS)], rows)


def placement_table(runner: Runner, quick: bool) -> str:
    """What placements keep of the ideal with a pool that is never full, and how many checkpoints they take."""
    rows = []
    rules = ("default", "prompt+demand+interval", "prompt+answer+demand", "anchor", "prompt", "interval")
    for answers in ("echoed", "private", "none"):
        for rule in rules if answers == "echoed" else rules[:1]:
            cells = []
            for trace in TRACES:
                sessions = 40 if quick and trace == CODING else None
                point = Point(trace, "kimi-k3", 32, UNLIMITED, "lru", rule, sessions, answers)
                result = runner.run(point)
                cells.append(f"{100 * result['share_of_ideal']:.1f} % / {result['checkpoints_per_request']:.2f}")
            rows.append([rule, answers, *cells])
    return markdown(["placement", "answers", *TRACES], rows)


def published_table(runner: Runner, quick: bool) -> str:
    """The published Kimi-K3 pool on 8 seats, always with all sessions: hit rate, share of the ideal, who was resumed."""
    rows = []
    for policy in ("lru", "guesses-first", "default", "clairvoyant"):
        result = runner.run(Point(CODING, "kimi-k3", 8, PUBLISHED_POOL, policy))
        reads, kept, used = result["read_back"], result["kept_by_kind"], result["used_by_kind"]
        total = max(1, sum(reads.values()))
        rates = [f"{100 * result['hit_rate']:.2f} %", f"{100 * result['share_of_ideal']:.2f} %"]
        resumes = [f"{reads[kind] / total:.1%}" for kind in KINDS]
        rows.append([policy, *rates, *resumes, *(f"{used[kind] / max(1, kept[kind]):.1%}" for kind in KINDS)])
    rows.append(["as published", "91.79 %", "94.73 %", "93.5%", "", "0.0%", "85.2%", "2.8%", ""])
    head = ["policy", "hit rate", "of the ideal", *(f"resumes at {kind}s" for kind in KINDS)]
    return markdown([*head, *(f"{kind}s read back" for kind in KINDS)], rows)


def markdown(head: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """A table."""
    lines = [list(map(str, head))]
    lines.append(["---"] * len(lines[0]))
    lines += [list(map(str, row)) for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


TABLES = {
    "matrix": main_table,
    "variants": variants_table,
    "placements": placement_table,
    "published": published_table,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--traces", type=Path, default=DOC.parents[2] / "shared" / "traces", help="folder of the traces"
    )
    parser.add_argument("--quick", action="store_true", help="some sessions, one geometry")
    parser.add_argument("--cache", type=Path, help="results so far, one JSON object a line")
    parser.add_argument("--only", choices=TABLES, nargs="+", default=list(TABLES), help="tables to write")
    args = parser.parse_args()
    runner = Runner(args.traces, args.cache)
    for name in args.only:
        table = TABLES[name](runner, args.quick)
        text = DOC.read_text()
        before, rest = text.split(f"<!-- {name} -->\n", 1)
        _, after = rest.split(f"<!-- end of {name} -->", 1)
        DOC.write_text(f"{before}<!-- {name} -->\n{table}\n<!-- end of {name} -->{after}")


if __name__ == "__main__":
    main()

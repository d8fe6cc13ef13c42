"""Write the tables of docs/eviction.md: hit rates of every policy over traces, geometries, seats and pools.

The whole matrix takes hours on one core; ``--quick`` takes part of the coding-agent sessions and one geometry.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from atom.replay.geometry import read_geometry
from atom.replay.placements import parse_placement
from atom.replay.policies import POLICIES, placement_and_block
from atom.replay.simulate import ReplaySettings, replay
from atom.replay.trace import Trace, keep_sessions, prepare
from atom.replay.traces import read_trace

DOC = Path(__file__).parents[1] / "docs" / "eviction.md"
CODING = "claude_code_160"
TRACES = (CODING, "mooncake_conversation", "mooncake_synthetic")
POLICY_ROW = ("lru", "vllm-align", "sglang", "marconi", "default", "clairvoyant")
ONLINE = ("lru", "vllm-align", "sglang", "marconi")
VARIANTS = tuple(name for name in POLICIES if name.startswith("value-") or name == "most-recent")
VARIANT_POINTS = ((CODING, 8, 1.0), (TRACES[1], 32, 2.0), (TRACES[2], 32, 8.0))
"""Always with some of the coding-agent sessions."""
KINDS = ("anchor", "demand", "interval")
PUBLISHED_POOL = 113_393 * 16
UNLIMITED = 200_000_000


@dataclass(frozen=True)
class Point:
    """One replay. ``pool``: tokens; ``placement``: None for the policy's own; ``sessions``: how many of the file, None: all."""

    trace: str
    geometry: str
    seats: int
    pool: int
    policy: str
    placement: str | None = None
    sessions: int | None = None
    answers: str = "echoed"


Results = dict[Point, dict[str, Any]]
Row = tuple[list[str], dict[str, Point]]
"""The first cells of a row, and the replays that the others come from, by policy or trace."""


class Runner:
    """Replays points in ``jobs`` processes, remembering results in a file so that a broken-off run goes on where it was."""

    def __init__(self, folder: Path, cache: Path | None, jobs: int) -> None:
        self.folder, self.cache, self.jobs = folder, cache, jobs
        self.results: Results = {}
        if cache is not None and cache.exists():
            for line in cache.read_text().splitlines():
                entry = json.loads(line)
                self.results[Point(**entry["point"])] = entry["result"]

    def run(self, points: Iterable[Point]) -> Results:
        """The summaries of ``points``."""
        wanted = list(dict.fromkeys(points))
        # A worker keeps the last trace that it prepared.
        missing = sorted(
            set(wanted) - self.results.keys(), key=lambda p: (p.trace, str(p.sessions), p.answers, p.seats)
        )
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True)) as progress:
            for point, result in progress.track(self._replays(missing), len(missing), description="replays"):
                self._remember(point, result)
        return {point: self.results[point] for point in wanted}

    def _replays(self, points: Iterable[Point]) -> Iterator[tuple[Point, dict[str, Any]]]:
        """Each point with its summary, as they are done."""
        if self.jobs == 1:
            for point in points:
                yield point, replay_point(self.folder, point)
            return
        with ProcessPoolExecutor(self.jobs) as workers:
            running = {workers.submit(replay_point, self.folder, point): point for point in points}
            for future in as_completed(running):
                yield running[future], future.result()

    def _remember(self, point: Point, result: dict[str, Any]) -> None:
        self.results[point] = result
        if self.cache is not None:
            with self.cache.open("a") as file:
                file.write(json.dumps({"point": asdict(point), "result": result}) + "\n")


def replay_point(folder: Path, point: Point) -> dict[str, Any]:
    """The summary of one replay."""
    trace = prepared(folder / f"{point.trace}.jsonl.gz", point.sessions, point.answers)
    geometry = read_geometry(point.geometry)
    rules, size = placement_and_block(point.policy, geometry, trace.block_size)
    placement = parse_placement(point.placement or rules, size)
    return replay(trace, ReplaySettings(geometry, point.pool, point.seats, point.policy, placement)).summary()


@lru_cache(maxsize=1)
def prepared(path: Path, sessions: int | None, answers: str) -> Trace:
    """A trace; the last one stays in memory."""
    trace = read_trace(path)
    keep_sessions(trace, sessions, random.Random(1))
    prepare(trace, answers)
    return trace


def matrix_rows(quick: bool) -> Iterator[Row]:
    """A row a trace, geometry, number of seats and pool."""
    for trace in TRACES:
        for geometry in ("kimi-k3",) if quick else ("kimi-k3", "qwen3-next"):
            for seats in (8, 32):
                sessions = (40 if seats == 8 else 60) if quick and trace == CODING else None
                for pool in (500_000, 1_000_000, 2_000_000, 4_000_000, 8_000_000):
                    points = {p: Point(trace, geometry, seats, pool, p, sessions=sessions) for p in POLICY_ROW}
                    yield [trace, geometry, str(seats), f"{pool / 1e6:g} M"], points


def matrix_table(rows: Iterable[Row], results: Results) -> str:
    """Hit rates; the recovered share over the points where lru is below 90 %."""
    lines, shares, behind = [], [], []
    for labels, points in rows:
        rates = {policy: 100 * results[point]["hit_rate"] for policy, point in points.items()}
        share = None
        if rates["lru"] < 90 and rates["clairvoyant"] > rates["lru"]:
            share = (rates["default"] - rates["lru"]) / (rates["clairvoyant"] - rates["lru"])
            # Where the ceiling is none, all of the distance counts as recovered, not more.
            shares.append(min(share, 1.0))
        lead = rates["default"] - max(rates[name] for name in ONLINE)
        if lead < -0.2:
            behind.append(f"{' '.join(labels)} ({lead:+.2f})")
        ideal = 100 * results[points["default"]]["ideal_hit_rate"]
        recovered = f"{share:.0%}" if share is not None else ""
        lines.append([*labels, *(f"{rates[policy]:.1f}" for policy in POLICY_ROW), f"{ideal:.1f}", recovered])
    head = ["trace", "geometry", "seats", "pool", *POLICY_ROW, "ideal", "recovered"]
    mean = sum(shares) / max(1, len(shares))
    return (
        f"{markdown(head, lines)}\n\nOver the {len(shares)} points where `lru` is below 90 %, `default` recovers {mean:.0%} "
        f"of the distance from `lru` to `clairvoyant`, on average, a point counting 100 % at most. Points "
        f"where it is more than 0.2 below an online "
        f"baseline: {', '.join(behind) or 'none'}."
    )


def variant_rows(quick: bool) -> Iterator[Row]:
    """A row a policy."""
    for policy in ("lru", "guesses-first", *VARIANTS, "default", "clairvoyant"):
        points = {}
        for trace, seats, pool in VARIANT_POINTS:
            sessions = 40 if trace == CODING else None
            points[trace] = Point(trace, "kimi-k3", seats, int(pool * 1e6), policy, sessions=sessions)
        yield [f"`{policy}`"], points


def variants_table(rows: Iterable[Row], results: Results) -> str:
    """Hit rates."""
    head = ["policy", *(f"{trace}, {seats} seats, {pool:g} M" for trace, seats, pool in VARIANT_POINTS)]
    return markdown(
        head, [[*labels, *(f"{100 * results[p]['hit_rate']:.1f}" for p in points.values())] for labels, points in rows]
    )


def placement_rows(quick: bool) -> Iterator[Row]:
    """A row a placement and kind of answers."""
    rules = ("default", "prompt+demand+interval", "prompt+answer+demand", "anchor", "prompt", "interval")
    for answers in ("none", "private", "echoed"):
        for rule in rules if answers == "echoed" else rules[:1]:
            points = {}
            for trace in TRACES:
                sessions = 40 if quick and trace == CODING else None
                points[trace] = Point(trace, "kimi-k3", 32, UNLIMITED, "lru", rule, sessions, answers)
            yield [rule, answers], points


def placements_table(rows: Iterable[Row], results: Results) -> str:
    """What placements keep of the ideal with a pool that is never full, and how many checkpoints they take."""
    lines = []
    for labels, points in rows:
        found = [results[point] for point in points.values()]
        cells = [
            f"{100 * result['share_of_ideal']:.2f} % / {result['checkpoints_per_request']:.2f}" for result in found
        ]
        lines.append([*labels, *cells])
    return markdown(["placement", "answers", *TRACES], lines)


def published_rows(quick: bool) -> Iterator[Row]:
    """A row a policy: the published Kimi-K3 pool on 8 seats, always with all sessions."""
    for policy in ("lru", "guesses-first", "default", "clairvoyant"):
        yield [policy], {CODING: Point(CODING, "kimi-k3", 8, PUBLISHED_POOL, policy)}


def published_table(rows: Iterable[Row], results: Results) -> str:
    """Hit rate, share of the ideal, who was resumed."""
    lines = []
    for labels, points in rows:
        result = results[points[CODING]]
        reads, kept, used = result["read_back"], result["kept_by_kind"], result["used_by_kind"]
        total = max(1, sum(reads.values()))
        rates = [f"{100 * result['hit_rate']:.2f} %", f"{100 * result['share_of_ideal']:.2f} %"]
        resumes = [f"{reads[kind] / total:.1%}" for kind in KINDS]
        lines.append([*labels, *rates, *resumes, *(f"{used[kind] / max(1, kept[kind]):.1%}" for kind in KINDS)])
    lines.append(["as published", "91.79 %", "94.73 %", "93.5%", "", "0.0%", "85.2%", "2.8%", ""])
    head = ["policy", "hit rate", "of the ideal", *(f"resumes at {kind}s" for kind in KINDS)]
    return markdown([*head, *(f"{kind}s read back" for kind in KINDS)], lines)


def markdown(head: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """A table."""
    lines = [list(map(str, head))]
    lines.append(["---"] * len(lines[0]))
    lines += [list(map(str, row)) for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


TABLES = {
    "published": (published_rows, published_table),
    "matrix": (matrix_rows, matrix_table),
    "variants": (variant_rows, variants_table),
    "placements": (placement_rows, placements_table),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--traces", type=Path, default=DOC.parents[2] / "shared" / "traces", help="folder of the traces"
    )
    parser.add_argument("--quick", action="store_true", help="some sessions, one geometry")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: %(default)s, one a core)")
    parser.add_argument(
        "--cache",
        type=Path,
        help="results so far, one JSON object a line; only good for the code that it was made with",
    )
    parser.add_argument("--only", choices=TABLES, nargs="+", default=list(TABLES), help="tables to write")
    args = parser.parse_args()
    if args.jobs < 1:
        parser.error(f"--jobs={args.jobs}: at least 1")
    rows = {name: list(TABLES[name][0](args.quick)) for name in args.only}
    points = [point for table in rows.values() for _, row in table for point in row.values()]
    results = Runner(args.traces, args.cache, args.jobs).run(points)
    for name, table in rows.items():
        text = DOC.read_text()
        before, rest = text.split(f"<!-- {name} -->\n", 1)
        _, after = rest.split(f"<!-- end of {name} -->", 1)
        DOC.write_text(f"{before}<!-- {name} -->\n{TABLES[name][1](table, results)}\n<!-- end of {name} -->{after}")


if __name__ == "__main__":
    main()

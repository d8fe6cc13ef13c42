"""What the tables of docs/eviction.md say of results, worked by hand."""

from __future__ import annotations

import gzip
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "replay_report.py"


@pytest.fixture(scope="module")
def report() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("replay_report", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = sys.modules["replay_report"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["replay_report"]


RATES = (
    # lru, vllm-align, sglang, marconi, default, clairvoyant: recovers half; more than there is; lru is good enough; behind.
    (0.40, 0.10, 0.45, 0.30, 0.50, 0.60),
    (0.40, 0.10, 0.45, 0.30, 0.50, 0.45),
    (0.95, 0.10, 0.45, 0.30, 0.96, 0.97),
    (0.40, 0.10, 0.524, 0.30, 0.52, 0.60),
    (0.40, 0.10, 0.516, 0.30, 0.51, 0.60),
)


def test_the_share_recovered_and_where_the_default_is_behind(report: ModuleType) -> None:
    """0.5, 1, -, 0.6, 0.55 of the distance, on average 0.66; 0.4 points behind at the fourth, 0.6 at the fifth."""
    rows = list(report.matrix_rows(quick=True))[: len(RATES)]
    results = {}
    for (_, points), rates in zip(rows, RATES, strict=True):
        for point, rate in zip(points.values(), rates, strict=True):
            results[point] = {"hit_rate": rate, "ideal_hit_rate": 0.99}
    table = report.matrix_table(rows, results)
    lines = table.splitlines()
    assert lines[2].endswith("| 40.0 | 10.0 | 45.0 | 30.0 | 50.0 | 60.0 | 99.0 | 50% |")
    assert [line.split(" | ")[-1] for line in lines[2:7]] == ["50% |", "200% |", " |", "60% |", "55% |"]
    assert "Over the 4 points where `lru` is below 90 %, `default` recovers 66% of" in lines[-1]
    assert lines[-1].endswith("baseline: claude_code_160 kimi-k3 8 4 M (-0.40), claude_code_160 kimi-k3 8 8 M (-0.60).")


def test_every_table_finds_its_place_in_the_document(report: ModuleType) -> None:
    text = report.DOC.read_text()
    for name in report.TABLES:
        assert text.count(f"<!-- {name} -->\n") == text.count(f"<!-- end of {name} -->") == 1


def test_a_broken_off_run_goes_on_where_it_was(report: ModuleType, tmp_path: Path) -> None:
    """Two replays of a trace of two requests; the second run finds both in the file and does none."""
    line = '{"timestamp": %d, "input_length": 1024, "output_length": 2, "hash_ids": [1, 2]}\n'
    trace = tmp_path / "small.jsonl.gz"
    trace.write_bytes(gzip.compress((line % 0 + line % 5000).encode()))
    cache = tmp_path / "results.jsonl"
    points = [report.Point("small", "qwen3-next", seats, 1_000_000, "default") for seats in (1, 2)]
    first = report.Runner(tmp_path, cache, jobs=1).run(points)
    assert [first[point]["hit_rate"] for point in points] == [0.25, 0.25]
    trace.unlink()
    assert report.Runner(tmp_path, cache, jobs=1).run(points) == first

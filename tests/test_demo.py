"""The demo's parts: the ideal cache, the trace reader, the reports, the checks and the script. No model is loaded."""

from __future__ import annotations

import gzip
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from atom.config import EngineConfig
from atom.entrypoints.demo import report, trace_report
from atom.entrypoints.demo.conversation import SCRIPT
from atom.entrypoints.demo.errors import DemoError
from atom.entrypoints.demo.ideal import IdealCache
from atom.entrypoints.demo.play import Report, Result, check
from atom.entrypoints.demo.player import Answer
from atom.entrypoints.demo.trace import read_trace
from atom.entrypoints.demo.trace_play import Played, TraceReport, check_trace

ANSWER = Answer("ab", ("a", "b"), "length", prompt_tokens=300, cached_tokens=0, seconds_to_first_token=0.5)


# The ideal cache


def naive_ideal(prompts: list[list[int]], block: int) -> list[int]:
    """The longest common prefix with any earlier prompt, in whole blocks, with at least one token left to compute."""
    results = []
    for index, prompt in enumerate(prompts):
        best = 0
        for earlier in prompts[:index]:
            common = 0
            while common < min(len(prompt), len(earlier)) and prompt[common] == earlier[common]:
                common += 1
            best = max(best, common)
        results.append(min(best, max(len(prompt) - 1, 0)) // block * block)
    return results


@given(
    st.lists(st.lists(st.integers(0, 1), max_size=24), max_size=12),
    st.integers(1, 5),
)
def test_ideal_is_the_longest_common_prefix_in_blocks(prompts: list[list[int]], block: int) -> None:
    cache = IdealCache(block)
    assert [cache.ask(prompt) for prompt in prompts] == naive_ideal(prompts, block)


def test_ideal_of_a_resend_leaves_one_token_to_compute() -> None:
    cache = IdealCache(4)
    assert [cache.ask([1] * 8), cache.ask([1] * 8), cache.ask([1] * 9)] == [0, 4, 8]


# The trace reader


def line(timestamp: float, session: str, prompt: str) -> str:
    return json.dumps({"timestamp": timestamp, "session_id": session, "input": prompt, "output": "ignored"})


def write(path: Path, lines: list[str], zipped: bool = False) -> Path:
    data = "".join(text + "\n" for text in lines).encode()
    path.write_bytes(gzip.compress(data) if zipped else data)
    return path


TRACE = [line(30, "b", "b1"), line(10, "a", "a1"), line(40, "a", "a2"), line(20, "c", "c1")]


@pytest.mark.parametrize("zipped", [True, False])
def test_trace_is_read_in_the_order_of_time(tmp_path: Path, zipped: bool) -> None:
    path = write(tmp_path / "trace", TRACE, zipped)
    assert [request.input for request in read_trace(path)] == ["a1", "c1", "b1", "a2"]


def test_sessions_are_taken_in_the_order_of_their_first_requests(tmp_path: Path) -> None:
    path = write(tmp_path / "trace", TRACE)
    assert [request.input for request in read_trace(path, 2)] == ["a1", "c1", "a2"]


BAD_LINES = [
    "{",
    "",
    "[]",
    line(1, "a", ""),
    '{"timestamp": 1, "session_id": "a"}',
    '{"timestamp": 1, "input": "x"}',
    '{"session_id": "a", "input": "x"}',
    '{"timestamp": "late", "session_id": "a", "input": "x"}',
]


@pytest.mark.parametrize("bad", BAD_LINES)
@pytest.mark.parametrize("zipped", [True, False])
def test_bad_line_is_refused_with_its_number(tmp_path: Path, bad: str, zipped: bool) -> None:
    path = write(tmp_path / "trace", [*TRACE[:2], bad, *TRACE[2:]], zipped)
    with pytest.raises(DemoError, match=r"trace, line 3: "):
        read_trace(path)


def test_bytes_that_are_no_text_are_refused_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(TRACE[0].encode() + b"\n" + TRACE[1].encode().replace(b"a1", b"\xff") + b"\n")
    with pytest.raises(DemoError, match="line 2"):
        read_trace(path)


def test_cut_off_gzip_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "trace", TRACE, zipped=True)
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(DemoError, match=str(path)):
        read_trace(path)


def test_empty_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match="holds no request"):
        read_trace(write(tmp_path / "empty", []))
    with pytest.raises(DemoError, match="missing: No such file"):
        read_trace(tmp_path / "missing")


# Reports and checks


def conversation(**resent: object) -> Report:
    """A good conversation's report, with changes to the resent request's answer."""
    good = replace(ANSWER, cached_tokens=256, seconds_to_first_token=0.1)
    results = [Result("cold", ANSWER, ANSWER), Result("resent", replace(good, **resent), ANSWER)]
    return Report(results, {"cached_tokens": 256}, ["[Cache Stats] a line"])


def test_conversation_as_json() -> None:
    assert report.as_json(conversation()) == {
        "requests": [
            {"name": "cold", "prompt_tokens": 300, "cached_tokens": 0, "ttft_ms": 500, "same_as_uncached": True},
            {"name": "resent", "prompt_tokens": 300, "cached_tokens": 256, "ttft_ms": 100, "same_as_uncached": True},
        ],
        "cache_stats": {"cached_tokens": 256},
    }


def text_of(table: object) -> str:
    console = Console(width=80, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()


def test_conversation_as_table() -> None:
    row = next(row for row in text_of(report.as_table(conversation())).splitlines() if "resent" in row)
    assert row.split() == ["resent", "300", "256", "100", "ms", "500", "ms", "400", "ms", "yes"]


def test_checks_pass_on_a_good_conversation() -> None:
    check(conversation(), EngineConfig())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"text": "ac"}, "tokens differ.*: resent"),
        ({"tokens": ("ab",)}, "tokens differ.*: resent"),
        ({"finish_reason": "stop"}, "tokens differ.*: resent"),
        ({"cached_tokens": 192}, "resumed 192 tokens instead of 256"),
    ],
)
def test_checks_name_what_is_wrong(change: dict[str, object], told: str) -> None:
    with pytest.raises(DemoError, match=told):
        check(conversation(**change), EngineConfig())


def played(session: str, cached: int, ideal: int, seconds: float, uncached: float | None = None) -> Played:
    answer = replace(ANSWER, cached_tokens=cached, seconds_to_first_token=seconds)
    other = None if uncached is None else replace(ANSWER, seconds_to_first_token=uncached)
    return Played(session, answer, ideal, other)


def test_trace_is_summed_by_session_and_in_all() -> None:
    # A computed token costs 1 ms, every request 100 ms besides: 300, 44 and 172 tokens are computed.
    items = [played("x", 0, 0, 0.4), played("y", 256, 256, 0.144), played("x", 128, 256, 0.272)]
    data = trace_report.as_json(TraceReport(items, {"cached_tokens": 384}))
    assert [row["session"] for row in data["sessions"]] == ["x", "y"]
    assert [row["share_of_ideal"] for row in data["sessions"]] == [0.5, 1.0]
    total = data["total"]
    assert (total["requests"], total["prompt_tokens"], total["cached_tokens"]) == (3, 900, 384)
    assert total["hit_rate"] == pytest.approx(384 / 900) and total["ideal_hit_rate"] == pytest.approx(512 / 900)
    assert total["share_of_ideal"] == 0.75
    assert (data["seconds_saved_are"], total["seconds_saved"]) == ("estimated", pytest.approx(0.384))
    assert data["cache_stats"] == {"cached_tokens": 384}


def test_compared_trace_measures_what_was_saved_and_checks_tokens() -> None:
    data = TraceReport([played("x", 0, 0, 0.4, 0.5), played("x", 256, 256, 0.1, 0.5)])
    report_data = trace_report.as_json(data)
    assert (report_data["seconds_saved_are"], report_data["total"]["seconds_saved"]) == ("measured", pytest.approx(0.5))
    check_trace(data)
    other = replace(ANSWER, text="other")
    data.played[1] = replace(data.played[1], uncached=other)
    with pytest.raises(DemoError, match="1 of 2 requests"):
        check_trace(data)


def test_trace_as_table_fits_80_columns() -> None:
    items = [replace(played("0123456789", 256, 256, 9999.9), answer=replace(ANSWER, prompt_tokens=9_999_999))]
    text = text_of(trace_report.as_table(TraceReport(items * 999)))
    assert "…" not in text and "01234567 " in text


# The script


def test_script_alternates_roles_and_is_long_enough() -> None:
    answers = {turn.name: "an answer" for turn in SCRIPT}
    for turn in SCRIPT:
        roles = [message["role"] for message in turn.messages(answers)]
        roles = roles[1:] if roles[0] == "system" else roles
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"], turn.name
    assert sum(len(message["content"]) for message in SCRIPT[0].messages(answers)) >= 3000

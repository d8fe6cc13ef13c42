"""What ``atom bench`` prints is complete and consistent; how fast anything is decides nothing here."""

from __future__ import annotations

import json

import pytest

from atom.benchmarks import main


def bench(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main(words) == 0
    return json.loads(capsys.readouterr().out)


def test_engine(capsys) -> None:
    data = bench(capsys, "engine", "--quick")
    assert data["running_requests"] == 256 and data["admission_prompt_tokens"] == 131072
    ratio = data["decode_step_large_pool_ms"] / data["decode_step_ms"]
    assert data["decode_step_large_over_small_pool"] == pytest.approx(ratio, rel=0.05)
    rate = data["admission_prompt_tokens"] / data["keys_ms"] / 1e3
    assert data["keys_million_tokens_per_s"] == pytest.approx(rate, rel=0.05)


def test_resume(capsys) -> None:
    data = bench(capsys, "resume", "--threads=1", "--repeats=1", "--prompt-tokens=300")
    assert (data["prompt_tokens"], data["resent_cached_tokens"]) == (300, 256)
    assert data["resent_over_cold"] == pytest.approx(data["resent_ttft_ms"] / data["cold_ttft_ms"], rel=0.01)


def test_checkpoints(capsys) -> None:
    data = bench(capsys, "checkpoints", "--threads=1", "--repeats=1")
    for kind in ("neighbours", "scattered"):
        figures = data["copies"][kind]
        for way in ("store", "restore"):
            speed = figures["memcpy_ms"] / figures[f"{way}_ms"]
            assert figures[f"{way}_over_memcpy_speed"] == pytest.approx(speed, rel=0.05)
    assert data["interior"]["forwards_with_interior_state"] == 1, "a rung costs no forward"


def test_profile(capsys) -> None:
    data = bench(capsys, "profile", "--threads=1", "--prompt-tokens=200")
    shares = list(data["share_of_time"].values())
    assert shares == sorted(shares, reverse=True) and 0.5 < sum(shares) <= 1.001


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (
            ("peer", "--peer-python=/nowhere/python", "--repeats=1", "--prompt-tokens=100", "--rounds=1"),
            "--peer-python",
        ),
        (("resume", "--model=/nowhere/model"), "/nowhere/model"),
    ],
)
def test_failures_are_named(capsys, words, named) -> None:
    assert main(words) == 1
    assert named in capsys.readouterr().err

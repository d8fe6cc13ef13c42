"""``atom replay`` as a command."""

from __future__ import annotations

import json

import pytest

from atom.entrypoints.cli import main
from atom.replay.cli import parse_tokens
from atom.replay.placements import parse_placement


@pytest.fixture(name="trace")
def trace_fixture(tmp_path):
    path = tmp_path / "trace.jsonl"
    text = list(range(900))
    lines = [{"tokens": text[:n], "t": 10.0 * i, "out": 70} for i, n in enumerate((300, 500, 500, 900))]
    lines.append({"tokens": [7] * 640, "t": 50.0})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def ask(capsys, *words) -> tuple[int, str, str]:
    code = main(["replay", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_json(trace, capsys):
    words = (
        "--trace",
        trace,
        "--model-geometry",
        "kimi-k3",
        "--policy",
        "default",
        "lru",
        "--sweep",
        "pool=6k,1M",
        "--json",
    )
    code, out, _ = ask(capsys, *words)
    results = json.loads(out)["results"]
    assert code == 0
    assert [(r["policy"], r["pool_tokens"]) for r in results] == [
        ("default", 5952), ("lru", 5952), ("default", 1_000_000), ("lru", 1_000_000),
    ]  # fmt: skip
    roomy = results[2]
    assert roomy["prompt_tokens"] == 2840 and roomy["requests"] == 5
    # The second has 4 blocks of the first prompt and one of its answer, the third, a resend, all but the last token, and
    # the last the 7 of it and one of its answer.
    assert roomy["hit_rate"] == pytest.approx((5 + 7 + 8) * 64 / 2840)
    assert roomy["ideal_hit_rate"] == pytest.approx((5 + 7 + 8) * 64 / 2840)
    assert roomy["read_back"]["anchor"] == 3
    assert {"trace", "geometry", "seats", "checkpoints_kept", "ttft_p50", "ttft_p90"} <= roomy.keys()
    assert ask(capsys, *words)[1] == out, "two replays are equal"


def test_table_and_explanation(trace, capsys):
    words = ("--trace", trace, "--model-geometry", "qwen3-next", "--pool-gib", "0.02", "--explain", "2")
    code, out, _ = ask(capsys, *words)
    assert code == 0 and "2,840 prompt tokens" in out and "the requests that lost most" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--policy", "best"), "--policy=best: use one of default, guesses-first, lru"),
        (("--placement", "everywhere"), "--placement=everywhere: use default"),
        (("--sweep", "seats=1"), "--sweep=seats=1: use e.g. pool="),
        (("--pool-tokens", "many"), "--pool-tokens=many: use a number of tokens"),
        (("--pool-tokenz", "1"), "did you mean --pool-tokens?"),
        (("--seats", "0"), "--seats=0: use 1 or more"),
        (("--prefill-rate", "0"), "--prefill-rate=0.0: use a number above 0"),
        (("--block-size", "0"), "--block-size=0: use 1 or more"),
        (("--ranks", "5"), "--ranks=5: use 1, 2, 4, 8 or 16"),
    ],
)
def test_settings_that_cannot_be_used(trace, capsys, words, message):
    try:
        code, _, err = ask(capsys, "--trace", trace, "--model-geometry", "kimi-k3", *words)
    except SystemExit as refused:
        code, err = refused.code, capsys.readouterr().err
    assert code == 2 and message in err and len(err.splitlines()) == 1


def test_a_bad_trace_is_refused_with_its_line(tmp_path, capsys):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"tokens": [1]}\n{"tokens": 1}\n')
    code, _, err = ask(capsys, "--trace", str(path), "--model-geometry", "kimi-k3")
    assert code == 2 and "bad.jsonl:2: " in err
    code, _, err = ask(capsys, "--trace", str(tmp_path / "none"), "--model-geometry", "kimi-k3")
    assert code == 1 and "none" in err


def test_numbers_of_tokens():
    assert [parse_tokens("x", text) for text in ("64", "1.5M", "2k", "1G")] == [64, 1_500_000, 2000, 10**9]


def test_placements():
    default = parse_placement("default", 64)
    assert (default.prompts, default.answers, default.demand, default.interval) == (True, True, True, 8192)
    anchors = parse_placement("anchor", 64)
    assert (anchors.prompts, anchors.answers, anchors.demand, anchors.interval) == (True, True, False, None)
    ladder = parse_placement("interval=2000", 64)
    assert (ladder.prompts, ladder.answers, ladder.interval) == (False, False, 1984)
    assert not parse_placement("none", 64).enabled


def test_plots(trace, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"
    words = ("--sweep", "pool=6k,20k", "--policy", "default", "lru", "--plot", str(path))
    assert ask(capsys, "--trace", trace, "--model-geometry", "kimi-k3", *words)[0] == 0
    assert path.read_bytes().startswith(b"\x89PNG")

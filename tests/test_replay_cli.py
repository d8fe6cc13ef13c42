"""``atom replay`` as a command."""

from __future__ import annotations

import json

import pytest

from atom.entrypoints.cli import main
from atom.replay import cli, plots
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


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            (),
            [("default", 64), ("prompt+demand", 2048), ("prompt+answer+demand", 64), ("answer+demand", 64)],
        ),
        (("--placement", "anchor"), [("anchor", 64), ("anchor", 2048), ("anchor", 64), ("anchor", 64)]),
        (
            ("--placement", "default", "--block-multiple", "3"),
            [("default", 192), ("default", 2112), ("default", 192), ("default", 192)],
        ),
    ],
)
def test_policies_come_with_the_placement_and_blocks_of_their_engines(trace, capsys, words, expected):
    """A state takes 32 blocks of 64 tokens, and 11 of 192. A placement that is given holds for all."""
    policies = ("--policy", "lru", "vllm-align", "sglang", "marconi", "--json")
    code, out, _ = ask(capsys, "--trace", trace, "--model-geometry", "kimi-k3", *policies, *words)
    assert code == 0
    assert [(r["placement"], r["block_size"]) for r in json.loads(out)["results"]] == expected


def test_table_and_explanation(trace, capsys):
    words = (
        "--trace",
        trace,
        "--model-geometry",
        "qwen3-next",
        "--pool-gib",
        "0.1",
        "--placement",
        "none",
        "--explain",
        "2",
    )
    code, out, _ = ask(capsys, *words)
    assert code == 0 and "2,840 prompt tokens" in out and "the requests that lost most" in out
    assert "448: no state had been kept there" in out


def test_json_has_the_explanation(trace, capsys):
    """Without checkpoints the fourth loses 8 blocks of 64, the third 7, the second 5, the others nothing."""
    words = ("--trace", trace, "--model-geometry", "kimi-k3", "--placement", "none", "--json")
    plain, two, all_ = (json.loads(ask(capsys, *words, "--explain", n)[1])["results"][0] for n in ("0", "2", "9"))
    assert "explained" not in plain
    assert two == plain | {"explained": all_["explained"][:2]}
    assert [(e["request"], e["lost_tokens"]) for e in all_["explained"]] == [(3, 512), (2, 448), (1, 320)]
    assert two["explained"][1] == {
        "request": 2,
        "session": 0,
        "prompt_tokens": 500,
        "ideal_tokens": 448,
        "matched_tokens": 448,
        "resumed_tokens": 0,
        "lost_tokens": 448,
        "lost": {"missing_checkpoint": 448, "eviction": 0, "beyond_repair": 0},
        "refused": False,
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--policy", "best"), "--policy=best: use one of default, guesses-first, lru"),
        (("--placement", "everywhere"), "--placement=everywhere: use default"),
        (("--placement", ""), "--placement=: use default"),
        (("--placement", "prompt="), "--placement=prompt=: use default"),
        (("--placement", "interval="), "--placement=interval=: use default"),
        (("--placement", "interval=²"), "--placement=interval=²: use default"),
        (("--placement", "interval=" + "9" * 5000), "9: use default"),
        (
            ("--placement", "interval=0"),
            "--placement=interval=0: 0 tokens are less than a block; use interval=64 or more",
        ),
        (("--placement", "prompt+interval=10"), "10 tokens are less than a block; use interval=64 or more"),
        (
            ("--placement", "interval", "--block-multiple", "129"),
            "--placement=interval: 8192 tokens are less than a block; use interval=8256 or more",
        ),
        (("--placement", "prompt+prompt"), "--placement=prompt+prompt: prompt is there twice"),
        (("--sweep", "seats=1"), "--sweep=seats=1: use e.g. pool="),
        (("--sweep", ""), "--sweep=: use e.g. pool="),
        (("--sweep", "pool="), "--sweep=pool=: '' is no number of tokens; use one such as 2M"),
        (("--sweep", "pool=1M,x"), "--sweep=pool=1M,x: 'x' is no number of tokens; use one such as 2M"),
        (("--sweep", "pool=1M,64"), "--sweep=pool=1M,64: a block is 64 tokens"),
        (("--sweep", "pool=1M", "--pool-gib", "1"), "--pool-gib=1.0 and --sweep=pool=1M: use one of them"),
        (("--pool-tokens", "2M", "--pool-gib", "1"), "--pool-tokens=2M and --pool-gib=1.0: use one of them"),
        (("--pool-tokens", "many"), "--pool-tokens=many: 'many' is no number of tokens; use one such as 2M"),
        (("--pool-tokens", "64"), "--pool-tokens=64: a block is 64 tokens, and it and an image take 33 blocks; use at"),
        (("--pool-tokens", "1e300"), "--pool-tokens=1e300: use at most 100,000,000 blocks, that is 6400000000 tokens"),
        (("--pool-tokenz", "1"), "did you mean --pool-tokens?"),
        (("--pool-gib", "1e-8"), "--pool-gib=1e-08: a block is 64 tokens"),
        (("--pool-gib", "1e308"), "--pool-gib=1e+308: use 0 to 1,000,000,000"),
        (("--pool-gib", "nan"), "--pool-gib=nan: use 0 to 1,000,000,000"),
        (("--block-multiple", "99999999"), "--block-multiple=99999999: use 1 to 1,000,000"),
        (
            ("--block-multiple", "100000"),
            "--pool-tokens=2M: a block is 6400000 tokens, and it and an image take 2 blocks",
        ),
        (("--policy", "vllm-align", "--pool-tokens", "2112"), "--pool-tokens=2112: a block is 2048 tokens"),
        (("--seats", "0"), "--seats=0: use 1 to 1,000,000"),
        (("--seats", "99999999"), "--seats=99999999: use 1 to 1,000,000"),
        (("--prefill-rate", "0"), "--prefill-rate=0.0: use 0.001 to "),
        (("--decode-ms", "1e-300"), "--decode-ms=1e-300: use 1e-06 to "),
        (("--restore-gbps", "1e-300"), "--restore-gbps=1e-300: use 1e-06 to "),
        (("--block-size", "0"), "--block-size=0: use 1 to 1,000,000"),
        (("--ranks", "5"), "--ranks=5: use 1, 2, 4, 8 or 16"),
        (("--explain", "-1"), "--explain=-1: use 0 to "),
        (("--sessions", "2"), "--sessions=2: trace.jsonl has no sessions"),
        (("--seed", "2"), "--seed=2: trace.jsonl has no sessions"),
        (("--tokenizer", "/no/folder"), "--tokenizer=/no/folder: use the folder of a model or tokenizer"),
        (("--plot", ""), "--plot=.: use the name of a file that ends in .png, .svg, .pdf"),
        (("--plot", "x.xyz"), "--plot=x.xyz: use the name of a file that ends in .png, .svg, .pdf"),
        (("--plot", "/no/folder/x.png"), "--plot=/no/folder/x.png: there is no folder /no/folder"),
    ],
)
def test_settings_that_cannot_be_used(trace, capsys, monkeypatch, words, message):
    monkeypatch.setattr(cli, "replay", None)
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


def test_flags_that_say_nothing_to_the_trace_are_refused(tmp_path, capsys):
    path = tmp_path / "mooncake.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}\n')
    words = ("--trace", str(path), "--model-geometry", "kimi-k3", "--block-size")
    code, _, err = ask(capsys, *words, "64")
    assert code == 2 and "--block-size=64: mooncake.jsonl has blocks of 512 tokens; use --block-multiple" in err
    assert ask(capsys, *words, "512")[0] == 0


def test_a_folder_without_tokenizer_is_refused_in_one_line(tmp_path, capsys, monkeypatch):
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "a"}\n')

    def fail(folder):
        raise ValueError("no usable tokenizer:\nmany words")

    monkeypatch.setattr("atom.tokenizer.Tokenizer", fail)
    code, _, err = ask(capsys, "--trace", str(path), "--model-geometry", "kimi-k3", "--tokenizer", str(tmp_path))
    assert code == 2 and err.endswith(f"text.jsonl:1: --tokenizer={tmp_path}: no usable tokenizer: many words\n")


def test_the_smallest_pool_that_a_refusal_names_is_enough(trace, capsys):
    for pool in (("--pool-tokens", "2112"), ("--pool-gib", "0.055")):
        assert ask(capsys, "--trace", trace, "--model-geometry", "kimi-k3", *pool)[0] == 0


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
    assert parse_placement("default", 16384).interval is None
    assert parse_placement("interval=64", 64).interval == 64


def test_plots(trace, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"
    words = ("--sweep", "pool=6k,20k", "--policy", "default", "lru", "--plot", str(path))
    assert ask(capsys, "--trace", trace, "--model-geometry", "kimi-k3", *words)[0] == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_plot_that_could_not_be_written_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "plot.png"
    monkeypatch.setattr(plots.os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match=r"--plot=.*plot.png: may not be written"):
        plots.check(path)
    path.mkdir()
    with pytest.raises(ValueError, match=r"--plot=.*plot.png: use the name of a file"):
        plots.check(path)

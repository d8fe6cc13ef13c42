"""The command line: both spellings of every flag, one clear line for what cannot be used, and cheap help."""

from __future__ import annotations

import json
import runpy
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import atom
from atom.config import EngineConfig
from atom.entrypoints import commands
from atom.entrypoints.arguments import as_flags, flag_name, kind_of, read_settings, with_hyphens
from atom.entrypoints.cli import main, make_parser
from atom.entrypoints.planned_engine import planned_info
from atom.entrypoints.server_config import ServerConfig
from atom.model_engine.engine_core import EngineCore

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = [(kind, item) for kind in (EngineConfig, ServerConfig) for item in fields(kind)]
SMALL = ["--kv-cache-memory=32MiB", "--max-model-len=512", "--max-num-seqs=2", "--threads=1"]


def parse(*words: str) -> dict[str, object]:
    args = make_parser().parse_args(with_hyphens(["serve", *words]))
    return read_settings(args, EngineConfig) | read_settings(args, ServerConfig)


def spellings(name: str) -> list[str]:
    return [flag_name(name), f"--{name}"]


@pytest.mark.parametrize("name", [item.name for _, item in SETTINGS])
def test_every_flag_is_taken_in_both_spellings(name: str) -> None:
    item = next(item for _, item in SETTINGS if item.name == name)
    if kind_of(item) is bool:
        for flag in spellings(name):
            assert parse(flag) == {name: True}
        for flag in (*spellings(f"no_{name}"), f"--no-{name}"):
            assert parse(flag) == {name: False}
        return
    value: object = 7 if kind_of(item) is int else "a_text--with_underscores"
    for flag in spellings(name):
        assert parse(flag, str(value)) == parse(f"{flag}={value}") == {name: value}


def test_only_given_flags_are_settings() -> None:
    assert parse() == {}


def test_words_after_a_bare_double_hyphen_stay_as_they_are() -> None:
    assert with_hyphens(["--a_b=c_d", "e_f", "--", "--g_h"]) == ["--a-b=c_d", "e_f", "--", "--g_h"]
    args = make_parser().parse_args(with_hyphens(["generate", "--", "--my_text"]))
    assert args.text == "--my_text"


def test_flags_made_from_settings_read_back() -> None:
    settings = {"block_size": 32, "model": "a folder", "enable_prefix_caching": False, "kv_cache_memory": "1GiB"}
    assert parse(*as_flags(settings)) == settings


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    try:
        code = main(words)
    except SystemExit as end:
        code = end.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["serve", "--block_size=x"], ["--block-size=x", "whole number"]),
        (["serve", "--block-size", "0"], ["--block-size=0", "use 1 or more"]),
        (["serve", "--port=99999"], ["--port=99999", "65535"]),
        (["serve", "--log-level=LOUD"], ["--log-level=LOUD", "WARNING"]),
        (["serve", "--host="], ["--host=", "127.0.0.1"]),
        (["config", "--device=abacus"], ["--device=abacus", "cpu, cuda"]),
        (["config", "--num-kvcache-blocks=1"], ["--num-kvcache-blocks=1", "needs 1024"]),
        (["config", "--model=/nowhere"], ["/nowhere"]),
        (["config", "--kv-cache-memory=lots"], ["--kv-cache-memory=lots", "4GiB"]),
        (["generate", "text", "--temperature=-1"], ["temperature=-1", "0 or more"]),
        (["generate", "text", "--max-tokens=many"], ["--max-tokens", "many"]),
        (["demo", "--sessions=2"], ["--sessions=2", "--trace"]),
        (["demo", "--no-enable-prefix-caching"], ["--enable-prefix-caching=False", "leave it out"]),
        (["demo", "--trace=x", "--sessions=0"], ["--sessions=0", "1 or more"]),
        (["serve", "--blok-size=3"], ["--blok-size", "did you mean --block-size?"]),
        (["serve", "--block=3"], ["--block is not understood"]),
        (["serve", "surplus"], ["surplus", "atom serve --help"]),
        (["brew"], ["brew", "serve"]),
    ],
    ids=" ".join,
)
def test_what_cannot_be_used_is_refused_in_one_line(capsys, words: list[str], told: list[str]) -> None:
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith("atom") and err.count("\n") == 1
    for text in told:
        assert text in err


def test_no_command_shows_help(capsys) -> None:
    code, _, err = run(capsys)
    assert code == 2 and "generate" in err


def test_version(capsys) -> None:
    assert run(capsys, "--version")[:2] == (0, f"atom {atom.__version__}\n")


def test_interrupt_exits_with_130(capsys, monkeypatch) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "run_config", interrupted)
    assert run(capsys, "config") == (130, "", "")


def test_bench_gets_its_own_words(monkeypatch) -> None:
    from atom import benchmarks

    seen = []
    monkeypatch.setattr(benchmarks, "main", lambda words: seen.append(words) or 0)
    assert main(["bench", "engine", "--some_flag=a_b"]) == 0
    assert seen == [["engine", "--some-flag=a_b"]]


def test_an_address_in_use_is_named(capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = run(capsys, "serve", f"--port={port}")
    assert code == 1 and f"127.0.0.1 port {port}" in err and "--port=0" in err


@pytest.mark.parametrize("command", ["", "serve", "generate", "demo", "config"])
def test_help_imports_neither_torch_nor_transformers(command: str) -> None:
    program = (
        "import sys\nfrom atom.entrypoints.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    words = [command, "--help"] if command else ["--help"]
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "usage: atom" in done.stdout


def test_config_prints_what_would_take_effect(capsys) -> None:
    code, out, _ = run(capsys, "config", "--json", "--block_size=32", "--state-checkpoint-interval-tokens=100", *SMALL)
    settings = json.loads(out)
    assert code == 0
    assert settings["block_size"] == 32
    assert settings["state_checkpoint_interval_tokens"] == 96, "as it takes effect, not as it was asked for"
    assert settings["kv_cache_memory"] == 32 << 20
    assert {item.name for item in fields(EngineConfig)} <= settings.keys()


def test_config_marks_what_flags_set(capsys) -> None:
    _, out, _ = run(capsys, "config", *SMALL)
    rows = {words[1]: line for line in out.splitlines() if len(words := line.split()) > 2}
    assert "flag" in rows["max_model_len"] and "512" in rows["max_model_len"]
    assert "flag" not in rows["block_size"]


@pytest.mark.parametrize("caching", [True, False])
def test_planned_settings_are_those_of_the_loaded_engine(caching: bool) -> None:
    config = EngineConfig(kv_cache_memory="32MiB", max_model_len=512, threads=1, enable_prefix_caching=caching)
    core = EngineCore(config)
    assert planned_info(config) == core.info()


def test_generate_prints_a_continuation(capsys) -> None:
    code, out, _ = run(capsys, "generate", "def add(a, b):", "--max_tokens=5", "--json", *SMALL)
    report = json.loads(out)
    assert code == 0
    assert len(report["token_ids"]) == 5 and report["finish_reason"] == "length"
    assert (report["prompt_tokens"], report["cached_tokens"]) == (14, 0)
    assert run(capsys, "generate", "def add(a, b):", "--max-tokens=5", *SMALL)[:2] == (0, report["text"] + "\n")


def test_configuration_page_is_up_to_date() -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "make_config_docs.py"))["render"]()
    assert (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8") == page, "run: make docs"

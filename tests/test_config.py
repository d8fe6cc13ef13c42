"""Settings are refused with the flag, the value and one that works."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from atom.config import ConfigError, EngineConfig
from atom.entrypoints.cli import main
from atom.sampling_params import SamplingParams
from atom.utils.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("name", "value", "works"),
    [
        ("block_size", 0, "64"),
        ("block_size", "64", "int"),
        ("max_num_seqs", 0, "32"),
        ("max_num_seqs", True, "int"),
        ("max_num_batched_tokens", 8, "--max-num-seqs=32"),
        ("dtype", "int8", "bfloat16"),
        ("device", "tpu", "cpu"),
        ("threads", -1, "0"),
        ("threads", 100_000, "1024"),
        ("record_trace", "", "a file"),
        ("record_trace", "/", "a file"),
        ("kv_cache_memory", "lots", "4GiB"),
        ("kv_cache_memory", 0, "1GiB"),
        ("num_kvcache_blocks", 0, "1 or more"),
        ("max_model_len", 1, "2 or more"),
        ("state_checkpoint_slots", -1, "0 or more"),
        ("state_checkpoint_interval_tokens", -2, "8192"),
        ("cache_stats_interval", -1, "0"),
        ("prefix_hash", "md5", "sha256"),
        ("enable_prefix_caching", "yes", "bool"),
        ("state_checkpoint_backend", "disk", "auto, page, slot"),
        ("state_checkpoint_slots", 8, "--state-checkpoint-backend=slot"),
        ("state_checkpoint_demand", 1, "bool"),
        ("state_checkpoint_demand", "on", "bool"),
        ("speculative_config", 3, "str"),
        ("speculative_config", "{", '"num_speculative_tokens": 3'),
        ("speculative_config", "3", '"num_speculative_tokens": 3'),
        ("speculative_config", "[]", '"num_speculative_tokens": 3'),
        ("speculative_config", {}, '"num_speculative_tokens": 3'),
        ("speculative_config", {"num_speculative_tokens": 0}, "from 1 to 16"),
        ("speculative_config", {"num_speculative_tokens": 17}, "from 1 to 16"),
        ("speculative_config", {"num_speculative_tokens": 2.0}, "from 1 to 16"),
        ("speculative_config", {"num_speculative_tokens": True}, "from 1 to 16"),
        ("speculative_config", {"num_speculative_tokens": "3"}, "from 1 to 16"),
        ("speculative_config", {"num_speculative_tokens": 3, "method": "eagle"}, '"method": "ngram"'),
        ("speculative_config", {"num_speculative_tokens": 3, "model": "small"}, '"method": "ngram"'),
        (
            "speculative_config",
            {"num_speculative_tokens": 3, "prompt_lookup_min": 5},
            "prompt_lookup_min at most prompt_lookup_max",
        ),
    ],
)
def test_refused(name: str, value: object, works: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**{name: value})
    flag = "--" + name.replace("_", "-")
    assert str(caught.value).startswith(f"{flag}={value}: ")
    assert works in str(caught.value)


@pytest.mark.parametrize("kind", [str, dict])
def test_speculation_is_completed(kind: type) -> None:
    """From the command line as text, from Python as a dict; the same settings again are the same."""
    given = (
        '{"num_speculative_tokens": 3, "prompt_lookup_max": 5}'
        if kind is str
        else {
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 5,
        }
    )
    config = EngineConfig(speculative_config=given)
    assert config.speculative_config == {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 5,
        "prompt_lookup_min": 2,
    }
    assert config.num_speculative_tokens == 3 and EngineConfig().num_speculative_tokens == 0
    assert replace(config, seed=1).speculative_config == config.speculative_config


@pytest.mark.parametrize(
    ("variable", "flag", "placed"),
    [
        (None, None, True),
        ("1", None, True),
        ("0", None, False),
        ("false", None, False),
        ("OFF", None, False),
        ("0", True, True),
        ("1", False, False),
    ],
)
def test_demand_follows_the_flag_then_the_variable(
    variable: str | None, flag: bool | None, placed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ATOM_STATE_CHECKPOINT_DEMAND", raising=False)
    if variable is not None:
        monkeypatch.setenv("ATOM_STATE_CHECKPOINT_DEMAND", variable)
    assert EngineConfig(state_checkpoint_demand=flag).places_demand == placed


@pytest.mark.parametrize(
    ("text", "count"),
    [("4GiB", 4 << 30), ("1.5 MiB", 3 << 19), ("800M", 800_000_000), ("12", 12), ("2kb", 2000), (7, 7)],
)
def test_sizes(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count
    assert EngineConfig(kv_cache_memory=text).kv_cache_memory == count


def test_format_bytes() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1536, 5 << 30)] == ["0 B", "1023 B", "1.50 KiB", "5.00 GiB"]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"n": 0}, "n=0"),
        ({"temperature": -1}, "temperature=-1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 0}, "top_p=0"),
        ({"top_k": -2}, "top_k=-2"),
        ({"min_p": 1.5}, "min_p=1.5"),
        ({"presence_penalty": 3}, "presence_penalty=3"),
        ({"frequency_penalty": float("inf")}, "frequency_penalty=inf"),
        ({"repetition_penalty": 0}, "repetition_penalty=0"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"min_tokens": 20}, "min_tokens=20"),
        ({"logprobs": 21}, "logprobs=21"),
        ({"stop": [""]}, "stop="),
        ({"logit_bias": {5: 101}}, r"logit_bias\[5\]=101"),
    ],
)
def test_sampling_refused(settings: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        SamplingParams(**settings)


@pytest.mark.parametrize("settings", [{"stop_token_ids": [-1]}, {"stop_token_ids": [100]}, {"logit_bias": {100: 1}}])
def test_ids_outside_the_vocabulary(settings: dict) -> None:
    with pytest.raises(ValueError, match="from 0 to 99"):
        SamplingParams(**settings).check_vocabulary(100)


@pytest.mark.parametrize(
    ("flags", "placed"),
    [([], False), (["--state-checkpoint-demand"], True), (["--no-state-checkpoint-demand"], False)],
)
def test_the_command_line_sets_what_it_names(
    flags: list[str], placed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """`atom config` says what would take effect: the flag wins over the variable, which here says no."""
    monkeypatch.setenv("ATOM_STATE_CHECKPOINT_DEMAND", "0")
    speculation = '--speculative-config={"method": "ngram", "num_speculative_tokens": 2}'
    backend = "--state-checkpoint-backend=slot"
    words = ["config", "--json", "--max-model-len=512", "--kv-cache-memory=32MiB", speculation, backend, *flags]
    assert main(words) == 0
    settings = json.loads(capsys.readouterr().out)
    assert settings["state_checkpoint_demand"] is placed
    assert settings["state_checkpoint_backend"] == "slot"
    assert settings["num_speculative_tokens"] == 2

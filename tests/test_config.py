"""Settings are refused with the flag, the value and one that works."""

from __future__ import annotations

import pytest

from atom.config import ConfigError, EngineConfig
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
        ("kv_cache_memory", "lots", "4GiB"),
        ("kv_cache_memory", 0, "1GiB"),
        ("num_kvcache_blocks", 0, "1 or more"),
        ("max_model_len", 1, "2 or more"),
        ("state_checkpoint_slots", -1, "0 or more"),
        ("state_checkpoint_interval_tokens", -2, "8192"),
        ("cache_stats_interval", -1, "0"),
        ("prefix_hash", "md5", "sha256"),
        ("enable_prefix_caching", "yes", "bool"),
    ],
)
def test_refused(name: str, value: object, works: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**{name: value})
    flag = "--" + name.replace("_", "-")
    assert str(caught.value).startswith(f"{flag}={value}: ")
    assert works in str(caught.value)


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

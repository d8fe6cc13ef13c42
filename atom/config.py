"""Every setting of the engine, validated once; the command line and the reference page are made from these fields."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from atom.utils.envs import STATE_CHECKPOINT_DEMAND
from atom.utils.units import parse_bytes

SHIPPED_MODEL = str(Path(__file__).parent / "shipped_model")
FREE_MEMORY_SHARE = 0.25
MAX_THREADS = 1024


def setting(default: Any, help: str, choices: tuple[str, ...] | None = None, metavar: str | None = None) -> Any:
    """A dataclass field with what the command line and the docs say of it."""
    return field(default=default, metadata={"help": help, "choices": choices, "metavar": metavar})


class ConfigError(ValueError):
    """A setting that cannot be used; the text names the flag, its value and one that works."""

    def __init__(self, name: str, value: object, works: str) -> None:
        super().__init__(f"--{name.replace('_', '-')}={value}: {works}")


@dataclass
class EngineConfig:
    """Settings of one engine. Raises :class:`ConfigError` on a value that cannot be used."""

    model: str = setting(SHIPPED_MODEL, "Local folder of the model, in the Hugging Face layout.", metavar="FOLDER")
    tokenizer: str | None = setting(None, "Folder of the tokenizer; default: the model's.", metavar="FOLDER")
    served_model_name: str | None = setting(None, "Name in the API; default: the folder's name.", metavar="NAME")
    device: str = setting("cpu", "Where the forward runs.", choices=("cpu", "cuda"))
    dtype: str = setting(
        "auto",
        "Type of weights and KV; auto takes the model's own.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    threads: int = setting(0, "Threads a forward uses on a CPU; 0: the cores this process may use.", metavar="N")
    seed: int = setting(0, "Seed of requests that bring none.", metavar="N")
    block_size: int = setting(64, "Tokens a block: the unit of prefix hashing and sharing.", metavar="N")
    num_kvcache_blocks: int | None = setting(
        None, "Pages in the KV arena; default: what --kv-cache-memory holds.", metavar="N"
    )
    kv_cache_memory: str | int | None = setting(
        None,
        f"Memory for pages and slots, e.g. 4GiB; default: {FREE_MEMORY_SHARE:.0%} of the memory that is free at start.",
        metavar="SIZE",
    )
    state_checkpoint_backend: str = setting(
        "auto",
        "Where state checkpoints are kept: as images in pages, from the pool that holds KV, or as slots of their own; "
        "auto is page.",
        choices=("auto", "page", "slot"),
    )
    state_checkpoint_slots: int | None = setting(
        None,
        "With --state-checkpoint-backend=slot: slots for checkpoints beside those of running requests; default: up to "
        "half of the memory, at most one a page.",
        metavar="N",
    )
    max_num_seqs: int = setting(32, "Requests that run at the same time.", metavar="N")
    max_num_batched_tokens: int = setting(2048, "Tokens one forward computes at most.", metavar="N")
    max_model_len: int | None = setting(
        None, "Longest prompt plus answer in tokens; default: the model's own limit.", metavar="N"
    )
    enable_prefix_caching: bool = setting(True, "Resume shared prefixes instead of recomputing them.")
    state_checkpoint_interval_tokens: int = setting(
        8192,
        "Keep a state every N tokens of a prompt (snapped down to the block grid); -1: no ladder, the prompt's end is "
        "still kept; 0: no state checkpoints.",
        metavar="N",
    )
    state_checkpoint_demand: bool | None = setting(
        None,
        "Keep a state at a boundary where a request was refused for want of one; default: on, or what "
        "ATOM_STATE_CHECKPOINT_DEMAND says. Off, the loss is still measured.",
    )
    speculative_config: str | dict | None = setting(
        None,
        'Guess tokens ahead and verify them in one forward, e.g. {"method": "ngram", "num_speculative_tokens": 3}; '
        "optional keys: prompt_lookup_max, prompt_lookup_min.",
        metavar="JSON",
    )
    prefix_hash: str = setting(
        "xxh3_128", "Hash of block keys; sha256 where tenants do not trust each other.", choices=("xxh3_128", "sha256")
    )
    report_cache_miss_reason: bool = setting(
        False,
        "Say in a request's usage why it resumed less than it might have (prompt_tokens_details.cache_miss_reason).",
    )
    record_trace: str | None = setting(
        None,
        "Write a line for every request served (times, lengths, block keys, no text) that atom replay reads.",
        metavar="FILE",
    )
    cache_stats_interval: int = setting(100, "Log [Cache Stats] every N finished requests; 0: never.", metavar="N")

    def __post_init__(self) -> None:
        self._check_types()
        _require(0 <= self.threads <= MAX_THREADS, "threads", self.threads, f"use 0 (all cores) or up to {MAX_THREADS}")
        _require(self.block_size >= 1, "block_size", self.block_size, "use 1 or more, e.g. 64")
        _require(self.max_num_seqs >= 1, "max_num_seqs", self.max_num_seqs, "use 1 or more, e.g. 32")
        _require(
            self.max_num_batched_tokens >= self.max_num_seqs,
            "max_num_batched_tokens",
            self.max_num_batched_tokens,
            f"each running request needs a token a step; use at least --max-num-seqs={self.max_num_seqs}",
        )
        for name, low in (("num_kvcache_blocks", 1), ("max_model_len", 2), ("state_checkpoint_slots", 0)):
            value = getattr(self, name)
            _require(value is None or value >= low, name, value, f"use {low} or more, or leave it out")
        interval = self.state_checkpoint_interval_tokens
        _require(interval >= -1, "state_checkpoint_interval_tokens", interval, "use -1, 0 or a count such as 8192")
        _require(self.cache_stats_interval >= 0, "cache_stats_interval", self.cache_stats_interval, "use 0 or more")
        _require(
            self.state_checkpoint_slots is None or self.state_checkpoint_backend == "slot",
            "state_checkpoint_slots",
            self.state_checkpoint_slots,
            "images in pages take no slots; use --state-checkpoint-backend=slot or leave it out",
        )
        _require(
            self.record_trace is None or self.enable_prefix_caching,
            "record_trace",
            self.record_trace,
            "without prefix caching there are no block keys to write; leave one of the two out",
        )
        _require(
            self.record_trace is None or _can_be_file(self.record_trace),
            "record_trace",
            self.record_trace,
            "use a file in a folder that exists",
        )
        self.speculative_config = _speculative(self.speculative_config)
        if self.kv_cache_memory is not None:
            try:
                self.kv_cache_memory = parse_bytes(self.kv_cache_memory)
            except ValueError as error:
                raise ConfigError("kv_cache_memory", self.kv_cache_memory, str(error)) from None
            _require(self.kv_cache_memory > 0, "kv_cache_memory", self.kv_cache_memory, "use a size such as 1GiB")

    def _check_types(self) -> None:
        for item in fields(self):
            value, annotation = getattr(self, item.name), str(item.type)
            if value is None and "None" in annotation:
                continue
            wanted = [kind for kind in (bool, int, str, dict) if kind.__name__ in annotation]
            good = isinstance(value, tuple(wanted)) and (bool in wanted or not isinstance(value, bool))
            _require(good, item.name, value, f"use a value of type {annotation}")
            choices = item.metadata["choices"]
            _require(not choices or value in choices, item.name, value, f"use one of {', '.join(choices or ())}")

    @property
    def num_speculative_tokens(self) -> int:
        """Tokens guessed ahead at most; 0 without speculation."""
        settings = self.speculative_config
        return int(settings["num_speculative_tokens"]) if isinstance(settings, dict) else 0

    @property
    def places_demand(self) -> bool:
        """Whether demand rungs are placed: the flag, else the environment, else yes."""
        if self.state_checkpoint_demand is not None:
            return self.state_checkpoint_demand
        return STATE_CHECKPOINT_DEMAND.get().lower() not in ("0", "false", "no", "off")

    @property
    def num_threads(self) -> int:
        """Threads of a forward, with 0 resolved to the cores that this process may use."""
        return self.threads or len(os.sched_getaffinity(0))

    @property
    def model_name(self) -> str:
        """Name of the model in the API and in block keys."""
        return self.served_model_name or Path(self.model).resolve().name


def _can_be_file(path: str) -> bool:
    return bool(path) and Path(path).parent.is_dir() and not Path(path).is_dir()


def _speculative(value: str | dict | None) -> dict[str, object] | None:
    """Validated settings of speculation with every key present."""
    if value is None:
        return None
    name, example = "speculative_config", '{"method": "ngram", "num_speculative_tokens": 3}'
    try:
        given = json.loads(value) if isinstance(value, str) else dict(value)
    except json.JSONDecodeError:
        raise ConfigError(name, value, f"not JSON; use e.g. {example}") from None
    defaults = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    settings = {**defaults, **given} if isinstance(given, dict) else {}
    good = settings.keys() == defaults.keys() | {"num_speculative_tokens"} and settings["method"] == "ngram"
    counts = [settings.get(key) for key in ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")]
    good = good and all(type(count) is int and 1 <= count <= 16 for count in counts) and counts[2] <= counts[1]
    _require(good, name, value, f"use e.g. {example}, counts from 1 to 16, prompt_lookup_min at most prompt_lookup_max")
    return settings


def _require(condition: bool, name: str, value: object, works: str) -> None:
    if not condition:
        raise ConfigError(name, value, works)

"""Every setting of the engine, validated once; the command line and the reference page are made from these fields."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from atom.utils.units import parse_bytes

SHIPPED_MODEL = str(Path(__file__).parent / "shipped_model")
FREE_MEMORY_SHARE = 0.25


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
    state_checkpoint_slots: int | None = setting(
        None,
        "Slots for state checkpoints beside those of running requests; default: up to half of the memory, "
        "at most one a page.",
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
    prefix_hash: str = setting(
        "xxh3_128", "Hash of block keys; sha256 where tenants do not trust each other.", choices=("xxh3_128", "sha256")
    )
    cache_stats_interval: int = setting(100, "Log [Cache Stats] every N finished requests; 0: never.", metavar="N")

    def __post_init__(self) -> None:
        self._check_types()
        _require(self.threads >= 0, "threads", self.threads, "use 0 (all cores) or a count")
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
            wanted = [kind for kind in (bool, int, str) if kind.__name__ in annotation]
            good = isinstance(value, tuple(wanted)) and (bool in wanted or not isinstance(value, bool))
            _require(good, item.name, value, f"use a value of type {annotation}")
            choices = item.metadata["choices"]
            _require(not choices or value in choices, item.name, value, f"use one of {', '.join(choices or ())}")

    @property
    def num_threads(self) -> int:
        """Threads of a forward, with 0 resolved to the cores that this process may use."""
        return self.threads or len(os.sched_getaffinity(0))

    @property
    def model_name(self) -> str:
        """Name of the model in the API and in block keys."""
        return self.served_model_name or Path(self.model).resolve().name


def _require(condition: bool, name: str, value: object, works: str) -> None:
    if not condition:
        raise ConfigError(name, value, works)

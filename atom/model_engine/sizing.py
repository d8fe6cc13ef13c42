"""How many pages and slots a memory budget holds: pure arithmetic, refused with a number that works."""

from __future__ import annotations

from dataclasses import dataclass

from atom.config import FREE_MEMORY_SHARE, ConfigError, EngineConfig
from atom.model_engine.cache_layout import CacheLayout
from atom.utils.units import format_bytes

INTERIOR_SLOTS = 4
"""Slots for states that a forward gives out inside chunks, on their way to images; more such rungs cut the chunk."""


@dataclass(frozen=True, slots=True)
class Sizing:
    """Units of both arenas. ``num_slots`` counts live and checkpoint slots; 0 for a model without per-request state."""

    num_blocks: int
    num_slots: int
    max_model_len: int
    page_bytes: int
    slot_bytes: int

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.page_bytes

    @property
    def state_bytes(self) -> int:
        return self.num_slots * self.slot_bytes


def size_arenas(config: EngineConfig, layout: CacheLayout, model_limit: int, free_bytes: int) -> Sizing:
    """Divide the budget: slots of running requests first, then checkpoint slots, if they are kept as slots, and pages.

    Checkpoint slots get at most half of the rest and at most one slot a page; images need none. ``model_limit``: longest
    context of the model in tokens. ``free_bytes``: the budget when the user named none, a FREE_MEMORY_SHARE of what is
    free. Raises ConfigError where the budget, the free memory, the number of pages and the longest request do not fit
    together.
    """
    max_len = model_limit if config.max_model_len is None else config.max_model_len
    if max_len > model_limit:
        raise ConfigError("max_model_len", max_len, f"the model's limit is {model_limit}")
    budget = free_bytes if config.kv_cache_memory is None else int(config.kv_cache_memory)
    free = int(free_bytes / FREE_MEMORY_SHARE)
    if config.kv_cache_memory is not None and budget > free:
        raise ConfigError(
            "kv_cache_memory",
            config.kv_cache_memory,
            f"{format_bytes(budget)} are asked for and {format_bytes(free)} are free; use {free >> 20}MiB or less",
        )
    page, slot = layout.page_bytes, layout.slot_bytes
    keeps = slot > 0 and config.enable_prefix_caching and config.state_checkpoint_interval_tokens != 0
    live = config.max_num_seqs * (1 + config.num_speculative_tokens) if slot else 0
    if keeps and config.state_checkpoint_backend != "slot":
        live += INTERIOR_SLOTS
    checkpoints = (config.state_checkpoint_slots if config.state_checkpoint_backend == "slot" else 0) if keeps else 0
    least_blocks = -(-max_len // config.block_size)
    if config.num_kvcache_blocks is not None:
        num_blocks = config.num_kvcache_blocks
        if num_blocks < least_blocks:
            raise ConfigError(
                "num_kvcache_blocks",
                num_blocks,
                f"one request of --max-model-len={max_len} needs {least_blocks}; use at least that, or "
                f"--max-model-len={max(num_blocks * config.block_size, 2)} or less",
            )
        if checkpoints is None:
            checkpoints = max(0, min(num_blocks, (budget - num_blocks * page) // slot - live))
        needed = num_blocks * page + (live + checkpoints) * slot
        if config.kv_cache_memory is not None:
            _check_budget(config, needed, budget)
        elif needed > free:
            raise ConfigError(
                "num_kvcache_blocks",
                num_blocks,
                f"pages and slots need {format_bytes(needed)} and {format_bytes(free)} are free; use "
                f"{max((free - (live + checkpoints) * slot) // page, 1)} or less",
            )
        return Sizing(num_blocks, live + checkpoints, max_len, page, slot)
    rest = budget - live * slot
    if checkpoints is None:
        checkpoints = max(0, min(rest // 2 // slot, rest // (slot + page), (rest - least_blocks * page) // slot))
    num_blocks = (rest - checkpoints * slot) // page
    if num_blocks < least_blocks:
        _check_budget(config, least_blocks * page + (live + checkpoints) * slot, budget)
    return Sizing(num_blocks, live + checkpoints, max_len, page, slot)


def _check_budget(config: EngineConfig, needed: int, budget: int) -> None:
    if needed > budget:
        mib = -(-needed // 2**20)
        raise ConfigError(
            "kv_cache_memory",
            config.kv_cache_memory or f"{budget} (a share of free memory)",
            f"pages and slots need {format_bytes(needed)}; use {mib}MiB or more, or lower --max-model-len or "
            "--max-num-seqs",
        )

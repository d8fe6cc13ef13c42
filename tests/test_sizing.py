"""Memory budgets: what fits, what is refused, and that the number in a refusal works."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom.config import ConfigError, EngineConfig
from atom.model_engine.cache_layout import CacheLayout
from atom.model_engine.sizing import size_arenas

LIMIT = 4096


def layout_of(page: int, slot: int) -> CacheLayout:
    return CacheLayout(64, (), (), page, slot)


def config_of(**settings) -> EngineConfig:
    return EngineConfig(**{"block_size": 64, "max_num_seqs": 4, **settings})


@given(
    page=st.integers(64, 1 << 20),
    slot=st.sampled_from([0, 64, 4096, 1 << 20, 50 << 20]),
    budget=st.integers(1, 1 << 30),
    length=st.sampled_from([128, 1000, LIMIT]),
    seqs=st.integers(1, 64),
    caching=st.booleans(),
)
def test_fits_the_budget_or_names_one_that_does(page, slot, budget, length, seqs, caching) -> None:
    layout = layout_of(page, slot)
    config = config_of(
        kv_cache_memory=budget,
        max_model_len=length,
        max_num_seqs=seqs,
        enable_prefix_caching=caching,
    )
    try:
        sizing = size_arenas(config, layout, LIMIT, free_bytes=0)
    except ConfigError as error:
        works = re.search(r"use (\d+MiB) or more", str(error))
        assert works, error
        sizing = size_arenas(replace(config, kv_cache_memory=works[1]), layout, LIMIT, free_bytes=0)
        budget = int(works[1][:-3]) << 20
    assert sizing.kv_bytes + sizing.state_bytes <= budget
    assert sizing.num_blocks * 64 >= length, "the longest request fits"
    live = seqs if slot else 0
    assert sizing.num_slots >= live
    checkpoints = sizing.num_slots - live
    assert checkpoints == 0 if not (slot and caching) else checkpoints <= sizing.num_blocks
    assert budget - sizing.kv_bytes - sizing.state_bytes < page, "what is left is less than a page"


def test_ample_memory_keeps_checkpoints_and_pages() -> None:
    sizing = size_arenas(config_of(kv_cache_memory="1GiB"), layout_of(64 << 10, 1 << 20), LIMIT, 0)
    assert sizing.num_slots - 4 == pytest.approx((1024 - 4) / 2, abs=1)
    assert sizing.num_blocks == (1024 - sizing.num_slots) * 16


def test_default_budget_is_a_share_of_free_memory() -> None:
    sizing = size_arenas(config_of(), layout_of(1024, 0), LIMIT, free_bytes=1 << 20)
    assert sizing.kv_bytes == 1 << 20


@pytest.mark.parametrize("caching", [True, False])
def test_explicit_counts(caching: bool) -> None:
    config = config_of(num_kvcache_blocks=100, state_checkpoint_slots=7, enable_prefix_caching=caching)
    sizing = size_arenas(config, layout_of(1024, 2048), LIMIT, free_bytes=1)
    assert (sizing.num_blocks, sizing.num_slots) == (100, 11 if caching else 4)


def test_too_few_blocks_is_refused_with_both_ways_out() -> None:
    config = config_of(num_kvcache_blocks=63)
    with pytest.raises(ConfigError, match=r"--num-kvcache-blocks=63.*needs 64.*--max-model-len=4032 or less"):
        size_arenas(config, layout_of(1024, 0), LIMIT, 1 << 30)
    assert size_arenas(replace(config, max_model_len=4032), layout_of(1024, 0), LIMIT, 1 << 30).num_blocks == 63


def test_context_beyond_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--max-model-len=4097: the model's limit is 4096"):
        size_arenas(config_of(max_model_len=4097), layout_of(1024, 0), LIMIT, 1 << 30)

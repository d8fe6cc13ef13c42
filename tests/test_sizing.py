"""Memory budgets: what fits, what is refused, and that the number in a refusal works."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom.config import ConfigError, EngineConfig
from atom.model_engine.cache_layout import CacheGeometry, CacheLayout
from atom.model_engine.engine_core import make_block_manager
from atom.model_engine.null_runner import NullRunner
from atom.model_engine.sizing import INTERIOR_SLOTS, Sizing, size_arenas

LIMIT = 4096
PLENTY = 1 << 40


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
    backend=st.sampled_from(["auto", "page", "slot"]),
    drafts=st.integers(0, 4),
)
def test_fits_the_budget_or_names_one_that_does(page, slot, budget, length, seqs, caching, backend, drafts) -> None:
    """Whatever the model, backend and speculation: within the budget, or refused with a number that works."""
    layout = layout_of(page, slot)
    config = config_of(
        kv_cache_memory=budget,
        max_model_len=length,
        max_num_seqs=seqs,
        enable_prefix_caching=caching,
        state_checkpoint_backend=backend,
        speculative_config={"num_speculative_tokens": drafts} if drafts else None,
    )
    try:
        sizing = size_arenas(config, layout, LIMIT, free_bytes=PLENTY)
    except ConfigError as error:
        works = re.search(r"use (\d+MiB) or more", str(error))
        assert works, error
        sizing = size_arenas(replace(config, kv_cache_memory=works[1]), layout, LIMIT, free_bytes=PLENTY)
        budget = int(works[1][:-3]) << 20
    assert sizing.kv_bytes + sizing.state_bytes <= budget
    assert sizing.num_blocks * 64 >= length, "the longest request fits"
    live = seqs * (1 + drafts) if slot else 0
    more = sizing.num_slots - live
    if not (slot and caching):
        assert more == 0
    elif backend == "slot":
        assert 0 <= more <= sizing.num_blocks
    else:
        assert more == INTERIOR_SLOTS, "images take no slots; states on their way to them do"
    assert budget - sizing.kv_bytes - sizing.state_bytes < page, "what is left is less than a page"


def test_ample_memory_is_halved_between_checkpoint_slots_and_pages() -> None:
    config = config_of(kv_cache_memory="1GiB", state_checkpoint_backend="slot")
    sizing = size_arenas(config, layout_of(64 << 10, 1 << 20), LIMIT, PLENTY)
    assert sizing.num_slots - 4 == pytest.approx((1024 - 4) / 2, abs=1)
    assert sizing.num_blocks == (1024 - sizing.num_slots) * 16


def test_ample_memory_is_all_pages_where_images_are_kept_there() -> None:
    sizing = size_arenas(config_of(kv_cache_memory="1GiB"), layout_of(64 << 10, 1 << 20), LIMIT, PLENTY)
    assert sizing.num_slots == 4 + INTERIOR_SLOTS
    assert sizing.num_blocks == (1024 - 4 - INTERIOR_SLOTS) * 16


@pytest.mark.parametrize("backend", ["page", "slot"])
def test_each_request_has_a_slot_for_each_token_it_may_roll_back(backend: str) -> None:
    settings = {"kv_cache_memory": "1GiB", "state_checkpoint_backend": backend, "enable_prefix_caching": False}
    plain = size_arenas(config_of(**settings), layout_of(64 << 10, 1 << 20), LIMIT, PLENTY)
    config = config_of(**settings, speculative_config={"num_speculative_tokens": 3})
    sizing = size_arenas(config, layout_of(64 << 10, 1 << 20), LIMIT, PLENTY)
    assert (plain.num_slots, sizing.num_slots) == (4, 16)
    assert plain.num_blocks - sizing.num_blocks == 12 * 16, "paid for by pages"


@pytest.mark.parametrize("settings", [{"enable_prefix_caching": False}, {"state_checkpoint_interval_tokens": 0}])
@pytest.mark.parametrize("backend", ["page", "slot"])
def test_nothing_is_set_aside_where_no_state_is_kept(settings: dict, backend: str) -> None:
    config = config_of(kv_cache_memory="1GiB", state_checkpoint_backend=backend, **settings)
    assert size_arenas(config, layout_of(64 << 10, 1 << 20), LIMIT, PLENTY).num_slots == 4


def test_default_budget_is_a_share_of_free_memory() -> None:
    sizing = size_arenas(config_of(), layout_of(1024, 0), LIMIT, free_bytes=1 << 20)
    assert sizing.kv_bytes == 1 << 20


@pytest.mark.parametrize("caching", [True, False])
def test_explicit_counts(caching: bool) -> None:
    config = config_of(
        num_kvcache_blocks=100,
        state_checkpoint_slots=7,
        state_checkpoint_backend="slot",
        enable_prefix_caching=caching,
    )
    sizing = size_arenas(config, layout_of(1024, 2048), LIMIT, free_bytes=1 << 20)
    assert (sizing.num_blocks, sizing.num_slots) == (100, 11 if caching else 4)


def test_too_few_blocks_is_refused_with_both_ways_out() -> None:
    config = config_of(num_kvcache_blocks=63)
    with pytest.raises(ConfigError, match=r"--num-kvcache-blocks=63.*needs 64.*--max-model-len=4032 or less"):
        size_arenas(config, layout_of(1024, 0), LIMIT, 1 << 30)
    assert size_arenas(replace(config, max_model_len=4032), layout_of(1024, 0), LIMIT, 1 << 30).num_blocks == 63


def test_context_beyond_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--max-model-len=4097: the model's limit is 4096"):
        size_arenas(config_of(max_model_len=4097), layout_of(1024, 0), LIMIT, 1 << 30)


@pytest.mark.parametrize(("image", "page", "pages"), [(0, 64, 0), (1, 64, 1), (64, 64, 1), (65, 64, 2), (640, 64, 10)])
def test_pages_of_an_image(image: int, page: int, pages: int) -> None:
    assert CacheGeometry(64, page, image, image, "layout").pages_per_image == pages


@pytest.mark.parametrize(
    ("geometry", "why"),
    [
        (CacheGeometry(32, 64, 8, 8, "layout"), "pages hold 32 tokens, the block manager's 64"),
        (CacheGeometry(64, 0, 8, 8, "layout"), "a page of 0 bytes"),
        (CacheGeometry(64, 64, 8, 9, "layout"), "an image of 9 bytes is not a copy of a slot of 8"),
    ],
)
def test_a_geometry_that_does_not_fit_stops_the_start(geometry: CacheGeometry, why: str) -> None:
    """Runner and block manager would not mean the same bytes."""
    runner = NullRunner(64, 16, 8, 128, vocab_size=10)
    runner.geometry = geometry
    runner.sizing = Sizing(16, 8, 128, geometry.page_bytes, geometry.slot_bytes)
    with pytest.raises(RuntimeError, match=why):
        make_block_manager(config_of(), runner)
    runner.geometry = CacheGeometry(64, 64, 8, 8, "layout")
    runner.sizing = Sizing(16, 8, 128, 64, 8)
    make_block_manager(config_of(), runner)


def test_more_blocks_than_memory_are_refused_with_a_number_that_fits() -> None:
    config = config_of(num_kvcache_blocks=10_000)
    with pytest.raises(ConfigError, match=r"--num-kvcache-blocks=10000: .* use (\d+) or less") as caught:
        size_arenas(config, layout_of(1024, 2048), LIMIT, free_bytes=1 << 20)
    works = int(re.search(r"use (\d+) or less", str(caught.value))[1])
    sizing = size_arenas(replace(config, num_kvcache_blocks=works), layout_of(1024, 2048), LIMIT, free_bytes=1 << 20)
    assert sizing.kv_bytes + sizing.state_bytes <= 4 << 20 < sizing.kv_bytes + sizing.state_bytes + 1024


def test_more_memory_than_is_free_is_refused_with_what_is() -> None:
    config = config_of(kv_cache_memory="100TiB")
    with pytest.raises(
        ConfigError, match=r"--kv-cache-memory=\d+: 100.00 TiB are asked for and 4.00 GiB are free"
    ) as caught:
        size_arenas(config, layout_of(1024, 2048), LIMIT, free_bytes=1 << 30)
    works = re.search(r"use (\d+MiB) or less", str(caught.value))
    assert works
    sizing = size_arenas(replace(config, kv_cache_memory=works[1]), layout_of(1024, 2048), LIMIT, free_bytes=1 << 30)
    assert sizing.kv_bytes + sizing.state_bytes <= 4 << 30

"""I9 on real models: greedy tokens with any mix of caching, chunking, batching and preemption equal a cold single run."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from atom.benchmarks.offline_worker import tokens
from atom.config import SHIPPED_MODEL, EngineConfig
from atom.model_engine.engine_core import EngineCore
from atom.model_engine.messages import EngineRequest
from atom.sampling_params import SamplingParams
from tests.models.harness import make_reference, save

SOURCE = Path(random.__file__).read_bytes()


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    """The shipped model and tiny random ones of each family."""
    found = {"shipped": SHIPPED_MODEL}
    for family in ("qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen3"):
        found[family] = str(save(make_reference(family), tmp_path_factory.mktemp(family)))
    return found


def core_of(folder: str, **settings) -> EngineCore:
    defaults = {"threads": 1, "max_model_len": 704, "kv_cache_memory": "64MiB", "cache_stats_interval": 0}
    return EngineCore(EngineConfig(model=folder, **{**defaults, **settings}))


def ask(core: EngineCore, name: str, prompt: list[int], count: int) -> None:
    core.add_request(EngineRequest(name, prompt, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)))


def drain(core: EngineCore, answers: dict[str, list[int]], cached: dict[str, int] | None = None) -> None:
    for output in core.step():
        assert output.error is None
        answers.setdefault(output.request_id, []).extend(output.new_token_ids)
        if cached is not None:
            cached[output.request_id] = output.num_cached_tokens


def random_prompts(rng: random.Random, count: int, vocab: int, longest: int) -> list[list[int]]:
    """Prompts that repeat, extend, cut and branch from one another."""
    prompts: list[list[int]] = []
    for _ in range(count):
        start = rng.randrange(len(SOURCE) - longest)
        fresh = [byte % vocab for byte in SOURCE[start : start + rng.randrange(1, longest)]]
        if prompts and rng.random() < 0.75:
            base = rng.choice(prompts)
            fresh = (
                base[: rng.choice([len(base), len(base), rng.randrange(1, len(base) + 1)])]
                + fresh[: rng.choice([0, 1, 90])]
            )
        prompts.append(fresh[:longest])
    return prompts


def poison(core: EngineCore) -> None:
    """Fill vacant pages and slots with NaN: whoever reads freed memory gets it."""
    manager, runner = core.block_manager, core.runner
    slots = manager.states.slots._vacant if manager.states else []
    for arena, units in ((runner.pages, manager.pool._vacant), (runner.slots, slots)):
        if units:
            arena.bytes[torch.tensor(units)] = 0xFF


def disturb(core: EngineCore, rng: random.Random, answers: dict[str, list[int]]) -> None:
    """One step; now and then a running request is preempted before it, and what is free is poisoned after it."""
    scheduler = core.scheduler
    if scheduler.running and rng.random() < 0.1:
        scheduler._preempt(scheduler.running.pop(rng.randrange(len(scheduler.running))))
    drain(core, answers)
    poison(core)


def compare(folder: str, seed: int, requests: int) -> dict[str, int | float]:
    rng = random.Random(seed)
    cold = core_of(folder, enable_prefix_caching=False, max_num_seqs=1)
    prompts = random_prompts(rng, requests, min(cold.runner.vocab_size, 251), 400)
    counts = [rng.randrange(1, 40) for _ in prompts]
    expected: dict[str, list[int]] = {}
    for i, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
        ask(cold, f"r{i}", prompt, count)
        while cold.has_unfinished():
            drain(cold, expected)
    mixed = core_of(
        folder,
        block_size=rng.choice([16, 32, 64]),
        max_num_batched_tokens=rng.choice([40, 100, 200, 1000]),
        max_num_seqs=4,
        state_checkpoint_interval_tokens=rng.choice([-1, 64, 128]),
        state_checkpoint_backend=rng.choice(["page", "slot"]),
        speculative_config=rng.choice([None, {"num_speculative_tokens": 1}, {"num_speculative_tokens": 4}]),
    )
    # A pool little larger than the longest request: pages are evicted, and running requests preempt one another.
    held = mixed.block_manager.pool.take(mixed.block_manager.pool.num_available - -(-900 // mixed.config.block_size))
    answers: dict[str, list[int]] = {}
    for i, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
        ask(mixed, f"r{i}", prompt, count)
        for _ in range(rng.randrange(6)):
            disturb(mixed, rng, answers)
    while mixed.has_unfinished():
        disturb(mixed, rng, answers)
    mixed.block_manager.pool.release(held)
    mixed.block_manager.check()
    different = [name for name in expected if answers[name] != expected[name]]
    assert not different, f"{len(different)} of {requests} answers differ from a cold run: {different[:5]}"
    return {**mixed.cache_stats(), **mixed.metrics()}


@pytest.mark.parametrize(("family", "seed"), [("shipped", 1), ("qwen3_5", 2), ("qwen3_next", 3), ("qwen3", 4)])
def test_same_tokens(folders, family: str, seed: int) -> None:
    stats = compare(folders[family], seed=seed, requests=16)
    assert stats["cached_tokens"] > 0 and stats["preemptions_total"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5, 10))
@pytest.mark.parametrize("family", ["shipped", "qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen3"])
def test_same_tokens_long(folders, family: str, seed: int) -> None:
    compare(folders[family], seed=seed, requests=25)


@pytest.mark.parametrize("backend", ["page", "slot"])
def test_conversation_of_the_peer(backend: str) -> None:
    """No request is served fewer cached tokens than the peer reports, and resends hit at the last boundary."""
    core = core_of(SHIPPED_MODEL, max_model_len=8192, kv_cache_memory="512MiB", state_checkpoint_backend=backend)
    answers: dict[str, list[int]] = {}
    cached: dict[str, int] = {}

    def go(name: str, prompt: list[int], count: int = 24) -> list[int]:
        ask(core, name, prompt, count)
        while core.has_unfinished():
            drain(core, answers, cached)
        return answers[name]

    system = tokens(1, 1800)
    p1 = system + tokens(2, 1200)
    o1 = go("t1", p1)
    assert go("t1-resend", p1) == o1 and cached["t1-resend"] == 2944
    p2 = p1 + o1 + tokens(3, 300)
    o2 = go("t2", p2)
    assert cached["t2"] >= 2944
    assert go("t2-resend", p2) == o2 and cached["t2-resend"] == 3264
    go("t3", p2 + o2 + tokens(4, 300))
    assert cached["t3"] >= 3328, "the answer's last boundary"
    for i, reused in enumerate((0, 1792, 1792)):
        go(f"sibling{i}", system + tokens(10 + i, 700))
        assert cached[f"sibling{i}"] == reused
    exact = tokens(5, 1536)
    first = go("1536", exact, 8)
    assert go("1536-resend", exact, 8) == first and cached["1536-resend"] == 1472
    go("1536-extended", exact + tokens(6, 100), 8)
    assert cached["1536-extended"] >= 1472
    short = tokens(7, 300)
    first = go("300", short, 8)
    assert go("300-resend", short, 8) == first and cached["300-resend"] == 256
    begun = tokens(8, 700)
    answer = go("700+500", begun, 500)
    go("700+500-continued", begun + answer + tokens(9, 40), 8)
    assert cached["700+500-continued"] >= 1152


def test_memory_is_what_was_computed() -> None:
    """Live slots and checkpoints add up in the budget; allocated bytes are the computed ones for each arena."""
    core = core_of(SHIPPED_MODEL, kv_cache_memory="48MiB", max_num_seqs=3)
    runner = core.runner
    assert runner.pages.bytes.nbytes == runner.sizing.kv_bytes == runner.sizing.num_blocks * runner.layout.page_bytes
    assert runner.slots.bytes.nbytes == runner.sizing.state_bytes == runner.sizing.num_slots * runner.layout.slot_bytes
    total = runner.sizing.kv_bytes + runner.sizing.state_bytes
    assert 48 * 2**20 - runner.layout.page_bytes - runner.layout.slot_bytes < total <= 48 * 2**20
    used = sum(region.nbytes for region in runner.layout.state)
    assert used <= runner.layout.slot_bytes < used + 64 * len(runner.layout.state)

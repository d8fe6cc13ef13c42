"""The lines that say what the cache did, the counters behind them, and what clients were told."""

from __future__ import annotations

import logging
import random

import pytest

from atom.config import EngineConfig
from atom.model_engine.cache_stats import CacheStats
from atom.model_engine.placement import RungKind
from tests.recording import Engine, prompt_of

pytestmark = pytest.mark.usefixtures("backend")

POOLS = {
    "page": "pages image 27 | pages free 21 | slots 16 | slots live 0 | slots free 16 | checkpoints 9",
    "slot": "pages image 0 | pages free 48 | slots 16 | slots live 0 | slots free 7 | checkpoints 9",
}


def test_the_lines_of_a_run_worked_by_hand(backend: str) -> None:
    """Block 4, ladder 16; every figure follows from the four requests.

    a, 41 tokens: cold; cut at 16 and 32 for the ladder and at 40 for the anchor. b shares 28 of 38: 7 blocks matched, a
    state at 16; cut at 28 for the demand, 32 for the ladder, 36 for the anchor. c shares 28 of 40 and finds b's state
    there; cut at 32 and 36, and the state at its end, 40, is kept until the fourth of 5 answered tokens completes block 11,
    whose state takes its place. d is a again.
    """
    engine = Engine(num_blocks=64, budget=64, checkpoint_slots=12)
    a = prompt_of(41, 1)
    assert engine.ask("a", a, 1) == 0
    assert engine.ask("b", a[:28] + prompt_of(10, 2), 1) == 16
    assert engine.ask("c", a[:28] + prompt_of(12, 3), 5) == 28
    assert engine.ask("d", a, 1) == 40
    assert engine.core.cache_stats_lines() == [
        "[Cache Stats] requests 4 | cached 84 of 152 reusable tokens (55.3%) | matched 96 | lost to a missing checkpoint "
        "12 | lost beyond repair 0",
        f"[Cache Pools] paged 63.2% x state 87.5% = 55.3% | pages 64 | pages live 0 | pages cached 16 | {POOLS[backend]}",
        "[Checkpoint Fates] kept 10 | dropped 0 | evicted 0 | orphaned 0 | superseded 1 | read back: anchor 1, demand 1, "
        "interval 1 | chunks cut: anchor 3, demand 1, interval 4 | demands recorded 1, declined 0",
    ]


def test_a_model_without_state_has_no_checkpoint_line() -> None:
    engine = Engine(checkpoint_slots=None)
    engine.ask("a", prompt_of(9, 1), 2)
    assert engine.core.cache_stats_lines() == [
        "[Cache Stats] requests 1 | cached 0 of 8 reusable tokens (0.0%) | matched 0 | lost to a missing checkpoint 0 | "
        "lost beyond repair 0",
        "[Cache Pools] paged 0.0% x state 0.0% = 0.0% | pages 48 | pages live 0 | pages cached 2 | pages image 0 | pages "
        "free 46",
    ]


def lines_from(metrics: dict[str, int | float], gauges: list[str]) -> list[str]:
    """The three lines out of exported counters and gauges alone."""
    m = {name.removeprefix("prefix_cache_").removesuffix("_total"): value for name, value in metrics.items()}

    def share(part: str, whole: str) -> str:
        return f"{m[part] / m[whole] if m[whole] else 0:.1%}"

    kinds = [kind.value for kind in RungKind]
    held = " | ".join(f"{name.replace('_', ' ')} {metrics[name]}" for name in gauges)
    fates = [f"{fate} {m[f'checkpoints_{fate}']}" for fate in ("kept", "dropped", "evicted", "orphaned", "superseded")]
    read = [f"{kind} {m[f'checkpoints_read_back_{kind}']}" for kind in kinds]
    cuts = [f"{kind} {m[f'chunks_cut_{kind}']}" for kind in kinds]
    return [
        f"[Cache Stats] requests {m['requests']} | cached {m['cached_tokens']} of {m['reusable_tokens']} reusable tokens "
        f"({share('cached_tokens', 'reusable_tokens')}) | matched {m['matched_tokens']} | lost to a missing checkpoint "
        f"{m['lost_to_missing_checkpoint_tokens']} | lost beyond repair {m['lost_beyond_repair_tokens']}",
        f"[Cache Pools] paged {share('matched_tokens', 'reusable_tokens')} x state "
        f"{share('cached_tokens', 'matched_tokens')} = {share('cached_tokens', 'reusable_tokens')} | {held}",
        f"[Checkpoint Fates] {' | '.join(fates)} | read back: {', '.join(read)} | chunks cut: {', '.join(cuts)} | demands "
        f"recorded {m['demands_recorded']}, declined {m['demands_declined']}",
    ]


def busy(seed: int) -> Engine:
    """A tight engine after 60 requests that share prefixes, a few of them aborted."""
    rng = random.Random(seed)
    engine = Engine(num_blocks=30, budget=16, max_num_seqs=3, checkpoint_slots=3, max_model_len=64)
    roots = [prompt_of(40, i) for i in range(4)]
    for i in range(60):
        root = rng.choice(roots)
        engine.add(f"r{i}", root[: rng.randrange(1, 41)] + prompt_of(rng.randrange(9), i), rng.randrange(1, 12))
        for _ in range(rng.randrange(8)):
            if engine.core.has_unfinished():
                engine.step()
        if rng.random() < 0.1:
            engine.core.abort_requests([f"r{i}"])
            engine.check()
            engine.poison()
    engine.run()
    return engine


@pytest.mark.parametrize("seed", range(3))
def test_every_figure_is_a_ratio_of_exported_counters(backend: str, seed: int) -> None:
    engine = busy(seed)
    metrics = engine.core.metrics()
    gauges = ["pages", "pages_live", "pages_cached", "pages_image", "pages_free"]
    gauges += ["slots", "slots_live", "slots_free", "checkpoints"]
    assert engine.core.cache_stats_lines() == lines_from(metrics, gauges)


@pytest.mark.parametrize("seed", range(3))
def test_identities_between_counters(backend: str, seed: int) -> None:
    """Every checkpoint has one fate, every unit one holder, every lost token one reason."""
    engine = busy(seed)
    m = engine.core.metrics()

    def counter(name: str) -> int | float:
        return m[f"prefix_cache_{name}_total"]

    fates = sum(counter(f"checkpoints_{fate}") for fate in ("evicted", "orphaned", "superseded"))
    assert counter("checkpoints_kept") == m["checkpoints"] + fates
    assert m["pages"] == m["pages_live"] + m["pages_cached"] + m["pages_image"] + m["pages_free"] == 30
    in_slots = m["checkpoints"] if backend == "slot" else 0
    assert m["slots"] == m["slots_live"] + m["slots_free"] + in_slots == 6
    lost = counter("lost_to_missing_checkpoint_tokens") + counter("lost_beyond_repair_tokens")
    assert counter("matched_tokens") == counter("cached_tokens") + lost
    assert counter("requests") <= 60 and sum(m[f"requests_finished_{end}_total"] for end in ("length", "abort")) == 60
    if backend == "page":
        restores = sum(len(plan.maintenance.restores) for plan in engine.runner.plans)
        assert sum(counter(f"checkpoints_read_back_{kind.value}") for kind in RungKind) == restores > 0
    assert m["generation_tokens_total"] == sum(map(len, engine.outputs.values()))
    assert all(counter(f"checkpoints_{fate}") for fate in ("kept", "dropped", "evicted", "superseded"))


def test_case_43_counted_once_however_often_admission_is_retried() -> None:
    """A request that waits for room is asked about at every step and counted at its first admission alone."""
    engine = Engine(num_blocks=24, max_num_seqs=2, budget=64)
    engine.add("big", prompt_of(60, 1), 20)
    engine.add("waits", prompt_of(60, 2), 4)
    waited = 0
    while engine.core.has_unfinished():
        engine.step()
        waited += bool(engine.core.scheduler.waiting)
    assert waited > 5
    assert engine.core.cache_stats()["requests"] == 2
    assert engine.core.cache_stats()["reusable_tokens"] == 2 * 56


def test_case_43_a_preempted_request_is_counted_as_it_came() -> None:
    """Its own pages, found again when it comes back, are no hit."""
    engine = Engine()
    engine.add("r", prompt_of(30, 1), 8)
    for _ in range(4):
        engine.step()
    scheduler = engine.core.scheduler
    scheduler._preempt(scheduler.running.pop())
    engine.run()
    engine.check_answer("r")
    stats = engine.core.cache_stats()
    assert (stats["requests"], stats["matched_tokens"], stats["cached_tokens"]) == (1, 0, 0)
    assert engine.cached["r"] == 0


@pytest.mark.parametrize("seed", range(3))
def test_case_44_metrics_say_what_clients_were_told(seed: int) -> None:
    rng = random.Random(seed)
    engine = Engine(num_blocks=30, budget=16, max_num_seqs=3, checkpoint_slots=3, max_model_len=64)
    roots = [prompt_of(40, i) for i in range(3)]
    for i in range(40):
        engine.add(f"r{i}", rng.choice(roots)[: rng.randrange(1, 41)] + prompt_of(3, i), rng.randrange(1, 12))
        for _ in range(rng.randrange(8)):
            if engine.core.has_unfinished():
                engine.step()
    engine.run()
    told = sum(engine.cached.values())
    assert told > 0 and engine.core.metrics()["prefix_cache_cached_tokens_total"] == told


def test_case_45_settings_are_printed_as_they_took_effect(
    backend: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the ladder was snapped, the backend chosen, and a flag won over its variable; printed once, at start."""
    monkeypatch.setenv("ATOM_STATE_CHECKPOINT_DEMAND", "1")
    with caplog.at_level(logging.INFO):
        Engine(interval=18, demand=False, speculate=2, checkpoint_slots=3, max_num_seqs=2)
    lines = caplog.text
    for setting in (
        "block_size = 4",
        "state_checkpoint_interval_tokens = 16",
        f"state_checkpoint_backend = {backend}",
        "state_checkpoint_demand = False",
        "num_speculative_tokens = 2",
        "num_kvcache_blocks = 48",
        "kv_cache_tokens = 192",
        "num_slots = 9",
        "max_model_len = 96",
    ):
        assert lines.count(setting) == 1, setting
    caplog.clear()
    with caplog.at_level(logging.INFO):
        Engine(interval=3)
        Engine(checkpoint_slots=None)
    assert "state_checkpoint_interval_tokens = 0" in caplog.text, "snapped to nothing: off"
    assert "state_checkpoint_backend = None" in caplog.text, "a model without state has none"


def test_auto_is_page(monkeypatch: pytest.MonkeyPatch) -> None:
    assert EngineConfig().state_checkpoint_backend == "auto"
    assert Engine(backend="auto").core.info()["state_checkpoint_backend"] == "page"


def test_no_tokens_no_rate() -> None:
    stats = CacheStats()
    assert stats.hit_rate == 0.0
    with pytest.raises(AssertionError):
        stats.record(reusable=3, matched=1, wanted=2, cached=0, block_size=4)

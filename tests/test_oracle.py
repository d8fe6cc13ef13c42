"""Random workloads over the real scheduler and block manager, with the oracle after every step."""

from __future__ import annotations

import contextlib
import random
from collections import Counter

import pytest

from atom.model_engine.placement import RungKind
from tests.recording import VOCAB, Engine


def random_prompt(rng: random.Random, roots: list[list[int]], longest: int) -> list[int]:
    """A prompt that repeats, extends, cuts or edits an earlier one, or a new one."""
    if not roots or rng.random() < 0.15:
        return [rng.randrange(VOCAB) for _ in range(rng.randrange(1, longest))]
    base = list(rng.choice(roots))[:longest]
    kind = rng.random()
    if kind < 0.3:
        return base
    if kind < 0.5:
        base = base[: rng.randrange(1, len(base) + 1)]
    elif kind < 0.6:
        base[rng.randrange(len(base))] = rng.randrange(VOCAB)
    base += [rng.randrange(VOCAB) for _ in range(rng.randrange(0, 10))]
    return base[:longest]


def workload(seed: int, steps: int, fates: Counter[str] | None = None) -> None:
    """``steps`` engine steps of random requests in a random tiny engine; ``fates`` collects what happened in it."""
    rng = random.Random(seed)
    stateful = rng.random() < 0.9
    page = rng.choice([1, 2, 4, 8])
    engine = Engine(
        block_size=page,
        num_blocks=rng.choice([64, 80, 112, 256]) // page,
        checkpoint_slots=rng.choice([0, 1, 2, 6, 20]) if stateful else None,
        max_num_seqs=rng.choice([1, 2, 4]),
        budget=rng.choice([4, 10, 16, 24, 64]),
        interval=rng.choice([-1, 0, 8, 16, 24, 18]),
        max_model_len=64,
        interior_grid=rng.choice([None, page, 2 * page, 8]),
        enable_prefix_caching=rng.random() < 0.95,
        backend=rng.choice(["page", "slot"]),
        pages_per_image=rng.choice([1, 2, 3, 7]),
        demand=rng.random() < 0.8,
        speculate=rng.choice([0, 0, 1, 3]),
        wrong=lambda step: rng.choice([None, 0, 1, 2]),
    )
    core = engine.core
    roots: list[list[int]] = []
    names: list[str] = []
    aborted: set[str] = set()
    while engine.steps < steps:
        if rng.random() < 0.25 and len(core.scheduler.waiting) < 4:
            name = f"r{len(names)}"
            prompt = random_prompt(rng, roots, 50)
            engine.add(name, prompt, rng.randrange(1, 14), salt=rng.choice([None, None, "tenant"]))
            names.append(name)
            roots = [*roots, prompt][-6:]
        if names and rng.random() < 0.05:
            name = rng.choice(names[-8:])
            if name not in engine.finish:
                aborted.add(name)
            core.abort_requests([name])
            engine.check()
            engine.poison()
        if rng.random() < 0.003:
            core.reset_prefix_cache()
            engine.check()
            engine.poison()
        if engine.backend == "slot" and core.block_manager.states is not None and rng.random() < 0.01:
            # Slots that were handed over and are still read may need more than the running requests alone.
            with contextlib.suppress(ValueError):
                core.resize_state_slots(engine.max_num_seqs * (1 + engine.speculate) + rng.randrange(12))
            engine.check()
            engine.poison()
        engine.runner.fail_next |= rng.random() < 0.005
        engine.runner.fail_store |= rng.random() < 0.005
        engine.step()
        if names and engine.finish.get(names[-1]) == "length" and rng.random() < 0.3:
            roots = [*roots, engine.prompts[names[-1]][0] + engine.outputs[names[-1]]][-6:]
    engine.runner.fail_next = False
    engine.run()
    for name in names:
        if name not in aborted and engine.finish[name] != "error":
            engine.check_answer(name)
    if fates is not None:
        fates.update({name: int(value) for name, value in core.metrics().items() if name.endswith("_total")})
        fates["restores"] += sum(len(plan.maintenance.restores) for plan in engine.runner.plans)
        fates["steps"] += engine.steps


def test_random_workloads() -> None:
    """20,000 steps over both backends and all placements; every path is met."""
    fates: Counter[str] = Counter()
    for seed in range(50):
        workload(seed, 400, fates)
    assert fates["steps"] >= 20_000
    met = ["preemptions", "speculative_accepted_tokens", "prefix_cache_cached_tokens", "prefix_cache_demands_recorded"]
    met += [f"prefix_cache_checkpoints_{f}" for f in ("kept", "dropped", "evicted", "orphaned", "superseded")]
    met += [f"prefix_cache_checkpoints_read_back_{kind.value}" for kind in RungKind]
    met += [f"prefix_cache_chunks_cut_{kind.value}" for kind in RungKind]
    assert all(fates[f"{name}_total"] > 20 for name in met), fates


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1500, 25))
def test_random_workloads_long(first: int) -> None:
    """10,000 steps each, 200,000 in all."""
    for seed in range(first, first + 25):
        workload(seed, 400)

"""Random workloads over the real scheduler and block manager, with the oracle after every step."""

from __future__ import annotations

import random

import pytest

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


def workload(seed: int, steps: int) -> int:
    """Returns the number of engine steps run."""
    rng = random.Random(seed)
    seqs = rng.choice([1, 2, 4])
    stateful = rng.random() < 0.85
    engine = Engine(
        num_blocks=rng.choice([16, 20, 32, 64]),
        checkpoint_slots=rng.choice([0, 1, 2, 6, 20]) if stateful else None,
        max_num_seqs=seqs,
        budget=rng.choice([4, 10, 16, 24, 64]),
        interval=rng.choice([-1, 0, 4, 8, 16, 24, 18]),
        max_model_len=64,
        interior_grid=rng.choice([None, None, 4, 8]),
        enable_prefix_caching=rng.random() < 0.95,
    )
    roots: list[list[int]] = []
    names: list[str] = []
    aborted: set[str] = set()
    failed: set[str] = set()
    while engine.steps < steps:
        if rng.random() < 0.25 and len(engine.core.scheduler.waiting) < 4:
            name = f"r{len(names)}"
            prompt = random_prompt(rng, roots, 50)
            engine.add(name, prompt, rng.randrange(1, 20), salt=rng.choice([None, None, "tenant"]))
            names.append(name)
            roots = [*roots, prompt][-6:]
        if names and rng.random() < 0.05:
            name = rng.choice(names[-8:])
            if name not in engine.finish:
                aborted.add(name)
            engine.core.abort_requests([name])
            engine.check()
            engine.poison()
        if rng.random() < 0.003:
            engine.core.reset_prefix_cache()
            engine.check()
            engine.poison()
        if rng.random() < 0.01:
            engine.runner.fail_next = True
        engine.step()
        failed = {name for name, reason in engine.finish.items() if reason == "error"}
        if names and engine.finish.get(names[-1]) == "length" and rng.random() < 0.2:
            roots = [*roots, engine.prompts[names[-1]][0] + engine.outputs[names[-1]]][-6:]
    engine.runner.fail_next = False
    engine.run()
    for name in names:
        if name not in aborted and name not in failed:
            engine.check_answer(name)
    assert len(names) > steps / 100
    return engine.steps


@pytest.mark.parametrize("seed", range(40))
def test_random_workload(seed: int) -> None:
    workload(seed, 400)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 300))
def test_random_workload_long(seed: int) -> None:
    workload(seed, 1000)

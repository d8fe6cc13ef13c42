"""What a step is spent on: live work before guesses, chunks on the grid, and answers that move without hurting others."""

from __future__ import annotations

import random

import pytest

from atom.model_ops.batch_builder import BlockTables
from tests.recording import DEFAULTS, VOCAB, Engine


@pytest.fixture(params=["page", "slot"], autouse=True)
def backend(request, monkeypatch: pytest.MonkeyPatch) -> str:
    """Everything holds for both backends."""
    monkeypatch.setitem(DEFAULTS, "backend", request.param)
    return request.param


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def test_drafts_leave_the_budget_to_prompts() -> None:
    """Two answers with drafts could take the whole budget; a newcomer is admitted at once all the same."""
    engine = Engine(budget=8, max_num_seqs=4, speculate=3, num_blocks=64)
    engine.add("a", prompt_of(4, 1), 40)
    engine.add("b", prompt_of(4, 2), 40)
    engine.step()
    engine.step()
    engine.add("c", prompt_of(5, 3), 2)
    for _ in range(3):
        engine.step()
    assert engine.finish.get("c") == "length"


@pytest.mark.parametrize("seed", range(40))
def test_drafts_preempt_nobody(seed: int) -> None:
    """With drafts that are all wrong there are as many preemptions as without drafts."""
    counts = []
    for speculate in (0, 3):
        rng = random.Random(seed)
        engine = Engine(
            num_blocks=7,
            max_model_len=28,
            budget=32,
            max_num_seqs=2,
            speculate=speculate,
            wrong=lambda step: 0,
            interval=0,
        )
        for i in range(2):
            engine.add(f"r{i}", prompt_of(rng.randrange(6, 14), seed + i), rng.randrange(2, 9))
        engine.run()
        counts.append(engine.core.scheduler.num_preemptions)
    assert counts[0] == counts[1]


def test_leftover_tokens_do_not_put_a_prompt_off_the_grid() -> None:
    """Anchors cost no forward with several prompts at once: chunks that do not end a prompt end on boundaries."""
    forwards = []
    for interval in (0, -1):
        engine = Engine(
            block_size=16,
            num_blocks=64,
            budget=40,
            interval=interval,
            interior_grid=16,
            max_model_len=128,
            max_num_seqs=3,
        )
        for i, length in enumerate((8, 30, 70)):
            engine.add(f"r{i}", prompt_of(length, i), 1)
        engine.run()
        starts = [p.chunk.start for plan in engine.runner.plans for p in plan.prefills]
        assert all(start % 16 == 0 for start in starts)
        forwards.append(len(engine.runner.plans))
    assert forwards[0] == forwards[1]


def test_an_answer_that_moves_on_leaves_what_others_resumed_from() -> None:
    """B resumes from the checkpoint that A's answer left; A's next boundary does not take it away."""
    engine = Engine(budget=64, num_blocks=128, checkpoint_slots=20, interval=-1)
    a = prompt_of(14, 1)
    engine.add("a", a, 40)
    while len(engine.outputs.get("a", [])) < 8:
        engine.step()
    b = a + engine.outputs["a"][:7] + prompt_of(2, 2)
    engine.add("b", b, 1)
    while "b" not in engine.finish:
        engine.step()
    assert engine.cached["b"] == 20
    engine.run()
    assert engine.ask("b again", b, 1) == 20


def test_running_requests_publish_again_after_a_reset() -> None:
    """What a running request fills after a reset can be found: its prefix is filed again with it."""
    engine = Engine(budget=64, num_blocks=128, checkpoint_slots=20, interval=-1)
    prompt = prompt_of(20, 1)
    engine.add("a", prompt, 30)
    while len(engine.outputs.get("a", [])) < 5:
        engine.step()
    engine.core.reset_prefix_cache()
    engine.run()
    assert engine.ask("next turn", prompt + engine.outputs["a"] + prompt_of(3, 2), 1) == 48


def test_block_tables_outlive_a_preemption() -> None:
    """A preempted request keeps its row while others run in its place: rows are added, not run out of."""
    tables = BlockTables(2)
    rows = [tables.row(f"r{i}", [10 * i, 10 * i + 1]) for i in range(5)]
    assert len(set(rows)) == 5
    assert tables.gather(rows, 2).tolist() == [[10 * i, 10 * i + 1] for i in range(5)]
    tables.forget("r1")
    assert tables.row("new", [7]) == rows[1]


def test_a_failed_update_leaves_nothing_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever raises after the forward: its requests end with an error, and pools are whole."""
    engine = Engine(budget=64)
    engine.ask("first", prompt_of(33, 1))

    def fail(plan, result):
        raise RuntimeError("injected")

    engine.add("again", prompt_of(33, 1))
    with monkeypatch.context() as patched:
        patched.setattr(engine.core.scheduler, "update", fail)
        engine.step()
    assert engine.finish["again"] == "error"
    engine.check_idle()
    assert engine.ask("later", prompt_of(33, 1)) == 32


def test_logits_that_are_not_finite_leave_nothing_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request ends with an error; neither its pages nor its states are found by the next one."""
    engine = Engine(budget=64, num_blocks=64)
    execute = engine.runner.execute

    def not_finite(plan):
        result = execute(plan)
        result.tokens = [None] * len(result.tokens)
        return result

    engine.add("bad", prompt_of(33, 1))
    with monkeypatch.context() as patched:
        patched.setattr(engine.runner, "execute", not_finite)
        while "bad" not in engine.finish:
            engine.step()
    assert engine.finish["bad"] == "error"
    engine.check_idle()
    assert engine.core.metrics()["checkpoints"] == 0
    assert engine.ask("next", prompt_of(33, 1)) == 0
    assert engine.ask("again", prompt_of(33, 1)) == 32

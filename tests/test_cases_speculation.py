"""Field case 3: speculation with rejections, by a scripted drafter that is wrong at each position."""

from __future__ import annotations

import pytest

from tests.recording import Engine, prompt_of

pytestmark = pytest.mark.usefixtures("backend")

DRAFTS = pytest.mark.parametrize("drafts", [1, 2, 3, 4])


def accepted_by_hand(engine: Engine, wrong: int | None) -> tuple[int, int]:
    """Drafted and accepted tokens, when each run of drafts is right up to position ``wrong``."""
    runs = [len(v.drafts) for plan in engine.runner.plans for v in plan.verifications]
    return sum(runs), sum(run if wrong is None else min(run, wrong) for run in runs)


@DRAFTS
def test_case_3_wrong_at_each_position_without_any_cache(drafts: int) -> None:
    """No prefix cache at all: the output is the one without speculation, in fewer forwards the later it is wrong."""
    forwards = []
    for wrong in [*range(drafts), None]:
        engine = Engine(
            enable_prefix_caching=False,
            checkpoint_slots=0,
            speculate=drafts,
            wrong=lambda step, wrong=wrong: wrong,
            budget=32,
            num_blocks=64,
        )
        for i in range(3):
            engine.add(f"r{i}", prompt_of(11 + 7 * i, i), 25)
        engine.run()
        for i in range(3):
            engine.check_answer(f"r{i}")
        metrics = engine.core.metrics()
        counted = (metrics["speculative_drafted_tokens_total"], metrics["speculative_accepted_tokens_total"])
        assert counted == accepted_by_hand(engine, wrong)
        assert counted[0] > 0 and (counted[1] > 0) == (wrong != 0)
        forwards.append(len(engine.runner.plans))
    assert forwards == sorted(forwards, reverse=True) and forwards[-1] < forwards[0]


@DRAFTS
def test_case_3_one_prefix_many_turns_then_probed(drafts: int) -> None:
    """Rejections at every position on one shared prefix; nothing of them is left in its pages or states.

    The oracle compares every findable page and state with its key after each step.
    """
    engine = Engine(
        speculate=drafts, wrong=lambda step: step % (drafts + 2), budget=24, num_blocks=220, checkpoint_slots=40
    )
    shared = prompt_of(33, 1)
    engine.ask("first", shared, 9)
    for turn in range(12):
        assert engine.ask(f"turn {turn}", shared + prompt_of(turn, 2 + turn), 9) >= 32
    assert engine.ask("probe", shared, 12) == 32
    assert engine.outputs["probe"][:9] == engine.outputs["first"]


@DRAFTS
def test_case_3_a_conversation_that_grows_by_its_answers(drafts: int) -> None:
    engine = Engine(
        speculate=drafts, wrong=lambda step: step % (drafts + 1), budget=24, num_blocks=96, checkpoint_slots=6
    )
    text = prompt_of(13, 1)
    for turn in range(5):
        cached = engine.ask(f"turn {turn}", text, 9)
        assert cached >= (12 if turn else 0)
        text = text + engine.outputs[f"turn {turn}"] + prompt_of(3, turn)
    assert cached > 36, "later turns resume behind earlier answers"


@DRAFTS
@pytest.mark.parametrize("max_tokens", range(1, 8))
def test_no_draft_runs_past_the_last_token(drafts: int, max_tokens: int) -> None:
    """max_tokens inside a verified run: as many tokens as asked for, and no row of a forward beyond them."""
    engine = Engine(speculate=drafts, budget=24)
    engine.ask("r", prompt_of(9, 1), max_tokens)
    assert len(engine.outputs["r"]) == max_tokens
    assert max(engine.runner.consumed) == 9 + max_tokens - 2, "the last token is sampled and never consumed"


@DRAFTS
@pytest.mark.parametrize("budget", [4, 6, 7])
def test_drafts_take_no_place_from_others(drafts: int, budget: int) -> None:
    """Four requests take a token each; what the budget leaves is for guesses, of all of them together."""
    engine = Engine(speculate=drafts, budget=budget, max_num_seqs=4, num_blocks=48)
    for i in range(4):
        engine.add(f"r{i}", prompt_of(5, i), 30)
    engine.run()
    drafted = 0
    for plan in engine.runner.plans:
        rows = len(plan.decodes) + sum(1 + len(v.drafts) for v in plan.verifications)
        assert rows + sum(p.chunk.end - p.chunk.start for p in plan.prefills) <= budget
        if len(plan.decodes) + len(plan.verifications) == 4:
            drafted = max(drafted, rows - 4)
    assert drafted == min(budget - 4, 4 * drafts)
    for i in range(4):
        engine.check_answer(f"r{i}")


@DRAFTS
def test_no_request_is_preempted_for_a_draft(drafts: int) -> None:
    """Seventeen tokens each, in pages for sixteen and a draft."""
    engine = Engine(speculate=drafts, budget=24, max_num_seqs=2, num_blocks=8, max_model_len=32, interval=-1)
    for i in range(2):
        engine.add(f"r{i}", prompt_of(9, i), 8)
    engine.run()
    assert engine.core.scheduler.num_preemptions == 0
    for i in range(2):
        engine.check_answer(f"r{i}")


@pytest.mark.parametrize("wrong", [None, 0, 1])
def test_preempted_in_mid_speculation(wrong: int | None) -> None:
    engine = Engine(speculate=3, wrong=lambda step: wrong, budget=24)
    engine.add("r", prompt_of(18, 5), 20)
    scheduler = engine.core.scheduler
    for after in (1, 6):
        while not scheduler.running or scheduler.running[0].num_output_tokens < after:
            engine.step()
        scheduler._preempt(scheduler.running.pop())
        engine.check()
        engine.poison()
    engine.run()
    engine.check_answer("r")


def test_a_stop_inside_a_verified_run_ends_there() -> None:
    """The tokens behind a stop id that were accepted with it are not told, and nothing of them is findable."""
    plain = Engine(budget=24)
    prompt = prompt_of(10, 3)
    plain.ask("r", prompt, 12)
    answer = plain.outputs["r"]
    stop = next(token for i, token in enumerate(answer) if i > 3 and token not in answer[:i])
    for drafts in (1, 2, 3, 4):
        for minimum in (0, answer.index(stop) + 1, 12):
            engine = Engine(speculate=drafts, budget=24)
            engine.add("r", prompt, 12, stop_token_ids=[stop], min_tokens=minimum)
            engine.run()
            early = minimum <= answer.index(stop)
            assert engine.outputs["r"] == (answer[: answer.index(stop) + 1] if early else answer)
            assert engine.finish["r"] == ("stop" if early else "length")
            engine.check()
            assert engine.ask("again", prompt, 12) == 8

"""Field cases of where reuse happens: the shared point, the answer, under pressure, in pools that hold hardly anything."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atom.model_engine.placement import RungKind
from tests.recording import Engine, prompt_of

pytestmark = pytest.mark.usefixtures("backend")


def chunks_of(engine: Engine, name: str) -> list[tuple[int, int]]:
    """The prefill chunks of a request, in order."""
    prefills = [p for plan in engine.runner.plans for p in plan.prefills]
    return [(p.chunk.start, p.chunk.end) for p in prefills if p.seq.request_id == name]


def ready(engine: Engine) -> list[int]:
    """Lengths of the prefixes whose state is kept."""
    states = engine.manager.states
    assert states is not None
    return sorted(len(engine.names[key]) for key in states.cache.ready())


def large(**settings) -> Engine:
    """Block 64, room for everything, no ladder."""
    defaults = {"block_size": 64, "num_blocks": 300, "budget": 2048, "max_model_len": 4096, "checkpoint_slots": 20}
    return Engine(**{**defaults, "interval": -1, **settings})


def test_case_12_the_shared_point_of_three_siblings() -> None:
    """A, B, C share 2000 of 3000 tokens: C resumes at the shared point, and the statistics say why B did not."""
    engine = large()
    engine.core.config.report_cache_miss_reason = True
    shared = prompt_of(2000, 1)
    reasons = {}
    for i, name in enumerate("abc"):
        engine.add(name, shared + prompt_of(1000, 10 + i))
        while engine.core.has_unfinished():
            reasons |= {output.request_id: output.cache_miss_reason for output in engine.step()}
        engine.check_answer(name)
    assert engine.cached == {"a": 0, "b": 0, "c": 1984}
    assert reasons == {"a": "not_cached", "b": "missing_checkpoint", "c": "not_cached"}
    stats = engine.core.cache_stats()
    assert stats["matched_tokens"] == stats["wanted_tokens"] == 2 * 1984
    assert stats["lost_to_missing_checkpoint_tokens"] == 1984 and stats["lost_beyond_repair_tokens"] == 0
    assert (stats["demands_recorded"], stats["demands_declined"], stats["chunks_cut_demand"]) == (1, 0, 1)
    assert (stats["checkpoints_read_back_demand"], stats["checkpoints_read_back_anchor"]) == (1, 0)


def test_demand_off_is_still_measured() -> None:
    engine = large(demand=False)
    shared = prompt_of(200, 1)
    for i, name in enumerate("abc"):
        assert engine.ask(name, shared + prompt_of(100, 10 + i)) == 0
    stats = engine.core.cache_stats()
    assert stats["lost_to_missing_checkpoint_tokens"] == 2 * 192
    assert (stats["demands_recorded"], stats["chunks_cut_demand"]) == (2, 0)


def test_demand_is_counted_once_however_often_admission_is_retried() -> None:
    """B waits for room behind a long request, is preempted by hand once it runs, and is admitted again."""
    engine = Engine(interval=-1, max_num_seqs=2, num_blocks=26, budget=64)
    shared = prompt_of(20, 1)
    engine.ask("a", shared + prompt_of(9, 2), 1)
    engine.add("long", prompt_of(50, 3), 20)
    engine.step()
    engine.add("b", shared + prompt_of(40, 4), 2)
    waited = 0
    while all(seq.request_id != "b" for seq in engine.core.scheduler.running):
        engine.step()
        waited += bool(engine.core.scheduler.waiting)
    assert waited > 5
    scheduler = engine.core.scheduler
    scheduler._preempt(scheduler.running.pop())
    engine.run()
    for name in ("long", "b"):
        engine.check_answer(name)
    stats = engine.core.cache_stats()
    assert stats["requests"] == 3 and stats["demands_recorded"] + stats["demands_declined"] == 1


def test_demand_is_declined_when_the_pool_cannot_hold_it_with_the_request() -> None:
    """Eleven of twelve pages are the request's own; the only slot is, too."""
    engine = Engine(interval=-1, num_blocks=12, max_num_seqs=1, checkpoint_slots=0, max_model_len=48, budget=64)
    shared = prompt_of(20, 1)
    engine.ask("a", shared + prompt_of(9, 2), 1)
    assert engine.ask("b", shared + prompt_of(24, 3), 1) == 0
    stats = engine.core.cache_stats()
    assert (stats["demands_recorded"], stats["demands_declined"]) == (0, 1)
    assert stats["matched_tokens"] == 20
    assert chunks_of(engine, "b") == [(0, 44)], "no chunk is cut for what cannot be kept"


def test_demand_is_counted_once_though_a_preempted_request_is_refused_again() -> None:
    """Nothing can be kept beside it, so that it is refused at its own pages when it comes back."""
    engine = Engine(interval=-1, num_blocks=12, max_num_seqs=1, checkpoint_slots=0, max_model_len=48, budget=16)
    shared = prompt_of(20, 1)
    engine.ask("a", shared + prompt_of(9, 2), 1)
    engine.add("b", shared + prompt_of(24, 3), 1)
    scheduler = engine.core.scheduler
    for _ in range(2):
        engine.step()
        engine.step()
        scheduler._preempt(scheduler.running.pop())
    engine.run()
    engine.check_answer("b")
    stats = engine.core.cache_stats()
    assert (stats["demands_recorded"], stats["demands_declined"]) == (0, 1)


def test_demand_is_withdrawn_when_room_goes() -> None:
    """B is admitted with room for its demand at 20, three pages and a slot; C takes of it before B gets there."""
    engine = Engine(interval=-1, num_blocks=14, max_num_seqs=2, checkpoint_slots=0, max_model_len=48, budget=10)
    shared = prompt_of(20, 1)
    engine.ask("a", shared + prompt_of(9, 2), 1)
    engine.add("b", shared + prompt_of(24, 3), 1)
    engine.add("c", prompt_of(2, 4), 20)
    engine.run()
    engine.check_answer("b")
    engine.check_answer("c")
    stats = engine.core.cache_stats()
    assert (stats["demands_recorded"], stats["demands_declined"], stats["chunks_cut_demand"]) == (1, 0, 0)
    assert chunks_of(engine, "b")[:3] == [(0, 8), (8, 16), (16, 24)]
    assert stats["checkpoints_dropped"] >= 1


def test_an_answer_is_resumed_after_its_last_boundary() -> None:
    """700 + 500 tokens, continued: at least 1152 of them are resumed, and one state was kept for the answer."""
    engine = large()
    begun = prompt_of(700, 2)
    engine.ask("begun", begun, 500)
    assert ready(engine) == [640, 1152]
    continued = begun + engine.outputs["begun"] + prompt_of(40, 3)
    assert engine.ask("continued", continued) == 1152
    assert engine.core.cache_stats()["checkpoints_superseded"] == (1152 - 704) // 64


@pytest.mark.parametrize(("length", "cached"), [(32, 40), (35, 32)])
def test_an_answer_with_speculation_is_kept_when_a_step_lands_on_a_boundary(length: int, cached: int) -> None:
    """Two tokens a step from 32 on stand at 36 and 40; from 35 on they never stand on a boundary."""
    engine = Engine(interval=-1, speculate=1, budget=64)
    prompt = prompt_of(length, 5)
    engine.ask("begun", prompt, 11)
    assert engine.ask("continued", prompt + engine.outputs["begun"] + [1]) == cached


@pytest.mark.parametrize("length", range(3, 14))
@pytest.mark.parametrize("answers", [True, False])
def test_what_goes_on_behind_a_prompt_loses_none_of_its_blocks(length: int, answers: bool) -> None:
    """Also where the prompt ends on a boundary, a block behind what a resend of it can match."""
    engine = Engine(interval=-1, budget=64, num_blocks=64)
    engine.manager.placement = replace(engine.manager.placement, answers=answers)
    prompt = prompt_of(length, 1)
    engine.ask("a", prompt, 1)
    assert engine.ask("more", prompt + prompt_of(3, 2), 1) == length // 4 * 4
    assert engine.ask("again", prompt, 1) == (length - 1) // 4 * 4


def test_the_end_of_a_prompt_on_a_boundary_makes_way_for_its_answer_s() -> None:
    engine = Engine(interval=-1, budget=64, num_blocks=64)
    engine.ask("a", prompt_of(8, 1), 1)
    assert ready(engine) == [4, 8]
    engine.ask("b", prompt_of(8, 2), 10)
    assert ready(engine) == [4, 4, 8, 16]


def test_guesses_go_before_anchors() -> None:
    """The ladder at 16 of the later prompt makes room, not the anchor at 12, which is the oldest of all."""
    engine = Engine(num_blocks=25, max_num_seqs=1, checkpoint_slots=3, budget=64)
    old = prompt_of(13, 1)
    engine.ask("old", old, 1)
    engine.ask("later", prompt_of(29, 2), 1)
    assert ready(engine) == [12, 16, 28]
    engine.ask("other", prompt_of(14, 3), 1)
    assert ready(engine) == [12, 12, 28] and engine.core.cache_stats()["checkpoints_evicted"] == 1
    assert engine.ask("old again", old, 1) == 12


def test_a_superseded_anchor_goes_before_the_newest_of_another_path() -> None:
    """Y is the oldest of all; X's first turn goes, because X's second one took its place."""
    engine = Engine(interval=-1, num_blocks=25, max_num_seqs=1, checkpoint_slots=3, budget=64)
    y, x = prompt_of(17, 1), prompt_of(21, 2)
    engine.ask("y", y, 1)
    engine.ask("x1", x, 1)
    assert engine.ask("x2", x + prompt_of(4, 3), 1) == 20
    assert ready(engine) == [16, 20, 24]
    engine.ask("z", prompt_of(13, 4), 1)
    assert ready(engine) == [12, 16, 24]
    assert engine.ask("y again", y, 1) == 16


def test_a_checkpoint_never_makes_its_own_reader_wait(backend: str) -> None:
    """The state that a request resumes from makes way for it (I6).

    Eleven of thirteen pages are the request's, and the image takes three; or the checkpoint has the last of two slots.
    """
    blocks = 13 if backend == "page" else 48
    engine = Engine(interval=-1, num_blocks=blocks, max_num_seqs=2, checkpoint_slots=0, max_model_len=52, budget=64)
    prompt = prompt_of(17, 1)
    engine.ask("a", prompt, 1)
    if backend == "slot":
        engine.add("long", prompt_of(2, 9), 20)
        engine.step()
    engine.add("b", prompt + prompt_of(27, 2), 1)
    engine.step()
    assert engine.cached["b"] == 16 and engine.finish["b"] == "length", "admitted and done in its first step"
    engine.run()
    engine.check_answer("b")
    stats = engine.core.cache_stats()
    assert stats["checkpoints_evicted"] >= 1 and stats["checkpoints_read_back_anchor"] == 1


def test_one_image_for_several_readers_in_one_step(backend: str) -> None:
    engine = Engine(interval=-1, budget=64, num_blocks=64)
    prompt = prompt_of(17, 1)
    engine.ask("a", prompt, 1)
    for i in range(3):
        engine.add(f"r{i}", prompt + prompt_of(6, 2 + i), 2)
    engine.step()
    plan = engine.runner.plans[-1]
    assert [p.chunk.start for p in plan.prefills] == [16, 16, 16]
    if backend == "page":
        assert len({restore.pages for restore in plan.maintenance.restores}) == 1
        assert len({restore.slot for restore in plan.maintenance.restores}) == 3
    engine.run()
    for i in range(3):
        engine.check_answer(f"r{i}")
    assert engine.core.cache_stats()["checkpoints_read_back_anchor"] == 3


@pytest.mark.parametrize("budget", [10, 16, 24, 64])
@pytest.mark.parametrize("length", [17, 40, 63])
@pytest.mark.parametrize("interval", [8, -1])
def test_a_rung_never_costs_a_forward_where_interior_states_are_exact(budget: int, length: int, interval: int) -> None:
    """Ladder, anchor and demand: the same chunks as without any checkpoint. Cut where the forward gives out none."""
    shared = prompt_of(length, 1)
    engines = {}
    for name, settings in {"plain": {"interval": 0}, "exact": {"interior_grid": 4}, "cut": {}}.items():
        settings = {"interval": interval, "budget": budget, "checkpoint_slots": 20, "num_blocks": 110, **settings}
        engine = engines[name] = Engine(**settings)
        for i, request in enumerate("ab"):
            engine.ask(request, shared + prompt_of(10, 2 + i), 3)
    exact, cut = engines["exact"], engines["cut"]
    assert chunks_of(exact, "a") == chunks_of(engines["plain"], "a")
    assert exact.core.cache_stats()["checkpoints_kept"] >= 2
    if interval == -1:
        assert exact.cached["b"] == 0 and exact.core.cache_stats()["demands_recorded"] == 1
        assert chunks_of(exact, "b") == chunks_of(engines["plain"], "b")
        assert exact.ask("c", shared + prompt_of(10, 9), 1) == length // 4 * 4
    assert sum(exact.manager.stats.cuts.values()) == 0
    if budget == 64:
        assert len(cut.runner.plans) > len(engines["plain"].runner.plans)
        assert sum(cut.manager.stats.cuts.values()) > 0


def test_kinds_of_rungs_read_back_are_told_apart() -> None:
    engine = Engine(budget=64, checkpoint_slots=20, num_blocks=90)
    prompt = prompt_of(41, 1)
    engine.ask("a", prompt, 1)
    assert engine.ask("ladder", prompt[:20] + prompt_of(10, 2), 1) == 16
    assert engine.ask("demand at 20", prompt[:28] + prompt_of(10, 3), 1) == 20
    assert engine.ask("demand at 28", prompt[:28] + prompt_of(10, 4), 1) == 28
    assert engine.ask("anchor", prompt, 1) == 40
    states = engine.manager.states
    assert states is not None
    assert states.cache.fates.read_back == {RungKind.ANCHOR: 1, RungKind.DEMAND: 2, RungKind.INTERVAL: 1}


def test_case_9_restored_then_hit_again() -> None:
    """A prefix restored from its checkpoint, then hit while the restored request still holds it, then once more alone."""
    engine = Engine(budget=64, num_blocks=128, checkpoint_slots=20, interval=-1)
    prompt = prompt_of(33, 1)
    engine.ask("cold", prompt, 12)
    engine.add("restored", prompt, 12)
    engine.step()
    engine.add("hit", prompt, 12)
    engine.run()
    assert (engine.cached["restored"], engine.cached["hit"]) == (32, 32)
    assert engine.ask("alone", prompt, 12) == 32
    answers = [engine.outputs[name] for name in ("cold", "restored", "hit", "alone")]
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.parametrize("shared", [12, 15, 16, 28])
def test_case_11_a_block_is_shared_whole_or_not_at_all(shared: int) -> None:
    """A page that holds 16 tokens as four entries of four: prompts that share some of its entries do not share it."""
    engine = Engine(block_size=16, num_blocks=32, budget=64, checkpoint_slots=20, interval=16)
    first, second = prompt_of(40, 1), prompt_of(40, 2)
    assert first[shared] != second[shared]
    engine.ask("first", first, 1)
    assert engine.ask("second", first[:shared] + second[shared:], 1) == shared // 16 * 16


def test_a_resend_hits_in_a_full_pool_though_its_answer_went_on() -> None:
    """The answer's anchor does not put the prompt's first in line: older paths go."""
    engine = Engine(num_blocks=60, max_num_seqs=1, checkpoint_slots=6, budget=64, interval=-1)
    for i in range(12):
        engine.ask(f"old{i}", prompt_of(13, i), 1)
    prompt = prompt_of(21, 100)
    engine.ask("p", prompt, 6)
    engine.ask("small", prompt_of(9, 101), 1)
    assert engine.ask("p again", prompt, 1) == 20

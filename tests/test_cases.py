"""The field cases of prefix caching with state that need no model: tiny geometry, page 4, ladder 16, recording state."""

from __future__ import annotations

import random

import pytest

from tests.recording import VOCAB, Engine, prompt_of

pytestmark = pytest.mark.usefixtures("backend")
BUDGETS = pytest.mark.parametrize("budget", [10, 16, 24])


@BUDGETS
def test_case_1_cold_other_again(budget: int) -> None:
    """P cold, Q on the same slot, then P again: nothing of Q is left in it."""
    engine = Engine(budget=budget, max_num_seqs=1, checkpoint_slots=0, interval=0)
    p, q = prompt_of(30, 1), prompt_of(21, 2)
    engine.ask("p", p)
    engine.ask("q", q)
    engine.ask("p again", p)
    assert engine.outputs["p"] == engine.outputs["p again"]


def test_case_2_a_chunk_that_ends_inside_a_grid_files_nothing() -> None:
    """Two prompts shorter than two grids; the second one's first chunk ends at 5 of 16."""
    engine = Engine(budget=21, max_num_seqs=2)
    a, b = prompt_of(16, 1), prompt_of(30, 2)
    engine.add("a", a, 1)
    engine.add("b", b, 1)
    engine.step()
    starts = [(p.seq.request_id, p.chunk.start, p.chunk.end) for p in engine.runner.plans[0].prefills]
    assert starts == [("a", 0, 12), ("b", 0, 8)], "chunks end on boundaries"
    engine.run()
    assert engine.ask("b again", b, 1) == 28


@BUDGETS
@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_case_4_restored_then_continued_in_pieces(budget: int, pieces: int) -> None:
    """Restored at 16, then 7 more tokens in one call, as 1+6, as 3+4: the piece sizes follow from the budget left."""
    base, more = prompt_of(17, 3), prompt_of(6, 4)
    engine = Engine(budget={1: budget, 2: 6, 3: 4}[pieces], max_num_seqs=2)
    assert engine.ask("base", base, 1) == 0
    assert engine.ask("more", base + more) == 16


@BUDGETS
@pytest.mark.parametrize("after", [0, 1, 5])
def test_case_6_preempted_equals_unpreempted(budget: int, after: int) -> None:
    """Preempt before decode and after k tokens, twice; the slot is given back."""
    engine = Engine(budget=budget, max_num_seqs=2)
    engine.add("r", prompt_of(18, 5), 12)
    scheduler = engine.core.scheduler
    for _ in range(2):
        while not scheduler.running or scheduler.running[0].num_output_tokens < after:
            engine.step()
        scheduler._preempt(scheduler.running.pop())
        assert engine.manager.states.slots.num_live == 0
        engine.check()
        engine.poison()
    engine.run()
    engine.check_answer("r")
    assert scheduler.num_preemptions == 2
    assert engine.manager.stats.requests == 1, "counted once, however often it is admitted"


def test_case_7_poisoned_memory_is_never_read() -> None:
    """Freed pages and slots are poisoned after each step: abort in mid-prefill, then fresh requests stay right."""
    engine = Engine(budget=10, num_blocks=24, max_num_seqs=2)
    engine.add("gone", prompt_of(40, 6))
    engine.step()
    engine.core.abort_requests(["gone"])
    engine.poison()
    for i in range(6):
        engine.ask(f"fresh{i}", prompt_of(40, 6 + i % 3))


@pytest.mark.parametrize("length", [15, 16, 17])
@BUDGETS
def test_case_8_never_a_hit_on_the_whole_prompt(length: int, budget: int) -> None:
    engine = Engine(budget=budget)
    prompt = prompt_of(length)
    for name, cached in (("first", 0), ("again", (length - 1) // 4 * 4)):
        engine.runner.consumed.clear()
        assert engine.ask(name, prompt, 1) == cached
        assert engine.runner.consumed == list(range(cached, length)), "each token once, the last one always"


@BUDGETS
def test_case_10_scheduled_plus_cached_is_the_prompt(budget: int) -> None:
    engine = Engine(budget=budget)
    base = prompt_of(33)
    engine.ask("base", base)
    for extra in (0, 1, 5, 20):
        engine.runner.consumed.clear()
        prompt = base + prompt_of(extra, 9)
        cached = engine.ask(f"plus {extra}", prompt, 1)
        assert len(engine.runner.consumed) + cached == len(prompt) and cached >= 32


@BUDGETS
def test_case_13_every_length_hits(budget: int) -> None:
    """The same prompt twice, the prompt plus one token, for every length from grid - 2 to 3 grids + 2."""
    for length in range(14, 51):
        engine = Engine(budget=budget)
        prompt = prompt_of(length)
        engine.ask("cold", prompt, 1)
        limit = (length - 1) // 4 * 4
        assert engine.ask("same", prompt, 1) == limit
        assert engine.ask("plus one", [*prompt, 7], 1) >= limit


@BUDGETS
@pytest.mark.parametrize("edited", [1, 2, 3, 4])
def test_case_14_an_edit_near_the_end_hits_a_lower_rung(budget: int, edited: int) -> None:
    """An edit in the last page of a prompt of 41 tokens: the anchor at 40 holds, or the ladder's rung below it."""
    prompt = prompt_of(41)
    other = list(prompt)
    other[-edited] = (other[-edited] + 1) % VOCAB
    engine = Engine(budget=budget, checkpoint_slots=8)
    engine.ask("base", prompt, 1)
    assert engine.ask("edited", other, 1) == (40 if edited == 1 else 32)


def test_case_15_no_room_for_a_checkpoint_is_counted_and_skipped() -> None:
    """Every slot is live, and fewer pages are left than an image takes: rungs are dropped, requests end as they should."""
    engine = Engine(max_num_seqs=2, checkpoint_slots=0, budget=128, num_blocks=24)
    engine.add("a", prompt_of(44, 1), 3)
    engine.add("b", prompt_of(44, 2), 3)
    engine.run()
    assert engine.core.cache_stats()["checkpoints_dropped"] >= 1
    for name in "ab":
        engine.check_answer(name)


def test_case_15_each_rung_without_room_is_counted_once_and_cuts_nothing() -> None:
    """A request that leaves no page and no slot: its ladder's 16 and 32, its anchor at 40, its answer at 44."""
    engine = Engine(num_blocks=12, max_num_seqs=1, budget=64, max_model_len=48, checkpoint_slots=0)
    engine.ask("a", prompt_of(42), 4)
    assert [(p.chunk.start, p.chunk.end) for plan in engine.runner.plans for p in plan.prefills] == [(0, 42)]
    stats = engine.core.cache_stats()
    assert (stats["checkpoints_dropped"], stats["checkpoints_kept"]) == (4, 0)


@BUDGETS
def test_case_16_random_ends_leave_the_pool_whole(budget: int) -> None:
    rng = random.Random(budget)
    engine = Engine(budget=budget, num_blocks=16, max_model_len=64, max_num_seqs=4)
    for i in range(60):
        engine.add(f"r{i}", prompt_of(rng.randrange(1, 40), rng.randrange(5)), rng.randrange(1, 20))
        for _ in range(rng.randrange(4)):
            if engine.core.has_unfinished():
                engine.step()
        if rng.random() < 0.4:
            engine.core.abort_requests([f"r{rng.randrange(i + 1)}"])
            engine.check()
            engine.poison()
    engine.run()


@pytest.mark.parametrize(("budget", "interval"), [(16, 12), (3, 16), (2, 16), (5, 4)])
def test_case_18_odd_budgets_make_progress(budget: int, interval: int, caplog: pytest.LogCaptureFixture) -> None:
    """Budget 16 with grid 12 and two prompts; a budget smaller than the grid: progress, right, and a warning."""
    engine = Engine(budget=budget, interval=interval, max_num_seqs=2, checkpoint_slots=20, num_blocks=128)
    if budget < engine.block_size:
        assert f"--max-num-batched-tokens={budget} is below --block-size=4" in caplog.text
    engine.add("a", prompt_of(30, 1))
    engine.add("b", prompt_of(27, 2))
    engine.run()
    engine.check_answer("a")
    engine.check_answer("b")
    assert engine.ask("a again", prompt_of(30, 1)) == 28


@pytest.mark.parametrize("budget", [4, 5, 6])
def test_case_18_a_prompt_does_not_wait_until_all_decodes_have_ended(budget: int) -> None:
    """What the decodes leave of the budget is less than a block in every step: pieces of blocks are computed."""
    engine = Engine(budget=budget, max_num_seqs=4, num_blocks=80)
    for i in range(3):
        engine.add(f"long{i}", prompt_of(1, i), 60)
    for _ in range(3):
        engine.step()
    prompt = prompt_of(13, 9)
    engine.add("short", prompt, 2)
    while "short" not in engine.finish:
        engine.step()
    assert engine.core.scheduler.running and len(engine.outputs["long0"]) < 30
    engine.run()
    engine.check_answer("short")
    assert engine.ask("short again", prompt, 2) == 12


def test_case_20_settings_that_cannot_hit_say_so(caplog: pytest.LogCaptureFixture) -> None:
    Engine(block_size=128, num_blocks=1, max_model_len=96, interval=-1)
    assert "prefix caching cannot hit: --block-size=128" in caplog.text
    caplog.clear()
    Engine(interval=0)
    assert "state checkpoints are off" in caplog.text
    caplog.clear()
    Engine(interval=3)
    assert "--state-checkpoint-interval-tokens=3 is below --block-size=4" in caplog.text
    caplog.clear()
    Engine(interval=18)
    assert "snaps to the block grid: 16" in caplog.text


def test_case_20_a_pool_too_narrow_for_checkpoints_says_so(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    """One request of the longest kind leaves no room for an image; the running requests take every slot."""
    Engine(num_blocks=26, max_model_len=96, max_num_seqs=2, checkpoint_slots=0, speculate=2)
    if backend == "page":
        assert (
            "no state can be kept beside one request of 96 tokens: it takes 24 pages and an image 3, of 26"
            in caplog.text
        )
    else:
        assert "no slot is left for state checkpoints while 2 requests run (3 slots a request)" in caplog.text
    caplog.clear()
    Engine(num_blocks=27, max_model_len=96, max_num_seqs=2, checkpoint_slots=1, speculate=2)
    assert caplog.text == ""


def test_case_17_crossing_rungs_never_preempts_or_starves() -> None:
    """Four requests cross rungs together in a pool that they fill to the last page: a checkpoint is dropped, no more."""
    engine = Engine(num_blocks=44, max_num_seqs=4, budget=64, checkpoint_slots=1, max_model_len=48)
    for i in range(4):
        engine.add(f"r{i}", prompt_of(33, i), 8)
    engine.run()
    assert engine.core.scheduler.num_preemptions == 0
    assert engine.core.cache_stats()["checkpoints_dropped"] > 0
    plans = engine.runner.plans
    for i in range(4):
        engine.check_answer(f"r{i}")
        steps = [n for n, plan in enumerate(plans) if f"r{i}" in {seq.request_id for seq in plan.decodes}]
        assert steps == list(range(steps[0], steps[0] + len(steps))) and len(steps) >= 7, "a token in every step"


def test_equal_prompts_at_once_are_computed_once() -> None:
    """A prompt that is being computed right now is waited for, not computed again."""
    engine = Engine(budget=64)
    prompt = prompt_of(33)
    for i in range(3):
        engine.add(f"r{i}", prompt)
    engine.run()
    assert [engine.cached[f"r{i}"] for i in range(3)] == [0, 32, 32]


def test_admission_leaves_a_page_for_each_running_request() -> None:
    """Without that headroom a newcomer takes the pages that the running ones decode into, and is preempted at once."""
    engine = Engine(num_blocks=12, max_num_seqs=3, budget=64, max_model_len=48, checkpoint_slots=4)
    engine.add("a", prompt_of(16, 1), 8)
    engine.add("b", prompt_of(16, 2), 8)
    engine.step()
    engine.add("c", prompt_of(13, 3), 8)
    engine.run()
    assert engine.core.scheduler.num_preemptions == 0


def test_last_slot_is_adopted() -> None:
    """The only free slot is the checkpoint that the request resumes from: it becomes the request's own."""
    engine = Engine(max_num_seqs=2, checkpoint_slots=0, budget=64)
    prompt = prompt_of(19, 1)
    engine.ask("first", prompt, 1)
    engine.add("long", prompt_of(2, 2), 20)
    engine.step()
    engine.add("again", prompt, 1)
    engine.run()
    engine.check_answer("again")
    engine.check_answer("long")
    assert engine.cached["again"] == 16


def test_salts_share_nothing() -> None:
    engine = Engine(num_blocks=128, checkpoint_slots=20)
    prompt = prompt_of(33)
    assert engine.ask("a", prompt, salt="a") == 0
    assert engine.ask("b", prompt, salt="b") == 0
    assert engine.ask("none", prompt) == 0
    assert engine.ask("a again", prompt, salt="a") == 32


def test_failed_forward_loses_only_its_requests() -> None:
    engine = Engine(budget=64)
    engine.add("lost", prompt_of(33))
    engine.runner.fail_next = True
    engine.step()
    assert engine.finish["lost"] == "error"
    engine.check_idle()
    assert engine.ask("next", prompt_of(33)) == 0


def test_reset_forgets_and_running_requests_go_on() -> None:
    engine = Engine(budget=16)
    prompt = prompt_of(33)
    engine.ask("first", prompt)
    engine.add("running", prompt_of(30, 2), 8)
    engine.step()
    assert engine.core.reset_prefix_cache()
    engine.check()
    engine.run()
    engine.check_answer("running")
    assert engine.ask("again", prompt) == 0

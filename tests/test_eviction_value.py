"""The order of ByValue, worked by hand, and what a decision costs."""

from __future__ import annotations

import sys

import pytest

from atom.model_engine.eviction import Ending
from atom.model_engine.eviction_returns import EDGES, PRIOR, SHORTEST_WAITS, ReturnTimes, Role
from atom.model_engine.eviction_value import MOST_HEIRS, ByValue
from atom.model_engine.messages import EngineRequest
from atom.model_engine.placement import RungKind
from atom.model_engine.state_cache import Checkpoint
from atom.sampling_params import SamplingParams
from tests.recording import Engine, prompt_of
from tests.test_policies import World, kept, keys_of


def test_pages_without_a_checkpoint_go_before_anything() -> None:
    world = World(ByValue(), 16)
    world.serve("aaaa")
    table = world.start("bbbb")
    assert table is not None
    world.pool.release(table)
    world.pool.release(world.pool.take(9))
    assert kept(world) == {"aaaa"} and world.pool.num_cached == 4


def test_a_superseded_anchor_and_a_guess_go_before_pages_that_can_be_resumed() -> None:
    """14 pages: the path's five, its three images' nine. Each further image takes the place of the least."""
    world = World(ByValue(), 14)
    table = world.start("aaaaa")
    assert table is not None
    world.keep("aa", RungKind.INTERVAL)
    world.keep("aaa")
    world.keep("aaaaa", before="aaa")
    world.pool.release(table)
    world.pool.release(world.pool.take(1))
    assert len(kept(world)) == 2 and "aaaaa" in kept(world)
    world.pool.release(world.pool.take(4))
    assert kept(world) == {"aaaaa"} and world.pool.num_cached == 5


def test_an_answer_s_end_that_saves_less_than_it_takes_goes_before_a_path() -> None:
    """It saves one block over its prompt's end, for three pages; the older path's end saves four for seven."""
    world = World(ByValue(), 18)
    world.serve("bbbb")
    table = world.start("aaaa")
    assert table is not None
    world.keep("aaaa")
    assert world.answer("aaaa", table) == "aaaac"
    world.pool.release(table)
    assert world.pool.num_vacant == 0
    world.pool.take(1)
    assert kept(world) == {"bbbb", "aaaa"}


def test_a_path_goes_as_a_unit() -> None:
    """The oldest path loses its end and with it its image; the rest of it goes before the next path is touched."""
    world = World(ByValue(), 20)
    world.serve("aaaa")
    world.serve("bbbb")
    world.pool.take(world.pool.num_vacant + 1)
    assert kept(world) == {"bbbb"} and world.pool.num_cached == 7
    world.pool.take(world.pool.num_vacant + 3)
    assert kept(world) == {"bbbb"} and world.pool.num_cached == 4
    world.pool.take(1)
    assert not kept(world)


def test_a_shared_prefix_outlives_its_branches() -> None:
    world = World(ByValue(), 24)
    for path in ("aab", "aac", "aad"):
        table = world.start(path)
        assert table is not None
        world.keep("aa", RungKind.DEMAND)
        world.pool.release(table)
        world.time += 1
    world.pool.release(world.pool.take(world.pool.num_vacant + 3))
    assert world.pool.holds(b"aa") and not any(world.pool.holds(key) for key in (b"aab", b"aac", b"aad"))


def test_a_rung_that_saves_much_does_not_hide_one_that_saves_little() -> None:
    """A live path with a rung of eight blocks and a younger one that saves one block more, in a pool that is full."""
    world = World(ByValue(), 15)
    assert world.start("a" * 9) is not None
    world.keep("a" * 8, RungKind.INTERVAL)
    world.keep("a" * 9, RungKind.INTERVAL)
    world.pool.take(1)
    assert kept(world) == {"a" * 8}


def test_what_comes_back_is_kept_and_what_does_not_goes() -> None:
    """Paths that ended with a tool call come back, those that ended the turn do not: the younger of these goes first."""
    world = World(ByValue(), 400)
    for i in range(12):
        name = chr(ord("a") + i)
        ending = Ending.TOOL_CALL if i % 2 else Ending.END_TURN
        path = name
        for _ in range(4 if i % 2 else 1):
            world.serve(path, ending, before=path[:-1])
            path += name
        world.time += 600
    world.serve("y", Ending.TOOL_CALL)
    world.serve("z", Ending.END_TURN)
    returns = world.policy.policy.returns
    y, z = returns.get(b"y"), returns.get(b"z")
    assert y is not None and z is not None
    assert returns.urgency(y, world.time) > returns.urgency(z, world.time)
    while {"y", "z"} <= kept(world):
        world.pool.take(world.pool.num_vacant + 1)
    assert "y" in kept(world)


def test_returns_are_learned_by_kind() -> None:
    """Four of five come back after 3 s: their share; nothing is known of others but what is assumed."""
    returns = ReturnTimes()
    assert returns.urgency(returns.remember(b"x", Role.PROMPT, 0, 0.0), 0.0) > 0
    now = 0.0
    for i in range(500):
        boundary = returns.remember(str(i).encode(), Role.PROMPT, 0, now)
        returns.wait(boundary, now)
        if i % 5:
            returns.came_back(boundary, now + 3.0)
            returns.forget(str(i).encode())
        now += 3.0
    returns.advance(now + EDGES[-1])
    fresh = returns.remember(b"fresh", Role.PROMPT, 0, now)
    assert returns.urgency(fresh, now) == pytest.approx(0.8 / 10, rel=0.1)
    guess = returns.remember(b"guess", Role.INTERVAL, 0, now)
    assert returns.urgency(guess, now) == pytest.approx((1 - (1 - PRIOR[Role.INTERVAL]) ** len(EDGES)) / 10, rel=0.01)


def test_an_end_that_is_gone_leaves_its_returns_to_the_checkpoint_below() -> None:
    world = World(ByValue(), 60)
    table = world.start("aaa")
    assert table is not None
    world.keep("aa")
    world.keep("aaa")
    world.pool.release(table)
    policy = world.policy.policy
    below, end = policy.returns.get(b"aa"), policy.returns.get(b"aaa")
    assert below is not None and end is not None
    policy.returns.wait(below, world.time - 100)
    alone = policy._urgency(below, world.time)
    policy._bequeath(end)
    assert below.lost == [end] and policy._urgency(below, world.time) == policy._urgency(end, world.time) > alone


def test_nobody_stands_in_for_an_end_that_is_kept_again() -> None:
    """Kept and lost in turns, it takes one of the places for lost ends; while it is kept, none."""
    world = World(ByValue(), 60)
    policy = world.policy.policy
    for path in ("aab", "aac", "aac", "aac"):
        table = world.start(path)
        assert table is not None
        world.keep("aa", RungKind.DEMAND)
        kept_there = world.images.find(keys_of(path)[-1]) or world.keep(path)
        assert kept_there is not None
        world.pool.release(table)
        below, end = policy.returns.get(b"aa"), policy.returns.get(path.encode())
        assert below is not None and end is not None and end not in below.lost
        world.policy.remove_image(kept_there)
        policy._bequeath(end)
        world.images._remove(kept_there)
    aab, aac = policy.returns.get(b"aab"), policy.returns.get(b"aac")
    assert below.lost == [aac, aab]


def test_a_shared_prefix_stands_in_for_a_few_ends_and_not_for_all() -> None:
    world = World(ByValue(), 400)
    policy, ends = world.policy.policy, []
    for i in range(3 * MOST_HEIRS):
        path = "aab" + chr(300 + i)
        table = world.start(path)
        assert table is not None
        world.keep("a")
        world.keep(path)
        world.pool.release(table)
        end = policy.returns.get(path.encode())
        assert end is not None
        ends.append(end)
        policy._bequeath(end)
    root = policy.returns.get(b"a")
    assert root is not None and root.lost == ends[: -MOST_HEIRS - 1 : -1]


def test_what_many_resume_at_is_expected_sooner_than_what_one_does() -> None:
    times = ReturnTimes()
    shared = times.remember(b"shared", Role.DEMAND, 0, 0.0)
    now = 0.0
    for _ in range(20):
        times.wait(shared, now)
        now += 0.25
        times.came_back(shared, now)
    times.wait(shared, now)
    assert SHORTEST_WAITS[shared.pace] == SHORTEST_WAITS[0] / 64
    alone = times.remember(b"alone", Role.DEMAND, shared.returns, now)
    times.wait(alone, now)
    assert alone.kind == shared.kind and times.urgency(shared, now) == 64 * times.urgency(alone, now)


def test_who_branches_off_a_shared_prefix_begins_a_path_of_its_own() -> None:
    world = World(ByValue(), 60)
    world.serve("aab")
    policy = world.policy.policy
    for path in ("aabc", "aabcd"):
        world.serve(path)
    assert policy.returns.get(b"aabcd").returns == 2
    shared = policy.returns.get(b"aab")
    shared.role = Role.DEMAND
    world.serve("aabx")
    assert policy.returns.get(b"aabx").returns == 0


def test_in_need_the_newest_anchor_goes_before_a_prefix_that_many_resume_at() -> None:
    world = World(ByValue(), 60)
    policy = world.policy.policy
    world.start("ab")
    root = world.keep("a", RungKind.DEMAND)
    end = world.keep("ab")
    boundary = policy.returns.get(b"a")
    for _ in range(20):
        policy.returns.came_back(boundary, world.time + 0.25)
        policy.returns.wait(boundary, world.time)
    policy.queues.file(root, boundary)
    assert policy.pop() is end and policy.pop() is root


def test_the_prompt_of_a_preempted_request_is_still_a_prompt() -> None:
    """It gives its pages back, runs again, and its end waits for the next turn as any other's."""
    world = World(ByValue(), 60)
    policy = world.policy.policy
    keys = keys_of("abcd")
    policy.admitted(keys, 0, 0)
    table = world.pool.take(4)
    for i, page in enumerate(table):
        world.pool.publish((page,), (keys[i],), i, keys[i - 1] if i else None)
    world.pool.release(table)
    policy.readmitted(keys)
    world.pool.claim(table)
    world.keep("abcd")
    assert policy.returns.get(b"abcd").role is Role.PROMPT
    world.time += 5
    world.pool.release(table, Ending.TOOL_CALL)
    assert policy.returns.get(b"abcd").kind == (Role.PROMPT, 0, Ending.TOOL_CALL)


def test_two_running_prompts_may_share_an_end() -> None:
    """When the first is over, the anchor that the second keeps there is still a prompt's."""
    policy = ByValue()
    world = World(policy, 60)
    first, second = world.start("aabb"), world.start("aabbc")
    assert first is not None and second is not None
    world.pool.release(first)
    world.keep("aabb")
    assert policy.returns.get(b"aabb").role is Role.PROMPT


def steps_of_a_decision(paths: int) -> int:
    """Lines of Python that ten decisions run with ``paths`` paths in the pool, once what happened before is filed."""
    world = World(ByValue(), 10 * paths)
    for i in range(paths):
        world.serve(chr(200 + i) * 3)
    world.pool.take(world.pool.num_vacant + 1)
    lines = 0

    def count(frame: object, event: str, arg: object) -> object:
        nonlocal lines
        lines += event == "line"
        return count

    sys.settrace(count)
    try:
        world.pool.take(10)
    finally:
        sys.settrace(None)
    return lines


def test_a_decision_does_not_grow_with_the_pool() -> None:
    few, many = steps_of_a_decision(20), steps_of_a_decision(640)
    assert many <= 2 * few


def test_what_hangs_on_a_page_that_is_withdrawn_is_lost_and_goes() -> None:
    """The page of `a` is withdrawn while `ab` hangs on it, and then holds `abz`, which hangs on `ab`: no circle of the two."""
    world = World(ByValue(), 24)
    world.serve("ab", demand="a")
    root = world.pool.block_of(b"a")
    held = world.pool.take(2)
    broken = world.start("ac")
    assert broken is not None and broken[0] == root
    world.pool.withdraw(broken)
    world.pool.release(broken)
    world.pool.release(held)
    again = world.start("abz")
    assert again is not None and again[2] == root
    world.pool.release(again)
    world.check()
    assert len(world.pool.take(world.pool.num_available)) == 24


def test_boundaries_that_are_kept_or_resumed_are_not_forgotten() -> None:
    """Room for four: of ten others that come and go, the latest two are remembered beside these."""
    world = World(ByValue(), 100)
    returns = ReturnTimes(capacity=4)
    world.serve("k")
    kept_one = returns.remember(b"kept", Role.PROMPT, 0, 0.0)
    kept_one.image = world.images.find(b"k")
    resumed = returns.remember(b"resumed", Role.PROMPT, 0, 0.0)
    for i in range(10):
        other = returns.remember(str(i).encode(), Role.PROMPT, 0, float(i))
        resumed.image = Checkpoint(b"resumed", RungKind.ANCHOR)
        returns.wait(resumed, float(i))
        returns.came_back(resumed, float(i))
        assert returns.get(str(i).encode()) is other
    assert returns.get(b"kept") is kept_one and returns.get(b"resumed") is resumed
    assert returns.get(b"7") is None and len(returns._known) == 4


def test_a_preempted_request_teaches_nothing_while_it_runs_again() -> None:
    world = World(ByValue(), 40)
    table = world.start("aaaa")
    assert table is not None
    world.keep("aaaa")
    world.pool.release(table)
    policy = world.policy.policy
    end = policy.returns.get(b"aaaa")
    assert end is not None and end.times.inside[0] == 1
    policy.readmitted(keys_of("aaaa"))
    policy.returns.advance(world.time + 1000)
    assert not any(end.times.stayed) and not any(end.times.inside)


def test_further_samples_and_a_resend_leave_a_prompt_s_end_the_newest() -> None:
    """Nobody went on behind it: it counts as what the next turn resumes from, not as passed."""
    core = Engine(interval=-1, num_blocks=64, max_num_seqs=4, budget=64).core
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    prompt = prompt_of(9, 1)
    for batch in (("first", "second sample", "third sample"), ("again",)):
        for name in batch:
            core.add_request(EngineRequest(name, prompt, params, counted="sample" not in name))
        while core.has_unfinished():
            core.step()
    (end,) = [end for end in core.block_manager.pool.policy.returns._known.values() if end.end == 2]
    assert end.kind == (Role.PROMPT, 1, end.ending)


def test_a_prompt_s_own_end_does_not_wait_while_the_prompt_runs_again() -> None:
    """The other end of its earlier answer, which no resend passes, goes on waiting."""
    world = World(ByValue(), 40)
    table = world.start("aaaa")
    assert table is not None
    world.keep("aaaa")
    answered = world.answer("aaaa", table)
    world.pool.release(table)
    assert world.start("aaaa") is not None
    returns = world.policy.policy.returns
    end, answer = returns.get(b"aaaa"), returns.get(answered.encode())
    assert end is not None and answer is not None
    assert (end.role, end.returns) == (Role.PROMPT, 1) and answer.role is Role.ANSWER
    returns.advance(world.time + 1000)
    assert not any(end.times.stayed) and any(answer.times.stayed)


def test_the_end_of_a_prompt_on_a_boundary_may_go_alone_and_its_anchor_not() -> None:
    engine = Engine(interval=-1, num_blocks=64, budget=64)
    engine.ask("a", prompt_of(8, 1), 3)
    known = engine.manager.pool.policy.returns._known
    assert {len(engine.names[key]): end.role for key, end in known.items()} == {4: Role.PROMPT, 8: Role.ANSWER}


def test_a_checkpoint_that_is_gone_is_passed_by_once() -> None:
    """Rungs of a long prompt that go as soon as they come do not make the next one look at all of them."""
    world = World(ByValue(), 60)
    table = world.start("a" * 30)
    assert table is not None
    looks = []
    nearest_above = world.pool.nearest_above
    world.pool.nearest_above = lambda block, known: looks.append(block) or nearest_above(block, known)  # type: ignore
    for end in range(3, 30, 3):
        looks.clear()
        world.keep("a" * end, RungKind.INTERVAL)
        world.images.orphan(keys_of("a" * end)[-1:])
    assert len(looks) == 2

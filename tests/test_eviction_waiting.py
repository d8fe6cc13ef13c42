"""The queue as foresight: what waiting requests will resume from is kept, that of the nearest longest."""

from __future__ import annotations

import pytest

from atom.model_engine.eviction_value import ByValue
from atom.model_engine.eviction_waiting import LEAST_WAIT, MOST_AWAITED, Ticket, WaitingRequests
from tests.recording import Engine, prompt_of
from tests.test_policies import World, kept, keys_of


def near(queue: WaitingRequests) -> list[Ticket]:
    return list(queue.come_near())


def test_the_wait_is_the_place_in_the_queue_times_the_time_between_admissions() -> None:
    queue = WaitingRequests()
    for i in range(200):
        queue.add(str(i), [b"k"], first=False)
    tickets = near(queue)
    for i in range(100):
        queue.leave(str(i), 3.0 * i, admitted=True)
    assert queue.wait(tickets[100]) == LEAST_WAIT
    assert queue.wait(tickets[110]) == pytest.approx(30, rel=0.02)


def test_a_pause_in_which_nobody_waits_is_no_time_between_admissions() -> None:
    queue = WaitingRequests()
    for now in (0.0, 1000.0, 2000.0):
        queue.add("alone", [b"k"], first=False)
        near(queue)
        queue.leave("alone", now, admitted=True)
    queue.add("a", [b"k"], first=False)
    queue.add("b", [b"k"], first=False)
    assert queue.wait(near(queue)[1]) == pytest.approx(2 * LEAST_WAIT)


def test_the_first_of_the_queue_are_looked_at_and_others_move_up() -> None:
    queue = WaitingRequests()
    for i in range(MOST_AWAITED + 3):
        queue.add(str(i), [b"k", str(i).encode()], first=False)
    assert [ticket.number for ticket in near(queue)] == list(range(MOST_AWAITED))
    assert queue.leave(str(MOST_AWAITED), 0.0, admitted=False) is not None
    assert near(queue) == [] and queue.leave("nobody", 0.0, admitted=True) is None
    queue.leave("0", 0.0, admitted=True)
    assert [ticket.number for ticket in near(queue)] == [MOST_AWAITED + 1]
    assert len(queue.through(b"k", 0)) == MOST_AWAITED
    assert [ticket.number for ticket in queue.through(b"7", 1)] == [7]


def test_a_preempted_request_waits_in_front() -> None:
    queue = WaitingRequests()
    for name in "abc":
        queue.add(name, [b"k"], first=False)
    near(queue)
    queue.add("preempted", [b"k"], first=True)
    (ticket,) = near(queue)
    assert queue.through(b"k", 0)[0] is ticket and queue.wait(ticket) == LEAST_WAIT


def two_paths() -> World:
    """14 pages, all taken: two paths of four blocks with an image each, the first one unused for longer."""
    world = World(ByValue(), 14)
    world.serve("aaaa")
    world.serve("bbbb")
    assert world.pool.num_vacant == 0
    return world


def test_what_a_queued_request_resumes_from_outlives_what_is_younger() -> None:
    world = two_paths()
    world.policy.queued("waits", keys_of("aaaax"))
    world.pool.take(1)
    assert kept(world) == {"aaaa"}


def test_a_request_that_is_dropped_protects_nothing() -> None:
    world = two_paths()
    world.policy.queued("waits", keys_of("aaaax"))
    world.policy.unqueued("waits", admitted=False)
    world.pool.take(1)
    assert kept(world) == {"bbbb"}


def test_of_two_that_are_awaited_the_one_needed_last_goes() -> None:
    world = two_paths()
    world.policy.queued("first", keys_of("bbbbx"))
    world.policy.queued("second", keys_of("aaaax"))
    world.pool.take(1)
    assert kept(world) == {"bbbb"}


def test_a_checkpoint_that_is_kept_while_they_wait_is_awaited_too() -> None:
    """The request queues before its conversation's last turn is done."""
    world = World(ByValue(), 14)
    table = world.start("aaaa")
    assert table is not None
    world.policy.queued("waits", keys_of("aaaax"))
    world.keep("aaaa")
    world.pool.release(table)
    world.serve("bbbb")
    world.pool.take(1)
    assert kept(world) == {"aaaa"}


def test_when_it_is_gone_the_next_below_is_awaited() -> None:
    world = World(ByValue(), 40)
    world.serve("aaaa", demand="aa")
    world.policy.queued("waits", keys_of("aaaax"))
    policy = world.policy.policy
    end, below = policy.returns.get(b"aaaa"), policy.returns.get(b"aa")
    assert end is not None and below is not None and end.ticket is not None and below.ticket is None
    policy._bequeath(end)
    assert end.ticket is None and below.ticket is not None


def resumed_tokens(with_queue: bool) -> int:
    """Six conversations of three turns, all queued, in a pool that holds about three."""
    engine = Engine(interval=-1, num_blocks=52, max_num_seqs=1, budget=64)
    pool = engine.manager.pool
    pool.now = lambda: float(len(engine.runner.plans))
    if not with_queue:
        pool.policy.queued = lambda *args, **kwargs: None
    prompts = [prompt_of(33, i) for i in range(6)]
    for turn in range(3):
        for i, prompt in enumerate(prompts):
            engine.add(f"{i} {turn}", prompt, 1)
            prompts[i] = prompt + prompt_of(8, 10 * turn + i)
    engine.run()
    return sum(engine.cached.values())


def test_a_queue_of_conversations_resumes_more_than_without_looking_at_it() -> None:
    assert resumed_tokens(with_queue=True) > resumed_tokens(with_queue=False) > 0


def test_nothing_is_left_of_requests_that_came_and_went() -> None:
    engine = Engine(interval=-1, max_num_seqs=1, num_blocks=64)
    for i in range(20):
        engine.add(str(i), prompt_of(9, i), 2)
    engine.step()
    engine.core.abort_requests([str(i) for i in range(10, 20)])
    engine.run()
    queue = engine.manager.pool.policy.queue
    assert not queue._tickets and not queue._near and not queue._far and not queue._gone

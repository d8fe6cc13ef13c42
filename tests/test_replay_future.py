"""Foresight over a trace."""

from __future__ import annotations

from atom.replay.arrivals import due_times
from atom.replay.future import NEVER, Future
from tests.replay_traces import make_trace


def keys_of(trace, index: int) -> list[bytes]:
    return [trace.keys[number] for number in trace.requests[index].blocks]


def test_a_session_is_shifted_by_its_latest_arrival():
    lines = [(0, 0.0, "ab", 1, 1), (0, 10.0, "abc", 1, 1), (0, 1000.0, "ax", 1, 1), (1, 0.0, "q", 1, 1)]
    trace = make_trace(lines)
    # The gap of 990 s is played as one of 600 s.
    assert due_times(trace) == [0.0, 10.0, 610.0, 0.0]
    future = Future(trace, due_times(trace))
    first, second, other = trace.requests[0], trace.requests[1], trace.requests[3]
    a, b = keys_of(trace, 0)
    future.arrived(first, 100.0)
    future.admitted(first)
    assert (future.next_use(a), future.next_use(b)) == (110.0, 110.0)
    assert future.next_use(keys_of(trace, 1)[2]) == 110.0
    future.arrived(second, 130.0)
    assert (future.next_use(a), future.next_use(b)) == (130.0, 130.0), "it waits, and is due"
    future.admitted(second)
    assert (future.next_use(a), future.next_use(b)) == (730.0, NEVER)
    assert future.next_use(b"nobody's") == NEVER
    future.arrived(other, 140.0)
    future.admitted(other)
    assert future.next_use(a) == 730.0


def test_a_block_of_several_sessions_is_used_by_whichever_comes_first():
    lines = [(0, 0.0, "ab", 1, 1), (0, 50.0, "abc", 1, 1), (1, 0.0, "ax", 1, 1), (1, 20.0, "axy", 1, 1)]
    trace = make_trace([*lines, (2, 0.0, "az", 1, 1)])
    future = Future(trace, due_times(trace))
    (a, *_), first, third, last = keys_of(trace, 0), trace.requests[0], trace.requests[2], trace.requests[4]
    future.arrived(first, 5.0)
    future.admitted(first)
    assert future.next_use(a) == 5.0, "a session that has not begun may begin at any time"
    for request, now in ((third, 10.0), (last, 12.0)):
        future.arrived(request, now)
        future.admitted(request)
    assert future.next_use(a) == 30.0
    future.admitted(trace.requests[3])
    assert future.next_use(a) == 55.0
    future.admitted(trace.requests[1])
    assert future.next_use(a) == NEVER


def test_a_timed_trace_has_one_clock():
    trace = make_trace([(0, 0.0, "ab", 1, 1), (0, 5.0, "c", 1, 1), (0, 9.0, "ax", 1, 1)], timed=True)
    future = Future(trace, due_times(trace))
    a, b = keys_of(trace, 0)
    for request in trace.requests[:2]:
        future.arrived(request, request.time)
        future.admitted(request)
    assert (future.next_use(a), future.next_use(b)) == (9.0, NEVER)
    future.admitted(trace.requests[2])
    assert future.next_use(a) == NEVER


def test_named_answers_are_used_by_the_prompt_that_names_them():
    trace = make_trace([(0, 0.0, "ab", 1, 8), (0, 60.0, "abcdef", 1, 1)], answers="echoed")
    future = Future(trace, due_times(trace))
    future.arrived(trace.requests[0], 0.0)
    future.admitted(trace.requests[0])
    assert future.next_use(trace.keys[trace.requests[0].answer[0]]) == 60.0

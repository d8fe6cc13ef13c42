"""Replays of hand-worked traces, and what must hold of any replay."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from atom.model_engine.placement import Placement
from atom.replay.cost_model import CostModel
from atom.replay.geometry import Geometry, read_geometry
from atom.replay.placements import parse_placement
from atom.replay.simulate import replay
from atom.replay.trace import keep_sessions, prepare
from atom.replay.traces import read_trace
from tests.replay_traces import BLOCK, SHARED, make_trace, tiny_settings

CODING_AGENT = SHARED / "claude_code_160.jsonl.gz"


def cached(trace, settings) -> list[int]:
    """Blocks that each request resumed, in the order of the trace."""
    outcomes = replay(trace, settings).outcomes
    return [o.cached for o in sorted(outcomes, key=lambda o: o.request.index)]


def placement(text: str) -> Placement:
    return parse_placement(text, BLOCK)


SIBLINGS = [(0, 0.0, "abcdef", 1, 1), (0, 10.0, "abcxyz", 1, 1), (0, 20.0, "abcuvw", 1, 1), (0, 30.0, "abcxyzd", 1, 1)]


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        # Every prompt's end is kept: only the last one extends a prompt.
        ("prompt", [0, 0, 0, 6]),
        # The second is refused at the branch and keeps it for the third.
        ("demand", [0, 0, 3, 3]),
        ("prompt+demand", [0, 0, 3, 6]),
        # A state after every second block: the branch at 3 is reached up to 2.
        ("interval=8", [0, 2, 2, 6]),
        ("none", [0, 0, 0, 0]),
    ],
)
def test_hits_by_placement(rules, expected):
    assert cached(make_trace(SIBLINGS), tiny_settings(placement=placement(rules))) == expected


def test_a_model_without_state_resumes_whatever_is_there():
    settings = tiny_settings(geometry=Geometry("dense", 1, 0))
    assert cached(make_trace(SIBLINGS), settings) == [0, 3, 3, 6]


def test_the_last_block_is_never_matched():
    trace = make_trace([(0, 0.0, "abcd", 0, 1), (0, 9.0, "abcd", 0, 1)])
    assert cached(trace, tiny_settings()) == [0, 3]
    assert [request.ideal for request in trace.requests] == [0, 3]


def test_echoed_answers_are_resumed_after():
    # 9 prompt tokens and 8 of the answer: blocks 2 and 3 hold the rest of the prompt and the answer.
    lines = [(0, 0.0, "ab", 1, 8), (0, 60.0, "abcdef", 1, 1)]
    for answers, expected in (("echoed", 4), ("private", 2)):
        trace = make_trace(lines, answers=answers)
        assert cached(trace, tiny_settings()) == [0, expected]
        assert trace.requests[1].ideal == expected


def test_a_prompt_too_short_to_hold_the_answer_does_not_name_it():
    trace = make_trace([(0, 0.0, "ab", 1, 8), (0, 60.0, "abc", 1, 1)], answers="echoed")
    assert not trace.requests[0].answer


@pytest.mark.parametrize(("pause", "named"), [(0.07, 0), (0.09, 2)])
def test_a_prompt_that_comes_before_the_answer_can_be_done_does_not_name_it(pause: float, named: int):
    """Eight tokens take 80 ms or more; two users with one system prompt look like a conversation otherwise."""
    trace = make_trace([(0, 0.0, "ab", 1, 8), (0, pause, "abcdef", 1, 1)], answers="echoed")
    assert len(trace.requests[0].answer) == named


def test_lru_gives_up_what_was_used_longest_ago():
    # Each prompt takes 5 blocks (4 filed) and an image of 2; a pool of 14 holds two of them.
    lines = [(i, 100.0 * i, name * 4, 1, 1) for i, name in enumerate("aba")]
    apart = make_trace(lines, timed=True)
    assert cached(apart, tiny_settings(14, "lru")) == [0, 0, 4]
    lines = [(i, 100.0 * i, name * 4, 1, 1) for i, name in enumerate("abca")]
    apart = make_trace(lines, timed=True)
    assert cached(apart, tiny_settings(14, "lru")) == [0, 0, 0, 0]
    assert cached(apart, tiny_settings(21, "lru")) == [0, 0, 0, 4]


def test_losses_name_their_cause():
    settings = tiny_settings(14, "lru", placement("prompt"))
    lines = [(i, 100.0 * i, name, 1, 1) for i, name in enumerate(["aaaa", "bbbb", "cccc", "aaaa", "ccdd"])]
    summary = replay(make_trace(lines, timed=True), settings).summary()
    # "aaaa" lost four blocks to eviction; no state had ever been kept at the two blocks of "ccdd".
    prompt = 17 * 5
    assert summary["prompt_tokens"] == prompt
    assert summary["ideal_hit_rate"] == pytest.approx(24 / prompt)
    assert summary["lost_to_eviction"] == pytest.approx(16 / prompt)
    assert summary["lost_to_missing_checkpoint"] == pytest.approx(8 / prompt)
    assert summary["lost_beyond_repair"] == 0
    assert summary["hit_rate"] == 0


def test_a_request_longer_than_the_pool_is_refused_and_its_prompt_counts():
    summary = replay(make_trace([(0, 0.0, "abcdef", 1, 1), (0, 1.0, "ab", 1, 1)]), tiny_settings(4)).summary()
    assert (summary["requests"], summary["refused"], summary["prompt_tokens"]) == (2, 1, 34)


def test_times_follow_the_cost_model():
    # 24 + 1 tokens at 1000 a second and one step's 10 ms; then three decode steps of 10 ms each.
    cost = CostModel(prefill_rate=1000.0, decode_step=0.01, restore_rate=8e3)
    trace = make_trace([(0, 0.0, "abcdef", 1, 4), (0, 5.0, "abcdef", 1, 1)])
    result = replay(trace, tiny_settings(cost=cost))
    first, second = sorted(result.outcomes, key=lambda o: o.request.index)
    assert first.ttft == pytest.approx(0.035)
    # The image's 8 bytes at 8 kB/s, one token and the step.
    assert second.ttft == pytest.approx(0.001 + 0.001 + 0.01)
    assert result.steps == 4 + 1


def test_seats_play_sessions_as_documented():
    """Seat i starts at 3 i seconds; gaps are cut to 600 s; the next session comes 5 s after the last one ended."""
    lines = [(0, 0.0, "a", 1, 1), (0, 5000.0, "ab", 1, 1), (1, 0.0, "c", 1, 1), (2, 0.0, "d", 1, 1)]
    cost = CostModel(prefill_rate=1e12, decode_step=1e-6, restore_rate=1e18)
    result = replay(make_trace(lines), tiny_settings(cost=cost))
    assert [o.request.index for o in result.outcomes] == [0, 2, 3, 1]
    assert result.seconds == pytest.approx(600, abs=1e-3)
    single = replay(make_trace(lines), tiny_settings(cost=cost, seats=1))
    assert single.seconds == pytest.approx(600 + 5 + 5, abs=1e-3)


def random_trace(seed: int, timed: bool, answers: str):
    rng = random.Random(seed)
    lines = []
    for session in range(8):
        prompt, time = "", rng.uniform(0, 2) if timed else 0.0
        for _ in range(rng.randrange(1, 6)):
            if rng.random() < 0.2:
                prompt = prompt[: rng.randrange(len(prompt) + 1)]
            prompt += "".join(rng.choice("ab") for _ in range(rng.randrange(1, 6)))
            lines.append((session, time, prompt, rng.randrange(1, BLOCK), rng.randrange(1, 40)))
            time += rng.uniform(0, 1)
    if timed:
        lines.sort(key=lambda line: line[1])
    return make_trace(lines, timed, answers)


def comparable(result) -> dict:
    kept = {"stats": result.stats.as_dict(), "fates": result.fates.as_dict()}
    outcomes = [
        (o.request.index, o.matched, o.wanted, o.cached, o.ever_kept, o.ttft, o.refused) for o in result.outcomes
    ]
    return result.summary() | kept | {"outcomes": outcomes}


@pytest.mark.parametrize("seed", range(40))
def test_fast_forward_changes_nothing(seed):
    rng = random.Random(seed)
    trace = random_trace(seed, rng.random() < 0.5, rng.choice(["echoed", "private"]))
    settings = tiny_settings(rng.choice([24, 30, 40, 80]), rng.choice(["default", "lru"]), seats=rng.choice([1, 2, 4]))
    assert comparable(replay(trace, settings)) == comparable(replay(trace, replace(settings, fast_forward=False)))


def test_fast_forward_skips_steps():
    trace, calls = make_trace([(0, 0.0, "a", 0, 400)]), []
    result = replay(trace, tiny_settings(), check=lambda manager: calls.append(manager))
    assert result.steps == 400 and len(calls) < 250


@pytest.mark.parametrize("seed", range(10))
def test_pages_are_conserved_and_counters_honest(seed):
    trace = random_trace(seed, False, "echoed")

    def check(manager):
        manager.check()
        stats = manager.stats
        assert stats.cached_tokens <= stats.wanted_tokens <= stats.matched_tokens <= stats.reusable_tokens

    replay(trace, tiny_settings(30), check=check)


def naive_ideal(trace) -> int:
    """Blocks of the longest prefix among all earlier prompts and answers, request by request."""
    known, total = set(), 0
    for request in trace.requests:
        keys = tuple(request.blocks)
        limit = (request.prompt_tokens - 1) // trace.block_size
        total += max((n for n in range(limit + 1) if n == 0 or keys[:n] in known), default=0)
        chain = (*keys, *request.answer)
        known.update(chain[:n] for n in range(1, len(chain) + 1))
    return total


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("answers", ["echoed", "private"])
def test_the_ideal_is_that_of_a_naive_computation(seed, answers):
    trace = random_trace(seed, True, answers)
    assert sum(request.ideal for request in trace.requests) == naive_ideal(trace)


def test_an_unbounded_pool_with_states_everywhere_reaches_the_ideal():
    lines = [(0, 100.0 * i, prompt, 1, 1) for i, prompt in enumerate(["abcdef", "abcxyz", "abx", "abcxyzd", "q"])]
    summary = replay(make_trace(lines), tiny_settings(placement=placement("prompt+interval=4"))).summary()
    assert summary["share_of_ideal"] == 1.0 and summary["hit_rate"] == summary["ideal_hit_rate"] > 0


def test_blocks_of_the_engine_may_be_several_of_the_trace():
    lines = [(0, 0.0, "abcde", 1, 1), (0, 100.0, "abcdef", 1, 1)]
    settings = tiny_settings(placement=Placement(2 * BLOCK, interior_grid=2 * BLOCK))
    result = replay(make_trace(lines), settings)
    assert [o.cached for o in result.outcomes] == [0, 2]
    assert result.summary()["ideal_hit_rate"] == pytest.approx(16 / 46)
    with pytest.raises(ValueError, match="blocks of 6 tokens"):
        replay(make_trace(lines), tiny_settings(placement=Placement(6)))


def test_unknown_policies_are_refused_with_those_there_are():
    with pytest.raises(ValueError, match=r"--policy=best: use one of .*lru"):
        replay(make_trace(SIBLINGS), tiny_settings(policy="best"))


# The shared traces


@pytest.fixture(scope="module")
def coding_agents():
    if not CODING_AGENT.exists():
        pytest.skip("the shared traces are not here")
    return lambda: read_trace(CODING_AGENT)


@pytest.mark.parametrize("policy", ["default", "lru"])
def test_a_slice_of_a_real_trace(coding_agents, policy):
    """Conserved (I5) and honest (I8) to the end, the same when replayed again."""
    trace = coding_agents()
    keep_sessions(trace, 12, random.Random(3))
    prepare(trace, "echoed")
    settings = tiny_settings(
        policy=policy,
        geometry=read_geometry("kimi-k3"),
        pool_tokens=400_000,
        placement=parse_placement("default", 64),
        cost=CostModel(),
        max_num_batched_tokens=8192,
        seats=4,
    )
    steps = 0

    def check(manager):
        nonlocal steps
        steps += 1
        stats = manager.stats
        assert stats.cached_tokens <= stats.wanted_tokens <= stats.matched_tokens <= stats.reusable_tokens
        if steps % 50 == 0:
            manager.check()

    first = replay(trace, settings, check=check)
    assert first.summary()["hit_rate"] > 0.3
    assert comparable(first) == comparable(replay(trace, settings))

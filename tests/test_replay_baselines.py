"""Traces worked by hand that tell the policies apart, each with the placement and the blocks of its engine.

A trace block has 4 tokens and a checkpoint takes two pages of that size. Requests come one at a time; a prompt of n blocks
is a token longer than those, and takes n + 1 pages, of which n stay.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from atom.replay.geometry import Geometry
from atom.replay.placements import parse_placement
from atom.replay.policies import POLICIES, marconi, placement_and_block
from atom.replay.policies.sglang import STATE_RATIO
from atom.replay.simulate import replay
from tests.replay_traces import BLOCK, TINY, Line, make_trace, tiny_settings


def resumed(policy: str, lines: Sequence[Line], pool_blocks: int = 1000, rules: str | None = None) -> list[int]:
    """Blocks of the trace that each request resumes; ``rules`` None: the placement of the policy's engine."""
    own_rules, size = placement_and_block(policy, TINY, BLOCK)
    placement = parse_placement(own_rules if rules is None else rules, size)
    trace = make_trace(list(lines), timed=True, answers="echoed")
    outcomes = replay(trace, tiny_settings(pool_blocks, policy, placement)).outcomes
    return [o.cached * size // BLOCK for o in sorted(outcomes, key=lambda o: o.request.index)]


def apart(*prompts: str) -> list[Line]:
    """Prompts 100 s apart, with answers of two tokens, which fill no block."""
    return [(i, 100.0 * i, prompt, 1, 2) for i, prompt in enumerate(prompts)]


def each(**expected: int) -> pytest.MarkDecorator:
    """A case for each policy, ``_`` for ``-`` in its name."""
    return pytest.mark.parametrize(("policy", "hit"), [(name.replace("_", "-"), hit) for name, hit in expected.items()])


@each(lru=1, guesses_first=3, default=3, clairvoyant=3, sglang=0, marconi=1, vllm_align=2)
def test_a_path_beside_a_branch_point(policy: str, hit: int) -> None:
    """12 pages. "aaa" leaves 3 and a state. "ab" finds "a" without a state, and keeps one there and one at its own end: now
    4 pages and 3 states are kept and 2 pages vacant. "c" takes those; for its own state two pages are wanted.

    lru: the state at "aaa" is the oldest thing; without it the last prompt resumes at "a". guesses-first: that at "a", for a
    guess goes before the end of a prompt. default: the same, for it saves the least, and clairvoyant: for whoever uses it
    next goes on to "aaa". sglang: 5.7 pages are for states, two of them: that at "ab" takes the place of the one at "aaa",
    and that at "c" of the one at "a". marconi: the ends of prompts are not kept, only "a". vllm-align: the pool has 6 blocks
    of 8 tokens; "aa" and "ab" take one each and another for their states, "c" fills none, and nothing has to go.
    """
    assert resumed(policy, apart("aaa", "ab", "c", "aaa"), 12) == [0, 0, 0, hit]


@each(lru=0, guesses_first=0, default=3, clairvoyant=3, sglang=3, marconi=1, vllm_align=2)
def test_a_page_that_others_hang_on(policy: str, hit: int) -> None:
    """10 pages. "ab" leaves 2 and a state; "aaa" takes 4 and wants states at "a", which it was refused at, and at its end.
    Vacant are 2 pages, so that for the second state something goes, and for that of "d" again.

    lru: the state at "ab", then the pages "ab" and "a", which are the oldest; nothing of "aaa" is found without "a".
    guesses-first: the page "ab" with its state, which is as fresh, and then "a". default and clairvoyant: the same page, but
    then the state at "a", for "aaa" hangs on its page. sglang: 4.7 pages are for states; those at "ab" and at "a" go. marconi:
    the state at "a" is the only one. vllm-align: of 5 blocks of 8 tokens "ab" and "aa" take two each with their states, and
    "d" the fifth, which it does not fill.
    """
    assert resumed(policy, apart("ab", "aaa", "d", "aaa"), 10) == [0, 0, 0, hit]


@each(lru=0, guesses_first=0, default=0, clairvoyant=4, sglang=0, marconi=0, vllm_align=0)
def test_a_pool_for_two_of_three(policy: str, hit: int) -> None:
    """Each path takes 4 pages and a state, 6 of 18, and one more while it runs: "cccc" wants a page that is not there. Only
    clairvoyant takes the end of "bbbb", which is not used again, and not of "aaaa", which was used before it. marconi has
    kept no state by then.
    """
    assert resumed(policy, apart("aaaa", "bbbb", "cccc", "aaaa"), 18) == [0, 0, 0, hit]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("vllm-align", [0, 14, 14, 16, 0, 0, 0, 2]),
        ("lru", [0, 15, 15, 17, 0, 1, 0, 5]),
    ],
)
def test_vllm_align_has_blocks_as_large_as_a_state(policy: str, expected: list[int]) -> None:
    """What vLLM reports with blocks of 384 tokens, on a scale of 48 to 1: a state of 8 bytes makes blocks of 8 tokens.

    62 tokens are resumed at 56, the last boundary before their end, and so are the 70 of the next turn, which are resumed
    at 64. 5 tokens fill no block. The end of an answer is not kept: of 13 tokens and 10 generated ones the next turn has 8.
    With small blocks all of them are resumed within a block of the end, that of the answer too.
    """
    long, longer = "a" * 15, "a" * 17
    lines = [
        *((0, 100.0 * i, prompt, 2, 2) for i, prompt in enumerate((long, long, longer, longer))),
        (1, 400.0, "b", 1, 2),
        (1, 500.0, "b", 1, 2),
        (2, 600.0, "ccc", 1, 10),
        (2, 700.0, "cccddd", 1, 2),
    ]
    assert resumed(policy, lines) == expected


@pytest.mark.parametrize(("policy", "last"), [("sglang", [1, 1, 0]), ("lru", [1, 1, 1])])
def test_sglang_has_a_budget_of_states(policy: str, last: list[int]) -> None:
    """20 pages: 9.5 for states, four of them. "a" is read again, so the fifth takes the place of "b", whose page stays.
    One order of use would have room for the 15 pages of all five.
    """
    lines = apart("a", "b", "c", "d", "a", "e", "a", "b")
    assert resumed(policy, lines, 20) == [0, 0, 0, 0, last[0], 0, *last[1:]]


@pytest.mark.parametrize("pool_blocks", [8, 12, 20, 40])
def test_sglang_never_exceeds_its_budget(pool_blocks: int) -> None:
    """After every step, with several states a step and two requests at a time."""
    lines = [
        (i, 0.05 * i, prompt, 1, 9) for i, prompt in enumerate(["aaa", "aab", "b", "aac", "bcd", "aabd", "b", "e"] * 2)
    ]
    placement, most = parse_placement("prompt+answer+demand", BLOCK), []
    settings = tiny_settings(pool_blocks, "sglang", placement)
    replay(make_trace(lines, timed=True), settings, check=lambda manager: most.append(manager.pool.num_image_pages))
    assert 0 < max(most) <= pool_blocks * STATE_RATIO / (1 + STATE_RATIO)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("marconi", [0, 4, 0, 2]), ("lru", [0, 4, 2, 2]), ("sglang", [0, 4, 2, 2]), ("vllm-align", [0, 2, 2, 2])],
)
def test_where_engines_keep_states(policy: str, expected: list[int]) -> None:
    """Nothing is given up. The answer to "ab" fills "c" and "d", and marconi keeps its end, but not the prompt's: "ab" asked
    again is refused there, and resumes the next time. vllm-align keeps the prompt's end, and not the answer's.
    """
    lines = [(0, 0.0, "ab", 1, 8), (0, 100.0, "abcdef", 1, 2), (0, 200.0, "ab", 1, 2), (0, 300.0, "ab", 1, 2)]
    assert resumed(policy, lines) == expected


@pytest.mark.parametrize(("bootstrap", "hit"), [(5, 6), (100, 0)])
def test_marconi_goes_by_savings_after_its_window(bootstrap: int, hit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 pages, and a state at every prompt's end: "llllll" takes 8 and saves 6 blocks, each of the others takes 3 and saves 1.

    In the window of five requests recency alone (alpha 0) gives up "llllll" for the third of the others and hits nothing.
    Scaled to the largest, the others save 0.44 for their pages: with alpha 1 the oldest of them goes first (0.94 against 1),
    and "llllll" is hit. So alpha is 1 from then on; without a window that ends, recency gives up "llllll" again.
    """
    monkeypatch.setattr(marconi, "BOOTSTRAP", bootstrap)
    lines = apart("llllll", "a", "b", "c", "llllll", "d", "e", "f", "llllll")
    assert resumed("marconi", lines, 16, "prompt") == [0, 0, 0, 0, 0, 0, 0, 0, hit]


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        # The ends of "abc" and of its answer, and then of "abcdefg": at 3, 5 and 7 blocks.
        ("anchor", [0, 5, 3, 3]),
        ("prompt", [0, 3, 3, 3]),
        # Every second block of a prompt, nothing in an answer: at 2, and then also at 4 and 6.
        ("interval=8", [0, 2, 4, 4]),
        # The third is refused at 4, where it leaves the others, and keeps that place.
        ("prompt+answer+demand", [0, 5, 3, 4]),
    ],
)
def test_hits_of_placements_with_answers(rules: str, expected: list[int]) -> None:
    """An answer that fills "d" and "e", a next turn, and two siblings that leave it after "abcd"."""
    lines = [(0, 0.0, "abc", 1, 8), (0, 100.0, "abcdefg", 1, 2), (0, 200.0, "abcdx", 1, 2), (0, 300.0, "abcdyz", 1, 2)]
    assert resumed("lru", lines, rules=rules) == expected


def test_placement_and_block_of_each_engine() -> None:
    """Blocks of 64 tokens; a state of 100 bytes takes 2 pages of one byte a token, and a block of vllm-align's holds it."""
    geometry = Geometry("made", token_bytes=1, image_bytes=100)
    own = {
        "vllm-align": ("prompt+demand", 128),
        "sglang": ("prompt+answer+demand", 64),
        "marconi": ("answer+demand", 64),
    }
    for name in POLICIES:
        assert placement_and_block(name, geometry, 64) == own.get(name, ("default", 64))
    assert placement_and_block("vllm-align", geometry, 128)[1] == 128
    assert placement_and_block("vllm-align", Geometry("dense", 1, 0), 64)[1] == 64
    assert placement_and_block("vllm-align", Geometry("gridded", 1, 100, block_grid=96), 64)[1] == 192
    with pytest.raises(ValueError, match="--policy=best: use one of"):
        placement_and_block("best", geometry, 64)

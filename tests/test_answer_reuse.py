"""The ends of answers are kept while next turns hold answers as they were."""

from __future__ import annotations

import pytest

from atom.model_engine.answer_reuse import HALF_LIFE, MOST_REMEMBERED, PRIOR_WEIGHT, WORTHWHILE, AnswerReuse
from tests.recording import Engine, cold_output, prompt_of


def keys(text: str) -> list[bytes]:
    return [text[: i + 1].encode() for i in range(len(text))]


def turn(reuse: AnswerReuse, number: int, follow: str) -> None:
    """A prompt of two blocks and an answer of two more, then a prompt that goes on with ``follow``."""
    prompt = chr(200 + number) + "p"
    reuse.ended(keys(prompt + "aa"), 2, 4)
    reuse.admitted(keys(prompt + follow))


def test_the_share_is_that_of_prompts_that_hold_the_whole_answer() -> None:
    reuse = AnswerReuse()
    assert reuse.share == 1
    for number, follow in enumerate(("aa", "aaq", "ab", "bb")):
        turn(reuse, number, follow)
    assert reuse.share == (PRIOR_WEIGHT + 2) / (PRIOR_WEIGHT + 4)


@pytest.mark.parametrize("follow", ["", "a", "b"])
def test_a_prompt_too_short_to_hold_the_answer_tells_nothing(follow: str) -> None:
    """A prompt that is sent again, for one; whoever comes after it still does."""
    reuse = AnswerReuse()
    turn(reuse, 0, follow)
    assert reuse.share == 1
    reuse.admitted(keys(chr(200) + "pxx"))
    assert reuse.share < 1


def test_an_answer_is_followed_once_and_forgotten_when_many_came_after_it() -> None:
    reuse = AnswerReuse()
    turn(reuse, 0, "xx")
    share = reuse.share
    reuse.admitted(keys(chr(200) + "pxx"))
    assert reuse.share == share
    reuse.ended(keys("ppaa"), 2, 4)
    for number in range(MOST_REMEMBERED):
        reuse.ended(keys(chr(1000 + number) + "paa"), 2, 4)
    reuse.admitted(keys("ppxx"))
    assert reuse.share == share


def test_answers_without_a_whole_block_and_prompts_without_one_are_not_remembered() -> None:
    reuse = AnswerReuse()
    reuse.ended(keys("pp"), 2, 2)
    reuse.ended(keys("aa"), 0, 2)
    for text in ("ppxx", "aax"):
        reuse.admitted(keys(text))
    assert reuse.share == 1


def test_one_of_several_answers_of_a_prompt_is_gone_on_with() -> None:
    reuse = AnswerReuse()
    for answer in ("aa", "bbb", "cc"):
        reuse.ended(keys("pp" + answer), 2, 2 + len(answer))
    reuse.admitted(keys("ppbbbx"))
    assert reuse.share == 1


def test_what_changes_is_learned_anew() -> None:
    reuse = AnswerReuse()
    for number in range(4 * int(HALF_LIFE)):
        turn(reuse, number, "xx")
    assert reuse.share < 1 / 1000 and not reuse.pays
    turns = next(number for number in range(10_000) if (turn(reuse, number, "aa"), reuse.pays)[1])
    assert turns <= WORTHWHILE * HALF_LIFE


@pytest.mark.parametrize("extended", [True, False])
def test_an_engine_keeps_the_ends_of_answers_that_are_sent_back(extended: bool, backend: str) -> None:
    """Prompt of 10 tokens, answer of 9 in blocks of 4: the prompt's end is 8, the answer's 16."""
    engine = Engine(interval=-1, num_blocks=60, max_num_seqs=1)
    for number in range(60):
        prompt = prompt_of(10, 100 + number)
        engine.ask(f"{number} asks", prompt, 9)
        answer = cold_output(prompt, 9) if extended else prompt_of(9, 500 + number)
        cached = engine.ask(f"{number} goes on", prompt + answer + [1], 1)
    assert cached == (16 if extended else 8)
    assert engine.manager.answers.pays is extended
    engine.ask("last", prompt_of(10, 99), 9)
    states = engine.manager.states
    assert states is not None
    ends = {
        len(engine.names[key]) for key in states.cache.ready() if engine.names[key][:8] == tuple(prompt_of(10, 99)[:8])
    }
    assert ends == ({8, 16} if extended else {8})


def test_an_aborted_answer_is_not_remembered() -> None:
    engine = Engine(interval=-1, max_num_seqs=1)
    prompt = prompt_of(10, 1)
    engine.add("cut", prompt, 30)
    for _ in range(12):
        engine.step()
    engine.core.abort_requests(["cut"])
    engine.run()
    engine.ask("other", prompt + prompt_of(40, 2), 1)
    assert engine.manager.answers.share == 1

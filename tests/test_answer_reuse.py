"""The ends of answers are kept while next turns hold answers as they were."""

from __future__ import annotations

import pytest

from atom.model_engine.answer_reuse import (
    GENERATION_PROMPT,
    HALF_LIFE,
    MOST_ANSWERS,
    MOST_REMEMBERED,
    PRIOR_WEIGHT,
    WORTHWHILE,
    AnswerReuse,
)
from tests.recording import Engine, cold_output, prompt_of

BLOCK = 10


def keys(text: str) -> list[bytes]:
    """Of the whole blocks of ``text``, a token a letter."""
    return [text[:end].encode() for end in range(BLOCK, len(text) + 1, BLOCK)]


def end(reuse: AnswerReuse, prompt: str, answer: str) -> None:
    reuse.ended(keys(prompt + answer), [ord(letter) for letter in prompt + answer], len(prompt))


def follow(reuse: AnswerReuse, prompt: str) -> None:
    reuse.admitted(keys(prompt), [ord(letter) for letter in prompt])


def prompt_number(number: int) -> str:
    return chr(1000 + number) * BLOCK + "question?" + GENERATION_PROMPT * "g"


ANSWER = "answer" * 5


def test_the_share_is_that_of_prompts_that_hold_the_whole_answer() -> None:
    reuse = AnswerReuse(BLOCK)
    assert reuse.share == 1
    for number, next_turn in enumerate((ANSWER + "more", ANSWER * 2, ANSWER[:-9] + "x" * 40, "y" * 40)):
        end(reuse, prompt_number(number), ANSWER)
        follow(reuse, prompt_number(number) + next_turn)
    assert reuse.share == (PRIOR_WEIGHT + 2) / (PRIOR_WEIGHT + 4)


@pytest.mark.parametrize("letters", [0, 1, 2])
@pytest.mark.parametrize("answer", ["a", "ab", ANSWER])
def test_a_prompt_that_is_sent_again_tells_nothing(letters: int, answer: str) -> None:
    """Of 18, 19 and 20 tokens, the last a whole number of blocks."""
    reuse = AnswerReuse(BLOCK)
    prompt = "p" * (18 + letters)
    end(reuse, prompt, answer)
    follow(reuse, prompt)
    assert reuse.share == 1


def test_a_reasoning_part_that_the_template_opens_is_not_in_what_follows() -> None:
    reuse = AnswerReuse(BLOCK)
    prompt = "p" * 2 * BLOCK + "?"
    end(reuse, prompt + "<think>", "long" * 10 + "</think>" + ANSWER)
    follow(reuse, prompt + ANSWER + "and a long next question, longer than the reasoning was")
    assert reuse.share < 1


def test_conversations_that_differ_behind_the_last_whole_block_are_told_apart() -> None:
    reuse = AnswerReuse(BLOCK)
    prompts = ["s" * BLOCK + chr(ord("a") + number) + GENERATION_PROMPT * "g" for number in range(20)]
    for prompt in prompts:
        end(reuse, prompt, prompt[BLOCK] + ANSWER)
    for prompt in prompts:
        follow(reuse, prompt + prompt[BLOCK] + ANSWER + "more")
    assert reuse.share == 1
    follow(reuse, "s" * BLOCK + "another prompt that begins alike and is longer than all")
    assert reuse.share == 1


def test_one_of_several_answers_of_a_prompt_is_gone_on_with() -> None:
    reuse = AnswerReuse(BLOCK)
    prompt = prompt_number(0)
    answers = [letter * 30 for letter in "abc"]
    for answer in answers:
        end(reuse, prompt, answer)
    follow(reuse, prompt + answers[1] + "more")
    end(reuse, prompt, "d" * 30)
    for answer in (answers[0], answers[2], "d" * 30):
        follow(reuse, prompt + answer + "more")
    assert reuse.share == 1
    follow(reuse, prompt + "e" * 40)
    assert reuse.share == 1, "all that waited are followed"


def test_what_waits_is_bounded() -> None:
    reuse = AnswerReuse(BLOCK)
    for number in range(MOST_REMEMBERED + 1):
        end(reuse, prompt_number(number), ANSWER)
    follow(reuse, prompt_number(0) + "x" * 40)
    assert reuse.share == 1
    follow(reuse, prompt_number(1) + "x" * 40)
    assert reuse.share < 1
    share = reuse.share
    for number in range(MOST_ANSWERS + 1):
        end(reuse, prompt_number(7), chr(2000 + number) * 30)
    follow(reuse, prompt_number(7) + chr(2000) * 30 + "more")
    assert reuse.share < share, "the longest waiting answer made way"


def test_what_changes_is_learned_anew() -> None:
    reuse = AnswerReuse(BLOCK)
    for number in range(4 * int(HALF_LIFE)):
        end(reuse, prompt_number(number), ANSWER)
        follow(reuse, prompt_number(number) + "x" * 40)
    assert reuse.share < 1 / 1000 and not reuse.pays
    turns = 0
    while not reuse.pays:
        end(reuse, prompt_number(turns), ANSWER)
        follow(reuse, prompt_number(turns) + ANSWER + "more")
        turns += 1
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

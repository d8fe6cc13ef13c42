"""Whether the next turn resumes at the end of an answer, learned from prompts that came after answers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from atom.model_engine.ids import BlockKey

MOST_REMEMBERED = 4096
"""Prompts whose answers wait for what follows them; the one whose first answer waits longest is forgotten first."""

MOST_ANSWERS = 64
"""Answers that wait behind one block: a prompt continued several times, or prompts that differ in their last tokens."""

GENERATION_PROMPT = 8
"""Last tokens of a prompt that may be the template's own, such as an opened reasoning part, and not in what follows."""

PRIOR_WEIGHT = 4.0
"""Answers that count as extended before anything was seen: chats that send answers back as they were are the rule."""

HALF_LIFE = 256.0
"""Followed answers that halve the weight of those before them."""

WORTHWHILE = 1 / 8
"""Share of answers that have to be extended for their ends to be kept."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """An answer that waits: the prompt's tokens behind its last whole block, the answer's last block, blocks up to there."""

    tail: tuple[int, ...]
    end: BlockKey
    num_blocks: int


class AnswerReuse:
    """The share of answers that the prompt following them holds unchanged.

    A chat template that leaves reasoning out of the history, or a client that edits it, never resumes at the end of an
    answer; a checkpoint there would be kept in vain. What is learned does not depend on what was kept: keys are enough.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        # By the prompt's last whole block.
        self._waiting: OrderedDict[BlockKey, list[_Answer]] = OrderedDict()
        self._extended = PRIOR_WEIGHT
        self._followed = PRIOR_WEIGHT

    @property
    def share(self) -> float:
        """Share of followed answers that were extended, 0 to 1; recent ones count more."""
        return self._extended / self._followed

    @property
    def pays(self) -> bool:
        """Whether a checkpoint at the end of an answer is worth its place. O(1)."""
        return self.share >= WORTHWHILE

    def ended(self, keys: Sequence[BlockKey], tokens: Sequence[int], num_prompt_tokens: int) -> None:
        """An answer is complete. ``keys``: of the blocks that ``tokens``, prompt and answer, fill. O(block size).

        Nothing is learned of an answer that fills no block, nor behind a prompt that fills none.
        """
        whole = num_prompt_tokens // self.block_size
        if not 0 < whole < len(keys):
            return
        tail = tuple(
            tokens[whole * self.block_size : max(whole * self.block_size, num_prompt_tokens - GENERATION_PROMPT)]
        )
        waiting = self._waiting
        answers = waiting.setdefault(keys[whole - 1], [])
        answers.append(_Answer(tail, keys[-1], len(keys)))
        if len(answers) > MOST_ANSWERS:
            del answers[0]
        if len(waiting) > MOST_REMEMBERED:
            waiting.popitem(last=False)

    def admitted(self, keys: Sequence[BlockKey], tokens: Sequence[int]) -> None:
        """Learn from a prompt with these keys and tokens, if it goes on where an answer was given. O(blocks).

        It follows the answers that it is long enough to hold and whose prompt it begins with: a prompt sent again tells
        nothing. Of several such answers, it extends the one it holds, or else none.
        """
        waiting = self._waiting
        behind = next((count for count, key in enumerate(reversed(keys)) if key in waiting), None)
        if behind is None:
            return
        whole = len(keys) - behind
        answers, start = waiting[keys[whole - 1]], whole * self.block_size
        followed = [
            answer
            for answer in answers
            if answer.num_blocks <= len(keys) and tuple(tokens[start : start + len(answer.tail)]) == answer.tail
        ]
        if not followed:
            return
        extended = next((answer for answer in followed if keys[answer.num_blocks - 1] == answer.end), None)
        answers.remove(extended or followed[0])
        if not answers:
            del waiting[keys[whole - 1]]
        if self._followed >= HALF_LIFE:
            self._followed /= 2
            self._extended /= 2
        self._followed += 1
        self._extended += extended is not None

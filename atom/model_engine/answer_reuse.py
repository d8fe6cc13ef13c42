"""Whether the next turn resumes at the end of an answer, learned from prompts that came after answers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from atom.model_engine.ids import BlockKey

MOST_REMEMBERED = 4096
"""Answers that wait for the prompt that follows them; the longest waiting is forgotten first."""

MOST_ANSWERS = 16
"""Answers of one prompt that are told apart: it may be continued several times, and one of them is gone on with."""

PRIOR_WEIGHT = 4.0
"""Answers that count as extended before anything was seen: chats that send answers back as they were are the rule."""

HALF_LIFE = 256.0
"""Followed answers that halve the weight of those before them."""


WORTHWHILE = 1 / 8
"""Share of answers that have to be extended for their ends to be kept."""


class AnswerReuse:
    """The share of answers that the prompt following them holds unchanged.

    A chat template that leaves reasoning out of the history, or a client that edits it, never resumes at the end of an
    answer; a checkpoint there would be kept in vain. What is learned does not depend on what was kept: keys are enough.
    """

    def __init__(self) -> None:
        # By the prompt's last whole block, for each of its answers: the last block and the blocks up to there.
        self._waiting: OrderedDict[BlockKey, dict[BlockKey, int]] = OrderedDict()
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

    def ended(self, keys: Sequence[BlockKey], prompt_blocks: int, num_blocks: int) -> None:
        """An answer is complete. ``prompt_blocks``, ``num_blocks``: blocks that its prompt, and the answer with it, can be
        resumed after. O(1)."""
        if 0 < prompt_blocks < num_blocks:
            waiting = self._waiting
            answers = waiting.setdefault(keys[prompt_blocks - 1], {})
            if len(answers) < MOST_ANSWERS:
                answers[keys[num_blocks - 1]] = num_blocks
            if len(waiting) > MOST_REMEMBERED:
                waiting.popitem(last=False)

    def admitted(self, keys: Sequence[BlockKey]) -> None:
        """Learn from a prompt with these keys, if it goes on where an answer was given. O(blocks behind that place).

        A prompt too short to hold the answer, such as one sent again, tells nothing.
        """
        waiting = self._waiting
        key = next((key for key in reversed(keys) if key in waiting), None)
        if key is None:
            return
        answers = {end: blocks for end, blocks in waiting[key].items() if blocks <= len(keys)}
        if not answers:
            return
        del waiting[key]
        if self._followed >= HALF_LIFE:
            self._followed /= 2
            self._extended /= 2
        self._followed += 1
        self._extended += any(keys[blocks - 1] == end for end, blocks in answers.items())

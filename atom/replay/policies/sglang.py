"""SGLang's radix cache for hybrid models, after its public source (0.5.23)."""

from __future__ import annotations

from atom.model_engine.ids import BlockId
from atom.model_engine.state_cache import Checkpoint
from atom.replay.policies.leaves import Leaves

STATE_RATIO = 0.9
"""Bytes of states for each byte of KV."""


class SGLang(Leaves):
    """States have a budget of their own and their own order of use, in which only the state that is read is refreshed.

    KV goes from the least recently used leaf. Its pools are apart; here states never exceed their budget, and KV may use
    what of it is free, which favours it. Its placement: ends of prompts and answers, and branches.
    """

    def __init__(self, pool_blocks: int) -> None:
        super().__init__()
        self.budget = pool_blocks * STATE_RATIO / (1 + STATE_RATIO)

    def pop_for_image(self) -> BlockId | Checkpoint:
        if self.held and (len(self.held) + 1) * self.pool.pages_per_image > self.budget:
            return self.pop_image(next(iter(self.held)))
        return self.pop()

    def pop(self) -> BlockId | Checkpoint:
        if self.leaves:
            return self.pop_leaf(min(self.leaves, key=lambda segment: segment.released))
        return self.pop_image(next(iter(self.held)))

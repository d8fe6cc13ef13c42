"""SGLang's radix cache for hybrid models, after its public source (0.5.23)."""

from __future__ import annotations

from atom.model_engine.block_pool import BlockPool
from atom.model_engine.eviction import PoolView
from atom.model_engine.eviction_forest import Segment
from atom.model_engine.state_cache import Checkpoint
from atom.replay.policies.leaves import Leaves

STATE_RATIO = 0.9
"""Bytes of states for each byte of KV."""


class SGLang(Leaves):
    """States have a budget of their own and their own order of use, in which only the state that is read is refreshed.

    When a state is kept or was read and all of them take more pages than their budget, those go at once that were used
    longest ago and that nobody reads; a place that waits for its state counts. KV goes from the least recently used leaf.
    A state's KV stays, and a page of KV takes its state along. Its pools are apart; here KV may use what of the states'
    budget is free, which favours it.
    """

    def __init__(self, pool_blocks: int) -> None:
        super().__init__()
        self.budget = pool_blocks * STATE_RATIO / (1 + STATE_RATIO)

    def attach(self, pool: PoolView) -> None:
        super().attach(pool)
        assert isinstance(pool, BlockPool), "states go before the pool asks for it"
        self.states = pool

    def add_image(self, image: Checkpoint) -> None:
        super().add_image(image)
        while self.held and self.states.num_image_pages > self.budget:
            image = self.oldest_image()
            self.remove_image(image)
            self.states.give_up_image(image)

    def choose(self, for_image: bool) -> Segment | Checkpoint:
        full = self.states.num_image_pages + self.states.pages_per_image > self.budget
        if self.leaves and not (for_image and full and self.held):
            return min(self.leaves, key=lambda segment: segment.released)
        return self.oldest_image()

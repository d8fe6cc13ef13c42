"""Eviction policies by name, for ``atom replay --policy``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from atom.model_engine.eviction import EvictionPolicy, GuessesFirst
from atom.replay.future import Future
from atom.replay.policies.lru import LRU


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """What a policy may be made from.

    ``pool_blocks``: pages of the pool. ``pages_per_image``: pages that one checkpoint takes; 0 for a model without state.
    ``prefill_rate``: tokens a second that recomputation runs at. ``future``: the next use of every block, which only a
    policy that stands for perfect foresight looks at.
    """

    block_size: int
    pool_blocks: int
    pages_per_image: int
    prefill_rate: float
    future: Future


PolicyFactory = Callable[[PolicyContext], EvictionPolicy]

POLICIES: dict[str, PolicyFactory] = {
    "default": lambda context: GuessesFirst(),
    "lru": lambda context: LRU(),
}


def check_policy(name: str) -> None:
    """Raises ValueError, listing the names there are, if no policy is called ``name``."""
    if name not in POLICIES:
        raise ValueError(f"--policy={name}: use one of {', '.join(POLICIES)}")


def make_policy(name: str, context: PolicyContext) -> EvictionPolicy:
    """A fresh policy called ``name``. Raises ValueError if there is none."""
    check_policy(name)
    return POLICIES[name](context)

"""Eviction policies by name, for ``atom replay --policy``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from atom.model_engine.eviction import EvictionPolicy, GuessesFirst
from atom.model_engine.eviction_value import ByValue
from atom.replay.future import Future
from atom.replay.policies import variants
from atom.replay.policies.clairvoyant import Clairvoyant
from atom.replay.policies.lru import LRU
from atom.replay.policies.marconi import Marconi
from atom.replay.policies.sglang import SGLang


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
    "default": lambda context: ByValue(),
    "guesses-first": lambda context: GuessesFirst(),
    "lru": lambda context: LRU(),
    "vllm-align": lambda context: LRU(),
    "sglang": lambda context: SGLang(context.pool_blocks),
    "marconi": lambda context: Marconi(context.pool_blocks),
    "clairvoyant": lambda context: Clairvoyant(context.future),
    "value-weak-first": lambda context: variants.WeakFirst(),
    "value-oldest-unit": lambda context: variants.OldestUnit(),
    "value-density": lambda context: variants.ByDensity(),
    "value-superlinear": lambda context: variants.Superlinear(),
    "value-no-ending": lambda context: variants.NoEnding(),
    "value-one-queue": lambda context: variants.OneQueue(),
    "value-together": lambda context: variants.Together(),
    "value-no-heirs": lambda context: variants.NoHeirs(),
    "value-sum-of-heirs": lambda context: variants.SumOfHeirs(),
    "value-one-pace": lambda context: variants.OnePace(),
    "value-recent": lambda context: variants.Recent(),
    "value-patient": lambda context: variants.Patient(),
    "value-frequent": lambda context: variants.Frequent(),
    "most-recent": lambda context: variants.Sticky(),
}


def check_policy(name: str) -> None:
    """Raises ValueError, listing the names there are, if no policy is called ``name``."""
    if name not in POLICIES:
        raise ValueError(f"--policy={name}: use one of {', '.join(POLICIES)}")


def make_policy(name: str, context: PolicyContext) -> EvictionPolicy:
    """A fresh policy called ``name``. Raises ValueError if there is none."""
    check_policy(name)
    return POLICIES[name](context)

"""Eviction policies by name, for ``atom replay --policy``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from atom.model_engine.eviction import EvictionPolicy, GuessesFirst
from atom.model_engine.eviction_value import ByValue
from atom.replay.future import Future
from atom.replay.geometry import Geometry
from atom.replay.policies import variants
from atom.replay.policies.clairvoyant import Clairvoyant
from atom.replay.policies.lru import LRU
from atom.replay.policies.marconi import Marconi
from atom.replay.policies.sglang import SGLang


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """What a policy may be made from.

    ``pool_blocks``: pages of the pool. ``future``: the next use of every block, which only a policy that stands for
    perfect foresight looks at.
    """

    pool_blocks: int
    future: Future


@dataclass(frozen=True, slots=True)
class NamedPolicy:
    """A policy, and what the engine of its name does besides.

    ``make``: a fresh one. ``placement``: where that engine keeps checkpoints, as ``--placement`` has it.
    ``block_holds_state``: its blocks are at least as large as a checkpoint.
    """

    make: Callable[[PolicyContext], EvictionPolicy]
    placement: str = "default"
    block_holds_state: bool = False


POLICIES: dict[str, NamedPolicy] = {
    "default": NamedPolicy(lambda context: ByValue()),
    "guesses-first": NamedPolicy(lambda context: GuessesFirst()),
    "lru": NamedPolicy(lambda context: LRU()),
    "vllm-align": NamedPolicy(lambda context: LRU(), "prompt+demand", block_holds_state=True),
    "sglang": NamedPolicy(lambda context: SGLang(context.pool_blocks), "prompt+answer+demand"),
    "marconi": NamedPolicy(lambda context: Marconi(context.pool_blocks), "answer+demand"),
    "clairvoyant": NamedPolicy(lambda context: Clairvoyant(context.future)),
    "value-weak-first": NamedPolicy(lambda context: variants.WeakFirst()),
    "value-oldest-unit": NamedPolicy(lambda context: variants.OldestUnit()),
    "value-density": NamedPolicy(lambda context: variants.ByDensity()),
    "value-superlinear": NamedPolicy(lambda context: variants.Superlinear()),
    "value-no-ending": NamedPolicy(lambda context: variants.NoEnding()),
    "value-no-queue": NamedPolicy(lambda context: variants.NoQueue()),
    "value-one-queue": NamedPolicy(lambda context: variants.OneQueue()),
    "value-together": NamedPolicy(lambda context: variants.Together()),
    "value-no-heirs": NamedPolicy(lambda context: variants.NoHeirs()),
    "value-sum-of-heirs": NamedPolicy(lambda context: variants.SumOfHeirs()),
    "value-one-pace": NamedPolicy(lambda context: variants.OnePace()),
    "value-recent": NamedPolicy(lambda context: variants.Recent()),
    "value-patient": NamedPolicy(lambda context: variants.Patient()),
    "value-frequent": NamedPolicy(lambda context: variants.Frequent()),
    "most-recent": NamedPolicy(lambda context: variants.Sticky()),
}


def check_policy(name: str) -> None:
    """Raises ValueError, listing the names there are, if no policy is called ``name``."""
    if name not in POLICIES:
        raise ValueError(f"--policy={name}: use one of {', '.join(POLICIES)}")


def make_policy(name: str, context: PolicyContext) -> EvictionPolicy:
    """A fresh policy called ``name``. Raises ValueError if there is none."""
    check_policy(name)
    return POLICIES[name].make(context)


def placement_and_block(name: str, geometry: Geometry, block_size: int) -> tuple[str, int]:
    """Placement rules, as ``--placement`` has them, and tokens of a block, of the engine that policy ``name`` stands for.

    ``block_size``: tokens of a block of the trace, or of as many of them as make one. Raises ValueError if there is no
    such policy.
    """
    check_policy(name)
    size = geometry.block_size_for(block_size)
    if POLICIES[name].block_holds_state:
        size *= max(1, geometry.pages_per_image(size))
    return POLICIES[name].placement, size

"""GuessesFirst against the rule written down naively: one list, the longest unused first."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from atom.model_engine.eviction import GuessesFirst
from atom.model_engine.ids import BlockId
from atom.model_engine.placement import RungKind
from atom.model_engine.state_cache import Checkpoint


class NaivePolicy:
    """Everything that may be given up in one list, the longest unused first."""

    def __init__(self) -> None:
        self.things: list[BlockId | Checkpoint] = []

    def use(self, thing: BlockId | Checkpoint) -> None:
        """``thing`` is the most recently used."""
        self.drop(thing)
        self.things.append(thing)

    def drop(self, thing: BlockId | Checkpoint) -> None:
        """``thing`` may no longer be given up."""
        self.things = [other for other in self.things if other is not thing and other != thing]

    @property
    def images(self) -> list[Checkpoint]:
        return [thing for thing in self.things if isinstance(thing, Checkpoint)]

    @property
    def blocks(self) -> list[BlockId]:
        return [thing for thing in self.things if not isinstance(thing, Checkpoint)]

    def victim(self) -> BlockId | Checkpoint:
        """A superseded anchor before anything; then the longest unused, but a guess in the place of an anchor."""
        superseded = [image for image in self.images if image.superseded]
        if superseded:
            return superseded[0]
        if not isinstance(self.things[0], Checkpoint):
            return self.things[0]
        guesses = [image for image in self.images if image.kind is not RungKind.ANCHOR]
        return (guesses or self.images)[0]


class EvictionMachine(RuleBasedStateMachine):
    """Pages and checkpoints come, are used and go in any order; each victim is the one that the rule names."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = GuessesFirst()
        self.naive = NaivePolicy()
        self.next_block = BlockId(0)

    @rule()
    def add_block(self) -> None:
        self.next_block = BlockId(self.next_block + 1)
        self.policy.add_block(self.next_block)
        self.naive.use(self.next_block)

    @rule(kind=st.sampled_from(RungKind))
    def add_image(self, kind: RungKind) -> None:
        image = Checkpoint(b"k", kind)
        self.policy.add_image(image)
        self.naive.use(image)

    @precondition(lambda self: self.naive.things)
    @rule(data=st.data(), supersede=st.booleans(), back=st.booleans())
    def use(self, data, supersede: bool, back: bool) -> None:
        """Taken out, and put back as the newest: a page claimed and released, a checkpoint pinned and read."""
        index = data.draw(st.integers(0, len(self.naive.things) - 1))
        thing = self.naive.things[index]
        image = isinstance(thing, Checkpoint)
        (self.policy.remove_image if image else self.policy.remove_block)(thing)
        self.naive.drop(thing)
        if isinstance(thing, Checkpoint) and not thing.is_guess:
            thing.superseded = supersede
        if back:
            (self.policy.add_image if image else self.policy.add_block)(thing)
            self.naive.use(thing)

    @precondition(lambda self: self.naive.things)
    @rule()
    def pop(self) -> None:
        victim = self.naive.victim()
        popped = self.policy.pop()
        assert popped is victim or popped == victim
        self.naive.drop(victim)

    @invariant()
    def agrees(self) -> None:
        assert list(self.policy.blocks()) == self.naive.blocks
        assert set(self.policy.images()) == set(self.naive.images)
        assert (self.policy.num_blocks, self.policy.num_images) == (len(self.naive.blocks), len(self.naive.images))


TestEviction = EvictionMachine.TestCase
TestEviction.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def order_of(policy: GuessesFirst) -> list[BlockId | Checkpoint]:
    """Everything in ``policy``, in the order in which it is given up."""
    return [policy.pop() for _ in range(policy.num_blocks + policy.num_images)]


def test_the_order_worked_by_hand() -> None:
    """Old anchor, page, ladder rung, superseded anchor, demand rung, page, newest anchor."""
    policy = GuessesFirst()
    anchor, newest = Checkpoint(b"a", RungKind.ANCHOR), Checkpoint(b"n", RungKind.ANCHOR)
    superseded = Checkpoint(b"s", RungKind.ANCHOR, superseded=True)
    ladder, demand = Checkpoint(b"l", RungKind.INTERVAL), Checkpoint(b"d", RungKind.DEMAND)
    policy.add_image(anchor)
    policy.add_block(BlockId(1))
    for image in (ladder, superseded, demand):
        policy.add_image(image)
    policy.add_block(BlockId(2))
    policy.add_image(newest)
    # The oldest is an anchor, so a checkpoint goes: both guesses in its place, then itself; then pages by age.
    assert order_of(policy) == [superseded, ladder, demand, anchor, 1, 2, newest]


@pytest.mark.parametrize("first", ["page", "image"])
def test_age_decides_between_pages_and_checkpoints(first: str) -> None:
    policy, image = GuessesFirst(), Checkpoint(b"g", RungKind.DEMAND)
    add_page, add_image = (lambda: policy.add_block(BlockId(0))), (lambda: policy.add_image(image))
    for add in (add_page, add_image) if first == "page" else (add_image, add_page):
        add()
    assert order_of(policy) == ([0, image] if first == "page" else [image, 0])


def test_nothing_left_is_an_error() -> None:
    with pytest.raises(KeyError):
        GuessesFirst().pop()

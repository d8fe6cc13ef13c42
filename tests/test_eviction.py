"""GuessesFirst against the rule written down naively: one list, the longest unused first."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from atom.model_engine.block_pool import BlockPool
from atom.model_engine.eviction import GuessesFirst, PoolView
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
        """The longest unused; in the place of a checkpoint a superseded anchor, or else a guess, where there is one."""
        if not isinstance(self.things[0], Checkpoint):
            return self.things[0]
        superseded = [image for image in self.images if image.superseded]
        guesses = [image for image in self.images if image.kind is not RungKind.ANCHOR]
        return (superseded or guesses or self.images)[0]


class Detached(GuessesFirst):
    """Without a view of the pool: age and kind alone decide."""

    def attach(self, pool: PoolView) -> None:
        """Look at nothing."""


class EvictionMachine(RuleBasedStateMachine):
    """Pages and checkpoints come, are used and go in any order; each victim is the one that the rule names."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = GuessesFirst()
        self.naive = NaivePolicy()
        self.next_block = BlockId(0)
        self.next_image = 0

    @rule()
    def add_block(self) -> None:
        self.next_block = BlockId(self.next_block + 1)
        self.policy.add_block(self.next_block)
        self.naive.use(self.next_block)

    @rule(kind=st.sampled_from(RungKind))
    def add_image(self, kind: RungKind) -> None:
        self.next_image += 1
        image = Checkpoint(self.next_image.to_bytes(4, "little"), kind)
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
    """Added: old anchor, page, ladder rung, superseded anchor, demand rung, page, newest anchor."""
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
    # The oldest is an anchor, so a checkpoint goes: the superseded and both guesses in its place, then itself.
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


def test_a_path_that_is_let_go_keeps_its_last_anchors_fresh() -> None:
    """Pages of an old path go before the two last anchors of one that was used since; its older anchor does not stay."""
    pool = BlockPool(8, policy=GuessesFirst())
    policy = pool.policy
    old, path = pool.take(2), pool.take(4)
    for i, block in enumerate([*old, *path]):
        pool.publish((block,), (bytes([i]),))
    anchors = [Checkpoint(bytes([i]), RungKind.ANCHOR) for i in (2, 3, 5)]
    ladder = Checkpoint(bytes([4]), RungKind.INTERVAL)
    for image in (*anchors, ladder):
        policy.add_image(image)
    pool.release(old)
    pool.release(path)
    # Deepest first: blocks 5, 4, 3, 2; the anchors under 5 and 3 are fresh, the one under 2 and the rung are not.
    assert [policy.pop() for _ in range(2)] == [ladder, anchors[0]]
    assert [policy.pop() for _ in range(6)] == [*reversed(old), *reversed(path)]
    assert [policy.pop() for _ in range(2)] == [anchors[2], anchors[1]]


def test_a_guess_goes_before_a_page_that_carries_an_anchor() -> None:
    """The oldest page would take the only anchor of its path along: a younger rung goes first, then the page."""
    pool = BlockPool(4, policy=GuessesFirst())
    pages = pool.take(2)
    for i, block in enumerate(pages):
        pool.publish((block,), (bytes([i]),))
    anchor, ladder = Checkpoint(bytes([1]), RungKind.ANCHOR), Checkpoint(b"elsewhere", RungKind.INTERVAL)
    pool.policy.add_image(anchor)
    pool.release(pages)
    pool.policy.add_image(ladder)
    assert [pool.policy.pop() for _ in range(2)] == [ladder, pages[1]]

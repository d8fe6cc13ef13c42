"""The StateCache protocol: one random life of checkpoints for both backends against a plain model, and its corners."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from atom.model_engine.block_pool import BlockPool
from atom.model_engine.ids import BlockKey
from atom.model_engine.page_unit_checkpoint import PagedStateCheckpointCoordinator
from atom.model_engine.placement import RungKind
from atom.model_engine.state_cache import Checkpoint, CheckpointStatus, StateCache
from atom.model_engine.state_pool import StateSlotPool
from tests.test_eviction import Detached, NaivePolicy

KEYS = [bytes([i]) for i in range(6)]
A_KEY, A_KIND = st.sampled_from(KEYS), st.sampled_from(RungKind)
WRITTEN = (CheckpointStatus.RESERVED, CheckpointStatus.COPYING)


class StateCacheMachine(RuleBasedStateMachine):
    """What every backend does. The model: the checkpoint of each key, who pins what, live units, and the order of use.

    A unit is a slot or a page, a checkpoint takes ``cost`` of ``size``. ``idle`` holds what may be given up; pages filed
    under a key are there beside checkpoints.
    """

    size: int
    cost: int
    cache: StateCache

    @initialize()
    def start(self) -> None:
        self.make()
        self.live: list[int] = []
        self.known: dict[BlockKey, Checkpoint] = {}
        self.pinned: list[Checkpoint] = []
        # Those that somebody else than their maker used: a later one does not take their place.
        self.used: set[Checkpoint] = set()
        self.evicting: list[Checkpoint] = []
        self.gone: list[Checkpoint] = []
        self.filed: dict[BlockKey, int] = {}
        self.idle = NaivePolicy()
        self.fates: Counter[str] = Counter()
        self.status: dict[Checkpoint, CheckpointStatus] = {}

    def make(self) -> None:
        raise NotImplementedError

    def take(self, count: int) -> list[int] | None:
        """Units for live work from the backend; None if it refuses."""
        raise NotImplementedError

    def give_back(self, unit: int) -> None:
        raise NotImplementedError

    def units(self, checkpoint: Checkpoint) -> list[int]:
        return list(checkpoint.pages) if checkpoint.slot is None else [checkpoint.slot]

    # The model

    def named(self, *statuses: CheckpointStatus) -> list[Checkpoint]:
        return [checkpoint for checkpoint in self.known.values() if self.status[checkpoint] in statuses]

    def in_use(self) -> set[int]:
        """Units that must not be handed out."""
        kept = [*self.named(*WRITTEN), *self.pinned]
        return {*self.live, *(unit for checkpoint in kept for unit in self.units(checkpoint))}

    @property
    def vacant(self) -> int:
        checkpoints = self.cost * (len(self.known) + len(self.evicting))
        return self.size - len(self.live) - len(self.idle.blocks) - checkpoints

    @property
    def room(self) -> int:
        return self.vacant + len(self.idle.blocks) + self.cost * len(self.idle.images)

    def end(self, checkpoint: Checkpoint) -> None:
        self.known.pop(checkpoint.key)
        self.idle.drop(checkpoint)
        self.status[checkpoint] = CheckpointStatus.GONE
        self.gone.append(checkpoint)

    def lose(self, count: int) -> None:
        """Make ``count`` units vacant by giving up what the rule names."""
        while self.vacant < count:
            victim = self.idle.victim()
            if isinstance(victim, Checkpoint):
                self.end(victim)
                self.fates["evicted"] += 1
            else:
                self.idle.drop(victim)
                key = next(key for key, page in self.filed.items() if page == victim)
                del self.filed[key]
                self.lose_block(key)

    def lose_block(self, key: BlockKey) -> None:
        """A block left the index: its checkpoint goes with it, at once or with the last pin."""
        checkpoint = self.known.get(key)
        if checkpoint is None or self.status[checkpoint] is not CheckpointStatus.READY:
            return
        self.fates["orphaned"] += 1
        if checkpoint in self.pinned:
            del self.known[key]
            self.evicting.append(checkpoint)
            self.status[checkpoint] = CheckpointStatus.EVICTING
        else:
            self.end(checkpoint)

    def use_up(self, checkpoint: Checkpoint) -> None:
        self.end(checkpoint)
        self.fates["evicted"] += 1
        self.fates[f"read_back_{checkpoint.kind.value}"] += 1

    # What every backend does

    @rule(count=st.integers(1, 3))
    def take_live(self, count: int) -> None:
        """Published and unpinned always counts as room for live work (I6); nothing else does (I4)."""
        busy, room, vacant = self.in_use(), self.room, self.all_vacant()
        taken = self.take(count)
        assert (taken is not None) == (count <= room)
        if taken is None:
            return
        assert len(set(taken)) == count and not busy & set(taken)
        self.check_order(taken, vacant)
        self.lose(count)
        self.live += taken

    def all_vacant(self) -> list[int]:
        kept = [*self.known.values(), *self.evicting]
        used = {*self.live, *self.idle.blocks, *(unit for checkpoint in kept for unit in self.units(checkpoint))}
        return sorted(set(range(self.size)) - used)

    def check_order(self, taken: list[int], vacant: list[int]) -> None:
        """Which of the vacant units are taken is the backend's choice."""

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release_live(self, data) -> None:
        unit = data.draw(st.sampled_from(self.live))
        self.live.remove(unit)
        self.give_back(unit)

    @rule(key=A_KEY, kind=A_KIND, data=st.data())
    def reserve(self, key: BlockKey, kind: RungKind, data) -> None:
        replace = data.draw(st.sampled_from([None, *self.named(CheckpointStatus.READY), *self.gone[-1:]]))
        before = len(self.known)
        was_superseded = replace is not None and replace.superseded
        checkpoint = self.cache.reserve(key, kind, replace)
        if key in self.known:
            assert checkpoint is None and len(self.known) == before
            kept = self.known[key]
            kept_kind = RungKind.ANCHOR if RungKind.ANCHOR in (kind, kept.kind) else kept.kind
            assert (kept.kind, kept.superseded) == (kept_kind, False), "wanted again: as good as new"
            self.used.add(kept)
            if kept in self.idle.images:
                self.idle.use(kept)
            return
        if replace in self.used:
            if replace in self.idle.images and replace.superseded and not was_superseded:
                self.idle.use(replace)
        elif replace in self.idle.images:
            self.end(replace)
            self.fates["superseded"] += 1
        assert (checkpoint is not None) == (self.room >= self.cost)
        if checkpoint is None:
            self.fates["dropped"] += 1
            return
        assert (checkpoint.key, checkpoint.kind) == (key, kind)
        assert not self.in_use() & set(self.units(checkpoint)) and len(set(self.units(checkpoint))) == self.cost
        self.lose(self.cost)
        self.known[key] = checkpoint
        self.status[checkpoint] = CheckpointStatus.RESERVED

    @precondition(lambda self: self.named(*WRITTEN))
    @rule(data=st.data(), ending=st.sampled_from(["publish", "publish", "copy", "cancel"]))
    def write(self, data, ending: str) -> None:
        checkpoint = data.draw(st.sampled_from(self.named(*WRITTEN)))
        if ending == "copy":
            self.status[checkpoint] = checkpoint.status = CheckpointStatus.COPYING
        elif ending == "cancel":
            self.cache.cancel(checkpoint)
            self.end(checkpoint)
        else:
            before = data.draw(st.sampled_from([None, *self.named(CheckpointStatus.READY), *self.gone[-1:]]))
            was_superseded = before is not None and before.superseded
            checkpoint.predecessor = before
            self.cache.publish(checkpoint)
            assert checkpoint.predecessor is None, "a published checkpoint keeps no other alive"
            self.status[checkpoint] = CheckpointStatus.READY
            self.fates["kept"] += 1
            self.idle.use(checkpoint)
            if before is not None:
                self.check_superseded(before, was_superseded)

    @precondition(lambda self: self.known or self.gone)
    @rule(data=st.data())
    def supersede(self, data) -> None:
        checkpoint = data.draw(st.sampled_from([*self.known.values(), *self.evicting, *self.gone]))
        before = checkpoint.superseded
        self.cache.supersede(checkpoint)
        if self.status[checkpoint] is CheckpointStatus.READY:
            self.check_superseded(checkpoint, before)
        else:
            assert checkpoint.superseded == before

    def check_superseded(self, checkpoint: Checkpoint, before: bool) -> None:
        """An anchor that can be found is superseded, and is as fresh as it was made so; a guess never is, and a second time
        changes nothing."""
        if self.status[checkpoint] is CheckpointStatus.READY:
            assert checkpoint.superseded == (checkpoint.kind is RungKind.ANCHOR)
            if checkpoint.superseded and not before and checkpoint in self.idle.images:
                self.idle.use(checkpoint)

    @precondition(lambda self: self.named(CheckpointStatus.READY))
    @rule(data=st.data())
    def pin(self, data) -> None:
        checkpoint = data.draw(st.sampled_from(self.named(CheckpointStatus.READY)))
        self.cache.pin(checkpoint)
        self.used.add(checkpoint)
        self.pinned.append(checkpoint)
        self.idle.drop(checkpoint)
        self.fates[f"read_back_{checkpoint.kind.value}"] += 1

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data) -> None:
        """Several pins add up; the last one makes it room again, or frees what was orphaned meanwhile."""
        checkpoint = self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1)))
        self.cache.unpin(checkpoint)
        if checkpoint in self.pinned:
            return
        if checkpoint in self.evicting:
            self.evicting.remove(checkpoint)
            self.status[checkpoint] = CheckpointStatus.GONE
            self.gone.append(checkpoint)
        else:
            self.idle.use(checkpoint)

    @rule(keys=st.lists(A_KEY, max_size=3, unique=True), kind=A_KIND)
    def keep(self, keys: list[BlockKey], kind: RungKind) -> None:
        """What a step does when all goes well, so that walks have published ones to act upon."""
        for key in keys:
            if key not in self.known and self.room >= self.cost:
                checkpoint = self.cache.reserve(key, kind)
                assert checkpoint is not None
                self.lose(self.cost)
                self.cache.publish(checkpoint)
                self.known[key], self.status[checkpoint] = checkpoint, CheckpointStatus.READY
                self.fates["kept"] += 1
                self.idle.use(checkpoint)

    @rule(data=st.data())
    def orphan(self, data) -> None:
        key = data.draw(st.sampled_from([*self.known, *KEYS[:1]]))
        self.cache.orphan((key,))
        self.lose_block(key)

    @rule(keys=st.lists(A_KEY, max_size=5), limit=st.integers(0, 6))
    def rightmost(self, keys: list[BlockKey], limit: int) -> None:
        """Only what is published is found."""
        ready = {checkpoint.key: checkpoint for checkpoint in self.named(CheckpointStatus.READY)}
        found = [n for n in range(1, min(limit, len(keys)) + 1) if keys[n - 1] in ready]
        assert self.cache.rightmost(keys, limit) == max(found, default=0)
        assert [self.cache.find(key) for key in KEYS] == [ready.get(key) for key in KEYS]

    @invariant()
    def agrees(self) -> None:
        self.cache.check()
        ready = self.named(CheckpointStatus.READY)
        assert self.cache.ready() == {checkpoint.key: checkpoint for checkpoint in ready}
        assert (self.cache.num_checkpoints, self.cache.num_reserved) == (len(ready), len(self.named(*WRITTEN)))
        assert self.cache.has_room() == (self.room >= self.cost)
        assert {c: c.status for c in self.status} == self.status
        assert {name: count for name, count in self.cache.fates.as_dict().items() if count} == +self.fates
        fates = self.cache.fates
        assert fates.kept == len(ready) + fates.evicted + fates.orphaned + fates.superseded, "each has one fate"


class SlotMachine(StateCacheMachine):
    """Checkpoints kept as slots."""

    size, cost = 5, 1
    cache: StateSlotPool

    def make(self) -> None:
        self.cache = StateSlotPool(self.size)

    def take(self, count: int) -> list[int] | None:
        return self.cache.take_live(count)

    def give_back(self, unit: int) -> None:
        self.cache.release_live([unit])

    def check_order(self, taken: list[int], vacant: list[int]) -> None:
        """Vacant slots before checkpoints, the lowest index first."""
        assert taken[: len(vacant)] == vacant[: len(taken)]

    @precondition(lambda self: self.named(CheckpointStatus.READY))
    @rule(data=st.data())
    def adopt(self, data) -> None:
        """A checkpoint that nobody reads becomes a live slot; one that somebody reads does not."""
        checkpoint = data.draw(st.sampled_from(self.named(CheckpointStatus.READY)))
        slot = self.cache.adopt(checkpoint)
        assert slot == (checkpoint.slot if checkpoint in self.idle.images else None)
        if slot is not None:
            self.use_up(checkpoint)
            self.live.append(slot)

    @precondition(lambda self: self.live and self.named(CheckpointStatus.RESERVED))
    @rule(data=st.data())
    def hand_over(self, data) -> None:
        """The live slot becomes the checkpoint's, with its bytes; its owner goes on in the reserved one."""
        checkpoint = data.draw(st.sampled_from(self.named(CheckpointStatus.RESERVED)))
        live = data.draw(st.sampled_from(self.live))
        reserved = checkpoint.slot
        assert self.cache.hand_over(checkpoint, live) == reserved
        assert checkpoint.slot == live
        self.live[self.live.index(live)] = reserved

    @precondition(lambda self: self.named(CheckpointStatus.READY))
    @rule(data=st.data())
    def hold(self, data) -> None:
        """A pin like any other, and no use."""
        checkpoint = data.draw(st.sampled_from(self.named(CheckpointStatus.READY)))
        self.cache.hold(checkpoint)
        self.pinned.append(checkpoint)
        self.idle.drop(checkpoint)

    @invariant()
    def slots_add_up(self) -> None:
        assert (self.cache.num_live, self.cache.num_vacant) == (len(self.live), self.vacant)
        assert self.cache.num_available == self.room


class PageMachine(StateCacheMachine):
    """Checkpoints kept as images of two pages, beside live and cached pages of the same pool."""

    size, cost = 9, 2
    cache: PagedStateCheckpointCoordinator

    def make(self) -> None:
        self.pool = BlockPool(self.size, policy=Detached())
        self.cache = PagedStateCheckpointCoordinator(self.pool, self.cost)
        self.pool.on_evict = self.cache.orphan

    def take(self, count: int) -> list[int] | None:
        try:
            return list(self.pool.take(count))
        except ValueError:
            return None

    def give_back(self, unit: int) -> None:
        self.pool.release([unit])
        if unit in self.filed.values():
            self.idle.use(unit)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), key=A_KEY)
    def file_page(self, data, key: BlockKey) -> None:
        """A live page enters the index: once given back it is cached, and takes its checkpoint along when it goes."""
        page = data.draw(st.sampled_from(self.live))
        if page not in self.filed.values() and self.pool.publish((page,), (key,)):
            self.filed[key] = page

    @precondition(lambda self: self.named(CheckpointStatus.READY))
    @rule(data=st.data())
    def consume(self, data) -> None:
        """Read for the last time: the pages are room at once. Not while others read it."""
        checkpoint = data.draw(st.sampled_from(self.named(CheckpointStatus.READY)))
        if checkpoint in self.pinned:
            with pytest.raises(AssertionError, match="others read"):
                self.cache.consume(checkpoint)
            return
        self.cache.consume(checkpoint)
        self.use_up(checkpoint)

    @invariant()
    def pages_add_up(self) -> None:
        assert (self.pool.num_vacant, self.pool.num_available) == (self.vacant, self.room)
        self.pool.check()


TestSlots = SlotMachine.TestCase
TestSlots.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestPages = PageMachine.TestCase
TestPages.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)


def cache_of(backend: str, room: int) -> StateCache:
    """A cache with room for ``room`` checkpoints."""
    return StateSlotPool(room) if backend == "slot" else PagedStateCheckpointCoordinator(BlockPool(3 * room), 3)


def keep(cache: StateCache, key: BlockKey, kind: RungKind = RungKind.ANCHOR) -> Checkpoint:
    checkpoint = cache.reserve(key, kind)
    assert checkpoint is not None
    cache.publish(checkpoint)
    return checkpoint


both = pytest.mark.parametrize("backend", ["slot", "page"])


@both
def test_nothing_is_found_before_it_is_published(backend: str) -> None:
    cache = cache_of(backend, 2)
    checkpoint = cache.reserve(b"k", RungKind.ANCHOR)
    assert checkpoint is not None and cache.find(b"k") is None and cache.rightmost([b"k"], 1) == 0
    assert cache.reserve(b"k", RungKind.ANCHOR) is None and cache.fates.dropped == 0, "being written already"
    cache.publish(checkpoint)
    assert cache.find(b"k") is checkpoint


@both
def test_an_orphan_keeps_its_bytes_until_the_last_reader(backend: str) -> None:
    cache = cache_of(backend, 1)
    checkpoint = keep(cache, b"k")
    cache.pin(checkpoint)
    cache.pin(checkpoint)
    cache.orphan((b"k",))
    assert cache.rightmost([b"k"], 1) == 0
    for left in (1, 0):
        assert cache.reserve(b"other", RungKind.ANCHOR) is None
        cache.unpin(checkpoint)
        assert cache.has_room() == (left == 0)
    assert cache.fates.dropped == 2, "what found no room is counted each time and cost nothing"


@both
def test_a_key_computed_again_while_its_orphan_is_read(backend: str) -> None:
    """The orphan's bytes stay its readers'; the new checkpoint of the key is another one."""
    cache = cache_of(backend, 2)
    old = keep(cache, b"k")
    cache.pin(old)
    cache.orphan((b"k",))
    new = keep(cache, b"k")
    cache.check()
    cache.unpin(old)
    cache.check()
    assert cache.find(b"k") is new and old.status is CheckpointStatus.GONE


@both
def test_a_guess_goes_before_an_older_anchor(backend: str) -> None:
    cache = cache_of(backend, 3)
    for key, kind in ((b"anchor", RungKind.ANCHOR), (b"demand", RungKind.DEMAND), (b"ladder", RungKind.INTERVAL)):
        keep(cache, key, kind)
    keep(cache, b"new")
    keep(cache, b"newer")
    assert set(cache.ready()) == {b"anchor", b"new", b"newer"}


@both
def test_an_anchor_superseded_goes_before_the_newest_of_another_path(backend: str) -> None:
    cache = cache_of(backend, 3)
    keep(cache, b"other path")
    first = keep(cache, b"turn 1")
    second = cache.reserve(b"turn 2", RungKind.ANCHOR)
    assert second is not None
    second.predecessor = first
    cache.publish(second)
    keep(cache, b"new")
    assert set(cache.ready()) == {b"other path", b"turn 2", b"new"}
    assert cache.fates.evicted == 1


@both
def test_a_guess_wanted_as_an_anchor_while_it_is_read_becomes_one(backend: str) -> None:
    """Also while a restore reads it, or before its bytes are there: what a request knows is not forgotten."""
    cache = cache_of(backend, 2)
    read = keep(cache, b"read", RungKind.DEMAND)
    cache.pin(read)
    assert cache.reserve(b"read", RungKind.ANCHOR) is None
    cache.unpin(read)
    written = cache.reserve(b"written", RungKind.INTERVAL)
    assert written is not None and cache.reserve(b"written", RungKind.ANCHOR) is None
    cache.publish(written)
    cache.check()
    assert (read.kind, written.kind) == (RungKind.ANCHOR, RungKind.ANCHOR)


@both
def test_a_replaced_one_makes_its_own_room(backend: str) -> None:
    cache = cache_of(backend, 2)
    held = keep(cache, b"held")
    cache.pin(held)
    own = keep(cache, b"own")
    new = cache.reserve(b"new", RungKind.ANCHOR, replace=own)
    assert new is not None and own.status is CheckpointStatus.GONE
    assert cache.reserve(b"more", RungKind.ANCHOR, replace=held) is None and cache.find(b"held") is held
    assert (cache.fates.superseded, cache.fates.evicted, cache.fates.dropped) == (1, 0, 1)


@both
def test_misuse_is_refused(backend: str) -> None:
    cache = cache_of(backend, 2)
    checkpoint = cache.reserve(b"k", RungKind.ANCHOR)
    assert checkpoint is not None
    with pytest.raises(AssertionError, match="only a published"):
        cache.pin(checkpoint)
    cache.publish(checkpoint)
    for call in (cache.publish, cache.cancel):
        with pytest.raises(AssertionError):
            call(checkpoint)
    with pytest.raises(AssertionError, match="more often than pinned"):
        cache.unpin(checkpoint)


def test_live_slots_are_taken_together_or_not_at_all() -> None:
    pool = StateSlotPool(3)
    keep(pool, b"k")
    assert pool.take_live(4) is None
    pool.check()
    assert pool.find(b"k") is not None, "a refusal gives up nothing"
    assert pool.take_live(3) == [1, 2, 0], "vacant before checkpoints, the lowest first"
    with pytest.raises(KeyError):
        pool.release_live([7])

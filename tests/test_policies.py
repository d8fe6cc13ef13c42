"""Every eviction policy against its contract, over a real pool with images; hand-worked orders of the baselines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.model_engine.block_pool import BlockPool
from atom.model_engine.eviction import Ending, EvictionPolicy, GuessesFirst, PoolView
from atom.model_engine.eviction_returns import Role
from atom.model_engine.eviction_value import ByValue
from atom.model_engine.ids import BlockId, BlockKey
from atom.model_engine.page_unit_checkpoint import PagedStateCheckpointCoordinator
from atom.model_engine.placement import RungKind
from atom.model_engine.state_cache import Checkpoint, CheckpointStatus
from atom.replay.future import NEVER
from atom.replay.policies import POLICIES, PolicyContext
from atom.replay.policies.clairvoyant import Clairvoyant
from atom.replay.policies.marconi import Marconi, least, tune
from atom.replay.policies.sglang import SGLang

PAGES = 40
IMAGE = 3


class Foresight:
    """Next uses that a test sets; nothing else is ever used."""

    def __init__(self) -> None:
        self.uses: dict[BlockKey, float] = {}

    def next_use(self, key: BlockKey) -> float:
        return self.uses.get(key, NEVER)


class Checked(EvictionPolicy):
    """Passes everything on and holds the policy to its contract."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.cached: set[BlockId] = set()
        self.left: set[Checkpoint] = set()

    def attach(self, pool: PoolView) -> None:
        self.policy.attach(pool)

    def admitted(self, keys: Sequence[BlockKey], matched: int, cached: int) -> None:
        self.policy.admitted(keys, matched, cached)

    def readmitted(self, keys: Sequence[BlockKey]) -> None:
        self.policy.readmitted(keys)

    def queued(self, request_id: str, keys: Sequence[BlockKey], first: bool = False) -> None:
        self.policy.queued(request_id, keys, first)

    def unqueued(self, request_id: str, admitted: bool) -> None:
        self.policy.unqueued(request_id, admitted)

    def withdrawn(self, block: BlockId) -> None:
        self.policy.withdrawn(block)

    @property
    def num_blocks(self) -> int:
        assert self.policy.num_blocks == len(self.cached)
        return len(self.cached)

    @property
    def num_images(self) -> int:
        assert self.policy.num_images == len(self.left)
        return len(self.left)

    def add_block(self, block: BlockId) -> None:
        self.add_blocks((block,), None)

    def add_blocks(self, blocks: Sequence[BlockId], ending: Ending | None) -> None:
        assert not self.cached & set(blocks)
        self.cached.update(blocks)
        self.policy.add_blocks(blocks, ending)

    def remove_block(self, block: BlockId) -> None:
        self.cached.remove(block)
        self.policy.remove_block(block)

    def remove_blocks(self, blocks: Sequence[BlockId]) -> None:
        self.cached.difference_update(blocks)
        self.policy.remove_blocks(blocks)

    def add_image(self, image: Checkpoint) -> None:
        self.left.add(image)
        self.policy.add_image(image)
        gone = {other for other in self.left if other.status is CheckpointStatus.GONE}
        assert not gone or isinstance(self.policy, SGLang), "only a budget makes one go where nobody wants its pages"
        self.left -= gone

    def remove_image(self, image: Checkpoint) -> None:
        self.left.remove(image)
        self.policy.remove_image(image)

    def supersede_image(self, image: Checkpoint) -> None:
        assert image in self.left and not image.superseded
        self.policy.supersede_image(image)
        assert image.superseded

    def pop(self) -> BlockId | Checkpoint:
        return self.took(self.policy.pop())

    def pop_for_image(self) -> BlockId | Checkpoint:
        return self.took(self.policy.pop_for_image())

    def pop_many(self, limit: int, for_image: bool) -> Sequence[BlockId] | Checkpoint:
        victims = self.policy.pop_many(limit, for_image)
        if isinstance(victims, Checkpoint):
            self.took(victims)
            return victims
        assert 1 <= len(victims) <= limit
        for block in victims:
            self.took(block)
        return victims

    def took(self, victim: BlockId | Checkpoint) -> BlockId | Checkpoint:
        """What was added may be popped, nothing else; the end of a newest prompt goes alone in need only."""
        if not isinstance(victim, Checkpoint):
            self.cached.remove(victim)
            return victim
        newest = not victim.is_guess and not victim.superseded
        if newest and isinstance(self.policy, GuessesFirst):
            assert not any(image.is_guess or image.superseded for image in self.left)
        elif newest and type(self.policy) is ByValue:
            boundary = self.policy.returns.get(victim.key)
            assert not self.cached or (boundary is not None and boundary.role in (Role.ANSWER, Role.OLDER))
        self.left.remove(victim)
        return victim

    def blocks(self) -> Iterator[BlockId]:
        assert sorted(self.policy.blocks()) == sorted(self.cached)
        return iter(list(self.cached))

    def images(self) -> Iterator[Checkpoint]:
        assert set(self.policy.images()) == self.left
        return iter(list(self.left))


class World:
    """A pool with images, requests that run in it, and a clock that the test moves."""

    def __init__(self, policy: EvictionPolicy, pages: int = PAGES, image: int = IMAGE) -> None:
        self.time = 0.0
        self.policy = Checked(policy)
        self.images: PagedStateCheckpointCoordinator
        self.pool = BlockPool(pages, self.orphan, self.policy, lambda: self.time)
        self.images = PagedStateCheckpointCoordinator(self.pool, image)

    def orphan(self, keys: Sequence[BlockKey]) -> None:
        self.images.orphan(keys)

    def start(self, path: str, preempted: str | None = None) -> list[BlockId] | None:
        """A request whose blocks are the letters of ``path``: claims what is resumable, computes the rest.

        ``preempted``: the prompt, if it ran before. None if there is no room.
        """
        keys = keys_of(path)
        matched = self.pool.longest_prefix(keys, len(keys))
        found = self.images.rightmost(keys, len(matched))
        missing = len(keys) - found
        idle = self.pool.num_cached_among(matched[:found])
        source = self.images.find(keys[found - 1]) if found else None
        reserved = idle + (IMAGE if source is not None and not source.pins else 0)
        if self.pool.num_available - reserved < missing:
            return None
        if preempted is None:
            self.policy.admitted(keys, len(matched), found)
        else:
            self.policy.readmitted(keys_of(preempted))
        self.pool.claim(matched[:found])
        if source is not None:
            self.images.pin(source)
        table = [*matched[:found], *self.pool.take(missing)]
        for i in range(found, len(keys)):
            self.pool.publish((table[i],), (keys[i],), i, keys[i - 1] if i else None)
        if source is not None:
            self.images.unpin(source)
        return table

    def keep(self, path: str, kind: RungKind = RungKind.ANCHOR, before: str = "") -> Checkpoint | None:
        """A checkpoint at the end of ``path``; ``before``: the path whose anchor it supersedes."""
        image = self.images.reserve(keys_of(path)[-1], kind)
        if image is None:
            return None
        if not self.pool.holds(image.key):
            self.images.cancel(image)
            return None
        if before:
            image.predecessor = self.images.find(keys_of(before)[-1])
        self.images.publish(image)
        return image

    def answer(self, path: str, table: list[BlockId]) -> str:
        """A running request computes another block of its answer and keeps it. Returns its path then."""
        if self.pool.num_available:
            (page,) = self.pool.take(1)
            table.append(page)
            path += "c"
            self.pool.publish((page,), (path.encode(),), len(path) - 1, path[:-1].encode())
            self.keep(path)
        return path

    def serve(self, path: str, ending: Ending | None = None, before: str = "", demand: str = "") -> None:
        """A request from start to end, with its anchor and, at the end of ``demand``, a demand rung."""
        table = self.start(path)
        assert table is not None
        if demand:
            self.keep(demand, RungKind.DEMAND)
        self.keep(path, before=before)
        self.time += 1.0
        self.pool.release(table, ending)
        self.time += 1.0

    def check(self) -> None:
        self.pool.check()
        self.images.check()


def keys_of(path: str) -> list[BlockKey]:
    return [path[: i + 1].encode() for i in range(len(path))]


def make(name: str, foresight: Foresight | None = None, pages: int = PAGES) -> EvictionPolicy:
    return POLICIES[name].make(PolicyContext(pages, foresight or Foresight()))  # type: ignore[arg-type]


PATHS = st.text("ab", min_size=1, max_size=7)
EVENTS = st.one_of(
    st.tuples(st.just("start"), PATHS),
    st.tuples(st.just("keep"), st.integers(0, 5), st.sampled_from(RungKind)),
    st.tuples(st.just("answer"), st.integers(0, 5)),
    st.tuples(st.just("end"), st.integers(0, 5), st.sampled_from([None, *Ending])),
    st.tuples(st.just("distrust"), st.integers(0, 5)),
    st.tuples(st.just("preempt"), st.integers(0, 5)),
    st.tuples(st.just("readmit")),
    st.tuples(st.just("wait"), st.sampled_from([0.1, 3.0, 50.0, 4000.0])),
    st.tuples(st.just("take"), st.integers(1, 9)),
    st.tuples(st.just("clear")),
)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=60, deadline=None)
@given(events=st.lists(EVENTS, max_size=50), small=st.booleans())
def test_every_policy_keeps_its_contract(name: str, events: list[tuple], small: bool) -> None:
    """What is added may be popped, nothing else; counts are right; room for live work is what the pool says (I5, I6)."""
    pages = 14 if small else PAGES
    world = World(make(name, pages=pages), pages)
    # The prompt, the path with the answer so far, the pages; of those that wait for room again, the first two.
    running: list[tuple[str, str, list[BlockId]]] = []
    waiting: list[tuple[str, str]] = []
    for event in events:
        if event[0] == "start":
            table = world.start(event[1])
            if table is not None:
                running.append((event[1], event[1], table))
        elif event[0] == "keep" and running:
            path = running[event[1] % len(running)][1]
            world.keep(path, event[2], before=path[:-1] if len(path) > 1 else "")
        elif event[0] == "answer" and running:
            place = event[1] % len(running)
            prompt, path, table = running[place]
            running[place] = prompt, world.answer(path, table), table
        elif event[0] == "end" and running:
            world.pool.release(running.pop(event[1] % len(running))[2], event[2])
        elif event[0] == "distrust" and running:
            table = running.pop(event[1] % len(running))[2]
            world.pool.withdraw(table)
            world.pool.release(table)
        elif event[0] == "preempt" and running:
            prompt, path, table = running.pop(event[1] % len(running))
            world.pool.release(table)
            waiting.append((prompt, path))
        elif event[0] == "readmit" and waiting:
            prompt, path = waiting.pop()
            table = world.start(path, preempted=prompt)
            if table is not None:
                running.append((prompt, path, table))
        elif event[0] == "wait":
            world.time += event[1]
        elif event[0] == "take" and world.pool.num_available >= event[1]:
            taken = world.pool.take(event[1])
            world.pool.release(taken)
        elif event[0] == "clear":
            world.pool.clear()
        world.check()
    for _, _, table in running:
        world.pool.release(table)
    assert world.pool.num_available == pages
    world.pool.release(world.pool.take(pages))
    world.check()
    assert world.policy.num_blocks == world.policy.num_images == 0


def kept(world: World) -> set[str]:
    return {key.decode() for key in world.images.ready()}


@pytest.mark.parametrize("name", ["lru", "vllm-align"])
def test_one_order_of_use_for_pages_and_images(name: str) -> None:
    """14 pages are full of two paths of 4 pages and an image of 3. The image at "aaaa" is the oldest, for it was published
    before its pages were given back; then the tail of that path goes, before the image at "bbbb"."""
    world = World(make(name, pages=14), 14)
    world.serve("aaaa")
    world.serve("bbbb")
    assert (world.pool.num_vacant, kept(world)) == (0, {"aaaa", "bbbb"})
    world.pool.release(world.pool.take(1))
    assert (world.pool.num_vacant, world.pool.num_cached, kept(world)) == (3, 8, {"bbbb"})
    world.pool.release(world.pool.take(5))
    assert len(world.pool.longest_prefix(keys_of("aaaa"), 4)) == 2 and kept(world) == {"bbbb"}
    world.pool.release(world.pool.take(8))
    assert (world.pool.num_vacant, world.pool.num_cached, kept(world)) == (10, 4, set())


def test_sglang_keeps_states_within_their_budget() -> None:
    """0.9 / 1.9 of 36 pages hold five states. Pages are vacant for a sixth, at "ff", and yet one goes: that at "bb", for "aa"
    was read since. The pages of "bb" stay."""
    world = World(make("sglang", pages=36), 36)
    for path in ("aa", "bb", "cc", "dd", "ee"):
        world.serve(path)
    world.pool.release(world.start("aa") or [])
    assert (world.pool.num_vacant, kept(world)) == (11, {"aa", "bb", "cc", "dd", "ee"})
    world.serve("ff")
    assert kept(world) == {"aa", "cc", "dd", "ee", "ff"}
    assert len(world.pool.longest_prefix(keys_of("bb"), 2)) == 2


@pytest.mark.parametrize("name", ["lru", "sglang", "marconi"])
def test_for_a_baseline_to_be_superseded_is_no_use(name: str) -> None:
    """ "aac" resumes at "aa" and supersedes "aab", which is still older than "cc"."""
    world = World(make(name, pages=26), 26)
    world.serve("aa")
    world.serve("aab", before="aa")
    world.serve("cc")
    world.serve("aac", before="aab")
    assert [image.key for image in world.policy.policy.images()] == [b"aab", b"cc", b"aa", b"aac"]
    assert world.images.find(b"aab").superseded  # type: ignore[union-attr]


def test_lru_gives_up_no_more_pages_than_a_checkpoint_leaves_wanted() -> None:
    """Four pages are wanted: that of "a", and the three of its checkpoint, which goes along. "b" stays."""
    world = World(make("lru"))
    for path in "ab":
        world.serve(path)
    for path in "ab":
        image = world.images.find(path.encode())
        assert image is not None
        world.images.pin(image)
        world.images.unpin(image)
    world.pool.release(world.pool.take(world.pool.num_vacant + 1 + IMAGE))
    assert not world.pool.holds(b"a") and world.pool.holds(b"b")


def test_sglang_gives_up_kv_from_the_oldest_leaf() -> None:
    world = World(make("sglang"))
    world.serve("aab")
    world.serve("aac")
    world.serve("dd")
    world.pool.release(world.pool.take(world.pool.num_vacant + 1))
    assert not world.pool.holds(b"aab") and world.pool.holds(b"aac")


@pytest.mark.parametrize(
    ("alpha", "victim"),
    [
        # By age alone: the image was kept at 0 s, the paths were given back at 1, 3 and 5 s.
        (0.0, "image aa"),
        # The image: 0 + 2 x 1. The paths: 0.2, 0.6 and 1, + 2 x 0.6.
        (2.0, "page aaaa"),
    ],
)
def test_marconi_gives_up_the_node_of_least_recency_and_savings(alpha: float, victim: str) -> None:
    """Nodes are the ends of "aaaa", "bb" and "cc", each 2 blocks saved for 5 pages, and the image at "aa": 2 for 3."""
    policy = Marconi(PAGES)
    world = World(policy)
    table = world.start("aaaa")
    assert table is not None
    world.keep("aa")
    world.keep("aaaa")
    world.time += 1.0
    world.pool.release(table)
    world.time += 1.0
    world.serve("bb")
    world.serve("cc")
    policy.alpha = alpha
    before = kept(world)
    world.pool.release(world.pool.take(world.pool.num_vacant + 1))
    name, path = victim.split()
    assert before - kept(world) == {path}
    assert world.pool.holds(path.encode()) == (name == "image")


def test_marconi_gives_up_a_node_whole_and_no_branch_point() -> None:
    """The image at "aa" is the oldest, and two paths hang on its page: so the ends of these go, "aabb" down to "aa", and then
    "aa" as the end of a path."""
    world = World(Marconi(PAGES))
    tables = [world.start("aabb"), world.start("aac")]
    world.keep("aa", RungKind.DEMAND)
    for path, table in zip(("aabb", "aac"), tables, strict=True):
        assert table is not None
        world.keep(path)
        world.time += 1.0
        world.pool.release(table)
    world.time += 1.0
    world.serve("b")
    paths = ("a", "aa", "aab", "aabb", "aac", "b")
    gone = []
    for _ in range(5):
        before = [path for path in paths if world.pool.holds(path.encode())]
        world.pool.release(world.pool.take(world.pool.num_vacant + 1))
        gone += [path for path in before if not world.pool.holds(path.encode())]
    assert gone == ["aabb", "aab", "aac", "aa", "a"] and kept(world) == {"b"}


def test_marconi_weighs_recency_and_savings() -> None:
    """(time, blocks saved, pages): alpha 0 takes the oldest, a large alpha what saves least for its pages."""
    nodes = [(0.0, 90, 100), (5.0, 10, 100), (10.0, 50, 100)]
    assert least(nodes, 0.0) == 0
    # 0 + 0.6; 0.5 + 0.6 * 0.11; 1 + 0.6 * 0.56
    assert least(nodes, 0.6) == 1
    assert least(nodes, 4.0) == 1


def test_marconi_tunes_alpha_on_its_window() -> None:
    """A long path that comes back after short ones: the oldest going first would lose it, savings keep it."""
    long, shorts = tuple(keys_of("l" * 20)), [tuple(keys_of(f"{c}z")) for c in "abcdefgh"]
    window = [(keys, float(i)) for i, keys in enumerate([long, *shorts, long])]
    assert tune(window, pool_blocks=34, pages_per_image=3) > 0.0


def test_clairvoyant_gives_up_what_is_used_last() -> None:
    foresight = Foresight()
    world = World(Clairvoyant(foresight), 14)  # type: ignore[arg-type]
    world.serve("aaaa")
    world.serve("bbbb")
    foresight.uses.update(dict.fromkeys(keys_of("aaaa"), 10.0) | dict.fromkeys(keys_of("bbbb"), 99.0))
    world.pool.release(world.pool.take(1))
    assert kept(world) == {"aaaa"}

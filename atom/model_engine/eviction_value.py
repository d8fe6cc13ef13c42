"""The order of the pool: what is least likely to save prefill time for the pages it takes is given up first."""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from math import inf
from operator import attrgetter

from atom.model_engine.eviction import Ending, EvictionPolicy, PoolView
from atom.model_engine.eviction_forest import Forest, Segment
from atom.model_engine.eviction_queues import CheckpointQueues
from atom.model_engine.eviction_returns import Boundary, ReturnTimes, Role
from atom.model_engine.eviction_units import UnitHeaps
from atom.model_engine.eviction_waiting import Ticket, WaitingRequests
from atom.model_engine.ids import BlockId, BlockKey
from atom.model_engine.placement import RungKind
from atom.model_engine.state_cache import Checkpoint, CheckpointStatus

MOST_OPEN = 4096
"""Requests remembered as running; one that ends without a trace is forgotten when this many came after it."""

MOST_HEIRS = 4
"""Lost ends that a checkpoint stands in for, as far as anybody looks: a shared prefix has any number of them."""

AWAITED = "awaited"
"""The place of units that a queued request would resume from."""


class ByValue(EvictionPolicy):
    """Pages and checkpoints by one measure: how soon they are expected back x blocks they save / pages they take.

    Pages that no checkpoint makes resumable go first. Then what is worth least of: a *unit*, the end of a path with its
    checkpoint down to the next checkpoint, branch or live page, which saves as much as it takes; and a checkpoint that may
    go alone, a guess, an end that its path has gone on behind or an answer's end, which saves the blocks behind the next
    one below. The end of the newest prompt goes alone only when no unit is left. What comes back is learned while serving
    (:class:`~atom.model_engine.eviction_returns.ReturnTimes`), and what queued requests resume from is known
    (:class:`~atom.model_engine.eviction_waiting.WaitingRequests`). Things that are expected to behave alike wait in one queue
    by age, and only the heads of queues are compared: O(log n) a decision, O(pages) of C loops for a request's pages.
    """

    # What a variant puts something else in the place of.
    queues_type = CheckpointQueues
    returns_type = ReturnTimes

    def __init__(self) -> None:
        self.returns = self.returns_type()
        self.units = UnitHeaps()
        self.queue = WaitingRequests()
        self.queues = self.queues_type()
        # By last prompt block: the prompt's blocks, the returns of its path, the keys an anchor of its may have.
        self._open: OrderedDict[BlockKey, tuple[int, int, Sequence[BlockKey]]] = OrderedDict()
        # By key, for each running request that may have an anchor there: the returns of its path.
        self._ends: dict[BlockKey, list[int]] = {}

    def attach(self, pool: PoolView) -> None:
        self.pool = pool
        self.forest = Forest(pool, self._rank)

    @property
    def num_blocks(self) -> int:
        return self.forest.num_blocks

    @property
    def num_images(self) -> int:
        return len(self.queues)

    def blocks(self) -> Iterator[BlockId]:
        for segment in self.forest:
            yield from segment.blocks

    def images(self) -> Iterator[Checkpoint]:
        return iter(self.queues)

    # Requests

    def admitted(self, keys: Sequence[BlockKey], matched: int, cached: int) -> None:
        """Learn from where the request comes back to. O(blocks behind it)."""
        if not keys:
            return
        now = self.pool.now()
        target = self.returns.deepest(keys)
        returns = 0
        if target is not None and target.end == len(keys) and target.role in (Role.PROMPT, Role.ANSWER):
            # Its own end, which does not wait while it runs: the path went on by less than a block, or not at all.
            self.returns.came_back(target, now)
            returns, sibling = target.returns, target.sibling
            if target.role is Role.ANSWER:
                target.role = Role.PROMPT
                if sibling is not None and sibling.role is Role.PROMPT:
                    self._pass(sibling, now)
            self.returns.stop(target)
        elif target is not None:
            self.returns.came_back(target, now)
            # Who branches off a shared prefix begins a path of its own.
            returns = target.returns if target.role in (Role.PROMPT, Role.ANSWER) else 0
            if target.role in (Role.PROMPT, Role.ANSWER):
                for end in (target, target.sibling):
                    if end is not None and end.role is not Role.OLDER:
                        self._pass(end, now)
            else:
                self.returns.wait(target, now)
        self._start(keys, returns)

    def readmitted(self, keys: Sequence[BlockKey]) -> None:
        if keys:
            ends = [end for key in keys[-2:] if (end := self.returns.get(key)) is not None]
            for end in ends:
                self.returns.stop(end)
            self._start(keys, max((end.returns for end in ends), default=0))

    # The queue

    def queued(self, request_id: str, keys: Sequence[BlockKey], first: bool = False) -> None:
        """O(its blocks), once it is among the first."""
        self.queue.add(request_id, keys, first)
        self._come_near()

    def unqueued(self, request_id: str, admitted: bool) -> None:
        ticket = self.queue.leave(request_id, self.pool.now(), admitted)
        if ticket is not None:
            self._move(ticket, None)
            self._come_near()

    def _come_near(self) -> None:
        for ticket in self.queue.come_near():
            known = map(self.returns.get, reversed(ticket.keys))
            self._move(ticket, next((end for end in known if end is not None and end.is_kept), None))

    def _move(self, ticket: Ticket, boundary: Boundary | None) -> None:
        """``ticket`` would resume at ``boundary`` from now on."""
        before = ticket.boundary
        was_first = before is not None and before.ticket is ticket
        ticket.boundary = boundary
        if before is not None and was_first:
            self._refile(before)
        if boundary is not None:
            insort(boundary.tickets, ticket, key=attrgetter("number"))
            if boundary.ticket is ticket:
                self._refile(boundary)

    def _start(self, keys: Sequence[BlockKey], returns: int) -> None:
        """A request runs whose prompt has ``keys``, on a path that came back ``returns`` times."""
        if keys[-1] in self._open:
            self._close(keys[-1])
        self._open[keys[-1]] = (len(keys), returns, keys[-2:])
        for key in keys[-2:]:
            self._ends.setdefault(key, []).append(returns)
        if len(self._open) > MOST_OPEN:
            self._close(next(iter(self._open)))

    def _close(self, key: BlockKey) -> tuple[int, int]:
        """A request is over. Returns the blocks of its prompt and the returns of its path."""
        length, returns, ends = self._open.pop(key)
        for end in ends:
            self._ends[end].pop()
            if not self._ends[end]:
                del self._ends[end]
        return length, returns

    def _pass(self, boundary: Boundary, now: float) -> None:
        """The path goes on behind it: from now on only a branch comes back to it."""
        boundary.role, boundary.returns, boundary.ending = Role.OLDER, 0, None
        self.returns.wait(boundary, now)
        self._refile(boundary)

    def add_block(self, block: BlockId) -> None:
        self.add_blocks((block,), None)

    def add_blocks(self, blocks: Sequence[BlockId], ending: Ending | None) -> None:
        segments = self.forest.add(blocks)
        key_of, running = self.pool.key_of, self._open
        # Behind the prompt's last block there is only the answer.
        for block in blocks:
            key = key_of(block)
            if key in running:
                self._start_waiting(segments, *self._close(key), ending)
                for segment in segments:
                    self._rank(segment)
                break

    def _start_waiting(self, segments: Sequence[Segment], length: int, returns: int, ending: Ending | None) -> None:
        """The ends of a prompt of ``length`` blocks and of its answer wait for the next turn."""
        now, sibling = self.pool.now(), None
        for end, image in (entry for segment in segments for entry in reversed(segment.images)):
            boundary = self.returns.get(image.key)
            if boundary is None or end < length - 1:
                break
            if boundary.role not in (Role.PROMPT, Role.ANSWER):
                continue
            boundary.ending, boundary.returns = self._ending_that_counts(ending), returns
            if sibling is not None:
                boundary.sibling, sibling.sibling = sibling, boundary
            sibling = boundary
            self.returns.wait(boundary, now)
            self.queues.file(image, boundary)

    def _ending_that_counts(self, ending: Ending | None) -> Ending | None:
        return ending

    def withdrawn(self, block: BlockId) -> None:
        self.forest.orphan(block)

    def remove_block(self, block: BlockId) -> None:
        self.forest.remove((block,))

    def remove_blocks(self, blocks: Sequence[BlockId]) -> None:
        self.forest.remove(blocks)

    # Checkpoints

    def add_image(self, image: Checkpoint) -> None:
        boundary = self.returns.get(image.key)
        if boundary is None or boundary.image is not image:
            boundary = self._publish(image)
        elif not image.is_guess and boundary.role in (Role.DEMAND, Role.INTERVAL, Role.OLDER):
            if image.key in self._ends and not image.superseded:
                boundary.role, boundary.returns = Role.PROMPT, self._ends[image.key][-1]
            elif boundary.role is not Role.OLDER:
                self._pass(boundary, self.pool.now())
        elif image.superseded and image.key not in self._ends and boundary.role is not Role.OLDER:
            self._pass(boundary, self.pool.now())
        self.queues.file(image, boundary)
        self.forest.add_image(image)

    def _publish(self, image: Checkpoint) -> Boundary:
        key, now = image.key, self.pool.now()
        returns = 0
        if image.kind is not RungKind.ANCHOR:
            role = Role.DEMAND if image.kind is RungKind.DEMAND else Role.INTERVAL
        elif image.superseded:
            role = Role.OLDER
        elif key in self._ends and not _stands_behind(image):
            role, returns = Role.PROMPT, self._ends[key][-1]
        else:
            role = Role.ANSWER
        boundary = self.returns.remember(key, role, returns, now)
        boundary.image, boundary.sibling, boundary.ending = image, None, None
        self._claim_back(boundary)
        self._hang(boundary)
        for ticket in self.queue.through(key, boundary.end - 1):
            if ticket.boundary is None or ticket.boundary.end < boundary.end or not ticket.boundary.is_kept:
                self._move(ticket, boundary)
        if role not in (Role.PROMPT, Role.ANSWER):
            self.returns.wait(boundary, now)
        return boundary

    def _claim_back(self, boundary: Boundary) -> None:
        """It can be resumed at again: nobody stands in for it any more."""
        heir, boundary.heir = boundary.heir, None
        if heir is not None and boundary in heir.lost:
            heir.lost.remove(boundary)
            self._refile(heir)

    def _hang(self, boundary: Boundary) -> None:
        """Find the next checkpoint below. O(blocks between them)."""
        assert boundary.image is not None
        boundary.below, boundary.end = None, 1
        block = self.pool.block_of(boundary.image.key)
        if block is not None:
            boundary.end = self.pool.depth_of(block) + 1
            boundary.below = self.returns.nearest_kept(block, self.pool)

    def _refile(self, boundary: Boundary) -> None:
        """What a checkpoint is to its path has changed."""
        image = boundary.image
        if image is None or image not in self.queues:
            return
        self.queues.file(image, boundary)
        block = self.forest.block_of(image)
        owner = self.forest.owner(block) if block is not None else None
        if owner is not None and owner.images[-1][1] is image:
            self._rank(owner)

    def remove_image(self, image: Checkpoint) -> None:
        boundary = self.returns.get(image.key)
        block = self.forest.block_of(image)
        if boundary is not None and boundary.role is Role.ANSWER and block is not None and self.pool.is_live(block):
            # A later boundary of the running answer takes its place: nobody ever waits here.
            self.returns.forget(image.key)
        self.queues.remove(image)
        self.forest.remove_image(image)

    # What goes next

    def pop_many(self, limit: int, for_image: bool) -> Sequence[BlockId] | Checkpoint:
        segment = self.units.unresumable()
        if segment is not None:
            return self.forest.pop_tail(segment, limit)
        return super().pop_many(limit, for_image)

    def pop(self) -> BlockId | Checkpoint:
        lost = self.units.unresumable()
        if lost is not None:
            return self.forest.pop_last(lost)
        now = self.pool.now()
        self.returns.advance(now)
        image, image_value = self._least_image(now)
        segment, unit_value = self._least_unit(now)
        if segment is not None and (image is None or unit_value < image_value):
            return self._pop_unit(segment)
        if segment is None:
            image = self._instead(image, image_value, now)
        if image is None:
            raise KeyError("nothing may be given up")
        self._bequeath(self.queues.remove(image))
        self.forest.remove_image(image)
        return image

    def _instead(self, image: Checkpoint | None, value: float, now: float) -> Checkpoint | None:
        """In need: the newest anchor that was filed longest ago, if it is worth less than ``image``."""
        newest = self.queues.in_need()
        if newest is None:
            return image
        boundary = self.queues.boundary_of(newest)
        return newest if self._image_value(boundary, now) < value else image

    def _pop_unit(self, segment: Segment) -> BlockId:
        if segment.images:
            self._bequeath(self.queues.boundary_of(segment.images[-1][1]))
        return self.forest.pop_last(segment)

    def _bequeath(self, boundary: Boundary) -> None:
        """Whoever comes back to the end of a path resumes from the next checkpoint below, once this one is gone."""
        gain, below = boundary.gain, boundary.below
        below = below if gain < boundary.end else None
        for ticket in [ticket for ticket in boundary.tickets if ticket.boundary is boundary]:
            self._move(ticket, below)
        if below is None:
            return
        ends = [end for end in (boundary, *boundary.lost, *below.lost) if end.role in (Role.PROMPT, Role.ANSWER)]
        below.lost, boundary.lost = ends[:MOST_HEIRS], []
        for end in below.lost:
            end.heir = below
        if below.lost:
            self._refile(below)

    def _urgency(self, boundary: Boundary, now: float) -> float:
        """How soon something is expected to resume here: by its own kind, or as one of the ends that fall back on it."""
        urgency = self.returns.urgency
        here = urgency(boundary, now)
        ticket = boundary.ticket
        if ticket is not None:
            here = max(here, 1 / self.queue.wait(ticket))
        return max((here, *(urgency(end, now) for end in boundary.lost if end.role is not Role.OLDER)))

    def _least_image(self, now: float) -> tuple[Checkpoint | None, float]:
        return self.queues.least(lambda boundary: self._image_value(boundary, now))

    def _image_value(self, boundary: Boundary, now: float) -> float:
        return self._urgency(boundary, now) * boundary.gain / max(self.pool.pages_per_image, 1)

    def _least_unit(self, now: float) -> tuple[Segment | None, float]:
        least, least_value = None, inf
        for segment in self.units.heads():
            value = self._unit_value(segment, now)
            if value < least_value:
                least, least_value = segment, value
        return least, least_value

    def _unit_value(self, segment: Segment, now: float) -> float:
        boundary = self._top(segment)
        return self._urgency(boundary, now) if boundary is not None else 0.0

    def _top(self, segment: Segment) -> Boundary | None:
        """The boundary that a resumable leaf is resumed at; None for a model without states."""
        return self.returns.get(segment.images[-1][1].key) if segment.images else None

    def _rank(self, segment: Segment) -> None:
        """File a segment anew, if it is a leaf."""
        segment.version += 1
        if not segment.is_leaf:
            return
        resumable = not self.pool.pages_per_image or (segment.images and segment.images[-1][0] == segment.end)
        if segment.is_lost or not resumable:
            self.units.file_unresumable(segment)
            return
        boundary = self._top(segment)
        if boundary is None:
            self.units.file(segment, None, segment.released)
        elif (ticket := boundary.ticket) is not None:
            # Of those that somebody waits for the last in the queue goes first.
            self.units.file(segment, AWAITED, -ticket.number)
        else:
            self.units.file(segment, (boundary.kind, boundary.pace, bool(boundary.lost)), boundary.since)


def _stands_behind(image: Checkpoint) -> bool:
    """Whether it is the other end of a request whose prompt's anchor is there."""
    return image.companion is not None and image.companion.status is CheckpointStatus.READY

"""The loop: arrivals, steps of the real scheduler, a clock that the cost model moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from atom.model_engine.block_manager import BlockManager
from atom.model_engine.placement import Placement, RungKind
from atom.model_engine.sequence import Sequence
from atom.model_engine.step_plan import StepPlan, StepResult
from atom.replay.arrivals import Arrivals, SeatArrivals, TimedArrivals, due_times
from atom.replay.assemble import Engine, assemble
from atom.replay.cost_model import NS, CostModel
from atom.replay.future import Future
from atom.replay.geometry import Geometry
from atom.replay.policies import PolicyContext, make_policy
from atom.replay.results import Outcome, Replay, Sample
from atom.replay.trace import Trace, TraceRequest

SAMPLES = 400
"""Points of the occupancy timeline, at most twice that."""


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """One replay. ``pool_tokens``: tokens of KV that the pool would hold without any image. ``seats``: requests that run
    at the same time and, in a trace of sessions, sessions that are played at the same time. ``fast_forward``: take many
    equal decode steps at once; results are the same without."""

    geometry: Geometry
    pool_tokens: int
    seats: int
    policy: str
    placement: Placement
    cost: CostModel = field(default_factory=CostModel)
    max_num_batched_tokens: int = 8192
    fast_forward: bool = True


def replay(
    trace: Trace,
    settings: ReplaySettings,
    progress: Callable[[int], None] = lambda ended: None,
    check: Callable[[BlockManager], None] | None = None,
) -> Replay:
    """Play a prepared ``trace`` to its end.

    ``progress`` is told how many requests ended, ``check`` runs after every step. ValueError on a policy or a block size
    that does not exist; RuntimeError if the engine stops making progress.
    """
    simulation = _Simulation(trace, settings)
    while simulation.step():
        if check is not None:
            check(simulation.engine.manager)
        progress(len(simulation.result.outcomes))
    return simulation.finish()


@dataclass(slots=True)
class _Running:
    """A request in the engine. ``outcome`` is made when it is first admitted."""

    request: TraceRequest
    seq: Sequence
    arrived: int
    outcome: Outcome | None = None


@dataclass(slots=True)
class _Timeline:
    """Samples at even distances; every other one goes, and the distance doubles, when there are too many."""

    distance: int = NS
    next_time: int = 0
    samples: list[Sample] = field(default_factory=list)

    def add(self, now: int, make: Callable[[float], Sample]) -> None:
        if now < self.next_time:
            return
        self.samples.append(make(now / NS))
        self.next_time = now + self.distance
        if len(self.samples) >= 2 * SAMPLES:
            self.samples = self.samples[::2]
            self.distance *= 2


class _Simulation:
    def __init__(self, trace: Trace, settings: ReplaySettings) -> None:
        size = settings.placement.block_size
        if size % trace.block_size:
            raise ValueError(f"blocks of {size} tokens do not consist of the trace's blocks of {trace.block_size}")
        self.settings = settings
        self.now = 0
        self.arrivals: Arrivals = TimedArrivals(trace) if trace.timed else SeatArrivals(trace.sessions, settings.seats)
        self.future = Future(trace, due_times(trace))
        pages_per_image = settings.geometry.pages_per_image(size)
        pool_blocks = max(1, settings.pool_tokens // size)
        context = PolicyContext(pool_blocks, self.future)
        self.engine: Engine = assemble(
            trace,
            settings.placement,
            make_policy(settings.policy, context),
            lambda: self.now / NS,
            pool_blocks,
            pages_per_image,
            settings.seats,
            settings.max_num_batched_tokens,
        )
        self.running: dict[str, _Running] = {}
        self.result = Replay(
            trace.name,
            settings.geometry.name,
            settings.policy,
            settings.seats,
            pool_blocks * size,
            size,
            size // trace.block_size,
        )
        self.timeline = _Timeline()

    def step(self) -> bool:
        """Run the next step, or move the clock to the next arrival; False when all is done."""
        scheduler = self.engine.scheduler
        self._receive()
        if not scheduler.has_unfinished:
            if self.arrivals.next_time is None:
                return False
            self.now = max(self.now, self.arrivals.next_time)
            return True
        plan = scheduler.schedule()
        if plan is None:
            raise RuntimeError("requests wait and nothing can run")
        self._note_admissions(plan)
        geometry = self.settings.geometry
        self.now += self.settings.cost.step_ns(plan, geometry.image_bytes)
        crossed = self._update(plan)
        self.result.steps += 1
        self.timeline.add(self.now, self._sample)
        if self.settings.fast_forward and not plan.prefills and not (scheduler.waiting and crossed):
            self._fast_forward()
        return True

    def _receive(self) -> None:
        arrivals = self.arrivals
        while (time := arrivals.next_time) is not None and time <= self.now:
            time, request = arrivals.pop()
            self.future.arrived(request, time / NS)
            seq = self.engine.keys.sequence(request)
            try:
                self.engine.scheduler.add(seq)
            except ValueError:
                # The pool can never hold it: all of its prompt counts as missed.
                self.result.outcomes.append(Outcome(request, refused=True))
                self.future.admitted(request)
                self.engine.keys.forget(request)
                arrivals.ended(request, time)
                continue
            self.running[seq.request_id] = _Running(request, seq, time)

    def _note_admissions(self, plan: StepPlan) -> None:
        for part in plan.prefills:
            entry = self.running[part.seq.request_id]
            hit = part.seq.hit
            if entry.outcome is None and hit is not None:
                self.future.admitted(entry.request)
                kept = self._ever_kept(part.seq, entry.request.ideal // self.result.ideal_stride, hit.cached)
                entry.outcome = Outcome(entry.request, hit.matched, hit.wanted, hit.cached, kept)

    def _ever_kept(self, seq: Sequence, ideal: int, cached: int) -> int:
        """The rightmost boundary in ``(cached, ideal]``, in blocks, that was resumable at some time; ``cached`` if none."""
        images, keys = self.engine.images, seq.block_keys
        if images is None:
            return max(ideal, cached)
        return next((n for n in range(ideal, cached, -1) if keys[n - 1] in images.ever_kept), cached)

    def _update(self, plan: StepPlan) -> bool:
        """Apply the step; whether it changed what a waiting request would find."""
        scheduler, size = self.engine.scheduler, self.settings.placement.block_size
        samples = len(plan.samples)
        outputs = scheduler.update(plan, StepResult([0] * samples, [None] * samples))
        self.engine.manager.finish_step()
        crossed = any(seq.num_computed_tokens % size == 0 for seq in plan.decodes)
        for output in outputs:
            entry = self.running[output.request_id]
            assert entry.outcome is not None
            if entry.outcome.ttft is None:
                entry.outcome.ttft = (self.now - entry.arrived) / NS
            if output.finish_reason is not None:
                crossed = True
                del self.running[output.request_id]
                self.engine.keys.forget(entry.request)
                self.result.outcomes.append(entry.outcome)
                self.arrivals.ended(entry.request, self.now)
        return crossed

    def _fast_forward(self) -> None:
        """Take the decode steps at once in which nothing can happen but that every running request gets a token.

        Up to the step before the first one in which a request crosses a block boundary, wants a page or ends, or before
        which a request arrives. What waits was refused with the pool as it is now, so it would be refused again.
        """
        scheduler, size = self.engine.scheduler, self.settings.placement.block_size
        steps = 1 << 62
        for seq in scheduler.running:
            tokens = len(seq.token_ids)
            computed = seq.num_computed_tokens
            if computed != tokens - 1:
                return
            room = len(seq.block_table) * size - tokens + 1
            steps = min(steps, size - computed % size - 1, seq.max_tokens - tokens - 1, room)
        duration = self.settings.cost.decode_ns
        arrival = self.arrivals.next_time
        if arrival is not None:
            steps = min(steps, -(-(arrival - self.now) // duration))
        if steps <= 0 or not scheduler.running:
            return
        tokens = bytes(steps)
        for seq in scheduler.running:
            seq.token_ids.extend(tokens)
            seq.num_computed_tokens += steps
        self.now += steps * duration
        self.result.steps += steps

    def _sample(self, time: float) -> Sample:
        pool, images = self.engine.manager.pool, self.engine.images
        held = [image.kind for image in images.held()] if images is not None else []
        kinds = {kind: held.count(kind) * pool.pages_per_image for kind in RungKind}
        return Sample(time, pool.num_live, pool.num_cached, kinds)

    def finish(self) -> Replay:
        """The result, once :meth:`step` said False."""
        manager, result = self.engine.manager, self.result
        result.seconds = self.now / NS
        result.stats = manager.stats
        result.preemptions = self.engine.scheduler.num_preemptions
        result.samples = self.timeline.samples
        if self.engine.images is not None:
            result.fates = self.engine.images.fates
            result.kept, result.used = self.engine.images.kept, self.engine.images.used
            result.images_resident = self.engine.images.num_checkpoints
        return result

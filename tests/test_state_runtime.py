"""StateRuntime by hand, for both ways a state moves: what is queued, what is held until when, what is given back."""

from __future__ import annotations

import pytest

from atom.model_engine.block_pool import BlockPool
from atom.model_engine.ids import BlockKey
from atom.model_engine.page_unit_checkpoint import PagedStateCheckpointCoordinator
from atom.model_engine.placement import Rung, RungKind
from atom.model_engine.sequence import Sequence
from atom.model_engine.state_cache import Checkpoint, CheckpointStatus
from atom.model_engine.state_pool import StateSlotPool
from atom.model_engine.state_runtime import ImageRestore, ImageStore, ReservedRung, StateMaintenanceOps, StateRuntime
from atom.sampling_params import SamplingParams
from tests.recording import Engine, prompt_of

A = RungKind.ANCHOR
both = pytest.mark.parametrize("backend", ["page", "slot"])


def runtime_of(backend: str, slots: int = 4, per_request: int = 1, scratch: int = 0, pages: int = 9) -> StateRuntime:
    """``slots`` slots; images of three of ``pages`` pages."""
    pool = StateSlotPool(slots)
    cache = pool if backend == "slot" else PagedStateCheckpointCoordinator(BlockPool(pages), 3)
    return StateRuntime(pool, cache, per_request, scratch)


def pages_of(runtime: StateRuntime) -> BlockPool:
    assert isinstance(runtime.cache, PagedStateCheckpointCoordinator)
    return runtime.cache.pool


def seq_of(name: str = "r") -> Sequence:
    return Sequence(name, list(range(20)), SamplingParams(), 64)


def started(
    runtime: StateRuntime, name: str = "r", source: Checkpoint | None = None, consume: bool = False
) -> Sequence:
    seq = seq_of(name)
    if source is not None:
        runtime.hold(source, consume)
    runtime.start(seq, source, consume)
    return seq


def finish(runtime: StateRuntime, stored: bool = True, indexed: bool = True) -> None:
    runtime.finish(lambda key: indexed, stored)
    runtime.check()


def kept(runtime: StateRuntime, key: BlockKey = b"k", kind: RungKind = A) -> Checkpoint:
    """A checkpoint that a request left, which has ended since."""
    seq = started(runtime, "before")
    reserved = runtime.reserve(seq, key, Rung(8, kind), inside=False)
    assert reserved is not None
    runtime.fill(seq, reserved)
    finish(runtime)
    runtime.end(seq)
    return reserved.checkpoint


def test_copy_queues_restores_and_holds_the_image_until_they_ran() -> None:
    """Several requests read one image in one step; until the step is over its pages are nobody's room."""
    runtime = runtime_of("page")
    image = kept(runtime)
    first, second = started(runtime, "a", image), started(runtime, "b", image)
    assert first.state_slots != second.state_slots and image.pins == 2
    restores = {ImageRestore(tuple(image.pages), seq.state_slots[0]) for seq in (first, second)}
    assert set(runtime.take_maintenance().restores) == restores
    assert runtime.take_maintenance() == StateMaintenanceOps(), "queued once"
    assert pages_of(runtime).num_available == 6
    finish(runtime)
    assert pages_of(runtime).num_available == 9 and image.pins == 0
    assert runtime.cache.fates.read_back[A] == 2


def test_fork_reads_the_checkpoint_in_place_until_each_reader_ran() -> None:
    runtime = runtime_of("slot", slots=3)
    source = kept(runtime)
    first, second = started(runtime, "a", source), started(runtime, "b", source)
    assert first.reading is source and second.reading is source
    assert source.slot not in (*first.state_slots, *second.state_slots)
    assert runtime.take_maintenance() == StateMaintenanceOps(), "nothing is copied"
    runtime.advance(first)
    assert not runtime.can_start(), "the other one still reads it"
    runtime.advance(second)
    assert runtime.can_start() and (first.reading, second.reading) == (None, None)
    assert runtime.cache.fates.read_back[A] == 2


def test_fork_pins_a_handed_over_slot_for_two_passes() -> None:
    """The pass that wrote it hands it over; the owner's next pass reads it once more; then it is room."""
    runtime = runtime_of("slot", slots=2)
    seq = started(runtime)
    written = seq.state_slots[0]
    reserved = runtime.reserve(seq, b"k", Rung(8, A), inside=False)
    assert reserved is not None and reserved.slot is None
    runtime.fill(seq, reserved)
    assert reserved.checkpoint.slot == written and reserved.checkpoint.status is CheckpointStatus.READY
    assert seq.state_slots[0] != written and seq.reading is reserved.checkpoint
    finish(runtime)
    assert not runtime.can_start(), "the step is over, its owner has yet to read it"
    assert runtime.cache.fates.read_back[A] == 0, "its owner going on is no hit"
    runtime.advance(seq)
    assert runtime.can_start()


def test_copy_stores_the_committed_slot_after_the_forward() -> None:
    runtime = runtime_of("page")
    seq = started(runtime)
    reserved = runtime.reserve(seq, b"k", Rung(8, A), inside=False)
    assert reserved is not None and runtime.stores == []
    runtime.fill(seq, reserved)
    assert reserved.checkpoint.status is CheckpointStatus.COPYING and runtime.cache.find(b"k") is None
    assert runtime.stores == [ImageStore(seq.state_slots[0], reserved.checkpoint.pages)]
    finish(runtime)
    assert runtime.cache.find(b"k") is reserved.checkpoint and runtime.stores == []


@pytest.mark.parametrize(("stored", "indexed"), [(False, True), (True, False)])
def test_copy_cancels_what_was_not_stored_or_lost_its_block(stored: bool, indexed: bool) -> None:
    """A failed store costs the checkpoint and nothing else; a block that went meanwhile leaves nothing to find."""
    runtime = runtime_of("page", scratch=1)
    seq = started(runtime)
    for position, inside in ((8, True), (16, False)):
        reserved = runtime.reserve(seq, bytes([position]), Rung(position, A), inside)
        assert reserved is not None
        runtime.fill(seq, reserved)
    finish(runtime, stored, indexed)
    assert runtime.cache.ready() == {} and runtime.cache.num_reserved == 0
    assert pages_of(runtime).num_vacant == 9 and runtime.slots.num_vacant == 3
    assert runtime.cache.fates.kept == 0


def test_copy_gives_states_inside_a_chunk_scratch_slots_and_takes_them_back() -> None:
    runtime = runtime_of("page", slots=3, scratch=2)
    seq = started(runtime)
    assert runtime.interior_room == 2
    reserved = [runtime.reserve(seq, bytes([i]), Rung(8 * i, A), inside=True) for i in (1, 2)]
    assert runtime.interior_room == 0
    slots = [rung.slot for rung in reserved if rung is not None]
    assert len(slots) == 2 and len({*slots, *seq.state_slots}) == 3
    for rung in reserved:
        assert rung is not None
        runtime.fill(seq, rung)
    assert [store.slot for store in runtime.stores] == slots
    finish(runtime)
    assert runtime.interior_room == 2 and runtime.slots.num_live == 1
    assert runtime.cache.num_checkpoints == 2


def test_copy_without_a_scratch_slot_keeps_nothing() -> None:
    runtime = runtime_of("page", slots=1)
    seq = started(runtime)
    assert runtime.reserve(seq, b"k", Rung(8, A), inside=True) is None
    assert pages_of(runtime).num_vacant == 9, "the place in pages is free again"


def test_fork_writes_states_inside_a_chunk_straight_to_their_slots() -> None:
    runtime = runtime_of("slot")
    seq = started(runtime)
    own = list(seq.state_slots)
    reserved = runtime.reserve(seq, b"k", Rung(8, A), inside=True)
    assert runtime.interior_room is None
    assert reserved is not None and reserved.slot == reserved.checkpoint.slot
    runtime.fill(seq, reserved)
    finish(runtime)
    assert runtime.cache.find(b"k") is not None
    assert seq.state_slots == own and seq.reading is None, "its owner goes on where it was"


@both
def test_cancel_after_a_failed_forward(backend: str) -> None:
    runtime = runtime_of(backend, scratch=1)
    seq = started(runtime)
    reserved = [
        runtime.reserve(seq, b"inside", Rung(8, A), inside=True),
        runtime.reserve(seq, b"end", Rung(16, A), inside=False),
    ]
    runtime.cancel([rung for rung in reserved if rung is not None])
    finish(runtime, stored=False)
    runtime.end(seq)
    runtime.check()
    assert runtime.cache.num_checkpoints == runtime.cache.num_reserved == 0
    assert runtime.slots.num_vacant == 4


def test_copy_consumes_an_image_that_does_not_fit_beside_its_reader() -> None:
    """Its pages are room at once; the restore that was queued still reads them, before the forward."""
    runtime = runtime_of("page", pages=3)
    image = kept(runtime)
    seq = started(runtime, "reader", image, consume=True)
    assert pages_of(runtime).num_vacant == 3 and image.status is CheckpointStatus.GONE
    assert runtime.take_maintenance().restores == (ImageRestore(tuple(image.pages), seq.state_slots[0]),)
    assert seq.last_anchor is None
    finish(runtime)
    fates = runtime.cache.fates
    assert (fates.read_back[A], fates.evicted) == (1, 1)


@pytest.mark.parametrize("per_request", [1, 2])
def test_fork_adopts_its_source_when_no_other_slot_is_left(per_request: int) -> None:
    runtime = runtime_of("slot", slots=per_request + 1, per_request=per_request)
    source = kept(runtime)
    assert runtime.slots.take_live(1) is not None and runtime.can_start()
    seq = started(runtime, "reader", source)
    assert seq.state_slots[0] == source.slot and len(set(seq.state_slots)) == per_request
    assert seq.reading is None and source.status is CheckpointStatus.GONE
    assert not runtime.can_start()
    runtime.check()


def test_fork_does_not_adopt_while_another_slot_is_left() -> None:
    runtime = runtime_of("slot", slots=2)
    source = kept(runtime)
    assert started(runtime, "reader", source).reading is source
    assert runtime.cache.find(b"k") is source


@both
def test_slots_of_a_request_are_taken_and_given_back_together(backend: str) -> None:
    """The committed slot and the rollback scratch."""
    runtime = runtime_of(backend, slots=7, per_request=3)
    seqs = [started(runtime, name) for name in "ab"]
    assert len({slot for seq in seqs for slot in seq.state_slots}) == 6
    assert not runtime.can_start(), "one slot is left, and a request needs three"
    runtime.end(seqs[0])
    assert runtime.can_start() and runtime.slots.num_live == 3 and seqs[0].state_slots == []


@both
def test_end_lets_go_of_what_was_never_read(backend: str) -> None:
    runtime = runtime_of(backend)
    source = kept(runtime)
    seq = started(runtime, "aborted", source)
    finish(runtime)
    runtime.end(seq)
    assert source.pins == 0 and runtime.cache.find(b"k") is source
    runtime.check()


@both
def test_an_anchor_supersedes_the_one_before_it_on_its_path(backend: str) -> None:
    """Also the one that the request resumed from; not a guess, and not before its own bytes are there."""
    runtime = runtime_of(backend, pages=18)
    source, guess = kept(runtime, b"turn 1"), kept(runtime, b"guess", RungKind.DEMAND)
    for before in (source, guess):
        seq = started(runtime, "reader", before)
        finish(runtime)
        runtime.advance(seq)
        reserved = runtime.reserve(seq, b"after " + before.key, Rung(16, A), inside=False)
        assert reserved is not None and not before.superseded
        runtime.fill(seq, reserved)
        finish(runtime)
        runtime.end(seq)
        assert before.superseded == (before is source)


@both
def test_an_answer_keeps_its_last_boundary_alone(backend: str) -> None:
    """Each boundary takes the place of the one before; the prompt's anchor stays, and goes out of date with the answer's."""
    runtime = runtime_of(backend)
    prompt = kept(runtime, b"prompt")
    seq = started(runtime, "reader", prompt)
    for key in (b"answer 1", b"answer 2", b"answer 3"):
        finish(runtime)
        runtime.advance(seq)
        runtime.keep_answer(seq, key, 16)
    finish(runtime)
    assert set(runtime.cache.ready()) == {b"prompt", b"answer 3"}
    assert not prompt.superseded and runtime.cache.fates.superseded == 2
    answer = runtime.cache.find(b"answer 3")
    assert answer is not None
    runtime.cache.supersede(answer)
    assert prompt.superseded, "the next turn supersedes both ends of this one"


@both
def test_an_answer_that_somebody_reads_is_superseded_instead(backend: str) -> None:
    """Its place cannot be taken over now; it may not outlive the newest of other paths either."""
    runtime = runtime_of(backend, slots=5)
    seq = started(runtime)
    runtime.keep_answer(seq, b"answer 1", 8)
    finish(runtime)
    runtime.advance(seq)
    first = runtime.cache.find(b"answer 1")
    assert first is not None
    reader = started(runtime, "reader", first)
    runtime.keep_answer(seq, b"answer 2", 16)
    finish(runtime)
    runtime.advance(seq)
    runtime.advance(reader)
    assert set(runtime.cache.ready()) == {b"answer 1", b"answer 2"} and first.superseded
    runtime.check()


@both
def test_an_answer_kept_by_another_is_not_kept_twice(backend: str) -> None:
    runtime = runtime_of(backend)
    there = kept(runtime, b"answer")
    seq = started(runtime)
    slots = list(seq.state_slots)
    runtime.keep_answer(seq, b"answer", 8)
    assert runtime.stores == [] and seq.state_slots == slots and seq.reading is None
    assert there.shared and seq.answer_anchor is None


def test_an_answer_replaced_in_a_step_whose_store_fails_is_only_lost() -> None:
    runtime = runtime_of("page")
    seq = started(runtime)
    runtime.keep_answer(seq, b"answer 1", 8)
    finish(runtime)
    runtime.keep_answer(seq, b"answer 2", 16)
    finish(runtime, stored=False)
    runtime.keep_answer(seq, b"answer 3", 24)
    finish(runtime)
    assert set(runtime.cache.ready()) == {b"answer 3"}
    assert pages_of(runtime).num_available == 9


def test_a_reserved_rung_says_where_its_state_comes_out() -> None:
    """At the chunk's end it is the committed state; inside it has a slot of its own."""
    runtime = runtime_of("page", scratch=1)
    seq = started(runtime)
    end = runtime.reserve(seq, b"end", Rung(16, A), inside=False)
    inside = runtime.reserve(seq, b"in", Rung(8, A), inside=True)
    assert end == ReservedRung(16, runtime.cache._checkpoints[b"end"], None)
    assert inside is not None and inside.slot is not None and inside.slot not in seq.state_slots


def test_places_inside_chunks_are_shared_by_the_requests_of_a_step() -> None:
    """Two prompts at once and one scratch slot: the second one's chunk is cut, and no rung is lost."""
    engine = Engine(
        backend="page", interior_grid=4, interval=8, max_num_seqs=2, checkpoint_slots=1, budget=64, num_blocks=120
    )
    for i in range(2):
        engine.add(f"r{i}", prompt_of(29, i), 1)
    engine.step()
    first, second = engine.runner.plans[0].prefills
    assert [rung.position for rung in first.chunk.rungs] == [8, 16] and first.chunk.end == 16
    assert [rung.position for rung in second.chunk.rungs] == [8] and second.chunk.end == 8
    engine.run()
    states = engine.manager.states
    assert states is not None
    assert sorted(len(engine.names[key]) for key in states.cache.ready()) == [8, 8, 16, 16, 24, 24, 28, 28]

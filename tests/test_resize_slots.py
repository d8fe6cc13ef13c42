"""Growing and shrinking the slot arena at run time: states are moved, checkpoints go first, answers stay the same."""

from __future__ import annotations

import pytest

from atom import LLM, SamplingParams
from atom.model_engine.cache_layout import CacheGeometry
from atom.model_engine.placement import RungKind
from atom.model_engine.state_pool import StateSlotPool
from tests.recording import Engine
from tests.test_cases import prompt_of


def pool_with(live: int, checkpoints: int, size: int) -> tuple[StateSlotPool, list[int], list]:
    """A pool whose live slots are the highest in use."""
    pool = StateSlotPool(size)
    kept = []
    for i in range(checkpoints):
        checkpoint = pool.reserve(bytes([i]), RungKind.ANCHOR)
        pool.publish(checkpoint)
        kept.append(checkpoint)
    return pool, pool.take_live(live), kept


def test_live_slots_move_to_vacant_ones_below() -> None:
    pool, live, kept = pool_with(live=2, checkpoints=3, size=8)
    pool.orphan((b"\x00",))
    assert pool.resize(4) == {live[1]: 0}
    assert (pool.num_slots, pool.num_live, pool.num_checkpoints, pool.num_vacant) == (4, 2, 2, 0)
    assert [checkpoint.slot for checkpoint in kept[1:]] == [1, 2]
    pool.check()


def test_without_room_the_longest_unused_checkpoint_goes() -> None:
    pool, live, kept = pool_with(live=2, checkpoints=3, size=5)
    assert pool.resize(3) == {live[0]: kept[0].slot, live[1]: kept[1].slot}
    assert pool.find(b"\x00") is None and pool.find(b"\x02") is kept[2]
    pool.check()


def test_a_checkpoint_that_is_read_is_moved() -> None:
    pool, _, kept = pool_with(live=0, checkpoints=3, size=3)
    pool.pin(kept[2])
    assert pool.resize(1) == {2: 0} and kept[2].slot == 0
    pool.unpin(kept[2])
    pool.check()


def test_what_is_in_use_is_not_given_up() -> None:
    pool, _, _ = pool_with(live=3, checkpoints=1, size=4)
    with pytest.raises(ValueError, match="2 slots cannot hold the 3 that are in use"):
        pool.resize(2)
    assert pool.num_slots == 4
    pool.check()


def test_grown_slots_are_used_after_the_lower_ones() -> None:
    pool, _, _ = pool_with(live=1, checkpoints=0, size=2)
    assert pool.resize(4) == {}
    assert pool.take_live(3) == [1, 2, 3]


def test_running_requests_go_on_after_a_resize() -> None:
    engine = Engine(backend="slot", max_num_seqs=3, checkpoint_slots=9, budget=64)
    for i in range(6):
        engine.ask(f"filler{i}", prompt_of(30, i), 2)
    for i in range(3):
        engine.add(f"r{i}", prompt_of(20, 10 + i), 20)
    engine.step()
    for size in (6, 12, 7):
        engine.core.resize_state_slots(size)
        assert len(engine.runner.slots) == size
        engine.check()
        engine.poison()
        engine.step()
    engine.run()
    for i in range(3):
        engine.check_answer(f"r{i}")
    with pytest.raises(ValueError, match="2 slots are too few for --max-num-seqs=3; use 3"):
        engine.core.resize_state_slots(2)


def test_images_take_no_slots() -> None:
    with pytest.raises(ValueError, match="--state-checkpoint-backend=slot"):
        Engine(backend="page").core.resize_state_slots(10)


def test_real_model_answers_the_same_after_a_resize() -> None:
    settings = {"threads": 1, "max_model_len": 1024, "max_num_seqs": 2, "kv_cache_memory": "32MiB"}
    with LLM(**settings, state_checkpoint_backend="slot") as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        prompt = {"prompt_token_ids": [i * 7 % 250 for i in range(400)]}
        first = llm.generate(prompt, params, use_tqdm=False)[0]
        llm.resize_state_slots(3)
        again = llm.generate(prompt, params, use_tqdm=False)[0]
        llm.resize_state_slots(40)
        last = llm.generate(prompt, params, use_tqdm=False)[0]
    assert (again.num_cached_tokens, last.num_cached_tokens) == (384, 384)
    assert first.outputs[0].token_ids == again.outputs[0].token_ids == last.outputs[0].token_ids


@pytest.mark.parametrize(
    ("change", "named"),
    [({"block_size": 32}, "32 tokens"), ({"page_bytes": 0}, "0 bytes"), ({"image_bytes": 100}, "not a copy of a slot")],
)
def test_a_geometry_that_does_not_fit_is_a_start_up_error(change: dict, named: str) -> None:
    good = {"block_size": 64, "page_bytes": 1000, "slot_bytes": 1500, "image_bytes": 1500, "layout_id": "x"}
    geometry = CacheGeometry(**good)
    geometry.validate(64, 1000, 1500)
    assert geometry.pages_per_image == 2
    with pytest.raises(RuntimeError, match=named):
        CacheGeometry(**{**good, **change}).validate(64, change.get("page_bytes", 1000), 1500)


def test_arenas_sized_for_another_geometry_are_a_start_up_error() -> None:
    geometry = CacheGeometry(64, 1000, 1500, 1500, "x")
    for sizes in ((1001, 1500), (1000, 1499)):
        with pytest.raises(RuntimeError, match="sized for"):
            geometry.validate(64, *sizes)


def test_a_resize_that_memory_refuses_changes_nothing() -> None:
    engine = Engine(backend="slot", max_num_seqs=2, checkpoint_slots=4, budget=64)
    prompt = prompt_of(20, 1)
    engine.ask("before", prompt, 2)

    def refuse(num_slots: int, moves) -> None:
        raise MemoryError

    engine.runner.resize_slots = refuse
    with pytest.raises(MemoryError):
        engine.core.resize_state_slots(100)
    with pytest.raises(ValueError, match="no number of slots"):
        engine.core.resize_state_slots("x")
    assert engine.manager.states.slots.num_slots == 6
    engine.check()
    assert engine.ask("after", prompt, 2) == 16

"""What a state checkpoint costs: storing and restoring an image, and giving a state out inside a forward."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from atom.config import EngineConfig
from atom.model_engine.engine_core import EngineCore
from atom.model_engine.ids import BlockId
from atom.model_engine.messages import EngineRequest
from atom.model_engine.state_runtime import ImageStore
from atom.model_engine.step_plan import StepPlan, StepResult
from atom.model_ops.arenas import Arena
from atom.model_ops.images import load_image, save_image
from atom.sampling_params import SamplingParams

IMAGE_BYTES = 64 << 20
PAGE_BYTES = 64 * 27_648
"""A block of 64 tokens of Kimi-K3's latent KV in bfloat16."""
CHUNK = 2048


def _seconds(action: Callable[[], object], repeats: int) -> float:
    """Median seconds of ``action``."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def copies(threads: int, repeats: int) -> dict[str, Any]:
    """Store and restore of a 64 MiB image against a plain copy of the same bytes: neighbouring and scattered pages."""
    torch.set_num_threads(threads)
    count = -(-IMAGE_BYTES // PAGE_BYTES)
    pages = Arena(4 * count, PAGE_BYTES).bytes.fill_(1)
    slots = Arena(2, IMAGE_BYTES).bytes.fill_(2)
    plain = torch.full((IMAGE_BYTES,), 3, dtype=torch.uint8)
    target = torch.empty_like(plain)
    neighbours = [BlockId(i) for i in range(count, 2 * count)]
    scattered = [BlockId((7 * i) % (4 * count)) for i in range(count)]
    result: dict[str, Any] = {"image_mib": IMAGE_BYTES >> 20, "pages": count}
    # Plain copies stand before and after each kind, so that a change of the machine's pace shows in both.
    for name, ids in (("neighbours", neighbours), ("scattered", scattered)):
        before = _seconds(lambda: target.copy_(plain), repeats)
        store = _seconds(lambda ids=ids: save_image(slots[0], pages, ids), repeats)
        restore = _seconds(lambda ids=ids: load_image(pages, ids, slots[1]), repeats)
        after = _seconds(lambda: target.copy_(plain), repeats)
        memcpy = (before + after) / 2
        result[name] = {
            "memcpy_ms": round(1e3 * memcpy, 3),
            "store_ms": round(1e3 * store, 3),
            "restore_ms": round(1e3 * restore, 3),
            "store_over_memcpy_speed": round(memcpy / store, 3),
            "restore_over_memcpy_speed": round(memcpy / restore, 3),
        }
    return result


class _Timed:
    """A runner whose forwards and stores are timed apart."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.forward = self.stored = 0.0
        self.forwards = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def execute(self, plan: StepPlan) -> StepResult:
        start = time.perf_counter()
        result = self._runner.execute(plan)
        self.forward += time.perf_counter() - start
        self.forwards += 1
        return result

    def store(self, stores: list[ImageStore]) -> None:
        start = time.perf_counter()
        self._runner.store(stores)
        self.stored += time.perf_counter() - start


def interior(model: str, threads: int, repeats: int) -> dict[str, Any]:
    """One forward over a 2048-token prompt that gives out a state inside, against one that gives out none."""
    config = EngineConfig(
        model=model,
        threads=threads,
        max_num_seqs=1,
        max_num_batched_tokens=CHUNK,
        max_model_len=2 * CHUNK,
        kv_cache_memory="512MiB",
        cache_stats_interval=0,
    )
    core = EngineCore(config)
    timed = core.runner = _Timed(core.runner)
    manager = core.block_manager
    placements = {
        "with": replace(manager.placement, interval=None),
        "without": replace(manager.placement, enabled=False),
    }
    times: dict[str, list[float]] = {name: [] for name in placements}
    stores, forwards = [], []
    for i in range(2 * (repeats + 1)):
        name = ("with", "without")[i % 2]
        manager.placement = placements[name]
        prompt = [(i * 7 + j * 13) % 251 for j in range(CHUNK)]
        params = SamplingParams(max_tokens=1, temperature=0)
        timed.forward = timed.stored = timed.forwards = 0
        core.add_request(EngineRequest(f"r{i}", prompt, params))
        while core.has_unfinished():
            core.step()
        core.reset_prefix_cache()
        if i >= 2:
            times[name].append(timed.forward)
            if name == "with":
                stores.append(timed.stored)
                forwards.append(timed.forwards)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "prompt_tokens": CHUNK,
        "forward_ms": round(1e3 * medians["without"], 3),
        "forward_with_interior_state_ms": round(1e3 * medians["with"], 3),
        "store_ms": round(1e3 * statistics.median(stores), 3),
        "with_over_without": round(medians["with"] / medians["without"], 4),
        "forwards_with_interior_state": max(forwards),
    }


def run(model: str, threads: int, repeats: int) -> dict[str, Any]:
    """All figures."""
    return {"copies": copies(threads, 5 * repeats), "interior": interior(model, threads, repeats)}

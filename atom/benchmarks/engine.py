"""What the engine itself costs: keys, admission, a decode step, without a model."""

from __future__ import annotations

import statistics
import time
from typing import Any

from atom.config import EngineConfig
from atom.model_engine.engine_core import EngineCore
from atom.model_engine.messages import EngineRequest
from atom.model_engine.null_runner import NullRunner
from atom.sampling_params import SamplingParams

BLOCK = 64
VOCAB = 1000
RUNNING = 256
PROMPT = 131_072
POOLS = (8_192, 262_144)


def _core(num_blocks: int, max_num_seqs: int) -> EngineCore:
    config = EngineConfig(
        model="null",
        block_size=BLOCK,
        num_kvcache_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=1 << 20,
        state_checkpoint_interval_tokens=-1,
        cache_stats_interval=0,
    )
    return EngineCore(config, NullRunner(BLOCK, num_blocks, max_num_seqs + 4, 1 << 20, VOCAB))


def _ask(core: EngineCore, name: str, prompt: list[int], max_tokens: int) -> None:
    core.add_request(EngineRequest(name, prompt, SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)))


def decode_step(num_blocks: int, steps: int = 300) -> float:
    """Median seconds of one step over 256 decoding requests, in a pool of ``num_blocks`` full of cached pages."""
    core = _core(num_blocks, RUNNING)
    free = num_blocks - RUNNING * (2 + -(-steps // BLOCK))
    for start in range(0, free - 2048, 2048):
        _ask(core, f"fill{start}", [start % VOCAB, start // VOCAB] + [1] * (2048 * BLOCK - 2), 1)
        while core.has_unfinished():
            core.step()
    for i in range(RUNNING):
        _ask(core, f"r{i}", [i] * BLOCK, steps + 8)
    core.step()
    core.step()
    assert len(core.scheduler.running) == RUNNING
    times = []
    for _ in range(steps):
        start_time = time.perf_counter()
        core.step()
        times.append(time.perf_counter() - start_time)
    return statistics.median(times)


def admission(repeats: int = 20) -> tuple[float, float]:
    """Medians of the seconds to admit a fully cached 128k-token prompt, and of computing its keys alone."""
    core = _core(3 * PROMPT // BLOCK, 8)
    prompt = [i % VOCAB for i in range(PROMPT)]
    _ask(core, "cold", prompt, 1)
    while core.has_unfinished():
        core.step()
    keys, whole = [], []
    hasher = core.block_manager.hasher
    for i in range(repeats):
        start = time.perf_counter()
        hasher.extend([], hasher.root(), prompt, PROMPT // BLOCK)
        keys.append(time.perf_counter() - start)
        _ask(core, f"warm{i}", prompt, 1)
        seq = core.scheduler.waiting[0]
        start = time.perf_counter()
        plan = core.scheduler.schedule()
        whole.append(time.perf_counter() - start)
        assert plan is not None and seq.num_cached_tokens == PROMPT - BLOCK
        core.scheduler.update(plan, core.runner.execute(plan))
        core.block_manager.finish_step()
    return statistics.median(whole), statistics.median(keys)


def run(quick: bool = False) -> dict[str, Any]:
    """All figures; ``quick`` uses fewer repeats."""
    steps, repeats = (64, 5) if quick else (300, 20)
    small, large = (decode_step(blocks, steps) for blocks in POOLS)
    admit, keys = admission(repeats)
    return {
        "decode_step_ms": round(1e3 * small, 3),
        "decode_step_large_pool_ms": round(1e3 * large, 3),
        "decode_step_large_over_small_pool": round(large / small, 3),
        "running_requests": RUNNING,
        "pool_blocks": list(POOLS),
        "admission_ms": round(1e3 * admit, 3),
        "admission_prompt_tokens": PROMPT,
        "keys_ms": round(1e3 * keys, 3),
        "keys_million_tokens_per_s": round(PROMPT / keys / 1e6, 1),
    }

"""Where a cold prompt's time goes: the operations of one prefill, by their share."""

from __future__ import annotations

import time
from typing import Any

from torch.profiler import ProfilerActivity, profile

from atom.config import EngineConfig
from atom.model_engine.engine_core import EngineCore
from atom.model_engine.messages import EngineRequest
from atom.sampling_params import SamplingParams

WARM_UPS = 4
SHOWN = 12


def run(model: str, threads: int, prompt_tokens: int) -> dict[str, Any]:
    """Milliseconds of a cold prompt, and the share of each operation in a profiled one."""
    config = EngineConfig(
        model=model,
        threads=threads,
        max_num_seqs=1,
        max_model_len=8192,
        kv_cache_memory="512MiB",
        cache_stats_interval=0,
    )
    core = EngineCore(config)

    def cold(number: int) -> float:
        prompt = [(number * 7 + i * 13) % 251 for i in range(prompt_tokens)]
        core.add_request(EngineRequest(f"r{number}", prompt, SamplingParams(max_tokens=1, temperature=0)))
        start = time.perf_counter()
        while core.has_unfinished():
            core.step()
        return time.perf_counter() - start

    for number in range(WARM_UPS):
        seconds = cold(number)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        cold(WARM_UPS)
    events = sorted(profiled.key_averages(), key=lambda event: -event.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in events)
    shares = {event.key: round(event.self_cpu_time_total / total, 3) for event in events[:SHOWN]}
    return {"prompt_tokens": prompt_tokens, "cold_ms": round(1e3 * seconds, 1), "share_of_time": shares}

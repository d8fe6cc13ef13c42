"""Times one engine through the offline API that atom and its peers share; prints one JSON line.

Runs under the interpreter of the engine it times, so it imports nothing but that engine and the standard library.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any

DECODE_PROMPT = 128
DECODE_STEPS = 128


def tokens(seed: int, count: int) -> list[int]:
    """``count`` repeatable byte tokens below 251."""
    x, out = seed * 7919 + 17, []
    for _ in range(count):
        x = (x * 1103515245 + 12345) % 2**31
        out.append((x >> 8) % 251)
    return out


class Engine:
    """One ``LLM``, and how to ask it for what is measured."""

    def __init__(self, name: str, model: str, threads: int, settings: dict[str, Any]) -> None:
        if name == "atom":
            from atom import LLM, SamplingParams

            self.llm = LLM(model=model, threads=threads, max_model_len=8192, max_num_seqs=16, **settings)
        else:
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
            os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
            os.environ.setdefault("HF_HUB_OFFLINE", "1")
            os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
            os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
            import torch
            from vllm import LLM, SamplingParams

            defaults = {"enforce_eager": True, "dtype": "bfloat16", "disable_log_stats": False, "seed": 0}
            defaults |= {"enable_prefix_caching": True}
            self.llm = LLM(model=model, max_model_len=8192, max_num_seqs=16, **{**defaults, **settings})
            torch.set_num_threads(threads)
        self.params = SamplingParams
        self.name = name

    def ask(self, prompts: list[list[int]], max_tokens: int) -> list[Any]:
        params = self.params(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        return self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)

    def first_token(self, prompt: list[int]) -> tuple[float, int]:
        """Seconds to the first token of one request, and its cached tokens."""
        start = time.perf_counter()
        output = self.ask([prompt], 1)[0]
        return time.perf_counter() - start, output.num_cached_tokens or 0


def measure(engine: Engine, prompt_tokens: int, repeats: int, batches: list[int]) -> dict[str, Any]:
    """Cold and resent time to first token, and decode tokens/s by batch size; medians of ``repeats``."""
    engine.ask([tokens(90, prompt_tokens)], 4)
    cold, resent, cached = [], [], 0
    for i in range(repeats):
        prompt = tokens(100 + i, prompt_tokens)
        cold.append(engine.first_token(prompt)[0])
        seconds, cached = engine.first_token(prompt)
        resent.append(seconds)
    result: dict[str, Any] = {
        "engine": engine.name,
        "prompt_tokens": prompt_tokens,
        "cold_ttft_ms": round(1e3 * statistics.median(cold), 2),
        "resent_ttft_ms": round(1e3 * statistics.median(resent), 2),
        "resent_cached_tokens": cached,
    }
    for batch in batches:
        prompts = [tokens(1000 + i, DECODE_PROMPT) for i in range(batch)]
        engine.ask(prompts, 4)
        steps = []
        for _ in range(repeats):
            times = []
            for count in (1, 1 + DECODE_STEPS):
                start = time.perf_counter()
                engine.ask(prompts, count)
                times.append(time.perf_counter() - start)
            steps.append((times[1] - times[0]) / DECODE_STEPS)
        step = statistics.median(steps)
        result[f"decode_step_ms_batch_{batch}"] = round(1e3 * step, 3)
        result[f"decode_tokens_per_s_batch_{batch}"] = round(batch / step, 1)
    return result


def main() -> None:
    """Command line: ``offline_worker.py ENGINE MODEL [options]``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=("atom", "vllm"))
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=3000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--settings", type=json.loads, default={})
    args = parser.parse_args()
    engine = Engine(args.engine, args.model, args.threads, args.settings)
    print("\n" + json.dumps(measure(engine, args.prompt_tokens, args.repeats, args.batches)), flush=True)


if __name__ == "__main__":
    main()

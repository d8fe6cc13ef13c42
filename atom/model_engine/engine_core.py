"""The loop's body: requests in, one step at a time, outputs out. Runs in its own process under a server."""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf
from typing import Any, Protocol

from atom.config import EngineConfig
from atom.model_engine.block_manager import BlockManager
from atom.model_engine.cache_layout import CacheLayout
from atom.model_engine.messages import EngineOutput, EngineRequest, TokenLogprobs
from atom.model_engine.placement import Placement, snap_interval
from atom.model_engine.prefix_hash import PrefixHasher
from atom.model_engine.scheduler import Scheduler, StepPlan
from atom.model_engine.sequence import Sequence
from atom.model_engine.sizing import Sizing
from atom.model_engine.state_pool import StateSlotPool
from atom.utils.units import format_bytes

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """What the core needs of a model runner."""

    layout: CacheLayout
    sizing: Sizing
    vocab_size: int
    interior_grid: int | None
    """A forward gives out exact states at chunk start + k * interior_grid tokens; None: only at a chunk's end."""

    def execute(self, plan: StepPlan) -> tuple[SequenceOf[int | None], SequenceOf[TokenLogprobs | None]]:
        """Move states, run the forward, sample one token for each of ``plan.samples``."""
        ...

    def forget(self, request_id: str) -> None:
        """The request is over."""
        ...


def make_block_manager(
    config: EngineConfig, layout: CacheLayout, sizing: Sizing, interior_grid: int | None
) -> BlockManager:
    """The block manager of a geometry, with the placement that ``config`` asks for."""
    interval = snap_interval(config.state_checkpoint_interval_tokens, config.block_size)
    asked = config.state_checkpoint_interval_tokens
    if asked > 0 and interval is None:
        logger.warning(
            "--state-checkpoint-interval-tokens=%d is below --block-size=%d: state checkpoints are off",
            asked,
            config.block_size,
        )
    elif asked > 0 and interval != asked:
        logger.warning("--state-checkpoint-interval-tokens=%d snaps to the block grid: %d", asked, interval)
    placement = Placement(
        block_size=config.block_size,
        interval=interval,
        interior_grid=interior_grid,
        enabled=config.enable_prefix_caching and asked != 0 and (asked < 0 or interval is not None),
    )
    hasher = PrefixHasher((config.model_name, config.dtype, layout.layout_id), config.block_size, config.prefix_hash)
    slots = StateSlotPool(sizing.num_slots) if layout.slot_bytes else None
    return BlockManager(sizing.num_blocks, slots, hasher, placement, config.enable_prefix_caching)


class EngineCore:
    """Scheduler, block manager and runner of one model. Not thread-safe; one caller drives :meth:`step`."""

    def __init__(self, config: EngineConfig, runner: Runner | None = None) -> None:
        if runner is None:
            from atom.model_engine.model_runner import ModelRunner

            runner = ModelRunner(config)
        self.config = config
        self.runner = runner
        self.block_manager = make_block_manager(config, runner.layout, runner.sizing, runner.interior_grid)
        self.scheduler = Scheduler(self.block_manager, config.max_num_seqs, config.max_num_batched_tokens)
        self._finished = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self._prompt_tokens = self._output_tokens = 0
        self._warn_settings()
        for name, value in self.info().items():
            logger.info("%s = %s", name, value)

    def _warn_settings(self) -> None:
        config, manager = self.config, self.block_manager
        if not config.enable_prefix_caching:
            return
        if self.runner.sizing.max_model_len <= config.block_size:
            logger.warning(
                "prefix caching cannot hit: --block-size=%d is not below the longest request of %d tokens; use a "
                "smaller block",
                config.block_size,
                self.runner.sizing.max_model_len,
            )
        elif manager.slots is not None and not manager.placement.enabled:
            logger.warning("prefix caching cannot hit: the model keeps per-request state and state checkpoints are off")
        elif manager.slots is not None and manager.slots.num_slots == config.max_num_seqs:
            logger.warning(
                "no slot is left for state checkpoints while %d requests run; raise --kv-cache-memory or "
                "--state-checkpoint-slots",
                config.max_num_seqs,
            )
        if config.max_num_batched_tokens < config.block_size:
            logger.warning(
                "--max-num-batched-tokens=%d is below --block-size=%d: prompts are computed in pieces of less than a "
                "block",
                config.max_num_batched_tokens,
                config.block_size,
            )

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request. ValueError on one that can never run."""
        limit = self.runner.sizing.max_model_len
        prompt = request.prompt_token_ids
        if not prompt:
            raise ValueError("the prompt is empty")
        if len(prompt) >= limit:
            raise ValueError(f"the prompt has {len(prompt)} tokens and the context holds {limit}, answer included")
        if min(prompt) < 0 or max(prompt) >= self.runner.vocab_size:
            raise ValueError(f"token ids must be from 0 to {self.runner.vocab_size - 1}")
        request.params.check_vocabulary(self.runner.vocab_size)
        root = self.block_manager.hasher.root(request.cache_salt, request.adapter)
        seq = Sequence(request.request_id, prompt, request.params, limit, request.eos_token_ids, root)
        self.scheduler.add(seq)
        self._prompt_tokens += len(prompt)

    def abort_requests(self, request_ids: list[str]) -> None:
        """Drop requests and what they hold; nothing more is said of them. Unknown ids are no error."""
        for seq in self.scheduler.abort(request_ids):
            self.runner.forget(seq.request_id)
            self._count_end("abort")

    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    def step(self) -> list[EngineOutput]:
        """Run one forward, if there is anything to run. A forward that raises ends its requests with an error."""
        plan = self.scheduler.schedule()
        if plan is None:
            return []
        try:
            tokens, logprobs = self.runner.execute(plan)
        except Exception as error:
            logger.exception("the forward failed")
            outputs = self.scheduler.fail(plan, f"the forward failed: {error}")
        else:
            outputs = self.scheduler.update(plan, tokens, logprobs)
            self._output_tokens += len(outputs)
        for output in outputs:
            if output.finish_reason is not None:
                self.runner.forget(output.request_id)
                self._count_end(output.finish_reason)
        return outputs

    def _count_end(self, reason: str) -> None:
        self._finished[reason] += 1
        interval = self.config.cache_stats_interval
        if interval and sum(self._finished.values()) % interval == 0:
            self.log_cache_stats()

    def log_cache_stats(self) -> None:
        """Write the ``[Cache Stats]`` lines to the log."""
        for line in self.cache_stats_lines():
            logger.info("%s", line)

    def cache_stats_lines(self) -> list[str]:
        """The ``[Cache Stats]`` lines."""
        slots = self.block_manager.slots
        return self.block_manager.stats.lines(None if slots is None else slots.fates)

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; running requests go on."""
        self.block_manager.clear()
        return True

    def cache_stats(self) -> dict[str, int | float]:
        """The counters of ``[Cache Stats]`` and of checkpoints, by name."""
        stats = self.block_manager.stats.as_dict()
        slots = self.block_manager.slots
        if slots is not None:
            fates = slots.fates
            stats |= {f"checkpoints_{name}": getattr(fates, name) for name in fates.__slots__}
        return stats

    def metrics(self) -> dict[str, int | float]:
        """Counters (``*_total``) and gauges for ``/metrics``. O(1)."""
        pool, slots, scheduler = self.block_manager.pool, self.block_manager.slots, self.scheduler
        values: dict[str, int | float] = {
            "requests_running": len(scheduler.running),
            "requests_waiting": len(scheduler.waiting),
            "preemptions_total": scheduler.num_preemptions,
            "prompt_tokens_total": self._prompt_tokens,
            "generation_tokens_total": self._output_tokens,
            "pages": pool.num_blocks,
            "pages_live": pool.num_live,
            "pages_cached": pool.num_cached,
            "pages_free": pool.num_vacant,
        }
        values |= {f"requests_finished_{reason}_total": count for reason, count in self._finished.items()}
        if slots is not None:
            values |= {
                "slots": slots.num_slots,
                "slots_live": slots.num_live,
                "slots_checkpoint": slots.num_checkpoints,
                "slots_free": slots.num_vacant,
            }
        for name, value in self.cache_stats().items():
            if name != "hit_rate":
                values[f"prefix_cache_{name}_total"] = value
        return values

    def info(self) -> dict[str, Any]:
        """The settings as they took effect, and what the arenas hold."""
        sizing, config = self.runner.sizing, self.config
        placement = self.block_manager.placement
        return {
            "model_name": config.model_name,
            "vocab_size": self.runner.vocab_size,
            "max_model_len": sizing.max_model_len,
            "device": config.device,
            "threads": config.num_threads,
            "block_size": config.block_size,
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "enable_prefix_caching": config.enable_prefix_caching,
            "state_checkpoint_interval_tokens": placement.interval if placement.enabled else 0,
            "prefix_hash": config.prefix_hash,
            "num_kvcache_blocks": sizing.num_blocks,
            "kv_cache_tokens": sizing.num_blocks * config.block_size,
            "num_slots": sizing.num_slots,
            "kv_memory": format_bytes(sizing.kv_bytes),
            "state_memory": format_bytes(sizing.state_bytes),
        }

    def shutdown(self) -> None:
        """Say what the cache did. The engine takes no more steps."""
        self.log_cache_stats()

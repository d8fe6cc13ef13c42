"""The loop's body: requests in, one step at a time, outputs out. Runs in its own process under a server."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any, Protocol

from atom.config import EngineConfig
from atom.model_engine.block_manager import BlockManager
from atom.model_engine.block_pool import BlockPool
from atom.model_engine.cache_layout import CacheGeometry
from atom.model_engine.cache_stats import cache_pools_line, cache_stats_line, checkpoint_fates_line
from atom.model_engine.ids import SlotId
from atom.model_engine.messages import EngineOutput, EngineRequest
from atom.model_engine.page_unit_checkpoint import PagedStateCheckpointCoordinator
from atom.model_engine.placement import Placement, snap_interval
from atom.model_engine.prefix_hash import PrefixHasher
from atom.model_engine.scheduler import Scheduler
from atom.model_engine.sequence import Sequence
from atom.model_engine.sizing import Sizing
from atom.model_engine.speculation import make_drafter
from atom.model_engine.state_pool import StateSlotPool
from atom.model_engine.state_runtime import ImageStore, StateRuntime, StateTransfer
from atom.model_engine.step_plan import StepPlan, StepResult
from atom.model_engine.trace_recorder import TraceRecorder
from atom.utils.units import format_bytes

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """What the core needs of a model runner.

    ``dtype``: of weights and KV, as loaded. ``fingerprint``: tells models apart. ``interior_grid``: a forward gives out exact states at chunk start + k * interior_grid tokens; None: only at a chunk's
    end.
    """

    geometry: CacheGeometry
    sizing: Sizing
    vocab_size: int
    dtype: str
    fingerprint: str
    interior_grid: int | None

    def execute(self, plan: StepPlan) -> StepResult:
        """Restore states, run the forward, sample."""
        ...

    def store(self, stores: SequenceOf[ImageStore]) -> None:
        """Copy slots to images, right after the forward that left them."""
        ...

    def resize_slots(self, num_slots: int, moves: Mapping[SlotId, SlotId]) -> None:
        """Make the slot arena ``num_slots`` long, states moved from ``moves``' keys to its values."""
        ...

    def forget(self, request_id: str) -> None:
        """The request is over."""
        ...


def make_block_manager(config: EngineConfig, runner: Runner) -> BlockManager:
    """The block manager of a runner's arenas, with the placement that ``config`` asks for. RuntimeError on a mismatch."""
    geometry, sizing = runner.geometry, runner.sizing
    geometry.validate(config.block_size, sizing.page_bytes, sizing.slot_bytes)
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
        interior_grid=runner.interior_grid,
        demand=config.places_demand,
        enabled=config.enable_prefix_caching and asked != 0 and (asked < 0 or interval is not None),
    )
    hasher = PrefixHasher(
        (config.model_name, runner.fingerprint, runner.dtype, geometry.layout_id), config.block_size, config.prefix_hash
    )
    pool = BlockPool(sizing.num_blocks)
    states = None
    if geometry.image_bytes:
        slots = StateSlotPool(sizing.num_slots)
        per_request = 1 + config.num_speculative_tokens
        if config.state_checkpoint_backend == "slot":
            states = StateRuntime(slots, slots, per_request)
        else:
            cache = PagedStateCheckpointCoordinator(pool, geometry.pages_per_image)
            scratch = sizing.num_slots - config.max_num_seqs * per_request
            states = StateRuntime(slots, cache, per_request, scratch)
    return BlockManager(pool, states, hasher, placement, config.enable_prefix_caching)


class EngineCore:
    """Scheduler, block manager and runner of one model. Not thread-safe; one caller drives :meth:`step`."""

    def __init__(self, config: EngineConfig, runner: Runner | None = None) -> None:
        if runner is None:
            from atom.model_engine.model_runner import ModelRunner

            runner = ModelRunner(config)
        self.config = config
        self.runner = runner
        self.block_manager = make_block_manager(config, runner)
        self.drafter = make_drafter(config.speculative_config)
        self.scheduler = Scheduler(self.block_manager, config.max_num_seqs, config.max_num_batched_tokens, self.drafter)
        self.recorder: TraceRecorder | None = None
        if config.record_trace is not None:
            self.recorder = TraceRecorder(config.record_trace, config.block_size, config.model_name)
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
        elif manager.states is not None and not manager.placement.enabled:
            logger.warning("prefix caching cannot hit: the model keeps per-request state and state checkpoints are off")
        elif manager.states is not None:
            self._warn_room(manager.states)
        if config.max_num_batched_tokens < config.block_size:
            logger.warning(
                "--max-num-batched-tokens=%d is below --block-size=%d: prompts are computed in pieces of less than a "
                "block",
                config.max_num_batched_tokens,
                config.block_size,
            )

    def _warn_room(self, states: StateRuntime) -> None:
        config, sizing, pool = self.config, self.runner.sizing, self.block_manager.pool
        longest = -(-sizing.max_model_len // config.block_size)
        live = config.max_num_seqs * states.slots_per_request
        if states.transfer is StateTransfer.FORK and sizing.num_slots <= live:
            logger.warning(
                "no slot is left for state checkpoints while %d requests run (%d slots a request); raise "
                "--kv-cache-memory or --state-checkpoint-slots",
                config.max_num_seqs,
                states.slots_per_request,
            )
        elif states.transfer is StateTransfer.COPY and longest + pool.pages_per_image > pool.num_blocks:
            logger.warning(
                "no state can be kept beside one request of %d tokens: it takes %d pages and an image %d, of %d; raise "
                "--kv-cache-memory or lower --max-model-len",
                sizing.max_model_len,
                longest,
                pool.pages_per_image,
                pool.num_blocks,
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
        seq = Sequence(
            request.request_id,
            prompt,
            request.params,
            limit,
            request.eos_token_ids,
            root,
            request.counted,
            request.tool_call_token_ids,
        )
        self.scheduler.add(seq)
        if self.recorder is not None:
            self.recorder.arrived(seq)
        self._prompt_tokens += len(prompt) if request.counted else 0

    def abort_requests(self, request_ids: list[str], reason: str = "abort") -> None:
        """Drop requests and what they hold; nothing more is said of them. Unknown ids are no error.

        ``reason`` is what they count as: "stop" where a front end found a stop string.
        """
        for seq in self.scheduler.abort(request_ids, complete=reason == "stop"):
            self._forget(seq.request_id, reason)
            self._count_end(reason)

    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    def step(self) -> list[EngineOutput]:
        """Run one forward, if there is anything to run. A forward that raises ends its requests with an error."""
        plan = self.scheduler.schedule()
        if plan is None:
            return []
        try:
            outputs = self.scheduler.update(plan, self.runner.execute(plan))
        except Exception as error:
            logger.exception("the forward failed")
            outputs = self.scheduler.fail(plan, f"the forward failed: {error}")
            self.block_manager.finish_step(stored=False)
        else:
            self.block_manager.finish_step(self._store())
            self._output_tokens += sum(len(output.new_token_ids) for output in outputs)
        if self.config.report_cache_miss_reason:
            self._explain(plan, outputs)
        for output in outputs:
            if output.finish_reason is not None:
                self._forget(output.request_id, output.finish_reason)
                self._count_end(output.finish_reason)
        return outputs

    def _explain(self, plan: StepPlan, outputs: list[EngineOutput]) -> None:
        """Say of each output's request why it resumed less than it might have."""
        hits = {seq.request_id: seq.hit for seq in plan.sequences}
        for output in outputs:
            hit = hits.get(output.request_id)
            if hit is not None and hit.miss_reason is not None:
                output.cache_miss_reason = hit.miss_reason.value

    def _store(self) -> bool:
        """Run the step's stores; False if they failed, which costs the checkpoints and nothing else (I7)."""
        states = self.block_manager.states
        stores = states.stores if states is not None else []
        if not stores:
            return True
        try:
            self.runner.store(stores)
        except Exception:
            logger.exception("storing state checkpoints failed")
            return False
        return True

    def _forget(self, request_id: str, reason: str) -> None:
        if self.recorder is not None:
            self.recorder.ended(request_id, reason)
        self.runner.forget(request_id)
        if self.drafter is not None:
            self.drafter.forget(request_id)

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
        """``[Cache Stats]`` and ``[Cache Pools]``; for a model with per-request state ``[Checkpoint Fates]``."""
        manager = self.block_manager
        lines = [cache_stats_line(manager.stats), cache_pools_line(manager.stats, self._occupancy())]
        if manager.states is not None:
            lines.append(checkpoint_fates_line(manager.stats, manager.states.cache.fates))
        return lines

    def _occupancy(self) -> dict[str, int]:
        """Units of both arenas by who holds them."""
        pool, states = self.block_manager.pool, self.block_manager.states
        held = {
            "pages": pool.num_blocks,
            "pages_live": pool.num_live,
            "pages_cached": pool.num_cached,
            "pages_image": pool.num_image_pages,
            "pages_free": pool.num_vacant,
        }
        if states is not None:
            held |= {
                "slots": states.slots.num_slots,
                "slots_live": states.slots.num_live,
                "slots_free": states.slots.num_vacant,
                "checkpoints": states.cache.num_checkpoints,
            }
        return held

    def resize_state_slots(self, num_slots: int) -> None:
        """Grow or shrink the slot arena at run time; checkpoints go before anything that is in use. Between steps.

        ValueError if the running requests and ``max_num_seqs`` need more, or if checkpoints are not kept as slots.
        """
        states = self.block_manager.states
        if states is None or states.transfer is not StateTransfer.FORK:
            raise ValueError("only --state-checkpoint-backend=slot keeps checkpoints in slots that can be resized")
        live = self.config.max_num_seqs * states.slots_per_request
        if not isinstance(num_slots, int):
            raise ValueError(f"{num_slots!r} is no number of slots; use an integer of at least {live}")
        if num_slots < live:
            raise ValueError(f"{num_slots} slots are too few for --max-num-seqs={self.config.max_num_seqs}; use {live}")
        if num_slots > states.slots.num_slots:
            # The arena first: where memory does not do, nothing has changed.
            self.runner.resize_slots(num_slots, {})
            states.resize(num_slots, self.scheduler.running)
            return
        moves = states.resize(num_slots, self.scheduler.running)
        self.runner.resize_slots(num_slots, moves)

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; running requests go on."""
        self.block_manager.clear(self.scheduler.running)
        return True

    def cache_stats(self) -> dict[str, int | float]:
        """The counters of ``[Cache Stats]`` and of checkpoints, by name."""
        stats = self.block_manager.stats.as_dict()
        states = self.block_manager.states
        if states is not None:
            stats |= {f"checkpoints_{name}": count for name, count in states.cache.fates.as_dict().items()}
        return stats

    def metrics(self) -> dict[str, int | float]:
        """Counters (``*_total``) and gauges for ``/metrics``. O(1)."""
        scheduler = self.scheduler
        values: dict[str, int | float] = {
            "requests_running": len(scheduler.running),
            "requests_waiting": len(scheduler.waiting),
            "preemptions_total": scheduler.num_preemptions,
            "prompt_tokens_total": self._prompt_tokens,
            "generation_tokens_total": self._output_tokens,
            "speculative_drafted_tokens_total": scheduler.updates.drafted_tokens,
            "speculative_accepted_tokens_total": scheduler.updates.accepted_tokens,
            **self._occupancy(),
        }
        values |= {f"requests_finished_{reason}_total": count for reason, count in self._finished.items()}
        for name, value in self.cache_stats().items():
            if name != "hit_rate":
                values[f"prefix_cache_{name}_total"] = value
        return values

    def info(self) -> dict[str, Any]:
        """The settings as they took effect, and what the arenas hold."""
        sizing, config = self.runner.sizing, self.config
        placement, states = self.block_manager.placement, self.block_manager.states
        return {
            "model_name": config.model_name,
            "vocab_size": self.runner.vocab_size,
            "max_model_len": sizing.max_model_len,
            "device": config.device,
            "dtype": self.runner.dtype,
            "threads": config.num_threads,
            "block_size": config.block_size,
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "enable_prefix_caching": config.enable_prefix_caching,
            "state_checkpoint_interval_tokens": (placement.interval or -1) if placement.enabled else 0,
            "state_checkpoint_backend": (
                None if states is None else ("slot" if states.transfer is StateTransfer.FORK else "page")
            ),
            "state_checkpoint_demand": placement.demand,
            "pages_per_checkpoint": self.block_manager.pool.pages_per_image,
            "num_speculative_tokens": config.num_speculative_tokens,
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
        if self.recorder is not None:
            self.recorder.close()

"""A runner whose pages and states record the tokens they consumed, and the oracle that compares them with the keys.

The "model" is a pure function of all tokens so far, so any stale page or state changes what is sampled.
"""

from __future__ import annotations

import random
import zlib
from array import array
from dataclasses import dataclass, field

import xxhash

from atom.config import EngineConfig
from atom.model_engine.cache_layout import CacheLayout
from atom.model_engine.engine_core import EngineCore
from atom.model_engine.messages import EngineRequest
from atom.model_engine.scheduler import StepPlan
from atom.model_engine.sizing import Sizing
from atom.sampling_params import SamplingParams

VOCAB = 50
POISON = ("poison",)


def next_token(tokens: tuple[int, ...]) -> int:
    """The model: any function of the whole prefix will do."""
    return zlib.crc32(array("I", tokens).tobytes()) % VOCAB


def cold_output(prompt: list[int], count: int) -> list[int]:
    """What a request answers without any engine."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tuple(tokens)))
    return tokens[len(prompt) :]


class RecordingRunner:
    """Holds, for each page, the token at each offset, and for each slot, the list of tokens its state consumed."""

    def __init__(
        self, block_size: int, num_blocks: int, num_slots: int, max_model_len: int, interior_grid: int | None
    ) -> None:
        stateful = num_slots > 0
        self.layout = CacheLayout(block_size, (), (), page_bytes=64, slot_bytes=64 if stateful else 0)
        self.sizing = Sizing(num_blocks, num_slots, max_model_len, 64, 64 if stateful else 0)
        self.vocab_size = VOCAB
        self.block_size = block_size
        self.pages: list[list[object]] = [[POISON] * block_size for _ in range(num_blocks)]
        self.slots: list[tuple] = [POISON] * num_slots
        self.plans: list[StepPlan] = []
        self.fail_next = False
        self.interior_grid = interior_grid
        self.violation: AssertionError | None = None
        self.consumed: list[int] = []

    def execute(self, plan: StepPlan):
        self.plans.append(plan)
        try:
            return self._execute(plan)
        except AssertionError as error:
            # The core turns a failed forward into an answer; a violation must not pass for one.
            self.violation = error
            raise

    def _execute(self, plan: StepPlan):
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("injected")
        restores = list(plan.maintenance.restores)
        random.Random(len(self.plans)).shuffle(restores)
        assert not {c.source for c in restores} & {c.target for c in restores}
        for copy in restores:
            assert self.slots[copy.source] is not POISON, "a restore reads a freed slot"
            self.slots[copy.target] = self.slots[copy.source]
        work = [(seq, seq.num_computed_tokens, seq.num_tokens, ()) for seq in plan.decodes]
        work += [(p.seq, p.chunk.start, p.chunk.end, p.reserved) for p in plan.prefills]
        assert len({seq.request_id for seq, *_ in work}) == len(work), "a request runs twice in one step"
        written: set[int] = set()
        results = {}
        for seq, start, end, reserved in work:
            context = tuple(self._read(seq, i) for i in range(start))
            if self.slots:
                state = self.slots[seq.state_slots[0]] if start else ()
                assert state == context, f"state of {state} is used for pages of {context}"
            self.consumed += range(start, end)
            for i in range(start, end):
                page = seq.block_table[i // self.block_size]
                assert (page, i % self.block_size) not in written
                written.add((page, i % self.block_size))
                self.pages[page][i % self.block_size] = seq.token_ids[i]
            consumed = context + tuple(seq.token_ids[start:end])
            results[seq.request_id] = consumed
            if self.slots:
                self.slots[seq.state_slots[0]] = consumed
            for rung in reserved:
                assert start < rung.position <= end
                inside = rung.position < end
                assert not inside or (self.interior_grid and (rung.position - start) % self.interior_grid == 0)
                assert rung.checkpoint.slot not in {c.source for c in restores}, "a state being read is overwritten"
                self.slots[rung.checkpoint.slot] = consumed[: rung.position]
        tokens = [next_token(results[seq.request_id]) for seq in plan.samples]
        return tokens, [None] * len(tokens)

    def _read(self, seq, position: int):
        token = self.pages[seq.block_table[position // self.block_size]][position % self.block_size]
        assert token is not POISON, "a request reads a page that nobody wrote"
        return token

    def forget(self, request_id: str) -> None:
        pass


@dataclass
class Engine:
    """A core over a recording runner, with the oracle run after every step."""

    block_size: int = 4
    num_blocks: int = 32
    checkpoint_slots: int | None = 4
    max_num_seqs: int = 4
    budget: int = 16
    interval: int = 16
    max_model_len: int = 96
    interior_grid: int | None = None
    enable_prefix_caching: bool = True
    outputs: dict[str, list[int]] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    finish: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = EngineConfig(
            model="recording",
            block_size=self.block_size,
            num_kvcache_blocks=self.num_blocks,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.budget,
            state_checkpoint_interval_tokens=self.interval,
            enable_prefix_caching=self.enable_prefix_caching,
            cache_stats_interval=0,
        )
        slots = 0 if self.checkpoint_slots is None else self.max_num_seqs + self.checkpoint_slots
        self.runner = RecordingRunner(self.block_size, self.num_blocks, slots, self.max_model_len, self.interior_grid)
        self.core = EngineCore(config, self.runner)
        self.names: dict[bytes, tuple[int, ...]] = {}
        self.prompts: dict[str, tuple[list[int], int]] = {}
        self.steps = 0

    def add(self, name: str, prompt: list[int], count: int = 4, salt: str | None = None, **params) -> None:
        sampling = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, **params)
        self.core.add_request(EngineRequest(name, prompt, sampling, cache_salt=salt))
        self.prompts[name] = (prompt, min(count, self.max_model_len - len(prompt)))
        # The oracle's own chain of keys, over prompt and the answer that a cold run gives.
        tokens = prompt + cold_output(prompt, self.prompts[name][1])
        key = self.core.block_manager.hasher.root(salt)
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            key = xxhash.xxh3_128_digest(key + array("I", tokens[end - self.block_size : end]).tobytes())
            self.names[key] = tuple(tokens[:end])

    def step(self) -> list:
        outputs = self.core.step()
        if self.runner.violation is not None:
            raise self.runner.violation
        self.steps += 1
        for output in outputs:
            self.outputs.setdefault(output.request_id, []).extend(output.new_token_ids)
            self.cached[output.request_id] = output.num_cached_tokens
            if output.finish_reason:
                self.finish[output.request_id] = output.finish_reason
        self.check()
        self.poison()
        return outputs

    def run(self, limit: int = 10_000) -> None:
        """Step until idle; every request must end, and answer what a cold run answers."""
        for _ in range(limit):
            if not self.core.has_unfinished():
                break
            before = len(self.runner.plans)
            self.step()
            assert len(self.runner.plans) > before, "unfinished requests and nothing is run"
        assert not self.core.has_unfinished(), "no progress"
        self.check_idle()

    def ask(self, name: str, prompt: list[int], count: int = 4, **kwargs) -> int:
        """Run one request to its end; returns its cached tokens."""
        self.add(name, prompt, count, **kwargs)
        self.run()
        self.check_answer(name)
        return self.cached[name]

    def check_answer(self, name: str) -> None:
        prompt, count = self.prompts[name]
        assert self.outputs[name] == cold_output(prompt, count), f"{name} differs from a cold run"

    def check(self) -> None:
        """The oracle: what is findable under a key consumed exactly the tokens that the key names (I1, I5, I8)."""
        manager = self.core.block_manager
        manager.check()
        pool, slots = manager.pool, manager.slots
        assert pool.num_vacant + pool.num_cached + pool.num_live == self.num_blocks
        for key, block in pool._index.items():
            assert tuple(self.runner.pages[block]) == self.names[key][-self.block_size :]
        if slots is not None:
            assert slots.num_reserved == 0, "a reservation outlived its step"
            for key, slot in slots.ready_slots().items():
                assert self.runner.slots[slot] == self.names[key]
            assert slots.num_vacant + slots.num_live + slots.num_checkpoints == slots.num_slots
            assert slots.num_live == len(self.core.scheduler.running)
        s = manager.stats
        assert s.cached_tokens <= s.wanted_tokens <= s.matched_tokens <= s.reusable_tokens

    def check_idle(self) -> None:
        """An idle engine's pools are whole: nothing is live, pinned or reserved."""
        manager = self.core.block_manager
        assert manager.pool.num_available == self.num_blocks
        if manager.slots is not None:
            assert manager.slots.num_live == 0
            assert manager.slots.num_vacant + manager.slots.num_checkpoints == manager.slots.num_slots

    def poison(self) -> None:
        """Overwrite every vacant page and slot, so that a read of freed memory shows."""
        pool, slots = self.core.block_manager.pool, self.core.block_manager.slots
        for block in pool._vacant:
            self.runner.pages[block] = [POISON] * self.block_size
        if slots is not None:
            for slot in slots._vacant:
                self.runner.slots[slot] = POISON

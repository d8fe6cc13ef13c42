"""A runner whose pages and states record the tokens they consumed, and the oracle that compares them with the keys.

The "model" is a pure function of all tokens so far, so any stale page or state changes what is sampled.
"""

from __future__ import annotations

import random
import zlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

import xxhash

from atom.config import EngineConfig
from atom.model_engine.block_manager import BlockManager
from atom.model_engine.cache_layout import CacheGeometry
from atom.model_engine.engine_core import EngineCore
from atom.model_engine.messages import EngineRequest
from atom.model_engine.sizing import Sizing
from atom.model_engine.step_plan import StepPlan, StepResult
from atom.sampling_params import SamplingParams

PAGE_BYTES = 64
VOCAB = 50
POISON = ("poison",)
DEFAULTS = {"backend": "page"}
"""What an :class:`Engine` takes where a test does not say; a fixture runs a module's tests over both backends."""


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random tokens; equal for equal arguments."""
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


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
    """Holds, for each page, the token at each offset, and for each slot, the list of tokens its state consumed.

    An image's page i holds ``("image", state, i)``: a restore that mixes images or their order shows.
    """

    def __init__(
        self,
        block_size: int,
        num_blocks: int,
        num_slots: int,
        max_model_len: int,
        interior_grid: int | None,
        pages_per_image: int = 3,
    ) -> None:
        image = PAGE_BYTES * pages_per_image - 1 if num_slots else 0
        self.geometry = CacheGeometry(block_size, PAGE_BYTES, image, image, "recording")
        self.sizing = Sizing(num_blocks, num_slots, max_model_len, PAGE_BYTES, image)
        self.vocab_size = VOCAB
        self.dtype, self.fingerprint = "none", "recording"
        self.block_size = block_size
        self.pages: list[list[object]] = [[POISON] * block_size for _ in range(num_blocks)]
        self.slots: list[tuple] = [POISON] * num_slots
        self.plans: list[StepPlan] = []
        self.fail_next = False
        self.fail_store = False
        self.interior_grid = interior_grid
        self.violation: Exception | None = None
        self.consumed: list[int] = []

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("injected")
        try:
            return self._execute(plan)
        except Exception as error:
            # The core turns a failed forward into an answer; a violation must not pass for one.
            self.violation = error
            raise

    def _execute(self, plan: StepPlan) -> StepResult:
        restores = list(plan.maintenance.restores)
        random.Random(len(self.plans)).shuffle(restores)
        assert len({r.slot for r in restores}) == len(restores), "two restores write one slot"
        for restore in restores:
            self.slots[restore.slot] = self.read_image(restore.pages)
        work = [(seq, seq.num_computed_tokens, seq.token_ids[seq.num_computed_tokens :], ()) for seq in plan.decodes]
        work += [(v.seq, v.seq.num_computed_tokens, [v.seq.token_ids[-1], *v.drafts], ()) for v in plan.verifications]
        work += [
            (p.seq, p.chunk.start, p.seq.token_ids[p.chunk.start : p.chunk.end], p.reserved) for p in plan.prefills
        ]
        assert len({seq.request_id for seq, *_ in work}) == len(work), "a request runs twice in one step"
        states = {seq.request_id: self._state(seq) for seq, *_ in work}
        self._written: set[object] = set()
        consumed = {}
        verified = {v.seq.request_id for v in plan.verifications}
        for seq, start, tokens, reserved in work:
            context = tuple(self._read(seq, i) for i in range(start))
            if self.slots and start:
                assert (
                    states[seq.request_id] == context
                ), f"{states[seq.request_id]} is the state for pages of {context}"
            self.consumed += range(start, start + len(tokens))
            for i, token in enumerate(tokens, start):
                page = seq.block_table[i // self.block_size]
                self._write((page, i % self.block_size))
                self.pages[page][i % self.block_size] = token
            whole = consumed[seq.request_id] = context + tuple(tokens)
            if self.slots and seq.request_id in verified:
                for j in range(len(tokens)):
                    self._write(seq.state_slots[j])
                    self.slots[seq.state_slots[j]] = whole[: start + 1 + j]
            elif self.slots:
                self._write(seq.state_slots[0])
                self.slots[seq.state_slots[0]] = whole
            self._keep(start, whole, reserved)
        tokens = [next_token(consumed[seq.request_id]) for seq in plan.samples]
        return StepResult(
            tokens, [None] * len(tokens), [self._verify(v, consumed[v.seq.request_id]) for v in plan.verifications]
        )

    def _state(self, seq):
        """What the forward reads; every read comes before every write, as in one forward of a model."""
        if not self.slots:
            return None
        return self.slots[seq.state_slots[0] if seq.reading is None else seq.reading.slot]

    def _write(self, place: object) -> None:
        assert place not in self._written, f"{place} is written twice in one forward"
        self._written.add(place)

    def _keep(self, start: int, whole: tuple, reserved) -> None:
        for rung in reserved:
            assert start < rung.position <= len(whole)
            if rung.slot is None:
                assert rung.position == len(whole), "a state inside a chunk has no place"
            else:
                assert self.interior_grid and (rung.position - start) % self.interior_grid == 0
                self._write(rung.slot)
                self.slots[rung.slot] = whole[: rung.position]

    def _verify(self, verification, consumed: tuple):
        first = len(consumed) - len(verification.drafts)
        tokens = []
        for j in range(len(verification.drafts) + 1):
            tokens.append(next_token(consumed[: first + j]))
            if j < len(verification.drafts) and tokens[-1] != verification.drafts[j]:
                break
        return tokens, [None] * len(tokens)

    def store(self, stores) -> None:
        if self.fail_store:
            self.fail_store = False
            raise RuntimeError("injected")
        targets = [page for store in stores for page in store.pages]
        try:
            assert len(set(targets)) == len(targets), "a page is stored to twice"
            assert all(self.slots[store.slot] is not POISON for store in stores), "a freed slot is stored"
        except AssertionError as error:
            self.violation = error
            raise
        for store in stores:
            for i, page in enumerate(store.pages):
                self.pages[page] = [("image", self.slots[store.slot], i)] * self.block_size

    def resize_slots(self, num_slots: int, moves) -> None:
        old, self.slots = self.slots, [*self.slots[:num_slots], *[POISON] * (num_slots - len(self.slots))]
        for source, target in moves.items():
            self.slots[target] = old[source]

    def read_image(self, pages) -> tuple:
        """The state in an image's pages."""
        pieces = [self.pages[page][0] for page in pages]
        state = pieces[0][1]
        assert pieces == [("image", state, i) for i in range(self.geometry.pages_per_image)], f"not an image: {pieces}"
        return state

    def _read(self, seq, position: int):
        token = self.pages[seq.block_table[position // self.block_size]][position % self.block_size]
        assert token is not POISON, "a request reads a page that nobody wrote"
        return token

    def forget(self, request_id: str) -> None:
        pass


class ScriptedDrafter:
    """Drafts the true continuation, wrong from position ``wrong(step)`` on; ``wrong`` None drafts what the model says."""

    def __init__(self, num_speculative_tokens: int, wrong: Callable[[int], int | None]) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self.wrong = wrong
        self.steps = 0

    def propose(self, seq, limit: int) -> list[int]:
        self.steps += 1
        drafts = cold_output(seq.token_ids, min(limit, self.num_speculative_tokens))
        wrong = self.wrong(self.steps)
        if wrong is not None and wrong < len(drafts):
            drafts[wrong] = (drafts[wrong] + 1) % VOCAB
        return drafts

    def forget(self, request_id: str) -> None:
        pass


@dataclass
class Engine:
    """A core over a recording runner, with the oracle run after every step.

    ``checkpoint_slots``: slots beside those of requests, for checkpoints (slot backend) or states inside chunks (page);
    None: a model without state. ``wrong``: see :class:`ScriptedDrafter`, with ``speculate`` tokens a step.
    """

    block_size: int = 4
    num_blocks: int = 48
    checkpoint_slots: int | None = 4
    max_num_seqs: int = 4
    budget: int = 16
    interval: int = 16
    max_model_len: int = 96
    interior_grid: int | None = None
    enable_prefix_caching: bool = True
    backend: str = field(default_factory=lambda: DEFAULTS["backend"])
    pages_per_image: int = 3
    demand: bool = True
    speculate: int = 0
    wrong: Callable[[int], int | None] = lambda step: None
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
            state_checkpoint_backend=self.backend,
            state_checkpoint_demand=self.demand,
            enable_prefix_caching=self.enable_prefix_caching,
            speculative_config={"num_speculative_tokens": self.speculate} if self.speculate else None,
            cache_stats_interval=0,
        )
        per_request = 1 + self.speculate
        slots = 0 if self.checkpoint_slots is None else self.max_num_seqs * per_request + self.checkpoint_slots
        self.runner = RecordingRunner(
            self.block_size, self.num_blocks, slots, self.max_model_len, self.interior_grid, self.pages_per_image
        )
        self.core = EngineCore(config, self.runner)
        if self.speculate:
            self.core.scheduler.drafter = ScriptedDrafter(self.speculate, self.wrong)
        self.names: dict[bytes, tuple[int, ...]] = {}
        self.prompts: dict[str, tuple[list[int], int]] = {}
        self.steps = 0

    @property
    def manager(self) -> BlockManager:
        return self.core.block_manager

    def add(self, name: str, prompt: list[int], count: int = 4, salt: str | None = None, **params) -> None:
        sampling = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, **params)
        self.core.add_request(EngineRequest(name, prompt, sampling, cache_salt=salt))
        self.prompts[name] = (prompt, min(count, self.max_model_len - len(prompt)))
        # The oracle's own chain of keys, over prompt and the answer that a cold run gives.
        tokens = prompt + cold_output(prompt, self.prompts[name][1])
        key = self.manager.hasher.root(salt)
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
        manager = self.manager
        manager.check()
        pool, states = manager.pool, manager.states
        assert pool.num_vacant + pool.num_cached + pool.num_live + pool.num_image_pages == self.num_blocks
        assert pool.num_live == len({page for seq in self.core.scheduler.running for page in seq.block_table})
        for key, block in pool._index.items():
            assert tuple(self.runner.pages[block]) == self.names[key][-self.block_size :]
        if states is not None:
            assert states.cache.num_reserved == 0, "a reservation outlived its step"
            for key, checkpoint in states.cache.ready().items():
                assert self.state_of(checkpoint) == self.names[key]
            fates = states.cache.fates
            ended = fates.evicted + fates.orphaned + fates.superseded
            assert fates.kept == states.cache.num_checkpoints + ended, "each checkpoint is kept or has one fate"
            assert states.slots.num_live == len(self.core.scheduler.running) * states.slots_per_request
        s = manager.stats
        assert s.cached_tokens <= s.wanted_tokens <= s.matched_tokens <= s.reusable_tokens

    def state_of(self, checkpoint) -> tuple:
        """The tokens that a checkpoint's state consumed."""
        if checkpoint.slot is not None:
            return self.runner.slots[checkpoint.slot]
        return self.runner.read_image(checkpoint.pages)

    def check_idle(self) -> None:
        """An idle engine's pools are whole: nothing is live, pinned or reserved."""
        pool, states = self.manager.pool, self.manager.states
        assert pool.num_available == self.num_blocks
        if states is not None:
            assert states.slots.num_live == 0 and states.slots.num_available == states.slots.num_slots

    def poison(self) -> None:
        """Overwrite every vacant page and slot, so that a read of freed memory shows."""
        pool, states = self.manager.pool, self.manager.states
        for block in pool._vacant:
            self.runner.pages[block] = [POISON] * self.block_size
        if states is not None:
            for slot in states.slots._vacant:
                self.runner.slots[slot] = POISON

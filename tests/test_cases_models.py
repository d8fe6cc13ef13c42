"""Field case 5 on real models: for every kind of state, warm equals cold at every legal boundary."""

from __future__ import annotations

import pytest
import torch

from atom.config import EngineConfig
from atom.model_engine.engine_core import EngineCore
from atom.model_engine.messages import EngineRequest, TokenLogprobs
from atom.model_engine.placement import RungKind
from atom.model_engine.state_cache import Checkpoint
from atom.sampling_params import SamplingParams
from tests.models.harness import make_reference, save, tokens_of

BLOCK = 16


@pytest.fixture(scope="module", params=["qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save(make_reference(request.param), tmp_path_factory.mktemp(request.param)))


def core_of(folder: str, **overrides) -> EngineCore:
    settings = {"threads": 1, "max_model_len": 256, "kv_cache_memory": "16MiB", "block_size": BLOCK, "max_num_seqs": 2}
    return EngineCore(EngineConfig(model=folder, **{**settings, "cache_stats_interval": 0, **overrides}))


def ask(core: EngineCore, prompt: list[int]) -> tuple[int, list[int], list[TokenLogprobs]]:
    """Cached tokens, answer and log-probabilities of one greedy request."""
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=2, ignore_eos=True)
    core.add_request(EngineRequest("r", prompt, params))
    cached, tokens, logprobs = 0, [], []
    while core.has_unfinished():
        for output in core.step():
            cached = output.num_cached_tokens
            tokens += output.new_token_ids
            logprobs += output.logprobs or []
    return cached, tokens, logprobs


@pytest.mark.parametrize("backend", ["page", "slot"])
@pytest.mark.parametrize("budget", [24, 1000])
def test_case_5_warm_equals_cold_at_every_boundary(folder: str, backend: str, budget: int) -> None:
    """A state at every boundary, by cuts and out of the forward; each is resumed and goes on as a cold run does."""
    warm = core_of(
        folder,
        state_checkpoint_interval_tokens=BLOCK,
        state_checkpoint_backend=backend,
        max_num_batched_tokens=budget,
    )
    cold = core_of(folder, enable_prefix_caching=False)
    prompt = tokens_of(150, 1)
    ask(warm, prompt)
    for boundary in range(BLOCK, len(prompt), BLOCK):
        branch = prompt[:boundary] + tokens_of(7, boundary)
        cached, tokens, logprobs = ask(warm, branch)
        _, expected, entries = ask(cold, branch)
        assert (cached, tokens) == (boundary, expected)
        for mine, theirs in zip(logprobs, entries, strict=True):
            assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


def bytes_of(core: EngineCore, checkpoint: Checkpoint) -> torch.Tensor:
    """A checkpoint's bytes, wherever they are."""
    runner = core.runner
    if checkpoint.slot is not None:
        return runner.slots.bytes[checkpoint.slot]
    return runner.pages.bytes[torch.tensor(checkpoint.pages)].flatten()[: runner.layout.slot_bytes]


def test_a_state_out_of_the_forward_is_bit_for_bit_the_one_of_a_forward_stopped_there(folder: str) -> None:
    """Boundaries 64 and 128 inside one chunk, in images and in slots, against chunks that end there."""
    kept: list[dict[int, torch.Tensor]] = []
    for budget, backend in ((1000, "page"), (1000, "slot"), (64, "page")):
        core = core_of(
            folder,
            state_checkpoint_interval_tokens=64,
            state_checkpoint_backend=backend,
            max_num_batched_tokens=budget,
        )
        states = core.block_manager.states
        if states is None:
            pytest.skip("the family keeps no state")
        ask(core, tokens_of(150, 1))
        hasher, chain = core.block_manager.hasher, []
        hasher.extend(chain, hasher.root(), tokens_of(150, 1), 9)
        found = {end: states.cache.find(chain[end // BLOCK - 1]) for end in (64, 128)}
        kept.append({end: bytes_of(core, checkpoint).clone() for end, checkpoint in found.items() if checkpoint})
        assert core.block_manager.stats.cuts[RungKind.INTERVAL] == 0, "out of the forward, or where a chunk ends anyway"
    for other in kept[:2]:
        assert other.keys() == kept[2].keys() == {64, 128}
        for end in other:
            assert torch.equal(other[end], kept[2][end])
            assert other[end].any()

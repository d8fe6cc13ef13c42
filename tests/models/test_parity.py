"""Every family against transformers, however prompts are cut and batched, in memory poisoned with NaN."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.models.harness import REFERENCES, Chunk, Driver, load, make_reference, save, tokens_of

HYBRIDS = ["qwen3_5", "qwen3_5_moe", "qwen3_next"]
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Reference and model of a family, made once."""
    made = {}

    def get(family):
        if family not in made:
            reference = make_reference(family)
            made[family] = reference, load(save(reference, tmp_path_factory.mktemp(family)))
        return made[family]

    return get


@torch.no_grad()
def reference_logits(reference, tokens):
    return reference(torch.tensor(tokens)[None]).logits[0]


@pytest.mark.parametrize("family", REFERENCES)
def test_one_shot_prefill(pairs, family):
    reference, model = pairs(family)
    tokens = tokens_of(200, 0)
    expected = reference_logits(reference, tokens)
    driver = Driver(model)
    actual = driver.prefill(driver.sequence(tokens), 200)
    assert 1.2 < expected.std() < 2.0
    assert (actual - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("family", REFERENCES)
@pytest.mark.parametrize("piece", [1, 7, 50, 64, 128])
def test_chunked_prefill(pairs, family, piece):
    reference, model = pairs(family)
    tokens = tokens_of(200, 0)
    driver = Driver(model)
    sequence = driver.sequence(tokens)
    actual = [driver.prefill(sequence, min(piece, 200 - done)) for done in range(0, 200, piece)]
    assert (torch.cat(actual) - reference_logits(reference, tokens)).abs().max() < TOLERANCE


@pytest.mark.parametrize("family", REFERENCES)
def test_greedy_decode(pairs, family):
    reference, model = pairs(family)
    prompt = tokens_of(70, 1)
    ids = torch.tensor(prompt)[None]
    expected = reference.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=128, min_new_tokens=128, do_sample=False
    )[0].tolist()
    driver = Driver(model)
    sequence = driver.sequence(prompt + [0] * 128)
    logits = driver.prefill(sequence, 70)
    for position in range(70, 198):
        sequence.tokens[position] = int(logits[-1].argmax())
        (logits,) = driver.decode(sequence)
    assert sequence.tokens == expected


@pytest.mark.parametrize("family", REFERENCES)
def test_packed_batch_equals_single_runs(pairs, family):
    reference, model = pairs(family)
    driver = Driver(model)
    lengths = [3, 140, 66, 64, 129, 20, 200]
    sequences = [driver.sequence(tokens_of(n, 10 + i)) for i, n in enumerate(lengths)]
    for sequence, rows in zip(sequences, [1, 100, 65, 0, 64, 0, 7], strict=True):
        if rows:
            driver.prefill(sequence, rows)
    chunks = [Chunk(s, 1, decode=True) for s in sequences[:3]]
    chunks += [Chunk(s, len(s.tokens) - s.done) for s in sequences[3:]]
    for sequence, logits in zip(sequences, driver.forward(chunks), strict=True):
        expected = reference_logits(reference, sequence.tokens)[sequence.done - len(logits) : sequence.done]
        assert (logits - expected).abs().max() < TOLERANCE


def test_many_decodes_at_once(pairs):
    """Decode groups with padding, and a group of one."""
    reference, model = pairs("qwen3_5")
    driver = Driver(model, num_pages=128, num_slots=24)
    sequences = [driver.sequence(tokens_of(n, 50 + n)) for n in (2, 65, 64, 128, 129, 400, 30, 31, 32, 33, 34, 35)]
    for sequence in sequences:
        driver.prefill(sequence, len(sequence.tokens) - 1)
    for sequence, logits in zip(sequences, driver.decode(*sequences), strict=True):
        expected = reference_logits(reference, sequence.tokens)[-1:]
        assert (logits - expected).abs().max() < TOLERANCE


def test_new_sequence_ignores_the_slot_it_got(pairs):
    _, model = pairs("qwen3_5")
    driver = Driver(model)
    first = driver.sequence(tokens_of(100, 0))
    driver.prefill(first, 100)
    second, third = driver.sequence(tokens_of(2, 1)), driver.sequence(tokens_of(2, 1))
    second.slot = first.slot
    assert torch.equal(driver.prefill(second, 2), driver.prefill(third, 2))
    for stale, fresh in zip(driver.state(second.slot), driver.state(third.slot), strict=True):
        assert torch.equal(stale, fresh)


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_interior_states_are_those_of_a_forward_stopped_there(pairs, family, dtype, tmp_path):
    reference, model = pairs(family)
    if dtype != "float32":
        model = load(save(reference, tmp_path), dtype)
    lengths, contexts = [200, 900, 130], [0, 10, 64]
    wanted = [[64, 128, 192], [128, 256, 768], [64]]

    def prepared():
        driver = Driver(model)
        sequences = [driver.sequence(tokens_of(n + c, n)) for n, c in zip(lengths, contexts, strict=True)]
        other = driver.sequence(tokens_of(40, 9))
        for sequence, context in zip([*sequences, other], [*contexts, 39], strict=True):
            if context:
                driver.prefill(sequence, context)
        return driver, sequences, other

    driver, sequences, other = prepared()
    slots = [[driver.free_slots.pop() for _ in offsets] for offsets in wanted]
    chunks = [Chunk(other, 1, decode=True)] + [
        Chunk(s, n, tuple(zip(o, k, strict=True))) for s, n, o, k in zip(sequences, lengths, wanted, slots, strict=True)
    ]
    driver.forward(chunks)
    for index, offsets in enumerate(wanted):
        for offset, slot in zip(offsets, slots[index], strict=True):
            stopped, others, _ = prepared()
            stopped.prefill(others[index], offset)
            for kept, expected in zip(driver.state(slot), stopped.state(others[index].slot), strict=True):
                assert torch.equal(kept, expected)


@pytest.mark.parametrize("family", HYBRIDS)
def test_bfloat16_keeps_a_float32_recurrent_state(pairs, family, tmp_path):
    reference, _ = pairs(family)
    model = load(save(reference, tmp_path), "bfloat16")
    for spec in model.cache_spec().state:
        assert spec.dtype == ("float32" if spec.name == "recurrent" else "bfloat16")
    assert model.cache_spec() == type(model).cache_spec(reference.config, torch.bfloat16)
    tokens = tokens_of(200, 0)
    driver = Driver(model)
    actual = driver.prefill(driver.sequence(tokens), 200)
    assert actual.dtype == torch.float32
    expected = reference_logits(reference, tokens)
    rounded = reference_logits(copy.deepcopy(reference).to(torch.bfloat16), tokens).float()
    assert (actual - expected).abs().mean() < 1.2 * (rounded - expected).abs().mean()
    recurrent = next(cache["recurrent"] for cache in driver.caches if "recurrent" in cache)
    assert not torch.equal(recurrent.nan_to_num(), recurrent.nan_to_num().bfloat16().float())


def test_float16(pairs, tmp_path):
    reference, _ = pairs("qwen3_5")
    tokens = tokens_of(100, 0)
    driver = Driver(load(save(reference, tmp_path), "float16"))
    sequence = driver.sequence(tokens)
    actual = torch.cat([driver.prefill(sequence, 50), driver.prefill(sequence, 49), *driver.decode(sequence)])
    assert (actual - reference_logits(reference, tokens)).abs().max() < 0.05

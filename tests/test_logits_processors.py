"""Filters, penalties, bias and the minimum length against plain Python definitions."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.model_ops.logits_processors import filter_logits
from atom.model_ops.sampler import Sampler
from atom.sampling_params import SamplingParams
from tests.sampling_reference import Request, logits_of, naive_kept, random_logits, request

# --- filters ---------------------------------------------------------------------------------------------------------

finite = st.floats(-8, 8, width=32)
# Few distinct values make ties, the case where a sort's order could leak into the result.
rows = st.one_of(st.lists(finite, min_size=2, max_size=30), st.lists(st.integers(-2, 2).map(float), min_size=2))
filters = st.fixed_dictionaries(
    {
        "top_k": st.integers(0, 40),
        "top_p": st.one_of(st.just(1.0), st.floats(0.01, 1.0)),
        "min_p": st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
        "temperature": st.sampled_from([0.25, 0.5, 1.0, 2.0]),
    }
)


def kept_by_filter(row: list[float], params: SamplingParams, mates: list[tuple[list[float], SamplingParams]]):
    batch = [(row, params), *mates]
    scaled = torch.stack(
        [(torch.tensor(r, dtype=torch.float32) - max(r)) / p.temperature for r, p in batch],
    )
    filter_logits(scaled, [p for _, p in batch])
    return {i for i, value in enumerate(scaled[0].tolist()) if value > -math.inf}


def borderline(row: list[float], params: SamplingParams) -> bool:
    """Whether float32 may rightly decide otherwise than the definition in doubles."""
    near = [
        naive_kept(row, SamplingParams(top_k=params.top_k, temperature=params.temperature, top_p=p, min_p=m))
        for p in (params.top_p, max(1e-9, params.top_p * (1 - 1e-5)), min(1.0, params.top_p * (1 + 1e-5)))
        for m in (params.min_p, params.min_p * (1 - 1e-5), min(1.0, params.min_p * (1 + 1e-5)))
    ]
    return any(kept != near[0] for kept in near)


@settings(max_examples=300, deadline=None)
@given(rows, filters, st.randoms(use_true_random=False))
def test_kept_set_is_the_definition_whatever_the_batch(row, values, rng):
    params = SamplingParams(**values)
    mates = []
    for _ in range(rng.randint(0, 3)):
        other = row[:]
        rng.shuffle(other)
        top_k, top_p = rng.choice([0, 1, 7]), rng.choice([0.3, 1.0])
        mates.append((other, SamplingParams(top_k=top_k, top_p=top_p, min_p=rng.choice([0.0, 0.2]))))
    alone = kept_by_filter(row, params, [])
    assert kept_by_filter(row, params, mates) == alone
    if not borderline(row, params):
        assert alone == naive_kept(row, params)


@pytest.mark.parametrize("spread", [0.001, 1.0, 4.0])
def test_top_p_of_a_large_vocabulary(spread):
    """Flat rows need more than the head that is looked at first, peaked ones do not; both in one batch."""
    params = [SamplingParams(top_p=p, min_p=m) for p, m in ((0.2, 0.0), (0.9, 0.0), (0.9, 0.001), (0.999, 0.0))]
    logits = random_logits(4, 5000, seed=1) * spread
    logits[3] = random_logits(1, 5000, seed=2)[0] * 5
    scaled = logits - logits.amax(-1, keepdim=True)
    filter_logits(scaled, params)
    for row, kept, p in zip(logits.tolist(), scaled.tolist(), params, strict=True):
        assert {i for i, value in enumerate(kept) if value > -math.inf} == naive_kept(row, p)


def test_filters_keep_the_best_token_always():
    row = [5.0, 0.0, -1.0]
    for params in ({"top_p": 1e-9}, {"min_p": 1.0}, {"top_k": 1}):
        assert Sampler(3, seed=0).sample(logits_of(row), [request(temperature=1.0, **params)])[0] == [0]


# --- penalties, bias, minimum length ---------------------------------------------------------------------------------


def naive_penalized(row: list[float], one: Request) -> list[float]:
    p, output = one.params, Counter(one.token_ids[one.num_prompt_tokens :])
    result = []
    for token, value in enumerate(row):
        if token in one.token_ids:
            value = value / p.repetition_penalty if value > 0 else value * p.repetition_penalty
        value -= p.frequency_penalty * output[token] + p.presence_penalty * (output[token] > 0)
        result.append(value + p.logit_bias.get(token, 0.0))
    return result


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_penalties_over_many_steps_equal_the_definition(seed):
    rng = random.Random(seed)
    vocab, sampler, live, number = 12, Sampler(12, seed=0), [], 0
    for _step in range(25):
        while len(live) < rng.randint(1, 6):
            prompt = [rng.randrange(vocab) for _ in range(rng.randint(1, 6))]
            penalties = rng.choice(
                [
                    {"frequency_penalty": rng.uniform(-2, 2)},
                    {"presence_penalty": rng.uniform(-2, 2)},
                    {"repetition_penalty": rng.uniform(0.2, 3)},
                    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25},
                    {"frequency_penalty": 1.0, "logit_bias": {0: 1.0, 5: -3.0}},
                    {},
                ]
            )
            live.append(request(str(number), tokens=prompt, prompt=len(prompt), temperature=0, **penalties))
            number += 1
        # Some are not in this step, as when preempted; they come back with all they had.
        batch = rng.sample(live, rng.randint(1, len(live)))
        logits = random_logits(len(batch), vocab, seed=rng.randrange(10**9))
        tokens, _ = sampler.sample(logits, batch)
        for one, row, token in zip(batch, logits.tolist(), tokens, strict=True):
            expected = naive_penalized(row, one)
            assert expected[token] == pytest.approx(max(expected), abs=1e-4)
            one.token_ids.append(token)
            if rng.random() < 0.1:
                sampler.forget(one.request_id)
                live.remove(one)


def test_counts_read_each_token_once():
    class Watched(list):
        read = 0

        def __getitem__(self, key):
            got = list.__getitem__(self, key)
            Watched.read += len(got) if isinstance(key, slice) else 1
            return got

    one = request(frequency_penalty=0.1, temperature=0)
    one.token_ids, one.num_prompt_tokens = Watched(range(1000)), 500
    sampler = Sampler(1000, seed=0)
    sampler.sample(torch.zeros(1, 1000), [one])
    first = Watched.read
    assert first == 1500  # the whole once as seen, its output once as generated
    for _ in range(10):
        one.token_ids.append(3)
        sampler.sample(torch.zeros(1, 1000), [one])
    assert Watched.read == first + 20


def test_forget_returns_the_counting_rows():
    sampler = Sampler(10, seed=0)
    for i in range(100):
        one = request(f"{i}", tokens=[1, 2], presence_penalty=2.0, temperature=0)
        row = [0.0] * 10
        row[2], row[3] = 1.0, 0.5  # token 2 was generated, so 3 wins; a stale row would forbid 3 as well
        assert sampler.sample(logits_of(row), [one])[0] == [3]
        one.token_ids.append(3)
        sampler.sample(logits_of(row), [one])
        sampler.forget(one.request_id)
    assert len(sampler._counts) == 0
    assert len(sampler._counts._seen) == 4


def test_logit_bias_of_a_hundred_bans_and_forces():
    row = [3.0, 2.0, 1.0]
    assert Sampler(3, 0).sample(logits_of(row), [request(temperature=0, logit_bias={0: -100})])[0] == [1]
    assert Sampler(3, 0).sample(logits_of(row), [request(temperature=1, logit_bias={2: 100})])[0] == [2]


def test_bias_on_an_impossible_token_keeps_it_impossible():
    row = [-math.inf, 0.0, -1.0]
    for temperature in (0.0, 1.0):
        batch = [request(str(i), temperature=temperature, logit_bias={0: 100.0}) for i in range(20)]
        assert 0 not in Sampler(3, 0).sample(logits_of(*[row] * 20), batch)[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_masks_stop_ids_until_reached(temperature):
    sampler = Sampler(4, seed=0)
    one = request(tokens=[0, 0], prompt=2, min_tokens=3, stop=(1, 2), temperature=temperature)
    drawn = []
    for _ in range(5):
        (token,), _ = sampler.sample(logits_of([0.0, 50.0, 20.0, 1.0]), [one])
        drawn.append(token)
        one.token_ids.append(token)
    assert not set(drawn[:3]) & {1, 2}
    assert drawn[3:] == [1, 1]


def test_bias_cannot_undo_min_tokens():
    one = request(min_tokens=1, stop=(1,), temperature=0, logit_bias={1: 100.0})
    assert Sampler(3, 0).sample(logits_of([0.0, 1.0, 0.5]), [one])[0] == [2]

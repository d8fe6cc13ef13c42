"""The sampler's draws, seeds and log-probabilities against plain Python definitions of what each setting means."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
import torch

from atom.model_ops.sampler import Sampler
from tests.sampling_reference import logits_of, naive_probabilities, random_logits, request


def chi_square_fits(counts: Counter, expected: dict[int, float], draws: int) -> bool:
    """Whether counts fit at a level of about 1e-5 (Wilson-Hilferty approximation of the chi-square tail)."""
    assert set(counts) <= set(expected)
    pooled = [(counts[i], p * draws) for i, p in expected.items() if p * draws >= 5]
    rest = [(counts[i], p * draws) for i, p in expected.items() if p * draws < 5]
    if rest:
        pooled.append((sum(c for c, _ in rest), max(1.0, sum(e for _, e in rest))))
    statistic = sum((count - mean) ** 2 / mean for count, mean in pooled)
    freedom = max(1, len(pooled) - 1)
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return z < 4.3


# --- greedy ----------------------------------------------------------------------------------------------------------


def test_greedy_is_argmax_and_leaves_logits_alone():
    logits = random_logits(8, 50)
    before = logits.clone()
    tokens, logprobs = Sampler(50, seed=0).sample(logits, [request(str(i), temperature=0) for i in range(8)])
    assert tokens == logits.argmax(-1).tolist()
    assert logprobs == [None] * 8
    assert torch.equal(logits, before)


def test_settings_of_one_row_do_not_touch_the_others_or_the_input():
    logits = random_logits(4, 30)
    before = logits.clone()
    mates = [
        request("a", temperature=0),
        request("b", temperature=1.5, top_k=3, top_p=0.5, min_p=0.1),
        request("c", temperature=0, logit_bias={3: 100.0}),
        request("d", temperature=0, frequency_penalty=2.0, tokens=[1, 2, 2]),
    ]
    tokens, _ = Sampler(30, seed=0).sample(logits, mates)
    assert tokens[0] == logits[0].argmax().item()
    assert tokens[2] == 3
    assert torch.equal(logits, before)


def test_empty_batch():
    assert Sampler(30, seed=0).sample(torch.empty(0, 30), []) == ([], [])


# --- distributions ---------------------------------------------------------------------------------------------------

DRAWS = 4000


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 2.0, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
@pytest.mark.parametrize("seeded", [False, True])
def test_distribution(params, seeded):
    vocab = 24
    row = random_logits(1, vocab, seed=7)[0]
    params = params | ({"seed": 5} if seeded else {})
    sampler = Sampler(vocab, seed=11)
    one = request("one", **params)
    counts: Counter = Counter()
    if seeded:  # one request drawing again and again
        for _ in range(DRAWS):
            counts.update(sampler.sample(row.unsqueeze(0), [one])[0])
    else:  # a wide batch, each row a request of its own
        for _ in range(4):
            batch = [request(str(i), **params) for i in range(DRAWS // 4)]
            counts.update(sampler.sample(row.expand(DRAWS // 4, -1), batch)[0])
    assert chi_square_fits(counts, naive_probabilities(row.tolist(), one.params), DRAWS)


def test_the_fit_check_can_fail():
    counts = Counter({0: 2100, 1: 1900})
    assert chi_square_fits(counts, {0: 0.52, 1: 0.48}, 4000)
    assert not chi_square_fits(counts, {0: 0.6, 1: 0.4}, 4000)


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-6])
def test_temperature_near_zero_is_greedy(temperature):
    logits = random_logits(3, 40) * 100
    tokens, _ = Sampler(40, seed=0).sample(logits, [request(str(i), temperature=temperature) for i in range(3)])
    assert tokens == logits.argmax(-1).tolist()


def test_impossible_tokens_are_never_drawn():
    row = [-math.inf, 1.0, -math.inf, 1.0, -math.inf]
    batch = [request(str(i), temperature=100.0) for i in range(500)]
    tokens, _ = Sampler(5, seed=0).sample(logits_of(*[row] * 500), batch)
    assert set(tokens) == {1, 3}


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_the_ends_of_the_random_numbers_range_hit_possible_tokens(uniform, monkeypatch):
    monkeypatch.setattr(Sampler, "_uniform", lambda self, request: uniform)
    logits = random_logits(500, 12, seed=4)
    logits[:, :2] = logits[:, 9:] = -math.inf
    tokens, _ = Sampler(12, 0).sample(logits, [request(str(i)) for i in range(500)])
    assert set(tokens) == {2 if uniform == 0 else 8}


# --- seeds -----------------------------------------------------------------------------------------------------------


def draw_alone(seed: int, logits: torch.Tensor, sampler_seed: int, **params) -> list[int]:
    sampler = Sampler(logits.shape[1], seed=sampler_seed)
    one = request("x", seed=seed, **params)
    return [sampler.sample(row.unsqueeze(0), [one])[0][0] for row in logits]


@pytest.mark.parametrize("params", [{}, {"top_k": 9}, {"top_p": 0.9, "min_p": 0.01, "top_k": 50}], ids=str)
def test_a_seeded_request_does_not_depend_on_its_mates(params):
    steps = random_logits(20, 100, seed=3)
    expected = draw_alone(42, steps, sampler_seed=0, **params)
    sampler, rng = Sampler(100, seed=99), random.Random(0)
    got = []
    for step, row in enumerate(steps):
        mates = [
            request(f"m{step}.{i}", seed=rng.choice([None, 42, 7]), top_k=rng.choice([0, 80]), logprobs=3)
            for i in range(rng.randint(0, 4))
        ]
        place = rng.randint(0, len(mates))
        batch = [*mates[:place], request("x", seed=42, **params), *mates[place:]]
        logits = random_logits(len(batch), 100, seed=step)
        logits[place] = row
        got.append(sampler.sample(logits, batch)[0][place])
    assert got == expected
    assert len(set(expected)) > 3


def test_seeds_differ_and_repeat():
    steps = random_logits(30, 60, seed=5)
    assert draw_alone(1, steps, 0) == draw_alone(1, steps, 1)
    assert draw_alone(1, steps, 0) != draw_alone(2, steps, 0)
    assert len(draw_alone(-1, steps, 0)) == len(draw_alone(1 << 70, steps, 0)) == 30


def test_forget_starts_the_seed_again():
    logits = random_logits(1, 60)
    sampler = Sampler(60, seed=0)
    first = [sampler.sample(logits, [request("x", seed=3)])[0] for _ in range(5)]
    sampler.forget("x")
    assert [sampler.sample(logits, [request("x", seed=3)])[0] for _ in range(5)] == first
    sampler.forget("x")
    sampler.forget("never seen")


def test_unseeded_draws_follow_the_sampler_seed():
    logits = random_logits(16, 200)
    batch = [request(str(i)) for i in range(16)]
    assert Sampler(200, 1).sample(logits, batch) == Sampler(200, 1).sample(logits, batch)
    assert Sampler(200, 1).sample(logits, batch) != Sampler(200, 2).sample(logits, batch)


# --- log-probabilities -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_logprobs_are_those_of_the_raw_logits(count):
    logits = random_logits(3, 64, seed=9)
    settings_of = [
        {"temperature": 0},
        {"temperature": 0.3, "top_k": 4, "logit_bias": {7: 9.0}},
        {"temperature": 2.0, "frequency_penalty": 1.0},
    ]
    batch = [request(str(i), tokens=[1, 2, 3], logprobs=count, **s) for i, s in enumerate(settings_of)]
    tokens, logprobs = Sampler(64, seed=0).sample(logits, batch)
    table = torch.log_softmax(logits, dim=-1)
    for token, entry, row in zip(tokens, logprobs, table, strict=True):
        order = row.argsort(descending=True).tolist()
        assert entry.token_ids == [token, *order[:count]]
        assert entry.logprobs == pytest.approx([row[i].item() for i in entry.token_ids], abs=1e-6)
        assert entry.ranks == [order.index(i) + 1 for i in entry.token_ids]


def test_logprobs_only_for_rows_that_ask():
    batch = [request("a", temperature=0), request("b", temperature=0, logprobs=2), request("c", logprobs=0)]
    _, logprobs = Sampler(9, seed=0).sample(random_logits(3, 9), batch)
    assert logprobs[0] is None
    assert [len(entry.token_ids) for entry in logprobs[1:]] == [3, 1]


def test_tied_tokens_share_a_rank_and_small_vocabularies_list_all():
    _, (entry,) = Sampler(3, seed=0).sample(logits_of([1.0, 1.0, 0.0]), [request(temperature=0, logprobs=20)])
    assert sorted(entry.token_ids[1:]) == [0, 1, 2]
    assert entry.ranks == [1, 1, 1, 3]


# --- rows that cannot be sampled -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"temperature": 0, "logprobs": 2},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_k": 2, "top_p": 0.5, "min_p": 0.2, "logprobs": 2, "seed": 1},
        {"temperature": 0, "frequency_penalty": 1.0},
        {"temperature": 0, "min_tokens": 5},
    ],
    ids=str,
)
def test_a_row_that_is_not_finite_is_none_and_alone(bad, params):
    good = random_logits(3, 16)
    logits = good.clone()
    logits[1, 3] = bad
    batch = [request(str(i), stop=(3,), **params) for i in range(3)]
    tokens, logprobs = Sampler(16, seed=0).sample(logits, batch)
    assert tokens[1] is None
    assert logprobs[1] is None
    expected, expected_logprobs = Sampler(16, seed=0).sample(good, batch)
    assert [tokens[0], tokens[2]] == [expected[0], expected[2]]
    assert [logprobs[0], logprobs[2]] == [expected_logprobs[0], expected_logprobs[2]]


def test_no_token_left_is_none():
    assert Sampler(2, 0).sample(torch.full((1, 2), -math.inf), [request()])[0] == [None]
    masked = request(min_tokens=1, stop=(0, 1), temperature=0)
    assert Sampler(2, 0).sample(torch.zeros(1, 2), [masked])[0] == [None]

"""The sampler against plain Python definitions of what each setting means."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.model_ops.logits_processors import filter_logits
from atom.model_ops.sampler import Sampler
from atom.sampling_params import SamplingParams

torch.set_num_threads(1)


@dataclass
class Request:
    request_id: str
    params: SamplingParams
    token_ids: list[int] = field(default_factory=lambda: [0])
    num_prompt_tokens: int = 1
    stop_ids: frozenset[int] = frozenset()


def request(request_id: str = "r", tokens: list[int] | None = None, prompt: int = 1, stop=(), **params) -> Request:
    return Request(request_id, SamplingParams(**params), tokens or [0], prompt, frozenset(stop))


def logits_of(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float32)


def random_logits(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def naive_kept(row: list[float], params: SamplingParams) -> set[int]:
    """The kept set by definition: sort, cut at min_p, cut at top_k, cut at top_p, then add what ties with the last."""
    scaled = [value / params.temperature for value in row]
    order = sorted(range(len(row)), key=lambda i: -scaled[i])
    top = scaled[order[0]]
    weights = {i: math.exp(scaled[i] - top) for i in order}
    head = [i for i in order if weights[i] >= params.min_p]
    if params.top_k:
        head = head[: params.top_k]
    total = sum(weights[i] for i in head)
    kept, mass = [], 0.0
    for i in head:
        if params.top_p < 1 and kept and mass >= params.top_p * total:
            break
        kept.append(i)
        mass += weights[i]
    return {i for i in order if scaled[i] >= scaled[kept[-1]]}


def naive_probabilities(row: list[float], params: SamplingParams) -> dict[int, float]:
    kept = naive_kept(row, params)
    top = max(row)
    weights = {i: math.exp((row[i] - top) / params.temperature) for i in kept}
    return {i: weight / sum(weights.values()) for i, weight in weights.items()}


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

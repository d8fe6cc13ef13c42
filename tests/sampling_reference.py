"""What each sampling setting means, in plain Python; and requests to sample for."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

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
    # In the sampler's precision, where values that are nearly equal become ties.
    scaled = ((torch.tensor(row) - max(row)) / params.temperature).tolist()
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

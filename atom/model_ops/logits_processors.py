"""What changes logits before a token is drawn: penalties, bias, the minimum length, and the filters' thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from atom.sampling_params import SamplingParams

_NEVER = float("-inf")
_HEAD = 1024


class SampledRequest(Protocol):
    """What sampling needs to know of a request. ``token_ids`` (prompt and output so far) only ever grows.

    ``stop_ids``: end-of-text and stop token ids, masked while fewer than ``params.min_tokens`` were generated.
    """

    request_id: str
    params: SamplingParams
    token_ids: list[int]
    num_prompt_tokens: int
    stop_ids: frozenset[int]


class TokenCounts:
    """Which tokens each penalised request has seen and how often it generated each, one row a request.

    Rows live from the first :meth:`update` until :meth:`forget`. An update reads only the tokens that are new since
    the last one, so a long request does not pay for its history at every step.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._generated = torch.zeros(0, vocab_size, device=device)
        self._seen = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._rows: dict[str, int] = {}
        self._counted: dict[str, int] = {}
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._rows)

    def update(self, requests: Sequence[SampledRequest]) -> tuple[Tensor, Tensor]:
        """Take in the requests' new tokens; return ``(generated [R, V] float32, seen [R, V] bool)`` as copies."""
        seen: tuple[list[int], list[int]] = ([], [])
        generated: tuple[list[int], list[int]] = ([], [])
        rows = []
        for request in requests:
            row = self._row(request.request_id)
            rows.append(row)
            old = self._counted[request.request_id]
            new = request.token_ids[old:]
            output = request.token_ids[max(old, request.num_prompt_tokens) :]
            seen[0].extend([row] * len(new))
            seen[1].extend(new)
            generated[0].extend([row] * len(output))
            generated[1].extend(output)
            self._counted[request.request_id] = old + len(new)
        device = self._seen.device
        self._seen[_index(seen, device)] = True
        self._generated.index_put_(_index(generated, device), torch.ones((), device=device), accumulate=True)
        index = torch.tensor(rows, device=device)
        return self._generated[index], self._seen[index]

    def forget(self, request_id: str) -> None:
        """Give the request's row back; nothing happens for a request that has none."""
        row = self._rows.pop(request_id, None)
        if row is not None:
            del self._counted[request_id]
            self._free.append(row)

    def _row(self, request_id: str) -> int:
        row = self._rows.get(request_id)
        if row is None:
            if not self._free:
                self._grow()
            row = self._free.pop()
            self._generated[row] = 0
            self._seen[row] = False
            self._rows[request_id] = row
            self._counted[request_id] = 0
        return row

    def _grow(self) -> None:
        old = len(self._seen)
        more = max(4, old)
        self._generated = torch.cat([self._generated, self._generated.new_zeros(more, self._generated.shape[1])])
        self._seen = torch.cat([self._seen, self._seen.new_zeros(more, self._seen.shape[1])])
        self._free.extend(range(old, old + more))


def penalize(logits: Tensor, generated: Tensor, seen: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Repetition, then frequency, then presence penalties on ``logits [R, V]``; returns new logits."""
    repetition, frequency, presence = (
        _column([getattr(p, name) for p in params], logits.device)
        for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")
    )
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    penalized = torch.where(seen, repeated, logits)
    return penalized - frequency * generated - presence * (generated > 0)


def add_bias(logits: Tensor, biases: Sequence[dict[int, float]]) -> None:
    """Add ``biases[r][token]`` to ``logits[r, token]`` in place."""
    rows = [row for row, bias in enumerate(biases) for _ in bias]
    tokens = [token for bias in biases for token in bias]
    values = [value for bias in biases for value in bias.values()]
    where = _index((rows, tokens), logits.device)
    logits.index_put_(where, torch.tensor(values, dtype=logits.dtype, device=logits.device), accumulate=True)


def mask_tokens(logits: Tensor, forbidden: Sequence[frozenset[int]]) -> None:
    """Make ``forbidden[r]`` impossible in row r, in place."""
    rows = [row for row, tokens in enumerate(forbidden) for _ in tokens]
    tokens = [token for tokens in forbidden for token in tokens]
    logits[_index((rows, tokens), logits.device)] = _NEVER


def filter_logits(scaled: Tensor, params: Sequence[SamplingParams]) -> None:
    """Apply min-p, top-k and top-p in place to ``scaled [R, V]``: logits over temperature, each row's best being 0.

    Of a row's values in descending order, those below ``log(min_p)`` go, then all but the first ``top_k``, then all but
    the shortest head that holds ``top_p`` of the mass left. What remains is every token at or above the last value
    kept: tokens that tie with it stay, so the kept set does not depend on the order a sort gives to equals, and thus
    not on the batch.
    """
    vocab_size, device = scaled.shape[1], scaled.device
    ranked = [row for row, p in enumerate(params) if 0 < p.top_k < vocab_size]
    whole = [row for row, p in enumerate(params) if not 0 < p.top_k < vocab_size and p.top_p < 1]
    floor = _column([p.min_p for p in params], device).log()
    if ranked:
        index = torch.tensor(ranked, device=device)
        top_k = _column([params[row].top_k for row in ranked], device)
        top_p = _column([params[row].top_p for row in ranked], device)
        floor[index] = _last_kept(scaled[index], floor[index], int(top_k.max()), top_k, top_p)[0]
    width = min(_HEAD, vocab_size)
    while whole:
        index = torch.tensor(whole, device=device)
        rows, lowest = scaled[index], floor[index]
        total = torch.where(rows >= lowest, rows.exp(), 0.0).sum(-1, keepdim=True, dtype=torch.float64)
        top_p = _column([params[row].top_p for row in whole], device)
        found, complete = _last_kept(rows, lowest, width, None, top_p, total)
        floor[index] = torch.where(complete, found, lowest)
        # A head of the vocabulary nearly always holds top_p of the mass; only the rows where it does not are sorted.
        whole = (
            [] if width == vocab_size else [r for r, done in zip(whole, complete.tolist(), strict=True) if not done[0]]
        )
        width = vocab_size
    scaled.masked_fill_(scaled < floor, _NEVER)


def _last_kept(
    scaled: Tensor, floor: Tensor, width: int, top_k: Tensor | None, top_p: Tensor, total: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The smallest value kept in each row ``[R, 1]``, and whether the ``width`` best values were enough to tell.

    ``total`` is the mass that ``top_p`` is a share of; by default the mass of the values that ``top_k`` and ``floor``
    leave among the ``width`` best.
    """
    best = scaled.topk(width).values
    valid = best >= floor
    if top_k is not None:
        valid &= torch.arange(width, device=scaled.device) < top_k
    mass = torch.where(valid, best.exp(), 0.0).cumsum(-1, dtype=torch.float64)
    goal = top_p.double() * (mass[:, -1:] if total is None else total)
    before = torch.cat([torch.zeros_like(mass[:, :1]), mass[:, :-1]], dim=-1)
    # top_p 1 is "no filter", which a sum that has lost its smallest terms to rounding would not give.
    kept = valid & ((before < goal) | (top_p >= 1))
    complete = (mass[:, -1:] >= goal) | torch.tensor(width == scaled.shape[1], device=scaled.device)
    return best.gather(1, kept.sum(-1, keepdim=True).clamp(min=1) - 1), complete


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, device=device, dtype=torch.float32).unsqueeze(1)


def _index(pairs: tuple[list[int], list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    rows, columns = torch.tensor(pairs, dtype=torch.long, device=device)
    return rows, columns

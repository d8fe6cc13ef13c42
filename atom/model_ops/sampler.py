"""From logits to tokens: the next token of every request of a step, and its log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from atom.model_engine.messages import TokenLogprobs
from atom.model_ops.logits_processors import (
    SampledRequest,
    TokenCounts,
    add_bias,
    filter_logits,
    mask_tokens,
    penalize,
)
from atom.sampling_params import MAX_LOGPROBS, SamplingParams

__all__ = ["SampledRequest", "Sampler"]

_SEEDS = 1 << 64


class Sampler:
    """Draws tokens for the requests of a step, in the order: penalties, bias, minimum length, temperature, filters.

    A seeded request's draws come from a generator of its own that lives by ``request_id`` until :meth:`forget`, one
    number a token: they depend neither on what runs beside it nor on its being preempted. The others share one
    generator seeded with ``seed``. Random numbers are drawn on the CPU, so they are the same for every device.
    """

    def __init__(self, vocab_size: int, seed: int, device: torch.device | str = "cpu") -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._shared = torch.Generator().manual_seed(seed % _SEEDS)
        self._seeded: dict[str, torch.Generator] = {}
        self._counts = TokenCounts(vocab_size, self.device)

    def sample(
        self, logits: Tensor, requests: Sequence[SampledRequest]
    ) -> tuple[list[int | None], list[TokenLogprobs | None]]:
        """The next token of each request from ``logits [R, vocab_size]`` (float32, left unchanged).

        A token is None where the request's logits hold a NaN or +inf or leave no token possible: that request has to
        end with an error, the rows beside it are not touched. Log-probabilities are those of the raw logits, and None
        for requests that ask for none.
        """
        best, tokens = logits.max(dim=-1)
        changed = [row for row, request in enumerate(requests) if _needs_work(request)]
        if changed:
            index = torch.tensor(changed, device=logits.device)
            changed_best, changed_tokens = self._choose(logits[index], [requests[row] for row in changed])
            tokens[index] = changed_tokens
            # A row must be sound both as the model left it and as its settings made it.
            best[index] = torch.where(best[index].isfinite(), changed_best, best[index])
        chosen = torch.where(best.isfinite(), tokens, -1)
        wanted = [row for row, request in enumerate(requests) if request.params.logprobs is not None]
        logprobs: list[TokenLogprobs | None] = [None] * len(requests)
        if wanted:
            index = torch.tensor(wanted, device=logits.device)
            counts = [requests[row].params.logprobs for row in wanted]
            for row, entry in zip(wanted, _logprobs(logits[index], chosen[index], counts), strict=True):
                logprobs[row] = entry
        return [token if token >= 0 else None for token in chosen.tolist()], logprobs

    def forget(self, request_id: str) -> None:
        """Drop what is kept of a finished request: its generator and its token counts."""
        self._seeded.pop(request_id, None)
        self._counts.forget(request_id)

    def _choose(self, logits: Tensor, requests: Sequence[SampledRequest]) -> tuple[Tensor, Tensor]:
        """Best adjusted logit and chosen token of each row; changes ``logits`` in place."""
        rows = [row for row, request in enumerate(requests) if _penalized(request.params)]
        if rows:
            index = torch.tensor(rows, device=logits.device)
            subset = [requests[row] for row in rows]
            generated, seen = self._counts.update(subset)
            logits[index] = penalize(logits[index], generated, seen, [request.params for request in subset])
        if any(request.params.logit_bias for request in requests):
            add_bias(logits, [request.params.logit_bias for request in requests])
        if any(_too_short(request) for request in requests):
            mask_tokens(logits, [request.stop_ids if _too_short(request) else frozenset() for request in requests])
        best, tokens = logits.max(dim=-1)
        rows = [row for row, request in enumerate(requests) if not request.params.greedy]
        if rows:
            index = torch.tensor(rows, device=logits.device)
            tokens[index] = self._draw(logits[index], best[index], [requests[row] for row in rows])
        return best, tokens

    def _draw(self, logits: Tensor, best: Tensor, requests: Sequence[SampledRequest]) -> Tensor:
        """One token a row from its filtered distribution, by inverting the cumulative distribution."""
        params = [request.params for request in requests]
        temperature = torch.tensor([p.temperature for p in params], device=logits.device).unsqueeze(1)
        # With the best at 0 a temperature near 0 sends the others to -inf and leaves no inf - inf behind.
        scaled = (logits - best.unsqueeze(1)) / temperature.clamp(min=torch.finfo(torch.float32).tiny)
        if any(p.top_k or p.top_p < 1 or p.min_p for p in params):
            filter_logits(scaled, params)
        mass = scaled.exp().cumsum(-1, dtype=torch.float64)
        total = mass[:, -1]
        uniform = torch.tensor([self._uniform(request) for request in requests], dtype=torch.float64)
        # At most 1 - 2**-53, so that the product is below the total even when rounded: no token past the last possible.
        point = uniform.to(logits.device) * total
        tokens = torch.searchsorted(mass, point.unsqueeze(1), right=True).squeeze(1)
        # A row that is not finite may point anywhere; its token is not used, but has to be one.
        return tokens.clamp(max=self.vocab_size - 1)

    def _uniform(self, request: SampledRequest) -> float:
        seed = request.params.seed
        generator = self._shared
        if seed is not None:
            generator = self._seeded.get(request.request_id)
            if generator is None:
                generator = torch.Generator().manual_seed(seed % _SEEDS)
                self._seeded[request.request_id] = generator
        return torch.rand((), generator=generator, dtype=torch.float64).item()


def _needs_work(request: SampledRequest) -> bool:
    params = request.params
    return not params.greedy or bool(params.logit_bias) or _penalized(params) or _too_short(request)


def _penalized(params: SamplingParams) -> bool:
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1)


def _too_short(request: SampledRequest) -> bool:
    minimum = request.params.min_tokens
    return minimum > 0 and len(request.token_ids) - request.num_prompt_tokens < minimum


def _logprobs(logits: Tensor, chosen: Tensor, counts: Sequence[int]) -> list[TokenLogprobs | None]:
    """The chosen token, then ``counts[r]`` most likely ones; None where no token was chosen.

    A token's rank is one more than the number of tokens strictly more likely, so tokens that tie share a rank.
    """
    table = logits.log_softmax(dim=-1)
    # The widest look-up whatever is asked for: which of equal tokens are listed does not depend on the batch.
    top, top_ids = table.topk(min(MAX_LOGPROBS, table.shape[1]), dim=-1)
    top_ranks = (top.unsqueeze(1) > top.unsqueeze(2)).sum(-1) + 1
    own = table.gather(1, chosen.clamp(min=0).unsqueeze(1))
    own_ranks = (table > own).sum(-1, keepdim=True) + 1
    ids = torch.cat([chosen.unsqueeze(1), top_ids], dim=1).tolist()
    values = torch.cat([own, top], dim=1).tolist()
    ranks = torch.cat([own_ranks, top_ranks], dim=1).tolist()
    return [
        TokenLogprobs(ids[row][:end], values[row][:end], ranks[row][:end]) if ids[row][0] >= 0 else None
        for row, end in enumerate(count + 1 for count in counts)
    ]

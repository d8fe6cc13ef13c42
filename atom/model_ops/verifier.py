"""Verifying drafts: what the model itself samples at each drafted position, until it differs from the draft."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from atom.model_engine.messages import TokenLogprobs
from atom.model_ops.logits_processors import SampledRequest
from atom.model_ops.sampler import Sampler
from atom.sampling_params import SamplingParams


class _Drafted:
    """A request as it would be had its first drafts been sampled."""

    __slots__ = ("num_prompt_tokens", "params", "request_id", "stop_ids", "token_ids")

    def __init__(self, request: SampledRequest, accepted: list[int]) -> None:
        self.request_id, self.stop_ids = request.request_id, request.stop_ids
        self.params: SamplingParams = request.params
        self.num_prompt_tokens = request.num_prompt_tokens
        self.token_ids = [*request.token_ids, *accepted]


def verify(
    sampler: Sampler, logits: Tensor, requests: Sequence[SampledRequest], drafts: Sequence[list[int]]
) -> list[tuple[list[int] | None, list[TokenLogprobs | None]]]:
    """Sample position after position and keep going while the sampled token is the drafted one.

    ``logits``: float32, for each request its rows one behind the other, one more than it has drafts. Every token is a
    draw from the model's own distribution with the request's own random numbers, so the output is, also when sampled,
    the one without drafts. Returns for each request the tokens (the accepted drafts and one more; None where the logits
    were not finite) and their log-probabilities. One call of the sampler a position.
    """
    starts, first = [], 0
    for drafted in drafts:
        starts.append(first)
        first += len(drafted) + 1
    tokens: list[list[int]] = [[] for _ in requests]
    logprobs: list[list[TokenLogprobs | None]] = [[] for _ in requests]
    failed: set[int] = set()
    going = list(range(len(requests)))
    position = 0
    while going:
        views = [requests[i] if position == 0 else _Drafted(requests[i], tokens[i]) for i in going]
        sampled, entries = sampler.sample(logits[[starts[i] + position for i in going]], views)
        still = []
        for i, token, entry in zip(going, sampled, entries, strict=True):
            if token is None:
                failed.add(i)
                continue
            tokens[i].append(token)
            logprobs[i].append(entry)
            if position < len(drafts[i]) and token == drafts[i][position]:
                still.append(i)
        going, position = still, position + 1
    return [(None if i in failed else tokens[i], logprobs[i]) for i in range(len(requests))]

"""What crosses the border between a front end and the engine core, in one process or two (msgpack)."""

from __future__ import annotations

import msgspec

from atom.sampling_params import SamplingParams


class EngineRequest(msgspec.Struct):
    """One continuation to compute; a front end turns ``n`` continuations into n of these.

    An answer with one of ``tool_call_token_ids`` calls a tool. ``eos_token_ids`` end the text unless ``params.ignore_eos``. ``cache_salt`` and ``adapter`` go into the root of the
    block keys, so equal prompts of different tenants or adapters share nothing. ``counted``: False for all but the first
    continuation of a prompt, which statistics count once.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: list[int] = []
    tool_call_token_ids: list[int] = []
    cache_salt: str | None = None
    adapter: str | None = None
    counted: bool = True


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities at one position: the sampled token first, then the most likely ones, best first.

    ``ranks[i]`` is the 1-based rank of ``token_ids[i]``. A most likely token may be the sampled one again.
    """

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


class EngineOutput(msgspec.Struct, array_like=True):
    """What one step added to one request. ``finish_reason``: stop, length, abort, error, or None while it goes on.

    ``stop_reason``: the stop token id that ended it, when it was one of ``stop_token_ids``. ``cache_miss_reason``: why
    less of the prompt was resumed than could have been, where the engine is asked to say so.
    """

    request_id: str
    new_token_ids: list[int]
    num_cached_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: int | None = None
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    cache_miss_reason: str | None = None

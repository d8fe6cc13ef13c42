"""A user's prompt and parameters, checked once for every front end and made into what the engine core computes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from atom.model_engine.messages import EngineRequest
from atom.sampling_params import SamplingParams
from atom.tokenizer import check_unicode

_PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}
_SEED_RANGE = 2**63  # seeds cross process borders as 64-bit integers

Prompt = str | dict[str, Any] | Sequence[int]


class TextEncoder(Protocol):
    """What preparing a request needs of a tokenizer."""

    eos_token_ids: list[int]
    tool_call_token_ids: list[int]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that the engine can take: ``params.max_tokens`` is set and fits the context."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: list[int]
    tool_call_token_ids: Sequence[int] = ()
    cache_salt: str | None = None
    adapter: str | None = None

    def child_ids(self) -> list[str]:
        """Ids of the continuations: the request's own id, or with ``n`` above 1 that id, ``#`` and the index."""
        if self.params.n == 1:
            return [self.request_id]
        return [f"{self.request_id}#{index}" for index in range(self.params.n)]

    def children(self) -> list[EngineRequest]:
        """One engine request a continuation. Stop strings are the front end's; a seed differs by the index."""
        return [
            EngineRequest(
                request_id=child_id,
                prompt_token_ids=self.prompt_token_ids,
                params=msgspec.structs.replace(self.params, n=1, stop=[], seed=_child_seed(self.params.seed, index)),
                eos_token_ids=self.eos_token_ids,
                tool_call_token_ids=list(self.tool_call_token_ids),
                cache_salt=self.cache_salt,
                adapter=self.adapter,
                counted=index == 0,
            )
            for index, child_id in enumerate(self.child_ids())
        ]


def prepare_request(
    request_id: str,
    prompt: Prompt,
    params: SamplingParams,
    *,
    tokenizer: TextEncoder,
    vocab_size: int,
    max_model_len: int,
    cache_salt: str | None = None,
    adapter: str | None = None,
) -> PreparedRequest:
    """Tokenize and check a request. Raises ``ValueError`` that says what is wrong and what works.

    prompt: text, token ids, or a dict with ``prompt`` or ``prompt_token_ids`` and perhaps ``cache_salt``; of a dict
    with both, the ids are used and the text is only shown. vocab_size: the model's, in tokens. max_model_len: tokens of
    prompt and output together. ``max_tokens`` and ``min_tokens`` are cut to what the prompt leaves of it.
    """
    text, token_ids, salt = _split_prompt(prompt)
    for name, value in (("cache_salt", cache_salt or salt), ("adapter", adapter), ("request_id", request_id)):
        if value is not None:
            if not isinstance(value, str):
                raise ValueError(f"{name} must be text, not {type(value).__name__}")
            check_unicode(name, value)
    for stop in params.stop:
        if isinstance(stop, str):
            check_unicode("stop", stop)
    params = _check_types(params)
    params.check_vocabulary(vocab_size)
    token_ids = tokenizer.encode(text) if token_ids is None else _check_ids(token_ids)
    if not token_ids:
        raise ValueError("the prompt is empty; it must have at least one token")
    lowest, highest = min(token_ids), max(token_ids)
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise ValueError(f"token id {wrong} in the prompt is not in the vocabulary; ids are from 0 to {vocab_size - 1}")
    room = max_model_len - len(token_ids)
    if room < 1:
        raise ValueError(
            f"the prompt has {len(token_ids)} tokens; at most {max_model_len - 1} leave room for an output token "
            f"in the context of {max_model_len}"
        )
    max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    params = msgspec.structs.replace(params, max_tokens=max_tokens, min_tokens=min(params.min_tokens, max_tokens))
    return PreparedRequest(
        request_id,
        text,
        token_ids,
        params,
        tokenizer.eos_token_ids,
        tokenizer.tool_call_token_ids,
        cache_salt=cache_salt or salt,
        adapter=adapter,
    )


def _split_prompt(prompt: Prompt) -> tuple[str | None, Sequence[int] | None, str | None]:
    """Text, token ids and cache salt of a prompt in any of its forms; text or ids are there."""
    if isinstance(prompt, str):
        return prompt, None, None
    if not isinstance(prompt, dict):
        return None, prompt, None
    unknown = set(prompt) - _PROMPT_KEYS
    if unknown:
        raise ValueError(f"a prompt has no {sorted(unknown)}; it may have {sorted(_PROMPT_KEYS)}")
    text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is None and token_ids is None:
        raise ValueError("a prompt must have 'prompt' or 'prompt_token_ids'")
    if text is not None and not isinstance(text, str):
        raise ValueError(f"'prompt' must be text, not {type(text).__name__}")
    return text, token_ids, prompt.get("cache_salt")


def _check_types(params: SamplingParams) -> SamplingParams:
    """The parameters as they look beyond the border to the engine core. Struct fields are not checked when made."""
    try:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    except (msgspec.MsgspecError, TypeError, OverflowError) as error:
        raise ValueError(f"sampling parameters cannot be used: {error}") from None


def _check_ids(token_ids: Sequence[int]) -> list[int]:
    try:
        return list(map(operator.index, token_ids))
    except TypeError as error:
        raise ValueError(f"a prompt must be text or a list of token ids: {error}") from None


def _child_seed(seed: int | None, index: int) -> int | None:
    return None if seed is None else (seed + index) % _SEED_RANGE

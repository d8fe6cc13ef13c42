"""What clients receive, in OpenAI's shapes; encoded by msgspec, which is cheap enough for once a token."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType


class PromptTokensDetails(msgspec.Struct):
    """``cached_tokens``: prompt tokens that were resumed from the prefix cache; 0 on a miss.

    ``cache_miss_reason``: with --report-cache-miss-reason, why it was not more; of several prompts the first that has
    one.
    """

    cached_tokens: int
    cache_miss_reason: str | UnsetType = UNSET


class Usage(msgspec.Struct):
    """Tokens of a whole request, over all its prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(msgspec.Struct):
    """One alternative at a position. ``bytes`` is null for a token that is no whole character."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """The token at a position and its alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities of a chat answer, one entry a token."""

    content: list[TokenLogprob]


class CompletionLogprobs(msgspec.Struct):
    """Log-probabilities of a completion, in parallel lists; ``text_offset`` counts characters of the text."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class ChatMessage(msgspec.Struct):
    """A whole answer."""

    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct):
    """One of the ``n`` answers. ``stop_reason``: the stop string or token id that ended it."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None


class ChatCompletion(msgspec.Struct):
    """Body of ``/v1/chat/completions`` without ``stream``."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"


class Delta(msgspec.Struct):
    """What a chunk adds to an answer."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    """A chunk's part of one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET


class ChatChunk(msgspec.Struct):
    """One event of a chat stream. ``usage`` is null before the last chunk, and absent if it was not asked for."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None
    object: str = "chat.completion.chunk"


class CompletionChoice(msgspec.Struct):
    """One completion, or a chunk's part of one."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None


class Completion(msgspec.Struct):
    """Body of ``/v1/completions``, or one event of its stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None
    object: str = "text_completion"

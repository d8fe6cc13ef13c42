"""Log-probabilities in the two shapes of OpenAI's endpoints."""

from __future__ import annotations

from atom.entrypoints.openai.responses import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from atom.outputs import CompletionOutput, Logprob

_REPLACEMENT = "\ufffd"
# JSON has no infinity; clients that expect a number get this for an impossible token.
_LOWEST = -9999.0


def chat_logprobs(output: CompletionOutput, count: int) -> ChatLogprobs | None:
    """Positions of ``output`` with their ``count`` most likely tokens; None if there are no log-probabilities."""
    if output.logprobs is None:
        return None
    content = []
    for token_id, position in zip(output.token_ids, output.logprobs, strict=True):
        sampled = position[token_id]
        best = sorted(position.values(), key=_rank)[:count]
        top = [TopLogprob(entry.decoded_token, _number(entry), _bytes(entry.decoded_token)) for entry in best]
        text = sampled.decoded_token
        content.append(TokenLogprob(text, _number(sampled), _bytes(text), top))
    return ChatLogprobs(content)


def completion_logprobs(output: CompletionOutput, offset: int) -> tuple[CompletionLogprobs | None, int]:
    """Positions of ``output``, whose first token is ``offset`` characters into the text, and the offset after it.

    Alternatives include the sampled token. Tokens with the same text share an entry, the likeliest one's.
    """
    if output.logprobs is None:
        return None, offset
    result = CompletionLogprobs([], [], [], [])
    for token_id, position in zip(output.token_ids, output.logprobs, strict=True):
        sampled = position[token_id]
        result.text_offset.append(offset)
        result.token_logprobs.append(_number(sampled))
        result.tokens.append(sampled.decoded_token)
        worst_first = sorted(position.values(), key=_rank, reverse=True)
        result.top_logprobs.append({entry.decoded_token: _number(entry) for entry in worst_first})
        offset += len(sampled.decoded_token)
    return result, offset


def _rank(entry: Logprob) -> int:
    return entry.rank


def _number(entry: Logprob) -> float:
    return max(entry.logprob, _LOWEST)


def _bytes(text: str) -> list[int] | None:
    return None if _REPLACEMENT in text else list(text.encode())

"""Drafting: tokens guessed ahead of the model, verified in one forward."""

from __future__ import annotations

from typing import Protocol

from atom.model_engine.sequence import Sequence


class Drafter(Protocol):
    """Proposes how a request goes on."""

    num_speculative_tokens: int

    def propose(self, seq: Sequence, limit: int) -> list[int]:
        """At most ``limit`` tokens that may follow ``seq.token_ids``; empty if there is no idea."""
        ...

    def forget(self, request_id: str) -> None:
        """The request is over; unknown ids are no error."""
        ...


INDEXED_A_CALL = 2048
"""Tokens of a long prompt that one proposal indexes, so that the requests beside it are not kept waiting."""


class NGramDrafter:
    """Prompt look-up (Saxena 2023): what followed the last occurrence of the current n-gram, the longest n first.

    Indexes each request's n-grams as they come: a proposal costs O(new tokens x sizes), not O(context).
    """

    def __init__(self, num_speculative_tokens: int, longest: int = 4, shortest: int = 2) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self._sizes = range(longest, shortest - 1, -1)
        # Per request: how many tokens are indexed, and for each n-gram the position behind its latest occurrence.
        self._known: dict[str, tuple[int, dict[tuple[int, ...], int]]] = {}

    def propose(self, seq: Sequence, limit: int) -> list[int]:
        tokens = seq.token_ids
        count = len(tokens)
        done, follows = self._known.get(seq.request_id, (0, {}))
        # The n-gram at the very end is looked up, not indexed: nothing follows it yet.
        reached = min(count, done + 1 + INDEXED_A_CALL)
        for end in range(done + 1, reached):
            for size in self._sizes:
                if size <= end:
                    follows[tuple(tokens[end - size : end])] = end
        self._known[seq.request_id] = (max(done, reached - 1), follows)
        for size in self._sizes:
            start = follows.get(tuple(tokens[-size:])) if size <= count else None
            if start is not None:
                return tokens[start : start + min(limit, self.num_speculative_tokens)]
        return []

    def forget(self, request_id: str) -> None:
        self._known.pop(request_id, None)


def make_drafter(settings: dict[str, object] | None) -> Drafter | None:
    """The drafter of validated ``--speculative-config`` settings; None without any."""
    if settings is None:
        return None
    return NGramDrafter(
        int(str(settings["num_speculative_tokens"])),
        int(str(settings.get("prompt_lookup_max", 4))),
        int(str(settings.get("prompt_lookup_min", 2))),
    )

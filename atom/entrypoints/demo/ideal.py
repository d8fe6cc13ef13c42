"""The best that any prefix cache can do: nothing is ever forgotten, and every block boundary can be resumed."""

from __future__ import annotations

from collections.abc import Sequence

from atom.model_engine.placement import resumable_limit


class IdealCache:
    """Every prompt so far, as a tree of whole blocks of ``block_size`` tokens."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        # Children by parent and tokens; a node is its number, the root is 0.
        self._nodes: dict[tuple[int, tuple[int, ...]], int] = {}

    def ask(self, tokens: Sequence[int]) -> int:
        """Add a prompt; returns how many of its tokens earlier prompts could spare it. At least one is computed."""
        size = self._block_size
        node = shared = 0
        matching = True
        for start in range(0, len(tokens) - size + 1, size):
            key = (node, tuple(tokens[start : start + size]))
            matching = matching and key in self._nodes
            node = self._nodes.setdefault(key, len(self._nodes) + 1)
            if matching:
                shared = start + size
        return min(shared, resumable_limit(len(tokens), size)) if tokens else 0

"""The tensors of one forward: prefill chunks and decodes of several requests, packed one behind the other."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class InteriorState:
    """A state to keep in the middle of a chunk: after the first ``offset`` tokens of sequence ``index``'s chunk.

    ``offset`` is a multiple of the kernel's chunk (64) below the chunk's length; the state goes to slot ``slot``.
    """

    index: int
    offset: int
    slot: int


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """S sequences with T tokens in all; decodes first, then verifications of drafts, then prefill chunks.

    token_ids, positions: ``[T]`` int64. Sequence i owns rows ``query_starts[i]:query_starts[i + 1]`` and has
    ``context_lens[i]`` tokens in its pages (and in its state) from earlier forwards. The first ``num_decodes`` sequences
    have exactly one row and a context; the next :attr:`num_verifications` have a context and a row for their last token
    and for each draft, the longest first. ``block_tables``: ``[S, max_blocks]`` int64, page ids that cover context and
    chunk, padded with 0. ``pages``, ``offsets``: ``[T]`` int64, where each row's keys and values go.
    ``state_slots``: ``[S]`` int64, where each state goes; ``read_slots``: ``[S]`` int64, where it is now (None: the
    same). ``verify_slots[j]``: int64, where the state after row j of each verification that has one goes, in order. A
    sequence with ``context_lens[i] == 0`` starts from a zero state whatever bytes its
    slot holds. ``interior``: states to keep in the middle of chunks.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    query_starts: tuple[int, ...]
    context_lens: tuple[int, ...]
    num_decodes: int
    block_tables: torch.Tensor
    pages: torch.Tensor
    offsets: torch.Tensor
    state_slots: torch.Tensor
    interior: tuple[InteriorState, ...] = ()
    read_slots: torch.Tensor | None = None
    verify_slots: tuple[torch.Tensor, ...] = ()

    @property
    def num_sequences(self) -> int:
        return len(self.context_lens)

    @property
    def num_verifications(self) -> int:
        return len(self.verify_slots[0]) if self.verify_slots else 0

    @property
    def num_tokens(self) -> int:
        return self.query_starts[-1]

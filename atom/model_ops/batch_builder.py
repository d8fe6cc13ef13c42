"""From a step's plan to the tensors of its forward."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch

from atom.model_ops.forward_batch import ForwardBatch, InteriorState


class BlockTables:
    """Block tables of running requests as rows of one array, so that a step writes only the pages that are new.

    A row belongs to one request until :meth:`forget`. Rows are as wide as the longest table seen, and as many as needed.
    """

    def __init__(self, max_rows: int) -> None:
        self._rows: dict[str, int] = {}
        self._vacant = list(range(max_rows - 1, -1, -1))
        self._filled = [0] * max_rows
        self._sources: list[list[int] | None] = [None] * max_rows
        self._array = np.zeros((max_rows, 16), dtype=np.int64)

    def row(self, request_id: str, table: list[int]) -> int:
        """The request's row with ``table`` in it. O(new pages)."""
        row = self._rows.get(request_id)
        if row is None:
            if not self._vacant:
                self._add_rows()
            row = self._rows[request_id] = self._vacant.pop()
            self._sources[row] = None
        # A preempted request comes back with another list; the same list only ever grows.
        if self._sources[row] is not table:
            self._sources[row], self._filled[row] = table, 0
        filled, length = self._filled[row], len(table)
        if filled < length:
            if length > self._array.shape[1]:
                grown = np.zeros((self._array.shape[0], max(length, 2 * self._array.shape[1])), dtype=np.int64)
                grown[:, : self._array.shape[1]] = self._array
                self._array = grown
            self._array[row, filled:length] = table[filled:]
            self._filled[row] = length
        return row

    def _add_rows(self) -> None:
        """Double the rows: preempted requests keep theirs while others run in their place."""
        old = len(self._filled)
        self._vacant += range(2 * old - 1, old - 1, -1)
        self._filled += [0] * old
        self._sources += [None] * old
        self._array = np.concatenate([self._array, np.zeros_like(self._array)])

    def gather(self, rows: SequenceOf[int], width: int) -> np.ndarray:
        """``[len(rows), width]`` int64; entries behind a row's own pages are stale ids of legal pages."""
        return self._array[list(rows), :width]

    def forget(self, request_id: str) -> None:
        """The request is gone: its row may be another's. Unknown ids are no error."""
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._sources[row] = None
            self._vacant.append(row)


class RowSource:
    """One request's part of a batch: ``tokens`` from position ``start`` on.

    ``row``: its block table. ``read``, ``slot``: where its state is and where it goes. ``interior``: (position, slot) of
    states to keep inside. ``scratch``: for a verification, the slot after each row but the first.
    """

    __slots__ = ("interior", "read", "row", "scratch", "slot", "start", "tokens")

    def __init__(
        self,
        tokens: list[int],
        start: int,
        row: int,
        read: int,
        slot: int,
        interior: SequenceOf[tuple[int, int]] = (),
        scratch: SequenceOf[int] = (),
    ) -> None:
        self.tokens, self.start, self.row = tokens, start, row
        self.read, self.slot, self.interior, self.scratch = read, slot, interior, scratch

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


def build_batch(
    decodes: SequenceOf[RowSource],
    verifications: SequenceOf[RowSource],
    prefills: SequenceOf[RowSource],
    tables: BlockTables,
    block_size: int,
    device: str,
) -> ForwardBatch:
    """Pack one forward: ``decodes`` of one token each, ``verifications`` (the longest first), ``prefills``. O(tokens)."""
    sources = [*decodes, *verifications, *prefills]
    width = -(-max(source.end for source in sources) // block_size)
    table = tables.gather([source.row for source in sources], width)
    count = len(decodes)
    tokens = [np.fromiter((s.tokens[0] for s in decodes), np.int64, count)]
    positions = [np.fromiter((s.start for s in decodes), np.int64, count)]
    owners = [np.arange(count)]
    query_starts = list(range(count + 1))
    for index, source in enumerate([*verifications, *prefills], start=count):
        tokens.append(np.asarray(source.tokens, dtype=np.int64))
        positions.append(np.arange(source.start, source.end))
        owners.append(np.full(len(source.tokens), index))
        query_starts.append(query_starts[-1] + len(source.tokens))
    position = np.concatenate(positions)
    pages = table[np.concatenate(owners), position // block_size]

    def to_device(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    def slots(values: Iterable[int]) -> torch.Tensor:
        return to_device(np.fromiter(values, np.int64))

    forked = any(source.read != source.slot for source in sources)
    return ForwardBatch(
        token_ids=to_device(np.concatenate(tokens)),
        positions=to_device(position),
        query_starts=tuple(query_starts),
        context_lens=tuple(source.start for source in sources),
        num_decodes=count,
        block_tables=to_device(table),
        pages=to_device(pages),
        offsets=to_device(position % block_size),
        state_slots=slots(source.slot for source in sources),
        interior=tuple(
            InteriorState(index, position - source.start, slot)
            for index, source in enumerate(prefills, start=count + len(verifications))
            for position, slot in source.interior
        ),
        read_slots=slots(source.read for source in sources) if forked else None,
        verify_slots=tuple(
            slots((s.slot, *s.scratch)[j] for s in verifications if j < len(s.tokens))
            # A model without per-request state has no scratch and needs none.
            for j in range(len(verifications[0].tokens) if verifications and verifications[0].scratch else 0)
        ),
    )

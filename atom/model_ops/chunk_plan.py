"""How the stateful layers of one forward lay out decodes and prefill chunks; made once a forward."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from atom.model_ops.forward_batch import ForwardBatch

CHUNK = 64


@dataclass(frozen=True, slots=True)
class StateSpan:
    """A prefill chunk: rows ``first .. last - 1`` of the forward's prefill rows, its state in slot ``read``.

    ``slot``: where the state after it goes. ``fresh``: the sequence has no context, its state starts at zero. ``interior``: ``(offset, slot)`` of states to keep
    after that many rows.
    """

    first: int
    last: int
    read: int
    slot: int
    fresh: bool
    interior: tuple[tuple[int, int], ...]

    @property
    def rows(self) -> int:
        return self.last - self.first

    @property
    def chunks(self) -> int:
        return -(-self.rows // CHUNK)


@dataclass(frozen=True, slots=True)
class StateStep:
    """One token of several sequences: row ``rows[i]`` takes the state in slot ``reads[i]`` to slot ``writes[i]``.

    Each is int64 ``[n]``, or a slice where the places are neighbours, which then need no gathering.
    """

    rows: torch.Tensor | slice
    reads: torch.Tensor | slice
    writes: torch.Tensor | slice


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """Prefill rows padded to whole chunks of 64, in the order of the scan over chunks.

    ``spans`` are sorted by falling number of chunks. Chunk j of every span that has one stands at ``starts[j] ..
    starts[j] + widths[j] - 1``, in the order of the spans, so that step j of the scan reads one contiguous range.
    ``padded_rows [prefill rows]``: each row's place in the padded layout, None where row r stands at place r.
    ``steps``: the decodes, then row after row of the verifications. ``first_prefill_row``: where prefill rows start.
    """

    first_prefill_row: int
    steps: tuple[StateStep, ...]
    spans: tuple[StateSpan, ...]
    widths: tuple[int, ...]
    starts: tuple[int, ...]
    padded_rows: torch.Tensor | None

    @classmethod
    def of(cls, batch: ForwardBatch) -> ChunkPlan:
        single = batch.num_decodes + batch.num_verifications
        slots = batch.state_slots.tolist()
        reads = slots if batch.read_slots is None else batch.read_slots.tolist()
        interior: dict[int, list[tuple[int, int]]] = {}
        for state in batch.interior:
            interior.setdefault(state.index, []).append((state.offset, state.slot))
        base = batch.query_starts[single]
        spans = [
            StateSpan(
                batch.query_starts[i] - base,
                batch.query_starts[i + 1] - base,
                reads[i],
                slots[i],
                batch.context_lens[i] == 0,
                tuple(interior.get(i, ())),
            )
            for i in range(single, batch.num_sequences)
        ]
        spans.sort(key=lambda span: -span.chunks)
        steps = spans[0].chunks if spans else 0
        widths = tuple(sum(span.chunks > step for span in spans) for step in range(steps))
        starts = tuple(sum(widths[:step]) for step in range(steps))
        padded_rows = _padded_rows(spans, starts, batch.token_ids.device) if len(spans) > 1 else None
        return cls(base, _steps(batch, reads, slots), tuple(spans), widths, starts, padded_rows)

    @property
    def num_chunks(self) -> int:
        return sum(self.widths)


def _steps(batch: ForwardBatch, reads: list[int], slots: list[int]) -> tuple[StateStep, ...]:
    steps, n, count = [], batch.num_decodes, batch.num_verifications
    device = batch.state_slots.device
    if n:
        steps.append(StateStep(slice(0, n), _places(reads[:n], device), _places(slots[:n], device)))
    first_rows = torch.tensor(batch.query_starts[n : n + count], device=device)
    before = reads[n : n + count]
    for j, targets in enumerate(batch.verify_slots):
        writes = targets.tolist()
        width = len(writes)
        steps.append(StateStep(first_rows[:width] + j, _places(before[:width], device), _places(writes, device)))
        before = writes
    return tuple(steps)


def _places(slots: list[int], device: torch.device) -> torch.Tensor | slice:
    """``slots`` as a slice where they are neighbours in rising order, else as an index."""
    first = slots[0]
    if all(slot == first + i for i, slot in enumerate(slots)):
        return slice(first, first + len(slots))
    return torch.tensor(slots, device=device)


def _padded_rows(spans: list[StateSpan], starts: tuple[int, ...], device: torch.device) -> torch.Tensor:
    first_place = torch.tensor(starts, device=device)
    places = torch.empty(sum(span.rows for span in spans), dtype=torch.int64, device=device)
    for order, span in enumerate(spans):
        row = torch.arange(span.rows, device=device)
        places[span.first : span.last] = (first_place[row // CHUNK] + order) * CHUNK + row % CHUNK
    return places


def pad_rows(rows: torch.Tensor, plan: ChunkPlan, fill: float) -> torch.Tensor:
    """``[prefill rows, n]`` to ``[chunks, 64, n]`` float32 with ``fill`` in the places that no row takes."""
    padded = torch.empty(plan.num_chunks * CHUNK, rows.shape[-1], dtype=torch.float32, device=rows.device)
    if plan.padded_rows is None:
        padded[: len(rows)] = rows
        padded[len(rows) :] = fill
    else:
        padded.fill_(fill)
        padded.index_copy_(0, plan.padded_rows, rows.float())
    return padded.view(-1, CHUNK, rows.shape[-1])


def unpad_rows(padded: torch.Tensor, plan: ChunkPlan, out: torch.Tensor) -> None:
    """The inverse of :func:`pad_rows`: ``[chunks, 64, ...]``, any strides, into ``out [prefill rows, ...]``."""
    if plan.padded_rows is None:
        whole, rest = divmod(len(out), CHUNK)
        out[: whole * CHUNK].unflatten(0, (whole, CHUNK)).copy_(padded[:whole])
        if rest:
            out[whole * CHUNK :].copy_(padded[whole, :rest])
    else:
        torch.index_select(padded.flatten(0, 1), 0, plan.padded_rows, out=out)

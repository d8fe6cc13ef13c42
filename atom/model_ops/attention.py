"""Causal grouped-query attention over paged keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from atom.model_ops.forward_batch import ForwardBatch

# Keys and values of a decode group are gathered together when they fit in a core's cache, else sequence by sequence.
GROUP_BYTES = 1 << 20
# Query rows of a prefill that attend at once. A row's rounding depends on the shape of its tile, so tiles are as long as
# the state layers' chunks: what a row computes is then the same wherever, on that grid, the forward ends.
QUERY_ROWS = 64


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decodes ``first .. last - 1``, attended to together.

    ``table``: page ids, one sequence's behind the other's, ``blocks`` each. ``lengths``: tokens of each sequence with
    the new one. ``mask [n, 1, 1, blocks * block_size]`` marks rows within a sequence's tokens; None for a single
    sequence, whose rows are sliced instead. ``beyond``: the other rows' places among ``n * blocks * block_size``.
    """

    first: int
    last: int
    blocks: int
    table: torch.Tensor
    lengths: tuple[int, ...]
    mask: torch.Tensor | None
    beyond: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """Rows ``first .. last - 1`` of a sequence with ``context`` tokens before them; ``table`` covers both."""

    first: int
    last: int
    context: int
    table: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What every attention layer of one forward reads and writes; made once a forward.

    ``causal [QUERY_ROWS, longest span]``: the mask, added to scores, of the last rows of a sequence; its lower right
    corner serves any tile.
    """

    pages: torch.Tensor
    offsets: torch.Tensor
    decodes: tuple[DecodeGroup, ...]
    prefills: tuple[PrefillSpan, ...]
    causal: torch.Tensor

    @classmethod
    def of(cls, batch: ForwardBatch, block_size: int, token_bytes: int, dtype: torch.dtype) -> AttentionPlan:
        """``token_bytes``: bytes of one token's keys in one layer, which are of type ``dtype``."""
        blocks = [
            -(-(context + batch.query_starts[i + 1] - batch.query_starts[i]) // block_size)
            for i, context in enumerate(batch.context_lens)
        ]
        groups, first = [], 0
        while first < batch.num_decodes:
            last, width = first + 1, blocks[first]
            while last < batch.num_decodes:
                wider = max(width, blocks[last])
                if 2 * (last + 1 - first) * wider * block_size * token_bytes > GROUP_BYTES:
                    break
                last, width = last + 1, wider
            groups.append(_decode_group(batch, first, last, width, block_size))
            first = last
        spans = tuple(
            PrefillSpan(
                batch.query_starts[i],
                batch.query_starts[i + 1],
                batch.context_lens[i],
                batch.block_tables[i, : blocks[i]],
            )
            for i in range(batch.num_decodes, batch.num_sequences)
        )
        longest = max((QUERY_ROWS, *(span.context + span.last - span.first for span in spans)))
        # Verifications alone need a few rows of the mask, prefill chunks a whole tile.
        rows = max((1, *(min(QUERY_ROWS, span.last - span.first) for span in spans)))
        causal = torch.full((rows, longest), float("-inf"), dtype=dtype, device=batch.pages.device)
        causal.triu_(longest - rows + 1)
        return cls(batch.pages, batch.offsets, tuple(groups), spans, causal)


def _decode_group(batch: ForwardBatch, first: int, last: int, blocks: int, block_size: int) -> DecodeGroup:
    lengths = tuple(context + 1 for context in batch.context_lens[first:last])
    table = batch.block_tables[first:last, :blocks].reshape(-1)
    if last - first == 1:
        return DecodeGroup(first, last, blocks, table, lengths, None, None)
    device = table.device
    within = torch.arange(blocks * block_size, device=device) < torch.tensor(lengths, device=device)[:, None]
    beyond = within.logical_not().view(-1).nonzero().squeeze(1)
    return DecodeGroup(first, last, blocks, table, lengths, within[:, None, None, :], beyond)


def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
) -> torch.Tensor:
    """Write this forward's keys and values to their pages, then attend causally over context and chunk.

    ``q [T, Hq, D]``, ``k, v [T, Hkv, D]``, pages ``[num_blocks, block_size, Hkv, D]``, all of one dtype. Returns
    ``[T, Hq, D]``. Bytes beyond a sequence's tokens may be anything, NaN included.
    """
    key_pages[plan.pages, plan.offsets] = k
    value_pages[plan.pages, plan.offsets] = v
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for group in plan.decodes:
        _attend_decodes(out, q, key_pages, value_pages, group, scale)
    for span in plan.prefills:
        _attend_span(out, q, k, v, key_pages, value_pages, span, plan, scale)
    return out


def _gather(pages: torch.Tensor, table: torch.Tensor, sequences: int) -> torch.Tensor:
    """The rows of whole pages, ``[sequences, tokens, Hkv, D]``."""
    rows = pages.index_select(0, table)
    return rows.view(sequences, -1, *pages.shape[2:])


def _attend_decodes(
    out: torch.Tensor,
    q: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    group: DecodeGroup,
    scale: float,
) -> None:
    n = group.last - group.first
    keys = _gather(key_pages, group.table, n)
    values = _gather(value_pages, group.table, n)
    if group.beyond is None:
        keys, values = keys[:, : group.lengths[0]], values[:, : group.lengths[0]]
    else:
        # A mask alone does not keep NaN out: 0 * NaN is NaN. Only the rows behind each sequence's end are touched.
        keys.flatten(0, 1).index_fill_(0, group.beyond, 0)
        values.flatten(0, 1).index_fill_(0, group.beyond, 0)
    heads, dim = keys.shape[2:]
    # The query heads that share a key head stand where query rows stand: no key is read twice.
    folded = q[group.first : group.last].reshape(n, heads, -1, dim)
    attended = F.scaled_dot_product_attention(
        folded, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=group.mask, scale=scale
    )
    out[group.first : group.last] = attended.reshape(n, -1, dim)


def _attend_span(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    span: PrefillSpan,
    plan: AttentionPlan,
    scale: float,
) -> None:
    if span.context:
        keys = _gather(key_pages, span.table, 1).transpose(1, 2)
        values = _gather(value_pages, span.table, 1).transpose(1, 2)
    else:
        keys = k[span.first : span.last].transpose(0, 1).unsqueeze(0)
        values = v[span.first : span.last].transpose(0, 1).unsqueeze(0)
    queries = q[span.first : span.last].transpose(0, 1).unsqueeze(0)
    rows = span.last - span.first
    for start in range(0, rows, QUERY_ROWS):
        end = min(start + QUERY_ROWS, rows)
        total = span.context + end
        attended = F.scaled_dot_product_attention(
            queries[:, :, start:end],
            keys[:, :, :total],
            values[:, :, :total],
            attn_mask=plan.causal[start - end :, -total:],
            scale=scale,
            enable_gqa=True,
        )
        out[span.first + start : span.first + end] = attended[0].transpose(0, 1)

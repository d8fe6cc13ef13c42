"""The gated delta rule (Yang et al. 2024, "Gated Delta Networks"), state ``S [K, V]`` per value head.

Per token, with key and query normalised to length 1, the query scaled by ``K ** -0.5``::

    S = exp(g) * S
    S = S + k^T (beta * (v - k S))
    o = q S

Value head h reads key head ``h // (Hv / Hk)``. Everything is float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

NORM_EPS = 1e-6
# A decay below exp(-60) is as good as none, while float32 arithmetic on denormals is thirty times slower.
LOG_DECAY_MIN = -60.0
# Chunks whose terms are computed together: enough for large batches of products, few enough for the cache.
GROUP = 16


def unit(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """``x * scale / sqrt(sum(x^2) + 1e-6)`` over the last dimension."""
    return x * inverse_norm(x).mul_(scale)


def inverse_norm(x: torch.Tensor) -> torch.Tensor:
    """``1 / sqrt(sum(x^2) + 1e-6)``, the last dimension kept with size 1."""
    return (x * x).sum(-1, keepdim=True).add_(NORM_EPS).rsqrt_()


def gated_delta_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, token by token.

    ``q, k [T, Hk, K]``, ``v [T, Hv, V]``, ``g, beta [T, Hv]``, ``state [Hv, K, V]``. Returns the output ``[T, Hv, V]``
    and the state after the last token.
    """
    groups = v.shape[1] // k.shape[1]
    q = unit(q, q.shape[-1] ** -0.5).repeat_interleave(groups, dim=1)
    k = unit(k).repeat_interleave(groups, dim=1)
    outputs = []
    for t in range(len(v)):
        state = state * g[t].exp()[:, None, None]
        delta = beta[t][:, None] * (v[t] - torch.einsum("hk,hkv->hv", k[t], state))
        state = state + torch.einsum("hk,hv->hkv", k[t], delta)
        outputs.append(torch.einsum("hk,hkv->hv", q[t], state))
    return torch.stack(outputs), state


def gated_delta_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    reads: torch.Tensor | slice,
    writes: torch.Tensor | slice,
) -> torch.Tensor:
    """One token of n sequences. ``q, k [n, Hk, K]``, ``v [n, Hv, V]``, ``g, beta [n, Hv]``.

    States in ``states [num_slots, Hv, K, V]`` are read at ``reads`` and written at ``writes``: int64 ``[n]``, or slices of
    neighbours, which are updated without a copy where they are equal. Returns ``[n, Hv, V]``.
    """
    n, heads, dim = v.shape
    keys, width = k.shape[1:]
    groups = heads // keys
    source = states[reads] if isinstance(reads, slice) else states.index_select(0, reads)
    in_place = isinstance(writes, slice)
    if not in_place and isinstance(reads, slice):
        source = source.clone()
    chosen = states[writes] if in_place else source
    if in_place and reads != writes:
        chosen.copy_(source)
    state = chosen.view(n, keys, groups, width, dim)
    state.mul_(g.exp().view(n, keys, groups, 1, 1))
    # Key and query go through norm and product together; the query's scale is left for the output.
    both = torch.stack((k, q), dim=2)
    both.mul_(inverse_norm(both))
    k = both[:, :, 0]
    read = torch.matmul(both.unsqueeze(2), state)
    # The state after the update is never read back: q (S + k^T delta) = q S + (q k^T) delta.
    delta = (v.view(n, keys, groups, dim) - read[..., 0, :]).mul_(beta.view(n, keys, groups, 1))
    out = torch.addcmul(read[..., 1, :], (both[:, :, 1] * k).sum(-1)[:, :, None, None], delta).mul_(width**-0.5)
    state.addcmul_(k[:, :, None, :, None], delta.unsqueeze(3))
    if not in_place:
        states.index_copy_(0, writes, chosen)
    return out.view(n, heads, dim)


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    widths: Iterable[int],
    keep: Iterable[tuple[int, int]] = (),
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Whole chunks of C tokens of P sequences (the UT transform of Yang et al. 2024, section 3.3).

    ``q, k [N, C, Hk, K]``, ``v [N, C, Hv, V]``, ``g, beta [N, C, Hv]``; places without a token have g = beta = 0 and
    finite q, k, v. The chunks stand in the order of the scan: step j reads the next ``widths[j]`` chunks, which continue
    the first ``widths[j]`` sequences of ``initial_state [P, Hv, K, V]`` (left as it is); widths never grow.
    ``keep``: ``(chunks, sequence)``, the states wanted after that many chunks. Returns the output ``[N, C, Hv, V]``
    (strided), the final state ``[P, Hv, K, V]``, and the kept states ``[Hv, K, V]`` in the order of ``keep``.
    """
    heads, dim = v.shape[2:]
    size = k.shape[1]
    out = torch.empty(len(v), heads, size, dim, dtype=torch.float32, device=v.device)
    state = initial_state.flatten(0, 1).clone()
    wanted: dict[int, list[tuple[int, int]]] = {}
    for position, (chunks, sequence) in enumerate(keep):
        wanted.setdefault(chunks, []).append((position, sequence))
    kept: dict[int, torch.Tensor] = {}
    for group, steps in _groups(tuple(widths)):
        terms = _ChunkTerms.of(q[group], k[group], v[group], g[group], beta[group])
        target = out[group].flatten(0, 1)
        first = 0
        for step, count in steps:
            rows = slice(first * heads, (first + count) * heads)
            live = state[: count * heads]
            terms.delta[rows].baddbmm_(terms.w[rows], live, alpha=-1)
            torch.bmm(terms.queries[rows], live, out=target[rows])
            live.mul_(terms.chunk_decay[rows]).baddbmm_(terms.updates[rows], terms.delta[rows])
            for position, sequence in wanted.get(step + 1, ()):
                kept[position] = state[sequence * heads : (sequence + 1) * heads].clone()
            first += count
        target.baddbmm_(terms.attention, terms.delta)
    return out.transpose(1, 2), state.view(initial_state.shape), [kept[i] for i in range(len(kept))]


def _groups(widths: tuple[int, ...]) -> Iterator[tuple[slice, list[tuple[int, int]]]]:
    """Consecutive steps that hold about ``GROUP`` chunks: the range of chunks, and ``(step, width)`` of each step."""
    first = last = 0
    steps: list[tuple[int, int]] = []
    for step, count in enumerate(widths):
        steps.append((step, count))
        last += count
        if last - first >= GROUP or step == len(widths) - 1:
            yield slice(first, last), steps
            first, steps = last, []


@dataclass(frozen=True, slots=True)
class _ChunkTerms:
    """What a group of chunks contributes without knowing the state; all ``[chunks * Hv, ...]``.

    ``delta [C, V]`` and ``w [C, K]``: the updates are ``delta - w S``. ``queries [C, K]``: decayed since the chunk's
    start. ``updates [K, C]``: keys decayed until its end. ``attention [C, C]``, ``chunk_decay [1, 1]``.
    """

    delta: torch.Tensor
    w: torch.Tensor
    queries: torch.Tensor
    updates: torch.Tensor
    attention: torch.Tensor
    chunk_decay: torch.Tensor

    @classmethod
    def of(cls, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> _ChunkTerms:
        n, size, keys, width = k.shape
        heads, dim = v.shape[2:]
        groups = heads // keys

        # Per key head: products of keys with keys and of queries with keys.
        kq = torch.empty(n, keys, 2, size, width, dtype=torch.float32, device=k.device)
        torch.mul(k.transpose(1, 2), inverse_norm(k).transpose(1, 2), out=kq[:, :, 0])
        torch.mul(q.transpose(1, 2), inverse_norm(q).mul_(width**-0.5).transpose(1, 2), out=kq[:, :, 1])
        flat_kq = kq.view(n * keys, 2 * size, width)
        flat_k = flat_kq[:, :size]
        products = torch.bmm(flat_kq, flat_k.transpose(1, 2)).view(n, keys, 1, 2, size, size)

        # decay[i, j] = exp(g[j + 1] + ... + g[i]) for j <= i, else 0.
        total = g.transpose(1, 2).contiguous().cumsum(-1)
        decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).clamp_(LOG_DECAY_MIN, 0).exp_().tril_()
        decay = decay.view(n, keys, groups, size, size)
        since_start = total.clamp(min=LOG_DECAY_MIN).exp_()
        until_end = (total[..., -1:] - total).clamp_(min=LOG_DECAY_MIN).exp_().view(n, keys, groups, size, 1)
        beta = beta.transpose(1, 2).reshape(n, keys, groups, size)

        # (I + A) delta = beta * (v - decayed k S) with A strictly lower.
        system = (products[:, :, :, 0] * decay).mul_(beta.unsqueeze(-1))
        inverse = unit_lower_inverse(system.view(-1, size, size)).view_as(system).mul_(beta.unsqueeze(-2))
        values = v.transpose(1, 2).reshape(n * heads, size, dim)
        delta = torch.bmm(inverse.view(-1, size, size), values)
        inverse.mul_(since_start.view(n, keys, groups, 1, size))
        w = torch.bmm(inverse.view(n * keys, groups * size, size), flat_k)
        return cls(
            delta=delta,
            w=w.view(n * heads, size, width),
            queries=(kq[:, :, 1:] * since_start.view(n, keys, groups, size, 1)).view(n * heads, size, width),
            updates=(kq[:, :, :1] * until_end).view(n * heads, size, width).transpose(1, 2),
            attention=decay.mul_(products[:, :, :, 1]).view(-1, size, size),
            chunk_decay=since_start[..., -1].reshape(n * heads, 1, 1),
        )


def unit_lower_inverse(system: torch.Tensor) -> torch.Tensor:
    """``(I + tril(system, -1))^-1`` of ``system [B, C, C]``, C a multiple of 16 by a power of two, or below 16.

    What stands on and above the diagonal is ignored. Blocks of 16 are solved; then, doubling, the lower left block of
    ``[[P, 0], [Q, R]]^-1`` is ``-R^-1 Q P^-1``.
    """
    size = system.shape[-1]
    leaf = min(16, size)
    blocks = size // leaf
    tiled = (-1, blocks, leaf, blocks, leaf)
    diagonal = system.view(tiled).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).reshape(-1, leaf, leaf)
    identity = torch.eye(leaf, dtype=system.dtype, device=system.device).expand_as(diagonal)
    solved = torch.linalg.solve_triangular(diagonal, identity, upper=False, unitriangular=True)
    inverse = torch.zeros_like(system)
    inverse.view(tiled).diagonal(dim1=1, dim2=3).copy_(solved.view(-1, blocks, leaf, leaf).permute(0, 2, 3, 1))
    while leaf < size:
        for start in range(0, size, 2 * leaf):
            top, bottom = slice(start, start + leaf), slice(start + leaf, start + 2 * leaf)
            corner = torch.bmm(system[:, bottom, top], inverse[:, top, top])
            inverse[:, bottom, top] = torch.bmm(inverse[:, bottom, bottom], corner).neg_()
        leaf *= 2
    return inverse

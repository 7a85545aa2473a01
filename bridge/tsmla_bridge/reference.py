"""The operations' definitions on torch tensors, in float32 (float64 for float64): every key gathered, every score made.

For CPU tensors, for tests, and as what the kernels are compared with. They mean what tsmla_jax's reference
implementations mean. Lengths and offsets are read on the host, which on a GPU waits for it. Differentiable.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from tsmla_bridge.tensors import DTYPES, Scale, accumulation_dtype
from tsmla_kernels.contract import DecodeSpec, PrefillSpec

Results = tuple[torch.Tensor, torch.Tensor]


def mla_decode(
    spec: DecodeSpec,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    logit_scale: Scale,
    out_scale: Scale,
) -> Results:
    """out and lse of mla_decode; the scales are what logits and outputs are multiplied by."""
    dtype = accumulation_dtype(spec.q_dtype)
    rows = q.reshape(spec.total_q_len, spec.num_heads, spec.head_dim)
    out = torch.zeros((*rows.shape[:2], spec.latent_dim), dtype=dtype, device=q.device)
    lse = torch.full(rows.shape[:2], -torch.inf, dtype=dtype, device=q.device)
    starts = torch.arange(spec.batch + 1) * spec.max_q_len if cu_seqlens_q is None else cu_seqlens_q
    for request, (first, stop) in enumerate(_spans(starts, spec.total_q_len)):
        q_len = stop - first
        mine = slice(first, first + min(q_len, spec.max_q_len))
        length = max(0, min(int(seq_lens[request]), spec.max_pages * spec.page_size))
        keys = _keys(spec, kv_cache, block_tables[request], length).to(dtype)
        token = torch.arange(q_len, device=q.device)[: spec.max_q_len]
        stops = length - (q_len - 1) + token if spec.causal else torch.full_like(token, length)
        position = torch.arange(length, device=q.device)
        visible = position < stops[:, None]
        found = _attend(
            rows[mine].to(dtype), keys[:, None], keys[:, None, : spec.latent_dim], visible, logit_scale, out_scale
        )
        out[mine], lse[mine] = found
    out = out.reshape(*q.shape[:-1], spec.latent_dim).to(DTYPES[spec.out_dtype])
    return out, lse.reshape(q.shape[:-1]).to(DTYPES[spec.lse_dtype])


def mla_prefill(
    spec: PrefillSpec,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    logit_scale: Scale,
    out_scale: Scale,
) -> Results:
    """out and lse of mla_prefill; the scales are what logits and outputs are multiplied by."""
    dtype = accumulation_dtype(spec.q_dtype)
    out = torch.zeros((*q.shape[:2], spec.v_head_dim), dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=dtype, device=q.device)
    queries, keys = _spans(cu_seqlens_q, spec.total_q_len), _spans(cu_seqlens_kv, spec.total_kv_len)
    for (first_q, stop_q), (first_k, stop_k) in zip(queries, keys, strict=True):
        q_len, kv_len = stop_q - first_q, stop_k - first_k
        mine = slice(first_q, first_q + min(q_len, spec.max_q_len))
        theirs = slice(first_k, first_k + min(kv_len, spec.max_kv_len))
        position = torch.arange(kv_len, device=q.device)[: spec.max_kv_len]
        token = torch.arange(q_len, device=q.device)[: spec.max_q_len]
        last = token + (kv_len - q_len) if spec.causal else torch.full_like(token, kv_len)
        visible = position <= last[:, None]
        found = _attend(q[mine].to(dtype), k[theirs].to(dtype), v[theirs].to(dtype), visible, logit_scale, out_scale)
        out[mine], lse[mine] = found
    return out.to(DTYPES[spec.out_dtype]), lse.to(DTYPES[spec.lse_dtype])


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    logit_scale: Scale,
    out_scale: Scale,
) -> Results:
    """q [S, H, D], k [K, H or 1, D], v [K, H or 1, L], visible [S, K] -> out [S, H, L], lse [S, H]."""
    if not (q.shape[0] and k.shape[0]):
        rows = q.shape[:2]
        return q.new_zeros((*rows, v.shape[-1])), q.new_full(rows, -torch.inf)
    scores = torch.einsum("shd,khd->shk", q, k.expand(-1, q.shape[1], -1)) * logit_scale
    visible = visible[:, None, :]
    any_visible = visible.any(-1)
    scores = scores.masked_fill(~visible, -torch.inf)
    # A row that sees nothing has no maximum; 0 stands in for it, so that no inf - inf arises.
    maximum = torch.where(any_visible, scores.amax(-1), 0).detach()
    weights = torch.exp(scores - maximum[..., None])
    total = torch.where(any_visible, weights.sum(-1), 1)
    out = torch.einsum("shk,khv->shv", weights, v.expand(-1, q.shape[1], -1)) / total[..., None] * out_scale
    return out, torch.where(any_visible, maximum + torch.log(total), -torch.inf)


def _keys(spec: DecodeSpec, kv_cache: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` rows of a request's cache, [length, D]."""
    pages = table[: -(-length // spec.page_size)].long().clamp(0, spec.num_pages - 1)
    return kv_cache[pages].reshape(-1, spec.head_dim)[:length]


def _spans(offsets: torch.Tensor, total: int) -> Sequence[tuple[int, int]]:
    """(first row, end) of each request, inside the `total` rows."""
    ends = [max(0, min(int(offset), total)) for offset in offsets.tolist()]
    return [(first, max(first, stop)) for first, stop in itertools.pairwise(ends)]

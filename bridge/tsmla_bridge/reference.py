"""The operations' definitions on torch tensors, in float32 (float64 for float64, except the indexer's logits). They
mean what tsmla_jax's mean.

They serve CPU tensors, calls that name the reference, and tests of the kernels; on a GPU also calls of the cache's
operations, of merging and of the indexer, and gradients of prefill, that no kernel serves. Attention gathers every key
and computes every score; it reads lengths and offsets on the host, which on a GPU waits for the device. The others read
no value on the host, so that they can be captured into CUDA graphs. Attention, merging, gathering and the indexer's
logits can be differentiated.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tsmla_bridge import prefill_sinks
from tsmla_bridge.runtime.devices import in_own_precision
from tsmla_bridge.runtime.results import Computed
from tsmla_bridge.runtime.tensors import DTYPES, Scale, accumulation_dtype, dtype_name
from tsmla_bridge.selection_reference import selected
from tsmla_kernels.contract import FP8, FP8_MAX, CacheGatherSpec, CacheWriteSpec, DecodeSpec, MergeSpec, PrefillSpec
from tsmla_kernels.contract.sparse import IndexerLogitsSpec


@in_own_precision
def mla_decode(
    spec: DecodeSpec,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    visible_lens: torch.Tensor | None,
    logit_scale: Scale,
    out_scale: Scale,
) -> Computed:
    """out and lse of mla_decode; the scales are what logits and outputs are multiplied by."""
    dtype = accumulation_dtype(spec.q_dtype)
    rows = q.reshape(spec.total_q_len, spec.num_heads, spec.head_dim)
    out = torch.zeros((*rows.shape[:2], spec.latent_dim), dtype=dtype, device=q.device)
    lse = torch.full(rows.shape[:2], -torch.inf, dtype=dtype, device=q.device)
    starts = torch.arange(spec.batch + 1, device="cpu") * spec.max_q_len if cu_seqlens_q is None else cu_seqlens_q
    for request, (first, stop) in enumerate(_spans(starts, spec.total_q_len)):
        q_len = stop - first
        mine = slice(first, first + min(q_len, spec.max_q_len))
        length = max(0, min(int(seq_lens[request]), spec.max_pages * spec.page_size))
        keys = _keys(spec, kv_cache, block_tables[request], length).to(dtype)
        token = torch.arange(q_len, device=q.device)[: spec.max_q_len]
        if visible_lens is not None:
            stops = visible_lens.flatten()[mine]
        else:
            stops = length - (q_len - 1) + token if spec.causal else torch.full_like(token, length)
        position = torch.arange(length, device=q.device)
        visible = position < stops[:, None]
        # NaN and infinity in a key reach the queries that see it through their scores (unless a score is -inf, whose
        # weight is 0). As values they are 0, because a weight of 0 times either would be NaN for all other queries.
        latents = keys[:, None, : spec.latent_dim]
        latents = torch.where(latents.isfinite(), latents, 0)
        found = _attend(rows[mine].to(dtype), keys[:, None], latents, visible, logit_scale, out_scale)
        out[mine], lse[mine] = found
    out = out.reshape(*q.shape[:-1], spec.latent_dim).to(DTYPES[spec.out_dtype])
    return out, lse.reshape(q.shape[:-1]).to(DTYPES[spec.lse_dtype])


@in_own_precision
def mla_prefill(
    spec: PrefillSpec,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    logit_scale: Scale,
    out_scale: Scale,
    *,
    selection: torch.Tensor | None = None,
    selection_rows: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out, lse and max_logits (-inf if the call asks for none) of mla_prefill; the scales are what logits and outputs
    are multiplied by."""
    dtype = accumulation_dtype(spec.q_dtype)
    out = torch.zeros((*q.shape[:2], spec.v_head_dim), dtype=dtype, device=q.device)
    lse, greatest = (torch.full(q.shape[:2], -torch.inf, dtype=dtype, device=q.device) for _ in range(2))
    for mine, theirs, visible in _requests(spec, cu_seqlens_q, cu_seqlens_kv, selection, selection_rows):
        query, key, value = q[mine].to(dtype), k[theirs].to(dtype), v[theirs].to(dtype)
        found, sums = _attend(query, key, value, visible, logit_scale, out_scale)
        if sinks is not None:
            found = found * prefill_sinks.share(sums, sinks)[..., None]
        out[mine], lse[mine] = found, sums
        if spec.max_logits:
            greatest[mine] = _greatest(query, key, visible, logit_scale)
    lse_dtype = DTYPES[spec.lse_dtype]
    return out.to(DTYPES[spec.out_dtype]), lse.to(lse_dtype), greatest.to(lse_dtype)


@torch.no_grad()
def _greatest(q: torch.Tensor, k: torch.Tensor, visible: torch.Tensor, logit_scale: Scale) -> torch.Tensor:
    """The greatest scaled logit of each row and head [S, H]; -inf for rows that see no key, NaN where lse is."""
    if not (q.shape[0] and k.shape[0]):
        return q.new_full(q.shape[:2], -torch.inf)
    scores = torch.einsum("shd,khd->shk", q, k) * logit_scale
    maximum = scores.masked_fill(~visible[:, None, :], -torch.inf).amax(-1)
    unsound = (maximum == torch.inf) | ((maximum == -torch.inf) & visible.any(-1)[:, None])
    return maximum.masked_fill(unsound, torch.nan)


@in_own_precision
def mla_prefill_backward(
    spec: PrefillSpec,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    logit_scale: Scale,
    out_scale: Scale,
    *,
    selection: torch.Tensor | None = None,
    selection_rows: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The gradients of q, k, v and the sinks, in the dtypes of these, from mla_prefill's results and their
    cotangents."""
    dtype = accumulation_dtype(spec.q_dtype)
    d_sinks = None
    if sinks is not None:
        d_sinks = prefill_sinks.d_sinks(lse.to(dtype), out.to(dtype), dout.to(dtype), sinks)
        dout = dout.to(dtype) * prefill_sinks.share(lse.to(dtype), sinks)[..., None]
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
    # d scores = weights * (d weights - shift): the softmax's own term, and lse's direct one.
    shift = (dout.to(dtype) * out.to(dtype)).sum(-1) - dlse.to(dtype)
    for mine, theirs, visible in _requests(spec, cu_seqlens_q, cu_seqlens_kv, selection, selection_rows):
        query, d_rows, key, value = (x.to(dtype) for x in (q[mine], dout[mine], k[theirs], v[theirs]))
        hidden = ~visible[:, None, :]
        scores = torch.einsum("shd,khd->shk", query, key) * logit_scale
        weights = torch.exp(scores - lse[mine].to(dtype)[..., None]).masked_fill(hidden, 0)
        d_weights = torch.einsum("shv,khv->shk", d_rows, value) * out_scale
        d_scores = (weights * (d_weights - shift[mine][..., None])).masked_fill(hidden, 0) * logit_scale
        dq[mine] = torch.einsum("shk,khd->shd", d_scores, key)
        dk[theirs] = torch.einsum("shk,shd->khd", d_scores, query)
        dv[theirs] = torch.einsum("shk,shv->khv", weights, d_rows) * out_scale
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_sinks


def _requests(
    spec: PrefillSpec,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    selection: torch.Tensor | None,
    selection_rows: torch.Tensor | None,
) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """For each request the rows of its queries, the rows of its keys, and which query sees which key [S, K]."""
    queries, keys = _spans(cu_seqlens_q, spec.total_q_len), _spans(cu_seqlens_kv, spec.total_kv_len)
    for (first_q, stop_q), (first_k, stop_k) in zip(queries, keys, strict=True):
        q_len, kv_len = stop_q - first_q, stop_k - first_k
        mine = slice(first_q, first_q + min(q_len, spec.max_q_len))
        theirs = slice(first_k, first_k + min(kv_len, spec.max_kv_len))
        position = torch.arange(kv_len, device=cu_seqlens_q.device)[: spec.max_kv_len]
        token = torch.arange(q_len, device=cu_seqlens_q.device)[: spec.max_q_len]
        last = token + (kv_len - q_len) if spec.causal else torch.full_like(token, kv_len)
        visible = position <= last[:, None]
        if selection is not None:
            rows = torch.arange(mine.start, mine.stop, device=token.device)
            rows = rows if selection_rows is None else selection_rows[rows]
            visible &= selected(selection, rows, position)
        yield mine, theirs, visible


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    logit_scale: Scale,
    out_scale: Scale,
) -> Computed:
    """out [S, H, L] and lse [S, H] of q [S, H, D], k [K, H or 1, D] and v [K, H or 1, L], for visible [S, K]."""
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


def write_kv_cache(
    spec: CacheWriteSpec,
    kv_cache: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    kv_scale: Scale | None,
) -> None:
    """The definition of the operation of the same name: the write, in place. Needs at least one token and one page."""
    rows = latent if k_rope is None else torch.cat((latent, k_rope), -1)
    put_rows(kv_cache.detach(), to_cache_dtype(rows.detach(), kv_scale, spec.kv_dtype), slot_mapping)


def put_rows(cache: torch.Tensor, rows: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write rows [T, D] into the slots of cache [P, Z, D], which has their dtype and any strides. Slots outside of the
    cache are skipped. Needs at least one row and one page."""
    num_pages, page_size, _ = cache.shape
    target, source, any_legal = targets(slot_mapping, num_pages * page_size)
    page, offset = target.div(page_size, rounding_mode="floor"), target % page_size
    # As integers: not every release of torch indexes float8.
    bits = _BITS[rows.element_size()]
    cache, rows = cache.view(bits), rows.view(bits)[source]
    cache[page, offset] = torch.where(any_legal, rows, cache[0, 0])


def targets(slot_mapping: torch.Tensor, num_slots: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For each token: the slot to write, the token whose row goes there, and whether any token is written at all. A
    token to skip repeats the write of another one, so the host needs no count. If all are to be skipped, they write
    back what slot 0 holds."""
    slots = slot_mapping.long()
    legal = (slots >= 0) & (slots < num_slots)
    source = torch.where(legal, torch.arange(len(slots), device=slots.device), legal.int().argmax())
    return torch.where(legal.any(), slots[source], 0), source, legal.any()


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def to_cache_dtype(x: torch.Tensor, scale: Scale | None, dtype: str) -> torch.Tensor:
    """x * (1 / scale) in float32 (float64 for float64), rounded to nearest even, from float64 to 16 or 8 bits by way of
    float32; fp8 saturates at +-448."""
    wide = accumulation_dtype(dtype_name(x.dtype))
    if scale is not None:
        x = x.to(wide) * _reciprocal(scale, wide)
    if dtype == FP8:
        # The conversion itself turns values out of range into NaN.
        x = x.to(wide).clamp(-FP8_MAX, FP8_MAX)
    return x.to(DTYPES[dtype])


def _reciprocal(scale: Scale, dtype: torch.dtype) -> Any:
    """1 / scale, rounded in `dtype`: numbers too, so that both front ends write the same bits."""
    if isinstance(scale, torch.Tensor):
        return 1 / scale.to(dtype)
    return 1 / ctypes.c_float(scale).value if dtype == torch.float32 else 1 / scale


def gather_kv_cache(
    spec: CacheGatherSpec,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    starts: torch.Tensor,
    lens: torch.Tensor,
    kv_scale: Scale | None,
) -> torch.Tensor:
    """The result of gather_kv_cache, which has at least one row, from a cache of at least one page."""
    ends = lens.cumsum(0)
    row = torch.arange(spec.total_len, device=lens.device)
    request = torch.searchsorted(ends, row, right=True).clamp(max=spec.batch - 1)
    token = starts[request] + row - (ends - lens)[request]
    owned = (row < ends[-1]) & (token >= 0) & (token < spec.max_pages * spec.page_size)
    token = torch.where(owned, token, 0)
    page = block_tables[request, token.div(spec.page_size, rounding_mode="floor")]
    page = torch.where(owned, page.clamp(0, spec.num_pages - 1), 0)
    offset = token % spec.page_size
    if spec.kv_dtype == FP8:
        rows = kv_cache.view(torch.uint8)[page, offset].view(kv_cache.dtype)
    else:
        rows = kv_cache[page, offset]
    if kv_scale is not None:
        rows = rows.to(accumulation_dtype(spec.kv_dtype)) * kv_scale
    return torch.where(owned[:, None], rows.to(DTYPES[spec.out_dtype]), 0)


def merge_attention_states(spec: MergeSpec, outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> Computed:
    """out and lse of merge_attention_states."""
    dtype = DTYPES[spec.sum_dtype]
    lse = torch.stack([part.to(dtype) for part in lses])
    lse = lse.masked_fill(lse == torch.inf, -torch.inf)  # FlashAttention and FlashMLA write +inf where no key is seen
    maximum = lse.amax(0).detach()
    nothing = maximum == -torch.inf
    maximum = maximum.masked_fill(nothing, 0)  # a row that no part saw has no maximum; 0 avoids inf - inf
    # Shares of the sum, not exp(part - lse): rounding lse would cost 1e-4 of a weight at |lse| = 3000.
    terms = torch.exp(lse - maximum)
    total = terms.sum(0).masked_fill(nothing, 1)
    merged = sum(
        part.to(dtype).masked_fill((weight == 0)[..., None], 0) * weight[..., None]  # a part without weight may be NaN
        for part, weight in zip(outs, terms / total, strict=True)
    )
    assert isinstance(merged, torch.Tensor)
    merged_lse = (maximum + total.log()).masked_fill(nothing, -torch.inf)
    # Dense, as the kernel's results are, whatever the parts' strides.
    return merged.to(DTYPES[spec.out_dtype]).contiguous(), merged_lse.to(DTYPES[spec.lse_dtype]).contiguous()


@in_own_precision
def indexer_logits(
    spec: IndexerLogitsSpec,
    q: torch.Tensor,
    weights: torch.Tensor,
    k_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
) -> torch.Tensor:
    """logits [T, M * Z] of indexer_logits."""
    num_keys = spec.max_pages * spec.cache.page_size
    if 0 in (spec.num_tokens, spec.num_requests, spec.cache.num_pages, num_keys):
        return torch.full((spec.num_tokens, num_keys), -torch.inf, dtype=torch.float32, device=q.device)
    if cu_seqlens_q is not None:
        request, seq_lens = seen_keys(seq_lens, cu_seqlens_q, spec.num_tokens)
        block_tables = block_tables[request]
    position = torch.arange(num_keys, device=q.device)
    rows = []
    for token in range(spec.num_tokens):
        keys, scales = _indexer_keys(spec, k_cache, block_tables[token])
        unused = position >= seq_lens[token]
        keys = keys.masked_fill(unused[:, None], 0)  # NaN there would be 0 * NaN in a derivative, and that is NaN
        if isinstance(scales, torch.Tensor):
            scales = scales.masked_fill(unused, 0)
        heads = torch.relu(keys @ q[token].float().T)
        logits = heads @ weights[token].float() * scales
        rows.append(logits.masked_fill(unused, -torch.inf))
    return torch.stack(rows)


def seen_keys(seq_lens: torch.Tensor, cu_seqlens_q: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The request of each of num_tokens packed query tokens, and how many keys the token sees: token i of a request of
    S tokens sees its first seq_len - (S - 1) + i keys. Rows that belong to no request see none."""
    ends = cu_seqlens_q[1:]
    rows_through = torch.arange(1, num_tokens + 1, dtype=torch.int32, device=seq_lens.device)  # up to and with each row
    request = torch.bucketize(rows_through, ends, out_int32=True)
    first_keys = torch.nn.functional.pad(seq_lens - ends, (0, 1), value=-num_tokens)
    seen = (first_keys[request] + rows_through).clamp(min=0).masked_fill(rows_through <= cu_seqlens_q[0], 0)
    return request.clamp(max=ends.shape[0] - 1), seen


def _indexer_keys(
    spec: IndexerLogitsSpec, k_cache: torch.Tensor, table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | float]:
    """The keys [M * Z, Di] of one row of the block table in float32, and their scales [M * Z], 1.0 in a plain cache."""
    pages = table.long().clamp(0, spec.cache.num_pages - 1)
    if not spec.cache.packed:
        # Float8 as integers, because not every release of torch indexes it; these have no derivative, floats have one.
        is_fp8 = k_cache.element_size() == 1
        keys = k_cache.view(torch.uint8)[pages].view(k_cache.dtype) if is_fp8 else k_cache[pages]
        return keys.float().reshape(-1, spec.head_dim), 1.0
    raw = k_cache.reshape(spec.cache.num_pages, -1)[pages]
    scales_at = spec.cache.page_size * spec.head_dim
    keys = raw[:, :scales_at].contiguous().view(torch.float8_e4m3fn).float().reshape(-1, spec.head_dim)
    return keys, raw[:, scales_at:].contiguous().view(torch.float32).reshape(-1)

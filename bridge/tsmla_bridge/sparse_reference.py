"""The sparse operations' definitions, in torch operations. They mean what tsmla_jax's mean, read no value on the host,
and can be captured into CUDA graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from tsmla_bridge import selection_reference
from tsmla_bridge.reference import indexer_logits, put_rows, seen_keys, targets, to_cache_dtype
from tsmla_bridge.runtime.devices import in_own_precision
from tsmla_bridge.runtime.scales import Factors
from tsmla_bridge.runtime.tensors import DTYPES, accumulation_dtype, dtype_name
from tsmla_kernels.contract import FP8_MAX
from tsmla_kernels.contract.layouts import INDEXER, V4_PACKED, V32_PACKED, CacheSpec, valid_slots
from tsmla_kernels.contract.packed import IndexerQuantizeSpec, IndexerWriteSpec, PackedWriteSpec, Rotation
from tsmla_kernels.contract.sparse import IndexerTopkSpec, SparseMLASpec, TopKSpec
from tsmla_kernels.topk.chunks import chunk_rows, logits_of_rows

_MANTISSA_BITS = 23
_MANTISSA_MASK = (1 << _MANTISSA_BITS) - 1
_BIAS = 127
_FP8_MAX_EXPONENT = 8
_FP8_MAX_MANTISSA = 0x600000
BACKWARD_SCORES = 1 << 24
"""The most scores, or numbers of gathered keys, that an array in sparse_mla's gradient has, unless one token alone has
more."""


def select_topk(
    spec: TopKSpec,
    logits: torch.Tensor,
    seq_lens: torch.Tensor,
    row_starts: torch.Tensor | None,
    block_tables: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(positions or slots [T, k], or the words of the bits [T, W]; the counts of positions [T])."""
    column = torch.arange(spec.num_columns, device=logits.device, dtype=torch.int32)[None, :]
    most = torch.full_like(seq_lens, spec.num_columns)
    if row_starts is not None:
        starts = row_starts.clamp(0, spec.num_columns)
        column, most = column - starts[:, None], most - starts
    lens = torch.minimum(seq_lens.clamp(min=0), most)
    in_row = (column >= 0) & (column < lens[:, None])
    nan = logits.isnan()
    value = torch.where(in_row & ~nan, logits, -torch.inf)
    order = torch.sort(value, dim=1, descending=True, stable=True).indices
    for last in (nan, ~in_row):  # stable sorts: NaN goes behind numbers, and columns outside of the row behind all
        order = order.gather(1, torch.sort(last.gather(1, order).int(), dim=1, stable=True).indices)
    order = torch.nn.functional.pad(order[:, : spec.k], (0, max(0, spec.k - spec.num_columns)))
    if row_starts is not None:
        order = order - starts[:, None]
    inside = torch.arange(spec.k, device=logits.device) < lens[:, None]
    if spec.order == "position":
        order = torch.where(inside, order, torch.iinfo(torch.int32).max).sort(dim=1).values
    if block_tables is not None:
        width = block_tables.shape[1]
        if width == 0:
            inside = torch.zeros_like(inside)
        else:
            page = order // spec.page_size
            inside = inside & (page < width)
            pages = block_tables.gather(1, page.clamp(0, width - 1))
            order = pages * spec.page_size + order % spec.page_size
    found = torch.where(inside, order, -1).int()
    if spec.bits:
        found = selection_reference.selection_bits(spec.selection, found, None, None)
    return found, lens.clamp(max=spec.k)


def indexer_topk(
    spec: IndexerTopkSpec,
    q: torch.Tensor,
    weights: torch.Tensor,
    k_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(positions or slots [T, k] or words [T, W], the counts of positions [T], their scores [T, k] or, without
    return_scores, [T, 0]): select_topk of indexer_logits, by chunks of query tokens."""
    tokens, width = spec.logits.num_tokens, spec.k if spec.return_scores else 0
    if 0 in (tokens, spec.logits.num_requests, spec.num_columns):
        scores = weights.new_full((tokens, width), -torch.inf, dtype=torch.float32)
        nothing = seq_lens.new_full((tokens, spec.topk.width), 0 if spec.return_bits else -1)
        return nothing, seq_lens.new_zeros(tokens), scores
    request = None
    if cu_seqlens_q is not None:
        request, seq_lens = seen_keys(seq_lens, cu_seqlens_q, tokens)
    rows, found = chunk_rows(tokens, spec.num_columns), []
    for first in range(0, tokens, rows):
        chunk = slice(first, first + rows)
        tables, lens = block_tables[chunk if request is None else request[chunk]], seq_lens[chunk]
        count = len(lens)
        logits = indexer_logits(logits_of_rows(spec, count), q[chunk], weights[chunk], k_cache, tables, lens, None)
        of_topk = dataclasses.replace(spec.topk, num_tokens=count)
        selected, counts = select_topk(of_topk, logits, lens, None, tables if of_topk.page_size else None)
        scores = scores_at(logits, selected) if spec.return_scores else logits.new_empty(count, 0)
        if spec.return_slots and spec.return_scores:
            selected = slots_at(spec, selected, tables)
        found.append((selected, counts, scores))
    positions, counts, scores = (torch.cat(parts) for parts in zip(*found, strict=True))
    return positions, counts, scores


def scores_at(logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The logits at the selected positions [T, k], -inf where there is none."""
    return logits.gather(1, positions.clamp(min=0).long()).masked_fill(positions < 0, -torch.inf)


def slots_at(spec: IndexerTopkSpec, positions: torch.Tensor, block_tables: torch.Tensor) -> torch.Tensor:
    """The slots of the selected positions [T, k], each row with its block table; -1 where there is none."""
    page_size = spec.logits.cache.page_size
    page = positions.clamp(min=0) // page_size
    slots = block_tables.gather(1, page.long()) * page_size + positions % page_size
    return slots.masked_fill(positions < 0, -1)


def quantize_pow2(x: torch.Tensor, floor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x as e4m3 with one power-of-two scale over the last axis, and the scales: 2^ceil(log2(max(amax, floor) / 448)),
    computed on the bits."""
    x = x.float()
    bits = x.abs().amax(-1).clamp(min=floor).view(torch.int32)
    exponent = (bits >> _MANTISSA_BITS) - _BIAS - _FP8_MAX_EXPONENT
    exponent += ((bits & _MANTISSA_MASK) > _FP8_MAX_MANTISSA).int()
    inverse = ((_BIAS - exponent) << _MANTISSA_BITS).view(torch.float32)
    values = (x * inverse[..., None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return values, ((exponent + _BIAS) << _MANTISSA_BITS).view(torch.float32)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleave: bool, layout: str) -> torch.Tensor:
    """The vectors x [..., R] rotated in float32, as tsmla_jax's rotation does it."""
    wide, half = x.float(), x.shape[-1] // 2
    first, second = (wide[..., 0::2], wide[..., 1::2]) if interleave else (wide[..., :half], wide[..., half:])
    rotated = (first * cos - second * sin, second * cos + first * sin)
    if layout == "interleaved":
        return torch.stack(rotated, -1).reshape(x.shape)
    return torch.cat(rotated, -1)


def write_packed_kv_cache(
    spec: PackedWriteSpec,
    kv_cache: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
) -> None:
    """Write packed rows into kv_cache [P, Z, 656], in place."""
    if cos is not None and sin is not None:
        turned = rotate(k_rope, cos, sin, interleave=spec.rope_interleave, layout=spec.rope_layout)
        k_rope = turned.to(k_rope.dtype)
    groups = latent.reshape(-1, V32_PACKED.num_scales, V32_PACKED.group)
    values, scales = quantize_pow2(groups, V32_PACKED.floor)
    parts = (values.reshape(latent.shape), scales, k_rope.to(torch.bfloat16))
    rows = torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=-1)
    put_rows(kv_cache, rows, slot_mapping)


def write_indexer_cache(
    spec: IndexerWriteSpec,
    k_cache: torch.Tensor,
    k: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
) -> None:
    """Write the indexer's keys into k_cache, in place: packed pages, or floats."""
    k = _rotated(k, cos, sin, spec.rotation)
    if not spec.cache.packed:
        put_rows(k_cache, to_cache_dtype(k, None, dtype_name(k_cache.dtype)), slot_mapping)
        return
    values, scales = quantize_pow2(k, INDEXER.key_floor)
    raw = [part.contiguous().view(torch.uint8) for part in (values, scales[:, None])]
    put_sections(k_cache, raw, slot_mapping, spec.cache.page_size)


def indexer_quantize(
    spec: IndexerQuantizeSpec,
    q: torch.Tensor,
    weights: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The queries in e4m3, and the weights times the queries' scales and the logits' constant factor, in float32."""
    if cos is not None and sin is not None:
        cos, sin = cos[:, None], sin[:, None]
    values, scales = quantize_pow2(_rotated(q, cos, sin, spec.rotation), INDEXER.query_floor)
    constant = torch.tensor(spec.head_dim**-0.5 * spec.num_heads**-0.5, dtype=torch.float32, device="cpu")
    # Dense, as the kernel's results are, whatever the strides of q and weights.
    return values.contiguous(), (weights.float() * constant * scales).contiguous()


def _rotated(
    x: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None, rotation: Rotation | None
) -> torch.Tensor:
    """x; if there is a rotation, in float32 and with its columns rotated."""
    if rotation is None or cos is None or sin is None:
        return x
    end, interleave = rotation.offset + rotation.dim, rotation.layout == "interleaved"
    turned = rotate(x[..., rotation.offset : end], cos, sin, interleave=interleave, layout=rotation.layout)
    return torch.cat([x[..., : rotation.offset].float(), turned, x[..., end:].float()], -1)


def put_sections(cache: torch.Tensor, raw: Sequence[torch.Tensor], slot_mapping: torch.Tensor, page_size: int) -> None:
    """Write bytes into the slots of a packed cache, [P, bytes] or [P, Z, width] of any strides. A page has a
    section for each of `raw` [T, N], with N bytes for each of its rows. Slots outside of the cache are skipped."""
    slots, source, any_legal = targets(slot_mapping, cache.shape[0] * page_size)
    page, offset = (slots // page_size)[:, None], (slots % page_size)[:, None]
    begin = 0
    for part in raw:
        byte = begin + offset * part.shape[1] + torch.arange(part.shape[1], device=part.device)
        place = (page, byte) if cache.dim() == 2 else (page, byte // cache.shape[2], byte % cache.shape[2])
        cache[place] = torch.where(any_legal, part[source], cache[place])
        begin += page_size * part.shape[1]


@in_own_precision
def sparse_mla(
    spec: SparseMLASpec,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    compressed_kv_cache: torch.Tensor | None,
    indices: torch.Tensor,
    lengths: torch.Tensor | None,
    sinks: torch.Tensor | None,
    factors: Factors,
) -> tuple[torch.Tensor, ...]:
    """out, lse and, if the spec has them, max_logits of sparse_mla. Reads no value on the host; can be differentiated.

    factors: the factors of q . k, of the numbers in kv_cache, and of the numbers in compressed_kv_cache.
    """
    dtype = accumulation_dtype(spec.q_dtype)
    of_logits, of_first, of_second = factors
    sections = [(spec.cache, kv_cache, indices[:, : spec.window], of_first)]
    if spec.compressed is not None and compressed_kv_cache is not None:
        sections.append((spec.compressed, compressed_kv_cache, indices[:, spec.window :], of_second))
    parts, masks = [], []
    for cache_spec, cache, slots, factor in sections:
        valid = valid_slots(slots, cache_spec)
        # A cache's gradient adds up rows in the dtype that they are gathered in.
        wide = cache.to(dtype) if cache.requires_grad and torch.is_grad_enabled() else cache
        rows = rows_at(wide, torch.where(valid, slots, 0).long(), cache_spec).to(dtype) * factor
        parts.append(rows.masked_fill(~valid[..., None], 0))  # slot 0 stands in and may hold NaN, and 0 * NaN is NaN
        masks.append(valid)
    visible, kv = torch.cat(masks, 1), torch.cat(parts, 1)
    if lengths is not None:
        visible &= torch.arange(spec.num_selected, device=q.device) < lengths[:, None]
        kv = kv.masked_fill(~visible[..., None], 0)
    scores = (torch.einsum("thd,tkd->thk", q.to(dtype), kv) * of_logits).masked_fill(~visible[:, None], -torch.inf)
    seen = visible.any(-1)[:, None]
    # A row that sees nothing has no maximum; 0 stands in for it, so that no inf - inf arises.
    maximum = torch.where(seen, scores.amax(-1), 0).detach()
    weights = torch.exp(scores - maximum[..., None])
    total = torch.where(seen, weights.sum(-1), 1)
    out = torch.einsum("thk,tkl->thl", weights, kv[..., : spec.latent_dim]) / total[..., None]
    lse = maximum + torch.log(total)
    if sinks is not None:
        out = out * torch.sigmoid(lse - sinks.to(dtype))[..., None]
    results = out.to(DTYPES[spec.out_dtype]), lse.masked_fill(~seen, -torch.inf).to(DTYPES[spec.lse_dtype])
    if not spec.max_logits:
        return results
    greatest = (maximum + (total - total).detach()).masked_fill(~seen, -torch.inf)  # NaN where lse is NaN
    return *results, greatest.to(DTYPES[spec.lse_dtype])


@in_own_precision
def sparse_mla_backward(
    spec: SparseMLASpec,
    out: torch.Tensor,
    lse: torch.Tensor,
    d_out: torch.Tensor,
    d_lse: torch.Tensor,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    compressed_kv_cache: torch.Tensor | None,
    indices: torch.Tensor,
    lengths: torch.Tensor | None,
    sinks: torch.Tensor | None,
    factors: Factors,
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of q, kv_cache, compressed_kv_cache and sinks over plain caches (None for one that wasn't given),
    from the results and their cotangents. Computed by chunks of tokens: each array of scores or of gathered keys has at
    most BACKWARD_SCORES numbers, or those of one token.
    """
    dtype = accumulation_dtype(spec.q_dtype)
    caches = [cache for cache in (kv_cache, compressed_kv_cache) if cache is not None]
    bounds = ((0, spec.window), (spec.window, spec.num_selected))
    d_q = torch.zeros_like(q, dtype=dtype, memory_format=torch.contiguous_format)
    d_caches = [cache.new_zeros(cache.shape, dtype=dtype).flatten(0, 1) for cache in caches]
    d_sinks = None if sinks is None else torch.zeros_like(sinks, dtype=dtype)
    widest = max(spec.num_heads, spec.head_dim) * spec.num_selected
    step = max(1, BACKWARD_SCORES // max(1, widest))
    for first in range(0, spec.num_tokens, step):
        rows = slice(first, first + step)
        query, d_rows = q[rows].to(dtype), d_out[rows].to(dtype)
        dots = (out[rows].to(dtype) * d_rows).sum(-1)
        seen = lse[rows] != -torch.inf
        log, share = torch.where(seen, lse[rows].to(dtype), 0), torch.ones((), dtype=dtype, device=q.device)
        if sinks is not None and d_sinks is not None:
            share = torch.sigmoid(log - sinks.to(dtype))
            d_sinks -= torch.where(seen, dots * torch.sigmoid(sinks.to(dtype) - log), 0).sum(0)
        shift = (d_lse[rows].to(dtype) - share * dots)[..., None]
        share = share.expand_as(log)[..., None]
        for (begin, end), cache, d_cache, factor, cache_spec in zip(
            bounds, caches, d_caches, factors[1:], spec.caches, strict=False
        ):
            slots = indices[rows, begin:end]
            valid = valid_slots(slots, cache_spec)
            if lengths is not None:
                valid &= torch.arange(begin, end, device=q.device) < lengths[rows, None]
            slots = torch.where(valid, slots, 0).long()
            kv = (cache.flatten(0, 1)[slots].to(dtype) * factor).masked_fill(~valid[..., None], 0)
            power = torch.einsum("thd,tkd->thk", query, kv) * factors[0] - log[..., None]
            weights = torch.exp(power).masked_fill(~(valid[:, None] & seen[..., None]), 0)
            d_weights = torch.einsum("thl,tkl->thk", d_rows, kv[..., : spec.latent_dim])
            d_scores = (weights * (share * d_weights + shift)).masked_fill(weights == 0, 0) * factors[0]
            d_q[rows] += torch.einsum("thk,tkd->thd", d_scores, kv)
            d_kv = torch.einsum("thk,thd->tkd", d_scores, query)
            d_kv[..., : spec.latent_dim] += torch.einsum("thk,thl->tkl", weights * share, d_rows)
            d_kv = (d_kv * factor).masked_fill(~valid[..., None], 0)
            d_cache.index_put_((slots.flatten(),), d_kv.flatten(0, 1), accumulate=True)
    of_caches = [d.view(cache.shape).to(cache.dtype) for d, cache in zip(d_caches, caches, strict=True)]
    of_sinks = None if d_sinks is None or sinks is None else d_sinks.to(sinks.dtype)
    return d_q.to(q.dtype), of_caches[0], of_caches[1] if len(of_caches) > 1 else None, of_sinks


def rows_at(cache: torch.Tensor, slots: torch.Tensor, spec: CacheSpec) -> torch.Tensor:
    """The rows [..., D] of these slots, in float32 where they are packed; without the scale of a plain cache."""
    page, offset = slots.div(spec.span, rounding_mode="floor"), slots % spec.span
    if spec.layout == "plain":
        if cache.element_size() == 1:  # not every release of torch indexes float8
            return cache.view(torch.uint8)[page, offset].view(cache.dtype)
        return cache[page, offset]
    if spec.layout == "v32":
        rows = cache[page, offset]
        latent, scales = V32_PACKED.latent_dim, 4 * V32_PACKED.num_scales
        values, factors, rope = rows.split((latent, scales, rows.shape[-1] - latent - scales), -1)
        return _scaled(values, _as(factors, torch.float32), rope)
    size, nope = V4_PACKED.data_row_bytes, V4_PACKED.nope_dim
    data, scales = cache.split((spec.page_size * size, cache.shape[1] - spec.page_size * size), 1)
    rows = data.unflatten(1, (spec.page_size, size))[page, offset]
    exponents = scales[:, : spec.page_size * V4_PACKED.scale_row_bytes].unflatten(1, (spec.page_size, -1))[page, offset]
    codes = exponents[..., : V4_PACKED.num_scales]
    factors = torch.exp2(codes.float() - 127).masked_fill(codes == 255, torch.nan)  # 255 is the NaN of UE8M0
    return _scaled(rows[..., :nope], factors, rows[..., nope:])


def _scaled(values: torch.Tensor, factors: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Bytes of e4m3 [..., N], factors of groups [..., G] and bytes of bfloat16 as float32 [..., N + R]."""
    groups = _as(values, torch.float8_e4m3fn).float().unflatten(-1, (factors.shape[-1], -1))
    return torch.cat(((groups * factors[..., None]).flatten(-2), _as(rope, torch.bfloat16).float()), -1)


def _as(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes as numbers of another dtype."""
    return data.contiguous().view(dtype)

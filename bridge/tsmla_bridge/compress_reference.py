"""The definition of compress_write_kv_cache in torch operations. It reads no value on the host, and can be captured
into CUDA graphs."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tsmla_bridge.reference import put_rows, targets
from tsmla_bridge.runtime.tensors import DTYPES, Scale
from tsmla_bridge.sparse_reference import put_sections, quantize_pow2, rotate
from tsmla_kernels.contract import FP8, FP8_MAX
from tsmla_kernels.contract.compress import CompressWriteSpec
from tsmla_kernels.contract.layouts import INDEXER, V4_PACKED


class Arrays(NamedTuple):
    """The tensors of a call. cache, state and positions are written in place."""

    cache: torch.Tensor
    state: torch.Tensor
    positions: torch.Tensor
    kv_score: torch.Tensor
    ape: torch.Tensor
    state_slots: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    norm_weight: torch.Tensor
    cos_sin: torch.Tensor
    block_tables: torch.Tensor


def compress_write_kv_cache(spec: CompressWriteSpec, arrays: Arrays, kv_scale: Scale | None) -> None:
    """Pool, norm, rotate, quantise and write the entries that the new tokens complete, then the new state."""
    ratio = spec.compress.ratio
    requests, entries, complete = _entries(spec, arrays)
    pooled = _pooled(spec, arrays, requests, entries)
    rows = pooled * torch.rsqrt(pooled.square().mean(-1, keepdim=True) + spec.eps) * arrays.norm_weight.float()
    first = (entries * ratio).clamp(0, arrays.cos_sin.shape[0] - 1)
    cos, sin = arrays.cos_sin[first].chunk(2, dim=-1)
    nope, rope = rows.split([rows.shape[1] - spec.rope_dim, spec.rope_dim], dim=-1)
    rows = torch.cat([nope, rotate(rope, cos, sin, interleave=True, layout="interleaved")], -1)
    slots = _slots(spec, arrays.block_tables, requests, entries, complete)
    _write_rows(spec, arrays.cache, rows, slots, kv_scale)
    _keep(spec, arrays)


def _entries(spec: CompressWriteSpec, arrays: Arrays) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For E places, one for every entry that a call can complete: the request, the entry's index among the request's
    entries, and whether it is complete, [E] each. Request r's first place is cu_seqlens_q[r] // ratio + r."""
    compress, offsets = spec.compress, arrays.cu_seqlens_q.long()
    places = torch.arange(compress.num_tokens // compress.ratio + compress.num_requests, device=offsets.device)
    first = offsets[:-1] // compress.ratio + torch.arange(compress.num_requests, device=offsets.device)
    request = torch.searchsorted(first, places, right=True) - 1
    lens = arrays.seq_lens.long()
    begun = (lens - offsets.diff()) // compress.ratio
    entry = begun[request] + places - first[request]
    # Rows of kv_score before the first request have places, too, but complete nothing.
    return request, entry, (entry < (lens // compress.ratio)[request]) & (places >= first[0])


def _pooled(spec: CompressWriteSpec, arrays: Arrays, request: torch.Tensor, entry: torch.Tensor) -> torch.Tensor:
    """The softmax-weighted sum of each entry's window, [E, C]."""
    compress = spec.compress
    ratio, window, channels, series = compress.ratio, compress.window, compress.channels, compress.overlap
    row = torch.arange(window, device=entry.device)
    position = (entry[:, None] + 1) * ratio - window + row
    offsets, lens = arrays.cu_seqlens_q.long(), arrays.seq_lens.long()
    start = (lens - offsets.diff())[request][:, None]
    token = (offsets[request][:, None] + position - start).clamp(0, compress.num_tokens - 1)
    held = arrays.state_slots.long()[request].clamp(0, compress.num_states - 1)[:, None]
    new = arrays.kv_score.reshape(compress.num_tokens, 2, series, channels)
    old = arrays.state.reshape(compress.num_states, compress.ring, 2, series, channels)
    of_series = (row // ratio).expand_as(position)
    bias = arrays.ape.reshape(ratio, series, channels)[row % ratio, row // ratio]
    is_new = (position >= start)[..., None]
    ring = position % compress.ring
    kv = torch.where(is_new, new[token, 0, of_series], old[held, ring, 0, of_series])
    score = torch.where(is_new, new[token, 1, of_series] + bias, old[held, ring, 1, of_series])
    seen = (position >= 0)[..., None]
    weights = torch.softmax(torch.where(seen, score, -torch.inf), dim=1)
    return (weights * torch.where(seen, kv, 0)).sum(1)


def _slots(
    spec: CompressWriteSpec,
    block_tables: torch.Tensor,
    request: torch.Tensor,
    entry: torch.Tensor,
    complete: torch.Tensor,
) -> torch.Tensor:
    """The slot of each entry; -1 for an entry that is not complete or has no page."""
    width = block_tables.shape[1]
    if width == 0:
        return torch.full_like(entry, -1)
    column = entry // spec.page_size
    inside = complete & (column < width)
    page = block_tables[request, column.clamp(0, width - 1)].long()
    inside = inside & (page >= 0) & (page < spec.num_pages)
    return torch.where(inside, page * spec.page_size + entry % spec.page_size, -1)


def _write_rows(
    spec: CompressWriteSpec, cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, kv_scale: Scale | None
) -> None:
    """Quantise rows [E, C] as the cache asks for, and put them into their slots."""
    if spec.cache == "v4":
        groups = rows[:, : V4_PACKED.nope_dim].reshape(len(rows), V4_PACKED.num_scales, V4_PACKED.group)
        values, scales = quantize_pow2(groups, V4_PACKED.floor)
        # the exponents of powers of two with their bias, as UE8M0 stores them
        exponents = scales.view(torch.int32) >> 23
        unused = V4_PACKED.scale_row_bytes - V4_PACKED.num_scales
        parts = [values.reshape(len(rows), -1), rows[:, V4_PACKED.nope_dim :].to(torch.bfloat16)]
        data = torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1)
        raw = [data, torch.nn.functional.pad(exponents, (0, unused)).to(torch.uint8)]
    elif spec.cache == "indexer":
        values, scales = quantize_pow2(rows, INDEXER.key_floor)
        raw = [values.view(torch.uint8), scales[:, None].view(torch.uint8)]
    else:
        if spec.cache == FP8:
            # Filled on the device: a graph's capture refuses a copy from the host's memory.
            if not isinstance(kv_scale, torch.Tensor):
                number = 1.0 if kv_scale is None else kv_scale
                kv_scale = torch.full((), number, dtype=torch.float32, device=rows.device)
            divisor = kv_scale.to(rows.device, torch.float32)
            rows = (rows.to(torch.bfloat16).float() / divisor).clamp(-FP8_MAX, FP8_MAX)
        put_rows(cache, rows.to(DTYPES[spec.cache]), slots)
        return
    put_sections(cache, raw, slots, spec.page_size)


def _keep(spec: CompressWriteSpec, arrays: Arrays) -> None:
    """Write each request's last new tokens, the scores with their bias, and their positions into its ring."""
    compress = spec.compress
    offsets, lens = arrays.cu_seqlens_q.long(), arrays.seq_lens.long()
    token = torch.arange(compress.num_tokens, device=offsets.device)
    request = torch.searchsorted(offsets[1:].contiguous(), token, right=True).clamp(max=compress.num_requests - 1)
    position = (lens - offsets.diff())[request] + token - offsets[request]
    held = arrays.state_slots.long()[request]
    kept = (token >= offsets[0]) & (token < offsets[-1]) & (position >= lens[request] - compress.ring)
    kept = kept & (held >= 0) & (held < compress.num_states)
    place = torch.where(kept, held * compress.ring + position % compress.ring, -1)
    place, source, any_legal = targets(place, compress.num_states * compress.ring)
    state, slot = place // compress.ring, place % compress.ring
    new = arrays.kv_score.clone()
    new[:, 1] += arrays.ape[position % compress.ratio]
    arrays.state[state, slot] = torch.where(any_legal, new[source], arrays.state[0, 0])
    arrays.positions[state, slot] = torch.where(any_legal, position[source].int(), arrays.positions[0, 0])

"""write_kv_cache and gather_kv_cache on torch tensors: rows into and out of the paged cache.

Plain torch operations for now, on CPUs and GPUs alike: they read no value on the host, so they can be captured into
CUDA graphs.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from tsmla_bridge import checks, ops, tensors
from tsmla_bridge.tensors import DTYPES, Scale, accumulation_dtype
from tsmla_kernels import contract, data_checks
from tsmla_kernels.contract import FP8, FP8_MAX


def write_kv_cache(
    kv_cache: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    *,
    kv_scale: Scale | None = None,
) -> torch.Tensor:
    """[latent | k_rope] / kv_scale written to the given slots of the cache, in place (slot mapping as in vLLM).

    Args:
      kv_cache: [P, Z, D] or [P, 1, Z, D] with D = L + R, of any strides; float16, bfloat16, float8_e4m3fn, float32 or
        float64.
      latent: [T, L], the normalised latents; float16, bfloat16, float32 or float64.
      k_rope: [T, R] in latent's dtype, already rotated; None when D = L.
      slot_mapping: [T] int32, slot = page * Z + offset; -1 skips the token. Slots must differ; of two tokens with one
        slot either may stay.
      kv_scale: divisor before the conversion; float or float32 scalar tensor; None is 1.

    Returns:
      kv_cache itself. Rows are multiplied by 1 / kv_scale in float32 and rounded to nearest even; an fp8 cache
      saturates at +-448 (infinities too), so only a NaN input gives a NaN.

    Raises:
      TypeError, ValueError: an argument is not legal; the message names it, what it got and what is legal.
    """
    if torch.compiler.is_compiling() or ops.is_traced(kv_cache, latent):
        torch.ops.tsmla.write_kv_cache(kv_cache, latent, k_rope, slot_mapping, *ops.scale_arguments(kv_scale))
    else:
        write(kv_cache, latent, k_rope, slot_mapping, kv_scale)
    return kv_cache


def write(
    kv_cache: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    kv_scale: Scale | None,
) -> None:
    """An eager call of write_kv_cache."""
    kv_cache = tensors.without_head_axis(kv_cache)
    spec = contract.cache_write_spec(
        kv_cache=tensors.describe("kv_cache", kv_cache),
        latent=tensors.describe("latent", latent),
        k_rope=tensors.describe_optional("k_rope", k_rope),
        slot_mapping=tensors.describe("slot_mapping", slot_mapping),
        kv_scale=tensors.describe_scale("kv_scale", kv_scale),
    )
    others = {"latent": latent, "k_rope": k_rope, "slot_mapping": slot_mapping, "kv_scale": kv_scale}
    tensors.same_device("kv_cache", kv_cache, others)
    checks.values(data_checks.cache_write, spec, slot_mapping)
    if 0 in (spec.num_tokens, spec.num_pages):
        return
    rows = latent if k_rope is None else torch.cat((latent, k_rope), -1)
    rows = to_cache_dtype(rows.detach(), kv_scale, spec.kv_dtype)
    slots = slot_mapping.long()
    page = slots.div(spec.page_size, rounding_mode="floor")
    legal = (slots >= 0) & (page < spec.num_pages)
    # A token to skip repeats the write of one that isn't: nothing is left out, so no count is needed on the host. If
    # there is none, all write back what the first slot holds.
    first = legal.int().argmax()
    source = torch.where(legal, torch.arange(len(slots), device=slots.device), first)
    target = torch.where(legal.any(), slots[source], 0)
    page, offset = target.div(spec.page_size, rounding_mode="floor"), target % spec.page_size
    # As integers: torch has no indexed writes of float8.
    bits = _BITS[rows.element_size()]
    cache, rows = kv_cache.detach().view(bits), rows.view(bits)[source]
    cache[page, offset] = torch.where(legal.any(), rows, cache[0, 0])


def gather_kv_cache(
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    starts: torch.Tensor,
    lens: torch.Tensor,
    *,
    total_len: int,
    kv_scale: Scale | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Tokens starts[b] to starts[b] + lens[b] of each request, packed one request after the other and multiplied by
    kv_scale: the context that chunked prefill expands (as vLLM's gather of the MLA cache, which this also dequantises).

    Args:
      kv_cache: [P, Z, D] or [P, 1, Z, D], of any strides; float16, bfloat16, float8_e4m3fn, float32 or float64.
      block_tables: [B, M] int32; entries that no asked-for token lies in are never used.
      starts, lens: [B] int32; a length of 0 is legal. The offsets of the rows are those of cumsum(lens).
      total_len: number of rows of the result; rows past sum(lens) are 0.
      kv_scale: float or float32 scalar tensor; None is 1.
      out_dtype: float16, bfloat16, float32 or float64; None is the cache's dtype, bfloat16 for an fp8 cache.

    Returns:
      [total_len, D] in out_dtype, latent columns first. The product with kv_scale is in float32.

    Raises:
      TypeError, ValueError: an argument is not legal; the message names it, what it got and what is legal.
    """
    if torch.compiler.is_compiling() or ops.is_traced(kv_cache):
        scale = ops.scale_arguments(kv_scale)
        return torch.ops.tsmla.gather_kv_cache(kv_cache, block_tables, starts, lens, total_len, *scale, out_dtype)
    return gather(kv_cache, block_tables, starts, lens, total_len, kv_scale, out_dtype)


def gather(
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    starts: torch.Tensor,
    lens: torch.Tensor,
    total_len: int,
    kv_scale: Scale | None,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    """An eager call of gather_kv_cache."""
    kv_cache = tensors.without_head_axis(kv_cache)
    spec = contract.cache_gather_spec(
        kv_cache=tensors.describe("kv_cache", kv_cache),
        block_tables=tensors.describe("block_tables", block_tables),
        starts=tensors.describe("starts", starts),
        lens=tensors.describe("lens", lens),
        total_len=total_len,
        kv_scale=tensors.describe_scale("kv_scale", kv_scale),
        out_dtype=None if out_dtype is None else tensors.dtype_name(out_dtype),
    )
    others = {"block_tables": block_tables, "starts": starts, "lens": lens, "kv_scale": kv_scale}
    tensors.same_device("kv_cache", kv_cache, others)
    checks.values(data_checks.cache_gather, spec, lens, starts, block_tables)
    dtype = DTYPES[spec.out_dtype]
    if 0 in (spec.batch, spec.total_len, spec.max_pages, spec.num_pages):
        return torch.zeros((spec.total_len, spec.head_dim), dtype=dtype, device=kv_cache.device)
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
    return torch.where(owned[:, None], rows.to(dtype), 0)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def to_cache_dtype(x: torch.Tensor, scale: Scale | None, dtype: str) -> torch.Tensor:
    """x * (1 / scale) in float32 (float64 for float64), rounded to nearest even; fp8 saturates at +-448."""
    wide = accumulation_dtype(tensors.dtype_name(x.dtype))
    if scale is not None:
        x = x.to(wide) * _reciprocal(scale, wide)
    if dtype == FP8:
        # The conversion itself turns what is out of range into NaN.
        x = x.to(wide).clamp(-FP8_MAX, FP8_MAX)
    return x.to(DTYPES[dtype])


def _reciprocal(scale: Scale, dtype: torch.dtype) -> Any:
    """1 / scale, rounded in `dtype`: numbers too, so that both front ends write the same bits."""
    if isinstance(scale, torch.Tensor):
        return 1 / scale.to(dtype)
    return 1 / ctypes.c_float(scale).value if dtype == torch.float32 else 1 / scale

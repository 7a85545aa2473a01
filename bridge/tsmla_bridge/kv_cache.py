"""write_kv_cache and gather_kv_cache on torch tensors: rows into and out of the paged cache.

On a Hopper GPU by the catalog's kernels, one launch each. In torch operations on CPUs and where the kernels can't serve
the call: a dtype or width that cache_ops.config refuses, a cache, table or list of slots with gaps, rows that don't
start at multiples of 16 bytes. Both give the same bits and read no value on the host, so both can be captured into CUDA
graphs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from tsmla_bridge import checks, devices, kernels, ops, scales, tensors
from tsmla_bridge.tensors import DTYPES, Scale, accumulation_dtype
from tsmla_kernels import contract
from tsmla_kernels.catalog import KERNELS
from tsmla_kernels.contract import FP8, FP8_MAX
from tsmla_kernels.contract import values as data_checks
from tsmla_kernels.launch import ArrayView


def write_kv_cache(
    kv_cache: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    *,
    kv_scale: Scale | None = None,
    implementation: str | None = None,
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
      implementation: "cute" (the kernel), "reference" (torch operations), or None: the kernel where it can run.

    Returns:
      kv_cache itself. Rows are multiplied by 1 / kv_scale in float32 and rounded to nearest even; an fp8 cache
      saturates at +-448 (infinities too), so only a NaN input gives a NaN.

    Raises:
      TypeError, ValueError: an argument is not legal; the message names it, what it got and what is legal.
      NotImplementedError: the named implementation can't run this call, with every reason.
    """
    if torch.compiler.is_compiling() or ops.is_traced(kv_cache, latent):
        scale = ops.scale_arguments(kv_scale)
        torch.ops.tsmla.write_kv_cache(kv_cache, latent, k_rope, slot_mapping, *scale, implementation)
    else:
        write(kv_cache, latent, k_rope, slot_mapping, kv_scale, implementation)
    return kv_cache


def write(
    kv_cache: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    kv_scale: Scale | None,
    implementation: str | None,
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
    given = {
        "kv_cache": kv_cache,
        "latent": latent,
        "k_rope": k_rope if spec.rope_dim and k_rope is not None else latent,
    }
    run = _kernel("write_kv_cache", spec, implementation, {**given, "slot_mapping": slot_mapping})
    checks.values(data_checks.cache_write, spec, slot_mapping)
    if 0 in (spec.num_tokens, spec.num_pages):
        return
    if run is not None:
        pages = kernels.view(kv_cache)
        # The kernel reads the first columns of rows that may be wider: the halves of a projection's output.
        wide = {name: kernels.view(x, (x.shape[0], x.stride(0))) for name, x in given.items() if name != "kv_cache"}
        inputs = {"kv_cache": pages, **wide, "slot_mapping": kernels.view(slot_mapping)}
        run(kv_scale, inputs, {"new_kv_cache": pages})
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
    implementation: str | None = None,
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
      implementation: "cute" (the kernel), "reference" (torch operations), or None: the kernel where it can run.

    Returns:
      [total_len, D] in out_dtype, latent columns first. The product with kv_scale is in float32.

    Raises:
      TypeError, ValueError: an argument is not legal; the message names it, what it got and what is legal.
      NotImplementedError: the named implementation can't run this call, with every reason.
    """
    if torch.compiler.is_compiling() or ops.is_traced(kv_cache):
        scale = ops.scale_arguments(kv_scale)
        return torch.ops.tsmla.gather_kv_cache(
            kv_cache, block_tables, starts, lens, total_len, *scale, out_dtype, implementation
        )
    return gather(kv_cache, block_tables, starts, lens, total_len, kv_scale, out_dtype, implementation)


def gather(
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    starts: torch.Tensor,
    lens: torch.Tensor,
    total_len: int,
    kv_scale: Scale | None,
    out_dtype: torch.dtype | None,
    implementation: str | None,
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
    given = {"kv_cache": kv_cache, "block_tables": block_tables, "starts": starts, "lens": lens}
    run = _kernel("gather_kv_cache", spec, implementation, given)
    checks.values(data_checks.cache_gather, spec, lens, starts, block_tables)
    dtype = DTYPES[spec.out_dtype]
    if 0 in (spec.batch, spec.total_len, spec.max_pages, spec.num_pages):
        return torch.zeros((spec.total_len, spec.head_dim), dtype=dtype, device=kv_cache.device)
    if run is not None:
        out = torch.empty((spec.total_len, spec.head_dim), dtype=dtype, device=kv_cache.device)
        run(kv_scale, {name: kernels.view(tensor) for name, tensor in given.items()}, {"out": kernels.view(out)})
        return out
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


Views = dict[str, ArrayView]


def _kernel(
    op: str, spec: Any, implementation: str | None, given: dict[str, torch.Tensor]
) -> Callable[[Scale | None, Views, Views], None] | None:
    """A function (kv_scale, inputs, outputs) that launches the kernel; None if torch operations run the call.

    NotImplementedError, with every reason, if the kernel was named and can't."""
    kernels.check_implementation(implementation)
    device = given["kv_cache"].device
    if implementation == "reference" or (implementation is None and devices.kind(device) != "cuda"):
        return None
    kernel = KERNELS.get(op)
    reasons = [kernels.NO_KERNEL] if kernel is None else kernels.reasons(kernel, device)
    config: Any = None
    if kernel is not None and not reasons:
        from tsmla_kernels.cache_ops import config as cache_config

        writes = op == "write_kv_cache"
        reasons = (cache_config.write_reasons if writes else cache_config.gather_reasons)(spec)
        reasons += [reason for name, x in given.items() for reason in _layout_reasons(name, x)]
        if not reasons and kernels.wanted(implementation, device):
            config = (cache_config.write_config if writes else cache_config.gather_config)(spec)
    if kernel is None or config is None:
        if implementation == "cute":
            raise contract.not_runnable(op, "cute", reasons)
        return None
    index = devices.index_of(device)

    def run(kv_scale: Scale | None, inputs: Views, outputs: Views) -> None:
        with devices.made_current(index):
            stream = devices.current_stream(index)
            scale = _scale_operand(kv_scale, index, stream)
            kernels.run(op, kernel, config, index, stream, {**inputs, "kv_scale": kernels.view(scale), **outputs})

    return run


def _layout_reasons(name: str, tensor: torch.Tensor) -> list[str]:
    """Why the kernels can't read a tensor: they take rows of one stride, and the rest without gaps."""
    rows = name in ("latent", "k_rope")
    dense = tensor.stride(-1) == 1 if rows else tensor.is_contiguous()
    aligned = tensor.dtype == torch.int32 or tensor.data_ptr() % kernels.ROW_ALIGN == 0
    if rows:
        aligned = aligned and tensor.stride(0) * tensor.element_size() % kernels.ROW_ALIGN == 0
    if dense and aligned:
        return []
    return [kernels.unreadable(name, tensor)]


def _scale_operand(scale: Scale | None, index: int, stream: int) -> torch.Tensor:
    """float32 [1] on the device."""
    if isinstance(scale, torch.Tensor):
        return scale.to(torch.float32).reshape(1)
    return scales.on_device((1.0 if scale is None else float(scale), 1.0), index, stream)[:1]


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

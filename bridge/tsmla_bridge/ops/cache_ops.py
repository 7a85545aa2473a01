"""write_kv_cache and gather_kv_cache on torch tensors: rows into and out of the paged cache.

On a Hopper GPU, and on later ones (cache_ops.config.ARCHS) if "cute" is named, the catalog's kernels run the calls, one
launch each. Torch operations run all other calls: on CPUs, on other GPUs, and, unless "cute" is named, where
gather_kv_cache's derivative is asked for or the kernels can't serve the call: a dtype or width that cache_ops.config
refuses, a tensor with gaps (rows to write may be columns of wider ones), a cache or rows to write that don't start at
multiples of 16 bytes. Kernels and torch operations give the same bits. No call reads a value on the host, except under
TSMLA_CHECK=1 outside of a capture, so CUDA graphs can capture all of them.
"""

from __future__ import annotations

from typing import Any

import torch

from tsmla_bridge import operators, reference
from tsmla_bridge.runtime import data_checks, loaded_kernels, tensors
from tsmla_bridge.runtime.tensors import DTYPES, Scale
from tsmla_kernels import contract
from tsmla_kernels.cache_ops import config as cache_config
from tsmla_kernels.catalog import GATHER_KV_CACHE, WRITE_KV_CACHE
from tsmla_kernels.contract import rules, values


def write_kv_cache(
    kv_cache: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    *,
    kv_scale: Scale | None = None,
    implementation: str | None = None,
) -> torch.Tensor:
    """[latent | k_rope] / kv_scale written to the given slots of the cache (slot mapping as in vLLM), in place, as
    tsmla_jax.write_kv_cache defines it.

    Args:
      kv_cache: [P, Z, D] or [P, 1, Z, D] with D = L + R, L at least R, of any strides that give each element its own
        place; float16, bfloat16, float8_e4m3fn, float32 or float64.
      latent, k_rope: [T, L] and [T, R] in one dtype: float16, bfloat16, float32 or float64; k_rope None when D = L.
      slot_mapping: [T] int32, or int64 as vLLM and SGLang have it; slot = page * Z + offset; -1 skips the token. Slots
        must differ: what two tokens leave in one slot has no meaning, on a GPU it may be parts of both. TSMLA_CHECK=1
        finds such slots.
      kv_scale: divisor before the conversion; a number, or a float32 or float64 scalar tensor; None is 1.
      implementation: "cute" (the kernel), "reference" (torch operations), or None: on Hopper the kernel if it can run,
        else torch operations.

    Returns:
      kv_cache itself. Rows are multiplied by 1 / kv_scale in float32 (float64 rows in float64) and rounded to nearest
      even, from float64 to 16 or 8 bits by way of float32; an fp8 cache saturates at +-448 (infinities too), so only a
      NaN input gives a NaN.

    Raises:
      TypeError, ValueError: an argument is not legal; the message names it, what it got and what is legal.
      NotImplementedError: the named implementation can't run this call, with every reason, or a tensor requires a
        derivative.
      RuntimeError: CUDA refused a launch, or a kernel would have to be loaded during a capture.
    """
    operators.refuse_derivative("write_kv_cache", kv_cache, latent, k_rope, kv_scale)
    arguments = (kv_cache, latent, k_rope, slot_mapping, *operators.scale_arguments(kv_scale), implementation)
    if torch.compiler.is_compiling() or operators.is_traced(kv_cache, latent):
        torch.ops.tsmla.write_kv_cache(*arguments)
    else:
        _write(*arguments)
    return kv_cache


def _write(
    kv_cache: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    scale_tensor: torch.Tensor | None,
    scale_number: float | None,
    implementation: str | None,
) -> None:
    kv_scale = operators.scale_of(scale_tensor, scale_number)
    kv_cache = tensors.without_head_axis(kv_cache)
    spec = tensors.describe_call(
        contract.cache_write_spec,
        kv_cache=kv_cache,
        latent=latent,
        k_rope=k_rope,
        slot_mapping=slot_mapping,
        kv_scale=kv_scale,
        slot_dtypes=rules.SLOTS,
    )
    rows = {"latent": latent, "k_rope": k_rope if spec.rope_dim and k_rope is not None else latent}
    read = {"kv_cache": kv_cache, "slot_mapping": slot_mapping, **rows}

    def why_not() -> list[str]:
        return WRITE_KV_CACHE.reasons(spec) + loaded_kernels.layout_reasons(read, rows, ("kv_cache",))

    by_kernel = loaded_kernels.is_chosen(WRITE_KV_CACHE, implementation, kv_cache.device, why_not)
    data_checks.check(values.cache_write, spec, slot_mapping)
    if 0 in (spec.num_tokens, spec.num_pages):
        return
    tensors.check_written("kv_cache", kv_cache)
    if not by_kernel:
        reference.write_kv_cache(spec, kv_cache, latent, k_rope, slot_mapping, kv_scale)
        return
    pages = loaded_kernels.view(kv_cache)
    # Rows may be the halves of a projection's output.
    wide = {name: loaded_kernels.wide_view(x) for name, x in rows.items()}
    inputs = {"kv_cache": pages, **wide, "slot_mapping": loaded_kernels.view(slot_mapping)}
    config, outputs = cache_config.write_config(spec), {"new_kv_cache": pages}
    tensors.mark_written(kv_cache)
    loaded_kernels.run_scaled(WRITE_KV_CACHE, config, kv_cache.device, kv_scale, inputs, outputs)


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
    """Tokens starts[b] to starts[b] + lens[b] - 1 of each request, packed one request after the other and multiplied by
    kv_scale, as tsmla_jax.gather_kv_cache defines it: vLLM's gather of the MLA cache, dequantised.

    Args:
      kv_cache: as in write_kv_cache.
      block_tables: [B, M] int32; entries that no asked-for token lies in are never used.
      starts, lens: [B] int32; a length of 0 is legal. Request b's rows begin at row sum(lens[:b]) of the result.
      total_len: number of rows of the result; rows past sum(lens) are 0.
      kv_scale: a number, or a float32 or float64 scalar tensor; None is 1.
      out_dtype: float16, bfloat16, float32 or float64; None is the cache's dtype, bfloat16 for an fp8 cache.
      implementation: as in write_kv_cache.

    Returns:
      [total_len, D] in out_dtype, latent columns first. The product with kv_scale is in float32 (float64 for float64).
      An eager call is differentiable in kv_cache and kv_scale by torch operations, which run if a derivative is asked
      for; under torch.compile the derivative raises NotImplementedError.

    Raises:
      TypeError, ValueError, NotImplementedError, RuntimeError: as write_kv_cache says, except for derivatives.
    """
    scale = operators.scale_arguments(kv_scale)
    arguments = (kv_cache, block_tables, starts, lens, total_len, *scale, out_dtype, implementation)
    derived = operators.asks_for_derivative(kv_cache, kv_scale)
    traced = torch.compiler.is_compiling() or (not derived and operators.is_traced(kv_cache))
    return torch.ops.tsmla.gather_kv_cache(*arguments) if traced else _gather(*arguments)


def _gather(
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    starts: torch.Tensor,
    lens: torch.Tensor,
    total_len: int,
    scale_tensor: torch.Tensor | None,
    scale_number: float | None,
    out_dtype: torch.dtype | None,
    implementation: str | None,
) -> torch.Tensor:
    kv_scale = operators.scale_of(scale_tensor, scale_number)
    kv_cache = tensors.without_head_axis(kv_cache)
    given = {"kv_cache": kv_cache, "block_tables": block_tables, "starts": starts, "lens": lens}
    spec = tensors.describe_call(
        contract.cache_gather_spec,
        **given,
        kv_scale=kv_scale,
        total_len=total_len,
        out_dtype=None if out_dtype is None else tensors.named_dtype("out_dtype", out_dtype),
    )

    def why_not() -> list[str]:
        reasons = GATHER_KV_CACHE.reasons(spec) + operators.derivative_reasons(kv_cache, kv_scale)
        return reasons + loaded_kernels.layout_reasons(given)

    by_kernel = loaded_kernels.is_chosen(GATHER_KV_CACHE, implementation, kv_cache.device, why_not)
    data_checks.check(values.cache_gather, spec, lens, starts, block_tables)
    shape, dtype = (spec.total_len, spec.head_dim), DTYPES[spec.out_dtype]
    if 0 in (spec.batch, spec.total_len, spec.max_pages, spec.num_pages):
        return torch.zeros(shape, dtype=dtype, device=kv_cache.device)
    if not by_kernel:
        return reference.gather_kv_cache(spec, kv_cache, block_tables, starts, lens, kv_scale)
    out = torch.empty(shape, dtype=dtype, device=kv_cache.device)
    inputs = {name: loaded_kernels.view(tensor) for name, tensor in given.items()}
    config, outputs = cache_config.gather_config(spec), {"out": loaded_kernels.view(out)}
    loaded_kernels.run_scaled(GATHER_KV_CACHE, config, kv_cache.device, kv_scale, inputs, outputs)
    return out


# ---- the operators


write_operator = operators.register(
    "write_kv_cache",
    _write,
    "(Tensor(a!) kv_cache, Tensor latent, Tensor? k_rope, Tensor slot_mapping,"
    f" {operators.SCALE_SCHEMA}, str? implementation) -> ()",
    writes=("kv_cache",),
)
gather_operator = operators.register(
    "gather_kv_cache",
    _gather,
    "(Tensor kv_cache, Tensor block_tables, Tensor starts, Tensor lens, SymInt total_len,"
    f" {operators.SCALE_SCHEMA}, ScalarType? out_dtype, str? implementation) -> Tensor",
)
operators.refuse_backward(gather_operator, "gather_kv_cache", "an eager call has one")


def _fake_gather(
    cache: Any, tables: Any, starts: Any, lens: Any, rows: Any, scale: Any, number: Any, dtype: Any, _: Any
) -> Any:
    return cache.new_empty((rows, cache.shape[-1]), dtype=dtype or operators.out_dtype(cache))


operators.register_fake(gather_operator, _fake_gather)

"""gather_kv_cache: ranges of the paged cache as packed, dequantised rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from tsmla_jax.ops import checks
from tsmla_jax.ops.inputs import Scale, describe_call, result_dtype_name
from tsmla_jax.ops.operation import Implementation, Operation, Preference
from tsmla_kernels import contract

if TYPE_CHECKING:
    from tsmla_jax.array_types import Array, Float, Int32


def gather_kv_cache(
    kv_cache: Float[Array, "P Z D"],
    block_tables: Int32[Array, "B M"],
    starts: Int32[Array, " B"],
    lens: Int32[Array, " B"],
    *,
    total_len: int,
    kv_scale: Scale | None = None,
    out_dtype: Any = None,
    implementation: Preference = None,
) -> Float[Array, "N D"]:
    """Tokens starts[b] to starts[b] + lens[b] - 1 of each request, packed one request after the other and multiplied by
    kv_scale: the context that chunked prefill expands (as vLLM's gather of the MLA cache, which this also dequantises).

    Args:
      kv_cache: [P, Z, D]; float16, bfloat16, float8_e4m3fn, float32 or float64.
      block_tables: [B, M] int32; entries that no asked-for token lies in are never used.
      starts, lens: [B] int32; a length of 0 is legal. The offsets of the rows are those of cumsum(lens).
      total_len: static number of rows of the result; rows past sum(lens) are 0.
      kv_scale: float or float32 scalar array, may be traced; None is 1.
      out_dtype: float16, bfloat16, float32 or float64; None is the cache's dtype, bfloat16 for an fp8 cache.
      implementation: "cute", "xla", "reference", several of these in order, or None for the best; see `explain`.

    Returns:
      [total_len, D] in out_dtype, latent columns first. The product with kv_scale is in float32 (float64 for float64).

    Raises:
      TypeError, ValueError: an argument is not legal.
      NotImplementedError: the named implementation can't run this call.
    """
    spec, chosen = OPERATION.choose(**locals())
    kv_cache, block_tables, starts, lens = map(jnp.asarray, (kv_cache, block_tables, starts, lens))
    lens = checks.cache_gather(spec, lens, starts, block_tables)
    if 0 in (spec.batch, spec.total_len, spec.max_pages, spec.num_pages):
        return jnp.zeros((spec.total_len, spec.head_dim), spec.out_dtype)
    return chosen.call(
        (kv_cache, block_tables, starts, lens),
        lambda: PartitionSpec(None, None),  # its rows come from requests that may lie on different devices
        spec=spec,
        kv_scale=kv_scale,
    )


def _spec(*, out_dtype: Any = None, **arguments: Any) -> contract.CacheGatherSpec:
    return describe_call(contract.cache_gather_spec, out_dtype=result_dtype_name("out_dtype", out_dtype), **arguments)


def _implementations() -> Mapping[str, Implementation]:
    from tsmla_jax.ops import device
    from tsmla_jax.ops.gather_kv_cache import cute, reference, xla

    return {
        "cute": Implementation(cute.gather_kv_cache, cute.why_not, device.why_not_untested),
        "xla": Implementation(xla.gather_kv_cache),
        "reference": Implementation(reference.gather_kv_cache),
    }


OPERATION = Operation(gather_kv_cache, _spec, _implementations)

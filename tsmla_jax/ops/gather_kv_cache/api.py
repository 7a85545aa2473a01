"""gather_kv_cache: ranges of the paged cache as packed, dequantised rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from tsmla_jax.ops import checks, dispatch, explicit
from tsmla_jax.ops.arrays import Scale, describe, describe_scale
from tsmla_kernels import contract

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32


def gather_kv_cache(
    kv_cache: Float[Array, "P Z D"],
    block_tables: Int32[Array, "B M"],
    starts: Int32[Array, " B"],
    lens: Int32[Array, " B"],
    *,
    total_len: int,
    kv_scale: Scale | None = None,
    out_dtype: Any = None,
    implementation: str | None = None,
) -> Float[Array, "N D"]:
    """Tokens starts[b] to starts[b] + lens[b] of each request, packed one request after the other and multiplied by
    kv_scale: the context that chunked prefill expands (as vLLM's gather of the MLA cache, which this also dequantises).

    Args:
      kv_cache: [P, Z, D]; float16, bfloat16, float8_e4m3fn, float32 or float64.
      block_tables: [B, M] int32; entries that no asked-for token lies in are never used.
      starts, lens: [B] int32; a length of 0 is legal. The offsets of the rows are those of cumsum(lens).
      total_len: static number of rows of the result; rows past sum(lens) are 0.
      kv_scale: float or float32 scalar array, may be traced; None is 1.
      out_dtype: float16, bfloat16, float32 or float64; None is the cache's dtype, bfloat16 for an fp8 cache.
      implementation: "cute", "xla", "reference", or None for the best that can run; see `explain`.

    Returns:
      [total_len, D] in out_dtype, latent columns first. The product with kv_scale is in float32.

    Raises:
      TypeError, ValueError: an argument is not legal; NotImplementedError: the named implementation can't run this
        call.
    """
    described = spec(kv_cache, block_tables, starts, lens, total_len=total_len, kv_scale=kv_scale, out_dtype=out_dtype)
    run = dispatch.select("gather_kv_cache", described, implementation)
    kv_cache, block_tables, starts, lens = map(jnp.asarray, (kv_cache, block_tables, starts, lens))
    lens = checks.cache_gather(described, lens, starts, block_tables)
    if 0 in (described.batch, described.total_len, described.max_pages, described.num_pages):
        return jnp.zeros((described.total_len, described.head_dim), described.out_dtype)
    return explicit.call(
        run,
        (kv_cache, block_tables, starts, lens),
        lambda: PartitionSpec(None, None),  # its rows come from requests that may lie on different devices
        spec=described,
        kv_scale=kv_scale,
    )


def spec(
    kv_cache: jax.Array,
    block_tables: jax.Array,
    starts: jax.Array,
    lens: jax.Array,
    *,
    total_len: Any,
    kv_scale: Any = None,
    out_dtype: Any = None,
) -> contract.CacheGatherSpec:
    """The contract's spec of a call of gather_kv_cache; raises as gather_kv_cache does."""
    return contract.cache_gather_spec(
        kv_cache=describe("kv_cache", kv_cache),
        block_tables=describe("block_tables", block_tables),
        starts=describe("starts", starts),
        lens=describe("lens", lens),
        total_len=total_len,
        kv_scale=describe_scale("kv_scale", kv_scale),
        out_dtype=None if out_dtype is None else jnp.dtype(out_dtype).name,
    )

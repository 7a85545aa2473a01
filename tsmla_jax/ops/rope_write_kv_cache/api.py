"""rope_write_kv_cache: rope, quantisation and the cache write between a layer's projections and its decode kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from tsmla_jax.ops import checks
from tsmla_jax.ops.inputs import Scale, describe_call, result_dtype_name
from tsmla_jax.ops.operation import Implementation, Operation, Preference, row_specs, same_spec
from tsmla_kernels.contract import cache as cache_contract

if TYPE_CHECKING:
    from tsmla_jax.array_types import Array, Float, Float32, Int32


def rope_write_kv_cache(
    kv_cache: Float[Array, "P Z D"],
    q_nope: Float[Array, "T H L"],
    q_rope: Float[Array, "T H R"],
    latent: Float[Array, "T L"],
    k_rope: Float[Array, "T R"],
    slot_mapping: Int32[Array, " T"],
    cos: Float32[Array, "T R/2"],
    sin: Float32[Array, "T R/2"],
    *,
    q_scale: Scale | None = None,
    kv_scale: Scale | None = None,
    q_dtype: Any = None,
    rope_interleave: bool = True,
    rope_layout: str = "interleaved",
    implementation: Preference = None,
) -> tuple[Float[Array, "T H D"], Float[Array, "P Z D"]]:
    """The query of mla_decode, rotated and quantised, and the cache with the new tokens written: rope, quantisation,
    concatenation and write_kv_cache, on Hopper as one launch (engines call it the fused rope, quantise and cache
    update).

    The result is that of the separate steps: q_rope and k_rope are rotated in float32 and rounded to their dtype;
    [q_nope | q_rope] / q_scale becomes q, and [latent | k_rope] / kv_scale goes to the slots, in place when the cache
    is donated to jit.

    Axes: T tokens (all of a batch, uniform or ragged), H query heads, L latent width, R rope width, D = L + R, P pages,
    Z tokens a page.

    Args:
      kv_cache: [P, Z, D]; float16, bfloat16, float8_e4m3fn, float32 or float64.
      q_nope: [T, H, L], the absorbed queries (q_nope W_UK); float16, bfloat16, float32 or float64.
      q_rope: [T, H, R] in q_nope's dtype, not rotated yet.
      latent: [T, L] in that dtype, the normalised latents.
      k_rope: [T, R] in that dtype, not rotated yet; R is even, and at most L.
      slot_mapping: [T] int32, slot = page * Z + offset; -1 writes nothing for the token. Slots must differ,
        as in write_kv_cache.
      cos, sin: [T, R / 2] float32, of each token's position, multiplied by yarn's attention factor.
      q_scale, kv_scale: divisors before the conversions; float or float32 scalar array, may be traced; None is 1.
      q_dtype: dtype of the query, one of the cache's; None is float8_e4m3fn if q_scale is given, else q_nope's dtype.
      rope_interleave: whether the pairs of q_rope and k_rope are columns 2i and 2i + 1; otherwise i and i + R / 2.
      rope_layout: "interleaved" or "halves", the order of the rotated columns in q and in the cache.
      implementation: "cute", "xla", "reference", several of these in order, or None for the best; see `explain`.

    Returns:
      q [T, H, D] in q_dtype, and the cache. Rounding is to nearest even; fp8 saturates at +-448.

    vmap, jit, grad, jax.export and shard_map work; "cute" is also partitioned over heads and over the cache's pages
    without moving either.

    Raises:
      TypeError, ValueError: an argument is not legal.
      NotImplementedError: the named implementation can't run this call.
    """
    spec, chosen = OPERATION.choose(**locals())
    kv_cache, q_nope, slot_mapping = map(jnp.asarray, (kv_cache, q_nope, slot_mapping))
    if spec.write.num_tokens == 0:
        return jnp.zeros((*q_nope.shape[:-1], spec.write.head_dim), spec.q_dtype), kv_cache
    slot_mapping = checks.cache_write(spec.write, slot_mapping)
    q_rope, latent, k_rope, cos, sin = map(jnp.asarray, (q_rope, latent, k_rope, cos, sin))
    return chosen.call(
        (kv_cache, q_nope, q_rope, latent, k_rope, slot_mapping, cos, sin),
        lambda: (row_specs(q_nope)[0], same_spec(kv_cache)),
        spec=spec,
        q_scale=q_scale,
        kv_scale=kv_scale,
    )


def _spec(*, q_dtype: Any = None, **arguments: Any) -> cache_contract.RopeWriteSpec:
    return describe_call(cache_contract.rope_write_spec, q_dtype=result_dtype_name("q_dtype", q_dtype), **arguments)


def _implementations() -> Mapping[str, Implementation]:
    from tsmla_jax.ops import device
    from tsmla_jax.ops.rope_write_kv_cache import cute, reference, xla

    return {
        "cute": Implementation(cute.rope_write_kv_cache, cute.why_not, device.why_not_untested),
        "xla": Implementation(xla.rope_write_kv_cache),
        "reference": Implementation(reference.rope_write_kv_cache),
    }


OPERATION = Operation(rope_write_kv_cache, _spec, _implementations)

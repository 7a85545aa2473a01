"""write_kv_cache: new latents and rope keys into the slots of the paged cache."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import jax.numpy as jnp

from tsmla_jax.ops import checks
from tsmla_jax.ops.inputs import Scale, describe_call
from tsmla_jax.ops.operation import Implementation, Operation, Preference, same_spec
from tsmla_kernels import contract

if TYPE_CHECKING:
    from tsmla_jax.array_types import Array, Float, Int32


def write_kv_cache(
    kv_cache: Float[Array, "P Z D"],
    latent: Float[Array, "T L"],
    k_rope: Float[Array, "T R"] | None,
    slot_mapping: Int32[Array, " T"],
    *,
    kv_scale: Scale | None = None,
    implementation: Preference = None,
) -> Float[Array, "P Z D"]:
    """The cache with [latent | k_rope] / kv_scale written to the given slots (slot mapping as in vLLM).

    In place when the cache is donated to jit: the compiled program aliases it and makes no copy.

    Args:
      kv_cache: [P, Z, D] with D = L + R, L at least R; float16, bfloat16, float8_e4m3fn, float32 or float64.
      latent: [T, L], the normalised latents; float16, bfloat16, float32 or float64.
      k_rope: [T, R] in latent's dtype, already rotated; None when D = L.
      slot_mapping: [T] int32, slot = page * Z + offset; -1 skips the token. Slots must differ: if two tokens have one
        slot, its row has no meaning; on a GPU it may be parts of both tokens' rows. TSMLA_CHECK=1 finds such slots.
      kv_scale: divisor before the conversion; float or float32 scalar array, may be traced; None is 1.
      implementation: "cute", "xla", "reference", several of these in order, or None for the best; see `explain`.

    Returns:
      [P, Z, D] in the cache's dtype. Rows are multiplied by 1 / kv_scale in float32 (float64 rows in float64) and
      rounded to nearest even; an fp8 cache saturates at +-448 (infinities too), so only a NaN input gives a NaN.

    Raises:
      TypeError, ValueError: an argument is not legal.
      NotImplementedError: the named implementation can't run this call.
    """
    spec, chosen = OPERATION.choose(**locals())
    kv_cache, latent, slot_mapping = map(jnp.asarray, (kv_cache, latent, slot_mapping))
    k_rope = jnp.zeros((*latent.shape[:1], 0), latent.dtype) if k_rope is None else jnp.asarray(k_rope)
    slot_mapping = checks.cache_write(spec, slot_mapping)
    if 0 in (spec.num_tokens, spec.num_pages):
        return kv_cache
    arrays = (kv_cache, latent, k_rope, slot_mapping)
    return chosen.call(arrays, lambda: same_spec(kv_cache), spec=spec, kv_scale=kv_scale)


def _implementations() -> Mapping[str, Implementation]:
    from tsmla_jax.ops import device
    from tsmla_jax.ops.write_kv_cache import cute, reference, xla

    return {
        "cute": Implementation(cute.write_kv_cache, cute.why_not, device.why_not_untested),
        "xla": Implementation(xla.write_kv_cache),
        "reference": Implementation(reference.write_kv_cache),
    }


OPERATION = Operation(write_kv_cache, partial(describe_call, contract.cache_write_spec), _implementations)

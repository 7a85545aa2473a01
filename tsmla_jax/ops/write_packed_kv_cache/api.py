"""write_packed_kv_cache: rope, quantisation and the write of V3.2's packed rows."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import jax.numpy as jnp

from tsmla_jax.ops.checks import behind
from tsmla_jax.ops.inputs import describe_call
from tsmla_jax.ops.operation import Implementation, Operation, Preference, same_spec
from tsmla_kernels.contract import packed, values

if TYPE_CHECKING:
    from tsmla_jax.array_types import Array, Float, Float32, Int32, UInt8


def write_packed_kv_cache(
    kv_cache: UInt8[Array, "P Z 656"],
    latent: Float[Array, "T 512"],
    k_rope: Float[Array, "T 64"],
    slot_mapping: Int32[Array, " T"],
    cos: Float32[Array, "T 32"] | None = None,
    sin: Float32[Array, "T 32"] | None = None,
    *,
    rope_interleave: bool = True,
    rope_layout: str = "interleaved",
    implementation: Preference = None,
) -> UInt8[Array, "P Z 656"]:
    """Write V3.2 packed rows into the slots page * Z + offset; slot -1 is skipped; in place under donation.

    Args:
      kv_cache: uint8 [P, Z, 656]: 512 e4m3, a float32 scale for each 128 of them, 64 bfloat16.
      latent: [T, 512], the normalised latents. Each group of 128 has the scale 2^ceil(log2(max(amax, 1e-4) / 448)).
      k_rope: [T, 64], rounded to bfloat16.
      slot_mapping: [T] int32, -1 skips the token. Slots must differ, as in write_kv_cache: two tokens with one slot may
        leave the latent of the first with the scales of the second.
      cos, sin: [T, 32] float32 of each token's position: k_rope is rotated in float32 (in float64 if that is its
        dtype) and rounded to its dtype first. Without cos and sin, k_rope must be rotated already.
      rope_interleave, rope_layout: the rotation's layouts, as in `tsmla_jax.rope_write_kv_cache`.
      implementation: "cute", "xla", "reference", several of these in order, or None for the best; see `explain`.

    Raises:
      TypeError, ValueError: an argument is not legal; under TSMLA_CHECK=1 also a slot outside the cache or given twice.
      NotImplementedError: the named implementation can't run this call.
    """
    spec, chosen = OPERATION.choose(**locals())
    kv_cache, latent, k_rope, slot_mapping = map(jnp.asarray, (kv_cache, latent, k_rope, slot_mapping))
    slot_mapping = behind(partial(values.slot_mapping, spec.cache.num_slots), slot_mapping)
    if spec.num_tokens == 0:
        return kv_cache
    angles = () if cos is None or sin is None else (jnp.asarray(cos), jnp.asarray(sin))
    written: Array = chosen.call(
        (kv_cache, latent, k_rope, slot_mapping, *angles), lambda: same_spec(kv_cache), spec=spec
    )
    return written


def _implementations() -> Mapping[str, Implementation]:
    from tsmla_jax.ops import device
    from tsmla_jax.ops.write_packed_kv_cache import cute, reference, xla

    return {
        "cute": Implementation(cute.write_packed_kv_cache, cute.why_not, device.why_not_untested),
        "xla": Implementation(xla.write_packed_kv_cache),
        "reference": Implementation(reference.write_packed_kv_cache),
    }


OPERATION = Operation(write_packed_kv_cache, partial(describe_call, packed.packed_write_spec), _implementations)

"""write_indexer_cache: rope, quantisation and the write of the indexer's keys."""

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


def write_indexer_cache(
    k_cache: UInt8[Array, "P Z Di+4"],
    k: Float[Array, "T Di"],
    slot_mapping: Int32[Array, " T"],
    cos: Float32[Array, "T R/2"] | None = None,
    sin: Float32[Array, "T R/2"] | None = None,
    *,
    rope_offset: int = 0,
    rope_layout: str = "halves",
    implementation: Preference = None,
) -> UInt8[Array, "P Z Di+4"]:
    """Write indexer keys into their cache; slot = page * Z + offset, -1 is skipped; in place under donation.

    Args:
      k_cache: uint8 [P, Z, Di + 4]; a page's bytes are Z keys of Di e4m3 and then Z scales of f32, 132 bytes a token
        when Di is 128. Or [P, Z, Di] of floats or float8_e4m3fn, which holds the keys rounded to that dtype, unscaled.
      k: [T, Di], normed. In a packed cache it is quantised with the scale 2^ceil(log2(max(amax, 1e-4) / 448)).
      slot_mapping: [T] int32, -1 skips the token. Slots must differ, as in write_kv_cache: two tokens with one slot may
        leave the key of the first with the scale of the second.
      cos, sin: [T, R / 2] float32 of each token's position: columns [rope_offset, rope_offset + R) of k are rotated in
        float32 first, and not rounded before they are quantised. Without cos and sin, k must be rotated already.
      rope_offset: 0 in V3.2, Di - R in V4.
      rope_layout: "halves" (V3.2: pairs i and i + R / 2) or "interleaved" (V4: 2i and 2i + 1).
      implementation: "cute", "xla", "reference", several of these in order, or None for the best; see `explain`.

    Raises:
      TypeError, ValueError: an argument is not legal; under TSMLA_CHECK=1 also a slot outside the cache or given twice.
      NotImplementedError: the named implementation can't run this call.
    """
    spec, chosen = OPERATION.choose(**locals())
    k_cache, k, slot_mapping = map(jnp.asarray, (k_cache, k, slot_mapping))
    slot_mapping = behind(partial(values.slot_mapping, spec.cache.as_plain().num_slots), slot_mapping)
    if spec.num_tokens == 0:
        return k_cache
    angles = () if cos is None or sin is None else (jnp.asarray(cos), jnp.asarray(sin))
    written: Array = chosen.call((k_cache, k, slot_mapping, *angles), lambda: same_spec(k_cache), spec=spec)
    return written


def _implementations() -> Mapping[str, Implementation]:
    from tsmla_jax.ops import device
    from tsmla_jax.ops.write_indexer_cache import cute, reference, xla

    return {
        "cute": Implementation(cute.write_indexer_cache, cute.why_not, device.why_not_untested),
        "xla": Implementation(xla.write_indexer_cache),
        "reference": Implementation(reference.write_indexer_cache),
    }


OPERATION = Operation(write_indexer_cache, partial(describe_call, packed.indexer_write_spec), _implementations)

"""indexer_quantize: rope and quantisation of the indexer's queries, their scales folded into the head weights."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import jax.numpy as jnp

from tsmla_jax.ops.inputs import describe_call
from tsmla_jax.ops.operation import Implementation, Operation, Preference, same_spec
from tsmla_kernels.contract import packed

if TYPE_CHECKING:
    from tsmla_jax.array_types import Array, Float, Float32


def indexer_quantize(
    q: Float[Array, "T Hi Di"],
    weights: Float[Array, "T Hi"],
    cos: Float32[Array, "T R/2"] | None = None,
    sin: Float32[Array, "T R/2"] | None = None,
    *,
    rope_offset: int = 0,
    rope_layout: str = "halves",
    implementation: Preference = None,
) -> tuple[Float[Array, "T Hi Di"], Float32[Array, "T Hi"]]:
    """Quantise indexer queries to e4m3 and fold their scales, and the logits' constants, into the head weights.

    Args:
      q: [T, Hi, Di] (64 heads of 128); float16, bfloat16, float32 or float64.
      weights: [T, Hi] of such a dtype, the head weights as projected.
      cos, sin: [T, R / 2] float32 of each token's position: columns [rope_offset, rope_offset + R) of q are rotated in
        float32 first, and not rounded before they are quantised. Without cos and sin, q must be rotated already.
      rope_offset, rope_layout: as in write_indexer_cache.
      implementation: "cute", "xla", "reference", several of these in order, or None for the best; see `explain`.

    Returns:
      q8 [T, Hi, Di] float8_e4m3fn with the power-of-two scale s = 2^ceil(log2(max(amax, 1e-10) / 448)) a row, and
      w' [T, Hi] float32 = weights * s * Di^-0.5 * Hi^-0.5.

    Raises:
      TypeError, ValueError: an argument is not legal.
      NotImplementedError: the named implementation can't run this call.
    """
    spec, chosen = OPERATION.choose(**locals())
    q, weights = jnp.asarray(q), jnp.asarray(weights)
    angles = () if cos is None or sin is None else (jnp.asarray(cos), jnp.asarray(sin))
    results: tuple[Array, Array] = chosen.call(
        (q, weights, *angles), lambda: (same_spec(q), same_spec(weights)), spec=spec
    )
    return results


def _implementations() -> Mapping[str, Implementation]:
    from tsmla_jax.ops import device
    from tsmla_jax.ops.indexer_quantize import cute, reference, xla

    return {
        "cute": Implementation(cute.indexer_quantize, cute.why_not, device.why_not_untested),
        "xla": Implementation(xla.indexer_quantize),
        "reference": Implementation(reference.indexer_quantize),
    }


OPERATION = Operation(indexer_quantize, partial(describe_call, packed.indexer_quantize_spec), _implementations)

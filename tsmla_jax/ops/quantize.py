"""Conversion of values to a cache's dtype or to fp8 queries, by the one rounding and saturation rule of the project."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tsmla_jax.ops.inputs import Scale, accumulation_dtype, as_scale, describe_scale
from tsmla_kernels.contract import FP8, FP8_MAX, rules


def to_cache_dtype(x: jax.Array, scale: Scale | None, dtype: str) -> jax.Array:
    """x * (1 / scale) in float32 (float64 for float64), rounded to nearest even into `dtype`; fp8 saturates at +-448.

    The reciprocal is taken once. The kernels do the same, and under jit XLA turns a division by a scalar into this
    product.
    """
    if scale is not None:
        wide = accumulation_dtype(x.dtype.name)
        x = x.astype(wide) * (1 / as_scale(scale, wide))
    if dtype == FP8:
        # The conversion alone would turn values out of range into NaN.
        x = jnp.clip(x.astype(accumulation_dtype(x.dtype.name)), -FP8_MAX, FP8_MAX)
    return x.astype(dtype)


def quantize_q(q: jax.Array, q_scale: Scale | None) -> jax.Array:
    """Queries as a layer gives them to attention: q / q_scale in float8_e4m3fn, or q itself if q_scale is None.
    ValueError / TypeError for a q_scale that is no scale.
    """
    rules.check_scale("q_scale", describe_scale("q_scale", q_scale))
    return q if q_scale is None else to_cache_dtype(q, q_scale, FP8)

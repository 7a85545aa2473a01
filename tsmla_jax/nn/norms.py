"""The two RMS norms: a plain one for activations, and one whose order of summation is fixed."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from tsmla_jax.nn import batch_invariant
from tsmla_jax.nn.batch_invariant import BatchInvariant
from tsmla_jax.ops.selected import numerics


class Norm(NamedTuple):
    """An RMS norm's weight [D], floats, and its eps, which is static."""

    weight: jax.Array
    eps: float


def rms_norm(x: jax.Array, weight: jax.Array | BatchInvariant, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; statistics in fp32 or x's wider dtype, result in x's
    dtype."""
    if isinstance(weight, BatchInvariant):
        return batch_invariant.rms_norm(x, weight.values, eps)
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * weight.astype(x.dtype)


def rms_norm_fixed_order(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """V4's RMS norm, which multiplies by its weight in f32 before it rounds; result in x's dtype.

    The order of summation depends only on the row's width, so a token gets the same bits whether it is prefilled in a
    chunk or decoded alone. V4 needs that: a cache must not depend on how a text was cut.
    """
    return numerics.rms_norm(x, weight, eps).astype(x.dtype)

"""Sinks, a logit a head that takes weight from the keys and has no value: how they change the results and the gradient.

A row with sinks is the row without them times the keys' share of the weight, 1 / (1 + exp(sink - lse)), where lse is
that of the keys alone. So the gradient of a call with sinks is that of a call without, with out's cotangent times the
share, and with the results as they are: rowsum(d_out * out) is then the softmax's term and the share's in one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def share(lse: jax.Array, sinks: jax.Array, seen: jax.Array | bool = True) -> jax.Array:
    """The part of the weight that the keys have, for lse [..., H]. seen: the rows that see a key."""
    return jax.nn.sigmoid(jnp.where(seen, lse, 0) - sinks.astype(lse.dtype))


def d_sinks(lse: jax.Array, out: jax.Array, d_out: jax.Array, sinks: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The cotangent of the sinks from lse [T, H], and out and its cotangent [T, H, V]; summed in `dtype`."""
    seen = lse != -jnp.inf
    dots = (out.astype(dtype) * d_out.astype(dtype)).sum(-1)
    weights = jax.nn.sigmoid(sinks.astype(dtype) - jnp.where(seen, lse, 0).astype(dtype))
    return -jnp.where(seen, weights * dots, 0).sum(0).astype(sinks.dtype)

"""Sinks, a logit a head that takes weight from the keys and has no value: how they change the results and the gradient.

If a head has the sink s, and a row the logsumexp lse, the row's weights are exp(score - whole), where exp(whole) =
exp(lse) + exp(s). So the gradient of a call with sinks is that of a call without, with `whole` in place of lse.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


def share(lse: jax.Array, sinks: jax.Array, seen: jax.Array | bool = True) -> jax.Array:
    """The part of the weight that the keys have, for lse [..., H]. seen: the rows that see a key."""
    return jax.nn.sigmoid(jnp.where(seen, lse, 0) - sinks.astype(lse.dtype))


class Absorbed(NamedTuple):
    """The arrays [T, H] that stand for lse and its cotangent in the gradient of a call with sinks."""

    lse: jax.Array
    d_lse: jax.Array

    @classmethod
    def of(cls, lse: jax.Array, d_lse: jax.Array, sinks: jax.Array) -> Absorbed:
        """The Absorbed of a call, from the lse that the call returns, which is without the sinks."""
        seen = lse != -jnp.inf
        whole = jnp.where(seen, jnp.logaddexp(jnp.where(seen, lse, 0), sinks.astype(lse.dtype)), -jnp.inf)
        # exp(whole - lse) is infinite if the sink has nearly all weight; there a cotangent of 0 must stay 0.
        used = seen & (d_lse != 0)
        return cls(whole, jnp.where(used, d_lse * jnp.exp(jnp.where(used, whole - lse, 0)), 0))

    def d_sinks(self, out: jax.Array, d_out: jax.Array, sinks: jax.Array) -> jax.Array:
        """The cotangent of the sinks from out and its cotangent [T, H, V]."""
        dtype = self.lse.dtype
        seen = self.lse != -jnp.inf
        weights = jnp.exp(jnp.where(seen, sinks.astype(dtype) - self.lse, 0))
        dots = (out.astype(dtype) * d_out.astype(dtype)).sum(-1)
        return -jnp.where(seen, weights * dots, 0).sum(0).astype(sinks.dtype)

"""merge_attention_states in portable XLA: a fused sum over the parts, with a custom derivative."""

from __future__ import annotations

import operator
from functools import partial, reduce

import jax
import jax.numpy as jnp

from tsmla_jax.ops.loops import carry
from tsmla_kernels.contract import MergeSpec

Parts = tuple[jax.Array, ...]
State = tuple[jax.Array, jax.Array]


def merge_attention_states(outs: Parts, lses: Parts, *, spec: MergeSpec) -> State:
    """out and lse, as the public merge_attention_states documents them."""
    # All operands get the same varying type before the custom derivative, because their cotangents have one.
    return _merge(spec, *(tuple(carry(x, *outs, *lses) for x in parts) for parts in (outs, lses)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _merge(spec: MergeSpec, outs: Parts, lses: Parts) -> State:
    dtype = jnp.dtype(spec.sum_dtype)
    weights, lse = _weights(lses, dtype)
    merged = reduce(operator.add, (_weighted(out, weight, dtype) for out, weight in zip(outs, weights, strict=True)))
    return merged.astype(spec.out_dtype), lse.astype(spec.lse_dtype)


def _weights(lses: Parts, dtype: jnp.dtype) -> tuple[list[jax.Array], jax.Array]:
    """Each part's share of the result (0 if the part saw no key), and the merged lse."""
    wide = [lse.astype(dtype) for lse in lses]
    wide = [jnp.where(lse == jnp.inf, -jnp.inf, lse) for lse in wide]  # FlashAttention and FlashMLA write +inf
    maximum = reduce(jnp.maximum, wide)
    nothing = maximum == -jnp.inf
    maximum = jnp.where(nothing, 0, maximum)  # a row that no part saw has no maximum; 0 avoids inf - inf
    # Shares of the sum, not exp(part - lse): rounding lse would cost 1e-4 of a weight at |lse| = 3000.
    terms = [jnp.exp(lse - maximum) for lse in wide]
    total = jnp.where(nothing, 1, reduce(operator.add, terms))
    return [term / total for term in terms], jnp.where(nothing, -jnp.inf, maximum + jnp.log(total))


def _weighted(out: jax.Array, weight: jax.Array, dtype: jnp.dtype) -> jax.Array:
    weight = weight[..., None]
    return jnp.where(weight == 0, 0, out.astype(dtype) * weight)  # a part without weight may be NaN


def _forward(spec: MergeSpec, outs: Parts, lses: Parts) -> tuple[State, tuple[Parts, Parts, jax.Array]]:
    result = _merge(spec, outs, lses)
    return result, (outs, lses, result[0])


def backward(spec: MergeSpec, saved: tuple[Parts, Parts, jax.Array], cotangents: State) -> tuple[Parts, Parts]:
    """The cotangents of outs and lses. saved: outs, lses and the merged out. cotangents: those of out and lse."""
    outs, lses, merged = saved
    dtype = jnp.dtype(spec.sum_dtype)
    d_out, d_lse = (x.astype(dtype) for x in cotangents)
    d_outs, d_lses = [], []
    for out, part, weight in zip(outs, lses, _weights(lses, dtype)[0], strict=True):
        d_outs.append(_weighted(d_out, weight, dtype).astype(out.dtype))
        # d merged / d lse_i = w_i (out_i - merged); d lse / d lse_i = w_i
        slope = ((out.astype(dtype) - merged.astype(dtype)) * d_out).sum(-1) + d_lse
        d_lses.append(jnp.where(weight == 0, 0, weight * slope).astype(part.dtype))
    return tuple(d_outs), tuple(d_lses)


_merge.defvjp(_forward, backward)

"""merge_attention_states in portable XLA: a fused sum over the parts, with a derivative of its own."""

from __future__ import annotations

from functools import partial, reduce

import jax
import jax.numpy as jnp
from tsmla_kernels.contract import MergeSpec

from tsmla_jax.ops.arrays import accumulation_dtype

Parts = tuple[jax.Array, ...]
State = tuple[jax.Array, jax.Array]


def merge_attention_states(outs: Parts, lses: Parts, *, spec: MergeSpec) -> State:
    """out and lse, as the public merge_attention_states documents them."""
    return _merge(spec, outs, lses)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _merge(spec: MergeSpec, outs: Parts, lses: Parts) -> State:
    dtype = accumulation_dtype(spec.out_dtype)
    wide = [lse.astype(dtype) for lse in lses]
    maximum = reduce(jnp.maximum, wide)
    nothing = maximum == -jnp.inf
    maximum = jnp.where(nothing, 0, maximum)  # a row that no part saw has no maximum; 0 avoids inf - inf
    total = sum(jnp.exp(lse - maximum) for lse in wide)
    lse = jnp.where(nothing, -jnp.inf, maximum + jnp.log(jnp.where(nothing, 1, total)))
    merged = sum(_weighted(out, _weight(part, lse), dtype) for out, part in zip(outs, wide, strict=True))
    return merged.astype(spec.out_dtype), lse.astype(spec.lse_dtype)


def _weight(part: jax.Array, lse: jax.Array) -> jax.Array:
    """exp(part - lse), 0 where the part saw nothing."""
    empty = part == -jnp.inf
    return jnp.where(empty, 0, jnp.exp(jnp.where(empty, 0, part - lse)))


def _weighted(out: jax.Array, weight: jax.Array, dtype: jnp.dtype) -> jax.Array:
    weight = weight[..., None]
    return jnp.where(weight == 0, 0, out.astype(dtype) * weight)  # what has no weight may be NaN


def _forward(spec: MergeSpec, outs: Parts, lses: Parts) -> tuple[State, tuple[Parts, Parts, State]]:
    result = _merge(spec, outs, lses)
    return result, (outs, lses, result)


def _backward(spec: MergeSpec, saved: tuple[Parts, Parts, State], cotangents: State) -> tuple[Parts, Parts]:
    outs, lses, (merged, lse) = saved
    dtype = accumulation_dtype(spec.out_dtype)
    d_out, d_lse = (x.astype(dtype) for x in cotangents)
    d_outs, d_lses = [], []
    for out, part in zip(outs, lses, strict=True):
        weight = _weight(part.astype(dtype), lse.astype(dtype))
        d_outs.append((weight[..., None] * d_out).astype(out.dtype))
        # d merged / d lse_i = w_i (out_i - merged); d lse / d lse_i = w_i
        difference = _weighted(out.astype(dtype) - merged.astype(dtype), weight, dtype)
        d_lses.append(((difference * d_out).sum(-1) + weight * d_lse).astype(part.dtype))
    return tuple(d_outs), tuple(d_lses)


_merge.defvjp(_forward, _backward)

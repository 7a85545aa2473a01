"""The gradient of sparse_mla over plain caches in portable XLA: the weights are computed again from the saved lse, by
blocks of tokens, so that memory is linear in the tokens and in the caches' slots."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from tsmla_jax.ops.inputs import accumulation_dtype
from tsmla_jax.ops.loops import carry
from tsmla_jax.ops.selected.blocks import fetch
from tsmla_jax.ops.selected.layouts import gather_rows
from tsmla_jax.ops.transforms import refuse_derivative
from tsmla_kernels.contract.layouts import valid_slots
from tsmla_kernels.contract.sparse import SparseMLASpec

BLOCK_BYTES = 64 << 20
"""Bound on a block's gathered rows and on its scores."""

ALTERNATIVE = "use implementation='reference'"
"""The alternative that the error names where the gradient's own derivative is asked for."""

Results = tuple[jax.Array, jax.Array]


class SavedOperands(NamedTuple):
    """The arrays of a call. A call without sinks has sinks of -inf here, and a call without lengths has lengths of all
    columns.
    """

    q: jax.Array
    caches: tuple[jax.Array, ...]
    indices: jax.Array
    lengths: jax.Array
    sinks: jax.Array
    logit_scale: jax.Array


class Gradients(NamedTuple):
    """The cotangents of the operands that have one."""

    q: jax.Array
    caches: tuple[jax.Array, ...]
    sinks: jax.Array
    logit_scale: jax.Array


class _Rows(NamedTuple):
    """The rows of a block of tokens. new: which tokens were in no earlier block."""

    new: jax.Array
    q: jax.Array
    indices: jax.Array
    lengths: jax.Array
    out: jax.Array
    lse: jax.Array
    d_out: jax.Array
    d_lse: jax.Array


def gradients(spec: SparseMLASpec, saved: SavedOperands, results: Results, cotangents: Results) -> Gradients:
    """The cotangents of a call's operands, from its results and their cotangents. Any implementation may have computed
    the results.
    """
    dtype = accumulation_dtype(spec.q_dtype)
    rows = (saved.q, saved.indices, saved.lengths, *results, *cotangents)
    everything = (*rows, *saved.caches, saved.sinks, saved.logit_scale)
    totals = Gradients(
        jnp.zeros(saved.q.shape, saved.q.dtype),
        tuple(jnp.zeros((cache.shape[0] * cache.shape[1], cache.shape[2]), dtype) for cache in saved.caches),
        jnp.zeros(saved.sinks.shape, dtype),
        jnp.zeros((), dtype),
    )
    totals = jax.tree.map(lambda x: carry(x, *everything), totals)
    count = saved.q.shape[0]
    if isinstance(count, int) and count:
        widest = max(spec.num_heads, spec.head_dim) * max(1, spec.num_selected) * dtype.itemsize
        block = max(1, min(count, BLOCK_BYTES // widest))

        def step(i: jax.Array, totals: Gradients) -> Gradients:
            start = jnp.minimum(i * block, count - block)
            new = start + jnp.arange(block, dtype=jnp.int32) >= i * block
            parts = (fetch(x, start, lambda x, at: lax.dynamic_slice_in_dim(x, at, block, axis=0)) for x in rows)
            return _add_block(spec, saved, totals, _Rows(new, *parts), start)

        totals = lax.fori_loop(0, -(-count // block), step, totals)
    elif not isinstance(count, int):
        totals = _add_block(spec, saved, totals, _Rows(jnp.ones(count, bool), *rows), jnp.int32(0))
    caches = zip(totals.caches, saved.caches, strict=True)
    found = totals._replace(
        caches=tuple(total.reshape(cache.shape).astype(cache.dtype) for total, cache in caches),
        sinks=totals.sinks.astype(saved.sinks.dtype),
        logit_scale=totals.logit_scale.astype(saved.logit_scale.dtype),
    )
    # `out` and `lse` were computed by loops whose number of passes depends on the lengths.
    refused: Gradients = refuse_derivative(found, everything, "the gradient of sparse_mla", ALTERNATIVE)
    return refused


def _add_block(
    spec: SparseMLASpec, saved: SavedOperands, totals: Gradients, rows: _Rows, start: jax.Array
) -> Gradients:
    """The totals plus the gradients of one block of tokens, whose first token is `start`."""
    dtype = accumulation_dtype(spec.q_dtype)
    query, d_out = rows.q.astype(dtype), rows.d_out.astype(dtype)
    sinks, logit_scale = saved.sinks.astype(dtype), saved.logit_scale.astype(dtype)
    seen = rows.lse != -jnp.inf
    lse = jnp.where(seen, rows.lse, 0).astype(dtype)
    dots = (rows.out.astype(dtype) * d_out).sum(-1)
    share = jax.nn.sigmoid(lse - sinks)
    shift = (rows.d_lse.astype(dtype) - share * dots)[..., None]
    left = jnp.where(seen & rows.new[:, None], dots * jax.nn.sigmoid(sinks - lse), 0)
    d_query = jnp.zeros(query.shape, dtype)
    d_scale, d_caches = totals.logit_scale, []
    bounds = ((0, spec.window), (spec.window, spec.num_selected))
    for (first, stop), cache_spec, cache, d_cache in zip(
        bounds, spec.caches, saved.caches, totals.caches, strict=False
    ):
        slots = rows.indices[:, first:stop]
        column = jnp.arange(first, stop, dtype=jnp.int32)
        valid = valid_slots(slots, cache_spec) & (column < rows.lengths[:, None])
        kv = gather_rows(cache, jnp.where(valid, slots, 0), cache_spec, dtype)
        kv = jnp.where(valid[..., None], kv, 0)  # slot 0 stands in and may hold NaN, and 0 * NaN is NaN
        latent = kv[..., : spec.latent_dim]
        scores = _dot("thd,tkd->thk", query, kv)
        visible = valid[:, None] & seen[..., None]
        weights = jnp.where(visible, jnp.exp(jnp.where(visible, scores * logit_scale - lse[..., None], 0)), 0)
        d_weights = _dot("thl,tkl->thk", d_out, latent) * share[..., None]
        d_scores = jnp.where(visible, weights * (d_weights + shift), 0)
        # The query of a token without keys may be NaN, and 0 * NaN is NaN.
        d_scale += jnp.where(visible & rows.new[:, None, None], d_scores * scores, 0).sum()
        d_scores *= logit_scale
        d_query += _dot("thk,tkd->thd", d_scores, kv)
        d_latent = _dot("thk,thl->tkl", weights * share[..., None], d_out)
        d_kv = _dot("thk,thd->tkd", d_scores, query).at[..., : spec.latent_dim].add(d_latent)
        # Slots of tokens that were in an earlier block, and slots that don't exist, are dropped.
        target = jnp.where(valid & rows.new[:, None], slots, d_cache.shape[0])
        d_caches.append(d_cache.at[target.reshape(-1)].add(d_kv.reshape(-1, spec.head_dim), mode="drop"))
    d_q = lax.dynamic_update_slice_in_dim(totals.q, d_query.astype(totals.q.dtype), start, axis=0)
    return Gradients(d_q, tuple(d_caches), totals.sinks - left.sum(0), d_scale)


def _dot(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(equation, a, b, precision="highest")

"""sparse_mla in portable XLA: blocks of tokens, and for each of them blocks of slots with an online softmax.

Beyond the operands and the results, memory holds one gathered block at a time (a few copies of BLOCK_BYTES): neither
the gathered rows of a token nor the scores of all slots ever exist. Blocks of slots past the longest row of a block of
tokens are not visited.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax import lax

from tsmla_jax.ops import online_softmax
from tsmla_jax.ops.inputs import Scale, Scales, accumulation_dtype, as_scale
from tsmla_jax.ops.loops import carry
from tsmla_jax.ops.selected.blocks import over_token_blocks
from tsmla_jax.ops.selected.layouts import gather_rows
from tsmla_jax.ops.sparse_mla.gradient import SavedOperands, gradients
from tsmla_kernels import contract
from tsmla_kernels.contract.layouts import CacheSpec, valid_slots
from tsmla_kernels.contract.sparse import SparseMLASpec, sparse_gradient_reasons

BLOCK_KEYS = 256
"""Slots a step: enough to fill a matrix product, few enough that a token's float32 block stays in a core's cache."""
Results = tuple[jax.Array, ...]
"""out and lse, and max_logits if the spec has them."""

BLOCK_BYTES = 4 << 20
"""Bound on the float32 block of gathered rows, of scores and of the accumulator."""


def sparse_mla(
    q: jax.Array,
    caches: tuple[jax.Array, ...],
    indices: jax.Array,
    lengths: jax.Array | None,
    sinks: jax.Array | None,
    scales: Scales,
    kv_scales: tuple[Scale | None, ...],
    *,
    spec: SparseMLASpec,
) -> Results:
    """out, lse and, if the spec has them, max_logits as the public sparse_mla documents them. Reverse-mode
    differentiable over plain caches without scales."""
    dtype = accumulation_dtype(spec.q_dtype)
    if lengths is None:
        lengths = jnp.full((spec.num_tokens,), spec.num_selected, jnp.int32)
    if sinks is None:
        sinks = jnp.full((spec.num_heads,), -jnp.inf, dtype)
    factors = tuple(as_scale(scale, dtype) for scale in kv_scales)
    operands = (q, indices, lengths, caches, sinks.astype(dtype), scales.logits(dtype), factors)
    if reasons := sparse_gradient_reasons(spec, kv_scales):
        return _without_gradient(spec, tuple(reasons), *operands)
    # All operands get one varying type before the custom derivative: shard_map then sums a replicated operand's
    # cotangent.
    varying = jax.tree.leaves(operands)
    return _with_gradient(spec, *jax.tree.map(lambda x: carry(x, *varying), operands))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_gradient(spec: SparseMLASpec, *operands: Any) -> Results:
    return _sparse_mla(spec, *operands)


def _forward(spec: SparseMLASpec, *operands: Any) -> tuple[Results, tuple[Any, Results]]:
    results = _sparse_mla(spec, *operands)
    return results, (operands, results)


def _backward(spec: SparseMLASpec, saved: tuple[Any, Results], cotangents: Results) -> tuple[Any, ...]:
    (q, indices, lengths, caches, sinks, logit_scale, kv_scales), results = saved
    operands = SavedOperands(q, caches, indices, lengths, sinks, logit_scale)
    found = gradients(spec, operands, (results[0], results[1]), (cotangents[0], cotangents[1]))
    of_scales = jax.tree.map(jnp.zeros_like, kv_scales)  # constants
    return found.q, None, None, found.caches, found.sinks, found.logit_scale, of_scales


_with_gradient.defvjp(_forward, _backward)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _without_gradient(spec: SparseMLASpec, reasons: tuple[str, ...], *operands: Any) -> Results:
    return _sparse_mla(spec, *operands)


@_without_gradient.defjvp
def _refuse(
    spec: SparseMLASpec, reasons: tuple[str, ...], primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> NoReturn:
    raise contract.not_differentiable("sparse_mla", f"{'; '.join(reasons)}; use implementation='reference'")


def _sparse_mla(
    spec: SparseMLASpec,
    q: jax.Array,
    indices: jax.Array,
    lengths: jax.Array,
    caches: tuple[jax.Array, ...],
    sinks: jax.Array,
    logit_scale: jax.Array,
    kv_scales: tuple[jax.Array, ...],
) -> Results:
    dtype = accumulation_dtype(spec.q_dtype)
    block_keys = min(BLOCK_KEYS, max(1, spec.num_selected))
    widest = max(block_keys * spec.head_dim, spec.num_heads * max(block_keys, spec.latent_dim)) * dtype.itemsize
    rows = (spec.num_tokens, spec.num_heads)
    if spec.num_tokens == 0:
        none = jnp.zeros(rows, spec.lse_dtype)
        return jnp.zeros((*rows, spec.latent_dim), spec.out_dtype), none, *[none] * spec.max_logits

    def block(q: jax.Array, indices: jax.Array, lengths: jax.Array) -> Results:
        return _attend(spec, q, indices, lengths, caches, sinks, logit_scale, kv_scales)

    tokens = max(1, BLOCK_BYTES // widest)
    of_rows = jax.ShapeDtypeStruct(rows, jnp.dtype(spec.lse_dtype))
    results: Results = over_token_blocks(
        block,
        (q, indices, lengths),
        (
            jax.ShapeDtypeStruct((*rows, spec.latent_dim), jnp.dtype(spec.out_dtype)),
            of_rows,
            *[of_rows] * spec.max_logits,
        ),
        # One token at a time: neither its block count nor the shape of its products depends on the others.
        block=1 if spec.batch_invariant else tokens,
        varying_with=(*caches, sinks, logit_scale, *kv_scales),
    )
    return results


def _attend(
    spec: SparseMLASpec,
    q: jax.Array,
    indices: jax.Array,
    lengths: jax.Array,
    caches: tuple[jax.Array, ...],
    sinks: jax.Array,
    logit_scale: jax.Array,
    kv_scales: tuple[jax.Array, ...],
) -> Results:
    """out [t, H, L], lse and max_logits [t, H] of a block of tokens: q [t, H, D], indices [t, K], lengths [t]."""
    dtype = accumulation_dtype(spec.q_dtype)
    query = q.astype(dtype)
    operands = (q, indices, lengths, *caches, sinks, logit_scale, *kv_scales)
    rows = (q.shape[0], spec.num_heads)
    state = online_softmax.start(rows, spec.latent_dim, dtype, *operands)
    window = jnp.clip(lengths, 0, spec.window)
    rest = jnp.clip(lengths, spec.window, spec.num_selected) - spec.window
    sections = [(spec.cache, indices[:, : spec.window], window)]
    if spec.compressed is not None:
        sections.append((spec.compressed, indices[:, spec.window :], rest))
    seen = jnp.zeros(q.shape[0], bool)
    for (cache_spec, columns, active), cache, scale in zip(sections, caches, kv_scales, strict=True):
        column = jnp.arange(columns.shape[1], dtype=jnp.int32)
        seen |= (valid_slots(columns, cache_spec) & (column < active[:, None])).any(axis=1)
        if columns.shape[1]:
            state = _accumulate(spec, cache_spec, state, query, cache, columns, active, logit_scale, scale)
    total, lse = online_softmax.finish(state, seen[:, None])
    # A sink of -inf takes no weight: sigmoid(inf) is 1.
    share = jax.nn.sigmoid(jnp.where(seen[:, None], lse, 0) - sinks) / total
    out = jnp.where(seen[:, None, None], state.out * share[..., None], 0)
    results = out.astype(spec.out_dtype), lse.astype(spec.lse_dtype)
    if not spec.max_logits:
        return results
    greatest = jnp.where(seen[:, None], state.maximum + (total - total), -jnp.inf)  # NaN where lse is
    return *results, greatest.astype(spec.lse_dtype)


def _accumulate(
    spec: SparseMLASpec,
    cache_spec: CacheSpec,
    state: online_softmax.State,
    query: jax.Array,
    cache: jax.Array,
    indices: jax.Array,
    active: jax.Array,
    logit_scale: jax.Array,
    kv_scale: jax.Array,
) -> online_softmax.State:
    """The online softmax's state after the slots `indices` [t, K] of one cache, the first active[t] of each row."""
    dtype = query.dtype
    # Values of 16 bits, and packed ones, are exact in tf32 and bf16 products; a per-tensor scale makes them wider.
    narrow = spec.q_dtype not in ("float32", "float64") and cache_spec.dtype in ("bfloat16", "float16", "uint8")
    precision = lax.Precision.DEFAULT if narrow else lax.Precision.HIGHEST
    num_columns = indices.shape[1]
    block_keys = min(BLOCK_KEYS, num_columns)

    def step(i: jax.Array, state: online_softmax.State) -> online_softmax.State:
        # The last block moves back to end at the last column, and skips the columns that the block before has seen.
        start = jnp.minimum(i * block_keys, num_columns - block_keys)
        slots = lax.dynamic_slice_in_dim(indices, start, block_keys, axis=1)
        column = start + jnp.arange(block_keys, dtype=jnp.int32)
        valid = valid_slots(slots, cache_spec) & (column >= i * block_keys) & (column < active[:, None])
        kv = gather_rows(cache, jnp.where(valid, slots, 0), cache_spec, dtype) * kv_scale
        kv = jnp.where(valid[..., None], kv, 0)  # slot 0 stands in and may hold NaN, and 0 * NaN is NaN
        scores = lax.dot_general(query, kv, (((2,), (2,)), ((0,), (0,))), precision=precision) * logit_scale
        scores = jnp.where(valid[:, None, :], scores, -jnp.inf)
        latent = kv[..., : spec.latent_dim]
        numbers = (((2,), (1,)), ((0,), (0,)))
        return online_softmax.update(
            state, scores, lambda weights: lax.dot_general(weights, latent, numbers, precision=precision)
        )

    blocks = (active.max() + (block_keys - 1)) // block_keys
    return lax.fori_loop(0, blocks, step, state)

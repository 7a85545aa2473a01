"""mla_prefill in portable XLA: tiles of queries against blocks of keys with an online softmax.

A tile belongs to one request, so a ragged batch costs the work of its own lengths and no more; keys that a causal tile
can't see are never visited. The backward pass recomputes the weights from the saved lse (Dao et al., arXiv:2205.14135),
so memory is linear in the number of tokens in both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from tsmla_jax.ops import online_softmax
from tsmla_jax.ops.inputs import Scales, accumulation_dtype, as_scale
from tsmla_jax.ops.loops import carry
from tsmla_jax.ops.mla_prefill.call import SEVERAL_TIMES, Results
from tsmla_jax.ops.mla_prefill.selection import selected
from tsmla_jax.ops.mla_prefill.sinks import d_sinks, share
from tsmla_jax.ops.transforms import refuse_derivative
from tsmla_kernels.contract import PrefillSpec

Q_TILE = 128
KV_BLOCK = 256

Operands = tuple[jax.Array, ...]


class _Tile(NamedTuple):
    """Q_TILE packed rows from `row` on; the `valid` ones belong to the tile's request."""

    row: jax.Array
    valid: jax.Array
    last_visible: jax.Array  # of each row: the packed row of the last key that it sees
    kv_start: jax.Array
    kv_end: jax.Array
    num_blocks: jax.Array


def mla_prefill(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cu_seqlens_q: jax.Array,
    cu_seqlens_kv: jax.Array,
    scales: Scales,
    *selection: jax.Array,
    spec: PrefillSpec,
    sinks: jax.Array | None = None,
) -> Results:
    """out, lse and, if the spec has them, max_logits as the public mla_prefill documents them. Reverse-mode
    differentiable."""
    dtype = accumulation_dtype(spec.q_dtype)
    rest = selection if sinks is None else (*selection, sinks)
    operands = (q, k, v, scales.logits(dtype), as_scale(scales.v, dtype), cu_seqlens_q, cu_seqlens_kv, *rest)
    # All operands get one varying type before the custom derivative: shard_map then sums a replicated operand's
    # cotangent.
    return _attend(spec, *(carry(x, *operands) for x in operands))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    spec: PrefillSpec,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    logit_scale: jax.Array,
    v_scale: jax.Array,
    cu_seqlens_q: jax.Array,
    cu_seqlens_kv: jax.Array,
    *rest: jax.Array,
) -> Results:
    dtype = accumulation_dtype(spec.q_dtype)
    operands = (q, k, v, logit_scale, v_scale, cu_seqlens_q, cu_seqlens_kv, *rest)
    selection, sinks = _split(spec, rest)
    padded_q, padded_k, padded_v = _at_least(q, Q_TILE), _at_least(k, KV_BLOCK), _at_least(v, KV_BLOCK)
    heads, v_dim = spec.num_heads, spec.v_head_dim
    num_tiles, tile_of = _tiling(spec, cu_seqlens_q, cu_seqlens_kv, padded_q.shape[0])
    select = _selecting(selection)

    def step(t: jax.Array, results: Results) -> Results:
        tile = tile_of(t)
        query = _rows(padded_q, tile.row, Q_TILE).astype(dtype)

        def block(i: jax.Array, so_far: tuple[online_softmax.State, jax.Array]) -> Any:
            state, chosen = so_far
            _, key, value, visible = _block(tile, i, padded_k, padded_v, dtype, select)
            scores = _dot("qhd,khd->hqk", query, key, spec) * logit_scale
            scores = jnp.where(visible, scores, -jnp.inf)
            state = online_softmax.update(state, scores, lambda weights: _dot("hqk,khv->hqv", weights, value, spec))
            return state, chosen | visible.any(-1)

        empty = online_softmax.start((heads, Q_TILE), v_dim, dtype, *operands)
        state, chosen = lax.fori_loop(0, tile.num_blocks, block, (empty, carry(jnp.zeros(Q_TILE, bool), *operands)))
        seen = tile.valid & (tile.kv_start < tile.kv_end) & (tile.kv_start <= tile.last_visible)
        if spec.selection:
            seen &= chosen  # a row may select none of its keys
        total, lse = online_softmax.finish(state, seen)
        out = jnp.where(seen[..., None], state.out / total[..., None] * v_scale, 0)
        if sinks is not None:
            out *= share(lse, sinks[:, None], seen)[..., None]
        found = [out.astype(spec.out_dtype), lse.astype(spec.lse_dtype)]
        if spec.max_logits:
            # NaN where lse is.
            found.append(jnp.where(seen, state.maximum + (total - total), -jnp.inf).astype(spec.lse_dtype))
        return tuple(_replace(x, new.swapaxes(0, 1), tile) for x, new in zip(results, found, strict=True))

    rows = jnp.full((padded_q.shape[0], heads), -jnp.inf, spec.lse_dtype)
    start = (jnp.zeros((padded_q.shape[0], heads, v_dim), spec.out_dtype), rows, *[rows] * spec.max_logits)
    results = lax.fori_loop(0, num_tiles, step, tuple(carry(x, *operands) for x in start))
    return tuple(x[: spec.total_q_len] for x in results)


def _split(spec: PrefillSpec, rest: Sequence[jax.Array]) -> tuple[Sequence[jax.Array], jax.Array | None]:
    """The selection's arrays and the sinks, from the operands after the offsets."""
    return (rest[:-1], rest[-1]) if spec.sinks else (rest, None)


def _forward(spec: PrefillSpec, *operands: jax.Array) -> tuple[Results, tuple[Operands, ...]]:
    result = _attend(spec, *operands)
    return result, (operands, result)


def backward(spec: PrefillSpec, saved: tuple[Operands, Results], cotangents: Results) -> tuple[Any, ...]:
    """The cotangents of the operands (None for the offsets and the selection), from the operands, the forward pass' out
    and lse and their cotangents. Any implementation may have computed out and lse."""
    (q, k, v, logit_scale, v_scale, cu_seqlens_q, cu_seqlens_kv, *rest), (out, lse, *_) = saved
    d_out, d_lse, *_ = cotangents
    selection, sinks = _split(spec, rest)
    operands = (q, k, v, logit_scale, v_scale, cu_seqlens_q, cu_seqlens_kv, *rest, d_out, d_lse)
    dtype = accumulation_dtype(spec.q_dtype)
    of_sinks: Operands = ()
    if sinks is not None:
        of_sinks = (d_sinks(lse, out, d_out, sinks, dtype),)
        d_out = d_out.astype(dtype) * share(lse.astype(dtype), sinks, lse != -jnp.inf)[..., None]
    # d scores = weights * (d weights - shift): shift has the term of the softmax's sum, and lse's own cotangent.
    shift = (d_out.astype(dtype) * out.astype(dtype)).sum(-1) - d_lse.astype(dtype)
    padded_q, padded_k, padded_v = _at_least(q, Q_TILE), _at_least(k, KV_BLOCK), _at_least(v, KV_BLOCK)
    padded_d_out, padded_shift, padded_lse = (_at_least(x, Q_TILE) for x in (d_out, shift, lse))
    num_tiles, tile_of = _tiling(spec, cu_seqlens_q, cu_seqlens_kv, padded_q.shape[0])
    select = _selecting(selection)

    def step(t: jax.Array, totals: Operands) -> Operands:
        d_q, *of_keys = totals
        tile = tile_of(t)
        valid = tile.valid[:, None, None]
        query = jnp.where(valid, _rows(padded_q, tile.row, Q_TILE).astype(dtype), 0)
        d_tile = jnp.where(valid, _rows(padded_d_out, tile.row, Q_TILE).astype(dtype), 0)
        tile_shift = _rows(padded_shift, tile.row, Q_TILE).swapaxes(0, 1)[..., None]
        tile_lse = _rows(padded_lse, tile.row, Q_TILE).astype(dtype).swapaxes(0, 1)[..., None]

        def block(i: jax.Array, state: Operands) -> Operands:
            d_query, d_k, d_v, d_logit_scale, d_v_scale = state
            row, key, value, visible = _block(tile, i, padded_k, padded_v, dtype, select)
            scores = _dot("qhd,khd->hqk", query, key, spec)
            visible = visible & (tile_lse != -jnp.inf)
            weights = jnp.where(visible, jnp.exp(jnp.where(visible, scores * logit_scale - tile_lse, 0)), 0)
            d_weights = _dot("qhv,khv->hqk", d_tile, value, spec)
            d_scores = jnp.where(visible, weights * (d_weights * v_scale - tile_shift), 0)
            d_query += _dot("hqk,khd->qhd", d_scores, key, spec) * logit_scale
            d_k = _add(d_k, _dot("hqk,qhd->khd", d_scores, query, spec) * logit_scale, row)
            d_v = _add(d_v, _dot("hqk,qhv->khv", weights, d_tile, spec) * v_scale, row)
            return d_query, d_k, d_v, d_logit_scale + (d_scores * scores).sum(), d_v_scale + (weights * d_weights).sum()

        d_query = carry(jnp.zeros(query.shape, dtype), *operands)
        d_query, *of_keys = lax.fori_loop(0, tile.num_blocks, block, (d_query, *of_keys))
        return _replace(d_q, d_query.astype(q.dtype), tile), *of_keys

    totals = (
        jnp.zeros(padded_q.shape, q.dtype),
        jnp.zeros(padded_k.shape, dtype),
        jnp.zeros(padded_v.shape, dtype),
        jnp.zeros((), dtype),
        jnp.zeros((), dtype),
    )
    d_q, d_k, d_v, d_logit_scale, d_v_scale = lax.fori_loop(
        0, num_tiles, step, tuple(carry(x, *operands) for x in totals)
    )
    d_q, d_k, d_v = d_q[: spec.total_q_len], d_k[: spec.total_kv_len], d_v[: spec.total_kv_len]
    found = (d_q, d_k.astype(k.dtype), d_v.astype(v.dtype), d_logit_scale, d_v_scale)
    found = refuse_derivative((*found, *of_sinks), (), "the gradient of mla_prefill", SEVERAL_TIMES)
    return *found[:5], *(None,) * (2 + len(selection)), *found[5:]


_attend.defvjp(_forward, backward)


def _tiling(
    spec: PrefillSpec, cu_seqlens_q: jax.Array, cu_seqlens_kv: jax.Array, num_rows: int
) -> tuple[jax.Array, Callable[[jax.Array], _Tile]]:
    """How many tiles of queries there are, and the function from a tile's index to the tile."""
    q_lens = jnp.clip(cu_seqlens_q[1:] - cu_seqlens_q[:-1], 0, spec.max_q_len)
    kv_lens = jnp.clip(cu_seqlens_kv[1:] - cu_seqlens_kv[:-1], 0, spec.max_kv_len)
    tiles = (q_lens + (Q_TILE - 1)) // Q_TILE
    ends = jnp.cumsum(tiles, dtype=jnp.int32)

    def tile_of(t: jax.Array) -> _Tile:
        request = jnp.minimum((ends <= t).sum(dtype=jnp.int32), spec.batch - 1)
        q_start, q_len = cu_seqlens_q[request], q_lens[request]
        kv_start, kv_len = cu_seqlens_kv[request], kv_lens[request]
        first = q_start + (t - (ends[request] - tiles[request])) * Q_TILE
        # The very last tile may reach past the array. It then starts earlier, and `valid` skips the rows of the tile
        # before.
        row = jnp.clip(first, 0, num_rows - Q_TILE)
        rows = row + jnp.arange(Q_TILE, dtype=jnp.int32)
        valid = (rows >= first) & (rows < q_start + q_len)
        # jax 0.9.1 can't fill an array with a value that varies over a mesh axis.
        last_visible = jnp.broadcast_to(kv_start + kv_len - 1, rows.shape)
        if spec.causal:
            last_visible = jnp.minimum(last_visible, kv_start + (rows - q_start) + kv_len - q_len)
        end = jnp.where(valid, last_visible, kv_start - 1).max() + 1
        num_blocks = jnp.maximum(end - kv_start + (KV_BLOCK - 1), 0) // KV_BLOCK
        return _Tile(row, valid, last_visible, kv_start, kv_start + kv_len, num_blocks)

    return ends[-1], tile_of


Select = Callable[[_Tile, jax.Array], jax.Array]
"""A function of a tile and of positions of keys in its request: the [Q_TILE, keys] pairs that the selection lets see
each other."""


def _selecting(selection: Sequence[jax.Array]) -> Select | None:
    """The function by which a call selects keys; None if the call has no selection."""
    if not selection:
        return None
    words, rows = selection
    padded = _at_least(rows, Q_TILE)
    return lambda tile, positions: selected(words, _rows(padded, tile.row, Q_TILE), positions)


def _block(
    tile: _Tile, i: jax.Array, k: jax.Array, v: jax.Array, dtype: jnp.dtype, select: Select | None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The tile's i-th block of keys: its first row, keys, values, and which [Q_TILE, KV_BLOCK] pairs are visible."""
    first = tile.kv_start + i * KV_BLOCK
    row = jnp.clip(first, 0, k.shape[0] - KV_BLOCK)
    rows = row + jnp.arange(KV_BLOCK, dtype=jnp.int32)
    used = (rows >= first) & (rows < tile.kv_end)
    # Rows past a request's end may be NaN, and 0 * NaN is NaN.
    key = jnp.where(used[:, None, None], _rows(k, row, KV_BLOCK).astype(dtype), 0)
    value = jnp.where(used[:, None, None], _rows(v, row, KV_BLOCK).astype(dtype), 0)
    visible = tile.valid[:, None] & used & (rows <= tile.last_visible[:, None])
    if select is not None:
        visible &= select(tile, rows - tile.kv_start)
    return row, key, value, visible


def _dot(equation: str, a: jax.Array, b: jax.Array, spec: PrefillSpec) -> jax.Array:
    # 16-bit inputs are exact in tf32, so the fast product of a GPU loses nothing of them; nor does a TPU's of bf16.
    wide = spec.q_dtype in ("float32", "float64")
    return jnp.einsum(equation, a, b, precision=lax.Precision.HIGHEST if wide else lax.Precision.DEFAULT)


def _at_least(x: jax.Array, rows: int) -> jax.Array:
    """x padded to at least `rows` rows, so that a slice of `rows` fits; a symbolic length always gets `rows` more."""
    length = x.shape[0]
    missing = max(0, rows - length) if isinstance(length, int) else rows
    return jnp.pad(x, ((0, missing), *[(0, 0)] * (x.ndim - 1))) if missing else x


def _rows(x: jax.Array, row: jax.Array, size: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, row, size)


def _replace(x: jax.Array, new: jax.Array, tile: _Tile) -> jax.Array:
    old = _rows(x, tile.row, Q_TILE)
    valid = tile.valid.reshape(-1, *[1] * (x.ndim - 1))
    return lax.dynamic_update_slice_in_dim(x, jnp.where(valid, new, old), tile.row, 0)


def _add(x: jax.Array, new: jax.Array, row: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(x, _rows(x, row, KV_BLOCK) + new, row, 0)

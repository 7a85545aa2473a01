"""indexer_loss in portable XLA: blocks of tokens, and for each of them one pass over blocks of its keys.

With P the head-summed probabilities of a token's keys, N their sum, I the indexer's logits and lse their logsumexp,

    loss = (sum of P log P - sum of P I) / N - log N + lse,        d loss / d I = softmax(I) - P / N.

The pass keeps these sums online; N and lse are all that the gradient's pass needs.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from tsmla_jax.ops.indexer_loss.reference import Attention, Index, Where, total_of
from tsmla_jax.ops.loops import carry
from tsmla_jax.ops.ragged import seen_keys
from tsmla_jax.ops.selected import index_scores
from tsmla_jax.ops.selected.blocks import over_token_blocks
from tsmla_jax.ops.selected.index_scores import Block, Columns, Gradient
from tsmla_jax.ops.transforms import refuse_derivative
from tsmla_kernels.contract.indexer import IndexerLossSpec


class _Call(NamedTuple):
    """A call without its arrays."""

    spec: IndexerLossSpec
    head_axis: str | None

    @property
    def block(self) -> int:
        """Tokens at once."""
        spec, width = self.spec, min(index_scores.BLOCK_COLUMNS, self.spec.num_columns)
        return index_scores.tokens_at_once(
            width, spec.head_dim, spec.num_heads, spec.index.head_dim, spec.index.num_heads
        )

    @property
    def narrow(self) -> bool:
        """Whether the attention's queries and keys have 16 bits."""
        return {self.spec.q_dtype, self.spec.cache.dtype} <= {"bfloat16", "float16"}


class _Arrays(NamedTuple):
    """The arrays of a call. total: the logarithm of each head's sum [T, H]. rows: which keys each token has, a row a
    token: indices and lengths, or requests and how many keys are seen. tables: the texts' block tables, not read if the
    keys are given by indices."""

    index_q: jax.Array
    index_weights: jax.Array
    index_cache: jax.Array
    q: jax.Array
    kv_cache: jax.Array
    total: jax.Array
    scale: jax.Array
    rows: tuple[jax.Array, jax.Array]
    tables: jax.Array

    def tokens(self) -> tuple[jax.Array, ...]:
        """The arrays with a row a token."""
        return self.index_q, self.index_weights, self.q, self.total, *self.rows

    def with_tokens(self, *rows: jax.Array) -> _Arrays:
        """The arrays of a call with some of the tokens; `rows` are these tokens' rows, in the order of `tokens`."""
        index_q, weights, q, total, first, second = rows
        return self._replace(index_q=index_q, index_weights=weights, q=q, total=total, rows=(first, second))


def indexer_loss(
    index: Index, attention: Attention, where: Where, *, spec: IndexerLossSpec, head_axis: str | None
) -> jax.Array:
    """loss [T] as the public indexer_loss documents it."""
    dtype = index[1].dtype
    if 0 in (spec.num_tokens, spec.num_columns) or (spec.paged and spec.num_requests == 0):
        return jnp.zeros((spec.num_tokens,), dtype)
    q, kv_cache, lse, sinks, scale = attention
    total = total_of(lse.astype(dtype), sinks, head_axis)
    rows, tables = _rows(spec, where)
    arrays = _Arrays(
        index_q=index[0],
        index_weights=index[1],
        index_cache=index[2],
        q=q,
        kv_cache=kv_cache,
        total=total,
        scale=scale.astype(dtype),
        rows=rows,
        tables=tables,
    )
    # Under shard_map a cotangent is summed over the devices where its operand was the same; so all operands of the
    # indexer become as different as the loss is, which the devices of head_axis have in common.
    varying = _varying(arrays, head_axis)
    index_q, weights, cache = (carry(x, *varying) for x in index)
    arrays = arrays._replace(index_q=index_q, index_weights=weights, index_cache=cache)
    loss: jax.Array = _differentiable(_Call(spec, head_axis), arrays)
    return loss


def _rows(spec: IndexerLossSpec, where: Where) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """Which keys each token has (two arrays with a row a token), and the block tables."""
    first, second, *offsets = where
    assert first is not None
    if not spec.paged:
        lengths = jnp.full((spec.num_tokens,), spec.num_columns, jnp.int32) if second is None else second
        return (first, lengths), jnp.zeros((1, 1), jnp.int32)
    assert second is not None
    if offsets[0] is None:
        return (jnp.arange(spec.num_tokens, dtype=jnp.int32), second), first
    return seen_keys(second, offsets[0], spec.num_tokens), first


def _varying(arrays: _Arrays, head_axis: str | None) -> list[jax.Array]:
    """The arrays that the loss varies with over devices; with head_axis, those of the attention are left out."""
    mine = [arrays.index_q, arrays.index_weights, arrays.index_cache, *arrays.rows, arrays.tables]
    if head_axis is None:
        mine += [arrays.q, arrays.kv_cache, arrays.total, arrays.scale]
    return mine


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(call: _Call, arrays: _Arrays) -> jax.Array:
    return _losses(call, arrays)[0]


def _forward(call: _Call, arrays: _Arrays) -> tuple[jax.Array, Any]:
    loss, mass, choice_lse = _losses(call, arrays)
    return loss, (arrays, mass, choice_lse)


def _backward(call: _Call, saved: Any, d_loss: jax.Array) -> tuple[_Arrays]:
    arrays, mass, choice_lse = saved
    spec = call.spec
    varying = [*_varying(arrays, call.head_axis), d_loss]
    narrow = index_scores.are_narrow(spec.index)

    def body(total: Gradient, fresh: jax.Array, *operands: jax.Array) -> Gradient:
        mass, choice_lse, d_loss, *rows = operands
        mine = arrays.with_tokens(*rows)

        def step(total: Gradient, block: Block) -> Gradient:
            block = block._replace(valid=block.valid & fresh[:, None])
            keys = index_scores.rows_in(mine.index_cache, block)
            scores = index_scores.score(mine.index_q, mine.index_weights, keys, narrow)
            choice = jnp.exp(scores.logits - choice_lse[:, None])
            target = _probabilities(call, mine, block) / mass[:, None]
            d_logits = jnp.where(block.valid, d_loss[:, None] * (choice - target), 0)
            return index_scores.add_gradient(
                total,
                mine.index_q,
                mine.index_weights,
                keys,
                block=block,
                dots=scores.dots,
                d_logits=d_logits,
                narrow=narrow,
            )

        return _columns(spec, mine).fold(step, total)

    dtype = arrays.index_weights.dtype
    slots = spec.cache.num_slots
    start = Gradient(
        jnp.zeros(arrays.index_q.shape, arrays.index_q.dtype),
        jnp.zeros(arrays.index_weights.shape, dtype),
        jnp.zeros((slots, spec.index.head_dim), dtype),
    )
    seen = mass != 0
    d_loss = jnp.where(seen, d_loss, 0)
    found = index_scores.gradient_over_blocks(
        body,
        (jnp.where(seen, mass, 1), choice_lse, d_loss, *arrays.tokens()),
        Gradient(*(carry(x, *varying) for x in start)),
        block=call.block,
    )
    keys = found.keys.reshape(arrays.index_cache.shape).astype(arrays.index_cache.dtype)
    d_q, d_weights, d_keys = refuse_derivative(
        (found.q, found.weights, keys),
        varying,
        "the gradient of indexer_loss",
        "implementation='reference' can be differentiated several times",
    )
    # The attention's side gets no gradient: its cotangents are None.
    rest = dict.fromkeys(("q", "kv_cache", "total", "scale", "tables"))
    return (_Arrays(index_q=d_q, index_weights=d_weights, index_cache=d_keys, rows=(None, None), **rest),)  # type: ignore[arg-type]


_differentiable.defvjp(_forward, _backward)


class _Sums(NamedTuple):
    """The sums over a token's keys so far, each [t]. maximum and choice: of the indexer's logits, the greatest and the
    sum of exp(I - maximum). mass, entropy and cross: the sums of P, of P log P and of P I."""

    maximum: jax.Array
    choice: jax.Array
    mass: jax.Array
    entropy: jax.Array
    cross: jax.Array


def _losses(call: _Call, arrays: _Arrays) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The loss of each token, the sum of its head-summed probabilities and the logsumexp of its logits, each [T]."""
    spec = call.spec
    dtype = arrays.index_weights.dtype
    varying = _varying(arrays, call.head_axis)

    def block(*rows: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        mine = arrays.with_tokens(*rows)

        def step(sums: _Sums, block: Block) -> _Sums:
            keys = index_scores.rows_in(mine.index_cache, block)
            narrow = index_scores.are_narrow(spec.index)
            logits = index_scores.score(mine.index_q, mine.index_weights, keys, narrow).logits
            target = _probabilities(call, mine, block)
            maximum = jnp.maximum(sums.maximum, jnp.where(block.valid, logits, -jnp.inf).max(-1))
            # A row without a key so far has no maximum; 0 stands in for it, so that no inf - inf arises.
            finite = jnp.where(jnp.isneginf(maximum), 0, maximum)
            old = jnp.where(jnp.isneginf(sums.maximum), 0, sums.choice * jnp.exp(sums.maximum - finite))
            choice = jnp.where(block.valid, jnp.exp(logits - finite[:, None]), 0).sum(-1)
            logs = jnp.log(jnp.where(target > 0, target, 1))
            return _Sums(
                maximum,
                old + choice,
                sums.mass + target.sum(-1),
                sums.entropy + (target * logs).sum(-1),
                sums.cross + (target * logits).sum(-1),
            )

        none = jnp.zeros(mine.index_q.shape[:1], dtype)
        start = _Sums(jnp.full_like(none, -jnp.inf), none, none, none, none)
        sums = _columns(spec, mine).fold(step, _Sums(*(carry(x, *varying) for x in start)))
        seen = sums.mass != 0  # true for NaN, too, which must not look like a row without keys
        mass = jnp.where(seen, sums.mass, 1)
        chosen = sums.choice != 0
        choice_lse = jnp.where(chosen, sums.maximum + jnp.log(jnp.where(chosen, sums.choice, 1)), 0)
        loss = (sums.entropy - sums.cross) / mass - jnp.log(mass) + choice_lse
        # Rounding may leave the loss of a perfect choice a little below 0.
        return jnp.where(seen, jnp.maximum(loss, 0), 0), sums.mass, choice_lse

    each = jax.ShapeDtypeStruct((spec.num_tokens,), dtype)
    loss, mass, choice_lse = over_token_blocks(
        block, arrays.tokens(), (each, each, each), block=call.block, varying_with=tuple(varying)
    )
    return loss, mass, choice_lse


def _columns(spec: IndexerLossSpec, arrays: _Arrays) -> Columns:
    if spec.paged:
        return index_scores.paged_columns(arrays.tables, *arrays.rows, spec.index.cache)
    return index_scores.selected_columns(*arrays.rows, spec.index.cache)


def _probabilities(call: _Call, arrays: _Arrays, block: Block) -> jax.Array:
    """The attention's probabilities of a block of columns, summed over all heads [t, C]; 0 where there is no key."""
    keys = index_scores.rows_in(arrays.kv_cache, block)
    dtype = arrays.index_weights.dtype
    dots = index_scores.dot("thd,tkd->thk", arrays.q, keys, call.narrow, dtype) * arrays.scale
    summed = jnp.where(block.valid, jnp.exp(dots - arrays.total[..., None]).sum(1), 0)
    return summed if call.head_axis is None else lax.psum(summed, call.head_axis)

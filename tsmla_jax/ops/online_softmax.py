"""The online softmax over blocks of keys (arXiv:1805.02867), which all attention in portable XLA shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from tsmla_jax.ops.loops import carry


class State(NamedTuple):
    """Each row after the keys so far: the greatest score (-inf before the first visible key), and the sums of
    exp(score - maximum) and of exp(score - maximum) * value."""

    maximum: jax.Array
    total: jax.Array
    out: jax.Array


def start(rows: tuple[int, ...], width: int, dtype: jnp.dtype, *operands: jax.Array) -> State:
    """The state of `rows` before the first key, typed as the carry of a loop whose body reads `operands`."""
    state = jnp.full(rows, -jnp.inf, dtype), jnp.zeros(rows, dtype), jnp.zeros((*rows, width), dtype)
    return State(*(carry(x, *operands) for x in state))


def update(state: State, scores: jax.Array, weighted_sum: Callable[[jax.Array], jax.Array]) -> State:
    """The state after a block of keys with these scores [*rows, keys], -inf for keys that a row doesn't see.
    weighted_sum(weights) is the product of the block's weights and values."""
    maximum = jnp.maximum(state.maximum, scores.max(-1))
    # While a row has seen nothing its maximum is -inf; 0 stands in for it, so that no inf - inf arises.
    shift = jnp.where(maximum == -jnp.inf, 0, maximum)
    weights = jnp.exp(scores - shift[..., None])
    decay = jnp.exp(state.maximum - shift)
    total = state.total * decay + weights.sum(-1)
    return State(maximum, total, state.out * decay[..., None] + weighted_sum(weights))


def finish(state: State, seen: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sum of weights and the lse of each row; 1 and -inf in rows that saw no key. seen: which rows saw one,
    broadcastable. Both are NaN in a row that saw keys and whose scores are all -inf, since its weights would be 0 / 0:
    it must not look like a row that saw no key.
    """
    maximum = jnp.where(seen, state.maximum, 0)
    total = jnp.where(seen, state.total + (maximum - maximum), 1)  # -inf - -inf is NaN, every other difference is 0
    return total, jnp.where(seen, maximum + jnp.log(total), -jnp.inf)

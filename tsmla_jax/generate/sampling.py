"""From logits to tokens: greedy, or temperature and top-p sampling, on the device."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

NOT_FINITE = -2
"""Stands in the place of a token if the largest of the logits that it would be chosen by is NaN or infinite."""


class Sampling(NamedTuple):
    """How to sample, as `select_tokens` takes it: u32, f32 and f32 scalars."""

    seed: Any
    temperature: Any
    top_p: Any


def select_tokens(
    logits: jax.Array,
    requests: jax.Array,
    positions: jax.Array,
    seed: jax.Array,
    temperature: jax.Array,
    top_p: jax.Array,
    *,
    greedy: bool,
) -> jax.Array:
    """Chooses one token a row.

    A row's random bits depend only on (seed, request, position). So for the same logits, neither the other texts of a
    batch nor speculation changes a token: a draft is accepted if it equals the token sampled in its place, which for
    drafts that are not random themselves is exact rejection sampling (Leviathan et al., arXiv:2211.17192, with q a
    point mass).

    Args:
      logits: [N, V].
      requests, positions: [N] i32, the request of each row, and the position that the chosen token will have.
      seed: u32 scalar.
      temperature: f32 scalar, above 0; unused when greedy.
      top_p: f32 scalar in (0, 1]; the smallest set of most likely tokens whose probability reaches it is kept.
      greedy: whether to take the most likely token, or of several the one with the lowest id.

    Returns:
      [N] i32; NOT_FINITE in a row whose largest logit is not finite, where NaN counts as the largest.
    """
    logits = logits.astype(jnp.float32)
    if greedy:
        best = jnp.argmax(logits, axis=-1)
        largest = jnp.take_along_axis(logits, best[:, None], axis=-1)[:, 0]
        return jnp.where(jnp.isfinite(largest), best.astype(jnp.int32), NOT_FINITE)

    def sample(row: jax.Array, request: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), request), position)
        return jax.random.categorical(key, row)

    tokens = jax.vmap(sample)(_keep_top_p(logits / temperature, top_p), requests, positions).astype(jnp.int32)
    return jnp.where(jnp.isfinite(logits.max(axis=-1)), tokens, NOT_FINITE)


def _keep_top_p(logits: jax.Array, top_p: jax.Array) -> jax.Array:
    """Logits [N, V] with -inf outside each row's nucleus (Holtzman et al., arXiv:1904.09751)."""
    order = jnp.argsort(-logits, axis=-1, stable=True)
    probabilities = jax.nn.softmax(jnp.take_along_axis(logits, order, axis=-1), axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities  # the mass before a token
    # The most likely token stays even if top_p is so small that it is 0 in f32.
    kept_sorted = (before < top_p) | (top_p >= 1) | (jnp.arange(logits.shape[-1]) == 0)
    kept = jnp.put_along_axis(jnp.zeros_like(kept_sorted), order, kept_sorted, axis=-1, inplace=False)
    return jnp.where(kept, logits, -jnp.inf)

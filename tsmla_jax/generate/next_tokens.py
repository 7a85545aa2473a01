"""The next tokens, from the results of the last layer: one device makes the logits of the whole vocabulary, or each of
the devices that share a copy's experts makes the logits of its part of the vocabulary.

The output projection is one of the largest matrices, and a decode step must read all of it. If it is split, a device
reads only its part, for the texts of all devices. The devices exchange the rows that the projection takes, and then the
best token of each part, or all logits if tokens are sampled.

Axes: N rows of this device's texts, V vocabulary, C hidden width, S parts of the vocabulary, E devices on the axis
EXPERT.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tsmla_jax.generate.config import ModelConfig
from tsmla_jax.generate.mesh import CONTEXT, EXPERT, EXPERT_SHARDS, MeshShape
from tsmla_jax.generate.sampling import NOT_FINITE, Sampling, select_tokens


def choose_tokens(
    output: jax.Array,
    x: jax.Array,
    requests: jax.Array,
    positions: jax.Array,
    sampling: Sampling,
    *,
    config: ModelConfig,
    mesh: MeshShape,
    greedy: bool,
) -> jax.Array:
    """The token chosen after each row.

    Args:
      output: [V, C], or [V / S, C], this device's part of the vocabulary in the order of the axes EXPERT_SHARDS.
      x: [N, C], the rows of this device's texts after the last norm; the same on all devices of the axis CONTEXT.
      requests, positions: [N] i32, as in `select_tokens`.
      sampling: how to choose.
      config: the model.
      mesh: the sizes of the mesh's axes.
      greedy: whether to take the most likely token.

    Returns:
      [N] i32, as `select_tokens` returns them.
    """
    split = output.shape[0] != config.vocab_size
    every = lax.all_gather(x, EXPERT, tiled=True) if split and mesh.expert > 1 else x
    logits = jnp.einsum("nc,vc->nv", every, output, preferred_element_type=jnp.float32)
    if split and greedy:
        return _best_of_all(logits, x.shape[0])
    if split:
        logits = _whole_rows(logits, x.shape[0], mesh)
    return select_tokens(logits, requests, positions, *sampling, greedy=greedy)


def _best_of_all(logits: jax.Array, count: int) -> jax.Array:
    """The most likely tokens of this device's `count` rows, from the logits [E N, V / S] of all devices' rows."""
    best = jnp.argmax(logits, axis=-1)
    largest = jnp.take_along_axis(logits, best[:, None], axis=-1)[:, 0]
    token = best.astype(jnp.int32) + lax.axis_index(EXPERT_SHARDS) * logits.shape[1]
    packed = jnp.stack([lax.bitcast_convert_type(largest, jnp.int32), token], axis=-1)
    parts = lax.all_gather(packed, EXPERT_SHARDS)
    own = lax.dynamic_slice_in_dim(parts, lax.axis_index(EXPERT) * count, count, axis=1)
    values = lax.bitcast_convert_type(own[..., 0], jnp.float32)
    # The first of equal tokens wins, as in a whole row: parts are in the order of the vocabulary. NaN counts as
    # largest.
    part = jnp.argmax(values, axis=0)[None]
    value, token = (jnp.take_along_axis(each, part, axis=0)[0] for each in (values, own[..., 1]))
    return jnp.where(jnp.isfinite(value), token, NOT_FINITE)


def _whole_rows(logits: jax.Array, count: int, mesh: MeshShape) -> jax.Array:
    """The whole logits [N, V] of this device's `count` rows, from the logits [E N, V / S] of all devices' rows."""
    parts = logits.reshape(mesh.expert, 1, count, -1)
    if mesh.expert > 1:
        parts = lax.all_to_all(parts, EXPERT, split_axis=0, concat_axis=0)
    if mesh.context > 1:
        parts = lax.all_gather(parts, CONTEXT, axis=1, tiled=True)
    return jnp.moveaxis(parts, 2, 0).reshape(count, -1)

"""The products of new tokens in V3.2's layer: latents, the indexer's keys and queries, and the heads' queries."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from tsmla_jax import sparse
from tsmla_jax.nn.checkpoints.weights import Params
from tsmla_jax.nn.mla import functional
from tsmla_jax.nn.products.linear import product
from tsmla_jax.nn.v32.config import V32Config
from tsmla_jax.ops.selected import indexer
from tsmla_kernels.contract.packed import Rotation

KEY_NORM_EPS = 1e-6


class Angles(NamedTuple):
    """The cosines and sines of the angles at the new tokens' positions, f32 [T, R / 2] each."""

    cos: jax.Array
    sin: jax.Array


class Projected(NamedTuple):
    """The products of the new tokens before attention, and the product after it.

    Attributes:
        latent, k_rope: [T, L] normed, and [T, R] not rotated yet.
        keys: the indexer's keys [T, Di], not rotated yet; None without an indexer.
        asked: the indexer's queries and head weights (`indexer_queries`); None if it does not choose.
        q_nope, q_rope: [T, H, N], and [T, H, R] rotated.
        out: the function from heads' outputs [T, H, V] to the layer's result [T, E], which may include the residual.
        absorbed, kv_cache: absorbed queries [T, H, L + R], and the kv cache with the new tokens written, where a kernel
            has made both; then latent, k_rope, q_nope and q_rope are None.
        index_cache: the cache of indexer keys with the new ones written, where a kernel has done that; then keys is
            None.
    """

    latent: jax.Array | None
    k_rope: jax.Array | None
    keys: jax.Array | None
    asked: tuple[jax.Array, jax.Array] | None
    q_nope: jax.Array | None
    q_rope: jax.Array | None
    out: Callable[[jax.Array], jax.Array]
    absorbed: jax.Array | None = None
    kv_cache: jax.Array | None = None
    index_cache: jax.Array | None = None


def project(params: Params, config: V32Config, x: jax.Array, angles: Angles, quantise: bool | None) -> Projected:
    """The products of tokens x.

    quantise: whether the indexer's queries are quantised; None if the indexer does not choose.
    """
    mla = config.mla
    latent, k_rope = functional.project_latent_unrotated(params, mla, x)
    low = functional.project_low_rank_q(params, mla, x)
    q_nope, q_rope = functional.project_q(params, mla, x, *angles)
    return Projected(
        latent,
        k_rope,
        keys=indexer_keys(params, x) if config.has_indexer else None,
        asked=None if quantise is None else indexer_queries(params, config, x, low, angles, quantise=quantise),
        q_nope=q_nope,
        q_rope=q_rope,
        out=partial(functional.project_out, params, mla),
    )


def index_rotation(config: V32Config) -> Rotation:
    """The rope of the indexer's queries and keys."""
    return Rotation(config.mla.qk_rope_head_dim, 0, config.index_rope_layout)


def indexer_keys(params: Params, x: jax.Array) -> jax.Array:
    """Layer-normed keys [T, Di], not rotated yet."""
    return normed_keys(params, product(params, "indexer_wk", x))


def normed_keys(params: Params, k: jax.Array) -> jax.Array:
    """Keys [T, Di] after their layer norm."""
    k = k.astype(jnp.float32)
    k = k - k.mean(-1, keepdims=True)
    k = k * jax.lax.rsqrt((k * k).mean(-1, keepdims=True) + KEY_NORM_EPS)
    return k * params["indexer_k_norm"] + params["indexer_k_norm_bias"]


def indexer_queries(
    params: Params, config: V32Config, x: jax.Array, low: jax.Array, angles: Angles, *, quantise: bool
) -> tuple[jax.Array, jax.Array]:
    """The indexer's queries [T, Hi, Di] and head weights [T, Hi] with every constant folded in, from x and its normed
    low-rank query.
    """
    q, weights = product(params, "indexer_wq_b", low), product(params, "indexer_weights_proj", x)
    return finished_queries(config, q, weights, angles, quantise=quantise)


def finished_queries(
    config: V32Config, q: jax.Array, weights: jax.Array, angles: Angles, *, quantise: bool
) -> tuple[jax.Array, jax.Array]:
    """The results of `indexer_queries`, from its two products."""
    cos, sin = angles
    q = q.reshape(q.shape[0], math.prod(q.shape[1:]) // config.index_head_dim, config.index_head_dim)
    if quantise:
        return sparse.indexer_quantize(q, weights, cos, sin, rope_layout=config.index_rope_layout)
    q = indexer.rotate_columns(q, (cos[:, None], sin[:, None]), index_rotation(config))
    return q, indexer.fold_weights(weights, config.index_head_dim)

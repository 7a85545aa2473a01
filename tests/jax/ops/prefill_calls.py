"""Calls of mla_prefill and mla_prefill_kv that the tests share: ragged, with empty requests and rows of none."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tsmla_jax
from tests.emulator.prefill import Results

HEADS, K, V = 4, 192, 128
Q_LENS, KV_LENS = (3, 0, 5, 1, 4), (7, 4, 5, 0, 2)
PADDING = 2


def offsets(lens: tuple[int, ...]) -> jax.Array:
    return jnp.asarray(np.concatenate([[0], np.cumsum(lens)]), jnp.int32)


def attend(implementation: str, **kwargs: Any) -> Callable[..., Results]:
    fixed = {
        "cu_seqlens_q": offsets(Q_LENS),
        "cu_seqlens_kv": offsets(KV_LENS),
        "max_q_len": max(Q_LENS),
        "max_kv_len": max(KV_LENS),
        "softmax_scale": 0.07,
        "return_lse": True,
        **kwargs,
    }
    return partial(tsmla_jax.mla_prefill, implementation=implementation, **fixed)


def arrays(heads: int = HEADS, k_dim: int = K, v_dim: int = V, dtype: Any = jnp.bfloat16) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    sizes = ((sum(Q_LENS), k_dim), (sum(KV_LENS), k_dim), (sum(KV_LENS), v_dim))
    return [jnp.asarray(rng.normal(size=(rows + PADDING, heads, width)), dtype) for rows, width in sizes]


def layer_arrays(rope_dim: int = 64) -> list[jax.Array]:
    rng = np.random.default_rng(3)
    rows, keys = sum(Q_LENS) + PADDING, sum(KV_LENS) + PADDING
    shapes = [(rows, HEADS, K), (keys, HEADS, K - rope_dim + V), (keys, rope_dim)]
    return [jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes]


def attend_kv(implementation: str, **kwargs: Any) -> Callable[..., Results]:
    return partial(tsmla_jax.mla_prefill_kv, **{**attend(implementation).keywords, **kwargs})

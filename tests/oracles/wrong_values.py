"""Calls with values that TSMLA_CHECK=1 names, and others that it lets pass."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import tsmla_jax


def decode(seq_lens: Any, block_tables: Any, cu_seqlens_q: Any = None) -> jax.Array:
    ragged = {} if cu_seqlens_q is None else {"cu_seqlens_q": cu_seqlens_q, "max_q_len": 2}
    shape = (3, 1, 2, 48) if cu_seqlens_q is None else (4, 2, 48)
    return tsmla_jax.mla_decode(
        jnp.ones(shape), jnp.ones((6, 16, 48)), block_tables, seq_lens, softmax_scale=0.1, latent_dim=32, **ragged
    )


def prefill(cu_q: Any, cu_kv: Any) -> jax.Array:
    x = jnp.ones((6, 2, 8))
    return tsmla_jax.mla_prefill(
        x, x, x, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv, max_q_len=4, max_kv_len=5, softmax_scale=0.1
    )


def write(slots: Any) -> jax.Array:
    return tsmla_jax.write_kv_cache(jnp.ones((6, 16, 8)), jnp.ones((3, 8)), None, slots)


def gather(starts: Any, lens: Any, block_tables: Any) -> jax.Array:
    return tsmla_jax.gather_kv_cache(jnp.ones((6, 16, 8)), block_tables, starts, lens, total_len=40)


TABLES = [[0, 1], [2, 3], [4, 5]]

WRONG = [
    (decode, ([5, 33, 0], TABLES), r"seq_lens: request 1 has 33 keys; legal: 0 to 32"),
    (decode, ([5, 3, -1], TABLES), r"seq_lens: request 2 has -1 keys"),
    (decode, ([5, 17, 0], [[0, 1], [2, 6], [4, 5]]), r"block_tables: request 1 names page 6 in entry 1.*legal: 0 to 5"),
    (decode, ([5, 5, 5], [[0, 1], [2, 3], [-1, 5]]), r"block_tables: request 2 names page -1 in entry 0"),
    (decode, ([5, 5, 5], TABLES, [0, 2, 1, 3]), r"cu_seqlens_q: request 1 has -1 tokens"),
    (decode, ([5, 5, 5], TABLES, [0, 1, 4, 4]), r"cu_seqlens_q: request 1 has 3 tokens; legal: at most max_q_len = 2"),
    (decode, ([5, 5, 5], TABLES, [1, 1, 2, 3]), r"cu_seqlens_q: starts at 1; legal: 0"),
    (decode, ([5, 5, 5], TABLES, [0, 2, 4, 5]), r"cu_seqlens_q: ends at 5; legal: at most the 4"),
    (prefill, ([0, 2, 1], [0, 1, 2]), r"cu_seqlens_q: request 1 has -1 tokens"),
    (prefill, ([0, 3, -(2**31)], [0, 1, 2]), r"cu_seqlens_q: request 1 has -2147483651 tokens"),
    (prefill, ([0, 1, 2], [0, 0, 6]), r"cu_seqlens_kv: request 1 has 6 tokens; legal: at most max_kv_len = 5"),
    (write, ([0, 96, 3],), r"slot_mapping: token 1 goes to slot 96; legal: -1, or 0 to 95"),
    (write, ([0, 4, -2],), r"slot_mapping: token 2 goes to slot -2"),
    (write, ([7, 0, 7],), r"slot_mapping: tokens 0 and 2 both go to slot 7"),
    (gather, ([0, 30, 0], [3, 3, 3], TABLES), r"starts, lens: request 1 asks for 3 tokens from 30 on"),
    (gather, ([0, 16, 0], [3, 3, 3], [[0, 1], [2, 9], [4, 5]]), r"block_tables: request 1 names page 9 in entry 1"),
    (gather, ([0, 0, 0], [20, 20, 20], TABLES), r"lens: 60 tokens in all; legal: at most total_len = 40"),
]

RIGHT = [
    (decode, ([0, 32, 16], [[9, -3], [2, 3], [4, 2**31 - 1]])),
    (decode, ([0, 32, 16], TABLES, [0, 2, 2, 3])),
    (prefill, ([0, 0, 4], [0, 5, 6])),
    (write, ([95, -1, 0],)),
    (gather, ([0, 17, 0], [0, 15, 16], [[7, 7], [-1, 3], [4, 99]])),
]

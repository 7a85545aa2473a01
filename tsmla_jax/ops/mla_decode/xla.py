"""mla_decode in portable XLA: blocks of pages with an online softmax.

Peak memory beyond the operands is about one block of keys per request in float32; neither the gathered cache nor the
scores of all keys exist at any time. Blocks past the longest request of the batch are never visited.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import NoReturn

import jax
import jax.numpy as jnp
from jax import lax

from tsmla_jax.ops import online_softmax
from tsmla_jax.ops.inputs import Scales, accumulation_dtype, as_scale
from tsmla_jax.ops.ragged import to_packed, to_padded
from tsmla_kernels import contract
from tsmla_kernels.contract import DecodeSpec

BLOCK_KEYS = 256
"""Keys a step: enough to fill a matrix product, few enough that a float32 block (590 kB) stays in a core's cache; on
CPUs 128 to 256 were fastest for a batch, and 512 a third slower."""


def mla_decode(
    q: jax.Array,
    kv_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    cu_seqlens_q: jax.Array | None,
    visible_lens: jax.Array | None,
    scales: Scales,
    *,
    spec: DecodeSpec,
) -> tuple[jax.Array, jax.Array]:
    """out and lse as the public mla_decode documents them; both are always returned. Not differentiable."""
    dtype = accumulation_dtype(spec.q_dtype)
    q_lens = jnp.full((spec.batch,), spec.max_q_len, jnp.int32)
    if cu_seqlens_q is not None:
        if isinstance(spec.total_q_len, int) and not spec.batch_invariant:
            # A bound past all tokens would only pad. A batch-invariant call keeps it: bits may depend on the padding.
            spec = dataclasses.replace(spec, max_q_len=min(spec.max_q_len, spec.total_q_len))
        q_lens = cu_seqlens_q[1:] - cu_seqlens_q[:-1]
        q = to_padded(q, cu_seqlens_q, spec.max_q_len)
        visible_lens = None if visible_lens is None else to_padded(visible_lens, cu_seqlens_q, spec.max_q_len)
    factors = (scales.logits(dtype), as_scale(scales.v, dtype))
    seq_lens = jnp.clip(seq_lens, 0, spec.max_pages * spec.page_size)
    ends = _ends(spec, seq_lens, q_lens, visible_lens)
    out, lse = _decode_padded(spec, q, kv_cache, block_tables, seq_lens, ends, *factors)
    if cu_seqlens_q is not None:
        out = to_packed(out, cu_seqlens_q, spec.total_q_len, 0.0)
        lse = to_packed(lse, cu_seqlens_q, spec.total_q_len, -jnp.inf)
    return out, lse


def _ends(spec: DecodeSpec, seq_lens: jax.Array, q_lens: jax.Array, visible_lens: jax.Array | None) -> jax.Array:
    """How many keys each of the S query tokens of a request sees, [B, S]."""
    if visible_lens is not None:
        return jnp.minimum(seq_lens[:, None], visible_lens)
    token = jnp.arange(spec.max_q_len, dtype=jnp.int32)
    if not spec.causal:
        return jnp.broadcast_to(seq_lens[:, None], (*seq_lens.shape, spec.max_q_len))
    return jnp.minimum(seq_lens[:, None], seq_lens[:, None] - (q_lens[:, None] - 1) + token)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _decode_padded(
    spec: DecodeSpec,
    q: jax.Array,
    kv_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    ends: jax.Array,
    logit_scale: jax.Array,
    out_scale: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """out and lse of q [B, S, H, D]; token [b, s] sees the first ends[b, s] keys of its request."""
    pages_per_block = max(1, BLOCK_KEYS // spec.page_size)
    block_keys = pages_per_block * spec.page_size
    num_blocks = (seq_lens + (block_keys - 1)) // block_keys

    def one(
        q: jax.Array, table: jax.Array, seq_len: jax.Array, ends: jax.Array, blocks: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        return _attend_one(
            spec, q, kv_cache, table, seq_len, ends, blocks, logit_scale, out_scale, pages_per_block=pages_per_block
        )

    if spec.batch_invariant:
        # One request at a time: neither its block count nor the shape of its products depends on the others.
        return lax.map(lambda args: one(*args), (q, block_tables, seq_lens, ends, num_blocks))
    # One block count for all, so that the loop's condition isn't batched and its body needs no select.
    return jax.vmap(one, in_axes=(0, 0, 0, 0, None))(q, block_tables, seq_lens, ends, num_blocks.max())


@_decode_padded.defjvp
def _decode_jvp(spec: DecodeSpec, primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]) -> NoReturn:
    raise contract.not_differentiable(
        "mla_decode", "train through mla_prefill (expanded attention), or use implementation='reference'"
    )


def _attend_one(
    spec: DecodeSpec,
    q: jax.Array,
    kv_cache: jax.Array,
    table: jax.Array,
    seq_len: jax.Array,
    ends: jax.Array,
    num_blocks: jax.Array,
    logit_scale: jax.Array,
    out_scale: jax.Array,
    *,
    pages_per_block: int,
) -> tuple[jax.Array, jax.Array]:
    """out [S, H, L] and lse [S, H] of one request: q [S, H, D], table [M] and ends [S]."""
    dtype = accumulation_dtype(spec.q_dtype)
    wide = {spec.q_dtype, spec.kv_dtype} & {"float32", "float64"}
    # 16-bit inputs are exact in tf32, so the fast product of a GPU loses nothing of them; nor does a TPU's of bf16.
    precision = lax.Precision.HIGHEST if wide else lax.Precision.DEFAULT
    page_size, latent_dim = spec.page_size, spec.latent_dim
    block_keys = pages_per_block * page_size
    rows = q.shape[0] * q.shape[1]
    query = q.astype(dtype).reshape(rows, spec.head_dim)
    end = jnp.repeat(ends, q.shape[1], total_repeat_length=rows)

    def step(i: jax.Array, state: online_softmax.State) -> online_softmax.State:
        entry = i * pages_per_block + jnp.arange(pages_per_block, dtype=jnp.int32)
        page = jnp.clip(table[jnp.minimum(entry, spec.max_pages - 1)], 0, spec.num_pages - 1)
        page = jnp.where(entry * page_size < seq_len, page, 0)  # an unused entry may hold anything
        position = i * block_keys + jnp.arange(block_keys, dtype=jnp.int32)
        # The barrier ties the cache to the step's page: otherwise XLA's CPU backend converts the whole cache to float32
        # before the loop.
        cache, page = lax.optimization_barrier((kv_cache, page))
        kv = cache[page].reshape(block_keys, spec.head_dim).astype(dtype)
        kv = jnp.where((position < seq_len)[:, None], kv, 0)  # an unused slot may hold NaN, and 0 * NaN is NaN
        scores = lax.dot_general(query, kv, (((1,), (1,)), ((), ())), precision=precision) * logit_scale
        scores = jnp.where(position < end[:, None], scores, -jnp.inf)
        values = kv[:, :latent_dim]
        if spec.visible_lens or (spec.causal and q.shape[0] > 1):
            # This block has keys that not every query sees. A NaN in a key is in the scores of the queries that see it.
            values = jnp.where(jnp.isfinite(values), values, 0)
        return online_softmax.update(state, scores, lambda weights: lax.dot(weights, values, precision=precision))

    operands = (q, kv_cache, table, seq_len, ends, num_blocks, logit_scale)
    state = lax.fori_loop(0, num_blocks, step, online_softmax.start((rows,), latent_dim, dtype, *operands))
    seen = end > 0
    total, lse = online_softmax.finish(state, seen)
    out = jnp.where(seen[:, None], state.out / total[:, None] * out_scale, 0)
    shape = q.shape[:2]
    return out.reshape(*shape, latent_dim).astype(spec.out_dtype), lse.reshape(shape).astype(spec.lse_dtype)

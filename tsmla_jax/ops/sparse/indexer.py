"""The V3.2 indexer around its logits: quantising queries and keys, the 132-byte key cache, and the exact top-k.

Source: DeepSeek-V3.2-Exp's lightning indexer, with the cache layout of vLLM and SGLang.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from tsmla_kernels import contract, sparse_contract
from tsmla_kernels.contract import FLOATS
from tsmla_kernels.sparse_contract import INDEXER

from tsmla_jax.ops import dispatch
from tsmla_jax.ops.arrays import describe
from tsmla_jax.ops.sparse import checks, numerics
from tsmla_jax.ops.sparse.layouts import masked_slots

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32, UInt8


def indexer_quantize(
    q: Float[Array, "T Hi Di"], weights: Float[Array, "T Hi"]
) -> tuple[Float[Array, "T Hi Di"], Float[Array, "T Hi"]]:
    """Quantise indexer queries to e4m3 and fold their scales, and the logits' constants, into the head weights.

    Args:
      q: [T, Hi, Di] (64 heads of 128), rope applied.
      weights: [T, Hi], the head weights as projected.

    Returns:
      q8 [T, Hi, Di] float8_e4m3fn with the power-of-two scale s = 2^ceil(log2(max(amax, 1e-10) / 448)) a row, and
      w' [T, Hi] float32 = weights * s * Di^-0.5 * Hi^-0.5.

    Raises:
      ValueError: shapes or dtypes that are not legal.
    """
    described = describe("q", q), describe("weights", weights)
    sparse_contract.check_rank("q", described[0], "T Hi Di")
    sparse_contract.check_dtype("q", described[0], FLOATS)
    sparse_contract.check_rank("weights", described[1], "T Hi")
    sparse_contract.check_dtype("weights", described[1], FLOATS)
    sparse_contract.check_size("weights", described[1], 0, described[0].shape[0], "T, q's tokens")
    sparse_contract.check_size("weights", described[1], 1, described[0].shape[1], "Hi, q's heads")
    values, scales, _ = numerics.quantize_pow2(jnp.asarray(q), INDEXER.query_floor)
    return values, fold_weights(jnp.asarray(weights), described[0].shape[2]) * scales


def fold_weights(weights: jax.Array, head_dim: int) -> jax.Array:
    """Head weights times head_dim^-0.5 * heads^-0.5, the constants of the indexer's logits; float32."""
    constant = jnp.float32(head_dim**-0.5 * weights.shape[-1] ** -0.5)
    return weights.astype(jnp.float32) * constant


def write_indexer_cache(
    k_cache: UInt8[Array, "P Z Di+4"], k: Float[Array, "T Di"], slot_mapping: Int32[Array, " T"]
) -> UInt8[Array, "P Z Di+4"]:
    """Write indexer keys into their cache; slot = page * Z + offset, -1 is skipped; in place under donation.

    Args:
      k_cache: uint8 [P, Z, Di + 4]; a page's bytes are Z keys of Di e4m3 and then Z scales of f32, 132 bytes a token
        when Di is 128. Or plain floats [P, Z, Di], which hold the keys as they are.
      k: [T, Di], normed and rope applied; quantised with scale 2^ceil(log2(max(amax, 1e-4) / 448)).
      slot_mapping: [T] int32.

    Raises:
      ValueError: shapes or dtypes that are not legal. Under TSMLA_CHECK=1 also a slot outside the cache or given twice.
    """
    spec = sparse_contract.indexer_cache_spec(describe("k_cache", k_cache))
    described = describe("k", k)
    sparse_contract.check_rank("k", described, "T Di")
    sparse_contract.check_dtype("k", described, FLOATS)
    sparse_contract.check_size("k", described, 1, spec.head_dim, "Di, k_cache's key width")
    slots = masked_slots(slot_mapping, described, spec.as_plain())
    num_slots = spec.num_pages * spec.page_size
    k_cache, k = jnp.asarray(k_cache), jnp.asarray(k)
    if not spec.packed:
        flat = k_cache.reshape(num_slots, spec.head_dim)
        return flat.at[slots].set(k.astype(k_cache.dtype), mode="drop").reshape(k_cache.shape)
    values, scales, _ = numerics.quantize_pow2(k, INDEXER.key_floor)
    page, offset = slots // spec.page_size, slots % spec.page_size
    pages = k_cache.reshape(spec.num_pages, -1)
    pages = numerics.scatter_bytes(pages, page, offset * spec.head_dim, numerics.to_bytes(values))
    scales_at = spec.page_size * spec.head_dim
    pages = numerics.scatter_bytes(
        pages, page, scales_at + offset * INDEXER.scale_bytes, numerics.to_bytes(scales[:, None])
    )
    return pages.reshape(k_cache.shape)


def read_indexer_pages(
    k_cache: jax.Array, pages: jax.Array, spec: sparse_contract.IndexerCacheSpec
) -> tuple[jax.Array, jax.Array | None]:
    """Keys [..., Z, Di] as stored, and their scales [..., Z] (None for a plain cache), of pages [...] in bounds."""
    raw = k_cache[pages]
    if not spec.packed:
        return raw, None
    raw = raw.reshape(*pages.shape, -1)
    scales_at = spec.page_size * spec.head_dim
    keys = numerics.from_bytes(raw[..., :scales_at], numerics.E4M3)
    scales = numerics.from_bytes(raw[..., scales_at:], jnp.float32)
    return keys.reshape(*pages.shape, spec.page_size, spec.head_dim), scales


def indexer_logits(
    q: Float[Array, "T Hi Di"],
    weights: Float[Array, "T Hi"],
    k_cache: Array,
    block_tables: Int32[Array, "T M"],
    seq_lens: Int32[Array, " T"],
    *,
    implementation: str | None = None,
) -> Float[Array, "T M*Z"]:
    """The indexer's score of every cached key for every query token.

    logits[t, s] = kscale[s] * sum over h of weights[t, h] * relu(q[t, h] . k[s]), float32.

    Args:
      q: [T, Hi, Di]; float8_e4m3fn with a packed cache (see indexer_quantize), any float with a plain one.
      weights: [T, Hi] float32, scales and constants folded in.
      k_cache: uint8 [P, Z, Di + 4] (see write_indexer_cache) or plain floats [P, Z, Di].
      block_tables: [T, M] int32, one row a token (see expand_decode_metadata); entries past a row's last page are
        never used.
      seq_lens: [T] int32, keys token t sees; 0 is legal.
      implementation: "xla" (blocks of keys), "reference", or None for the best that can run.

    Returns:
      [T, M * Z] float32, column s the key at position s of the token's sequence, -inf from seq_lens[t] on.

    Raises:
      TypeError, ValueError: an argument is not legal; under TSMLA_CHECK=1 also a length past the table or a page out of
      range. NotImplementedError: the named implementation can't run this call.
    """
    spec = sparse_contract.indexer_logits_spec(
        q=describe("q", q),
        weights=describe("weights", weights),
        k_cache=describe("k_cache", k_cache),
        block_tables=describe("block_tables", block_tables),
        seq_lens=describe("seq_lens", seq_lens),
    )
    run = dispatch.select("sparse.indexer_logits", spec, implementation)
    seq_lens = checks.indexer_logits(spec, jnp.asarray(seq_lens), jnp.asarray(block_tables))
    return run(*map(jnp.asarray, (q, weights, k_cache, block_tables)), seq_lens, spec=spec)


def select_topk(
    logits: Float[Array, "T N"], seq_lens: Int32[Array, " T"], k: int, *, implementation: str | None = None
) -> Int32[Array, "T k"]:
    """The positions of the k largest of the first seq_lens[t] logits of each row, exact.

    Args:
      logits: [T, N]; columns from seq_lens[t] on are never looked at, whatever they hold.
      seq_lens: [T] int32, 0 to N.
      k: static, at least 1 (2048 in V3.2).
      implementation: "xla", "reference", or None for the best that can run.

    Returns:
      [T, k] int32: largest first, ties by the lower position (0.0 and -0.0 tie), a NaN below every number; -1 after the
      min(k, seq_lens[t]) positions there are.

    Raises:
      TypeError, ValueError: an argument is not legal; under TSMLA_CHECK=1 also a length outside of 0 to N.
    """
    described = describe("logits", logits), describe("seq_lens", seq_lens)
    sparse_contract.check_rank("logits", described[0], "T N")
    sparse_contract.check_dtype("logits", described[0], FLOATS)
    sparse_contract.check_ints("seq_lens", described[1], "T")
    sparse_contract.check_size("seq_lens", described[1], 0, described[0].shape[0], "T, the rows of logits")
    k = contract.static_int("k", k, minimum=1)
    run = dispatch.select("sparse.select_topk", None, implementation)
    seq_lens = checks.topk_lens(jnp.asarray(seq_lens), described[0].shape[1])
    return run(jnp.asarray(logits), seq_lens, k=k)

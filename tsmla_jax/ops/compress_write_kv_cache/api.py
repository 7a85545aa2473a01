"""compress_write_kv_cache: V4's compressor with the norm, rope, quantisation and cache write of its entries."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from tsmla_jax.ops.checks import behind
from tsmla_jax.ops.inputs import Scale, describe_call
from tsmla_jax.ops.operation import Implementation, Operation, Preference, same_spec
from tsmla_jax.ops.selected.compressor import CompressorState, describe_state
from tsmla_kernels.contract import compress, values

if TYPE_CHECKING:
    from tsmla_jax.array_types import Array, Float, Float32, Int32


def compress_write_kv_cache(
    cache: Array,
    kv_score: Float32[Array, "T 2 W"],
    ape: Float32[Array, "ratio W"],
    state: CompressorState,
    norm_weight: Float[Array, " C"],
    cos_sin: Float32[Array, "N R"],
    block_tables: Int32[Array, "B M"],
    *,
    state_slots: Int32[Array, " B"],
    seq_lens: Int32[Array, " B"],
    cu_seqlens_q: Int32[Array, " B+1"],
    ratio: int,
    overlap: bool,
    eps: float,
    kv_scale: Scale | None = None,
    page_size: int | None = None,
    implementation: Preference = None,
) -> tuple[Array, CompressorState]:
    """compress_kv with what V4 does to its entries: RMS norm, rope, quantisation and the write into the cache, as one
    launch on Hopper. The cache and the state are written in place under donation.

    The result is that of the separate steps: compress_kv; norm_rope at the position of each window's first token,
    entry * ratio; positions_to_slots; then write_v4_cache, or write_indexer_cache.

    Axes: those of compress_kv, but N is the number of positions in the rope table; P pages, Z entries a page, M pages a
    request at most, R rope width.

    Args:
      cache: of compressed entries: uint8 [P, page_bytes] (V4 pages, C 512), uint8 [P, Z, C + 4] (the indexer's packed
        keys), or plain [P, Z, C] of floats or float8_e4m3fn.
      kv_score, ape, state, state_slots, seq_lens, cu_seqlens_q, ratio, overlap: as in compress_kv.
      norm_weight: [C] floats.
      cos_sin: [N, R] float32 of rope_table; the last R channels are rotated, pairs 2i and 2i + 1.
      block_tables: [B, M] int32, pages of each request's entries. Entries of pages that don't exist are not written.
        No two new entries may lie in one slot: what they leave there has no meaning.
      eps: the norm's epsilon; static.
      kv_scale: the scale of a float8_e4m3fn cache, as in write_v4_cache.
      page_size: Z of V4 pages, 64 unless given.
      implementation: "cute", "xla", "reference", several of these in order, or None for the best; see `explain`.

    Returns:
      (cache, the new CompressorState).

    Raises:
      TypeError, ValueError: an argument is not legal. Under TSMLA_CHECK=1 also what compress_kv checks, and two
        new entries of one slot.
      NotImplementedError: the named implementation can't run this call, or a derivative is asked for of "cute", or of
        "xla" under jax.jit.
    """
    spec, chosen = OPERATION.choose(**locals())
    arrays = [jnp.asarray(x) for x in (kv_score, ape, norm_weight, cos_sin, block_tables, state_slots, cu_seqlens_q)]
    rings = (jnp.asarray(state.kv_score), jnp.asarray(state.positions))
    lens = behind(
        partial(values.compress_write, spec), jnp.asarray(seq_lens), arrays[-1], arrays[-2], rings[1], arrays[-3]
    )
    cache = jnp.asarray(cache)
    if 0 in (spec.compress.num_tokens, spec.compress.num_requests):
        return cache, CompressorState(*rings)
    given = (cache, rings, lens, *arrays)
    cache, rings = chosen.call(given, lambda: jax.tree.map(same_spec, (cache, rings)), spec=spec, kv_scale=kv_scale)
    return cache, CompressorState(*rings)


def _spec(*, state: CompressorState, **arguments: Any) -> compress.CompressWriteSpec:
    return describe_call(compress.compress_write_spec, **describe_state(state), **arguments)


def _implementations() -> Mapping[str, Implementation]:
    from tsmla_jax.ops import device
    from tsmla_jax.ops.compress_write_kv_cache import cute, reference, xla

    return {
        "cute": Implementation(cute.compress_write_kv_cache, cute.why_not, device.why_not_untested),
        "xla": Implementation(xla.compress_write_kv_cache),
        "reference": Implementation(reference.compress_write_kv_cache),
    }


OPERATION = Operation(compress_write_kv_cache, _spec, _implementations)

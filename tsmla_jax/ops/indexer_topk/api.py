"""indexer_topk: the keys that the V3.2 indexer selects for each query token, without holding the logits of all keys."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Literal, overload

import jax.numpy as jnp
from jax import lax

from tsmla_jax.ops import device
from tsmla_jax.ops.inputs import describe_call
from tsmla_jax.ops.operation import Implementation, Operation, Preference, row_specs
from tsmla_jax.ops.selected import checks
from tsmla_jax.ops.transforms import refuse_derivative
from tsmla_kernels.contract import sparse as sparse_contract

if TYPE_CHECKING:
    from tsmla_jax.array_types import Array, Float, Float32, Int32


@overload
def indexer_topk(
    q: Float[Array, "T Hi Di"],
    weights: Float[Array, "T Hi"],
    k_cache: Array,
    block_tables: Int32[Array, "B M"],
    seq_lens: Int32[Array, " B"],
    k: int,
    *,
    cu_seqlens_q: Int32[Array, " B+1"] | None = ...,
    return_slots: Literal[False] = ...,
    return_scores: Literal[False] = ...,
    return_bits: Literal[False] = ...,
    implementation: Preference = ...,
) -> Int32[Array, "T k"]: ...


@overload
def indexer_topk(
    q: Float[Array, "T Hi Di"],
    weights: Float[Array, "T Hi"],
    k_cache: Array,
    block_tables: Int32[Array, "B M"],
    seq_lens: Int32[Array, " B"],
    k: int,
    *,
    cu_seqlens_q: Int32[Array, " B+1"] | None = ...,
    return_slots: Literal[False] = ...,
    return_scores: Literal[False] = ...,
    return_bits: Literal[True],
    implementation: Preference = ...,
) -> Int32[Array, "T W"]: ...


@overload
def indexer_topk(
    q: Float[Array, "T Hi Di"],
    weights: Float[Array, "T Hi"],
    k_cache: Array,
    block_tables: Int32[Array, "B M"],
    seq_lens: Int32[Array, " B"],
    k: int,
    *,
    cu_seqlens_q: Int32[Array, " B+1"] | None = ...,
    return_slots: Literal[False] = ...,
    return_scores: Literal[True],
    return_bits: Literal[False] = ...,
    implementation: Preference = ...,
) -> tuple[Int32[Array, "T k"], Float32[Array, "T k"]]: ...


@overload
def indexer_topk(
    q: Float[Array, "T Hi Di"],
    weights: Float[Array, "T Hi"],
    k_cache: Array,
    block_tables: Int32[Array, "B M"],
    seq_lens: Int32[Array, " B"],
    k: int,
    *,
    cu_seqlens_q: Int32[Array, " B+1"] | None = ...,
    return_slots: Literal[True],
    return_scores: Literal[False] = ...,
    return_bits: Literal[False] = ...,
    implementation: Preference = ...,
) -> tuple[Int32[Array, "T k"], Int32[Array, " T"]]: ...


@overload
def indexer_topk(
    q: Float[Array, "T Hi Di"],
    weights: Float[Array, "T Hi"],
    k_cache: Array,
    block_tables: Int32[Array, "B M"],
    seq_lens: Int32[Array, " B"],
    k: int,
    *,
    cu_seqlens_q: Int32[Array, " B+1"] | None = ...,
    return_slots: Literal[True],
    return_scores: Literal[True],
    return_bits: Literal[False] = ...,
    implementation: Preference = ...,
) -> tuple[Int32[Array, "T k"], Int32[Array, " T"], Float32[Array, "T k"]]: ...


def indexer_topk(
    q: Float[Array, "T Hi Di"],
    weights: Float[Array, "T Hi"],
    k_cache: Array,
    block_tables: Int32[Array, "B M"],
    seq_lens: Int32[Array, " B"],
    k: int,
    *,
    cu_seqlens_q: Int32[Array, " B+1"] | None = None,
    return_slots: bool = False,
    return_scores: bool = False,
    return_bits: bool = False,
    implementation: Preference = None,
) -> Array | tuple[Array, ...]:
    """The cached keys with the k best indexer scores for every query token: select_topk(order="position") of
    indexer_logits, which only "reference" holds for all tokens and keys at once.

    Args:
      q: [T, Hi, Di]; float8_e4m3fn with a packed cache (see indexer_quantize), any float with a plain one.
      weights: [T, Hi] float32, scales and constants folded in; float64 is rounded to float32.
      k_cache: uint8 [P, Z, Di + 4] (see write_indexer_cache) or plain [P, Z, Di] of floats or float8_e4m3fn.
      block_tables: [T, M] int32, one row a token (see expand_decode_metadata), or with cu_seqlens_q [B, M], one row a
        request; entries past a row's last page are never used.
      seq_lens: [T] int32, how many keys token t sees; or with cu_seqlens_q [B], how many keys request b has; 0 is
        legal.
      k: static, at least 1 (2048 in V3.2).
      cu_seqlens_q: [B + 1] int32, where each request's tokens begin in q, or None. Token i of a request's S sees key j
        iff j < seq_len - (S - 1) + i, as in mla_decode; rows that belong to no request see none.
      return_slots: static; return slots and counts in the place of positions.
      return_scores: static; return the scores of the selected keys, too, as the last result.
      return_bits: static; return the selection as bits, which mla_prefill takes, in the place of positions; without
        return_slots and return_scores.
      implementation: "cute" (the kernels, by chunks of query tokens; if the kernel of the logits can't run, they are
        computed as in "xla"), "xla" (blocks of keys and a running top-k), "reference" (all logits), or None for the
        best that can run; see `explain`.

    Returns:
      [T, k] int32, the positions of the selected keys in the token's sequence, ascending: min(k, keys seen) positions,
      then -1. Of equal scores the one at the lower position is the larger, and NaN is below every number. With
      return_slots: their slots in k_cache, block_tables[., p // Z] * Z + p % Z of position p, in the same order; and
      the counts [T] int32, min(k, keys seen). With return_scores also the scores, [T, k] float32, of the keys in the
      order of the positions (or slots), -inf where there is no key; they are the logits that the implementation
      compared. With return_bits: [T, W] int32 words, W = ceil(M * Z / 128) * 4, the selection_bits of the positions.
      Integers have no derivative; only "reference" gives the scores one.

    Raises:
      TypeError, ValueError: an argument is not legal; under TSMLA_CHECK=1 also a length past the table or a page out
        of range.
      NotImplementedError: the named implementation can't run this call, or a derivative of a call with return_scores in
        "cute" or "xla".

    Source: the lightning indexer and the token selection of DeepSeek Sparse Attention (V3.2's technical report).
    """
    spec, chosen = OPERATION.choose(**locals())
    if cu_seqlens_q is not None:
        cu_seqlens_q = jnp.asarray(cu_seqlens_q)
    block_tables = jnp.asarray(block_tables)
    seq_lens = checks.indexer_logits(spec.logits, jnp.asarray(seq_lens), block_tables, cu_seqlens_q)
    floats = tuple(map(jnp.asarray, (q, weights, k_cache)))
    has_derivative = spec.return_scores and chosen is OPERATION.table["reference"]
    operands = floats if has_derivative else tuple(map(lax.stop_gradient, floats))
    whole, each = row_specs(floats[1])
    specs = whole, *((each,) if spec.return_slots else ()), *((whole,) if spec.return_scores else ())
    results: Array | tuple[Array, ...] = chosen.call(
        (*operands, block_tables, seq_lens, cu_seqlens_q), lambda: specs if len(specs) > 1 else whole, spec=spec
    )
    if not spec.return_scores or has_derivative:
        return results
    *others, scores = results
    return *others, refuse_derivative(scores, floats, "indexer_topk (its scores)", "use implementation='reference'")


def _implementations() -> Mapping[str, Implementation]:
    from tsmla_jax.ops.indexer_topk import cute, reference, xla

    return {
        "cute": Implementation(cute.indexer_topk, cute.why_not, device.why_not_untested, cute.notes),
        "xla": Implementation(xla.indexer_topk),
        "reference": Implementation(reference.indexer_topk),
    }


OPERATION = Operation(indexer_topk, partial(describe_call, sparse_contract.indexer_topk_spec), _implementations)

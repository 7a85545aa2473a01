"""indexer_logits: the V3.2 indexer's score of every cached key for every query token."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import jax.numpy as jnp

from tsmla_jax.ops import device
from tsmla_jax.ops.inputs import describe_call
from tsmla_jax.ops.operation import Implementation, Operation, Preference, row_specs
from tsmla_jax.ops.selected import checks
from tsmla_kernels.contract import sparse as sparse_contract

if TYPE_CHECKING:
    from tsmla_jax.array_types import Array, Float, Int32


def indexer_logits(
    q: Float[Array, "T Hi Di"],
    weights: Float[Array, "T Hi"],
    k_cache: Array,
    block_tables: Int32[Array, "B M"],
    seq_lens: Int32[Array, " B"],
    *,
    cu_seqlens_q: Int32[Array, " B+1"] | None = None,
    implementation: Preference = None,
) -> Float[Array, "T M*Z"]:
    """The indexer's score of every cached key for every query token.

    logits[t, s] = kscale[s] * sum over h of weights[t, h] * relu(q[t, h] . k[s]), float32.

    Args:
      q: [T, Hi, Di]; float8_e4m3fn with a packed cache (see indexer_quantize), any float with a plain one.
      weights: [T, Hi] float32, scales and constants folded in; float64 is rounded to float32.
      k_cache: uint8 [P, Z, Di + 4] (see write_indexer_cache) or plain [P, Z, Di] of floats or float8_e4m3fn.
      block_tables: [T, M] int32, one row a token (see expand_decode_metadata), or with cu_seqlens_q [B, M], one row a
        request; entries past a row's last page are never used.
      seq_lens: [T] int32, keys token t sees; or with cu_seqlens_q [B], keys of request b; 0 is legal.
      cu_seqlens_q: [B + 1] int32, where each request's tokens begin in q, or None. Token i of a request's S sees key j
        iff j < seq_len - (S - 1) + i, as in mla_decode; rows that belong to no request see none. With cu_seqlens_q the
        kernel reads a request's keys once for several tokens.
      implementation: "cute", "xla" (blocks of keys), "reference", several of these in order, or None for the best; see
        `explain`.

    Returns:
      [T, M * Z] float32; column s scores the key at position s of the token's sequence, and is -inf if token t does not
      see that key.

    Derivatives: q, weights and k_cache in reverse mode, by "xla" in memory of one float32 sum for each number of a key
    and of one block of keys; with packed keys or values of 8 bits "xla" has none, and that of "cute" is the derivative
    of "reference".

    Raises:
      TypeError, ValueError: an argument is not legal; under TSMLA_CHECK=1 also a length past the table or a page out of
        range.
      NotImplementedError: the named implementation can't run this call.
    """
    spec, chosen = OPERATION.choose(**locals())
    if cu_seqlens_q is not None:
        cu_seqlens_q = jnp.asarray(cu_seqlens_q)
    seq_lens = checks.indexer_logits(spec, jnp.asarray(seq_lens), jnp.asarray(block_tables), cu_seqlens_q)
    weights = jnp.asarray(weights)
    arrays = (jnp.asarray(q), weights, jnp.asarray(k_cache), jnp.asarray(block_tables), seq_lens, cu_seqlens_q)
    logits: Array = chosen.call(arrays, lambda: row_specs(weights)[0], spec=spec)
    return logits


def _implementations() -> Mapping[str, Implementation]:
    from tsmla_jax.ops.indexer_logits import cute, reference, xla

    return {
        "cute": Implementation(cute.indexer_logits, cute.why_not, device.why_not_untested, cute.notes),
        "xla": Implementation(xla.indexer_logits),
        "reference": Implementation(reference.indexer_logits),
    }


OPERATION = Operation(indexer_logits, partial(describe_call, sparse_contract.indexer_logits_spec), _implementations)

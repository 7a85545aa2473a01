"""indexer_logits: the V3.2 indexer's score of every cached key for every query token."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import jax.numpy as jnp

from tsmla_jax.ops.inputs import describe_call
from tsmla_jax.ops.operation import Implementation, Operation
from tsmla_jax.sparse import checks
from tsmla_kernels.contract import sparse as sparse_contract

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32


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
    spec = OPERATION.spec(
        q=q, weights=weights, k_cache=k_cache, block_tables=block_tables, seq_lens=seq_lens
    )
    chosen = OPERATION.select(spec, implementation)
    seq_lens = checks.indexer_logits(spec, jnp.asarray(seq_lens), jnp.asarray(block_tables))
    return chosen.run(*map(jnp.asarray, (q, weights, k_cache, block_tables)), seq_lens, spec=spec)


def _implementations() -> Mapping[str, Implementation]:
    from tsmla_jax.ops.indexer_logits import reference, xla

    return {"xla": Implementation(xla.indexer_logits), "reference": Implementation(reference.indexer_logits)}


OPERATION = Operation(
    indexer_logits, partial(describe_call, sparse_contract.indexer_logits_spec), _implementations
)

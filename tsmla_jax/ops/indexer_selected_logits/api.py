"""indexer_selected_logits: the V3.2 indexer's score of the keys that were selected for each query token."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import jax.numpy as jnp

from tsmla_jax.ops.inputs import describe_call
from tsmla_jax.ops.operation import Implementation, Operation, Preference, row_specs
from tsmla_jax.ops.selected import checks
from tsmla_kernels.contract import indexer as indexer_contract

if TYPE_CHECKING:
    from tsmla_jax.array_types import Array, Float, Int32


def indexer_selected_logits(
    q: Float[Array, "T Hi Di"],
    weights: Float[Array, "T Hi"],
    k_cache: Float[Array, "P Z Di"],
    indices: Int32[Array, "T K"],
    lengths: Int32[Array, " T"] | None = None,
    *,
    implementation: Preference = None,
) -> Float[Array, "T K"]:
    """The indexer's score of the keys in the slots selected for each query token; differentiable.

    logits[t, i] = sum over h of weights[t, h] * relu(q[t, h] . k[indices[t, i]]), as indexer_logits scores the key.

    Args:
      q: [T, Hi, Di]; float16, bfloat16, float32 or float64.
      weights: [T, Hi] float32 or float64, constants folded in.
      k_cache: [P, Z, Di] plain keys of such a dtype. Packed keys and values of 8 bits are refused: no gradient passes
        through their rounding.
      indices: [T, K] int32 slots, page * Z + offset; -1 selects nothing.
      lengths: [T] int32, the active columns of each row; None: all K.
      implementation: "xla" (blocks of tokens and of columns), "reference", or None for the best that can run; see
        `explain`.

    Returns:
      [T, K] float32 (float64 for float64 weights), -inf where a row has no key. NaN in a slot that isn't selected
      never reaches a result.

    Derivatives: q, weights and k_cache in reverse mode, in memory of one sum for each number of a key, in weights'
    dtype, and of one block of keys. A key that several tokens selected gets the sum of their gradients, which a GPU
    adds in an order that may differ between calls.

    Raises:
      TypeError, ValueError: an argument is not legal; under TSMLA_CHECK=1 also a slot outside the cache or a length
        outside of 0 to K.
      NotImplementedError: the named implementation can't run this call.
    """
    spec, chosen = OPERATION.choose(**locals())
    lengths = None if lengths is None else jnp.asarray(lengths)
    indices = checks.selected(spec.num_selected, spec.cache.as_plain().num_slots, jnp.asarray(indices), lengths)
    arrays = (jnp.asarray(q), jnp.asarray(weights), jnp.asarray(k_cache), indices, lengths)
    logits: Array = chosen.call(arrays, lambda: row_specs(arrays[1])[0], spec=spec)
    return logits


def _implementations() -> Mapping[str, Implementation]:
    from tsmla_jax.ops.indexer_selected_logits import reference, xla

    return {
        "xla": Implementation(xla.indexer_selected_logits),
        "reference": Implementation(reference.indexer_selected_logits),
    }


OPERATION = Operation(
    indexer_selected_logits, partial(describe_call, indexer_contract.indexer_selected_logits_spec), _implementations
)

"""The definition of indexer_quantize: rotate, quantise, fold."""

from __future__ import annotations

import jax

from tsmla_jax.ops.selected import numerics
from tsmla_jax.ops.selected.indexer import fold_weights, rotate_columns
from tsmla_kernels.contract.layouts import INDEXER
from tsmla_kernels.contract.packed import IndexerQuantizeSpec


def indexer_quantize(
    q: jax.Array, weights: jax.Array, *angles: jax.Array, spec: IndexerQuantizeSpec
) -> tuple[jax.Array, jax.Array]:
    """q8 and the folded weights, as the public indexer_quantize documents them."""
    if spec.rotation is not None:
        q = rotate_columns(q, tuple(angle[:, None] for angle in angles), spec.rotation)
    values, scales, _ = numerics.quantize_pow2(q, INDEXER.query_floor)
    return values, fold_weights(weights, spec.head_dim) * scales

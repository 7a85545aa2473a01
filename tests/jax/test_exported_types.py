"""The package's pytrees as arguments and results of programs that jax.export has serialised."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import export

from tsmla_jax import nn, sparse
from tsmla_jax.nn import v4, v32
from tsmla_jax.nn.batch_invariant import BatchInvariant
from tsmla_jax.nn.products.block_scaled import BlockScaled
from tsmla_jax.nn.v4.step import V4Step

X = jnp.arange(3)
STATE = sparse.CompressorState(X, X)
ROWS = sparse.MixedIndices(X, X, 4)
STEP = nn.Step(X, X, X, X, 2, "devices")
TREES = (
    STATE,
    sparse.CompressedEntries(X, X, X),
    sparse.DecodeMetadata(X, X, X, X),
    ROWS,
    STEP,
    nn.Step(X, X, X),
    nn.Segments(X, X, X, 7),
    BlockScaled(X, X),
    BatchInvariant(X),
    v32.V32Cache(X, X),
    v4.V4Cache(X, None, None, STATE, None),
    V4Step(STEP, X, X, X, X, X, None, ROWS, X, 64, 16, None),
)


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: type(tree).__name__)
def test_a_round_trip(tree: Any) -> None:
    exported = export.export(jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree)))(tree)
    again = export.deserialize(exported.serialize()).call(tree)
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    assert all((x == X + 1).all() for x in jax.tree.leaves(again))

"""vmap and shard_map over tokens, for the small operations around the sparse kernels (the others test their own)."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import tsmla_jax
from tsmla_jax import sparse

pytestmark = pytest.mark.usefixtures("optimised_module")

TOKENS = 6
TABLE = jnp.asarray(np.random.default_rng(0).standard_normal((64, 8)), jnp.float32)


def ints(*shape: int, low: int = 0, high: int = 8) -> jax.Array:
    return jnp.asarray(np.random.default_rng(len(shape)).integers(low, high, shape), jnp.int32)


def floats(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(len(shape)).standard_normal(shape), jnp.float32)


def mixed_rows(positions: jax.Array, near: jax.Array, far: jax.Array) -> tuple[jax.Array, jax.Array]:
    window = sparse.window_slots(positions, near, page_size=4, window=6)
    chosen, lens = sparse.compressed_slots(positions, far, ratio=4, page_size=2)
    rows = sparse.build_mixed_sparse_indices(window, chosen, lens, compressed_page=(2, 3))
    return rows.indices, rows.lengths


# Each a function whose arguments and results have tokens as their first axis.
BY_TOKEN: dict[str, tuple[Callable[..., Any], tuple[jax.Array, ...]]] = {
    "select_topk": (
        lambda logits, lens: tsmla_jax.select_topk(logits, lens, 5),
        (floats(TOKENS, 9), ints(TOKENS, high=10)),
    ),
    "indexer_quantize": (sparse.indexer_quantize, (floats(TOKENS, 3, 16), floats(TOKENS, 3))),
    "positions_to_slots": (
        lambda positions, tables: sparse.positions_to_slots(positions, tables, 4),
        (ints(TOKENS, 5, low=-1), ints(TOKENS, 2)),
    ),
    "expand_pools": (
        lambda pools, positions: sparse.expand_pools(pools, positions, 4),
        (ints(TOKENS, 5, low=-1), ints(TOKENS, low=-1)),
    ),
    "norm_rope": (
        lambda kv, positions: sparse.norm_rope(kv, floats(16), positions, TABLE, eps=1e-6),
        (floats(TOKENS, 16), ints(TOKENS, high=64)),
    ),
    "apply_rope": (
        lambda x, positions: sparse.apply_rope(x, positions, TABLE, inverse=True),
        (floats(TOKENS, 2, 16), ints(TOKENS, high=64)),
    ),
    "build_mixed_sparse_indices": (mixed_rows, (ints(TOKENS, low=-1, high=32), ints(TOKENS, 8), ints(TOKENS, 4))),
    "pack_v32_rows": (sparse.pack_v32_rows, (floats(TOKENS, 512), floats(TOKENS, 64))),
    "localize_context_lens": (
        lambda lens: sparse.localize_context_lens(lens, rank=1, world=3, interleave=2),
        (ints(TOKENS, high=30),),
    ),
}


def equal(got: Any, want: Any) -> None:
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


@pytest.mark.parametrize("name", BY_TOKEN)
def test_shards_and_batches_of_tokens(name: str) -> None:
    run, args = BY_TOKEN[name]
    whole = jax.jit(run)(*args)
    mesh = Mesh(np.asarray(jax.devices()[:3]), "x")
    equal(
        jax.jit(jax.shard_map(run, mesh=mesh, in_specs=PartitionSpec("x"), out_specs=PartitionSpec("x")))(*args), whole
    )
    pairs = tuple(jnp.stack([arg, arg[::-1]]) for arg in args)
    mapped = jax.jit(jax.vmap(run))(*pairs)
    equal(jax.tree.map(lambda leaf: leaf[0], mapped), whole)
    equal(jax.tree.map(lambda leaf: leaf[1, ::-1], mapped), whole)


def test_batches_of_requests() -> None:
    """expand_decode_metadata has requests where the others have tokens."""
    run = functools.partial(sparse.expand_decode_metadata, total_tokens=7)
    args = (jnp.asarray([[9, 4], [0, 8]], jnp.int32), ints(2, 2, 3), jnp.asarray([[3, 1], [0, 5]], jnp.int32))
    mapped = jax.jit(jax.vmap(run))(*args)
    for row in range(2):
        equal(jax.tree.map(lambda leaf, row=row: leaf[row], mapped), run(*(arg[row] for arg in args)))


@pytest.mark.parametrize("packed", [False, True])
def test_batches_of_indexer_caches(packed: bool) -> None:
    keys, slots = floats(2, 3, 16), jnp.asarray([[0, 5, -1], [7, 2, 1]], jnp.int32)
    caches = jnp.zeros((2, 2, 4, 20), jnp.uint8) if packed else jnp.zeros((2, 2, 4, 16))
    mapped = jax.jit(jax.vmap(sparse.write_indexer_cache))(caches, keys, slots)
    for row in range(2):
        equal(mapped[row], jax.jit(sparse.write_indexer_cache)(caches[row], keys[row], slots[row]))

"""The kernels of the packed caches on a GPU, inside jax, against the reference: bytes that need no rotation are equal,
rotated ones differ by a rounding."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tsmla_jax
from tests.gpu.cache_inputs import slots_of, unpacked_keys, values
from tsmla_jax import sparse

pytestmark = pytest.mark.gpu

INPUTS = (jnp.bfloat16, jnp.float16, jnp.float32)
LATENT, ROPE, WIDTH = 512, 64, 128


@pytest.fixture(autouse=True)
def needs_the_kernel() -> None:
    arrays = jax.ShapeDtypeStruct((1, 64, WIDTH), jnp.bfloat16), jax.ShapeDtypeStruct((1, 64), jnp.bfloat16)
    if reasons := tsmla_jax.explain("indexer_quantize", *arrays).reasons["cute"]:
        pytest.skip("; ".join(reasons))


def jitted(op: str, name: str, **options: Any) -> Any:
    return jax.jit(functools.partial(getattr(sparse, op), implementation=name, **options))


def empty_cache(pages: int, page: int, row_bytes: int) -> jax.Array:
    """A cache of random bytes."""
    rng = np.random.default_rng(pages)
    return jnp.asarray(rng.integers(0, 256, (pages, page, row_bytes), np.uint8))


def finite(x: jax.Array) -> jax.Array:
    """Where x is not finite, 1."""
    return jnp.where(jnp.isfinite(x), x, jnp.ones_like(x))


def without_nan(x: jax.Array) -> jax.Array:
    """Where x is NaN, 1. What scale a row with a NaN has depends on the NaN's bits."""
    return jnp.where(jnp.isnan(x), jnp.ones_like(x), x)


def angles(tokens: int, width: int) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(tokens)
    turn = rng.uniform(0, 2 * np.pi, (tokens, width)).astype(np.float32)
    return jnp.cos(turn), jnp.sin(turn)


def same_bytes(got: jax.Array, want: jax.Array) -> None:
    where = np.argwhere(np.asarray(got) != np.asarray(want))
    assert not where.size, f"{len(where)} bytes differ, first at {where[0]}"


@pytest.mark.parametrize("dtype", INPUTS)
@pytest.mark.parametrize(("tokens", "page"), [(1, 64), (37, 16), (5000, 48)])
def test_packed_rows_without_a_rotation(dtype: Any, tokens: int, page: int) -> None:
    cache = empty_cache(-(-8000 // page), page, 656)
    slots = slots_of(tokens, cache.shape[0] * page, tokens)
    arrays = (cache, without_nan(values((tokens, LATENT), dtype, 2)), finite(values((tokens, ROPE), dtype, 3)), slots)
    got, want = (jitted("write_packed_kv_cache", name)(*arrays) for name in ("cute", "reference"))
    same_bytes(got, want)


def test_a_nan_stays_one_and_spoils_its_group_alone() -> None:
    latent = jax.random.normal(jax.random.key(1), (3, LATENT)).astype(jnp.bfloat16)
    spoilt = latent.at[0, 5].set(jnp.nan).at[2, 130].set(-jnp.nan)
    cache, k_rope, slots = jnp.zeros((1, 16, 656), jnp.uint8), jnp.ones((3, ROPE), jnp.bfloat16), jnp.arange(3)
    for name in ("cute", "reference"):
        write = jitted("write_packed_kv_cache", name)
        got, clean = (write(cache, x, k_rope, slots.astype(jnp.int32))[0, :3] for x in (spoilt, latent))
        values = np.asarray(sparse.unpack_v32_rows(got)[0])
        assert np.argwhere(np.isnan(values)).tolist() == [[0, 5], [2, 130]]
        same_bytes(got[1], clean[1])
        same_bytes(got[0, 128:LATENT], clean[0, 128:LATENT])


@pytest.mark.parametrize("layout", ["interleaved", "halves"])
@pytest.mark.parametrize("interleave", [True, False])
@pytest.mark.parametrize("dtype", INPUTS)
def test_packed_rows_with_a_rotation(dtype: Any, interleave: bool, layout: str) -> None:
    cache, options = empty_cache(9, 32, 656), {"rope_interleave": interleave, "rope_layout": layout}
    arrays = cache, *(finite(values((61, width), dtype, width)) for width in (LATENT, ROPE)), slots_of(61, 288)
    run = [jitted("write_packed_kv_cache", name, **options) for name in ("cute", "reference")]
    got, want = (f(*arrays, *angles(61, ROPE // 2)) for f in run)
    same_bytes(got[..., : LATENT + 16], want[..., : LATENT + 16])
    untouched = np.setdiff1d(np.arange(288), np.asarray(arrays[3]))
    flat = [np.asarray(x).reshape(288, 656) for x in (got, want, cache)]
    np.testing.assert_array_equal(flat[0][untouched], flat[2][untouched])
    kept = np.intersect1d(np.arange(288), np.asarray(arrays[3]))
    x, y = (np.asarray(sparse.unpack_v32_rows(rows[kept])[1], np.float32) for rows in flat[:2])
    # Two products and a sum that compilers may contract: a value may round the other way.
    scale = np.abs(np.asarray(arrays[2], np.float32)).max() * 2.0**-22
    np.testing.assert_allclose(x, y, rtol=2.0**-7, atol=scale)
    assert np.mean(x != y) < 0.01


@pytest.mark.parametrize("dtype", INPUTS)
@pytest.mark.parametrize(("tokens", "page"), [(1, 64), (37, 16), (5000, 64)])
def test_indexer_keys_without_a_rotation(dtype: Any, tokens: int, page: int) -> None:
    cache = empty_cache(-(-8000 // page), page, 132)
    arrays = cache, finite(values((tokens, WIDTH), dtype, 2)), slots_of(tokens, cache.shape[0] * page, tokens)
    got, want = (jitted("write_indexer_cache", name)(*arrays) for name in ("cute", "reference"))
    same_bytes(got, want)


@pytest.mark.parametrize(("offset", "layout"), [(0, "halves"), (64, "interleaved"), (0, "interleaved"), (32, "halves")])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_indexer_keys_with_a_rotation(dtype: Any, offset: int, layout: str) -> None:
    cache = jnp.zeros((9, 32, 132), jnp.uint8)
    k, slots = jax.random.normal(jax.random.key(3), (61, WIDTH)).astype(dtype), slots_of(61, 288)
    options = {"rope_offset": offset, "rope_layout": layout}
    run = [jitted("write_indexer_cache", name, **options) for name in ("cute", "reference")]
    got, want = (unpacked_keys(f(cache, k, slots, *angles(61, ROPE // 2))) for f in run)
    np.testing.assert_array_equal(got[1], want[1])
    # A rotated value that lies between two e4m3 numbers may go to the other one: a step is at most 1/8 of it.
    np.testing.assert_allclose(got[0], want[0], rtol=1.01 / 8, atol=2.0**-9 * want[1].max())
    assert np.mean(got[0] != want[0]) < 0.005


@pytest.mark.parametrize(("offset", "layout"), [(None, ""), (0, "halves"), (64, "interleaved")])
@pytest.mark.parametrize(("dtype", "weights_dtype"), [(jnp.bfloat16, jnp.bfloat16), (jnp.float32, jnp.float32)])
@pytest.mark.parametrize(("tokens", "heads"), [(1, 64), (37, 64), (129, 32), (3, 5)])
def test_queries(tokens: int, heads: int, dtype: Any, weights_dtype: Any, offset: int | None, layout: str) -> None:
    q = jax.random.normal(jax.random.key(tokens), (tokens, heads, WIDTH)).astype(dtype)
    weights = jax.random.normal(jax.random.key(heads), (tokens, heads)).astype(weights_dtype)
    options = {} if offset is None else {"rope_offset": offset, "rope_layout": layout}
    turn = () if offset is None else angles(tokens, ROPE // 2)
    (q8, got), (wanted, want) = (
        jitted("indexer_quantize", name, **options)(q, weights, *turn) for name in ("cute", "reference")
    )
    np.testing.assert_allclose(got, want, rtol=1e-6)
    if offset is None:
        same_bytes(q8.view(jnp.uint8), wanted.view(jnp.uint8))
    else:
        x, y = np.asarray(q8, np.float32), np.asarray(wanted, np.float32)
        np.testing.assert_allclose(x, y, rtol=1.01 / 8, atol=2.0**-9)
        assert np.mean(x != y) < 0.005


def test_queries_of_special_values() -> None:
    q, weights = without_nan(values((40, 64, WIDTH), jnp.bfloat16, 5)), jnp.ones((40, 64), jnp.bfloat16)
    (q8, got), (wanted, want) = (jitted("indexer_quantize", name)(q, weights) for name in ("cute", "reference"))
    np.testing.assert_array_equal(np.asarray(q8, np.float32), np.asarray(wanted, np.float32))
    np.testing.assert_array_equal(got, want)


def test_none_chooses_the_kernels_and_writes_in_place() -> None:
    cache, keys = jnp.zeros((8, 64, 656), jnp.uint8), jnp.zeros((8, 64, 132), jnp.uint8)
    slots, turn = jnp.arange(4, dtype=jnp.int32), angles(4, 32)
    latent, k_rope, k = (jnp.ones((4, width), jnp.bfloat16) for width in (LATENT, ROPE, WIDTH))
    for op, arrays in (
        ("write_packed_kv_cache", (cache, latent, k_rope, slots, *turn)),
        ("write_indexer_cache", (keys, k, slots, *turn)),
    ):
        assert tsmla_jax.explain(op, *arrays).chosen == "cute"
        address = arrays[0].unsafe_buffer_pointer()
        written = jax.jit(getattr(sparse, op), donate_argnums=0)(*arrays)
        assert written.unsafe_buffer_pointer() == address


def test_vmap() -> None:
    cache, latent, k_rope = empty_cache(6, 16, 656), values((3, 9, LATENT), jnp.bfloat16), jnp.ones((3, 9, ROPE))
    arrays = (
        jnp.stack([cache[:2], cache[2:4], cache[4:]]),
        finite(latent),
        k_rope.astype(jnp.bfloat16),
        jnp.stack([slots_of(9, 32, i) for i in range(3)]),
    )
    got, want = (jax.jit(jax.vmap(jitted("write_packed_kv_cache", name)))(*arrays) for name in ("cute", "reference"))
    same_bytes(got, want)

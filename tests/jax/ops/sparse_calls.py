"""Calls of sparse_mla that tests with and without a GPU share."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

import tsmla_jax
from tests.jax.ops.programs import ints
from tests.oracles import sparse as oracle
from tsmla_jax import sparse

SCALE = 192**-0.5

IMPLEMENTATIONS = ("xla", "reference")  # on any backend; tests/gpu/test_sparse_mla.py adds "cute"

RUN = {
    name: jax.jit(
        functools.partial(tsmla_jax.sparse_mla, return_lse=True, implementation=name),
        static_argnames=("latent_dim", "window", "page_size", "page_span", "compressed_page_size", "batch_invariant"),
    )
    for name in (*IMPLEMENTATIONS, "cute")
}


def rows_of(cache: np.ndarray, indices: np.ndarray, lengths: np.ndarray | None = None) -> list[np.ndarray]:
    """The valid rows of each token, from a flat cache [slots, D]."""
    if lengths is None:
        lengths = np.full(len(indices), indices.shape[1])
    return [cache[[i for i in row[:n] if i >= 0]] for row, n in zip(indices, lengths, strict=True)]


def close(got: tuple[jax.Array, jax.Array], want: tuple[np.ndarray, np.ndarray], tolerance: float = 2e-5) -> None:
    np.testing.assert_allclose(np.asarray(got[0], np.float64), want[0], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(np.asarray(got[1], np.float64), want[1], rtol=2e-5, atol=2e-5)


def check_v32_layout(implementation: str, layout: str) -> None:
    """sparse_mla of V3.2's rows, of a dtype or "packed", is that of the oracle."""
    rng = np.random.default_rng(0)
    heads, pages, size, tokens, selected = 3, 5, 8, 4, 20
    kv = rng.standard_normal((pages * size, 576)).astype(np.float32)
    q = jnp.asarray(rng.standard_normal((tokens, heads, 576)), jnp.bfloat16)
    indices = rng.integers(-1, pages * size, (tokens, selected))
    kv_scale = None
    slots = jnp.arange(pages * size, dtype=jnp.int32)
    if layout == "packed":
        empty = jnp.zeros((pages, size, 656), jnp.uint8)
        cache = jax.jit(sparse.write_packed_kv_cache)(empty, kv[:, :512], kv[:, 512:], slots)
        unpacked = jax.jit(sparse.unpack_v32_rows)(cache.reshape(-1, 656))
        stored = np.concatenate([np.asarray(x, np.float32) for x in unpacked], axis=1)
    else:
        kv_scale = 0.02 if layout == "float8_e4m3fn" else None
        stored = oracle.e4m3(kv / 0.02) if kv_scale else np.asarray(jnp.asarray(kv, jnp.bfloat16))
        cache = jnp.asarray(stored).reshape(pages, size, 576)
        stored = stored.astype(np.float64) * (kv_scale or 1)
    got = RUN[implementation](q, cache, ints(indices), softmax_scale=SCALE, kv_scale=kv_scale)
    assert got[0].dtype == jnp.bfloat16 and got[0].shape == (tokens, heads, 512)
    assert got[1].dtype == jnp.float32
    want = oracle.sparse_mla(np.asarray(q, np.float64), rows_of(stored, indices), scale=SCALE, latent_dim=512)
    close((got[0], got[1]), want, 2**-7)
    np.testing.assert_allclose(got[1], want[1], rtol=2e-5, atol=2e-5)

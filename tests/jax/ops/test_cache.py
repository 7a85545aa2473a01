"""write_kv_cache, gather_kv_cache and merge_attention_states."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tsmla_jax
from tests.oracles.inputs import POISON

IMPLEMENTATIONS = ("reference", "xla")
FP8 = jnp.float8_e4m3fn


def jitted(op: str, name: str, **options: object):
    return jax.jit(functools.partial(getattr(tsmla_jax, op), implementation=name, **options))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn"])
def test_write_sets_the_slots_and_nothing_else(name: str, dtype: str) -> None:
    rng = np.random.default_rng(0)
    latent, k_rope = (rng.standard_normal((6, n), np.float32).astype(ml_dtypes.bfloat16) for n in (24, 8))
    cache = rng.standard_normal((5, 16, 32), np.float32).astype(jnp.dtype(dtype))
    slots = np.asarray([3, -1, 79, 16, -1, 15], np.int32)
    want = cache.reshape(80, 32).copy()
    rows = np.concatenate([latent, k_rope], axis=1).astype(np.float32) * (1 / np.float32(0.7))
    for token, slot in enumerate(slots):
        if slot >= 0:
            want[slot] = rows[token].astype(jnp.dtype(dtype))
    got = jitted("write_kv_cache", name)(cache, latent, k_rope, slots, kv_scale=jnp.float32(0.7))
    assert got.dtype == cache.dtype
    np.testing.assert_array_equal(np.asarray(got).reshape(80, 32), want)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_write_ignores_slots_outside_the_cache(name: str) -> None:
    cache = np.ones((2, 16, 8), np.float32)
    slots = np.asarray([32, -2, 2**31 - 1, -(2**31)], np.int32)
    got = jitted("write_kv_cache", name)(cache, np.zeros((4, 8), np.float32), None, slots)
    np.testing.assert_array_equal(got, cache)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_fp8_rounds_to_nearest_even_and_saturates(name: str) -> None:
    exact = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    exact = np.sort(exact[np.isfinite(exact)])
    middle = (exact[1:] + exact[:-1]) / 2
    above, below = np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(-np.inf))
    beyond = np.asarray([448.1, 464, 465, 480, 1e9, np.inf, -449, -464, -1e30, -np.inf], np.float32)
    values = np.concatenate([exact, middle, above, below, beyond])
    values = np.pad(values, (0, -len(values) % 8)).reshape(-1, 8)
    pages = -(-len(values) // 16)
    got = jitted("write_kv_cache", name)(
        jnp.zeros((pages, 16, 8), FP8), values, None, np.arange(len(values), dtype=np.int32)
    )
    got = np.asarray(got).reshape(-1, 8)[: len(values)]
    want = np.clip(values, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))
    assert np.isfinite(got.astype(np.float32)).all()
    # Halfway between 2^-9 steps and between 16 and 18: to even.
    ties = {0.5 * 2**-9: 0.0, 1.5 * 2**-9: 2 * 2**-9, 17.0: 16.0, 19.0: 20.0}
    assert {x: float(want[values == x][0]) for x in ties} == ties


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_a_donated_cache_is_written_in_place(dtype: str) -> None:
    shape = jax.ShapeDtypeStruct
    cache = shape((96, 64, 576), dtype)
    arguments = (shape((64, 512), jnp.bfloat16), shape((64, 64), jnp.bfloat16), shape((64,), jnp.int32))
    write = jax.jit(functools.partial(tsmla_jax.write_kv_cache, implementation="xla"), donate_argnums=0)
    compiled = write.lower(cache, *arguments, kv_scale=shape((), jnp.float32)).compile()
    size = 96 * 64 * 576 * jnp.dtype(dtype).itemsize
    memory = compiled.memory_analysis()
    assert "input_output_alias={ {}: (0" in compiled.as_text().splitlines()[0]
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < size / 8

    real = jnp.zeros(cache.shape, dtype)
    address = real.unsafe_buffer_pointer()
    latent, k_rope, slots = (jnp.ones(x.shape, x.dtype) for x in arguments)
    written = write(real, latent, k_rope, slots, kv_scale=jnp.float32(1))
    assert written.unsafe_buffer_pointer() == address
    assert real.is_deleted()


def test_a_decode_step_copies_no_cache() -> None:
    def steps(cache, latent, k_rope, slots, q, tables, lens):
        def step(i, state):
            cache, q = state
            cache = tsmla_jax.write_kv_cache(cache, latent, k_rope, slots + i, implementation="xla")
            out = tsmla_jax.mla_decode(q, cache, tables, lens + i, softmax_scale=0.1, implementation="xla")
            return cache, q + jnp.pad(out, ((0, 0), (0, 0), (0, 0), (0, 64)))

        return jax.lax.fori_loop(0, 4, step, (cache, q))

    shape = jax.ShapeDtypeStruct
    cache = shape((256, 64, 576), jnp.bfloat16)
    compiled = (
        jax.jit(steps, donate_argnums=0)
        .lower(
            cache,
            shape((2, 512), jnp.bfloat16),
            shape((2, 64), jnp.bfloat16),
            shape((2,), jnp.int32),
            shape((2, 1, 16, 576), jnp.bfloat16),
            shape((2, 128), jnp.int32),
            shape((2,), jnp.int32),
        )
        .compile()
    )
    memory = compiled.memory_analysis()
    size = 256 * 64 * 576 * 2
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / 4


def gathered(cache: np.ndarray, tables: np.ndarray, starts: list[int], lens: list[int], total: int) -> np.ndarray:
    out = np.zeros((total, cache.shape[2]), np.float32)
    row = 0
    for b, (start, length) in enumerate(zip(starts, lens, strict=True)):
        for token in range(start, start + length):
            if row < total:
                out[row] = cache[tables[b, token // cache.shape[1]], token % cache.shape[1]]
            row += 1
    return out


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_gather_packs_and_dequantises(name: str, dtype: str) -> None:
    rng = np.random.default_rng(1)
    cache = rng.standard_normal((9, 16, 24), np.float32).astype(jnp.dtype(dtype))
    tables = np.asarray([[POISON, 4, -1], [0, 5, POISON], [POISON] * 3, [8, 2, 6]], np.int32)
    cache[3] = np.nan  # in no table
    starts, lens = [17, 0, 0, 47], [10, 20, 0, 1]
    gather = jitted("gather_kv_cache", name, total_len=40)
    got = gather(cache, tables, np.int32(starts), np.int32(lens), kv_scale=jnp.float32(0.3))
    assert got.dtype == jnp.bfloat16
    want = gathered(cache.astype(np.float32), tables, starts, lens, 40) * np.float32(0.3)
    np.testing.assert_array_equal(got, want.astype(ml_dtypes.bfloat16))
    wide = jitted("gather_kv_cache", name, total_len=40, out_dtype=jnp.float32)
    np.testing.assert_array_equal(
        wide(cache, tables, np.int32(starts), np.int32(lens)),
        gathered(cache.astype(np.float32), tables, starts, lens, 40),
    )


@settings(max_examples=15)
@given(
    ranges=st.lists(st.tuples(st.integers(0, 32), st.integers(0, 16)), min_size=3, max_size=3),
    seed=st.integers(0, 2**16),
)
def test_gather_gives_back_what_write_stored(ranges: list[tuple[int, int]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((3 * 48, 8), np.float32)
    tables = rng.permutation(9).astype(np.int32).reshape(3, 3)
    slots = (tables[:, :, None] * 16 + np.arange(16)).reshape(-1).astype(np.int32)
    cache = WRITE(np.full((9, 16, 8), np.nan, np.float32), rows, None, slots)
    starts, lens = (np.asarray(x, np.int32) for x in zip(*ranges, strict=True))
    want = np.concatenate([rows[48 * b + s : 48 * b + s + n] for b, (s, n) in enumerate(ranges)])
    got = np.asarray(GATHER(cache, tables, starts, lens))
    np.testing.assert_array_equal(got[: len(want)], want)
    assert (got[len(want) :] == 0).all()


WRITE = jitted("write_kv_cache", "xla")
GATHER = jitted("gather_kv_cache", "xla", total_len=48)


def parts(seed: int = 0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    outs = [rng.standard_normal((5, 3, 8), np.float32) for _ in range(3)]
    lses = [rng.standard_normal((5, 3), np.float32) * 10 for _ in range(3)]
    lses[1][0] = -np.inf
    outs[1][0] = np.nan  # a part that saw no key is ignored, whatever it holds
    lses[2][:2] = -np.inf
    for lse in lses:
        lse[4] = -np.inf
    return outs, lses


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("stacked", [False, True])
def test_merge(name: str, stacked: bool) -> None:
    outs, lses = parts()
    if stacked:
        out, lse = jitted("merge_attention_states", name)(np.stack(outs), np.stack(lses))
    else:
        out, lse = jitted("merge_attention_states", name)(outs, lses)
    weights = np.exp(np.stack(lses).astype(np.float64))
    total = weights.sum(0)
    values = np.where(weights[..., None] > 0, np.stack(outs), 0)
    want = (weights[..., None] * values).sum(0) / np.where(total > 0, total, 1)[..., None]
    np.testing.assert_allclose(out, want, atol=1e-6)
    seen = total > 0
    np.testing.assert_allclose(np.asarray(lse)[seen], np.log(total[seen]), rtol=1e-6)
    assert np.isneginf(np.asarray(lse)[~seen]).all()
    assert (np.asarray(out)[~seen] == 0).all()


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("others", [[], [-np.inf], [0.5]])
def test_an_lse_of_nan_is_no_part_without_keys(name: str, others: list[float]) -> None:
    lses = np.float32([np.nan, *others]).reshape(-1, 1, 1)
    out, lse = jitted("merge_attention_states", name)(np.ones((*lses.shape, 2), np.float32), lses)
    assert np.isnan(out).all() and np.isnan(lse).all()


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_an_lse_of_plus_infinity_is_a_part_without_keys(name: str, count: int) -> None:
    """FlashAttention and FlashMLA write it. Results and gradients are those of -inf, bit by bit."""
    rng = np.random.default_rng(count)
    outs = rng.standard_normal((count, 9, 2, 4), np.float32)
    lses = rng.standard_normal((count, 9, 2), np.float32)
    for part in range(count):
        lses[part, part :: count + 1], outs[part, part :: count + 1] = np.inf, np.nan
    lses[:, 8], outs[:, 8] = np.inf, np.nan
    lses[-1, 7] = -np.inf

    def results(lses: np.ndarray) -> Any:
        def total(outs: jax.Array, lses: jax.Array) -> tuple[jax.Array, Any]:
            out, lse = tsmla_jax.merge_attention_states(outs, lses, implementation=name)
            return (out**2).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum(), (out, lse)

        return jax.jit(jax.grad(total, (0, 1), has_aux=True))(outs, lses)

    got, want = (jax.tree.leaves(results(each)) for each in (lses, np.where(lses == np.inf, -np.inf, lses)))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)
        assert not np.isnan(a).any()
    assert np.isneginf(got[3][8]).all() and (np.asarray(got[2])[8] == 0).all()


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_merge_of_extreme_lses(name: str) -> None:
    outs = [np.full((1, 1, 2), x, np.float32) for x in (1.0, 2.0)]
    merge = jitted("merge_attention_states", name)
    for lses, want, want_lse in [((3000.0, -3000.0), 1.0, 3000.0), ((-3000.0, -3000.0), 1.5, -3000 + np.log(2))]:
        out, lse = merge(outs, [np.full((1, 1), x, np.float32) for x in lses])
        np.testing.assert_allclose(out, np.full((1, 1, 2), want), rtol=1e-6)
        np.testing.assert_allclose(lse, [[want_lse]], rtol=1e-6)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_merge_of_float64_lses(name: str) -> None:
    """float32 can't tell these apart."""
    with jax.enable_x64(True):
        outs, lses = np.float32([[[1, -1]], [[2, 5]]]), np.float64([[3e4], [3e4 + 1e-3]])
        merge = functools.partial(tsmla_jax.merge_attention_states, implementation=name)
        (out, lse), back = jax.vjp(merge, outs, lses)
        weights = 1 / (1 + np.exp(np.float64([1e-3, -1e-3])))
        np.testing.assert_allclose(out[0], weights @ outs[:, 0], rtol=2e-7)
        np.testing.assert_allclose(lse, [3e4 + np.log1p(np.exp(1e-3))], rtol=1e-15)
        assert (out.dtype, lse.dtype) == (np.float32, np.float64)
        _, d_lses = back((jnp.zeros_like(out), jnp.ones_like(lse)))
        np.testing.assert_allclose(d_lses[:, 0], weights, rtol=1e-11)


def test_merge_gradients_equal_the_reference() -> None:
    outs, lses = parts(3)

    def loss(name: str, outs: list[jax.Array], lses: list[jax.Array]) -> jax.Array:
        out, lse = tsmla_jax.merge_attention_states(outs, lses, implementation=name)
        return (jnp.sin(out) * jnp.arange(1.0, 9.0)).sum() + jnp.where(lse == -jnp.inf, 0, lse**2).sum()

    got, want = (
        jax.tree.leaves(jax.jit(jax.grad(functools.partial(loss, name), argnums=(0, 1)))(outs, lses))
        for name in ("xla", "reference")
    )
    for a, b in zip(got, want, strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max() + 1e-12)


def test_context_in_chunks_merges_to_the_whole() -> None:
    rng = np.random.default_rng(4)
    q, k, v = (rng.standard_normal((n, 2, d), np.float32) for n, d in ((6, 24), (70, 24), (70, 16)))

    def attend(first: int, last: int, causal: bool):
        offsets = functools.partial(np.asarray, dtype=np.int32)
        return tsmla_jax.mla_prefill(
            q,
            k[first:last],
            v[first:last],
            cu_seqlens_q=offsets([0, 6]),
            cu_seqlens_kv=offsets([0, last - first]),
            max_q_len=6,
            max_kv_len=last - first,
            softmax_scale=0.2,
            causal=causal,
            return_lse=True,
            implementation="xla",
        )

    @jax.jit
    def in_chunks():
        chunks = [attend(0, 30, False), attend(30, 64, False), attend(64, 70, True)]
        return tsmla_jax.merge_attention_states(*map(list, zip(*chunks, strict=True)))

    out, lse = in_chunks()
    want, want_lse = jax.jit(attend, static_argnums=(0, 1, 2))(0, 70, True)
    np.testing.assert_allclose(out, want, atol=2e-6)
    np.testing.assert_allclose(lse, want_lse, atol=2e-6)

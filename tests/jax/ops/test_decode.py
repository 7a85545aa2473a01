"""mla_decode: the reference against an independent oracle, xla against the reference, and what both promise."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tsmla_jax
from tests.jax.ops.programs import assert_same_lse
from tests.oracles import attention as oracle
from tests.oracles.inputs import Paged, paged

IMPLEMENTATIONS = ("reference", "xla")
KEYS = [0, 1, 63, 64, 65, 4096]
STATIC = ("latent_dim", "max_q_len", "causal", "batch_invariant", "fp8_probabilities")
RUN = {
    name: jax.jit(functools.partial(tsmla_jax.mla_decode, return_lse=True, implementation=name), static_argnames=STATIC)
    for name in IMPLEMENTATIONS
}


def expected(inputs: Paged) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """out and lse of each request by the oracle."""
    return oracle.decode(
        inputs.per_request(),
        inputs.kv_cache,
        inputs.block_tables,
        inputs.seq_lens,
        scale=inputs.scale,
        latent_dim=inputs.latent_dim,
    )


def run(name: str, inputs: Paged, **options: object) -> tuple[np.ndarray, np.ndarray]:
    arrays = (inputs.q, inputs.kv_cache, inputs.block_tables, inputs.seq_lens)
    out, lse = RUN[name](*arrays, **(inputs.options() | options))
    return np.asarray(out), np.asarray(lse)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("q_lens", [None, [3, 0, 1, 2, 3]], ids=["uniform", "ragged"])
def test_equals_the_oracle(name: str, causal: bool, q_lens: list[int] | None) -> None:
    inputs = paged([0, 1, 2, 65, 33], s=3, q_lens=q_lens, padding_rows=2, seed=1)
    out, lse = run(name, inputs, causal=causal, q_scale=1.5, kv_scale=0.75)
    outs, lses = oracle.decode(
        inputs.per_request(),
        inputs.kv_cache,
        inputs.block_tables,
        inputs.seq_lens,
        scale=inputs.scale,
        latent_dim=inputs.latent_dim,
        causal=causal,
        q_scale=1.5,
        kv_scale=0.75,
    )
    if q_lens is None:
        want, want_lse = np.stack(outs), np.stack(lses)
    else:
        padding = out.shape[0] - sum(q_lens)
        want = np.concatenate([*outs, np.zeros((padding, *out.shape[1:]))])
        want_lse = np.concatenate([*lses, np.full((padding, lse.shape[1]), -np.inf)])
    np.testing.assert_allclose(out, want, atol=2e-6)
    assert_same_lse(lse, want_lse, 2e-6)


# B x S x H x Z, each value of each axis, ragged and uniform; every batch of 3 or more has all lengths in KEYS, twice
# over.
GRID = [
    # batch, s, heads, page, ragged
    (1, 1, 1, 64, False),
    (1, 4, 128, 16, False),
    (3, 2, 16, 1, True),
    (3, 7, 128, 128, True),
    (3, 4, 3, 64, False),
    (64, 1, 16, 64, False),
    (64, 7, 3, 16, True),
    (64, 2, 1, 128, False),
    (64, 4, 1, 1, True),
]


def grid_inputs(batch: int, s: int, heads: int, page: int, ragged: bool, **dtypes: str) -> Paged:
    # 4096 in one request of five, so that the reference's full scores stay small in memory.
    lens = [4096] if batch == 1 else [KEYS[(5 - i) % 6] if i < 6 else KEYS[i % 5] for i in range(batch)]
    q_lens = [(s - i) % (s + 1) for i in range(batch)] if ragged else None
    return paged(lens, s=s, heads=heads, page_size=page, q_lens=q_lens, seed=batch + s, **dtypes)


@pytest.mark.parametrize(("batch", "s", "heads", "page", "ragged"), GRID)
def test_xla_equals_reference(batch: int, s: int, heads: int, page: int, ragged: bool) -> None:
    inputs = grid_inputs(batch, s, heads, page, ragged)
    out, lse = run("xla", inputs)
    want, want_lse = run("reference", inputs)
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out, want, atol=2e-5)
    assert_same_lse(lse, want_lse, 2e-5)


@pytest.mark.parametrize("length", KEYS)
def test_single_request_of_every_length(length: int) -> None:
    inputs = paged([length, 4096], s=2, heads=3, page_size=64, seed=length)  # the second one fixes the shapes
    out, lse = run("xla", inputs)
    want, want_lse = run("reference", inputs)
    np.testing.assert_allclose(out, want, atol=2e-5)
    assert_same_lse(lse, want_lse, 2e-5)
    if length == 0:
        assert (out[0] == 0).all()
        assert np.isneginf(lse[0]).all()


@functools.partial(jax.jit, static_argnames=("latent_dim",))
def plain_decode(
    q: jax.Array, kv_cache: jax.Array, tables: jax.Array, seq_lens: jax.Array, *, scale: float, latent_dim: int
) -> jax.Array:
    """Attention as one would write it in bf16 throughout, for one query token."""
    kv = kv_cache[jnp.minimum(tables, kv_cache.shape[0] - 1)].reshape(q.shape[0], -1, q.shape[-1])
    used = jnp.arange(kv.shape[1]) < seq_lens[:, None]
    kv = jnp.where(used[..., None], kv, 0)
    scores = jnp.einsum("bshd,bkd->bshk", q, kv) * jnp.asarray(scale, q.dtype)
    weights = jax.nn.softmax(jnp.where(used[:, None, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bshk,bkl->bshl", weights, kv[..., :latent_dim])


@pytest.mark.parametrize(("heads", "page", "lens"), [(16, 64, [4096, 65, 64]), (3, 128, [63, 1, 4096])])
def test_bf16_error_is_at_most_twice_that_of_plain_bf16(heads: int, page: int, lens: list[int]) -> None:
    inputs = paged(
        lens, heads=heads, page_size=page, q_dtype="bfloat16", kv_dtype="bfloat16", latent_dim=512, rope_dim=64
    )
    exact, exact_lse = expected(inputs)
    out, lse = run("xla", inputs)
    assert out.dtype == jnp.bfloat16
    assert lse.dtype == np.float32
    plain = plain_decode(
        inputs.q,
        inputs.kv_cache,
        inputs.block_tables,
        inputs.seq_lens,
        scale=inputs.scale,
        latent_dim=inputs.latent_dim,
    )
    error = np.abs(out.astype(np.float64) - np.stack(exact)).max()
    assert error <= 2 * np.abs(np.asarray(plain, np.float64) - np.stack(exact)).max()
    assert_same_lse(lse, np.stack(exact_lse), 1e-5)


@pytest.mark.parametrize("q_dtype", ["float8_e4m3fn", "bfloat16"])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_fp8_cache_is_exact_for_the_dequantised_inputs(name: str, q_dtype: str) -> None:
    inputs = paged([65, 0, 33], s=2, heads=3, q_dtype=q_dtype, kv_dtype="float8_e4m3fn")
    out, lse = run(name, inputs, q_scale=0.5, kv_scale=2.0)
    outs, lses = oracle.decode(
        inputs.per_request(),
        inputs.kv_cache.astype(np.float64),
        inputs.block_tables,
        inputs.seq_lens,
        scale=inputs.scale,
        latent_dim=inputs.latent_dim,
        q_scale=0.5,
        kv_scale=2.0,
    )
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(np.float64), np.stack(outs), rtol=2**-8, atol=1e-5)
    assert_same_lse(lse, np.stack(lses), 1e-5)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_no_rope_and_f16(name: str) -> None:
    inputs = paged([40, 7], s=2, rope_dim=0, q_dtype="float16", kv_dtype="float16")
    out, lse = run(name, inputs)
    outs, lses = expected(inputs)
    assert out.dtype == np.float16
    np.testing.assert_allclose(out.astype(np.float64), np.stack(outs), rtol=2**-10, atol=1e-5)
    assert_same_lse(lse, np.stack(lses), 1e-5)


def test_float64_is_computed_in_float64() -> None:
    with jax.enable_x64(True):
        inputs = paged([40, 7], s=2, q_dtype="float64", kv_dtype="float64")
        outs, lses = expected(inputs)
        for name in IMPLEMENTATIONS:
            out, lse = run(name, inputs)
            assert out.dtype == lse.dtype == np.float64
            np.testing.assert_allclose(out, np.stack(outs), rtol=1e-12, atol=1e-13)
            np.testing.assert_allclose(lse, np.stack(lses), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("q_lens", [None, [3, 1]])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_hidden_key_reaches_nobody(name: str, q_lens: list[int] | None, number: float) -> None:
    """NaN in the key of the last new token, in a column of the latent and in one of the rope: the token itself sees
    it, and the tokens before do not. 0 * NaN is NaN."""
    inputs = paged([40, 33], s=3, q_lens=q_lens)
    last = [(inputs.block_tables[b, (n - 1) // 16], (n - 1) % 16) for b, n in enumerate(inputs.seq_lens)]
    inputs.kv_cache[last[0]][3] = number
    inputs.kv_cache[last[1]][-1] = np.nan
    out, lse = run(name, inputs)
    outs, lses = expected(inputs)
    hidden = np.arange(len(outs[0])) < len(outs[0]) - 1
    for request in range(2) if q_lens is None else range(1):
        got = (out[request], lse[request]) if q_lens is None else (out[:3], lse[:3])
        assert np.isfinite(outs[request][hidden]).all()
        np.testing.assert_allclose(got[0][hidden], outs[request][hidden], atol=1e-5)
        np.testing.assert_allclose(got[1][hidden], lses[request][hidden], atol=1e-5)
        assert number == np.inf or np.isnan(got[0][~hidden]).all()


def test_a_hidden_key_reaches_no_derivative() -> None:
    inputs = paged([40], s=2)
    inputs.kv_cache[inputs.block_tables[0, 39 // 16], 39 % 16] = np.nan

    def first_token(q: jax.Array) -> jax.Array:
        arrays = (q, inputs.kv_cache, inputs.block_tables, inputs.seq_lens)
        return tsmla_jax.mla_decode(*arrays, **inputs.options(), implementation="reference")[:, 0].sum()

    gradient = np.asarray(jax.jit(jax.grad(first_token))(inputs.q))
    assert np.isfinite(gradient[:, 0]).all() and np.abs(gradient[:, 0]).max() > 0


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_scales_are_operands(name: str) -> None:
    inputs = paged([40, 7])
    arrays = (inputs.q, inputs.kv_cache, inputs.block_tables, inputs.seq_lens)
    traces = []

    @jax.jit
    def decode(softmax_scale: jax.Array, q_scale: jax.Array, kv_scale: jax.Array) -> jax.Array:
        traces.append(1)
        return tsmla_jax.mla_decode(
            *arrays,
            latent_dim=inputs.latent_dim,
            softmax_scale=softmax_scale,
            q_scale=q_scale,
            kv_scale=kv_scale,
            implementation=name,
        )

    for scales in [(0.1, 1.0, 1.0), (0.1, 2.0, 1.0), (0.2, 1.0, 1.0), (0.1, 1.0, 2.0)]:
        outs, _ = oracle.decode(
            inputs.per_request(),
            inputs.kv_cache,
            inputs.block_tables,
            inputs.seq_lens,
            scale=scales[0],
            latent_dim=inputs.latent_dim,
            q_scale=scales[1],
            kv_scale=scales[2],
        )
        np.testing.assert_allclose(decode(*map(jnp.float32, scales)), np.stack(outs), atol=5e-6)
    assert len(traces) == 1


def test_batch_invariant_requests_without_a_page() -> None:
    q, cache = jnp.ones((2, 1, 16, 576), jnp.bfloat16), jnp.ones((3, 64, 576), jnp.bfloat16)
    tables, lens = jnp.zeros((2, 0), jnp.int32), jnp.zeros(2, jnp.int32)
    assert not tsmla_jax.mla_decode(q, cache, tables, lens, softmax_scale=0.1, batch_invariant=True).any()


@pytest.mark.usefixtures("optimised_compilation")
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_batch_invariant_rows_are_bitwise_the_same_in_any_batch(name: str) -> None:
    alone = paged([300], s=2, heads=3, page_size=16, seed=5)
    others = paged([300, 900, 5, 0, 40, 300], s=2, heads=3, page_size=16, seed=9)
    # The same request, put in the second place of another batch with its own pages and a wider table.
    offset = others.kv_cache.shape[0]
    tables = others.block_tables.copy()
    tables[1, :] = 2**31 - 1
    tables[1, : alone.block_tables.shape[1] - 1] = alone.block_tables[0, :-1] + offset
    q = others.q.copy()
    q[1] = alone.q[0]
    lens = others.seq_lens.copy()
    lens[1] = 300
    cache = np.concatenate([others.kv_cache, alone.kv_cache])
    out, lse = run(name, alone, batch_invariant=True)
    together, together_lse = RUN[name](q, cache, tables, lens, **others.options(), batch_invariant=True)
    np.testing.assert_array_equal(np.asarray(together)[1], out[0])
    np.testing.assert_array_equal(np.asarray(together_lse)[1], lse[0])
    usual, _ = run("reference", others)
    invariant, _ = run(name, others, batch_invariant=True)
    np.testing.assert_allclose(invariant, usual, atol=2e-5)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_only_kernels_round_probabilities(name: str) -> None:
    inputs = paged([65, 33], s=2, heads=3, q_dtype="float8_e4m3fn", kv_dtype="float8_e4m3fn")
    for plain, rounded in zip(run(name, inputs), run(name, inputs, fp8_probabilities=True), strict=True):
        np.testing.assert_array_equal(plain, rounded)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_lengths_beyond_the_table_read_only_the_table(name: str) -> None:
    inputs = paged([40, 32], s=2)
    capacity = inputs.block_tables.shape[1] * inputs.kv_cache.shape[1]
    tables = np.zeros_like(inputs.block_tables)
    cache = np.nan_to_num(inputs.kv_cache)
    lens = np.asarray([2**31 - 1, -5], np.int32)
    out, lse = RUN[name](inputs.q, cache, tables, lens, **inputs.options())
    full, _ = RUN[name](inputs.q, cache, tables, np.asarray([capacity, 0], np.int32), **inputs.options())
    np.testing.assert_array_equal(out, full)
    assert np.isneginf(np.asarray(lse)[1]).all()


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("bad", [-7, 2**31 - 1, -(2**31)])
def test_pages_out_of_range_stay_inside_the_cache(name: str, bad: int) -> None:
    inputs = paged([40])
    cache = np.nan_to_num(inputs.kv_cache)
    tables = inputs.block_tables.copy()
    tables[0, 1] = bad
    nearest = inputs.block_tables.copy()
    nearest[0, 1] = np.clip(bad, 0, cache.shape[0] - 1)
    out, _ = RUN[name](inputs.q, cache, tables, inputs.seq_lens, **inputs.options())
    want, _ = RUN[name](inputs.q, cache, nearest, inputs.seq_lens, **inputs.options())
    np.testing.assert_array_equal(out, want)


def test_a_bound_past_all_tokens_pads_nothing() -> None:
    inputs = paged([40, 3, 65], s=3, q_lens=[3, 0, 2], padding_rows=2)
    exact = run("xla", inputs)
    for plain, bounded in zip(exact, run("xla", inputs, max_q_len=2**31 - 1), strict=True):
        np.testing.assert_array_equal(plain, bounded)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_memory_is_that_of_a_block_however_many_keys(dtype: str) -> None:
    def memory(max_pages: int) -> tuple[int, int]:
        """Bytes of arguments and results, and of temporaries, for 8 requests of max_pages * 64 keys."""
        struct = jax.ShapeDtypeStruct
        shapes = (
            struct((8, 1, 16, 576), jnp.bfloat16 if dtype == "float8_e4m3fn" else dtype),
            struct((8 * max_pages, 64, 576), dtype),
            struct((8, max_pages), jnp.int32),
            struct((8,), jnp.int32),
        )
        decode = functools.partial(tsmla_jax.mla_decode, softmax_scale=0.1, implementation="xla")
        analysis = jax.jit(decode).lower(*shapes).compile().memory_analysis()
        return analysis.argument_size_in_bytes + analysis.output_size_in_bytes, analysis.temp_size_in_bytes

    needed, temporaries = memory(512)
    assert needed + temporaries <= 1.3 * needed
    assert abs(temporaries - memory(64)[1]) < 100_000


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_empty_shapes(name: str) -> None:
    decode = functools.partial(
        tsmla_jax.mla_decode, softmax_scale=0.1, latent_dim=32, return_lse=True, implementation=name
    )
    cache = jnp.ones((4, 16, 48))
    for batch, width, pages in [(0, 2, 4), (2, 0, 4), (2, 2, 0)]:
        out, lse = decode(
            jnp.ones((batch, 1, 2, 48)),
            cache[:pages],
            jnp.zeros((batch, width), jnp.int32),
            jnp.zeros((batch,), jnp.int32),
        )
        assert out.shape == (batch, 1, 2, 32)
        assert (np.asarray(out) == 0).all()
        assert np.isneginf(np.asarray(lse)).all()


@settings(max_examples=12)
@given(
    seq_lens=st.lists(st.integers(0, 64), min_size=4, max_size=4),
    q_lens=st.lists(st.integers(0, 3), min_size=4, max_size=4),
    causal=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_any_ragged_batch(seq_lens: list[int], q_lens: list[int], causal: bool, seed: int) -> None:
    # 12 rows and 17 pages whatever is drawn, so that one compilation serves every example.
    drawn = paged([64, 64, 64, 64], s=3, q_lens=q_lens, padding_rows=12 - sum(q_lens), seed=seed)
    cache = drawn.kv_cache.copy()
    tables = drawn.block_tables.copy()
    for b, n in enumerate(seq_lens):
        flat = cache[tables[b, :4]].reshape(64, -1)
        flat[n:] = np.nan
        cache[tables[b, :4]] = flat.reshape(4, 16, -1)
        tables[b, -(-n // 16) :] = -(2**31)
    inputs = Paged(
        drawn.q, cache, tables, np.asarray(seq_lens, np.int32), 32, drawn.scale, drawn.cu_seqlens_q, drawn.max_q_len
    )
    out, lse = run("xla", inputs, causal=causal)
    outs, lses = oracle.decode(
        inputs.per_request(), cache, tables, inputs.seq_lens, scale=inputs.scale, latent_dim=32, causal=causal
    )
    total = sum(q_lens)
    np.testing.assert_allclose(out[:total], np.concatenate(outs), atol=5e-6)
    assert_same_lse(lse[:total], np.concatenate(lses), 5e-6)
    assert (out[total:] == 0).all()
    assert np.isneginf(lse[total:]).all()

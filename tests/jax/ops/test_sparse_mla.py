"""Attention over selected slots: every layout, one cache and two, sinks, shards, memory, and what is refused."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tsmla_jax
from tests.jax.ops.programs import ints
from tests.jax.ops.sparse_calls import IMPLEMENTATIONS, RUN, SCALE, check_v32_layout, close, rows_of
from tests.oracles import sparse as oracle
from tests.oracles import sparse_inputs
from tests.oracles.sparse_refusals import ARGUMENTS, REFUSED
from tsmla_jax import sparse


@settings(max_examples=12)
@given(
    seed=st.integers(0, 2**16),
    sinks=st.booleans(),
    lengths=st.booleans(),
    heads=st.sampled_from([1, 5]),
    implementation=st.sampled_from(IMPLEMENTATIONS),
)
def test_any_selection(seed: int, sinks: bool, lengths: bool, heads: int, implementation: str) -> None:
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((5, heads, 24)).astype(np.float32)
    cache = rng.standard_normal((6 * 4, 24)).astype(np.float32)
    indices = rng.integers(0, 24, (5, 9))
    indices[rng.random((5, 9)) < 0.3] = -1
    indices[3] = -1
    lens = rng.integers(0, 10, 5) if lengths else None
    sink = rng.standard_normal(heads).astype(np.float32) if sinks else None
    selected = rows_of(cache, indices, lens)
    unused = sorted(
        set(range(24)) - {i for row, n in zip(indices, lens if lengths else [9] * 5, strict=True) for i in row[:n]}
    )
    poisoned = cache.copy()
    poisoned[unused] = np.nan
    got = RUN[implementation](
        q,
        poisoned.reshape(6, 4, 24),
        ints(indices),
        None if lens is None else ints(lens),
        softmax_scale=0.3,
        latent_dim=16,
        sinks=sink,
    )
    close(got, oracle.sparse_mla(q, selected, scale=0.3, latent_dim=16, sinks=sink))
    assert (np.asarray(got[0])[3] == 0).all()
    assert np.isneginf(np.asarray(got[1])[3]).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("layout", ["bfloat16", "float8_e4m3fn", "packed"])
def test_v32_layouts(implementation: str, layout: str) -> None:
    check_v32_layout(implementation, layout)


def test_scaled_fp8_queries() -> None:
    rng = np.random.default_rng(1)
    q = oracle.e4m3(rng.standard_normal((2, 2, 32)) * 20)
    cache = oracle.e4m3(rng.standard_normal((8, 32)) * 50)
    indices = rng.integers(0, 8, (2, 5))
    for name in IMPLEMENTATIONS:
        got = RUN[name](
            q, cache.reshape(2, 4, 32), ints(indices), softmax_scale=0.2, latent_dim=32, q_scale=0.05, kv_scale=0.02
        )
        assert got[0].dtype == jnp.bfloat16
        rows = rows_of(cache.astype(np.float64) * 0.02, indices)
        close(got, oracle.sparse_mla(q.astype(np.float64) * 0.05, rows, scale=0.2, latent_dim=32), 2**-7)


@functools.cache
def many_selected() -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    """The arrays of a call, and the rows that its tokens select."""
    case = sparse_inputs.call("v32", tokens=8, heads=16, selected=2048, pages=64, page_size=64, lengths=False, seed=5)
    return case.arrays, list(oracle.selected(case.arrays["indices"], None, case.caches))


@pytest.mark.parametrize(
    ("spread", "error"), [(0.25, 0.012), (0.5, 0.02), (1.0, 0.038), (1.7, 0.043), (2.5, 0.053), (4.0, 0.064)]
)
def test_the_error_of_queries_rounded_to_e4m3(spread: float, error: float) -> None:
    """docs/guides/fp8.md has these numbers: relative errors of out, by the standard deviation of the logits."""
    arrays, rows = many_selected()
    q = arrays["q"]
    narrow = oracle.e4m3(q.astype(np.float32))
    scale = spread / np.std(np.float64(q[0]) @ rows[0].T)
    want, _ = oracle.quick_sparse_mla(q, rows, scale=scale, latent_dim=512)
    out, _ = RUN["reference"](**(arrays | {"q": narrow}), softmax_scale=scale)
    assert out.dtype == jnp.bfloat16
    found = np.linalg.norm(np.asarray(out, np.float64) - want) / np.linalg.norm(want)
    assert 0.95 * error < found < 1.05 * error, found


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("layout", ["v32", "plain"])
def test_queries_of_e4m3(implementation: str, layout: str) -> None:
    case = sparse_inputs.call(layout, dtype="float8_e4m3fn", heads=5, sinks=True)
    given = {name: jnp.asarray(array) for name, array in case.arrays.items()}
    got = RUN[implementation](**given, **case.options)
    assert got[0].dtype == jnp.bfloat16 and got[1].dtype == jnp.float32
    close(got, case.want(), 2**-8)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("span", [8, 9])
def test_two_caches_of_v4(implementation: str, span: int) -> None:
    rng = np.random.default_rng(2)
    heads, size, window = 3, 8, 8
    near = rng.standard_normal((3 * size, 512)).astype(np.float32)
    far = rng.standard_normal((2 * size, 512)).astype(np.float32)
    slots = jnp.arange(len(near), dtype=jnp.int32)
    # 8 rows of 584 bytes in 9 of 576 each: pages 9 rows apart.
    near_cache = sparse.init_v4_cache(3, layout="packed", cache_dtype="fp8", page_size=size)
    near_cache = jax.jit(functools.partial(sparse.write_v4_cache, page_size=size))(near_cache, near, slots)
    far_cache = jnp.asarray(far, jnp.bfloat16).reshape(2, size, 512)
    data, scales = jax.jit(sparse.pack_v4_rows)(near)
    near = np.asarray(jax.jit(sparse.unpack_v4_rows)(data, scales))
    far = np.asarray(far_cache.reshape(-1, 512), np.float32)
    window_slots = rng.integers(0, len(near), (4, window))
    window_slots[0, 3:] = -1
    far_slots, far_lens = rng.integers(0, len(far), (4, 10)), np.asarray([0, 10, 3, 7])
    build = functools.partial(sparse.build_mixed_sparse_indices, window_page=(size, span))
    mixed = jax.jit(build)(ints(window_slots), ints(far_slots), ints(far_lens))
    q = rng.standard_normal((4, heads, 512)).astype(np.float32)
    sinks = rng.standard_normal(heads).astype(np.float32)
    got = RUN[implementation](
        q,
        near_cache,
        mixed.indices,
        mixed.lengths,
        softmax_scale=512**-0.5,
        sinks=sinks,
        compressed_kv_cache=far_cache,
        window=mixed.window,
        page_size=size,
        page_span=span,
    )
    rows = [
        np.concatenate([a, b])
        for a, b in zip(rows_of(near, window_slots), rows_of(far, far_slots, far_lens), strict=True)
    ]
    close(got, oracle.sparse_mla(q, rows, scale=512**-0.5, latent_dim=512, sinks=sinks))


def test_the_reference_reads_bytes_as_the_oracle_does() -> None:
    rng = np.random.default_rng(6)
    q, sinks = rng.standard_normal((5, 3, 512)).astype(np.float32), rng.standard_normal(3).astype(np.float32)
    near = np.stack([np.frombuffer(oracle.v4_page(page, 8), np.uint8) for page in rng.standard_normal((3, 8, 512))])
    far = rng.standard_normal((4, 6, 512)).astype(np.float32)
    caches = oracle.Cache.of(near, page_size=8, span=9), oracle.Cache.of(far, page_size=5, span=6, scale=0.5)
    indices = np.concatenate([rng.integers(-1, 30, (5, 6)), rng.integers(-1, 30, (5, 10))], 1)
    indices[4], lengths = indices[4, 7], np.asarray([16, 0, 5, 11, 16])
    got = RUN["reference"](
        q,
        near,
        ints(indices),
        ints(lengths),
        softmax_scale=0.1,
        sinks=sinks,
        compressed_kv_cache=far,
        window=6,
        page_size=8,
        page_span=9,
        compressed_page_size=5,
        compressed_kv_scale=0.5,
    )
    rows = oracle.selected(indices, lengths, caches, 6)
    close(got, oracle.sparse_mla(q, rows, scale=0.1, latent_dim=512, sinks=sinks))

    rows32 = [oracle.v32_row(row[:512], row[512:]) for row in rng.standard_normal((12, 576))]
    packed = np.frombuffer(b"".join(rows32), np.uint8).reshape(3, 4, 656)
    q, indices = rng.standard_normal((5, 3, 576)).astype(np.float32), rng.integers(-1, 12, (5, 9))
    got = RUN["reference"](q, packed, ints(indices), softmax_scale=0.1)
    rows = oracle.selected(indices, None, (oracle.Cache.of(packed),))
    close(got, oracle.sparse_mla(q, rows, scale=0.1, latent_dim=512))


def test_a_forgotten_span_would_show() -> None:
    # If rows of different pages were equal, the test above would pass with any handling of a span of 8.
    slots = ints([[0, 7, 8, 23]])
    assert sparse.remap_slots(slots, 8, 9).tolist() == [[0, 7, 9, 25]]


@pytest.mark.parametrize("layout", ["float32", "float8_e4m3fn"])
def test_all_tokens_selected_is_dense_decode(layout: str) -> None:
    rng = np.random.default_rng(3)
    requests, heads, pages, size, columns = 4, 3, 12, 16, 3
    lens = np.asarray([1, 16, 37, 0])
    tables = rng.permutation(pages).reshape(requests, columns)
    cache = jnp.asarray(rng.standard_normal((pages, size, 576)), jnp.dtype(layout))
    q = jnp.asarray(rng.standard_normal((requests, heads, 576)), "float32" if layout == "float32" else "bfloat16")
    positions = jnp.broadcast_to(jnp.arange(columns * size, dtype=jnp.int32), (requests, columns * size))
    indices = jax.jit(sparse.positions_to_slots, static_argnums=2)(positions, ints(tables), size)
    scale = 0.5 if layout == "float8_e4m3fn" else None
    selected = RUN["xla"](q, cache, indices, ints(lens), softmax_scale=SCALE, kv_scale=scale)
    decode = jax.jit(functools.partial(tsmla_jax.mla_decode, return_lse=True))
    dense = decode(q[:, None], cache, ints(tables), ints(lens), softmax_scale=SCALE, kv_scale=scale)
    tolerance = 2e-6 if layout == "float32" else 2**-7
    np.testing.assert_allclose(
        np.asarray(selected[0], np.float32), np.asarray(dense[0][:, 0], np.float32), rtol=tolerance, atol=tolerance
    )
    np.testing.assert_allclose(selected[1], dense[1][:, 0], rtol=1e-5, atol=1e-5)


def test_blocks_of_tokens_and_of_slots_change_nothing() -> None:
    rng = np.random.default_rng(4)
    tokens, heads, selected = 67, 2, 700
    q = jnp.asarray(rng.standard_normal((tokens, heads, 576)), jnp.bfloat16)
    cache = jnp.asarray(rng.standard_normal((30, 32, 576)), jnp.bfloat16)
    indices = ints(rng.integers(-1, 30 * 32, (tokens, selected)))
    lengths = ints(rng.integers(0, selected + 1, tokens))
    got, want = (RUN[name](q, cache, indices, lengths, softmax_scale=SCALE) for name in IMPLEMENTATIONS)
    np.testing.assert_allclose(*(np.asarray(x[0], np.float32) for x in (got, want)), rtol=2**-7, atol=1e-5)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("optimised_compilation")
@pytest.mark.parametrize(("name", "heads"), [("xla", 3), ("reference", 3), ("reference", 16)])
@pytest.mark.sampled(3)
def test_a_batch_changes_no_bits(name: str, heads: int) -> None:
    rng = np.random.default_rng(7)
    q, cache = (rng.standard_normal(shape).astype(jnp.bfloat16) for shape in ((9, heads, 40), (4, 8, 40)))
    indices, lengths = (x.astype(np.int32) for x in (rng.integers(-1, 32, (9, 300)), rng.integers(0, 301, 9)))
    run = functools.partial(RUN[name], kv_cache=cache, softmax_scale=0.2, latent_dim=32, batch_invariant=True)
    whole = run(q, indices=indices, lengths=lengths)
    for at in ([4], [8, 1], [3, 0, 5]):
        for part, all_rows in zip(run(q[at], indices=indices[at], lengths=lengths[at]), whole, strict=True):
            np.testing.assert_array_equal(part, np.asarray(all_rows)[at])


@pytest.mark.parametrize("layout", ["plain", "v32", "v4"])
def test_memory_stays_bounded(layout: str) -> None:
    shape = jax.ShapeDtypeStruct
    width = 512 if layout == "v4" else 576
    cache = {
        "plain": shape((256, 64, 576), jnp.bfloat16),
        "v32": shape((256, 64, 656), jnp.uint8),
        "v4": shape((256, 37440), jnp.uint8),
    }[layout]
    run = jax.jit(functools.partial(tsmla_jax.sparse_mla, softmax_scale=SCALE, return_lse=True))
    compiled = run.lower(shape((512, 128, width), jnp.bfloat16), cache, shape((512, 2048), jnp.int32)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 64 << 20


def call(**change: object) -> object:
    return tsmla_jax.sparse_mla(**(ARGUMENTS | change))


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_refuses(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(**change)


def test_refuses_types() -> None:
    with pytest.raises(TypeError, match="softmax_scale: got NoneType"):
        call(softmax_scale=None)
    with pytest.raises(TypeError, match="q: got list"):
        call(q=[1.0])
    with pytest.raises(TypeError, match="batch_invariant: got int; legal: True or False"):
        call(batch_invariant=1)
    with pytest.raises(NotImplementedError, match="sparse_mla: implementation='cute' can't run this call"):
        call(implementation="cute")


def test_checks_see_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TSMLA_CHECK", "1")
    call(indices=ints([[0, 11, -1, -1]] * 2))
    call(indices=ints([[0, 11, -1, 99]] * 2), lengths=ints([2, 2]))
    for indices in ([[0, 1, 2, 12]] * 2, [[0, -2, 2, 3]] * 2):
        with pytest.raises(ValueError, match=r"indices: token 0 selects slot .*legal: -1, or 0 to 11$"):
            call(indices=ints(indices))
    with pytest.raises(ValueError, match="indices: token 1 selects slot -1 in column 1, which is active"):
        call(indices=ints([[0, 1, 2, 3], [0, -1, 2, 3]]), lengths=ints([4, 3]))
    with pytest.raises(ValueError, match="lengths: token 0 has 5 active indices; legal: 0 to K = 4"):
        call(lengths=ints([5, 1]))
    two = {"compressed_kv_cache": jnp.zeros((1, 4, 576)), "window": 2}
    call(indices=ints([[5, -1, 2, 3]] * 2), lengths=ints([4, 3]), **two)
    with pytest.raises(ValueError, match=r"token 0 selects slot -1 in column 0.* 0 to 11, or -1 in the window's"):
        call(indices=ints([[-1, 5, 2, 3]] * 2), lengths=ints([4, 3]), **two)
    with pytest.raises(ValueError, match=r"token 0 selects slot 4 in column 2, which is active; legal: 0 to 3$"):
        call(indices=ints([[5, -1, 4, 3]] * 2), lengths=ints([4, 3]), **two)
    with pytest.raises(Exception, match="token 1 selects slot -1"):
        jax.block_until_ready(jax.jit(call)(indices=ints([[0, 1, 2, 3], [0, -1, 2, 3]]), lengths=ints([4, 3])))


def test_batch_invariant_tokens_that_select_nothing() -> None:
    assert not jnp.any(call(indices=jnp.zeros((2, 0), jnp.int32), lengths=ints([0, 0]), batch_invariant=True))


def test_checks_see_slots_behind_the_rows_of_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TSMLA_CHECK", "1")
    wide = {"kv_cache": jnp.zeros((3, 4, 576)), "page_size": 3}
    call(indices=ints([[0, 2, 4, 10]] * 2), **wide)
    call(indices=ints([[0, 2, 3, 7]] * 2), lengths=ints([2, 2]), **wide)
    message = "slot 7 in column 2, which is active; legal: -1, or 0 to 11, of each 4 the first 3, as page_size is 3"
    with pytest.raises(ValueError, match=message):
        call(indices=ints([[0, 2, 7, 4]] * 2), **wide)
    two = {"compressed_kv_cache": jnp.zeros((1, 4, 576)), "compressed_page_size": 2, "window": 2}
    with pytest.raises(ValueError, match="slot 3 in column 3, which is active; legal: 0 to 3, of each 4 the first 2"):
        call(indices=ints([[7, 11, 0, 3]] * 2), lengths=ints([4, 4]), **two)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_greatest_logits(implementation: str) -> None:
    """Of each row and head over its valid slots, -inf where there are none; without a derivative."""
    rng = np.random.default_rng(7)
    q, cache = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((4, 3, 24), (2, 8, 24)))
    indices = jnp.asarray(rng.integers(-1, 16, (4, 6)), jnp.int32).at[2].set(-1)
    lengths = jnp.asarray([6, 2, 6, 0], jnp.int32)
    options = {"softmax_scale": 0.3, "latent_dim": 16, "implementation": implementation}

    def run(q: jax.Array, **more: Any) -> Any:
        return tsmla_jax.sparse_mla(q, cache, indices, lengths, **options, **more)

    out, lse, greatest = run(q, return_lse=True, return_max_logits=True)
    valid = (indices >= 0) & (jnp.arange(6) < lengths[:, None])
    logits = 0.3 * jnp.einsum("thd,tkd->thk", q, cache.reshape(16, 24)[jnp.maximum(indices, 0)], precision="highest")
    want = jnp.where(valid[:, None], logits, -jnp.inf).max(-1)
    np.testing.assert_allclose(greatest, want, rtol=1e-5)
    assert ((greatest == -jnp.inf) == (lse == -jnp.inf)).all() and (greatest[2] == -jnp.inf).all()
    np.testing.assert_array_equal(run(q, return_max_logits=True)[0], out)
    derivative = jax.grad(lambda q: jnp.where(valid.any(-1)[:, None], run(q, return_max_logits=True)[1], 0).sum())(q)
    assert (derivative == 0).all()
    narrow = (x.astype(jnp.float8_e4m3fn) for x in (q, cache))
    found = tsmla_jax.explain("sparse_mla", *narrow, indices, softmax_scale=0.3, latent_dim=16, return_max_logits=True)
    assert found.chosen == "xla" and any("return_max_logits" in reason for reason in found.reasons["cute"])

"""mla_decode and mla_prefill on Blackwell against the reference, with the kernels' behaviour emulated on a CPU.

All code around the kernels runs. The calls have the inputs that the kernels must not see (ragged queries, lengths of 0,
fewer keys than queries, tables that end within a tile, garbage behind a request's pages), and the kernels' results need
the conversions (base 2, rows not written).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tsmla_jax
from tests.emulator import blackwell as emulation
from tsmla_jax.ops import checks
from tsmla_jax.ops.inputs import as_scale
from tsmla_jax.ops.mla_decode import blackwell as decode
from tsmla_jax.ops.mla_prefill import blackwell as prefill


@pytest.fixture(autouse=True)
def emulated(blackwell: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (decode, prefill):
        monkeypatch.setattr(module, "kernel_call", emulation.kernel_call)


def close(got: Any, want: Any, dtype: str) -> None:
    """out to one rounding of it, lse to float32's; -inf and 0 exactly."""
    (out, lse), (want_out, want_lse) = got, want
    assert out.dtype == want_out.dtype and lse.dtype == want_lse.dtype == jnp.float32
    out, lse, want_out, want_lse = (np.asarray(x, np.float32) for x in (out, lse, want_out, want_lse))
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want_lse))
    seen = ~np.isneginf(want_lse)
    np.testing.assert_allclose(lse[seen], want_lse[seen], rtol=2e-6, atol=2e-6)
    np.testing.assert_array_equal(out[~seen], 0)
    step = 2.0**-10 if dtype == "float16" else 2.0**-7
    np.testing.assert_allclose(out, want_out, rtol=step, atol=1e-5)


class Decode:
    """Random arrays of a decode: unused pages hold NaN, and tables name them behind a request's last page."""

    def __init__(
        self, seq_lens: list[int], *, tokens: int = 1, heads: int = 3, page: int = 16, max_pages: int = 5,
        dtype: str = "bfloat16", seed: int = 0, total: int | None = None,
    ) -> None:  # fmt: skip
        rng = np.random.default_rng(seed)
        batch, num_pages = len(seq_lens), len(seq_lens) * max_pages + 2
        cache = rng.standard_normal((num_pages, page, 576), np.float32)
        tables = rng.permutation(num_pages)[: batch * max_pages].reshape(batch, max_pages).astype(np.int32)
        owned = np.zeros(num_pages, bool)
        for request, length in enumerate(seq_lens):
            used = min(max(-(-length // page), 0), max_pages)
            owned[tables[request, :used]] = True
        cache[~owned] = np.nan
        for request, length in enumerate(seq_lens):
            used = min(max(-(-length // page), 0), max_pages)
            unused = int(np.flatnonzero(~owned)[0])
            tables[request, used:] = rng.choice([unused, -7, 2**31 - 1, num_pages], max_pages - used)
        rows = (batch, tokens) if total is None else (total,)
        self.q = jnp.asarray(rng.standard_normal((*rows, heads, 576), np.float32)).astype(dtype)
        self.cache = jnp.asarray(cache).astype(dtype)
        self.tables, self.lens = jnp.asarray(tables), jnp.asarray(seq_lens, jnp.int32)

    def run(self, implementation: str, **options: Any) -> Any:
        options = {"softmax_scale": 0.05, "implementation": implementation, "return_lse": True, **options}
        call = partial(tsmla_jax.mla_decode, **options)
        # Compiled as one, which is faster than operation by operation; but what TSMLA_CHECK raises is clearer outside.
        call = call if checks.enabled() else jax.jit(call)
        return call(self.q, self.cache, self.tables, self.lens)


LENGTHS = [0, 1, 2, 3, 15, 16, 17, 64, 77, 80, 500, -3]  # of a table of 80 keys


@pytest.mark.parametrize(
    ("dtype", "causal", "tokens"),
    [
        ("bfloat16", True, 1),
        ("bfloat16", True, 4),
        ("bfloat16", False, 4),
        ("float16", True, 4),
        ("float8_e4m3fn", True, 4),
        ("float8_e4m3fn", False, 1),
    ],
)
def test_decode(dtype: str, causal: bool, tokens: int) -> None:
    x = Decode(LENGTHS, tokens=tokens, dtype=dtype, seed=tokens)
    options = {"causal": causal, "q_scale": 0.5, "kv_scale": 2.0}
    close(x.run("cute", **options), x.run("reference", **options), dtype)


@pytest.mark.parametrize(
    ("page", "dtype"), [(32, "bfloat16"), (64, "float8_e4m3fn"), (128, "bfloat16"), (128, "float8_e4m3fn")]
)
def test_pages_and_tables_that_end_within_a_tile(page: int, dtype: str) -> None:
    x = Decode([5, 0, 3 * page, page + 1], page=page, max_pages=3, tokens=2, dtype=dtype)
    close(x.run("cute"), x.run("reference"), dtype)


@pytest.mark.parametrize("causal", [True, False])
def test_ragged_queries(causal: bool) -> None:
    # A request without queries, one with more than max_q_len, rows of no request at the end.
    lens = [0, 70, 2, 33, 9, 80]
    counts = [2, 1, 4, 0, 6, 3]
    x = Decode(lens, total=sum(counts) + 5, seed=3)
    offsets = jnp.asarray(np.concatenate([[0], np.cumsum(counts)]), jnp.int32)
    options = {"causal": causal, "cu_seqlens_q": offsets, "max_q_len": 4}
    close(x.run("cute", **options), x.run("reference", **options), "bfloat16")


@pytest.mark.parametrize("ragged", [False, True])
def test_visible_lens(ragged: bool) -> None:
    lens, counts = [0, 70, 2, 33, 9, 80], [2, 1, 4, 0, 6, 3]
    x = Decode(lens, tokens=4, total=sum(counts) + 5 if ragged else None, seed=3)
    visible = np.random.default_rng(0).integers(-2, 90, x.q.shape[:-2])
    options: dict[str, Any] = {"visible_lens": visible.astype(np.int32)}
    if ragged:
        options |= {"cu_seqlens_q": jnp.asarray(np.concatenate([[0], np.cumsum(counts)]), jnp.int32), "max_q_len": 4}
    close(x.run("cute", **options), x.run("reference", **options), "bfloat16")


def test_traced_scales_and_jit() -> None:
    x = Decode(LENGTHS, tokens=2, dtype="float8_e4m3fn")

    def call(name: str, softmax_scale: Any, q_scale: Any, kv_scale: Any) -> Any:
        return x.run(name, softmax_scale=softmax_scale, q_scale=q_scale, kv_scale=kv_scale)

    scales = [as_scale(s, jnp.float32) for s in (0.03, 1.5, 0.25)]
    got, want = (jax.jit(partial(call, name))(*scales) for name in ("cute", "reference"))
    close(got, want, "float8_e4m3fn")


def test_batch_invariance_is_one_piece_for_everybody() -> None:
    asked: list[tuple[int, ...]] = []

    def record(kernel: Any, config: Any, inputs: Any, shapes: Any, *, arch: str) -> Any:
        asked.append(shapes[2])
        return emulation.kernel_call(kernel, config, inputs, shapes, arch=arch)

    x = Decode([64, 80])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "kernel_call", record)
        close(x.run("cute", batch_invariant=True), x.run("reference"), "bfloat16")
        x.run("cute")
    assert asked[0][0] == 1 and asked[1][0] > 1


def test_what_is_not_finite_in_a_last_page_is_found_by_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    x = Decode([5, 0, 33])
    page, slot = x.tables[2, 2], 33 % 16
    want = x.run("reference")  # which does not see the slot, and is compiled as one without the check
    for value, seen in ((x.cache, False), (x.cache.at[page, slot + 3, 7].set(jnp.nan), True)):
        x.cache = value
        assert bool(np.isnan(np.asarray(x.run("cute")[0], np.float32)).any()) == seen
    monkeypatch.setenv("TSMLA_CHECK", "1")
    with pytest.raises(
        ValueError, match="kv_cache: request 2 leaves a slot of its last page unused that is not finite"
    ):
        x.run("cute")
    x.cache = x.cache.at[page, slot + 3, 7].set(0)
    close(x.run("cute"), want, "bfloat16")


def test_vmap_folds_into_the_batch() -> None:
    x, y = Decode([5, 0, 80], seed=1), Decode([80, 3, 1], seed=1)
    stacked = [jnp.stack(pair) for pair in ((x.q, y.q), (x.cache, y.cache), (x.tables, y.tables), (x.lens, y.lens))]
    call = partial(tsmla_jax.mla_decode, softmax_scale=0.05, return_lse=True)
    got = jax.jit(jax.vmap(partial(call, implementation="cute")))(*stacked)
    for i, each in enumerate((x, y)):
        close([part[i] for part in got], each.run("reference"), "bfloat16")


def test_random_decodes() -> None:
    rng = np.random.default_rng(11)
    call = partial(tsmla_jax.mla_decode, softmax_scale=0.05, return_lse=True)
    cute, reference = (jax.jit(partial(call, implementation=name)) for name in ("cute", "reference"))
    for seed in range(60):  # of one shape, which is compiled once
        x = Decode(rng.integers(0, 7 * 16 + 1, 4).tolist(), tokens=3, max_pages=7, seed=seed)
        arrays = x.q, x.cache, x.tables, x.lens
        close(cute(*arrays), reference(*arrays), "bfloat16")


# ---- prefill


class Prefill:
    """Random packed arrays, `padding` rows of NaN behind the last request."""

    def __init__(
        self, q_lens: list[int], kv_lens: list[int], *, heads: int = 2, padding: int = 7, dtype: str = "bfloat16"
    ) -> None:
        rng = np.random.default_rng(len(q_lens))
        offsets = [np.concatenate([[0], np.cumsum(n)]).astype(np.int32) for n in (q_lens, kv_lens)]
        arrays = []
        for cu, width in ((offsets[0], 192), (offsets[1], 192), (offsets[1], 128)):
            rows = rng.standard_normal((int(cu[-1]) + padding, heads, width), np.float32)
            rows[cu[-1] :] = np.nan
            arrays.append(jnp.asarray(rows).astype(dtype))
        self.arrays = arrays
        self.offsets = {"cu_seqlens_q": jnp.asarray(offsets[0]), "cu_seqlens_kv": jnp.asarray(offsets[1])}
        self.longest = {"max_q_len": max(q_lens), "max_kv_len": max(kv_lens)}

    def run(self, implementation: str, *arrays: Any, **options: Any) -> Any:
        options = {
            "softmax_scale": 0.07,
            "implementation": implementation,
            "return_lse": True,
            **self.longest,
            **options,
        }
        return jax.jit(partial(tsmla_jax.mla_prefill, **options))(*(arrays or self.arrays), **self.offsets)


# No keys, no queries, more queries than keys (by more than a tile of them: there the kernel alone waits for ever).
LONG = ([0, 5, 300, 40, 7, 290, 600], [7, 0, 200, 300, 3, 20, 9])
SHORT = ([0, 5, 130, 40, 256, 3], [7, 0, 200, 300, 3, 1])


@pytest.mark.parametrize(
    ("lens", "dtype", "causal"),
    [(LONG, "bfloat16", True), (LONG, "bfloat16", False), (LONG, "float8_e4m3fn", True), (SHORT, "bfloat16", True)],
)
def test_prefill(lens: tuple[list[int], list[int]], dtype: str, causal: bool) -> None:
    x = Prefill(*lens, dtype=dtype)
    options = {"causal": causal, "q_scale": 0.5, "k_scale": 2.0, "v_scale": 0.25}
    close(x.run("cute", **options), x.run("reference", **options), dtype)


def test_prefill_scales_may_be_traced() -> None:
    x = Prefill([0, 5, 30, 4], [7, 0, 40, 3], dtype="float8_e4m3fn")
    scales = jnp.asarray([0.05, 1.5, 0.5, 2.0], jnp.float32)

    def call(name: str, scales: Any) -> Any:
        names = ("softmax_scale", "q_scale", "k_scale", "v_scale")
        return x.run(name, **dict(zip(names, scales, strict=True)))

    close(*(jax.jit(partial(call, name))(scales) for name in ("cute", "reference")), "float8_e4m3fn")


def test_lengths_beyond_what_was_said_hang_nothing() -> None:
    x = Prefill([300, 4], [2, 9])
    out, lse = x.run("cute", max_q_len=100)
    assert np.isneginf(np.asarray(lse)).all() and (np.asarray(out, np.float32) == 0).all()


def test_gradients_are_those_of_xla() -> None:
    x = Prefill([20, 3], [30, 7], padding=2)

    def loss(name: str, *arrays: Any) -> jax.Array:
        out, lse = x.run(name, *arrays)
        return (out.astype(jnp.float32) ** 2).sum() + lse.sum()

    got, want = (jax.jit(jax.grad(partial(loss, name), argnums=(0, 1, 2)))(*x.arrays) for name in ("cute", "xla"))
    for one, other in zip(got, want, strict=True):
        one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
        assert np.linalg.norm(one - other) <= 2**-7 * np.linalg.norm(other)


def test_prefill_under_vmap() -> None:
    x = Prefill(*SHORT)
    stacked = [jnp.stack([a, a[::1] * 0.5]) for a in x.arrays]
    got = jax.jit(jax.vmap(lambda *arrays: x.run("cute", *arrays)))(*stacked)
    for i in range(2):
        close([part[i] for part in got], x.run("reference", *(a[i] for a in stacked)), "bfloat16")

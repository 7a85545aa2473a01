"""The launchers' views in tokenspeed-mla's host code, whose own Python runs here on numbers.

These tests show that row r of query tile t of request b is the token and head that the adapter means, in q, out, lse
and visible_lens; that every row exists once; that partial results don't overlap in the workspace; and that the grid
covers all tiles. Only the package's device code is left untested.
"""

from __future__ import annotations

import functools
import random
import types
from typing import Any

import numpy as np
import pytest

from tests.emulator.numeric_cute import CUTE, Tensor, dense, locals_at_stop, numeric, stop
from tsmla_kernels.sm100 import config as sm100

pytest.importorskip("torch")
fp8 = pytest.importorskip("tokenspeed_mla.mla_decode_fp8")
fp16 = pytest.importorskip("tokenspeed_mla.mla_decode_fp16")

from tokenspeed_mla import fmha, fmha_helpers, mla_helpers  # noqa: E402

from tsmla_kernels.sm100 import mla_decode, mla_prefill  # noqa: E402

FLOAT32 = types.SimpleNamespace(width=32)
FP8 = types.SimpleNamespace(width=8)


def configs() -> list[tuple[sm100.DecodeConfig, str]]:
    rng = random.Random(3)
    shapes = [(16, 1), (16, 4), (128, 1), (96, 4), (96, 8), (64, 4), (48, 3), (1, 1), (5, 7), (128, 2), (33, 2)]
    shapes += [(rng.randint(1, 128), rng.randint(1, 12)) for _ in range(120)]
    dtypes, archs = ["float8_e4m3fn", "bfloat16", "float16"], sm100.ARCHS
    return [
        (sm100.DecodeConfig(rng.choice(dtypes), heads, tokens, rng.choice(sm100.PAGE_SIZES)), rng.choice(archs))
        for heads, tokens in shapes
    ]


def host_state(config: sm100.DecodeConfig, arch: str, batch: int, splits: int) -> tuple[Any, dict[str, Any], Any]:
    """The package's kernel object, its local variables after it has made its views, and its workspace's sizes."""
    attention = mla_decode.attention(config, arch)
    q = dense((batch, config.max_q_len, config.num_heads, 576), FP8)
    cache = dense((50, config.page_size, 576), FP8)
    out, lse = dense((*q.shape[:3], 512), FP8), dense(q.shape[:3], FLOAT32)
    views = numeric(mla_decode.decode_views, columns=numeric(mla_decode.columns))(q, cache, out, lse, config)
    call = numeric(type(attention).__call__)
    attention.initialize_workspace = stop
    table, lens, workspace = dense((batch, 16)), dense((batch,)), dense((splits, 16))
    causal = (lens,) if config.fp8 else ()
    arguments = (*views[:4], table, *views[4:], workspace, splits, lens, *causal, None, 1.0, 1.0, None)
    found, sizes = locals_at_stop(call, attention, *arguments)
    return attention, found, sizes


@pytest.mark.parametrize(("config", "arch"), configs())
def test_rows_are_the_tokens_and_heads_that_are_meant(config: sm100.DecodeConfig, arch: str) -> None:
    batch, heads, tokens = 3, config.num_heads, config.max_q_len
    attention, views, _ = host_state(config, arch, batch, 2)
    tiles = sm100.query_tiles(config, arch)
    requests, count, rows = np.meshgrid(np.arange(batch), np.arange(tiles.count), np.arange(tiles.rows), indexing="ij")
    flat = count * tiles.stride + rows
    real = (rows < tiles.stride) & (flat < heads * tokens)
    b, t, r, flat = (x[real] for x in (requests, count, rows, flat))
    token, head = flat // heads, flat % heads
    # Each row of each request, once.
    assert sorted(zip(b.tolist(), token.tolist(), head.tolist(), strict=True)) == [
        (i, s, h) for i in range(batch) for s in range(tokens) for h in range(heads)
    ]

    def same(view: Tensor, at: tuple[Any, ...], array: Tensor, start: int) -> None:
        for column in (0, 63):
            want = array.layout.address(b, token, head, start + column)
            np.testing.assert_array_equal(view.address(*at[:1], column, *at[1:]), want)

    q, out, lse = (dense((batch, tokens, heads, *width)) for width in ((576,), (512,), ()))
    for name, start in (("q_latent", 0), ("q_rope", 512)):
        # Packed queries are one long axis of rows, whose tiles follow one another.
        at = (flat, 0 * t, b) if tiles.packed else (r, t, b)
        same(views[name], at, q, start)
    same(views["o"], (r, t, b), out, 0)
    np.testing.assert_array_equal(views["lse"].address(r, t, b), lse.layout.address(b, token, head))
    # The merge of splits takes the rows by the result's own axes, or tile by tile.
    first, second = (head, token) if tiles.packed else (r, t)
    same(views["o_reduction"], (first, second, b), out, 0)

    # The device code's own arithmetic, of the query token whose bound a row is masked by.
    by_kernel = flat // heads if tiles.packed else t * tiles.fold + r // heads if tiles.fold > 1 else t
    np.testing.assert_array_equal(by_kernel, token)
    assert attention.seq_len_q == tokens and attention.num_heads == heads
    assert views["c_latent"].shape == (config.page_size, 512, 50)
    for name, start in (("c_latent", 0), ("c_rope", 512)):
        assert views[name].address(3, 5, 7) == dense((50, config.page_size, 576)).layout.address(7, 3, start + 5)
    assert views["page_table"].address(11, 2) == 2 * 16 + 11


@pytest.mark.parametrize(("config", "arch"), configs()[::4])
@pytest.mark.parametrize("splits", [2, 7, 32])
def test_workspace_holds_every_partial_result(config: sm100.DecodeConfig, arch: str, splits: int) -> None:
    batch = 3
    attention, _, sizes = host_state(config, arch, batch, splits)
    tiles = sm100.query_tiles(config, arch)
    heads, width, count, requests, split_kv = sizes[:5]
    assert (heads, width, count, requests, split_kv) == (tiles.stride, 512, tiles.count, batch, splits)
    make = numeric(type(attention).initialize_workspace)
    attention.q_dtype, attention.partial_dtype = FP8 if config.fp8 else types.SimpleNamespace(width=16), FLOAT32
    partial_out, partial_lse = make(attention, heads, width, count, requests, splits, FLOAT32, dense((1,)))
    rows, bytes_a_split = sm100.workspace_shape(config, arch, batch, splits)
    assert rows == splits
    # Float32 both; the second begins, in bytes, where the first ends, and ends where the workspace does.
    assert partial_out.layout.size() == partial_out.layout.last() + 1
    assert partial_lse.iterator == partial_out.layout.size() * 4
    assert partial_lse.layout.size() == partial_lse.layout.last() + 1
    assert partial_lse.iterator + partial_lse.layout.size() * 4 == splits * bytes_a_split
    assert sizes[4] * sizes[0] * sizes[2] * batch * 513 * 4 == type(attention).get_workspace_size(
        heads, count, 512, batch, splits, FLOAT32
    )


@pytest.mark.parametrize(("config", "arch"), configs()[::6])
def test_grid_covers_every_tile_of_every_split(config: sm100.DecodeConfig, arch: str) -> None:
    attention, views, _ = host_state(config, arch, 5, 3)
    tiles = sm100.query_tiles(config, arch)
    made = types.SimpleNamespace
    compute = numeric(
        type(attention)._compute_grid,
        create_mla_static_tile_scheduler_params=lambda persistent, b, s, cluster, splits: made(
            is_persistent=persistent, problem_shape_b=b, problem_shape_s=s, cluster_shape_mnk=cluster, split_kv=splits
        ),
        MLAStaticTileScheduler=made(get_grid_shape=numeric(mla_helpers.MLAStaticTileScheduler.get_grid_shape)),
    )
    _, grid = compute(views["o"], 3, attention.cluster_shape_mnk, attention.max_active_clusters, False)
    assert grid == (1 if tiles.rows == 64 else 2, 5 * tiles.count, 3)


def test_prefill_views_are_the_packed_arrays() -> None:
    tokens, keys, heads = 70, 90, 6
    five = numeric(mla_prefill.five_axes)
    arrays = [dense((tokens, heads, 192)), dense((keys, heads, 192)), dense((keys, heads, 128))]
    out, lse = dense((tokens, heads, 128)), dense((tokens, heads))
    # The package asserts that the width 192 is a multiple of 128, which holds in bits.
    trusting = types.SimpleNamespace(**{**vars(CUTE), "assume": lambda value, divby: value})
    call = numeric(
        fmha.BlackwellFusedMultiHeadAttentionForward.__call__,
        cute=trusting,
        fmha_utils=types.SimpleNamespace(compute_grid=stop),
    )
    sizes = (4, 50, tokens, keys, heads, heads, 192, 128)
    self = types.SimpleNamespace(cta_tiler=(256, 128, 128), is_persistent=False)
    views, grid_of = locals_at_stop(
        call, self, *map(five, (*arrays, out)), sizes, "cu_q", "cu_k", lse, 1.0, 1.0, 1.0, *[None] * 5, None
    )
    q, k, v = arrays
    row, column, head = 13, 77, 4
    assert views["q"].address(row, column, 0, head, 0) == q.address(row, head, column)
    assert views["k"].address(row, column, 0, head, 0) == k.address(row, head, column)
    assert views["v"].address(column, row, 0, head, 0) == v.address(row, head, column)
    assert views["o"].address(row, column, 0, head, 0) == out.address(row, head, column)
    assert views["lse"].address(row, 0, head, 0) == lse.address(row, head)
    # The offsets say where a request starts, so requests add nothing.
    assert all(views[name].stride[2][1] == 0 for name in ("q", "k", "v", "o"))
    shape, cta_tiler, persistent = grid_of
    assert cta_tiler[0] == sm100.PREFILL_ROWS and not persistent
    assert shape[0] == 50 and shape[2] == ((1, heads), 4)


CAUSAL, RESIDUAL = fmha_helpers.MaskEnum.WINDOW_MASK_INFERENCE, fmha_helpers.MaskEnum.RESIDUAL_MASK


def trips(tile: int, q_lens: Any, kv_lens: Any) -> Any:
    """Key tiles that the package's causal loop visits for a tile of queries, by its own get_trip_count, of numbers or
    numpy's arrays."""
    mask = types.SimpleNamespace(get_trip_start=numeric(fmha_helpers.FusedMask.get_trip_start))
    count = numeric(fmha_helpers.FusedMask.get_trip_count, FusedMask=mask, min=np.minimum)
    return count(CAUSAL, (tile, 0), (sm100.PREFILL_ROWS, 128, 128), q_lens, kv_lens, None, 0)


def random_requests(rng: np.random.Generator, calls: int) -> tuple[np.ndarray, np.ndarray]:
    """Lengths [calls, 4] of queries and of keys, many at the borders of tiles and of one another."""
    edges = np.array([0, 1, 128, 255, 256, 257])
    q_lens, kv_lens = (
        np.where(rng.random((calls, 4)) < 0.4, rng.choice(edges, (calls, 4)), rng.integers(0, 2000, (calls, 4)))
        for _ in range(2)
    )
    return q_lens, np.where(rng.random((calls, 4)) < 0.2, q_lens, kv_lens)


def offsets(lengths: np.ndarray) -> np.ndarray:
    return np.pad(lengths.cumsum(1), ((0, 0), (1, 0))).astype(np.int32)


def test_no_tile_of_prefill_is_without_keys_and_masks_are_those_that_are_meant() -> None:
    import jax

    from tsmla_jax.ops.library import LIBRARY
    from tsmla_kernels.sm100.dense_arrays import unseeing_apart

    assert trips(0, 600, 40) < 1  # the package waits for ever here
    rng = np.random.default_rng(5)
    q_lens, kv_lens = random_requests(rng, 10_000)
    starts_q, starts_kv = offsets(q_lens), offsets(kv_lens)
    kernel_q, kernel_kv = map(np.asarray, jax.vmap(functools.partial(unseeing_apart, LIBRARY))(starts_q, starts_kv))
    new_q, new_kv = np.diff(kernel_q), np.diff(kernel_kv)
    np.testing.assert_array_equal(new_q[:, ::2] + new_q[:, 1::2], q_lens)
    np.testing.assert_array_equal(new_kv[:, 1::2], kv_lens)
    assert (new_kv[:, ::2] == 0).all() and (new_q >= 0).all()
    for tile in range(-(-2000 // sm100.PREFILL_ROWS)):
        working = (new_q > tile * sm100.PREFILL_ROWS) & (new_kv > 0)
        assert working.any() and (trips(tile, new_q, new_kv)[working] >= 1).all()
    # Shorter queries need no such care: one tile has all of them.
    assert all(trips(0, n, m) == -(-min(m, 256 + m - n) // 128) for n in (1, 100, 256) for m in (1, 2, 300))

    cute = types.SimpleNamespace(size=len, arch=types.SimpleNamespace(thread_idx=lambda: (0, 0, 0)))
    loops = types.SimpleNamespace(const_expr=bool, range=lambda count, unroll_full: range(count))
    apply_mask = numeric(fmha_helpers.FusedMask.apply_mask, cute=cute, cutlass=loops)
    rows, compared = rng.random(q_lens.shape), 0
    for call, request in np.ndindex(*q_lens.shape):
        n, m = int(q_lens[call, request]), int(kv_lens[call, request])
        if n == 0:
            continue
        row = int(rows[call, request] * n)
        for causal in (True, False):
            # A call whose longest request fits one tile, and one without a causal mask, is passed on as it is.
            cut = causal and q_lens[call].max() > sm100.PREFILL_ROWS
            starts, lens = (kernel_q[call], new_kv[call]) if cut else (starts_q[call], kv_lens[call])
            index = starts_q[call, request] + row
            part = int(np.searchsorted(starts, index, "right")) - 1
            visible = max(0, row + 1 + m - n) if causal else m
            keys = [key for key in (0, visible - 1, visible, m - 1, m) if key >= 0]
            scores = [1.0] * len(keys)
            at = [(int(index - starts[part]), key) for key in keys]
            length = int(starts[part + 1] - starts[part])
            window = (None, 0) if causal else (None, None)
            apply_mask(CAUSAL if causal else RESIDUAL, scores, at, length, int(lens[part]), *window)
            assert [score == 1.0 for score in scores] == [key < visible for key in keys], (n, m, row, causal)
            compared += 1
    assert compared > 60_000

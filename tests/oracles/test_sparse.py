"""The quick definition of sparse_mla says what the obvious one does, and bytes hold what was packed into them."""

import numpy as np
import pytest

from tests.oracles import sparse, sparse_inputs


@pytest.mark.parametrize("with_sinks", [False, True])
def test_the_definitions_agree(with_sinks: bool) -> None:
    rng = np.random.default_rng(0)
    near, far = (sparse.Cache.of(rng.standard_normal((3, 4, 24)), scale=scale) for scale in (1.0, 0.5))
    q, sinks = rng.standard_normal((6, 3, 24)), rng.standard_normal(3) if with_sinks else None
    indices, lengths = rng.integers(-1, 13, (6, 8)), np.asarray([8, 0, 3, 8, 5, 8])
    indices[4], indices[5, 1] = -1, indices[5, 0]
    rows = list(sparse.selected(indices, lengths, (near, far), 4))
    assert len(rows[1]) == 0 and len(rows[4]) == 0
    options = {"scale": 0.3, "latent_dim": 16, "sinks": sinks}
    found = (function(q, rows, **options) for function in (sparse.quick_sparse_mla, sparse.sparse_mla))
    for got, want in zip(*found, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


def test_rows_hold_what_was_packed() -> None:
    rng = np.random.default_rng(1)
    values = rng.standard_normal((8, 576)) * 2.0 ** rng.integers(-9, 20, (8, 1))
    packed = [np.frombuffer(sparse.v32_row(row[:512], row[512:]), np.uint8) for row in values]
    got = sparse.Cache.of(np.stack(packed).reshape(2, 4, 656)).rows(np.arange(8))
    assert (np.abs(got - values) <= 0.07 * np.abs(values) + np.abs(values).max(1, keepdims=True) * 2**-9).all()


@pytest.mark.parametrize("span", [4, 5])
def test_pages_hold_what_was_packed(span: int) -> None:
    rng = np.random.default_rng(2)
    values = rng.standard_normal((8, 512))
    pages = np.stack([np.frombuffer(sparse.v4_page(part, 4), np.uint8) for part in values.reshape(2, 4, 512)])
    cache = sparse.Cache.of(pages, page_size=4, span=span)
    slots = np.arange(2 * span)
    np.testing.assert_array_equal(cache.has(slots), slots % span < 4)
    np.testing.assert_allclose(cache.rows(slots[cache.has(slots)]), values, rtol=0.07, atol=2**-8)


@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("layout", sparse_inputs.LAYOUTS)
def test_random_calls_select_no_poison(layout: str, window: int | None, gap: int) -> None:
    case = sparse_inputs.call(layout, window=window, gap=gap, sinks=window is not None)
    out, lse = case.want()
    assert np.isfinite(out).all() and not np.isnan(lse).any()
    assert np.isneginf(lse[[1, 3]]).all() and not out[[1, 3]].any()
    assert np.isfinite(lse[0]).all() and 0.1 < np.abs(out[0]).mean() < 2
    for cache in case.caches:
        slots = np.arange(len(cache.array) * cache.span)
        assert np.isnan(cache.rows(slots[cache.has(slots)])).any()

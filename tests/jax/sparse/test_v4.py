"""Norm, rope and its inverse, and the rows of window and compressed slots."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.jax.ops.programs import ints
from tests.oracles import sparse as oracle
from tsmla_jax import sparse

INV_FREQ = (1e4 ** (-np.arange(4) / 4)).astype(np.float32)
Z, PAGES = 4, 8
ONES, TABLE = jnp.ones((2, 8)), jnp.ones((9, 4))


def test_rope_and_its_inverse() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, 3, 24)).astype(np.float32)
    positions = np.asarray([0, 1, 2, 50, 99])
    table = sparse.rope_table(INV_FREQ, 100)
    turned = jax.jit(sparse.apply_rope)(x, ints(positions), table)
    want = [[oracle.rope(head, p, INV_FREQ) for head in token] for token, p in zip(x, positions, strict=True)]
    np.testing.assert_allclose(turned, want, rtol=1e-5, atol=1e-5)
    back = jax.jit(lambda *a: sparse.apply_rope(*a, inverse=True))(turned, ints(positions), table)
    np.testing.assert_allclose(back, x, rtol=1e-5, atol=1e-6)
    assert np.array_equal(np.asarray(turned)[..., :16], x[..., :16])


def test_norm_and_rope() -> None:
    rng = np.random.default_rng(1)
    x, weight = rng.standard_normal((4, 32)).astype(np.float32), rng.standard_normal(32).astype(np.float32)
    table = sparse.rope_table(INV_FREQ, 60)
    positions = [3, 0, 59, 7]
    got = jax.jit(lambda *a: sparse.norm_rope(*a, eps=1e-3))(x, weight, ints(positions), table)
    want = [oracle.norm_rope(row, weight, p, INV_FREQ, 1e-3) for row, p in zip(x, positions, strict=True)]
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-5)
    plain = jax.jit(lambda x, *a: sparse.norm_rope(x, None, *a, eps=1e-3))(x, ints(positions), table)
    want = [oracle.norm_rope(row, np.ones(32), p, INV_FREQ, 1e-3) for row, p in zip(x, positions, strict=True)]
    np.testing.assert_allclose(plain, want, rtol=2e-5, atol=1e-5)


@settings(max_examples=25)
@given(
    positions=st.lists(st.integers(-1, Z * PAGES - 1), min_size=4, max_size=4),
    ratio=st.sampled_from([2, 4]),
    spans=st.sampled_from([(Z, Z), (Z + 1, Z + 3)]),
)
def test_rows_of_a_layer_that_sees_all(positions: list[int], ratio: int, spans: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    near, far = rng.permutation(4 * PAGES).reshape(4, PAGES), rng.permutation(4 * PAGES).reshape(4, PAGES)
    got = rows_that_see_all(ints(positions), ints(near), ints(far), ratio, spans)
    assert got.window == 6 and got.indices.shape[1] % 4 == 0
    for t, p in enumerate(positions):
        window = [near[t, s // Z] * spans[0] + s % Z for s in range(max(p - 5, 0), p + 1)]
        chosen = [far[t, e // Z] * spans[1] + e % Z for e in range((p + 1) // ratio)]
        want = window + [-1] * (6 - len(window)) + chosen
        assert got.lengths[t] == len(want)
        assert got.indices[t].tolist() == want + [-1] * (got.indices.shape[1] - len(want))


def _rows_that_see_all(
    positions: jax.Array, near: jax.Array, far: jax.Array, ratio: int, spans: tuple[int, int]
) -> object:
    window = sparse.window_slots(positions, near, page_size=Z, window=6)
    chosen, lens = sparse.compressed_slots(positions, far, ratio=ratio, page_size=Z, max_entries=Z * PAGES // ratio)
    return sparse.build_mixed_sparse_indices(
        window, chosen, lens, window_page=(Z, spans[0]), compressed_page=(Z, spans[1])
    )


rows_that_see_all = jax.jit(_rows_that_see_all, static_argnums=(3, 4))


def test_slots_that_are_ready_equal_slots_from_tables() -> None:
    near, far, positions = ints([[2, 0, 1]] * 3), ints([[1, 2]] * 3), ints([0, 5, 11])
    built = sparse.window_slots(positions, near, page_size=Z, window=4, page_span=5)
    ready = sparse.remap_slots(sparse.window_slots(positions, near, page_size=Z, window=4), Z, 5)
    assert built.tolist() == ready.tolist() == [[10, -1, -1, -1], [12, 13, 0, 1], [5, 6, 7, 8]]
    # A layer that chooses: the indexer's positions, best first, as slots; their number is counted.
    chosen = sparse.positions_to_slots(ints([[-1, -1], [0, -1], [2, 0]]), far, Z)
    mixed = sparse.build_mixed_sparse_indices(built, chosen)
    assert mixed.lengths.tolist() == [4, 5, 6]
    assert mixed.indices.tolist() == [
        [10, -1, -1, -1, -1, -1, -1, -1],
        [12, 13, 0, 1, 4, -1, -1, -1],
        [5, 6, 7, 8, 6, 4, -1, -1],
    ]


def test_a_layer_of_ratio_0() -> None:
    mixed = sparse.build_mixed_sparse_indices(ints([[3, 4, -1]]))
    assert mixed.indices.tolist() == [[3, 4, -1, -1]]
    assert mixed.lengths.tolist() == [2]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sparse.build_mixed_sparse_indices(ints([[1]]), window_page=(4, 3)), r"window_page\[1\]: got 3"),
        (
            lambda: sparse.apply_rope(ONES, ints([1, 2]), jnp.ones((9, 4), jnp.int32)),
            "cos_sin: got dtype int32; legal: f",
        ),
        (lambda: sparse.apply_rope(ONES, ints([1, 2]), jnp.ones((9, 4), jnp.float16)), "cos_sin: got dtype float16"),
        (lambda: sparse.apply_rope(ONES, ints([1, 2]), jnp.ones((0, 4))), "cos_sin: got shape .*N must be at least 1"),
        (
            lambda: sparse.norm_rope(ONES.astype(bool), None, ints([1, 2]), TABLE, eps=0.1),
            "kv: got dtype bool; legal: f",
        ),
        (
            lambda: sparse.norm_rope(ONES, jnp.ones(8, int), ints([1, 2]), TABLE, eps=0.1),
            "norm_weight: got dtype int32",
        ),
        (lambda: sparse.norm_rope(ONES, None, ints([1, 2]), TABLE, eps=-0.1), "eps: got -0.1; legal: at least 0"),
        (lambda: sparse.norm_rope(ONES, None, ints([1, 2]), TABLE, eps=float("nan")), "eps: got nan; legal: a finite"),
        (lambda: sparse.rope_table(jnp.ones(4, complex), 9), "inv_freq: got dtype complex64; legal: f"),
        (lambda: sparse.rope_table(jnp.ones((4, 1)), 9), "inv_freq: got shape"),
        (lambda: sparse.rope_table(jnp.ones(4), 9, scale=float("inf")), "scale: got inf; legal: a finite number"),
        (lambda: sparse.build_mixed_sparse_indices(ints([[1]]), ints([[1]] * 2)), "compressed_slots: got shape"),
        (lambda: sparse.build_mixed_sparse_indices(ints([[1]]), None, ints([1])), "compressed_slots: got None"),
        (lambda: sparse.build_mixed_sparse_indices(jnp.ones((1, 4))), "window_slots: got dtype float32"),
        (lambda: sparse.apply_rope(jnp.ones((2, 8)), ints([1]), jnp.ones((9, 4))), "positions: got shape"),
        (lambda: sparse.apply_rope(jnp.ones((2, 8)), ints([1, 2]), jnp.ones((9, 10))), "cos_sin: got width R = 10"),
        (lambda: sparse.window_slots(ints([1]), ints([[0]]), page_size=4, window=0), "window: got 0"),
        (
            lambda: sparse.norm_rope(jnp.ones((2, 8)), jnp.ones(9), ints([1, 2]), jnp.ones((9, 4)), eps=0.1),
            "norm_weight: got shape",
        ),
    ],
)
def test_refuses(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sparse.norm_rope(ONES, None, ints([1, 2]), TABLE, eps="4"), "eps: got str; legal: a static float"),
        (lambda: sparse.rope_table(jnp.ones(4), 9, scale="4"), "scale: got str; legal: a static float"),
        (lambda: sparse.apply_rope(ONES, ints([1, 2]), TABLE, inverse=1), "inverse: got int; legal: True or False"),
        (lambda: sparse.expand_pools(ints([[0]]), ints([1]), 4, tail=None), "tail: got NoneType; legal: True or False"),
        (lambda: sparse.init_compressor_state(1, ratio=4, channels=8, overlap=2), "overlap: got int; legal: True or F"),
        (
            lambda: sparse.build_mixed_sparse_indices(ints([[1]]), window_page=4),
            r"window_page: got 4; legal: \(page size, span\)",
        ),
    ],
)
def test_refuses_another_type(call: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


def test_checks_see_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TSMLA_CHECK", "1")
    with pytest.raises(ValueError, match="token 0 has 3 slots; legal: 0 to 2"):
        sparse.compressed_slots(ints([11]), ints([[0]]), ratio=4, page_size=4, max_entries=2)
    with pytest.raises(ValueError, match="compressed_lens: token 1 has 2 slots; legal: 0 to 1"):
        sparse.build_mixed_sparse_indices(ints([[0], [0]]), ints([[1], [1]]), ints([1, 2]))
    mixed = sparse.build_mixed_sparse_indices
    with pytest.raises(
        ValueError, match=r"window_slots: token 1 has -1 in column 0, .* its 1 slots; legal: slots first"
    ):
        mixed(ints([[3, -1], [-1, 2]]))
    with pytest.raises(ValueError, match="compressed_slots: token 0 has -1 in column 1, before the end of its 2 slots"):
        mixed(ints([[0]]), ints([[4, -1, 5]]))
    with pytest.raises(ValueError, match="compressed_slots: token 1 has -1 in column 0, before the end of its 1 slots"):
        mixed(ints([[0], [0]]), ints([[4, -1], [-1, -1]]), ints([1, 1]))
    with pytest.raises(ValueError, match="positions: row 1 has position 9; legal: at most 8"):
        sparse.apply_rope(jnp.ones((2, 8)), ints([8, 9]), jnp.ones((9, 4)))

"""Attention over packed rows against a dense softmax with a mask made from the ids alone.

Over a mesh, and by the kernels' custom calls: tests/jax/ops/test_prefill_call.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tsmla_jax.nn import Segments, dot_product_attention, segment_attention, segment_attention_kv

HEADS, NOPE, ROPE, V = 2, 8, 4, 6
ROWS, LEN = 2, 21
IDS = np.array(
    [
        [1] * 5 + [2] * 3 + [0] * 2 + [7] * 6 + [3] * 1 + [0] * 4,  # padding inside and behind
        [0] * 4 + [5] * 17,  # padding in front
    ],
    np.int32,
)
MAX_SEGMENTS = 4
SCALE = 0.3
SEGMENTS = jax.jit(Segments.from_ids, static_argnames="max_segments")


def operands(seed: int = 0, dtype: Any = jnp.float32, ids: np.ndarray = IDS) -> list[jax.Array]:
    """q, kv and k_rope."""
    rng = np.random.default_rng(seed)
    shapes = (HEADS, NOPE + ROPE), (HEADS, NOPE + V), (ROPE,)
    return [jnp.asarray(rng.normal(size=(*ids.shape, *shape)), dtype) for shape in shapes]


def expand(q: jax.Array, kv: jax.Array, k_rope: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q, k and v."""
    rope = jnp.broadcast_to(k_rope[:, :, None], (*kv.shape[:3], ROPE))
    return q, jnp.concatenate([kv[..., :NOPE], rope], axis=-1), kv[..., NOPE:]


def dense(ids: np.ndarray, causal: bool, q: jax.Array, kv: jax.Array, k_rope: jax.Array) -> jax.Array:
    q, k, v = expand(q, kv, k_rope)
    visible = (ids[:, :, None] == ids[:, None]) & (ids != 0)[:, :, None]
    if causal:
        visible = visible & np.tri(ids.shape[1], dtype=bool)
    scores = jnp.where(visible[:, None], jnp.einsum("bqhd,bkhd->bhqk", q, k) * SCALE, -1e30)
    weights = jnp.where(visible[:, None], jax.nn.softmax(scores, axis=-1), 0)
    return jnp.einsum("bhqk,bkhv->bqhv", weights, v)


def packed(causal: bool, ids: jax.Array, q: jax.Array, kv: jax.Array, k_rope: jax.Array) -> jax.Array:
    segments = Segments.from_ids(ids, max_segments=MAX_SEGMENTS)
    return segment_attention(*expand(q, kv, k_rope), segments, softmax_scale=SCALE, causal=causal)


def packed_kv(causal: bool, ids: jax.Array, q: jax.Array, kv: jax.Array, k_rope: jax.Array) -> jax.Array:
    segments = Segments.from_ids(ids, max_segments=MAX_SEGMENTS)
    return segment_attention_kv(q, kv, k_rope, segments, softmax_scale=SCALE, causal=causal)


@pytest.mark.parametrize(("attend", "causal"), [(packed, True), (packed_kv, False)])
def test_values_and_gradients(attend: Any, causal: bool) -> None:
    """Of one compiled program, whose ids are data."""
    weight = np.random.default_rng(1).normal(size=(ROWS, LEN, HEADS, V)).astype(np.float32)

    @jax.jit
    def definition(ids: jax.Array, *arrays: jax.Array) -> Any:
        out, pull = jax.vjp(partial(dense, ids, causal), *arrays)
        return out, pull(weight)

    @jax.jit
    def run(ids: jax.Array, *arrays: jax.Array) -> Any:
        out, pull = jax.vjp(partial(attend, causal, ids), *arrays)
        return out, pull(weight)

    for seed, ids in enumerate((IDS, IDS[:, ::-1].copy(), np.ones_like(IDS))):
        arrays = operands(seed)
        out, wanted = definition(ids, *arrays)
        got, gradients = run(ids, *arrays)
        np.testing.assert_allclose(got, out, rtol=2e-5, atol=2e-5)
        for mine, theirs in zip(gradients, wanted, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)
        assert not np.asarray(got)[ids == 0].any()
    assert run._cache_size() == 1


def test_a_row_of_too_many_segments_is_nan() -> None:
    arrays = operands()
    segments = SEGMENTS(IDS, max_segments=3)
    assert segments.overflow.tolist() == [True, False]
    got = np.asarray(jax.jit(segment_attention_kv)(*arrays, segments, softmax_scale=SCALE))
    assert np.isnan(got[0]).all()
    want = np.asarray(jax.jit(partial(dense, IDS, True))(*arrays))
    np.testing.assert_allclose(got[1], want[1], rtol=2e-5, atol=2e-5)


def test_long_padding_is_cut_into_pieces() -> None:
    """So that its cost is linear in its length, where it attends to itself."""
    mask = np.arange(4096)[None] < np.array([[700], [4096], [0]])
    segments = SEGMENTS(mask, max_segments=1)
    assert segments.starts.tolist() == [[0, 700, 4096], [0, 4096, 4096], [0, 4096, 4096]]
    bounds = np.asarray(segments.cu_seqlens)
    assert bounds.shape == (3 * 19 + 1,) and bounds[-1] == 3 * 4096
    for row, expected in enumerate(([0, 700, *range(768, 4096, 256)], [0], [*range(0, 4096, 256)])):
        assert sorted(set(bounds[19 * row : 19 * row + 19] - 4096 * row)) == sorted({*expected, 4096})


def test_padding_has_no_keys() -> None:
    segments = SEGMENTS(IDS, max_segments=MAX_SEGMENTS)
    queries, keys = (np.diff(offsets) for offsets in segments.offsets)
    assert queries.sum() == keys.sum() == IDS.size
    assert (queries[queries > 0] == np.where(keys > 0, keys, queries)[queries > 0]).all()
    assert queries[(queries > 0) & (keys == 0)].sum() == (IDS == 0).sum() == keys[queries == 0].sum()


def test_padding_may_hold_nan() -> None:
    """And has no gradient."""
    arrays = [jnp.where((IDS == 0).reshape(*IDS.shape, *[1] * (x.ndim - 2)), jnp.nan, x) for x in operands()]

    @jax.jit
    def run(*arrays: jax.Array) -> Any:
        out, pull = jax.vjp(partial(packed_kv, True, IDS), *arrays)
        return out, pull(jnp.where(jnp.asarray(IDS == 0)[..., None, None], jnp.nan, jnp.ones_like(out)))

    out, gradients = run(*arrays)
    np.testing.assert_allclose(out, dense(IDS, True, *operands()), rtol=2e-5, atol=2e-5)
    assert not any(np.asarray(x)[IDS == 0].any() or np.isnan(x).any() for x in gradients)


def test_bad_input() -> None:
    q, kv, k_rope = operands()
    segments = Segments.from_ids(IDS, max_segments=MAX_SEGMENTS)
    with pytest.raises(TypeError, match="ids: got dtype float32; legal: integers or booleans"):
        Segments.from_ids(jnp.ones((2, 3)), max_segments=1)
    with pytest.raises(ValueError, match=r"ids: got shape \(3,\); legal: \[B, S\]"):
        Segments.from_ids(jnp.ones(3, jnp.int32), max_segments=1)
    with pytest.raises(ValueError, match="max_segments: got 0; legal: an int >= 1"):
        Segments.from_ids(IDS, max_segments=0)
    # The same number of tokens in other rows.
    turned = q.reshape(LEN, ROWS, *q.shape[2:])
    with pytest.raises(ValueError, match=r"q: got .* legal: \[B, S, H, K\] with the segments' B, S = \(2, 21\)"):
        segment_attention(turned, *expand(q, kv, k_rope)[1:], segments, softmax_scale=SCALE)
    with pytest.raises(ValueError, match=r"k_rope: got .* legal: \[B, S, R\]"):
        segment_attention_kv(q, kv, k_rope[:, :, None], segments, softmax_scale=SCALE)
    with pytest.raises(ValueError, match="nonesuch"):
        segment_attention_kv(q, kv, k_rope, segments, softmax_scale=SCALE, implementation="nonesuch")


def test_errors_have_the_shapes_as_the_caller_gave_them() -> None:
    q, kv, k_rope = operands()
    segments = Segments.from_ids(IDS, max_segments=MAX_SEGMENTS)
    _, k, v = expand(q, kv, k_rope)
    for name, given, match in (
        ("k", k[:, :, :1], r"k: got shape \(2, 21, 1, .*\); legal: \[B, S, H, K\] with q's H = "),
        ("v", v[:, :, :1], r"v: got shape \(2, 21, 1, .*\); legal: \[B, S, H, V\] with q's H = "),
        ("k", k[..., 1:], r"k: got shape \(2, 21, .*\); legal: \[B, S, H, K\] with q's K = "),
        ("v", v[..., :0], r"v: got shape \(2, 21, .*, 0\); legal: .* with at least one head and one column"),
        ("q", q[:, :, :0], r"q: got shape \(2, 21, 0, .*\); legal: .* with at least one head and one column"),
    ):
        with pytest.raises(ValueError, match=match):
            segment_attention(**{"q": q, "k": k, "v": v, name: given}, segments=segments, softmax_scale=SCALE)
    wide = jnp.concatenate([k_rope] * (1 + q.shape[3] // k_rope.shape[2]), axis=2)
    for name, given, match in (
        ("kv", kv[:, :, :1], r"kv: got shape \(2, 21, 1, .*\); legal: \[B, S, H, N \+ V\] with q's H = "),
        (
            "kv",
            kv[..., : k.shape[3] - k_rope.shape[2]],
            r"kv: got shape .*; legal: .* with V of at least 1 beside N = ",
        ),
        ("k_rope", wide, r"k_rope: got shape .*; legal: \[B, S, R\] with R of at most K - 1 = "),
    ):
        with pytest.raises(ValueError, match=match):
            arrays = {"q": q, "kv": kv, "k_rope": k_rope, name: given}
            segment_attention_kv(**arrays, segments=segments, softmax_scale=SCALE)


def test_wide_ids_are_not_cut() -> None:
    """2^32 is no padding, and 2^32 + 1 is not 1."""
    ids = np.asarray([[2**32 + 1, 1, 2**32, 0]])
    with pytest.raises(ValueError, match="ids: got int64 beyond int32; legal: ids of 32 bits, or jax_enable_x64"):
        Segments.from_ids(ids, max_segments=4)
    with pytest.raises(TypeError, match="ids: got dtype float32; legal: integers or booleans"):
        Segments.from_ids(np.asarray([[0.1]]), max_segments=4)  # type: ignore[arg-type]
    with jax.enable_x64(True):
        found = SEGMENTS(ids, max_segments=4)
    assert found.starts[0, :4].tolist() == [0, 1, 2, 3] and found.valid.tolist() == [[True, True, True, False]]
    high = SEGMENTS(np.asarray([[2**32 - 1, 2**31]], np.uint32), max_segments=2)
    assert high.starts[0, :2].tolist() == [0, 1] and high.valid.all()


def test_checks_of_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TSMLA_CHECK", "1")
    Segments.from_ids(IDS, max_segments=MAX_SEGMENTS)
    with pytest.raises(ValueError, match="ids: row 0 has 4 segments; legal: at most max_segments=3"):
        Segments.from_ids(IDS, max_segments=3)
    with pytest.raises(ValueError, match="ids: row 1 has the id 5 in more than one run"):
        Segments.from_ids(np.array([[1, 1, 2, 2], [5, 0, 5, 4]]), max_segments=4)
    q = jnp.ones((4, 1, 8))
    with pytest.raises(ValueError, match=r"^segment_ids: row 0 has 2 segments; legal: at most max_segments=1"):
        dot_product_attention(q, q, q, segment_ids=jnp.array([1, 1, 2, 2]), max_segments=1)

"""nn.dot_product_attention beside jax.nn's, on the shapes of jax's own tests: values, masks, lengths and gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tsmla_jax
from tsmla_jax.nn import Segments, dot_product_attention

B, N, H = 2, 4, 32


def operands(queries: int, keys: int, seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    shapes = (B, queries, N, H), (B, keys, N, H), (B, keys, N, H)
    q, k, v = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)
    return q, k, v


def mask_of(queries: int, keys: int, seed: int = 1) -> jax.Array:
    """A mask in which every query sees the first key, so that no row is empty."""
    mask = np.random.default_rng(seed).random((B, 1, queries, keys)) < 0.5
    mask[..., 0] = True
    return jnp.asarray(mask)


def jitted(function: Any, **options: Any) -> Any:
    """Compiled as a whole: eagerly, each operation would be compiled for itself."""
    return jax.jit(partial(function, **options))


def results(function: Any, arrays: Any, **options: Any) -> Any:
    """The value, and the gradients of a sum whose cotangents differ from element to element."""

    def loss(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = function(*arrays, **options)
        return jnp.sin(out).sum(), out

    (_, out), gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*arrays)
    return out, *gradients


LENGTHS = {
    "none": {},
    "queries": {"query_seq_lengths": [5, 120]},
    "keys": {"key_value_seq_lengths": [37, 70]},
    "both": {"query_seq_lengths": [128, 0], "key_value_seq_lengths": [4, 64]},
}


@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("queries", "keys"), [(128, 128), (128, 70), (70, 128)])
@pytest.mark.sampled(4)
def test_it_is_jaxs(queries: int, keys: int, lengths: str, is_causal: bool) -> None:
    bounds = {"query_seq_lengths": queries, "key_value_seq_lengths": keys}
    given = {n: jnp.minimum(jnp.array(x, jnp.int32), bounds[n]) for n, x in LENGTHS[lengths].items()}
    masked = lengths == "both" or (lengths == "none" and is_causal and queries == keys)
    options = {**given, "is_causal": is_causal, "mask": mask_of(queries, keys) if masked else None}
    arrays = operands(queries, keys)
    for got, want in zip(
        results(dot_product_attention, arrays, **options),
        results(jax.nn.dot_product_attention, arrays, **options),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=3e-5)


def test_residual_scale_and_one_row() -> None:
    q, k, v = operands(128, 128)
    options = {"scale": 0.3, "is_causal": True, "return_residual": True}
    first = [np.asarray(x)[0] for x in (q, k, v)]
    for got, want in zip(
        jitted(dot_product_attention, **options)(*first),
        jitted(jax.nn.dot_product_attention, **options)(*first),
        strict=True,
    ):
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_vmap_and_a_width_of_the_values() -> None:
    q, k, v = operands(128, 128)
    lengths = jnp.array([128, 90], jnp.int32)
    options = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths, "is_causal": True}
    queries, keys, values = (np.stack([x, 2 * x]) for x in map(np.asarray, (q, k, v)))
    got = jax.jit(jax.vmap(partial(dot_product_attention, **options)))(queries, keys, values[..., :24])
    want = jax.jit(jax.vmap(partial(jax.nn.dot_product_attention, **options)))(queries, keys, values)
    assert got.shape == (2, B, 128, N, 24)
    np.testing.assert_allclose(got, np.asarray(want)[..., :24], rtol=2e-5, atol=2e-5)


def test_one_array_of_lengths_that_keys_are_too_few_for() -> None:
    """Lengths above S mean S keys: the queries after the last key see all of them."""
    q, k, v = operands(6, 4)
    lengths = jnp.array([6, 3], jnp.int32)
    got = dot_product_attention(
        q, k, v, is_causal=True, query_seq_lengths=lengths, key_value_seq_lengths=lengths, implementation="reference"
    )
    keys = jnp.minimum(lengths, 4)
    want = jax.nn.dot_product_attention(q, k, v, is_causal=True, query_seq_lengths=lengths, key_value_seq_lengths=keys)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_rows_without_keys_are_zero() -> None:
    """jax.nn gives them the mean of all values."""
    q, k, v = operands(6, 5)
    lengths = jnp.array([0, 5], jnp.int32)
    for is_causal in (False, True):
        attend = jitted(dot_product_attention, is_causal=is_causal, return_residual=True)
        out, lse = jax.device_get(attend(q, k, v, key_value_seq_lengths=lengths))
        assert (out[0] == 0).all() and (lse[0] == -np.inf).all()
        assert np.isfinite(lse[1]).all()


def test_segments() -> None:
    q, k, v = operands(128, 128)
    ids = np.repeat(np.asarray([[1, 2, 0, 0], [3, 3, 4, 4]], np.int32), 32, axis=1)
    same = (ids[:, :, None] == ids[:, None]) & (ids != 0)[:, :, None]
    options = {"is_causal": True, "scale": 0.1}
    got = results(dot_product_attention, (q, k, v), **options, segment_ids=jnp.asarray(ids), max_segments=2)
    want = results(jax.nn.dot_product_attention, (q, k, v), **options, mask=(same | (ids == 0)[:, :, None])[:, None])
    np.testing.assert_allclose(got[0], np.where((ids != 0)[..., None, None], want[0], 0), rtol=2e-5, atol=2e-5)
    segments = jax.jit(partial(Segments.from_ids, max_segments=2))(ids)
    attend = jitted(dot_product_attention, **options, return_residual=True)
    out, lse = jax.device_get(attend(q, k, v, segment_ids=segments))
    assert (out == got[0]).all()
    assert ((lse == -np.inf) == (ids == 0)[..., None]).all()
    crowded = jitted(dot_product_attention, max_segments=1, return_residual=True)(q, k, v, segment_ids=ids)
    assert all(np.isnan(x).all() for x in crowded)


def test_half_precision_and_the_implementations() -> None:
    arrays = [x.astype(jnp.bfloat16) for x in operands(40, 40)]
    want = jitted(jax.nn.dot_product_attention, is_causal=True)(*arrays)
    for implementation in ("xla", "reference", ["cute", "reference"], None):
        out = jitted(dot_product_attention, is_causal=True, implementation=implementation)(*arrays)
        assert out.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.float32(out), np.float32(want), rtol=2e-2, atol=2e-2)


Q, K, V = operands(6, 5)
TWO = jnp.ones(2, jnp.int32)
REFUSED: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "bias": (NotImplementedError, "bias: got .*; legal: None", {"bias": jnp.ones((1, 1, 6, 5))}),
    "window": (NotImplementedError, "local_window_size: got int; legal: None", {"local_window_size": 3}),
    "dropout": (NotImplementedError, r"dropout_rate: got 0\.1; legal: 0", {"dropout_rate": 0.1}),
    "groups": (NotImplementedError, r"key: got 2 heads; legal: query's 4 .*jnp\.repeat\(key", {"key": K[:, :, :2]}),
    "dropout's dtype": (NotImplementedError, r"dropout_rate: got 0\.5; legal: 0", {"dropout_rate": np.float32(0.5)}),
    "heads": (
        NotImplementedError,
        r"mask: got shape \(2, 4, 6, 5\) with 4 heads; legal: \[2 or 1, 1, 6 or 1, 5 or 1\], where all heads see",
        {"mask": jnp.ones((B, N, 6, 5), bool)},
    ),
    "a rank of the mask": (
        NotImplementedError,
        r"mask: got shape \(2, 6, 5\) with 2 heads; legal: \[2 or 1, 1, 6 or 1, 5 or 1\], where all heads see",
        {"mask": jnp.ones((B, 6, 5), bool)},
    ),
    "no heads": (ValueError, r"query: got shape \(2, 6, 0, 32\); legal: N and H", {"query": Q[:, :, :0]}),
    "no columns": (ValueError, r"query: got shape \(2, 6, 4, 0\); legal: N and H", {"query": Q[..., :0]}),
    "no values": (ValueError, r"value: got shape \(2, 5, 4, 0\); legal: V", {"value": V[..., :0]}),
    "scale": (ValueError, "^scale: got -0.5; legal: a positive number", {"scale": -0.5}),
    "scale's shape": (ValueError, r"^scale: got an array of shape \[1\]; legal", {"scale": jnp.ones(1)}),
    "scale's type": (TypeError, "^scale: got str; legal: a float or", {"scale": "1"}),
    "sinks": (ValueError, r"sinks: got shape \[3\]; axis 0 must be 4 \(N, query's heads\)", {"sinks": jnp.ones(3)}),
    "max_segments": (ValueError, "max_segments: got 2 without segment_ids; legal: None", {"max_segments": 2}),
    "mask": (ValueError, r"mask: got shape \(2, 1, 5, 5\); legal", {"mask": jnp.ones((B, 1, 5, 5), bool)}),
    "float mask": (ValueError, "mask: got dtype float32; legal: bool", {"mask": jnp.ones((B, 1, 6, 5))}),
    "rank": (ValueError, r"query: got shape \(6, 32\); legal: \[B, T, N, H\]", {"query": Q[0, :, 0]}),
    "rows": (
        ValueError,
        r"key: got shape \(1, 5, 4, 32\); legal: \[B, S, N, H\] with query's B = 2, N = 4, H = 32",
        {"key": K[:1]},
    ),
    "rows of values": (
        ValueError,
        r"value: got .*; legal: \[B, S, N, V\] with query's B = 2, N = 4$",
        {"value": V[:1]},
    ),
    "width": (ValueError, r"key: got shape \(2, 5, 4, 8\); legal", {"key": K[..., :8]}),
    "keys": (ValueError, r"value: got shape \(2, 4, 4, 32\); .* S = 5", {"value": V[:, :4]}),
    "dtype": (ValueError, "value: got dtype float16; legal: query's, float32", {"value": V.astype(jnp.float16)}),
    "integers": (ValueError, "query: got dtype int32; legal", {"query": Q.astype(jnp.int32)}),
    "lengths": (
        ValueError,
        r"query_seq_lengths: got int32 of shape \(3,\)",
        {"query_seq_lengths": jnp.ones(3, "int32")},
    ),
    "float": (ValueError, "key_value_seq_lengths: got float32", {"key_value_seq_lengths": jnp.ones(2)}),
    "segments": (ValueError, "key: got 5 tokens; legal: query's 6", {"segment_ids": jnp.ones((2, 6), "int32")}),
    "flag": (TypeError, "is_causal: got int; legal: True or False", {"is_causal": 1}),
    "name": (ValueError, "implementation: got 'cudnn'; legal: None, 'cute'", {"implementation": ("xla", "cudnn")}),
    "no name": (ValueError, r"implementation: got \(\); legal: None, 'cute'", {"implementation": ()}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_refuses(case: str) -> None:
    error, match, given = REFUSED[case]
    with pytest.raises(error, match=match):
        dot_product_attention(**{"query": Q, "key": K, "value": V, **given})


def test_what_segments_refuse() -> None:
    ids, attend = jnp.ones((2, 6), jnp.int32), partial(dot_product_attention, Q, Q, Q)
    with pytest.raises(ValueError, match="query_seq_lengths: got an array beside segment_ids"):
        attend(segment_ids=ids, max_segments=1, query_seq_lengths=TWO)
    with pytest.raises(ValueError, match="max_segments: got None; legal: a static int"):
        attend(segment_ids=ids)
    with pytest.raises(ValueError, match="max_segments: got 1 beside Segments"):
        attend(segment_ids=Segments.from_ids(ids, max_segments=1), max_segments=1)
    for wrong in (ids[:1], ids[0]):
        with pytest.raises(ValueError, match=r"segment_ids: got shape \(.*6.*\); legal: query's \[B, T\] = \(2, 6\)"):
            attend(segment_ids=wrong, max_segments=1)
    with pytest.raises(ValueError, match=r"segment_ids: got Segments of rows \(1, 6\); legal: query's \[B, T\]"):
        attend(segment_ids=Segments.from_ids(ids[:1], max_segments=1))
    with pytest.raises(TypeError, match="segment_ids: got dtype float32; legal: integers"):
        attend(segment_ids=jnp.ones((2, 6)), max_segments=1)
    with pytest.raises(TypeError, match="segment_ids: got tuple; legal: an array"):
        attend(segment_ids=(ids, ids), max_segments=1)


def test_names_are_tried_in_order_with_every_reason() -> None:
    q, starts = Q.reshape(12, N, H), jnp.array([0, 6, 12], jnp.int32)
    call = partial(tsmla_jax.explain, "mla_prefill", q, q, q, cu_seqlens_q=starts, max_q_len=6, softmax_scale=1.0)
    assert call(implementation=("cute", "reference", "xla")).chosen == "reference"
    assert call(implementation=["cute"]).chosen is None
    reasons = call(implementation=["cute"]).reasons["cute"]
    with pytest.raises(NotImplementedError) as caught:
        dot_product_attention(Q, Q, Q, implementation=["cute", "cute"])
    said = str(caught.value)
    assert said.startswith("mla_prefill: implementation=('cute', 'cute') can't run this call: cute: ")
    assert all(said.count(reason) == 2 for reason in reasons)


def test_an_explicit_mesh_splits_rows_and_heads_but_no_row() -> None:
    mesh = jax.make_mesh((2, 2), ("rows", "heads"), axis_types=(AxisType.Explicit,) * 2)
    arrays, attend = operands(12, 12), jitted(dot_product_attention, is_causal=True)
    want = attend(*arrays)
    with jax.set_mesh(mesh):
        spec = P("rows", None, "heads", None)
        got = attend(*jax.device_put(arrays, NamedSharding(mesh, spec)))
        assert jax.typeof(got).sharding.spec == spec
        np.testing.assert_array_equal(jax.device_get(got), jax.device_get(want))
        split = jax.device_put(arrays, NamedSharding(mesh, P(None, "rows")))
        with pytest.raises(
            ValueError, match=r"query: got shape \(2, 12, 4, 32\) with 12 tokens split over 'rows'; legal"
        ):
            attend(*split)


def test_symbolic_rows() -> None:
    """jax.export can leave the number of rows open, and the number of heads, but no row's length."""
    rows, length = jax.export.symbolic_shape("b, t")
    ids = jnp.asarray([[1] * 5 + [2] * 7] * 3, jnp.int32)

    def attend(x: jax.Array, ids: jax.Array) -> jax.Array:
        return dot_product_attention(x, x, x, is_causal=True, segment_ids=ids, max_segments=2)

    x = jnp.concatenate(operands(12, 12))[:3]
    shapes = jax.ShapeDtypeStruct((rows, 12, N, H), x.dtype), jax.ShapeDtypeStruct((rows, 12), ids.dtype)
    np.testing.assert_allclose(jax.export.export(jax.jit(attend))(*shapes).call(x, ids), attend(x, ids), atol=2e-6)
    longer = jax.ShapeDtypeStruct((rows, length, N, H), x.dtype)
    with pytest.raises(
        ValueError, match=r"query: got shape \(b, t, 4, 32\); legal: a static number of tokens in a row"
    ):
        jax.eval_shape(lambda x: dot_product_attention(x, x, x), longer)
    with pytest.raises(ValueError, match=r"ids: got shape \(b, t\); legal: a static number of tokens in a row, not t"):
        jax.eval_shape(partial(Segments.from_ids, max_segments=2), jax.ShapeDtypeStruct((rows, length), ids.dtype))

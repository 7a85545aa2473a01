"""mla_prefill's custom call on CPUs: an emulation takes the kernel's place, the reference is the oracle."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import tsmla_jax
from tests.emulator.prefill import Results, expanded
from tests.jax.ops.prefill_calls import (
    HEADS,
    PADDING,
    V,
    arrays,
    attend,
    attend_kv,
    layer_arrays,
)
from tests.jax.ops.programs import assert_same
from tsmla_jax.nn import Segments, segment_attention_kv

FP8 = jnp.float8_e4m3fn
pytestmark = [
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="emulates the kernel on CPUs"),
    pytest.mark.usefixtures("emulated_prefill"),
]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dims", [(192, 128), (128, 128), (64, 64), (256, 256)])
def test_ragged(dims: tuple[int, int], causal: bool) -> None:
    args = arrays(HEADS, *dims)
    got = jax.jit(attend("cute", causal=causal))(*args)
    assert_same(got, attend("reference", causal=causal)(*args))
    assert np.all(np.asarray(got[1])[-PADDING:] == -np.inf) and np.all(np.float32(got[0])[-PADDING:] == 0)


def test_scales() -> None:
    kwargs = {"q_scale": 0.5, "k_scale": jnp.float32(1.5), "v_scale": 2.0}
    assert_same(attend("cute", **kwargs)(*arrays()), attend("reference", **kwargs)(*arrays()))
    constant = {"q_scale": 0.5, "v_scale": 2.0}
    assert_same(attend("cute", **constant)(*arrays()), attend("reference", **constant)(*arrays()))


def test_fp8_with_its_scales() -> None:
    scales = {"q_scale": 0.5, "k_scale": jnp.float32(1.5), "v_scale": 2.0}
    got = jax.jit(attend("cute", **scales))(*arrays(dtype=FP8))
    assert got[0].dtype == jnp.bfloat16
    assert_same(got, attend("reference", **scales)(*arrays(dtype=FP8)))
    explanation = tsmla_jax.explain(
        "mla_prefill", *arrays(dtype=FP8), **{k: v for k, v in attend("cute").keywords.items() if k != "implementation"}
    )
    assert not any("dtype" in reason for reason in explanation.reasons["cute"])


def test_fp8_kv_and_rope() -> None:
    args = [x.astype(FP8) for x in layer_arrays()]
    assert_same(attend_kv("cute")(*args), attend("reference")(*expanded(*args)))


def test_scales_may_be_traced() -> None:
    def run(implementation: str) -> Results:
        return jax.jit(lambda scale: attend(implementation, softmax_scale=scale, v_scale=scale)(*arrays()))(
            jnp.float32(0.3)
        )

    assert_same(run("cute"), run("reference"))


def test_forward_mode_is_refused() -> None:
    q, k, v = arrays()
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda q: attend("cute")(q, k, v)[0], (q,), (q,))


# ---- several devices


# ---- lowering for CUDA, which finds or compiles the object


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (arrays(dtype=jnp.float32), "q.dtype is float32; the sm_90 prefill kernel takes bfloat16, float16 or"),
        (arrays(k_dim=64, v_dim=64, dtype=FP8), "prefill kernel takes 192 and 128, 256 and 256 in float8_e4m3fn"),
        (arrays(v_dim=64), "the head dims of k and v are 192 and 64; the sm_90 prefill kernel takes 192 and 128, "),
    ],
)
def test_what_the_kernel_does_not_take_is_said(args: list[jax.Array], reason: str) -> None:
    with pytest.raises(NotImplementedError, match=reason):
        attend("cute")(*args)


def test_none_chooses_xla_on_a_cpu() -> None:
    kwargs = attend("cute").keywords
    kwargs.pop("implementation")
    explanation = tsmla_jax.explain("mla_prefill", *arrays(), **kwargs)
    assert explanation.chosen == "xla"
    assert explanation.reasons["cute"] == ("jax's default device is a cpu",)


# ---- keys and values as the layer makes them


@pytest.mark.parametrize("implementation", ["cute", "xla", "reference"])
@pytest.mark.parametrize("causal", [True, False])
def test_kv_and_rope(implementation: str, causal: bool) -> None:
    run = attend_kv(implementation, causal=causal)
    want = attend("reference", causal=causal)(*expanded(*layer_arrays()))
    assert_same(run(*layer_arrays()), want)
    jaxpr = str(jax.make_jaxpr(run)(*layer_arrays()))
    assert ("concatenate" in jaxpr) == (implementation != "cute")  # the kernel reads them where they lie


@pytest.mark.parametrize("implementation", ["cute", "xla"])
def test_no_rope_columns(implementation: str) -> None:
    args = layer_arrays(rope_dim=0)
    assert_same(attend_kv(implementation)(*args), attend("reference")(*expanded(*args)))


def test_no_rows_of_kv() -> None:
    q, kv, k_rope = (x[:0] for x in layer_arrays())
    out, lse = attend_kv("cute")(q, kv, k_rope)
    assert out.shape == (0, HEADS, V) and lse.shape == (0, HEADS)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((4, 2, 192), (5, 2, 256), (4, 64)), r"k_rope: got shape \[4, 64\]; its Tk must equal kv's, 5"),
        (((4, 2, 192), (5, 2, 256), (5, 192)), r"k_rope: got shape \[5, 192\]; its R must be between 0 and q's K - 1"),
        (((4, 2, 192), (5, 2, 128), (5, 64)), r"kv: got shape \[5, 2, 128\]; its last axis must be wider than K - R"),
        (((4, 2, 192), (5, 3, 256), (5, 64)), r"kv: got shape \[5, 3, 256\]; its H must equal q's, 2"),
        (((4, 2, 192), (5, 256), (5, 64)), r"kv: got shape \[5, 256\]; legal: \[Tk, H, K - R \+ V\]"),
    ],
)
def test_shapes_of_kv_and_rope(shapes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attend_kv("cute")(*(jnp.zeros(shape, jnp.bfloat16) for shape in shapes))


def test_dtypes_of_kv_and_rope() -> None:
    q, kv, k_rope = layer_arrays()
    with pytest.raises(ValueError, match="k_rope: got dtype float32; q, kv and k_rope must have one dtype"):
        attend_kv("cute")(q, kv, k_rope.astype(jnp.float32))


def test_packed_segments_over_a_mesh() -> None:
    """`nn.segment_attention_kv` with its gradient, rows over one axis and heads over the other, as trainers call it."""
    ids = jnp.asarray([[1] * 5 + [2] * 4 + [0] * 3, [0, 0] + [3] * 10], jnp.int32)
    q, kv, k_rope = (x[:12] for x in layer_arrays())
    packed = [jnp.stack([x, x[::-1]]) for x in (q, kv, k_rope)]
    rows, heads = P("rows"), P("rows", None, "heads")
    mesh = jax.make_mesh((2, 2), ("rows", "heads"), axis_types=(AxisType.Auto,) * 2)

    def run(implementation: str) -> Any:
        def attend(q: jax.Array, kv: jax.Array, k_rope: jax.Array, ids: jax.Array) -> jax.Array:
            segments = Segments.from_ids(ids, max_segments=2)
            return segment_attention_kv(q, kv, k_rope, segments, softmax_scale=0.07, implementation=implementation)

        sharded = jax.shard_map(attend, mesh=mesh, in_specs=(heads, heads, rows, rows), out_specs=heads)
        return jax.jit(jax.value_and_grad(lambda *x: sharded(*x, ids).astype(jnp.float32).sum(), (0, 1, 2)))(*packed)

    (got, got_gradients), (expected, gradients) = run("cute"), run("reference")
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    for mine, theirs in zip(got_gradients, gradients, strict=True):
        assert np.linalg.norm(np.float32(mine) - np.float32(theirs)) <= 2**-7 * np.linalg.norm(np.float32(theirs))
        assert not np.float32(mine)[np.asarray(ids) == 0].any()

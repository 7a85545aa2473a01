"""The derivative of prefill's custom calls on CPUs: an emulation for the kernels, the reference as the oracle."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import tsmla_jax
from tests.emulator.prefill import Results
from tests.jax.ops.prefill_calls import PADDING, Q_LENS, arrays, attend, attend_kv, layer_arrays, offsets
from tests.jax.ops.programs import calls

pytestmark = [
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="emulates the kernels on CPUs"),
    pytest.mark.usefixtures("emulated_prefill"),
]

Attend = Callable[..., Callable[..., Results]]
FORMS = [(attend, arrays), (attend_kv, layer_arrays)]
both_forms = pytest.mark.parametrize(("call", "make"), FORMS, ids=["k and v", "kv and k_rope"])
OF_ARRAYS = (0, 1, 2)


def loss_of(out: jax.Array, lse: jax.Array) -> jax.Array:
    """A sum of out with weights that differ, and of what lse is where a row sees a key."""
    weight = jnp.asarray(np.random.default_rng(1).normal(size=out.shape), jnp.float32)
    return (out.astype(jnp.float32) * weight).sum() + jnp.where(lse == -jnp.inf, 0, lse).sum() / 3


def loss(run: Callable[..., Results], *args: jax.Array) -> jax.Array:
    return loss_of(*run(*args))


def assert_gradients(got: Any, want: Any) -> None:
    """The backward pass reads out rounded to bfloat16: an error of 2^-9 of its terms, and some terms cancel."""
    for g, w in zip(got, want, strict=True):
        assert np.linalg.norm(np.float32(g) - np.float32(w)) <= 2**-7 * np.linalg.norm(np.float32(w))


def in_float32(args: list[jax.Array]) -> list[jax.Array]:
    return [x.astype(jnp.float32) for x in args]


def reference_gradient(call: Attend, args: list[jax.Array]) -> Any:
    """The reference's gradient in float32."""
    return jax.jit(jax.grad(partial(loss, call("reference")), OF_ARRAYS))(*in_float32(args))


def without_rows_of_none(args: list[jax.Array]) -> list[jax.Array]:
    """The same with NaN in the rows that belong to no request."""
    return [x.at[-PADDING:].set(jnp.nan) for x in args]


@pytest.mark.parametrize("causal", [True, False])
@both_forms
@pytest.mark.sampled(2)
def test_gradients_are_those_of_the_reference(call: Attend, make: Any, causal: bool) -> None:
    traced = {"softmax_scale": jnp.float32(0.07)} | ({"v_scale": jnp.float32(1.5)} if call is attend else {})

    def of_scales(implementation: str, scales: dict[str, jax.Array], *args: jax.Array) -> jax.Array:
        return loss(call(implementation, causal=causal, **scales), *args)

    every = (0, 1, 2, 3)
    gradient = jax.jit(jax.grad(partial(of_scales, "cute"), every))
    args = (traced, *without_rows_of_none(make()))
    got = gradient(*args)
    want = jax.jit(jax.grad(partial(of_scales, "reference"), every))(traced, *in_float32(make()))
    assert [x.dtype for x in got[1:]] == [x.dtype for x in make()]
    assert_gradients([*got[0].values(), *got[1:]], [*want[0].values(), *want[1:]])
    assert all(not np.float32(x[-PADDING:]).any() for x in got[1:])
    jaxpr = str(jax.make_jaxpr(gradient)(*args))
    assert calls(jaxpr) == 2 and "while" not in jaxpr
    assert not re.search(r"bf16\[[\d,]+\] = concatenate", jaxpr)  # no copies of keys


def test_gradients_of_fixed_scales_read_nothing_for_the_scales() -> None:
    compiled = jax.jit(jax.grad(partial(loss, attend("cute")), OF_ARRAYS)).lower(*arrays()).compile()
    scaled = jax.jit(jax.grad(lambda s, *args: loss(attend("cute", softmax_scale=s), *args), (0, 1, 2, 3)))
    count = scaled.lower(jnp.float32(0.07), *arrays()).compile().as_text().count(" reduce(")
    assert compiled.as_text().count(" reduce(") < count


@pytest.mark.parametrize("deterministic", [True, False])
@both_forms
def test_deterministic_is_the_kernels(call: Attend, make: Any, deterministic: bool) -> None:
    run = call("cute", deterministic=deterministic)
    jaxpr = str(jax.make_jaxpr(jax.grad(partial(loss, run), OF_ARRAYS))(*make()))
    assert f"deterministic={deterministic}" in jaxpr and f"deterministic={not deterministic}" not in jaxpr


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_deterministic_is_taken_everywhere(implementation: str) -> None:
    got, want = (attend(implementation, deterministic=flag)(*arrays()) for flag in (True, False))
    np.testing.assert_array_equal(np.float32(got[0]), np.float32(want[0]))


def test_sizes_that_the_kernel_does_not_take_are_xlas() -> None:
    args = arrays(k_dim=64, v_dim=64)
    gradient = jax.jit(jax.grad(partial(loss, attend("cute")), OF_ARRAYS))
    assert_gradients(gradient(*args), reference_gradient(attend, args))
    jaxpr = str(jax.make_jaxpr(gradient)(*args))
    assert calls(jaxpr) == 1 and "while" in jaxpr


def test_rope_columns_of_another_width_are_copied_for_the_kernel() -> None:
    args = layer_arrays(rope_dim=128)
    gradient = jax.jit(jax.grad(partial(loss, attend_kv("cute")), OF_ARRAYS))
    assert_gradients(gradient(*args), reference_gradient(attend_kv, args))
    jaxpr = str(jax.make_jaxpr(gradient)(*args))
    assert calls(jaxpr) == 2 and "while" not in jaxpr


@pytest.mark.parametrize(
    ("sizes", "note"),
    [
        ({}, "its derivative is a kernel too"),
        ({"k_dim": 64, "v_dim": 64}, "its derivative is that of xla: the head dims of k and v are 64 and 64;"),
        ({"dtype": jnp.float8_e4m3fn}, "its derivative is that of xla: q.dtype is float8_e4m3fn; the sm_90 prefill"),
    ],
)
def test_explain_says_which_derivative_runs(sizes: dict[str, Any], note: str) -> None:
    explained = tsmla_jax.explain("mla_prefill", *arrays(**sizes), **attend("cute").keywords)
    assert len(explained.notes["cute"]) == 1 and explained.notes["cute"][0].startswith(note)


# ---- through shard_map


@both_forms
def test_inside_shard_map(call: Attend, make: Any, mesh: Mesh) -> None:
    """Every device has some of the heads; they share the scale and the rope columns."""
    heads = P(None, "model")
    specs = (P(), *(heads if x.ndim == 3 else P() for x in make()))

    def on_one(implementation: str, scale: jax.Array, *args: jax.Array) -> Results:
        return call(implementation, softmax_scale=scale)(*args)

    sharded = jax.shard_map(partial(on_one, "cute"), mesh=mesh, in_specs=specs, out_specs=heads)
    every = (0, 1, 2, 3)
    scale = jnp.float32(0.07)
    got = jax.jit(jax.grad(partial(loss, sharded), every))(scale, *make())
    want = jax.jit(jax.grad(partial(loss, partial(on_one, "reference")), every))(scale, *in_float32(make()))
    assert_gradients(got, want)


@both_forms
@pytest.mark.sampled(2)
def test_inside_shard_map_over_tokens(call: Attend, make: Any, mesh: Mesh) -> None:
    """Every device has requests of its own, and its offsets; they share the scale."""
    lens = jnp.stack([offsets(Q_LENS), offsets((1, 2, 3, 4, 3))])
    args = [jnp.concatenate([x, -x / 2]) for x in make()]
    scale = jnp.float32(0.07)

    def on_one(implementation: str, scale: jax.Array, lens: jax.Array, *args: jax.Array) -> Results:
        return call(implementation, softmax_scale=scale, cu_seqlens_q=lens[0])(*args)

    rows = P("model")
    specs = (P(), rows, *(rows for _ in args))
    sharded = jax.shard_map(partial(on_one, "cute"), mesh=mesh, in_specs=specs, out_specs=rows)

    def one_after_another(scale: jax.Array, lens: jax.Array, *args: jax.Array) -> Results:
        halves = zip(*(jnp.split(x, 2) for x in (lens, *args)), strict=True)
        found = [on_one("reference", scale, *half) for half in halves]
        return tuple(jnp.concatenate(x) for x in zip(*found, strict=True))

    every = (0, 2, 3, 4)
    got = jax.jit(jax.grad(partial(loss, sharded), every))(scale, lens, *args)
    assert_gradients(got, jax.grad(partial(loss, one_after_another), every)(scale, lens, *in_float32(args)))

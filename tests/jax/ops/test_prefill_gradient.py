"""The derivative of prefill's custom calls on CPUs: an emulation takes the kernels' place, the reference is the oracle.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import tsmla_jax
from tests.emulator.prefill import Results
from tests.jax.ops.prefill_calls import HEADS, PADDING, Q_LENS, K, V, arrays, attend, attend_kv, layer_arrays, offsets
from tests.jax.ops.programs import calls, collectives
from tsmla_jax.ops import device

pytestmark = [
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="emulates the kernels on CPUs"),
    pytest.mark.usefixtures("quick_compilation", "emulated_prefill"),
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


@both_forms
def test_second_derivatives_are_refused(call: Attend, make: Any) -> None:
    def norm(*args: jax.Array) -> jax.Array:
        return jnp.square(jax.grad(partial(loss, call("cute")))(*args).astype(jnp.float32)).sum()

    with pytest.raises(NotImplementedError, match="the gradient of mla_prefill has no derivative in this"):
        jax.grad(norm)(*make())


# ---- transformations


@both_forms
def test_under_checkpoint(call: Attend, make: Any) -> None:
    gradient = jax.jit(jax.grad(jax.checkpoint(partial(loss, call("cute"))), OF_ARRAYS))
    assert_gradients(gradient(*make()), reference_gradient(call, make()))


def test_vmap_folds_into_heads() -> None:
    q, k, v = arrays()
    batched = (jnp.stack([q, -q, q * 2], 1), k, jnp.stack([v, v * 2, -v]))

    def total(run: Callable[..., Results], *args: jax.Array) -> jax.Array:
        return jax.vmap(partial(loss, run), (1, None, 0))(*args).sum()

    gradient = jax.jit(jax.grad(partial(total, attend("cute")), OF_ARRAYS))
    want = jax.jit(jax.grad(partial(total, attend("reference")), OF_ARRAYS))(*in_float32(list(batched)))
    assert_gradients(gradient(*batched), want)
    jaxpr = str(jax.make_jaxpr(gradient)(*batched))
    assert calls(jaxpr) == 2 and f"bf16[{sum(Q_LENS) + PADDING},{3 * HEADS},{K}]" in jaxpr


def test_vmap_of_lengths_and_of_kv() -> None:
    lens = jnp.stack([offsets(Q_LENS), offsets((1, 2, 3, 4, 3))])
    q, kv, k_rope = layer_arrays()
    kvs = jnp.stack([kv, -kv])

    def total(implementation: str, q: jax.Array, kvs: jax.Array, k_rope: jax.Array) -> jax.Array:
        def one(cu_seqlens_q: jax.Array, kv: jax.Array) -> jax.Array:
            return loss(attend_kv(implementation, cu_seqlens_q=cu_seqlens_q), q, kv, k_rope)

        return jax.vmap(one)(lens, kvs).sum()

    got = jax.jit(jax.grad(partial(total, "cute"), OF_ARRAYS))(q, kvs, k_rope)
    assert_gradients(got, jax.jit(jax.grad(partial(total, "reference"), OF_ARRAYS))(*in_float32([q, kvs, k_rope])))


@both_forms
def test_heads_are_partitioned(call: Attend, make: Any, mesh: Mesh) -> None:
    """Nothing moves between devices but the sum over heads of the shared rope columns' gradient."""
    heads = P(None, "model")
    specs = [heads if x.ndim == 3 else P() for x in make()]
    args = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(make(), specs, strict=True)]
    weight = jax.device_put(jnp.ones((sum(Q_LENS) + PADDING, HEADS, V)), NamedSharding(mesh, heads))

    def gradients(weight: jax.Array, *args: jax.Array) -> Any:
        (out, lse), derivative = jax.vjp(call("cute"), *args)
        return derivative((weight.astype(out.dtype), jnp.where(lse == -jnp.inf, 0, 1.0)))

    compiled = jax.jit(gradients).lower(weight, *args).compile()
    assert collectives(compiled) == ["all-reduce"] * (call is attend_kv)
    got = compiled(weight, *args)
    assert got[0].addressable_shards[0].data.shape[1] == HEADS // 2

    def total(*args: jax.Array) -> jax.Array:
        out, lse = call("reference")(*args)
        return out.sum() + jnp.where(lse == -jnp.inf, 0, lse).sum()

    assert_gradients(got, jax.grad(total, OF_ARRAYS)(*in_float32(make())))


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


@pytest.mark.slow
def test_gradient_is_exported_for_cuda_with_symbolic_sizes() -> None:
    tq, tk, h, b = export.symbolic_shape("tq, tk, h, b")
    struct = jax.ShapeDtypeStruct
    offsets = (struct((b + 1,), jnp.int32),) * 2
    for call, *shapes in (
        (attend, (tq, h, K), (tk, h, K), (tk, h, V)),
        (attend_kv, (tq, h, K), (tk, h, 256), (tk, 64)),
    ):

        def run(cu_q: Any, cu_kv: Any, *args: Any, call: Attend = call) -> Any:
            bounds = {"max_q_len": 4096, "max_kv_len": 4096}
            attend = call("cute", cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv, **bounds)
            return jax.grad(lambda *args: attend(*args)[0].astype(jnp.float32).sum(), OF_ARRAYS)(*args)

        lower = export.export(jax.jit(run), platforms=["cuda"], disabled_checks=device.export_disabled_checks())
        module = lower(*offsets, *(struct(shape, jnp.bfloat16) for shape in shapes)).mlir_module()
        assert module.count(f"@{device.TARGET}(") == 2 and "stablehlo.while" not in module

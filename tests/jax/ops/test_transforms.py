"""The operations under jax's transformations: vmap, eval_shape, symbolic jax.export, shard_map, derivatives."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tsmla_jax
from tests.oracles.inputs import paged

HEADS, LATENT, WIDTH, PAGE = 4, 32, 48, 16

Arrays = tuple[Any, ...]


pytestmark = pytest.mark.usefixtures("quick_compilation")


def decode_call(name: str) -> tuple[Callable[..., Any], Arrays]:
    inputs = paged([0, 33, 80, 7], s=2, heads=HEADS, seed=1)
    function = functools.partial(tsmla_jax.mla_decode, return_lse=True, implementation=name, **inputs.options())
    return function, (inputs.q, inputs.kv_cache, inputs.block_tables, inputs.seq_lens)


def ragged_call(name: str) -> tuple[Callable[..., Any], Arrays]:
    inputs = paged([0, 33, 80, 7], s=3, heads=HEADS, q_lens=[1, 3, 0, 2], seed=2)
    static = inputs.options() | {"return_lse": True, "implementation": name}
    del static["cu_seqlens_q"]

    def function(q: Any, kv_cache: Any, block_tables: Any, seq_lens: Any, cu_seqlens_q: Any) -> Any:
        return tsmla_jax.mla_decode(q, kv_cache, block_tables, seq_lens, cu_seqlens_q=cu_seqlens_q, **static)

    return function, (inputs.q, inputs.kv_cache, inputs.block_tables, inputs.seq_lens, inputs.cu_seqlens_q)


def prefill_call(name: str) -> tuple[Callable[..., Any], Arrays]:
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((n, HEADS, d), np.float32) for n, d in ((9, 24), (30, 24), (30, 16)))

    def function(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_kv: Any) -> Any:
        return tsmla_jax.mla_prefill(
            q,
            k,
            v,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_kv=cu_seqlens_kv,
            max_q_len=9,
            max_kv_len=30,
            softmax_scale=0.2,
            return_lse=True,
            implementation=name,
        )

    return function, (q, k, v, np.int32([0, 2, 2, 9]), np.int32([0, 10, 14, 30]))


def write_call(name: str) -> tuple[Callable[..., Any], Arrays]:
    rng = np.random.default_rng(4)
    cache, latent, k_rope = (rng.standard_normal(s, np.float32) for s in ((5, PAGE, WIDTH), (3, LATENT), (3, 16)))
    function = functools.partial(tsmla_jax.write_kv_cache, implementation=name)
    return function, (cache, latent, k_rope, np.int32([70, -1, 4]))


def gather_call(name: str) -> tuple[Callable[..., Any], Arrays]:
    cache = np.random.default_rng(5).standard_normal((5, PAGE, WIDTH), np.float32)

    def function(cache: Any, tables: Any, starts: Any, lens: Any, rows: Any) -> Any:
        return tsmla_jax.gather_kv_cache(cache, tables, starts, lens, total_len=rows.shape[0], implementation=name)

    return function, (cache, np.int32([[1, 0], [3, 4]]), np.int32([5, 0]), np.int32([20, 9]), np.zeros(31, np.int32))


def merge_call(name: str) -> tuple[Callable[..., Any], Arrays]:
    rng = np.random.default_rng(6)
    outs, lses = rng.standard_normal((2, 5, HEADS, 8), np.float32), rng.standard_normal((2, 5, HEADS), np.float32)
    return functools.partial(tsmla_jax.merge_attention_states, implementation=name), (outs, lses)


CALLS = {
    "mla_decode": (decode_call, ("b, 2, 4, 48", "p, 16, 48", "b, m", "b")),
    "mla_decode-ragged": (ragged_call, ("t, 4, 48", "p, 16, 48", "b, m", "b", "b+1")),
    "mla_prefill": (prefill_call, ("t, 4, 24", "n, 4, 24", "n, 4, 16", "b+1", "b+1")),
    "write_kv_cache": (write_call, ("p, 16, 48", "t, 32", "t, 16", "t")),
    "gather_kv_cache": (gather_call, ("p, 16, 48", "b, m", "b", "b", "n")),
    "merge_attention_states": (merge_call, ("2, t, 4, 8", "2, t, 4")),
}


def assert_close(got: Any, want: Any, atol: float = 5e-6) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=atol)


@pytest.mark.parametrize(("call", "name"), [*((call, "xla") for call in CALLS), ("mla_decode-ragged", "reference")])
def test_export_with_symbolic_sizes_and_eval_shape(call: str, name: str) -> None:
    make, shapes = CALLS[call]
    function, arrays = make(name)
    scope = export.SymbolicScope()
    symbolic = [
        jax.ShapeDtypeStruct(export.symbolic_shape(shape, scope=scope), a.dtype)
        for shape, a in zip(shapes, arrays, strict=True)
    ]
    exported = export.deserialize(export.export(jax.jit(function))(*symbolic).serialize())
    want = function(*arrays)
    assert_close(exported.call(*arrays), want)
    shaped = jax.eval_shape(function, *arrays)
    assert [x.shape for x in jax.tree.leaves(shaped)] == [x.shape for x in jax.tree.leaves(want)]


@pytest.mark.parametrize("call", CALLS)
def test_vmap_of_every_operand(call: str) -> None:
    function, arrays = CALLS[call][0]("xla")
    # Two different problems: the second has its float operands scaled and its integers as they are.
    second = [a * np.float32(1.5) if a.dtype.kind == "f" else a for a in arrays]
    got = jax.jit(jax.vmap(function))(*(np.stack(pair) for pair in zip(arrays, second, strict=True)))
    for i, problem in enumerate((arrays, second)):
        assert_close(jax.tree.map(lambda x, i=i: x[i], got), function(*problem))


def test_vmap_of_lengths_and_scale_alone() -> None:
    function, (q, cache, tables, lens) = decode_call("xla")
    function = functools.partial(function)
    del function.keywords["softmax_scale"]
    many_lens, scales = np.stack([lens, lens // 2, lens * 0]), jnp.asarray([0.1, 0.2, 0.3], jnp.float32)
    got = jax.vmap(lambda n, s: function(q, cache, tables, n, softmax_scale=s))(many_lens, scales)
    for i in range(3):
        want = function(q, cache, tables, many_lens[i], softmax_scale=scales[i])
        assert_close(jax.tree.map(lambda x, i=i: x[i], got), want)


DECODE_SPECS = {
    "heads": ((P(None, None, "x"), P(), P(), P()), P(None, None, "x")),
    "batch": ((P("x"), P(), P("x"), P("x")), P("x")),
    "both": ((P("y", None, "x"), P(), P("y"), P("y")), P("y", None, "x")),
}


@pytest.mark.parametrize("split", DECODE_SPECS)
def test_decode_under_shard_map(split: str) -> None:
    function, arrays = decode_call("xla")
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    specs, out = DECODE_SPECS[split]
    sharded = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, specs, strict=True)]
    mapped = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=(out, out)))
    assert_close(mapped(*sharded), function(*arrays))
    # Every device works on its own part: no collective moves keys or queries.
    text = mapped.lower(*sharded).compile().as_text()
    assert not re.search(r"all-gather|all-reduce|all-to-all|collective-permute", text)


def test_ragged_decode_under_shard_map_over_heads() -> None:
    function, arrays = ragged_call("xla")
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    heads = P(None, "x")
    mapped = jax.shard_map(function, mesh=mesh, in_specs=(heads, P(), P(), P(), P()), out_specs=(heads, heads))
    assert_close(jax.jit(mapped)(*arrays), function(*arrays))


def test_prefill_and_its_gradient_under_shard_map() -> None:
    function, arrays = prefill_call("xla")
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    heads = P(None, "x")
    mapped = jax.shard_map(function, mesh=mesh, in_specs=(heads, heads, heads, P(), P()), out_specs=(heads, heads))
    assert_close(jax.jit(mapped)(*arrays), function(*arrays))

    def loss(function: Callable[..., Any], q: Any, k: Any, v: Any) -> jax.Array:
        return jnp.sin(function(q, k, v, *arrays[3:])[0]).sum()

    got, want = (
        jax.jit(jax.grad(functools.partial(loss, f), argnums=(0, 1, 2)))(*arrays[:3]) for f in (mapped, function)
    )
    assert_close(got, want, atol=1e-5)


def test_gradient_of_a_scale_that_every_device_shares() -> None:
    _, arrays = prefill_call("xla")
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    heads = P(None, "x")

    def attend(scale: jax.Array, q: Any, k: Any, v: Any, cu_q: Any, cu_kv: Any) -> jax.Array:
        return tsmla_jax.mla_prefill(
            q,
            k,
            v,
            cu_seqlens_q=cu_q,
            cu_seqlens_kv=cu_kv,
            max_q_len=9,
            max_kv_len=30,
            softmax_scale=scale,
            implementation="xla",
        )

    mapped = jax.shard_map(attend, mesh=mesh, in_specs=(P(), heads, heads, heads, P(), P()), out_specs=heads)
    got, want = (jax.jit(jax.grad(lambda s, f=f: jnp.sin(f(s, *arrays)).sum()))(0.2) for f in (mapped, attend))
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_write_under_shard_map_over_pages_of_each_device() -> None:
    function, (cache, latent, k_rope, slots) = write_call("xla")
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    caches, many = np.concatenate([cache, cache]), [np.concatenate([a, a]) for a in (latent, k_rope, slots)]
    mapped = jax.shard_map(function, mesh=mesh, in_specs=(P("x"),) * 4, out_specs=P("x"))
    want = function(cache, latent, k_rope, slots)
    np.testing.assert_array_equal(jax.jit(mapped)(caches, *many), np.concatenate([want, want]))


@pytest.mark.parametrize("split", DECODE_SPECS)
def test_decode_partitions_automatically(split: str) -> None:
    function, arrays = decode_call("xla")
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    sharded = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, DECODE_SPECS[split][0], strict=True)]
    assert_close(jax.jit(function)(*sharded), function(*arrays))


EXPLICIT = {
    "mla_decode": (decode_call, (P("y", None, "x"), P(), P("y"), P("y")), P("y", None, "x", None)),
    "mla_decode-ragged": (ragged_call, (P(None, "x"), P(), P(), P(), P()), P(None, "x", None)),
    "mla_prefill": (prefill_call, (P(None, "x"), P(None, "x"), P(None, "x"), P(), P()), P(None, "x", None)),
    "write_kv_cache": (write_call, (P(), P(), P(), P()), P(None, None, None)),
    "gather_kv_cache": (gather_call, (P(), P("x"), P("x"), P("x"), P()), P(None, None)),
    "merge_attention_states": (merge_call, (P(None, None, "x"), P(None, None, "x")), P(None, "x", None)),
}


@pytest.mark.parametrize(
    ("call", "jit"), [*((call, True) for call in EXPLICIT), ("mla_decode", False), ("merge_attention_states", False)]
)
def test_explicitly_sharded_operands(call: str, jit: bool) -> None:
    make, specs, out_spec = EXPLICIT[call]
    function, arrays = make("xla")
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    sharded = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, specs, strict=True)]
    got = (jax.jit(function) if jit else function)(*sharded)
    assert jax.typeof(jax.tree.leaves(got)[0]).sharding.spec == out_spec
    assert_close(got, function(*arrays))


def test_gradient_of_explicitly_sharded_prefill() -> None:
    function, arrays = prefill_call("xla")
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    specs = EXPLICIT["mla_prefill"][1]
    sharded = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, specs, strict=True)]
    grad = jax.jit(jax.grad(lambda q, *rest: jnp.sin(function(q, *rest)[0]).sum()))
    assert_close(grad(*sharded), grad(*arrays), atol=1e-5)


def test_a_derivative_of_decode_names_the_alternatives() -> None:
    function, (q, *rest) = decode_call("xla")
    for derive in (jax.grad, jax.jacfwd):
        with pytest.raises(NotImplementedError, match=r"mla_decode has no derivative.*mla_prefill.*reference"):
            derive(lambda q: function(q, *rest)[0].sum())(jnp.asarray(q))
    # A result that does not depend on the differentiated argument needs no derivative of decode.
    assert jax.grad(lambda x: x * function(q, *rest)[0].sum())(1.0).shape == ()


def test_the_reference_of_decode_differentiates() -> None:
    function, (q, cache, *rest) = decode_call("reference")
    d_q, d_cache = jax.grad(lambda q, c: function(q, c, *rest)[0].sum(), argnums=(0, 1))(
        jnp.asarray(q), jnp.asarray(cache)
    )
    assert np.isfinite(d_q).all()
    assert np.isfinite(d_cache).all()
    assert np.abs(d_q).max() > 0

"""jax's transformations around the kernel, on CPUs: an emulation takes the kernel's place, the reference is the
oracle."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import tsmla_jax
from tests.emulator import decode as cute_emulation
from tests.jax.ops.programs import assert_same, calls, collectives
from tsmla_jax.ops.mla_decode import cute
from tsmla_kernels.sm90.decode import config as sm90_decode
from tsmla_kernels.sm90.latent import shape as latent_shape

pytestmark = [
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="emulates the kernel on CPUs"),
    pytest.mark.usefixtures("for_hopper", "quick_compilation"),
]

BATCH, Q_LEN, HEADS, LATENT, ROPE, PAGE, PAGES, MAX_PAGES = 8, 2, 4, 256, 64, 16, 24, 3
CU_SEQLENS_Q = (0, 2, 2, 3, 5, 6, 8, 9, 11)
TOTAL = 13  # two rows of padding at the end
Results = tuple[jax.Array, jax.Array]


@pytest.fixture(autouse=True, scope="module")
def emulated() -> Iterator[None]:
    with cute_emulation.emulated(cute._transformable):
        yield


# One program of the reference for all tests of like shapes: run op by op it would be some fifty.
REFERENCE = jax.jit(
    partial(tsmla_jax.mla_decode, implementation="reference"),
    static_argnames=("latent_dim", "return_lse", "max_q_len", "causal"),
)


def attend(implementation: str, **kwargs: Any) -> Callable[..., Results]:
    fixed = {"softmax_scale": 0.135, "latent_dim": LATENT, "return_lse": True, **kwargs}
    if implementation == "reference":
        return partial(REFERENCE, **fixed)
    return partial(tsmla_jax.mla_decode, implementation=implementation, **fixed)


def arrays(*, ragged: bool = False) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    tokens = (TOTAL,) if ragged else (BATCH, Q_LEN)
    return [
        jnp.asarray(rng.normal(size=(*tokens, HEADS, LATENT + ROPE)), jnp.bfloat16),
        jnp.asarray(rng.normal(size=(PAGES, PAGE, LATENT + ROPE)) / 3, jnp.bfloat16),
        jnp.asarray(rng.permutation(PAGES).reshape(BATCH, MAX_PAGES), jnp.int32),
        jnp.asarray([0, 1, 17, 48, 33, 2, 16, 40], jnp.int32),
    ]


@pytest.mark.parametrize("q_dtype", [jnp.float8_e4m3fn, jnp.bfloat16])
def test_scales_of_an_fp8_cache_are_operands(q_dtype: Any) -> None:
    """One compiled function, other scales: another result, that of these scales."""
    q, kv, *others = arrays()
    q, kv = q.astype(q_dtype), kv.astype(jnp.float8_e4m3fn)
    calls = {name: jax.jit(lambda *args, name=name: scaled(name, *args)) for name in ("cute", "reference")}
    for q_scale, kv_scale in ((1.0, 1.0), (0.5, 0.25), (2.0, 3.0)):
        if q_dtype == jnp.bfloat16:
            q_scale = 1.0
        args = (q, kv, *others, jnp.float32(q_scale), jnp.float32(kv_scale))
        assert_same(calls["cute"](*args), calls["reference"](*args))
    assert calls["cute"]._cache_size() == 1


def scaled(name: str, q: jax.Array, kv: jax.Array, *rest: jax.Array) -> Results:
    *others, q_scale, kv_scale = rest
    fp8 = {"q_scale": q_scale} if q.dtype == jnp.float8_e4m3fn else {}
    return attend(name, kv_scale=kv_scale, **fp8)(q, kv, *others)


@pytest.mark.parametrize(("each", "ragged"), [(1, True), (3, False), (3, True), (8, False)])
def test_a_large_invariant_batch_takes_several_launches(
    each: int, ragged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = arrays(ragged=ragged)
    options = {"cu_seqlens_q": jnp.asarray(CU_SEQLENS_Q, jnp.int32), "max_q_len": Q_LEN} if ragged else {}
    config = sm90_decode.DecodeConfig("bfloat16", HEADS, Q_LEN, LATENT, page_size=PAGE, batch_invariant=True)
    slots, rows, width = sm90_decode.workspace_shapes(config, 1, 1, MAX_PAGES)["partial_out"][0]
    monkeypatch.setattr(latent_shape, "INVARIANT_WORKSPACE", each * slots * rows * (width * 4 + 12))
    cute._transformable.cache_clear()
    run = jax.jit(attend("cute", batch_invariant=True, **options))
    assert calls(jax.make_jaxpr(run)(*args)) == -(-BATCH // each)
    assert_same(run(*args), attend("reference", **options)(*args))
    cute._transformable.cache_clear()


@pytest.mark.parametrize("jit", [False, True])
def test_uniform(jit: bool) -> None:
    run = attend("cute")
    assert_same((jax.jit(run) if jit else run)(*arrays()), attend("reference")(*arrays()))


def test_scales() -> None:
    kwargs = {"q_scale": 0.5, "kv_scale": jnp.float32(1.5), "causal": False}
    assert_same(attend("cute", **kwargs)(*arrays()), attend("reference", **kwargs)(*arrays()))


@pytest.mark.parametrize("max_q_len", [2, 5])
def test_ragged(max_q_len: int) -> None:
    kwargs = {"cu_seqlens_q": jnp.asarray(CU_SEQLENS_Q, jnp.int32), "max_q_len": max_q_len}
    got = attend("cute", **kwargs)(*arrays(ragged=True))
    assert_same(got, attend("reference", **kwargs)(*arrays(ragged=True)))
    assert np.all(np.asarray(got[1])[CU_SEQLENS_Q[-1] :] == -np.inf)  # padding


def stacked(array: jax.Array, axis: int = 0) -> jax.Array:
    return jnp.stack([array, array[::-1], array], axis)


@pytest.mark.parametrize(
    "axes",
    [
        (0, None, None, None),
        (1, None, None, None),
        (None, 0, None, None),
        (None, None, 0, 0),
        (0, 0, 0, 0),
        (2, 1, None, 1),
    ],
    ids=str,
)
def test_vmap_folds_into_one_call(axes: tuple[int | None, ...]) -> None:
    args = [a if axis is None else stacked(a, axis) for a, axis in zip(arrays(), axes, strict=True)]
    batched = jax.vmap(attend("cute"), axes)
    assert_same(batched(*args), jax.vmap(attend("reference"), axes)(*args))
    assert calls(jax.make_jaxpr(batched)(*args)) == 1
    assert f"bf16[{3 * BATCH * Q_LEN * HEADS},{LATENT + ROPE}]" in str(jax.make_jaxpr(batched)(*args))


def test_vmap_twice() -> None:
    q, kv, tables, lens = arrays()
    qs = jnp.stack([stacked(q), -stacked(q)])

    def twice(run: Callable[..., Results]) -> Results:
        inner = jax.vmap(run, (0, None, None, None))
        return jax.vmap(inner, (0, None, None, None))(qs, kv, tables, lens)

    assert_same(twice(attend("cute")), twice(attend("reference")))


def test_vmap_over_scales() -> None:
    def over(implementation: str) -> Results:
        return jax.vmap(lambda scale: attend(implementation, softmax_scale=scale)(*arrays()))(
            jnp.asarray([0.1, 0.2, 0.3], jnp.float32)
        )

    assert_same(over("cute"), over("reference"))


@pytest.mark.parametrize("max_q_len", [2, 3, 20])
def test_vmap_of_ragged_queries(max_q_len: int) -> None:
    q, kv, tables, lens = arrays(ragged=True)
    # The second packing leaves more rows unused at its end than one request may have.
    offsets = jnp.asarray([CU_SEQLENS_Q, (0, 1, 1, 1, 3, 4, 4, 4, 4), (0, 2, 3, 4, 5, 7, 9, 11, 13)], jnp.int32)

    def over(implementation: str) -> Results:
        def one(q: jax.Array, offsets: jax.Array) -> Results:
            return attend(implementation, cu_seqlens_q=offsets, max_q_len=max_q_len)(q, kv, tables, lens)

        return jax.vmap(one)(stacked(q), offsets)

    got = over("cute")
    assert_same(got, over("reference"))
    assert np.all(np.asarray(got[1])[1, 4:] == -np.inf) and np.all(np.float32(got[0])[1, 4:] == 0)


@pytest.mark.parametrize("transform", [jax.grad, lambda f: partial(jax.jvp, f)], ids=["grad", "jvp"])
def test_derivatives_are_refused_with_the_alternative(transform: Callable[..., Any]) -> None:
    q, kv, tables, lens = arrays()

    def loss(q: jax.Array) -> jax.Array:
        return attend("cute")(q, kv, tables, lens)[0].astype(jnp.float32).sum()

    with pytest.raises(NotImplementedError, match=r"mla_decode has no derivative .* implementation='reference'"):
        transform(loss)(q) if transform is jax.grad else transform(loss)((q,), (q,))


def test_constants_in_a_differentiated_function_are_fine() -> None:
    out = attend("cute")(*arrays())[0].astype(jnp.float32)
    grads = jax.grad(lambda w: (attend("cute")(*arrays())[0].astype(jnp.float32) * w).sum())(jnp.float32(1))
    np.testing.assert_allclose(grads, out.sum(), rtol=1e-5)


# ---- partitioning


SPECS = {
    "heads": (P(None, None, "model"), P(), P(), P()),
    "batch": (P("data"), P(), P("data"), P("data")),
    "both": (P("data", None, "model"), P(), P("data"), P("data")),
    "queries only": (P("data", None, "model"), P(), P(), P()),
    "tables only": (P(), P(), P("data"), P("data")),
}
@pytest.mark.parametrize("name", SPECS)
def test_automatic_partitioning_moves_nothing(mesh: Mesh, name: str) -> None:
    shardings = [NamedSharding(mesh, spec) for spec in SPECS[name]]
    args = [jax.device_put(a, sharding) for a, sharding in zip(arrays(), shardings, strict=True)]
    compiled = jax.jit(attend("cute")).lower(*args).compile()
    assert collectives(compiled) == []
    got = compiled(*args)
    assert_same(got, attend("reference")(*arrays()))
    data, model = ("data" in str(SPECS[name])), ("model" in str(SPECS[name]))
    shard = got[0].addressable_shards[0].data.shape
    assert shard == (BATCH // (4 if data else 1), Q_LEN, HEADS // (2 if model else 1), LATENT)


def test_automatic_partitioning_of_ragged_queries(mesh: Mesh) -> None:
    kwargs = {"cu_seqlens_q": jnp.asarray(CU_SEQLENS_Q, jnp.int32), "max_q_len": 2}
    q, *others = arrays(ragged=True)
    q = jax.device_put(q, NamedSharding(mesh, P(None, "model")))
    others = [jax.device_put(a, NamedSharding(mesh, P())) for a in others]
    compiled = jax.jit(attend("cute", **kwargs)).lower(q, *others).compile()
    assert collectives(compiled) == []
    got = compiled(q, *others)
    assert got[0].addressable_shards[0].data.shape == (TOTAL, HEADS // 2, LATENT)
    assert_same(got, attend("reference", **kwargs)(*arrays(ragged=True)))


@pytest.mark.parametrize("name", ["heads", "both"])
def test_explicit_axes(name: str) -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit, AxisType.Explicit))
    shardings = [NamedSharding(mesh, spec) for spec in SPECS[name]]
    args = [jax.device_put(a, sharding) for a, sharding in zip(arrays(), shardings, strict=True)]
    compiled = jax.jit(attend("cute")).lower(*args).compile()
    assert collectives(compiled) == []
    got = compiled(*args)
    assert_same(got, attend("reference")(*arrays()))
    assert got[0].sharding.spec[2] == "model"


def test_axes_that_cannot_be_split_are_gathered_and_right(mesh: Mesh) -> None:
    specs = (P(None, None, None, "model"), P("data"), P(None, None), P())
    args = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays(), specs, strict=True)]
    assert_same(jax.jit(attend("cute"))(*args), attend("reference")(*arrays()))


def test_partitioned_program_downstream_of_sharded_projections(mesh: Mesh) -> None:
    q, kv, tables, lens = arrays()
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(HEADS, LATENT, 32)), jnp.bfloat16)

    def layer(q: jax.Array, weights: jax.Array) -> jax.Array:
        out, _ = attend("cute")(q, kv, tables, lens)
        return jnp.einsum("bshl,hld->bsd", out, weights, preferred_element_type=jnp.float32)

    q_sharded = jax.device_put(q, NamedSharding(mesh, P(None, None, "model")))
    w_sharded = jax.device_put(weights, NamedSharding(mesh, P("model")))
    compiled = jax.jit(layer).lower(q_sharded, w_sharded).compile()
    assert set(collectives(compiled)) == {"all-reduce"}  # the sum over heads and nothing else
    np.testing.assert_allclose(compiled(q_sharded, w_sharded), layer(q, weights), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "check_vma"), [("heads", False), ("both", True)])
def test_shard_map(mesh: Mesh, name: str, check_vma: bool) -> None:
    out_spec = SPECS[name][0]
    mapped = jax.shard_map(
        attend("cute"), mesh=mesh, in_specs=SPECS[name], out_specs=(out_spec, out_spec), check_vma=check_vma
    )
    compiled = jax.jit(mapped).lower(*arrays()).compile()
    assert collectives(compiled) == []
    assert_same(jax.jit(mapped)(*arrays()), attend("reference")(*arrays()))


def test_sharded_pages_through_shard_map(mesh: Mesh) -> None:
    # Each data shard holds the pages of its own requests, and tables count from the shard's first page.
    q, kv, tables, lens = arrays()
    tables = jnp.arange(PAGES, dtype=jnp.int32).reshape(BATCH, MAX_PAGES)
    local = tables % (PAGES // 4)
    specs = (P("data", None, "model"), P("data"), P("data"), P("data"))
    mapped = jax.shard_map(attend("cute"), mesh=mesh, in_specs=specs, out_specs=(specs[0], specs[0]))
    compiled = jax.jit(mapped).lower(q, kv, local, lens).compile()
    assert collectives(compiled) == []
    assert_same(jax.jit(mapped)(q, kv, local, lens), attend("reference")(q, kv, tables, lens))

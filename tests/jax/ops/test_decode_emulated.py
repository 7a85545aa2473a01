"""mla_decode's custom call on CPUs: an emulation takes the kernel's place, the reference is the oracle."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import tsmla_jax
from tests.emulator import decode as cute_emulation
from tests.jax.ops.programs import assert_same, calls, collectives
from tsmla_jax.ops.mla_decode import cute
from tsmla_kernels.sm90.decode import config as sm90_decode
from tsmla_kernels.sm90.latent import shape as latent_shape

pytestmark = [
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="emulates the kernel on CPUs"),
    pytest.mark.usefixtures("for_hopper"),
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


def test_scales() -> None:
    kwargs = {"q_scale": 0.5, "kv_scale": jnp.float32(1.5), "causal": False}
    assert_same(attend("cute", **kwargs)(*arrays()), attend("reference", **kwargs)(*arrays()))


@pytest.mark.parametrize("max_q_len", [2, 5])
def test_ragged(max_q_len: int) -> None:
    kwargs = {"cu_seqlens_q": jnp.asarray(CU_SEQLENS_Q, jnp.int32), "max_q_len": max_q_len}
    got = attend("cute", **kwargs)(*arrays(ragged=True))
    assert_same(got, attend("reference", **kwargs)(*arrays(ragged=True)))
    assert np.all(np.asarray(got[1])[CU_SEQLENS_Q[-1] :] == -np.inf)  # padding


@pytest.mark.parametrize("max_q_len", [2, 3, 20])
def test_vmap_of_ragged_queries(max_q_len: int) -> None:
    q, kv, tables, lens = arrays(ragged=True)
    # The second packing leaves more rows unused at its end than one request may have.
    offsets = jnp.asarray([CU_SEQLENS_Q, (0, 1, 1, 1, 3, 4, 4, 4, 4), (0, 2, 3, 4, 5, 7, 9, 11, 13)], jnp.int32)

    def over(implementation: str) -> Results:
        def one(q: jax.Array, offsets: jax.Array) -> Results:
            return attend(implementation, cu_seqlens_q=offsets, max_q_len=max_q_len)(q, kv, tables, lens)

        return jax.vmap(one)(jnp.stack([q, q[::-1], q]), offsets)

    got = over("cute")
    assert_same(got, over("reference"))
    assert np.all(np.asarray(got[1])[1, 4:] == -np.inf) and np.all(np.float32(got[0])[1, 4:] == 0)


# ---- partitioning


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

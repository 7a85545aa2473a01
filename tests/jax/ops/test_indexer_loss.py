"""What trains an indexer: the logits of selected keys and of all keys, the loss over both, and their gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import tsmla_jax
from tests.jax.ops.indexer_problems import DI, HI, SCALE, D, Floats, H, K, P, Problem, T, Z, floats_of
from tests.jax.ops.programs import ints
from tests.oracles import sparse as oracle
from tsmla_jax.ops.selected import index_scores

IMPLEMENTATIONS = ("xla", "reference")


@pytest.fixture(params=["one block", "many blocks"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of all tokens and columns, and blocks of two tokens and four columns, which divide neither."""
    if request.param == "many blocks":
        monkeypatch.setattr(index_scores, "BLOCK_COLUMNS", 4)
        monkeypatch.setattr(index_scores, "BLOCK_BYTES", 2 * 4 * 4 * D)


@pytest.mark.parametrize("which", ["selected", "all keys"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.usefixtures("blocks")
def test_the_loss_of_every_token(which: str, implementation: str, sinks: bool) -> None:
    x = Problem(1)
    options = {"sinks": x.sinks} if sinks else {}
    got = jax.jit(lambda: x.loss(which, implementation, **options))()
    want = x.expected(which, sinks)
    assert (want > 0.1).sum() >= 4 and (got[want == 0] == 0).all()
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sinks_with_nearly_all_weight(implementation: str) -> None:
    """Probabilities are divided by their sum, so that the keys' share of the weight does not matter."""
    x = Problem(1)
    x.sinks += 150
    got = jax.jit(lambda: x.loss("selected", implementation, sinks=x.sinks))()
    want = x.expected("selected", sinks=True)
    assert (want > 0.1).sum() >= 4
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["q", "lse", "index_q"])
def test_nan_reaches_the_loss_and_its_gradient(name: str, implementation: str) -> None:
    """Of its token alone."""
    x = Problem(1)
    array = np.array(getattr(x, name))
    array[0] = np.nan
    setattr(x, name, jnp.asarray(array))

    def loss(weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        each = x.loss("selected", implementation, x.index_q, weights, x.caches("selected")[0])
        return each.sum(), each

    gradient, each = jax.jit(jax.grad(loss, has_aux=True))(x.weights)
    for found in (each[:, None], gradient):
        assert np.isnan(found[0]).all() and np.isfinite(found[1:]).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.usefixtures("blocks")
def test_selected_logits(implementation: str) -> None:
    x = Problem(2)
    cache = x.caches("selected")[0]
    run = functools.partial(tsmla_jax.indexer_selected_logits, implementation=implementation)
    got = jax.jit(run)(x.index_q, x.weights, cache, **x.where("selected"))
    active = (np.arange(K) < x.lengths[:, None]) & (x.indices >= 0)
    assert np.array_equal(np.isneginf(got), ~active)
    for t, slots in enumerate(x.slots("selected")):
        want = oracle.indexer_logits(
            np.asarray(x.index_q)[[t]], np.asarray(x.weights)[[t]], [x.keys[0][slots]], len(slots)
        )
        np.testing.assert_allclose(np.asarray(got)[t][active[t]], want[0], rtol=1e-5, atol=1e-5)


def selected(x: Problem, implementation: str, *floats: jax.Array) -> jax.Array:
    logits = tsmla_jax.indexer_selected_logits(*floats, **x.where("selected"), implementation=implementation)  # type: ignore[misc]
    return jnp.where(jnp.isfinite(logits), jnp.sin(logits), 0).sum()


def all_keys(x: Problem, implementation: str, *floats: jax.Array) -> jax.Array:
    logits = tsmla_jax.indexer_logits(*floats, **x.where("all keys"), implementation=implementation)  # type: ignore[misc]
    return jnp.where(jnp.isfinite(logits), jnp.sin(logits), 0).sum()


def selected_loss(x: Problem, implementation: str, *floats: jax.Array) -> jax.Array:
    return (x.loss("selected", implementation, *floats, sinks=x.sinks) * jnp.arange(1, T + 1)).sum()


def dense_loss(x: Problem, implementation: str, *floats: jax.Array) -> jax.Array:
    return (x.loss("all keys", implementation, *floats) * jnp.arange(1, T + 1)).sum()


CALLS: dict[str, tuple[Callable[..., jax.Array], str]] = {
    "indexer_selected_logits": (selected, "selected"),
    "indexer_logits": (all_keys, "all keys"),
    "indexer_loss, selected": (selected_loss, "selected"),
    "indexer_loss, all keys": (dense_loss, "all keys"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.usefixtures("blocks")
def test_gradients_are_the_references(call: str) -> None:
    run, which = CALLS[call]
    x = Problem(3)
    floats = floats_of(x, which)
    got, want = (jax.jit(jax.grad(functools.partial(run, x, name), (0, 1, 2)))(*floats) for name in IMPLEMENTATIONS)
    for a, b in zip(got, want, strict=True):
        assert float(np.abs(b).max()) > 0.1
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6 * float(np.abs(b).max()))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_of_16_bits(call: str, dtype: str) -> None:
    """They are those of the same values in float32, rounded once."""
    run, which = CALLS[call]
    x = Problem(4, dtype)
    floats = floats_of(x, which)
    got = jax.jit(jax.grad(functools.partial(run, x, "xla"), (0, 1, 2)))(*floats)
    assert [a.dtype for a in got] == [dtype, "float32", dtype]
    x.q = x.q.astype(jnp.float32)
    x.keys[1] = x.keys[1].astype(np.float32)
    wide = tuple(a.astype(jnp.float32) for a in floats)
    want = jax.jit(jax.grad(functools.partial(run, x, "xla"), (0, 1, 2)))(*wide)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(np.float32(a), b, rtol=2**-7, atol=1e-4 * float(np.abs(b).max()))


def test_no_gradient_passes_through_the_attention() -> None:
    x = Problem(5)
    index = floats_of(x, "selected")

    def loss(q: jax.Array, kv: jax.Array, lse: jax.Array, sinks: jax.Array) -> jax.Array:
        return tsmla_jax.indexer_loss(*index, q, kv, lse, softmax_scale=SCALE, sinks=sinks, **x.where("selected")).sum()

    found = jax.grad(loss, (0, 1, 2, 3))(x.q, x.caches("selected")[1], jnp.asarray(x.lse), x.sinks)
    assert not any(np.asarray(gradient).any() for gradient in found)


@pytest.mark.parametrize("call", CALLS)
def test_a_second_derivative_is_refused(call: str) -> None:
    run, which = CALLS[call]
    x = Problem(6)
    q, *rest = floats_of(x, which)
    once = jax.grad(lambda q: run(x, "xla", q, *rest))
    with pytest.raises(NotImplementedError, match=r"the gradient of .* has no derivative .*implementation='reference'"):
        jax.jit(jax.grad(lambda q: jnp.square(once(q)).sum()))(q)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.sampled(2)
def test_under_vmap_and_remat(call: str) -> None:
    run, which = CALLS[call]
    x = Problem(7)
    floats = floats_of(x, which)
    several = tuple(np.stack([a, 2 * np.asarray(a)]) for a in floats)
    one = jax.checkpoint(functools.partial(run, x, "xla"))
    got = jax.device_get(jax.jit(jax.vmap(jax.grad(one, (0, 1, 2))))(*several))
    alone = jax.jit(jax.grad(functools.partial(run, x, "xla"), (0, 1, 2)))
    for i in range(2):
        want = alone(*(a[i] for a in several))
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-5, atol=1e-5 * float(np.abs(b).max()))


@pytest.mark.parametrize("which", ["selected", "all keys"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.sampled(2)
def test_heads_on_several_devices(which: str, implementation: str) -> None:
    """Probabilities are summed over the devices, and every device has the whole gradient of the indexer."""
    x = Problem(8)
    x.sinks += 150
    mesh = Mesh(np.asarray(jax.devices()[:2]), "heads")
    kv = x.caches(which)[1]
    heads = PartitionSpec(None, "heads")
    weights = jnp.arange(1.0, T + 1)

    def gradient(floats: Floats, q: jax.Array, lse: jax.Array, sinks: jax.Array) -> Any:
        def loss(*floats: jax.Array) -> jax.Array:
            found = tsmla_jax.indexer_loss(
                *floats,
                q,
                kv,
                lse,
                softmax_scale=SCALE,
                sinks=sinks,
                head_axis="heads",
                implementation=implementation,
                **x.where(which),
            )
            return (found * weights).sum()

        return jax.value_and_grad(loss, (0, 1, 2))(*floats)

    floats = floats_of(x, which)
    whole = PartitionSpec()
    of_heads = PartitionSpec("heads")
    run = jax.shard_map(gradient, mesh=mesh, in_specs=(whole, heads, heads, of_heads), out_specs=whole)
    loss, got = jax.jit(run)(floats, x.q, x.lse, x.sinks)

    def alone(*floats: jax.Array) -> jax.Array:
        return (x.loss(which, "reference", *floats, sinks=x.sinks) * weights).sum()

    want_loss, want = jax.jit(jax.value_and_grad(alone, (0, 1, 2)))(*floats)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * float(np.abs(b).max()))


def test_tokens_on_several_devices() -> None:
    """The gradient of the keys, which all devices have, is the sum of theirs."""
    x = Problem(9)
    mesh = Mesh(np.asarray(jax.devices()[:7]), "tokens")
    rows, whole = PartitionSpec("tokens"), PartitionSpec()
    kv = x.caches("selected")[1]

    def loss(floats: Floats) -> jax.Array:
        def local(q: jax.Array, weights: jax.Array, keys: jax.Array, *others: jax.Array) -> jax.Array:
            attention_q, lse, indices, lengths = others
            where = {"indices": indices, "lengths": lengths}
            found = tsmla_jax.indexer_loss(q, weights, keys, attention_q, kv, lse, softmax_scale=SCALE, **where)
            return jax.lax.psum(found.sum(), "tokens")

        in_specs = (rows, rows, whole, rows, rows, rows, rows)
        run = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=whole)
        return run(*floats, x.q, x.lse, *x.where("selected").values())

    floats = floats_of(x, "selected")
    got = jax.jit(jax.grad(loss))(floats)
    want = jax.jit(jax.grad(lambda floats: x.loss("selected", "reference", *floats).sum()))(floats)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * float(np.abs(b).max()))


def test_explicitly_sharded_tokens() -> None:
    x = Problem(10)
    mesh = jax.make_mesh((7,), ("data",), axis_types=(AxisType.Explicit,))
    kv = x.caches("selected")[1]
    with jax.set_mesh(mesh):
        rows = NamedSharding(mesh, PartitionSpec("data"))
        floats = [jax.device_put(a, rows) for a in (x.index_q, x.weights)]
        others = [jax.device_put(a, rows) for a in (x.q, jnp.asarray(x.lse))]
        where = {name: jax.device_put(a, rows) for name, a in x.where("selected").items()}
        index_keys = x.caches("selected")[0]
        loss = tsmla_jax.indexer_loss(*floats, index_keys, others[0], kv, others[1], softmax_scale=SCALE, **where)
        assert jax.typeof(loss).sharding.spec == PartitionSpec("data")
    np.testing.assert_allclose(loss, x.expected("selected", sinks=False), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("which", ["selected", "all keys"])
def test_the_gradient_needs_no_memory_for_all_pairs(which: str) -> None:
    """Of 4,096 tokens of one text: some blocks of tens of MiB, and neither 64 MiB of pairs for each head nor of all."""
    tokens, k, heads = 4096, 512, 16
    shapes = [(tokens, 4, 32), (tokens, 4), (tokens // 64, 64, 32), (tokens, heads, 64), (tokens // 64, 64, 64)]
    dtypes = ["bfloat16", "float32", "bfloat16", "bfloat16", "bfloat16"]
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    lse = jax.ShapeDtypeStruct((tokens, heads), "float32")
    where = {
        "selected": {"indices": jax.ShapeDtypeStruct((tokens, k), "int32")},
        "all keys": {
            "block_tables": jax.ShapeDtypeStruct((1, tokens // 64), "int32"),
            "seq_lens": jax.ShapeDtypeStruct((1,), "int32"),
            "cu_seqlens_q": jax.ShapeDtypeStruct((2,), "int32"),
        },
    }[which]

    def loss(q: jax.Array, weights: jax.Array, cache: jax.Array, *attention: jax.Array, **where: jax.Array) -> Any:
        return tsmla_jax.indexer_loss(q, weights, cache, *attention, softmax_scale=SCALE, **where).sum()  # type: ignore[misc,call-arg]

    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*arrays, lse, **where).compile()
    taken = compiled.memory_analysis().temp_size_in_bytes
    assert taken < 5 * index_scores.BLOCK_BYTES < tokens * k * heads * 4 * 2


def call(**changes: Any) -> jax.Array:
    x = Problem(11)
    given = dict(zip(("index_q", "index_weights", "index_cache"), floats_of(x, "selected"), strict=True))
    given |= {"q": x.q, "kv_cache": x.caches("selected")[1], "lse": jnp.asarray(x.lse), "softmax_scale": SCALE}
    return tsmla_jax.indexer_loss(**{**given, **x.where("selected"), **changes})


FP8 = jnp.float8_e4m3fn


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index_q": jnp.zeros((T, HI, DI), FP8)}, "index_q: got float8_e4m3fn, quantised to 8 bits; no gradient"),
        ({"index_cache": jnp.zeros((P, Z, DI + 4), jnp.uint8)}, "index_cache: got uint8, quantised to 8 bits"),
        ({"q": jnp.zeros((T, H, D), FP8)}, "q: got float8_e4m3fn, quantised"),
        ({"kv_cache": jnp.zeros((P, Z, 656), jnp.uint8)}, "kv_cache: got uint8, quantised"),
        ({"kv_cache": jnp.zeros((P + 1, Z, D))}, r"kv_cache: .* axis 0 must be 5 \(P of index_cache\)"),
        ({"index_weights": jnp.zeros((T, HI), jnp.bfloat16)}, "index_weights: got dtype bfloat16"),
        ({"lse": jnp.zeros((T, H + 1))}, r"lse: .* axis 1 must be 2 \(H, q's heads\)"),
        ({"indices": None, "lengths": None}, "indices: got None; legal: indices, or block_tables with seq_lens"),
        ({"indices": None}, "lengths: got an array without indices"),
        ({"block_tables": ints([[0]])}, "block_tables: got an array beside indices"),
        ({"indices": jnp.zeros((T, K))}, "indices: got dtype float32; legal: int32"),
        ({"softmax_scale": -1.0}, "softmax_scale: got -1"),
    ],
)
def test_illegal_arguments(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(**changes)


def test_a_head_axis_is_a_name() -> None:
    with pytest.raises(TypeError, match="head_axis: got int; legal: the name of a mesh axis, or None"):
        call(head_axis=0)


def test_packed_keys_have_no_selected_logits() -> None:
    x = Problem(12)
    cache = jnp.zeros((P, Z, DI + 4), jnp.uint8)
    with pytest.raises(ValueError, match="k_cache: got uint8, quantised to 8 bits; no gradient passes through it"):
        tsmla_jax.indexer_selected_logits(x.index_q, x.weights, cache, ints(x.indices))


@pytest.mark.parametrize("empty", ["tokens", "columns", "requests"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nothing_to_score(empty: str, implementation: str) -> None:
    x = Problem(13)
    tokens = 0 if empty == "tokens" else T
    index = x.index_q[:tokens], x.weights[:tokens], x.caches("selected")[0]
    attention = x.q[:tokens], x.caches("selected")[1], x.lse[:tokens]
    where: dict[str, Any] = {"indices": jnp.zeros((tokens, 0 if empty == "columns" else K), jnp.int32)}
    if empty == "requests":
        where = {"block_tables": jnp.zeros((0, 3), jnp.int32), "seq_lens": ints([]), "cu_seqlens_q": ints([0])}
    loss = tsmla_jax.indexer_loss(*index, *attention, softmax_scale=SCALE, implementation=implementation, **where)
    assert loss.shape == (tokens,) and (empty == "tokens" or not loss.any())
    if "indices" in where:
        logits = tsmla_jax.indexer_selected_logits(*index, where["indices"], implementation=implementation)
        assert logits.shape == where["indices"].shape


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indices": ints(np.full((T, K), P * Z)), "lengths": None}, "indices: token 0 selects slot 20 in column 0"),
        ({"lengths": ints([K + 1] * T)}, "lengths: token 0 has 10 active indices; legal: 0 to K = 9"),
    ],
)
def test_checks_of_values(changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TSMLA_CHECK", "1")
    with pytest.raises(ValueError, match=message):
        call(**changes)


def test_checks_of_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TSMLA_CHECK", "1")
    x = Problem(14)
    floats = floats_of(x, "all keys")
    with pytest.raises(ValueError, match="seq_lens: request 0 has 17 keys; legal: 0 to 16"):
        x.loss("all keys", None, *floats, seq_lens=ints([17, 6]))

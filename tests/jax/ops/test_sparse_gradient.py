"""The gradient of sparse_mla: by XLA's loop and, with an emulation in the kernel's place, by the kernel, against that
of the reference; jax's transformations around it, its memory, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tsmla_jax
from tests.emulator import decode as cute_emulation
from tests.emulator import sparse as emulation
from tests.jax.ops.programs import ints
from tsmla_jax.ops.sparse_mla import backward, cute, gradient

TOKENS, HEADS, SELECTED, WINDOW, PAGE, LATENT = 8, 4, 12, 4, 8, 512
NAMES = ("q", "kv_cache", "compressed_kv_cache", "sinks")
Arrays = dict[str, jax.Array]

CASES: dict[str, dict[str, Any]] = {
    "one cache": {},
    "D 512": {"width": 512},
    "sinks": {"sinks": True},
    "two caches": {"two": True, "sinks": True},
    "gaps": {"page_size": 5},
    "no lengths": {"lengths": False},
}


def arrays(dtype: Any = jnp.float32, *, two: bool = False, width: int = 576, sinks: bool = False,
           lengths: bool = True, page_size: int = PAGE) -> tuple[Arrays, dict[str, Any]]:  # fmt: skip
    """A call: -1, duplicates, no key at all, NaN in slots that no token selects, and 2^31 - 1 behind the lengths."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape)

    window = WINDOW if two else SELECTED
    indices = rng.integers(-1, 5 * PAGE - 3, (TOKENS, SELECTED))
    indices[:, window:] = rng.integers(-1, 3 * PAGE - 3, (TOKENS, SELECTED - window))
    indices[:, 1], indices[3] = indices[:, 0], -1
    kv = normal(5, PAGE, width)
    kv[-1, -2:] = np.nan
    given = {"q": normal(TOKENS, HEADS, width), "kv_cache": kv}
    if two:
        given["compressed_kv_cache"] = normal(3, PAGE, width)
    if sinks:
        given["sinks"] = normal(HEADS)
    found = {name: jnp.asarray(x, dtype) for name, x in given.items()}
    if lengths:
        lens = np.asarray([12, 0, 3, 12, 7, 12, 1, 12])
        indices[np.arange(SELECTED) >= lens[:, None]] = 2**31 - 1
        found["lengths"] = ints(lens)
    found["indices"] = ints(indices)
    options: dict[str, Any] = {"window": WINDOW} if two else {}
    return found, options | {"page_size": page_size}


def loss(implementation: str | None, **options: Any) -> Callable[..., jax.Array]:
    """A loss of the arrays that have a gradient, the scale, and the others; out and lse have random weights."""
    rng = np.random.default_rng(9)
    of_out, of_lse = rng.standard_normal((TOKENS, HEADS, LATENT)), rng.standard_normal((TOKENS, HEADS))

    def run(leaves: Arrays, scale: jax.Array, others: Arrays) -> jax.Array:
        out, lse = tsmla_jax.sparse_mla(
            **leaves, **others, softmax_scale=scale, return_lse=True, implementation=implementation, **options
        )
        seen = jnp.isfinite(lse)
        return (out.astype(jnp.float32) * of_out).sum() + jnp.where(seen, lse * of_lse, 0).sum()

    return run


def split(given: Arrays) -> tuple[Arrays, Arrays]:
    leaves = {name: x for name, x in given.items() if name in NAMES}
    return leaves, {name: x for name, x in given.items() if name not in NAMES}


def gradients(implementation: str | None, given: Arrays, options: dict[str, Any]) -> Any:
    leaves, others = split(given)
    run = jax.jit(jax.grad(loss(implementation, **options), (0, 1)))
    return run(leaves, jnp.float32(0.05), others)


def close(got: Any, want: Any, bound: float) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= bound * max(np.linalg.norm(b), 1e-6)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled(3)
def test_xla_is_the_reference(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of three tokens, of which the last has tokens of the one before."""
    given, options = arrays(**CASES[case])
    monkeypatch.setattr(gradient, "BLOCK_BYTES", 3 * 576 * SELECTED * 4)
    # The terms of softmax_scale's gradient cancel: with jax 0.9.1 its sum is 4e-5 off.
    close(gradients("xla", given, options), gradients("reference", given, options), 5e-5)


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_no_tokens_or_no_columns(shape: tuple[int, int]) -> None:
    cache = jnp.ones((1, 4, 8))
    call = partial(tsmla_jax.sparse_mla, softmax_scale=1.0, latent_dim=4, implementation="xla")
    found = jax.grad(lambda q, kv: call(q, kv, jnp.zeros(shape, jnp.int32)).sum(), (0, 1))(
        jnp.ones((shape[0], 2, 8)), cache
    )
    assert not any(x.any() for x in found)


def test_rows_that_overflow_have_gradients_of_nan() -> None:
    """Those of others are the reference's."""
    given, options = arrays(sinks=True)
    given["q"] = given["q"].at[0].multiply(1e38)
    got, want = gradients("xla", given, options), gradients("reference", given, options)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.isnan(b).any()
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_memory_is_linear_in_tokens_and_slots() -> None:
    """The gradient of 2048 tokens that select 512 of 8192 slots: neither scores nor gathered keys of all tokens."""
    shape = jax.ShapeDtypeStruct

    def run(q: jax.Array, kv: jax.Array, indices: jax.Array) -> Any:
        call = partial(tsmla_jax.sparse_mla, softmax_scale=0.1, implementation="xla")
        return jax.grad(lambda q, kv: call(q, kv, indices).astype(jnp.float32).sum(), (0, 1))(q, kv)

    arguments = (shape((2048, 16, 576), jnp.float32), shape((64, 128, 576), jnp.float32), shape((2048, 512), jnp.int32))
    compiled = jax.jit(run).lower(*arguments).compile()
    keys = 2048 * 512 * 576 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < keys / 4


@pytest.mark.parametrize("implementation", ["xla", "cute"])
@pytest.mark.usefixtures("for_hopper")
def test_what_is_refused(implementation: str) -> None:
    given, options = arrays(jnp.bfloat16)
    leaves, others = split(given)
    message = r"sparse_mla has no derivative in this implementation; {}.*use implementation='reference'"

    def derive(**changed: Any) -> None:
        run = loss(implementation, **(options | changed))
        jax.eval_shape(jax.grad(lambda q: run(leaves | {"q": q}, jnp.float32(0.1), others)), leaves["q"])

    with pytest.raises(NotImplementedError, match=message.format("kv_cache: got plain rows of float8_e4m3fn")):
        leaves["kv_cache"] = given["kv_cache"].astype(jnp.float8_e4m3fn)
        derive()
    leaves["kv_cache"] = given["kv_cache"]
    with pytest.raises(NotImplementedError, match=message.format("kv_scale: got a scale")):
        derive(kv_scale=2.0)
    derive()


def test_the_gradients_own_derivative_is_refused() -> None:
    given, options = arrays(jnp.float32)
    leaves, others = split(given)
    first = jax.grad(loss("xla", **options))
    with pytest.raises(NotImplementedError, match="the gradient of sparse_mla has no derivative in this"):
        jax.grad(lambda q: first(leaves | {"q": q}, jnp.float32(0.1), others)["q"].sum())(leaves["q"])


# ---- by the kernel, which the emulation stands in for


@pytest.fixture
def kernel() -> Iterator[None]:
    traced = (cute._transformable, cute._differentiable, backward._transformable)
    with cute_emulation.emulated(*traced, by=emulation.emulate):
        yield


on_hopper = pytest.mark.usefixtures("for_hopper", "kernel")


@on_hopper
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled(3)
def test_operands_of_the_kernel(case: str, dtype: Any) -> None:
    given, options = arrays(dtype, **CASES[case])
    (got, of_scale), (want, of_scale_wanted) = (gradients(name, given, options) for name in ("cute", "reference"))
    close(got, want, 2e-2)
    # The gradient of q, from which this one is computed, was rounded.
    assert abs(of_scale - of_scale_wanted) < 0.01 * jnp.linalg.norm(want["q"].astype(jnp.float32)) / 0.05


@on_hopper
@pytest.mark.parametrize("case", ["one cache", "two caches"])
def test_groups_of_tokens(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few heads the kernel makes unions, whose workspaces its other operands come before."""
    monkeypatch.setitem(globals(), "HEADS", 16)
    given, options = arrays(jnp.bfloat16, **CASES[case])
    leaves, others = split(given)
    for form, tokens in (("auto", 4), ("direct", 1)):
        run = jax.grad(loss("cute", form=form, **options))
        assert f"tokens={tokens})" in str(jax.make_jaxpr(run)(leaves, jnp.float32(0.05), others))
    close(gradients("cute", given, options)[0], gradients("reference", given, options)[0], 2e-2)


@on_hopper
def test_deterministic() -> None:
    given, options = arrays(jnp.bfloat16)
    leaves, others = split(given)
    run = jax.grad(loss("cute", deterministic=True, **options))
    text = str(jax.make_jaxpr(run)(leaves, jnp.float32(0.05), others))
    assert "deterministic=True" in text
    close(
        gradients("cute", given, options | {"deterministic": True})[0], gradients("reference", given, options)[0], 2e-2
    )


@on_hopper
def test_vmap() -> None:
    """Calls with caches of their own become pages of one call."""
    given, options = arrays(jnp.bfloat16, two=True, sinks=True)
    stacked = {name: jnp.stack([x, x[::-1] if name == "q" else x]) for name, x in given.items()} | {
        "sinks": given["sinks"]
    }
    leaves, others = split(stacked)
    axes = {name: None if name == "sinks" else 0 for name in leaves}
    found = []
    for implementation in ("cute", "reference"):
        run = jax.vmap(jax.grad(loss(implementation, **options)), (axes, None, 0))
        found.append(jax.jit(run)(leaves, jnp.float32(0.05), others))
    close(*found, 2e-2)


@on_hopper
@pytest.mark.parametrize("axes", [("data", None), (None, "model"), ("data", "model")], ids=["tokens", "heads", "both"])
def test_partitioned(axes: tuple[str | None, str | None]) -> None:
    """Devices that split tokens or heads add up the caches' gradients."""
    given, options = arrays(jnp.bfloat16, sinks=True)
    mesh = jax.make_mesh((2, 2), ("data", "model"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    want, _ = gradients("reference", given, options)
    specs = {"q": P(*axes), "indices": P(axes[0]), "lengths": P(axes[0]), "sinks": P(axes[1])}
    placed = {name: jax.device_put(x, NamedSharding(mesh, specs.get(name, P()))) for name, x in given.items()}
    close(gradients("cute", placed, options)[0], want, 2e-2)


@on_hopper
@pytest.mark.parametrize("implementation", ["xla", "cute"])
def test_shard_map(implementation: str) -> None:
    given, options = arrays(jnp.bfloat16, sinks=True)
    leaves, others = split(given)
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])
    tokens = {name: P("data") if name in ("q", "indices", "lengths") else P() for name in given}
    call = partial(tsmla_jax.sparse_mla, softmax_scale=0.05, implementation=implementation, **options)

    def total(leaves: Arrays, run: Callable[..., jax.Array]) -> jax.Array:
        return (run(leaves | others).astype(jnp.float32) ** 2).sum()

    sharded = jax.shard_map(lambda given: call(**given), mesh=mesh, in_specs=(tokens,), out_specs=P("data"))
    got = jax.jit(jax.grad(partial(total, run=sharded)))(leaves)
    want = jax.jit(jax.grad(partial(total, run=lambda given: call(**given))))(leaves)
    close(got, want, 2e-2)


@on_hopper
def test_which_architecture_has_the_kernel() -> None:
    spec = tsmla_jax.explain("sparse_mla", **arrays(jnp.bfloat16)[0], softmax_scale=1.0).spec
    assert backward.why_no_kernel(spec, "sm_90a") == []
    reason = "the architecture is sm_100a; sparse_mla_backward is written for sm_90a"
    assert backward.why_no_kernel(spec, "sm_100a") == [reason]
    assert backward.note(spec, "sm_90a") == "its derivative is a kernel too"
    assert backward.note(spec, "sm_100a") == f"its derivative is that of xla: {reason}"
    given = arrays(jnp.bfloat16)[0]
    fp8 = given | {"kv_cache": given["kv_cache"].astype(jnp.float8_e4m3fn)}
    notes = tsmla_jax.explain("sparse_mla", **fp8, softmax_scale=1.0).notes
    assert notes["cute"][1].startswith("it has no derivative: kv_cache: got plain rows of float8_e4m3fn")

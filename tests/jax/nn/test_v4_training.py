"""Training of V4's layers: whole texts through `v4.prefill`, its gradient and its indexer's loss."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from tests.jax.nn import hf_layers
from tsmla_jax.nn import Segments, v4

KINDS = ("csa", "sliding", "hca")
IMPLEMENTATIONS = ("xla", "reference")
TOKENS, USED, MAX_LEN = 48, 45, 30
OFFSETS = jnp.asarray([0, 28, 28, USED], jnp.int32)
BASE = v4.V4Config(
    kind="csa",
    ratio=4,
    hidden_size=24,
    num_attention_heads=4,
    q_lora_rank=12,
    head_dim=16,
    rope_dim=4,
    sliding_window=6,
    o_groups=2,
    o_lora_rank=8,
    index_n_heads=6,
    index_head_dim=8,
    index_topk=3,
)
CONFIGS = {
    "csa": BASE,
    "sliding": dataclasses.replace(BASE, kind="sliding", ratio=0),
    "hca": dataclasses.replace(BASE, kind="hca", ratio=8),
}


@functools.cache
def inputs(kind: str, dtype: str = "float32") -> tuple[dict[str, jax.Array], jax.Array]:
    """Parameters whose indexer chooses sharply, and x."""

    @jax.jit
    def make() -> tuple[dict[str, jax.Array], jax.Array]:
        params = v4.init_params(jax.random.key(0), CONFIGS[kind], jnp.float32)
        params = {
            name: x * (4 if name in ("indexer_q_b_proj", "indexer_weights_proj") else 1) for name, x in params.items()
        }
        params["sinks"] = jax.random.normal(jax.random.key(2), params["sinks"].shape)
        x = jax.random.normal(jax.random.key(1), (TOKENS, BASE.hidden_size))
        return {name: value.astype(dtype) for name, value in params.items()}, x.astype(dtype)

    return make()


def run(kind: str, params: Any, x: jax.Array, **options: Any) -> v4.V4Prefill:
    config = CONFIGS[kind]
    given = {"cu_seqlens_q": OFFSETS, "max_q_len": MAX_LEN, "cos_sin": v4.rope_table(config, MAX_LEN), **options}
    return v4.prefill(params, config, x, **given)


# Compiled as a whole: eagerly, each operation would be compiled for itself.
RUN = jax.jit(run, static_argnames=("kind", "index_loss"))


def both(kind: str, params: Any, x: jax.Array, **options: Any) -> jax.Array:
    """A loss of y and of the indexer, where there is one."""
    found = run(kind, params, x, **options)
    loss = jnp.sin(found.y[:USED].astype(jnp.float32)).sum()
    return loss if found.index_loss is None else loss + (found.index_loss * jnp.arange(1, TOKENS + 1)).sum()


@functools.cache
def gradient_of(kind: str, implementation: str = "xla") -> Any:
    """The compiled loss of `both` and its gradients by parameters and x, which several tests run."""
    return jax.jit(jax.value_and_grad(functools.partial(both, kind, implementation=implementation), (0, 1)))


def assert_close(got: Any, want: Any, rtol: float = 2e-4) -> None:
    """Trees of gradients, by the greatest number of each leaf."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=rtol, atol=rtol * float(np.abs(b).max()))


@pytest.mark.parametrize("name", ["sliding", "csa", "csa, few chosen", "hca"])
def test_it_is_the_layer_of_transformers(name: str) -> None:
    case = hf_layers.case(name)
    lens = 140, 133
    x = jnp.asarray(np.concatenate([case.x[0, : lens[0]], case.x[1, : lens[1]], case.x[0, :3]]))
    found = jax.jit(
        lambda x: v4.prefill(
            case.params,
            case.config,
            x,
            cu_seqlens_q=jnp.asarray(np.cumsum([0, *lens]), jnp.int32),
            max_q_len=140,
            cos_sin=v4.rope_table(case.config, 140),
        )
    )(x)
    want = np.concatenate([case.y[0, : lens[0]], case.y[1, : lens[1]]])
    np.testing.assert_allclose(found.y[: sum(lens)], want, rtol=1e-5, atol=1e-5)
    assert (found.selected is None) == (found.index_loss is None) == ("csa" not in name)
    if found.index_loss is not None:
        index_loss = np.asarray(found.index_loss)
        assert not index_loss[sum(lens) :].any() and not index_loss[:3].any()
        assert (index_loss[100:140] > 1e-4).all()


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_the_references(kind: str) -> None:
    params, x = inputs(kind)
    got, want = (gradient_of(kind, name)(params, x) for name in IMPLEMENTATIONS)
    assert all(np.abs(gradient).max() > 1e-3 for gradient in want[1][0].values())
    assert_close(got, want)


def test_the_indexers_loss_trains_the_indexer_alone() -> None:
    params, x = inputs("csa")

    def loss(params: Any, x: jax.Array) -> Any:
        return run("csa", params, x).index_loss.sum()  # type: ignore[union-attr]

    found, of_x = jax.jit(jax.grad(loss, (0, 1)))(params, x)
    of_y = jax.jit(jax.grad(lambda params: jnp.sin(run("csa", params, x).y[:USED]).sum()))(params)
    names = {name for name in params if name.startswith("indexer")}
    assert not of_x.any()
    assert {name for name, gradient in found.items() if gradient.any()} == names
    assert {name for name, gradient in of_y.items() if gradient.any()} == set(params) - names


def test_a_choice_is_returned_and_given() -> None:
    params, x = inputs("csa")
    own = jax.device_get(RUN("csa", params, x))
    assert own.selected.shape == (TOKENS, 3)
    assert own.selected[27].tolist() == sorted(own.selected[27].tolist()) and (own.selected[27] >= 0).all()
    without = {name: value for name, value in params.items() if not name.startswith("indexer")}
    again = RUN("csa", without, x, selected=own.selected, index_loss=False)
    np.testing.assert_allclose(np.asarray(again.y)[:USED], own.y[:USED], rtol=1e-6, atol=1e-6)
    gaps = np.full((TOKENS, own.selected.shape[1] + 3), -1, np.int32)
    gaps[:, 1:-2] = own.selected
    gaps[:28, -2] = 7
    seen = np.asarray(RUN("csa", params, x, selected=gaps).y)
    np.testing.assert_allclose(seen[28:USED], own.y[28:USED], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(seen[:27], own.y[:27], rtol=1e-6, atol=1e-6)  # entry 7 ends with token 31


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(3)
def test_under_remat_and_vmap(kind: str) -> None:
    params, x = inputs(kind)
    policy = jax.checkpoint_policies.save_only_these_names(*v4.CHECKPOINT_NAMES)
    kept = jax.checkpoint(functools.partial(both, kind), policy=policy)
    several = np.stack([x, np.asarray(x)[::-1]])
    got = jax.jit(jax.vmap(jax.grad(kept, 1), (None, 0)))(params, several)
    for i in range(2):
        _, (_, want) = gradient_of(kind)(params, several[i])
        assert_close(np.asarray(got)[i], want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(3)
def test_heads_on_several_devices(kind: str) -> None:
    params, x = inputs(kind)
    mesh = Mesh(np.asarray(jax.devices()[:2]), "heads")
    specs, whole = v4.param_specs(CONFIGS[kind], "heads"), PartitionSpec()

    def loss(params: Any, x: jax.Array) -> jax.Array:
        def local(params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            found = run(kind, params, x, head_axis="heads")
            each = jnp.zeros(TOKENS) if found.index_loss is None else found.index_loss
            return jax.lax.psum(found.y, "heads"), each

        y, each = jax.shard_map(local, mesh=mesh, in_specs=(specs, whole), out_specs=whole)(params, x)
        return jnp.sin(y[:USED]).sum() + (each * jnp.arange(1, TOKENS + 1)).sum()

    assert_close(jax.jit(jax.value_and_grad(loss, (0, 1)))(params, x), gradient_of(kind)(params, x))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_packed_segments(kind: str) -> None:
    """A token sees its segment and nothing else, and entries never cross from one to the next."""
    params, x = inputs(kind)
    ids = jnp.asarray([[1] * 11 + [0] * 2 + [2] * 11, [3] * 24])
    segments = Segments.from_ids(ids, max_segments=2)

    def loss(params: Any) -> jax.Array:
        found = run(kind, params, x, cu_seqlens_q=segments.cu_seqlens, max_q_len=segments.row_len)
        valid = segments.valid.reshape(-1)
        total = jnp.where(valid[:, None], jnp.sin(found.y), 0).sum()
        return total if found.index_loss is None else total + jnp.where(valid, found.index_loss, 0).sum()

    def alone(params: Any, x: jax.Array) -> jax.Array:
        offsets = jnp.asarray([0, len(x)], jnp.int32)
        found = run(kind, params, x, cu_seqlens_q=offsets, max_q_len=24)
        return jnp.sin(found.y).sum() + (0 if found.index_loss is None else found.index_loss.sum())

    of_segment, rows = jax.jit(jax.value_and_grad(alone)), np.asarray(x)
    each = [of_segment(params, rows[first:stop]) for first, stop in ((0, 11), (13, 24), (24, 48))]
    want = jax.tree.map(lambda *parts: np.sum(parts, axis=0), *each)
    assert_close(jax.jit(jax.value_and_grad(loss))(params), want)


@pytest.mark.parametrize("kind", KINDS)
def test_16_bits(kind: str) -> None:
    params, x = inputs(kind, "bfloat16")
    loss, found = jax.jit(jax.value_and_grad(functools.partial(both, kind)))(params, x)
    assert np.isfinite(float(loss))
    assert all(
        gradient.dtype == jnp.bfloat16 and np.isfinite(np.float32(gradient)).all() for gradient in found.values()
    )


@pytest.mark.parametrize(
    ("kind", "change", "options", "message"),
    [
        ("csa", {}, {"x": jnp.zeros((TOKENS, 24), jnp.float8_e4m3fn)}, "x: got dtype float8_e4m3fn; legal: float16"),
        ("csa", {"in_proj": jnp.zeros((2, 2))}, {}, "params: got folded ones, which have no gradient"),
        (
            "hca",
            {},
            {"selected": jnp.zeros((TOKENS, 3), jnp.int32)},
            "selected: got an array for a layer of kind 'hca'",
        ),
        ("csa", {}, {"selected": jnp.zeros((TOKENS, 3))}, "selected: got dtype float32; legal: int32"),
        (
            "csa",
            {"kv_proj": jnp.zeros((24, 16), jnp.float8_e4m3fn)},
            {},
            r"params\['kv_proj'\]: got float8_e4m3fn, which",
        ),
    ],
)
def test_illegal_arguments(kind: str, change: dict[str, Any], options: dict[str, Any], message: str) -> None:
    params, x = inputs(kind)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: run(kind, {**params, **change}, **{"x": x, **options}))

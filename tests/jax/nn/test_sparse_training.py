"""Training of V3.2's layer: whole texts through `v32.prefill`, its gradient and its indexer's loss."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import tsmla_jax
from tests.jax.nn import hf_layers
from tsmla_jax.nn import MLAConfig, Segments, functional, v32
from tsmla_jax.nn.products.block_scaled import BlockScaled

MLA = MLAConfig(
    hidden_size=24,
    num_attention_heads=4,
    q_lora_rank=12,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=6,
)
CONFIG = v32.V32Config(MLA, index_n_heads=6, index_head_dim=8, index_topk=5)
ALL = v32.V32Config(MLA, index_n_heads=6, index_head_dim=8, index_topk=64)
TOKENS, USED, MAX_LEN = 30, 27, 18
OFFSETS = jnp.asarray([0, 17, 17, USED], jnp.int32)
IMPLEMENTATIONS = ("xla", "reference")


@functools.cache
def inputs(dtype: str = "float32") -> tuple[dict[str, jax.Array], jax.Array]:
    """Parameters whose indexer chooses sharply, and x."""

    @jax.jit
    def make() -> tuple[dict[str, jax.Array], jax.Array]:
        params = v32.init_params(jax.random.key(0), CONFIG, jnp.float32)
        params = {name: x * (4 if "indexer_w" in name else 1) for name, x in params.items()}
        x = jax.random.normal(jax.random.key(1), (TOKENS, MLA.hidden_size))
        return {name: value.astype(dtype) for name, value in params.items()}, x.astype(dtype)

    return make()


def run(params: Any, x: jax.Array, config: v32.V32Config = CONFIG, **options: Any) -> v32.V32Prefill:
    return v32.prefill(params, config, x, cu_seqlens_q=OFFSETS, max_q_len=MAX_LEN, **options)


# Compiled as a whole: eagerly, each operation would be compiled for itself.
RUN = jax.jit(run, static_argnames=("config", "dense", "form", "index_loss"))


def both(params: Any, x: jax.Array, **options: Any) -> jax.Array:
    """A loss of y and of the indexer."""
    found = run(params, x, **options)
    assert found.index_loss is not None
    weights = jnp.arange(1, TOKENS + 1)
    return jnp.sin(found.y[:USED].astype(jnp.float32)).sum() + (found.index_loss * weights).sum()


@functools.cache
def gradient_of(dense: bool = False, implementation: str = "xla") -> Any:
    """The compiled loss of `both` and its gradients by parameters and x, which several tests run."""
    return jax.jit(jax.value_and_grad(functools.partial(both, dense=dense, implementation=implementation), (0, 1)))


def assert_close(got: Any, want: Any, rtol: float = 1e-4) -> None:
    """Trees of gradients, by the greatest number of each leaf."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=rtol, atol=rtol * float(np.abs(b).max()))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_it_is_the_layer_of_transformers(implementation: str) -> None:
    case = hf_layers.case("v3.2")
    lens = 40, 33
    x = jnp.asarray(np.concatenate([case.x[0, : lens[0]], case.x[1, : lens[1]], case.x[0, :3]]))
    offsets = jnp.asarray(np.cumsum([0, *lens]), jnp.int32)
    prefill = functools.partial(v32.prefill, config=case.config, max_q_len=40, implementation=implementation)
    found = jax.device_get(jax.jit(prefill)(case.params, x=x, cu_seqlens_q=offsets))
    want = np.concatenate([case.y[0, : lens[0]], case.y[1, : lens[1]]])
    np.testing.assert_allclose(found.y[: sum(lens)], want, rtol=1e-5, atol=1e-5)
    assert found.index_loss is not None and found.selected is not None
    # The first 12 tokens of a text see no more keys than are chosen, the others choose.
    assert found.selected.shape == (len(x), 12) and (found.selected[30] >= 0).all()
    assert (found.index_loss[[0, 40]] < 1e-5).all() and (found.index_loss[13:40] > 1e-3).all()
    assert not found.index_loss[sum(lens) :].any()


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.sampled(2)
def test_gradients_are_the_references(dense: bool) -> None:
    params, x = inputs()
    got, want = (gradient_of(dense, name)(params, x) for name in IMPLEMENTATIONS)
    assert all(np.abs(gradient).max() > 0.01 for gradient in want[1][0].values())
    assert_close(got, want)


def test_both_forms_have_one_gradient() -> None:
    params, x = inputs()
    got, want = (
        jax.jit(jax.value_and_grad(functools.partial(both, form=form), (0, 1)))(params, x)
        for form in ("mask", "direct")
    )
    assert_close(got, want)


def test_the_form_follows_the_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask where its kernel takes less time, and never for widths without a kernel."""
    deepseek = MLAConfig(hidden_size=32, num_attention_heads=2, q_lora_rank=16, kv_lora_rank=512)
    used: list[str] = []
    for name in ("sparse_mla", "mla_prefill_kv"):
        call = getattr(tsmla_jax, name)
        monkeypatch.setattr(tsmla_jax, name, lambda *a, name=name, call=call, **k: used.append(name) or call(*a, **k))
    for mla, tokens, dtype in ((deepseek, 1024, "bfloat16"), (deepseek, 64, "bfloat16"), (MLA, 1024, "bfloat16")):
        config = v32.V32Config(mla, index_n_heads=2, index_head_dim=64, index_topk=512)
        shapes = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in v32.param_shapes(config).items()}
        x = jax.ShapeDtypeStruct((tokens, mla.hidden_size), dtype)
        offsets = jax.ShapeDtypeStruct((2,), "int32")
        jax.eval_shape(
            lambda params, x, offsets, config=config, tokens=tokens: v32.prefill(
                params, config, x, cu_seqlens_q=offsets, max_q_len=tokens
            ),
            shapes,
            x,
            offsets,
        )
    assert used == ["mla_prefill_kv", "sparse_mla", "sparse_mla"]


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.sampled(2)
def test_with_all_keys_it_is_the_dense_layer(dense: bool) -> None:
    params, x = inputs()

    def of_mla(params: Any, x: jax.Array) -> jax.Array:
        y, *_ = functional.prefill(params, MLA, x, cu_seqlens_q=OFFSETS, max_q_len=MAX_LEN)
        return jnp.sin(y[:USED]).sum()

    def of_layer(params: Any, x: jax.Array) -> jax.Array:
        return jnp.sin(run(params, x, ALL, dense=dense, index_loss=False).y[:USED]).sum()

    got, want = (jax.jit(jax.grad(loss, (0, 1)))(params, x) for loss in (of_layer, of_mla))
    assert_close(got, want)
    assert not any(gradient.any() for name, gradient in got[0].items() if "indexer" in name)


@pytest.mark.parametrize("dense", [False, True])
def test_the_indexers_loss_trains_the_indexer_alone(dense: bool) -> None:
    params, x = inputs()

    def loss(params: Any, x: jax.Array) -> Any:
        return run(params, x, dense=dense).index_loss.sum()  # type: ignore[union-attr]

    found, of_x = jax.jit(jax.grad(loss, (0, 1)))(params, x)
    assert not of_x.any()
    assert {name for name, gradient in found.items() if gradient.any()} == {
        name for name in params if "indexer" in name
    }


def test_the_warm_ups_loss_goes_down() -> None:
    params, x = inputs()

    @jax.jit
    def step(params: Any) -> tuple[jax.Array, Any]:
        loss, gradients = jax.value_and_grad(lambda params: run(params, x, dense=True).index_loss.mean())(params)  # type: ignore[union-attr]
        return loss, jax.tree.map(lambda a, b: a - 0.3 * b, params, gradients)

    first, moved = step(params)
    for _ in range(60):
        last, moved = step(moved)
    assert last < 0.3 * first
    assert all((moved[name] == params[name]).all() for name in params if "indexer" not in name)


def test_a_choice_is_returned_and_given() -> None:
    params, x = inputs()
    own = jax.device_get(RUN(params, x))
    again = jax.device_get(RUN(params, x, selected=own.selected))
    assert (again.y == own.y).all() and (again.index_loss == own.index_loss).all()
    others = dict(params) | {name: np.roll(params[name], 1) for name in params if "indexer_w" in name}
    assert np.abs(np.asarray(RUN(others, x).y)[:USED] - own.y[:USED]).max() > 1e-3
    kept = RUN(others, x, selected=own.selected, index_loss=False)
    assert (np.asarray(kept.y) == own.y).all() and kept.index_loss is None
    without = {name: value for name, value in params.items() if "indexer" not in name}
    shared = RUN(without, x, selected=own.selected, index_loss=False)  # a layer that shares another one's choice
    assert (np.asarray(shared.y) == own.y).all()


def test_a_choice_never_shows_the_future() -> None:
    params, x = inputs()
    own = jax.device_get(RUN(params, x))
    later = np.concatenate([own.selected, np.full((TOKENS, 3), MAX_LEN - 1, np.int32)], axis=1)
    later[OFFSETS[1] - 1, -3:] = -1
    got = np.asarray(RUN(params, x, selected=later).y)
    np.testing.assert_allclose(got[:16], own.y[:16], rtol=1e-6, atol=1e-6)


def test_a_rollouts_choice_is_replayed() -> None:
    """attend returns what it chose, step by step, and prefill attends to the same."""
    params, x = inputs()
    x = np.asarray(x)[: OFFSETS[1]]
    length = x.shape[0]
    cache = v32.init_cache(CONFIG, 5, 4, kv_dtype=jnp.float32, indexer_dtype=jnp.float32)
    tables = jnp.asarray([[3, 1, 4, 0, 2]], jnp.int32)

    @functools.partial(jax.jit, static_argnames="total")
    def decode(x: jax.Array, cache: Any, length: jax.Array, total: int, selected: Any = None) -> Any:
        offsets = jnp.asarray([0, total], jnp.int32)
        step = v32.functional.Step.ragged(tables, length[None], offsets, total_tokens=total, page_size=4)
        return v32.attend(params, CONFIG, x, cache, step, return_selected=True, selected=selected)

    ys, chosen = [], []
    for first, stop in [(0, 9), *((i, i + 1) for i in range(9, length))]:
        y, cache, selected = decode(x[first:stop], cache, jnp.int32(stop), stop - first)
        ys.append(y)
        chosen.append(selected)
    selected = np.concatenate(chosen)
    offsets = np.asarray([0, length], np.int32)
    prefill = functools.partial(v32.prefill, config=CONFIG, max_q_len=length)
    found = jax.device_get(jax.jit(prefill)(params, x=x, cu_seqlens_q=offsets, selected=selected))
    np.testing.assert_allclose(found.y, np.concatenate(ys), rtol=1e-5, atol=1e-5)
    assert (found.selected == np.asarray(RUN(params, inputs()[1]).selected)[:length]).all()
    given, _, same = decode(x[-1:], cache, jnp.int32(length), 1, selected=selected[-1:])
    np.testing.assert_allclose(given, found.y[-1:], rtol=1e-5, atol=1e-5)
    assert (np.asarray(same) == selected[-1:]).all()


def test_remat_keeps_what_is_named() -> None:
    params, x = inputs()
    policy = jax.checkpoint_policies.save_only_these_names(*v32.CHECKPOINT_NAMES)
    kept = jax.checkpoint(both, policy=policy)
    everything = jax.checkpoint(both)
    _, (want, _) = gradient_of()(params, x)
    for loss in (kept, everything):
        assert_close(jax.jit(jax.grad(loss))(params, x), want, rtol=1e-5)
    sorts = [str(jax.make_jaxpr(jax.grad(loss))(params, x)).count("top_k[") for loss in (both, kept, everything)]
    assert sorts[0] == sorts[1] < sorts[2]


def test_under_vmap() -> None:
    params, x = inputs()
    several = np.stack([x, np.asarray(x)[::-1]])
    got = jax.jit(jax.vmap(jax.grad(both, 1), (None, 0)))(params, several)
    for i in range(2):
        _, (_, want) = gradient_of()(params, several[i])
        assert_close(np.asarray(got)[i], want)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.sampled(2)
def test_heads_on_several_devices(dense: bool) -> None:
    params, x = inputs()
    mesh = Mesh(np.asarray(jax.devices()[:2]), "heads")
    specs, whole = v32.param_specs(CONFIG, "heads"), PartitionSpec()

    def loss(params: Any, x: jax.Array) -> jax.Array:
        def local(params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            found = run(params, x, dense=dense, head_axis="heads")
            assert found.index_loss is not None
            return jax.lax.psum(found.y, "heads"), found.index_loss

        split = jax.shard_map(local, mesh=mesh, in_specs=(specs, whole), out_specs=whole)
        y, index_loss = split(params, x)
        return jnp.sin(y[:USED]).sum() + (index_loss * jnp.arange(1, TOKENS + 1)).sum()

    assert_close(jax.jit(jax.value_and_grad(loss, (0, 1)))(params, x), gradient_of(dense)(params, x))


def test_texts_on_several_devices() -> None:
    params, x = inputs()
    mesh = Mesh(np.asarray(jax.devices()[:2]), "texts")
    offsets = jnp.asarray([[0, 9, 13], [0, 4, 15]], jnp.int32)
    rows = x.reshape(2, 15, -1)

    def local(params: Any, x: jax.Array, offsets: jax.Array) -> jax.Array:
        found = v32.prefill(params, CONFIG, x[0], cu_seqlens_q=offsets[0], max_q_len=15)
        assert found.index_loss is not None
        kept = jnp.arange(15) < offsets[0, -1]
        return jnp.where(kept[:, None], jnp.sin(found.y), 0).sum() + found.index_loss.sum()

    def loss(params: Any, x: jax.Array) -> jax.Array:
        def split(params: Any, x: jax.Array, offsets: jax.Array) -> jax.Array:
            return jax.lax.psum(local(params, x, offsets), "texts")

        by = PartitionSpec("texts")
        run = jax.shard_map(split, mesh=mesh, in_specs=(PartitionSpec(), by, by), out_specs=PartitionSpec())
        return run(params, x, offsets)

    def alone(params: Any, x: jax.Array) -> jax.Array:
        return sum((local(params, x[i : i + 1], offsets[i : i + 1]) for i in range(2)), jnp.float32(0))

    got, want = (jax.jit(jax.value_and_grad(f, (0, 1)))(params, rows) for f in (loss, alone))
    assert_close(got, want)


def test_rows_of_packed_segments() -> None:
    """A token sees its segment and nothing else, and padding between segments changes nothing."""
    params, x = inputs()
    ids = jnp.asarray([[1] * 6 + [0] * 2 + [2] * 7, [3] * 15])
    segments = Segments.from_ids(ids, max_segments=2)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        offsets = segments.cu_seqlens
        found = v32.prefill(params, CONFIG, x, cu_seqlens_q=offsets, max_q_len=segments.row_len)
        assert found.index_loss is not None
        valid = segments.valid.reshape(-1)
        return jnp.where(valid[:, None], jnp.sin(found.y), 0).sum() + jnp.where(valid, found.index_loss, 0).sum()

    def alone(params: Any, x: jax.Array) -> jax.Array:
        total = jnp.float32(0)
        for first, stop in ((0, 6), (8, 15), (15, 30)):
            offsets = jnp.asarray([0, stop - first], jnp.int32)
            found = v32.prefill(params, CONFIG, x[first:stop], cu_seqlens_q=offsets, max_q_len=15)
            assert found.index_loss is not None
            total += jnp.sin(found.y).sum() + found.index_loss.sum()
        return total

    got, want = (jax.jit(jax.value_and_grad(f, (0, 1)))(params, x) for f in (loss, alone))
    assert_close(got, want)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.sampled(2)
def test_16_bits(dense: bool) -> None:
    params, x = inputs("bfloat16")
    loss, found = jax.jit(jax.value_and_grad(functools.partial(both, dense=dense)))(params, x)
    assert {gradient.dtype.name for gradient in found.values()} == {"bfloat16"}
    wide = {name: np.asarray(value, np.float32) for name, value in params.items()}
    selected = None if dense else RUN(params, x).selected
    want_loss, want = jax.jit(jax.value_and_grad(functools.partial(both, dense=dense, selected=selected)))(
        wide, np.asarray(x, np.float32)
    )
    assert abs(float(loss - want_loss)) < 0.03 * abs(float(want_loss))
    for name, gradient in found.items():
        error = np.linalg.norm(np.asarray(gradient, np.float32) - want[name]) / np.linalg.norm(want[name])
        assert error < 0.1, name


def test_memory_is_linear_in_the_tokens() -> None:
    """No array of the gradient has a number for each pair of tokens."""
    tokens = 4096
    config = v32.V32Config(MLA, index_n_heads=2, index_head_dim=8, index_topk=16)
    shapes = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in v32.param_shapes(config).items()}
    x = jax.ShapeDtypeStruct((tokens, MLA.hidden_size), jnp.float32)
    offsets = jax.ShapeDtypeStruct((2,), jnp.int32)

    def loss(params: Any, x: jax.Array, offsets: jax.Array) -> Any:
        found = v32.prefill(params, config, x, cu_seqlens_q=offsets, max_q_len=tokens)
        return found.y.sum() + found.index_loss.sum()  # type: ignore[union-attr]

    text = jax.jit(jax.grad(loss)).lower(shapes, x, offsets).as_text()
    assert f"{tokens}x{tokens}" not in text and f"{tokens}x64x64" not in text


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({}, {"x": jnp.zeros((TOKENS, 24), jnp.float8_e4m3fn)}, "x: got dtype float8_e4m3fn; legal: float16"),
        ({}, {"x": jnp.zeros((TOKENS, 23))}, r"x: got shape \[30, 23\]; legal: \[T, E\] with E = 24"),
        (
            {"o_proj": BlockScaled(jnp.zeros((24, 24), jnp.float8_e4m3fn), jnp.ones((1, 1)))},
            {},
            r"params\['o_proj'\]: got block-scaled float8_e4m3fn, which has no gradient",
        ),
        ({"w_uk": jnp.zeros((4, 8, 16), jnp.float8_e4m3fn)}, {}, r"params\['w_uk'\]: got float8_e4m3fn, which has no"),
        ({}, {"selected": jnp.zeros((TOKENS, 3))}, "selected: got dtype float32; legal: int32"),
        ({}, {"selected": jnp.zeros((2, 3), jnp.int32)}, "selected: got shape .* axis 0 must be 30"),
        ({}, {"selected": jnp.zeros((TOKENS, 3), jnp.int32), "dense": True}, "selected: got an array with dense=True"),
        ({}, {"form": "mask", "dense": True}, "form: got 'mask' with dense=True; legal: None"),
        ({}, {"form": "fast"}, "form: got 'fast'; legal: None, 'direct', 'mask'"),
    ],
)
def test_illegal_arguments(change: dict[str, Any], options: dict[str, Any], message: str) -> None:
    params, x = inputs()
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: run({**params, **change}, **{"x": x, **options}))

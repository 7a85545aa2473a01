"""Layers that attend to what a layer before them chose (GLM-5.2's IndexShare), against transformers' own, eager."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from tests.jax.nn import hf_layers
from tsmla_jax.nn import Step, V32Attention, v32

TYPES = ["full", "shared", "shared"]
# Returns y, the caches and the choice.
ATTEND = functools.partial(v32.attend, return_selected=True)
cases = functools.cache(lambda: hf_layers.glm_cases(TYPES))
LENGTH, PROMPT = 120, 70


def ints(x: object) -> jax.Array:
    return jnp.asarray(x, jnp.int32)


def run_layers(form: str | None = None) -> list[np.ndarray]:
    """Each layer's output of the first tokens of two texts: a prompt, then chunks and single tokens."""
    layers = cases()
    pages = 2 * -(-LENGTH // 16)
    tables = ints(np.random.default_rng(0).permutation(pages).reshape(2, -1))
    caches = [case.cache(pages) for case in layers]
    assert [cache.indexer is None for cache in caches] == [kind == "shared" for kind in TYPES]

    @jax.jit
    def run(xs: list[jax.Array], caches: list[Any], lens: jax.Array, cu: jax.Array) -> tuple[list[Any], list[Any]]:
        step = Step.ragged(tables, lens, cu, total_tokens=xs[0].shape[0], page_size=16)
        ys, written, selected = [], [], None
        for case, x, cache in zip(layers, xs, caches, strict=True):
            given = None if case.config.has_indexer else selected
            y, cache, selected = ATTEND(case.params, case.config, x, cache, step, selected=given, form=form)
            again, _ = v32.attend(case.params, case.config, x, cache, step, selected=selected, form=form)
            ys.append((y, again))
            written.append(cache)
        return ys, written

    found: list[list[np.ndarray]] = [[] for _ in layers]
    done = 0
    for count in (PROMPT, 1, 30, 1, LENGTH - PROMPT - 32):
        xs = [jnp.asarray(case.x[:, done : done + count]).reshape(2 * count, -1) for case in layers]
        done += count
        ys, caches = run(xs, caches, ints([done, done]), ints([0, count, 2 * count]))
        for outputs, (y, again) in zip(found, ys, strict=True):
            np.testing.assert_array_equal(y, again)
            outputs.append(np.asarray(y).reshape(2, count, -1))
    return [np.concatenate(outputs, axis=1) for outputs in found]


@pytest.mark.parametrize("form", [None, pytest.param("mask", marks=pytest.mark.slow)])
def test_layers_share_a_choice(form: str | None) -> None:
    for case, y in zip(cases(), run_layers(form), strict=True):
        np.testing.assert_allclose(y, case.y[:, :LENGTH], rtol=1e-5, atol=1e-5)


def test_a_narrow_selection_of_a_short_text_is_no_selection_of_all() -> None:
    """Given positions are not the greatest of a text: a token with few keys may have fewer."""
    case = cases()[0]
    step = Step.ragged(ints([[0, 1]]), ints([20]), ints([0, 20]), total_tokens=20, page_size=16)
    selected = np.full((20, 30), -1, np.int32)
    selected[:, 3], selected[:, 5] = np.arange(20), 99  # 99 is after all of them
    attend = functools.partial(v32.attend, case.params, case.config, case.x[0, :20], case.cache(2), step)
    ys = [
        np.asarray(jax.jit(functools.partial(attend, form=form))(selected=selected)[0]) for form in ("direct", "mask")
    ]
    np.testing.assert_allclose(ys[0], ys[1], atol=1e-5)
    everything = np.asarray(jax.jit(attend)()[0])
    assert np.abs(ys[0][1:] - everything[1:]).max() > 1e-2
    np.testing.assert_allclose(ys[0][0], everything[0], atol=1e-5)


def test_keys_on_several_devices() -> None:
    """A choice is the same on all of them, and given to the next layer."""
    first, second = cases()[:2]
    mesh = Mesh(np.asarray(jax.devices()[:2]), "keys")
    tables = ints(np.arange(4)[None])

    def run(xs: list[jax.Array]) -> Any:
        step = Step.ragged(
            tables, ints([LENGTH]), ints([0, LENGTH]), total_tokens=LENGTH, page_size=16, context_axis="keys"
        )
        of_keys: dict[str, Any] = {"context_axis": "keys"}
        y, _, selected = ATTEND(first.params, first.config, xs[0], first.cache(4), step, **of_keys)
        shared = ATTEND(second.params, second.config, xs[1], second.cache(4), step, selected=selected, **of_keys)
        return y, shared[0], selected[None]

    specs = (PartitionSpec(), PartitionSpec(), PartitionSpec("keys"))
    run = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=PartitionSpec(), out_specs=specs, check_vma=False))
    *ys, selected = run([jnp.asarray(case.x[0, :LENGTH]) for case in (first, second)])
    for case, y in zip((first, second), ys, strict=True):
        np.testing.assert_allclose(y, case.y[0, :LENGTH], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(selected[0], selected[1])


def test_whole_texts_in_training() -> None:
    full, shared = cases()[:2]
    texts = {"cu_seqlens_q": ints([0, LENGTH]), "max_q_len": LENGTH}
    of_full = functools.partial(v32.prefill, full.params, full.config, **texts)
    chosen = jax.jit(of_full)(full.x[0, :LENGTH])
    np.testing.assert_allclose(chosen.y, full.y[0, :LENGTH], rtol=1e-5, atol=1e-5)
    x = jnp.asarray(shared.x[0, :LENGTH])
    of_shared = functools.partial(v32.prefill, shared.params, shared.config, x, **texts)
    found = jax.jit(functools.partial(of_shared, index_loss=False))(selected=chosen.selected)
    np.testing.assert_allclose(found.y, shared.y[0, :LENGTH], rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="selected: got None; legal: "):
        of_shared(index_loss=False)
    with pytest.raises(ValueError, match="index_loss: got True; legal: False, as the layer has no indexer"):
        of_shared(selected=chosen.selected)


def test_a_module_without_an_indexer() -> None:
    full, shared = cases()[:2]
    assert not any("indexer" in name for name in v32.param_shapes(shared.config))
    step = Step.ragged(ints([[0, 1, 2]]), ints([40]), ints([0, 40]), total_tokens=40, page_size=16)
    layers = [V32Attention(case.config, params=case.params) for case in (full, shared)]

    @nnx.jit
    def run(layers: list[V32Attention], xs: list[jax.Array]) -> Any:
        y, _, selected = ATTEND(layers[0].params, full.config, xs[0], full.cache(3), step)
        return y, layers[1](xs[1], shared.cache(3), step, selected=selected)[0]

    for case, y in zip((full, shared), run(layers, [case.x[0, :40] for case in (full, shared)]), strict=True):
        np.testing.assert_allclose(y, case.y[0, :40], rtol=1e-5, atol=1e-5)
    folded = jax.jit(v32.functional.fold, static_argnums=1)(shared.params, shared.config)
    again = jax.jit(v32.functional.unfold, static_argnums=1)(folded, shared.config)
    assert all((np.asarray(again[name]) == value).all() for name, value in shared.params.items())


def test_what_is_refused() -> None:
    full, shared = cases()[:2]
    step = Step.ragged(ints([[0]]), ints([4]), ints([0, 4]), total_tokens=4, page_size=16)
    x, selected = jnp.asarray(full.x[0, :4]), jnp.zeros((4, 2), jnp.int32)
    with pytest.raises(ValueError, match=r"selected: got None; legal: \[T, K\] positions, as the layer has no indexer"):
        v32.attend(shared.params, shared.config, x, shared.cache(1), step)
    with pytest.raises(ValueError, match="selected"):
        v32.attend(shared.params, shared.config, x, shared.cache(1), step, selected=selected[:3])
    with pytest.raises(ValueError, match=r"cache\.indexer: got None; legal: indexer keys, as has_indexer=True"):
        v32.attend(full.params, full.config, x, shared.cache(1), step)
    with pytest.raises(
        ValueError, match=r"cache\.indexer: got an array of shape .*; legal: None, as has_indexer=False"
    ):
        v32.attend(shared.params, shared.config, x, full.cache(1), step, selected=selected)
    assert dataclasses.replace(shared.config, has_indexer=True) == full.config

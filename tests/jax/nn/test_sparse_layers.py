"""The nnx modules: loaded from a checkpoint's files by their Hugging Face names, the same as the functional forms."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from safetensors.numpy import save_file

import tsmla_jax
from tests.jax.nn import hf_layers
from tsmla_jax.nn import Step, V4Attention, V32Attention, v4, v32
from tsmla_jax.nn.products import norm_rope, triton

LENGTH = 40
ARGUMENTS = (jnp.arange(5, dtype=jnp.int32)[None], jnp.asarray([LENGTH]), jnp.asarray([0, LENGTH]), LENGTH)


@pytest.mark.parametrize(("name", "module"), [("v3.2", V32Attention), ("csa", V4Attention)])
def test_from_a_checkpoint(name: str, module: Any, tmp_path: Path) -> None:
    case = hf_layers.case(name)
    prefix = f"model.layers.{case.layer}.self_attn."
    tensors = {prefix + key: np.ascontiguousarray(x) for key, x in case.tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(case.fields, default=str))
    layer = module.from_hf(tmp_path, case.layer)
    assert layer.config == case.config
    run = nnx.jit(lambda layer, x, cache: layer(x, cache, case.step(*ARGUMENTS))[0])
    y = run(layer, case.x[0, :LENGTH], case.cache(5))
    np.testing.assert_allclose(y, case.y[0, :LENGTH], rtol=1e-5, atol=1e-5)

    def fp8_values(**scales: float) -> int:
        traced = jax.make_jaxpr(lambda x, cache: layer(x, cache, case.step(*ARGUMENTS), **scales)[0])
        return str(traced(case.x[0, :LENGTH], case.cache(5))).count("f8_e4m3fn[")

    assert fp8_values() == 0 < fp8_values(q_scale=0.5)


@pytest.mark.parametrize(("name", "devices"), [("v3.2", 2), ("sliding", 3)])
def test_heads_on_several_devices(name: str, devices: int) -> None:
    case = hf_layers.case(name)
    mesh = Mesh(np.asarray(jax.devices()[:devices]), "heads")

    def run(params: dict[str, jax.Array], x: jax.Array, cache: Any) -> jax.Array:
        y, _ = case.family.attend(params, case.config, x, cache, case.step(*ARGUMENTS))
        return jax.lax.psum(y, "heads")

    specs = (case.family.param_specs(case.config, "heads"), PartitionSpec(), PartitionSpec())
    sharded = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=PartitionSpec()))
    y = sharded(case.params, case.x[0, :LENGTH], case.cache(5))
    np.testing.assert_allclose(y, case.y[0, :LENGTH], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["v3.2", "sliding", "csa", "hca"])
@pytest.mark.sampled(2)
def test_folded_parameters_mean_the_same(name: str) -> None:
    case = hf_layers.case(name)
    step = case.step(*ARGUMENTS)

    @jax.jit
    def attend(params: dict[str, jax.Array], x: jax.Array, cache: Any) -> jax.Array:
        folded = case.family.functional.fold(params, case.config)
        y: jax.Array = case.family.attend(folded, case.config, x, cache, step)[0]
        return y

    y = attend(case.params, case.x[0, :LENGTH], case.cache(5))
    np.testing.assert_allclose(y, case.y[0, :LENGTH], rtol=1e-5, atol=1e-5)


def attended(case: Any, params: dict[str, jax.Array], dtype: str, *, fold: bool = False) -> tuple[jax.Array, Any]:
    """y and the caches of a V4 layer, x and the caches of this dtype."""
    params = v4.functional.fold(params, case.config) if fold else params
    cache = jax.tree.map(lambda leaf: leaf.astype(dtype) if leaf.ndim == 3 else leaf, case.cache(5))
    step, x = case.step(*ARGUMENTS), jnp.asarray(case.x[0, :LENGTH], dtype)
    return jax.jit(lambda params, x, cache: v4.attend(params, case.config, x, cache, step))(params, x, cache)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.sampled(2)
def test_compressors_of_16_bits_sum_in_f32(dtype: str, fold: bool) -> None:
    """Their states are those of f32 weights with the same values."""
    case = hf_layers.case("csa")
    params = {name: jnp.asarray(x, dtype) for name, x in case.params.items()}
    wide = {name: x.astype("float32") for name, x in params.items() if name.endswith(("r_kv_proj", "_gate_proj"))}
    assert len(wide) == 4
    found, wanted = (attended(case, params | given, dtype, fold=fold)[1] for given in ({}, wide))
    for name in ("compressor", "indexer_compressor"):
        got, want = (np.asarray(getattr(caches, name).kv_score) for caches in (found, wanted))
        assert np.abs(want).max() > 0.1
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_products_of_x_keep_their_own_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An indexer's weights of f32 don't widen the query."""
    case = hf_layers.case("csa")
    params = {name: jnp.asarray(x, "bfloat16") for name, x in case.params.items()}
    params["indexer_weights_proj"] = params["indexer_weights_proj"].astype("float32")
    sparse_mla, queries = tsmla_jax.sparse_mla, []

    def attend(q: jax.Array, *others: Any, **given: Any) -> Any:
        queries.append(q)
        return sparse_mla(q, *others, **given)

    monkeypatch.setattr(tsmla_jax, "sparse_mla", attend)
    y, _ = attended(case, params, "bfloat16")
    assert [q.dtype for q in queries] == [jnp.bfloat16] and y.dtype == jnp.bfloat16


@pytest.mark.parametrize("name", ["sliding", "csa", "hca"])
@pytest.mark.sampled(3)
def test_norms_and_ropes_by_their_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of folded parameters, by the kernel's interpreter."""
    case = hf_layers.case(name)
    params = {name: jnp.asarray(x, "bfloat16") for name, x in case.params.items()}
    wanted, _ = attended(case, params, "bfloat16")
    calls: list[Any] = []
    by_kernel = norm_rope.norm_rope_by_kernel
    monkeypatch.setattr(triton, "why_no_triton", list)
    monkeypatch.setattr(norm_rope, "norm_rope_by_kernel", lambda *given: calls.append(given) or by_kernel(*given))
    y, _ = attended(case, params, "bfloat16", fold=True)
    assert len(calls) == 4  # low, q, kv, and the result turned back
    y, wanted = (np.asarray(array, np.float32) for array in (y, wanted))
    assert np.linalg.norm(y - wanted) <= 2**-7 * np.linalg.norm(wanted)


def test_compressors_put_no_matrices_together() -> None:
    """A step of V4 would copy them: it reads each where it lies."""
    case = hf_layers.case("csa")
    arguments = (case.params, case.x[0, :LENGTH], case.cache(5), case.step(*ARGUMENTS))
    run = jax.jit(lambda params, x, cache, step: v4.attend(params, case.config, x, cache, step)[0])
    made = re.findall(r"stablehlo\.concatenate.* -> tensor<(\d+)x", run.lower(*arguments).as_text())
    assert made and str(case.config.hidden_size) not in made


def test_random_parameters_and_wrong_ones() -> None:
    config = hf_layers.case("csa").config
    layer = V4Attention(config, rngs=nnx.Rngs(0))
    assert {k: v.shape for k, v in layer.params.items()} == v4.param_shapes(config)
    v32_config = hf_layers.case("v3.2").config
    params = V32Attention(v32_config, rngs=nnx.Rngs(0)).params
    with pytest.raises(ValueError, match="needs params, or rngs"):
        V4Attention(config)
    with pytest.raises(ValueError, match="'w_uk' is missing"):
        V32Attention(v32_config, params={k: x for k, x in params.items() if k != "w_uk"})
    with pytest.raises(ValueError, match="'extra' is unknown"):
        V32Attention(v32_config, params={**params, "extra": jnp.zeros(1)})
    with pytest.raises(ValueError, match="'w_uk' must have shape"):
        V32Attention(v32_config, params={**params, "w_uk": jnp.zeros(1)})


def test_sparse_layers_name_a_step_of_another_kind() -> None:
    dense, sparse = hf_layers.case("v3.2"), hf_layers.case("hca")
    with pytest.raises(ValueError, match=r"step: got None; legal: a Step, which Step\.ragged makes"):
        v32.attend(dense.params, dense.config, dense.x[0], dense.cache(1), None)  # type: ignore[arg-type]
    step = Step.ragged(jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32), jnp.arange(2), total_tokens=1, page_size=8)
    with pytest.raises(ValueError, match=r"step: got a Step; legal: a V4Step, which v4\.make_step makes"):
        v4.attend(sparse.params, sparse.config, sparse.x[0, :1], sparse.cache(1), step)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "name", "given", "message"),
    [
        ("hca", "compressed", None, "cache.compressed: got None; legal: what v4.init_cache makes for a 'hca' layer"),
        (
            "hca",
            "indexer",
            "compressed",
            "cache.indexer: got a cache; legal: what v4.init_cache makes for a 'hca' layer",
        ),
        ("csa", "indexer_compressor", None, "cache.indexer_compressor: got None; legal: what v4.init_cache makes"),
    ],
)
def test_v4_layers_refuse_the_caches_of_another_kind(kind: str, name: str, given: str | None, message: str) -> None:
    """A window alone was attended to in silence."""
    case = hf_layers.case(kind)
    cache = case.cache(1)
    cache = cache._replace(**{name: None if given is None else getattr(cache, given)})
    with pytest.raises(ValueError, match=re.escape(message)):
        v4.attend(case.params, case.config, case.x[0, :1], cache, None)  # type: ignore[arg-type]

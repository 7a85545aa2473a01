"""The nnx modules: loaded from a checkpoint's files by their Hugging Face names, the same as the functional forms."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from tests.jax.nn import hf_layers
from tsmla_jax.nn import deepseek_v4, deepseek_v32
from tsmla_jax.nn.sparse_layers import V4Attention, V32Attention


def save(folder: Path, fields: dict, tensors: dict[str, np.ndarray], layer: int) -> None:
    from safetensors.numpy import save_file

    prefix = f"model.layers.{layer}.self_attn."
    kept = {prefix + name: np.ascontiguousarray(x) for name, x in tensors.items() if "rotary" not in name}
    save_file(kept, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(fields, default=str))


def test_v4_from_a_checkpoint(tmp_path: Path) -> None:
    fields, tensors, x, y = hf_layers.v4_layer("csa")
    save(tmp_path, fields, tensors, 1)
    layer = V4Attention.from_hf(tmp_path, 1)
    config = layer.config
    cache = deepseek_v4.init_v4_layer_cache(
        config,
        window_pages=5,
        compressed_pages=2,
        num_states=1,
        page_size=8,
        dtype=jnp.float32,
        indexer_dtype=jnp.float32,
    )

    @nnx.jit
    def run(layer: V4Attention, x: jax.Array, cache: deepseek_v4.V4Cache) -> jax.Array:
        step = deepseek_v4.make_step(
            config,
            seq_lens=jnp.asarray([40], jnp.int32),
            cu_seqlens_q=jnp.asarray([0, 40], jnp.int32),
            total_tokens=40,
            state_slots=jnp.zeros(1, jnp.int32),
            window_tables=jnp.arange(5, dtype=jnp.int32)[None],
            compressed_tables=jnp.arange(2, dtype=jnp.int32)[None],
            page_size=8,
        )
        return layer(x, cache, step, cos_sin=deepseek_v4.v4_rope_table(config, 40), page_size=8)[0]

    np.testing.assert_allclose(run(layer, x[0, :40], cache), y[0, :40], rtol=1e-5, atol=1e-5)


def test_v32_from_a_checkpoint(tmp_path: Path) -> None:
    fields, tensors, x, y = hf_layers.v32_layer()
    save(tmp_path, fields, tensors, 0)
    layer = V32Attention.from_hf(tmp_path, 0)
    cache = deepseek_v32.init_v32_cache(layer.config, 3, 16, kv_dtype=jnp.float32, indexer_dtype=jnp.float32)

    @nnx.jit
    def run(layer: V32Attention, x: jax.Array, cache: deepseek_v32.V32Cache) -> jax.Array:
        return layer(
            x,
            cache,
            block_tables=jnp.arange(3, dtype=jnp.int32)[None],
            seq_lens=jnp.asarray([40], jnp.int32),
            cu_seqlens_q=jnp.asarray([0, 40], jnp.int32),
            slot_mapping=jnp.arange(40, dtype=jnp.int32),
        )[0]

    np.testing.assert_allclose(run(layer, x[0, :40], cache), y[0, :40], rtol=1e-5, atol=1e-5)


def test_v4_heads_on_several_devices() -> None:
    fields, tensors, x, y = hf_layers.v4_layer("sliding")
    config = deepseek_v4.V4Config.from_hf(fields, 0)
    params = deepseek_v4.v4_params_from_hf(config, tensors)
    cache = deepseek_v4.init_v4_layer_cache(
        config, window_pages=5, compressed_pages=1, num_states=1, page_size=8, dtype=jnp.float32
    )
    table = deepseek_v4.v4_rope_table(config, 40)
    mesh = Mesh(np.asarray(jax.devices()[:3]), "heads")

    def run(params: dict[str, jax.Array], x: jax.Array, cache: deepseek_v4.V4Cache) -> jax.Array:
        step = deepseek_v4.make_step(
            config,
            seq_lens=jnp.asarray([40], jnp.int32),
            cu_seqlens_q=jnp.asarray([0, 40], jnp.int32),
            total_tokens=40,
            state_slots=jnp.zeros(1, jnp.int32),
            window_tables=jnp.arange(5, dtype=jnp.int32)[None],
            compressed_tables=jnp.zeros((1, 1), jnp.int32),
            page_size=8,
        )
        return jax.lax.psum(deepseek_v4.attend(params, config, x, cache, step, cos_sin=table, page_size=8)[0], "heads")

    specs = (deepseek_v4.v4_param_specs(config, "heads"), PartitionSpec(), PartitionSpec())
    sharded = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=PartitionSpec()))
    np.testing.assert_allclose(sharded(params, x[0, :40], cache), y[0, :40], rtol=1e-5, atol=1e-5)


def test_v32_heads_on_several_devices() -> None:
    fields, tensors, x, y = hf_layers.v32_layer()
    config = deepseek_v32.V32Config.from_hf(fields)
    params = deepseek_v32.v32_params_from_hf(config, tensors)
    cache = deepseek_v32.init_v32_cache(config, 3, 16, kv_dtype=jnp.float32, indexer_dtype=jnp.float32)
    mesh = Mesh(np.asarray(jax.devices()[:2]), "heads")

    def run(params: dict[str, jax.Array], x: jax.Array, cache: deepseek_v32.V32Cache) -> jax.Array:
        out, _ = deepseek_v32.attend(
            params,
            config,
            x,
            cache,
            block_tables=jnp.arange(3, dtype=jnp.int32)[None],
            seq_lens=jnp.asarray([40], jnp.int32),
            cu_seqlens_q=jnp.asarray([0, 40], jnp.int32),
            slot_mapping=jnp.arange(40, dtype=jnp.int32),
        )
        return jax.lax.psum(out, "heads")

    specs = (deepseek_v32.v32_param_specs(config, "heads"), PartitionSpec(), PartitionSpec())
    sharded = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=PartitionSpec()))
    np.testing.assert_allclose(sharded(params, x[0, :40], cache), y[0, :40], rtol=1e-5, atol=1e-5)


def test_random_parameters_and_wrong_ones() -> None:
    config = deepseek_v4.V4Config.from_hf(hf_layers.v4_layer("csa")[0], 1)
    layer = V4Attention(config, rngs=nnx.Rngs(0))
    assert {k: v.shape for k, v in layer.params.items()} == deepseek_v4.v4_param_shapes(config)
    v32_config = deepseek_v32.V32Config.from_hf(hf_layers.v32_layer()[0])
    params = V32Attention(v32_config, rngs=nnx.Rngs(0)).params
    with pytest.raises(ValueError, match="needs params, or rngs"):
        V4Attention(config)
    with pytest.raises(ValueError, match="'w_uk' is missing"):
        V32Attention(v32_config, params={k: x for k, x in params.items() if k != "w_uk"})
    with pytest.raises(ValueError, match="'extra' is unknown"):
        V32Attention(v32_config, params={**params, "extra": jnp.zeros(1)})
    with pytest.raises(ValueError, match="'w_uk' must have shape"):
        V32Attention(v32_config, params={**params, "w_uk": jnp.zeros(1)})

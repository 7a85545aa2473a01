"""SkyRL tx's own DeepSeek-V3 model with `examples/skyrl_tx`'s attention, against the same model with its own.

test_skyrl_tx.py runs this file in a process that can import tx.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "skyrl_tx"))
import benchmark
from latent_attention import LatentAttention, attend_to_cache, deepseekv3, install

TheirAttention = deepseekv3.DeepseekV3Attention
LENS, LEN, ADAPTERS = (9, 5, 12, 1), 12, 3
MASK = np.arange(LEN)[None] < np.array(LENS)[:, None]


@pytest.fixture(autouse=True)
def on_one_device() -> Iterator[None]:
    """tx makes its parameters under a mesh."""
    with jax.set_mesh(mesh()):
        yield


class Config:
    """The fields of tx's ModelConfig that the model reads."""

    vocab_size, hidden_size, intermediate_size, moe_intermediate_size = 32, 24, 16, 8
    num_hidden_layers, first_k_dense_replace, num_attention_heads = 2, 1, 4
    n_shared_experts, n_routed_experts, n_group, topk_group, num_experts_per_tok = 1, 4, 2, 1, 2
    routed_scaling_factor, norm_topk_prob, rms_norm_eps, attention_bias = 2.0, True, 1e-6, False
    q_lora_rank: int | None = 12
    kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim = 16, 8, 4, 6
    rope_theta = 10000.0
    rope_scaling = {"rope_type": "deepseek_yarn", "factor": 4.0, "mscale_all_dim": 1.0}  # noqa: RUF012
    rope_parameters = {"rope_theta": rope_theta}  # noqa: RUF012 (this and the next are the package skyrl's)
    mhc_expansion_rate = 1
    max_lora_adapters, max_lora_rank, shard_attention_heads = ADAPTERS, 4, True
    tie_word_embeddings, output_hidden_states, loss_chunk_size, gradient_checkpointing = False, False, 0, False


def mesh(fsdp: int = 1, tp: int = 1) -> Any:
    return jax.make_mesh((fsdp, 1, tp), ("fsdp", "ep", "tp"), axis_types=(AxisType.Auto,) * 3)


def with_adapters(module: nnx.Module) -> nnx.Module:
    """The module with LoRA adapters that change its results: they start from zero."""

    def changed(path: Any, x: jax.Array) -> jax.Array:
        key = jax.random.key(len(jax.tree_util.keystr(path)))
        return x + 0.2 * jax.random.normal(key, x.shape, x.dtype) if "lora_" in str(path) and x.ndim > 2 else x

    nnx.update(module, jax.tree_util.tree_map_with_path(changed, nnx.state(module, nnx.Param)))
    return module


def layer(cls: type[Any]) -> Any:
    return with_adapters(cls(Config(), dtype=jnp.float32, rngs=nnx.Rngs(0)))


def model(cls: type[Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(deepseekv3, "DeepseekV3Attention", cls)
    return with_adapters(deepseekv3.DeepseekV3ForCausalLM(Config(), dtype=jnp.float32, rngs=nnx.Rngs(0)))


def prompts() -> dict[str, Any]:
    """Of unequal lengths, padded behind, each with an adapter."""
    tokens = np.random.default_rng(0).integers(0, Config.vocab_size, MASK.shape)
    return {
        "input_ids": jnp.asarray(tokens),
        "attention_mask": jnp.asarray(MASK, jnp.int32),
        "adapter_indices": jnp.array([2, 0, 1, 2], jnp.int32),
    }


@pytest.mark.parametrize("q_lora_rank", [12, None])
def test_layer_and_its_gradients(q_lora_rank: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every parameter and of x, on the rows that hold tokens."""
    monkeypatch.setattr(Config, "q_lora_rank", q_lora_rank)
    x = jax.random.normal(jax.random.key(1), (*MASK.shape, Config.hidden_size))
    weight = jax.random.normal(jax.random.key(2), x.shape) * MASK[..., None]
    found = []
    for cls in (TheirAttention, LatentAttention):
        graph, params, rest = nnx.split(layer(cls), nnx.Param, ...)

        @jax.jit
        def run(params: Any, x: jax.Array, graph: Any = graph, rest: Any = rest) -> Any:
            def loss(params: Any, x: jax.Array) -> Any:
                y, _ = nnx.merge(graph, params, rest)(
                    x,
                    attention_mask=MASK,
                    positions=jnp.arange(LEN)[None],
                    adapter_indices=prompts()["adapter_indices"],
                )
                return (y * weight).sum(), y

            return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, x)

        (_, y), gradients = run(params, x)
        found.append((jnp.where(MASK[..., None], y, 0), jax.tree.map(jnp.asarray, gradients)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), *found)
    assert all(jnp.abs(x).sum() > 0 for x in jax.tree.leaves(found[1]))


def test_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    """tx's own generator: the same tokens and probabilities, greedy and sampled, and the latent cache."""
    sampling = [
        benchmark.SamplingParams(max_tokens=9, temperature=t, seed=i) for i, t in enumerate((0.0, 0.0, 0.7, 1.0))
    ]
    found = []
    for cls in (TheirAttention, LatentAttention):
        made = model(cls, monkeypatch)
        found.append(made.generate(**prompts(), sampling_params=sampling, prompt_logprobs=True))
    tokens = prompts()["input_ids"]
    cache = jax.eval_shape(lambda: made(tokens, attention_mask=MASK).kv_cache.pad_to_length(32))
    theirs, mine = found
    assert mine.generated_ids == theirs.generated_ids and len(mine.generated_ids[0]) == 9
    np.testing.assert_allclose(mine.logprobs, theirs.logprobs, rtol=1e-4, atol=1e-4)
    for a, b in zip(mine.prompt_logprobs, theirs.prompt_logprobs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    width = Config.kv_lora_rank + Config.qk_rope_head_dim
    assert [x.shape for x in cache.keys] == [(4, 32, 1, width)] * 2
    assert [x.size for x in cache.values] == [0, 0]


def test_a_layer_computes_in_its_parameters_dtype() -> None:
    """The kernels take 16 bits, and tx's hidden states are f32 behind its experts."""
    made, x = LatentAttention(Config(), dtype=jnp.bfloat16, rngs=nnx.Rngs(0)), jnp.zeros((4, LEN, Config.hidden_size))
    positions = jnp.arange(LEN)[None]

    def run(x: jax.Array, **given: Any) -> Any:
        return made(x, positions=positions[:, : x.shape[1]], attention_mask=MASK, **given)

    y, (cache, _) = jax.eval_shape(run, x)
    assert (y.dtype, cache.dtype) == (jnp.bfloat16, jnp.bfloat16)
    y, (cache, _) = jax.eval_shape(lambda: run(x[:, :1], kv_cache=(jnp.zeros(cache.shape, cache.dtype), None)))
    assert (y.dtype, cache.dtype) == (jnp.bfloat16, jnp.bfloat16)


def test_over_a_mesh() -> None:
    """Sequences over fsdp, heads over tp: prompts, then a token over the cache; equal to one device's."""
    x = jax.random.normal(jax.random.key(1), (*MASK.shape, Config.hidden_size))
    x, adapters = np.asarray(x), np.asarray(prompts()["adapter_indices"])

    def run(graph: Any, state: Any, x: jax.Array, batch: int) -> Any:
        attention = nnx.merge(graph, state)
        x, mask, indices = jnp.asarray(x[:batch]), jnp.asarray(MASK[:batch]), jnp.asarray(adapters[:batch])
        y, (keys, values) = attention(x, attention_mask=mask, positions=jnp.arange(LEN)[None], adapter_indices=indices)
        cache = tuple(jnp.pad(c, ((0, 0), (0, 32 - LEN), (0, 0), (0, 0))) for c in (keys, values))
        after, (keys, _) = attention(
            x[:, :1],
            attention_mask=mask,
            positions=mask.sum(axis=1)[:, None],
            adapter_indices=indices,
            kv_cache=cache,
        )
        return jnp.where(mask[..., None], y, 0), after

    alone = jax.device_get(jax.jit(run, static_argnums=3)(*nnx.split(layer(LatentAttention)), x, 4))
    with jax.set_mesh(mesh(fsdp=2, tp=2)):
        state = nnx.split(layer(LatentAttention))
        for batch in (4, 3):  # 3 sequences do not divide over fsdp
            got = jax.jit(run, static_argnums=3)(*state, x, batch)
            jax.tree.map(lambda a, b, n=batch: np.testing.assert_allclose(a, b[:n], rtol=1e-4, atol=1e-5), got, alone)


@pytest.mark.parametrize("slots", [128, 96, 48, 40])
def test_pages_of_a_dense_cache(slots: int) -> None:
    """What is written stands where tx's own update puts it, and the cut into pages changes no result."""
    rng = np.random.default_rng(0)
    cache, q, latent, k_rope = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((2, slots, 1, 20), (2, 1, 4, 20), (2, 1, 16), (2, 1, 4))
    )
    seq_lens = jnp.array([slots, 7], jnp.int32)
    out, new = attend_to_cache(q, cache, latent, k_rope, seq_lens, softmax_scale=0.2)
    expected = np.asarray(cache).copy()
    expected[[0, 1], seq_lens - 1, 0] = np.concatenate([latent, k_rope], axis=-1)[:, 0]
    np.testing.assert_array_equal(new, expected)
    keys = expected[:, :, 0]
    scores = np.where(np.arange(slots) < seq_lens[:, None, None], np.einsum("bhd,bsd->bhs", q[:, 0], keys) * 0.2, -1e30)
    weights = np.asarray(jax.nn.softmax(scores, axis=-1))
    np.testing.assert_allclose(out[:, 0], np.einsum("bhs,bsd->bhd", weights, keys[..., :16]), rtol=1e-5, atol=1e-5)


def test_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LatentAttention, "implementation", None)
    monkeypatch.setattr(deepseekv3, "DeepseekV3Attention", TheirAttention)
    install("reference")
    made = deepseekv3.DeepseekV3ForCausalLM(Config(), dtype=jnp.float32, rngs=nnx.Rngs(0))
    for each in made.model.layers:
        assert type(each.self_attn) is LatentAttention and each.self_attn.implementation == "reference"


@pytest.mark.parametrize("task", benchmark.TASKS)
def test_benchmark(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a size for a CPU; on a GPU it tells memory too."""
    monkeypatch.setattr(deepseekv3, "DeepseekV3Attention", TheirAttention)
    load = benchmark.Load(batch=2, prompt=8, new=2, train=8)
    found = benchmark.measure("tsmla", task, benchmark.SHAPES["toy"], load)
    assert found["tokens_per_second"] > 0 and found["cache_elements"] == 16 + 4

"""The Flax nnx layer from Hugging Face weights: prefill a prompt, then decode over a paged cache.

    python examples/flax_nnx_layer.py                     # writes a small checkpoint of its own first
    python examples/flax_nnx_layer.py CHECKPOINT_DIR 0    # layer 0 of a DeepSeek-V2, V3, R1 or Kimi-K2 checkpoint

Needs `pip install '.[flax,hf]'` in a clone.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

import tsmla_jax
from tsmla_jax.nn import MLAConfig, MLAttention, Step, hf_attention_shapes

PAGE_SIZE = 16


def write_small_checkpoint(folder: Path) -> None:
    """One attention layer of DeepSeek-V3's shape in small, with random weights, as Hugging Face lays it out."""
    fields = {
        "model_type": "deepseek_v3",
        "hidden_size": 128,
        "num_attention_heads": 4,
        "q_lora_rank": 48,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "original_max_position_embeddings": 4096,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    }
    rng = np.random.default_rng(0)
    tensors = {}
    for name, shape in hf_attention_shapes(MLAConfig.from_hf(fields)).items():
        values = np.ones(shape) if len(shape) == 1 else rng.normal(size=shape) * shape[1] ** -0.5
        tensors[f"model.layers.0.self_attn.{name}"] = values.astype(np.float32)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(tensors, folder / "model.safetensors")


@nnx.jit(donate_argnames=("kv_cache",))
def decode_step(
    layer: MLAttention, x: jax.Array, kv_cache: jax.Array, block_tables: jax.Array, seq_lens: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One token for each request: x [B, 1, E]; seq_lens includes it."""
    return layer.decode(x, kv_cache, Step.dense(block_tables, seq_lens, page_size=PAGE_SIZE))


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint_dir", nargs="?", help="the checkpoint's folder; by default a small one is written")
    parser.add_argument("layer", nargs="?", type=int, default=0, help="the layer's index")
    given = parser.parse_args(arguments)
    if given.checkpoint_dir is not None:
        layer = MLAttention.from_hf(given.checkpoint_dir, given.layer, dtype=jnp.float32)
    else:
        with tempfile.TemporaryDirectory() as folder:
            write_small_checkpoint(Path(folder))
            layer = MLAttention.from_hf(folder, 0)
    config = layer.config
    print(f"{config.num_attention_heads} heads, softmax scale {config.softmax_scale:.7f}")

    prompt_len, new = 21, 4
    x = jax.random.normal(jax.random.key(1), (1, prompt_len + new, config.hidden_size))
    expected = nnx.jit(MLAttention.__call__)(layer, x)  # causal attention over the whole sequence, without a cache

    block_tables = jnp.asarray([[2, 0]], jnp.int32)
    cu_seqlens = jnp.asarray([0, prompt_len], jnp.int32)
    prefill = nnx.jit(MLAttention.prefill, static_argnames=("max_q_len",))
    _, latent, k_rope = prefill(layer, x[0, :prompt_len], cu_seqlens_q=cu_seqlens, max_q_len=prompt_len)
    kv_cache = jnp.zeros((3, PAGE_SIZE, config.cache_dim))
    prompt = Step.dense(block_tables, jnp.asarray([prompt_len]), new_tokens=prompt_len, page_size=PAGE_SIZE)
    kv_cache = tsmla_jax.write_kv_cache(kv_cache, latent, k_rope, prompt.slot_mapping[0])

    worst = 0.0
    for i in range(prompt_len, prompt_len + new):
        seq_lens = jnp.asarray([i + 1], jnp.int32)
        y, kv_cache = decode_step(layer, x[:, i : i + 1], kv_cache, block_tables, seq_lens)
        worst = max(worst, float(jnp.abs(y[:, 0] - expected[:, i]).max()))
    print(f"decoded {new} tokens; largest difference from the whole sequence at once: {worst:.1e}")
    if worst > 1e-3:
        raise SystemExit("decode and prefill disagree")


if __name__ == "__main__":
    main(sys.argv[1:])

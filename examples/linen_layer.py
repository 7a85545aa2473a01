"""MLA inside a Flax linen model, through Flax's own bridge: `flax.nnx.bridge.ToLinen`.

    python examples/linen_layer.py

A linen block wraps `MLAttention`, is trained for some steps with plain jax, and then decodes through the same variables
by naming another method of the layer. Needs `pip install '.[flax]'` in a clone.
"""

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.nnx import bridge

import tsmla_jax
from tsmla_jax.nn import MLAConfig, MLAttention, Step

CONFIG = MLAConfig(
    hidden_size=64,
    num_attention_heads=4,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
)
LENGTH = 12


class Block(nn.Module):
    """Norm, attention, residual: linen all around, MLA inside."""

    config: MLAConfig

    def setup(self) -> None:
        self.norm = nn.RMSNorm()
        self.attention = bridge.ToLinen(MLAttention, args=(self.config,))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.attention(self.norm(x))

    def prefill(self, x: jax.Array, cu_seqlens: jax.Array, max_q_len: int) -> tuple[jax.Array, jax.Array]:
        """Latents and rope keys of x [T, E], for the cache."""
        _, latent, k_rope = self.attention(
            self.norm(x), cu_seqlens_q=cu_seqlens, max_q_len=max_q_len, nnx_method="prefill"
        )
        return latent, k_rope

    def decode(self, x: jax.Array, kv_cache: jax.Array, step: Step) -> tuple[jax.Array, jax.Array]:
        """One step over the paged cache: x [B, 1, E]."""
        y, kv_cache = self.attention(self.norm(x), kv_cache, step, nnx_method="decode")
        return x + y, kv_cache


def main() -> None:
    block = Block(CONFIG)
    x = jax.random.normal(jax.random.key(1), (2, LENGTH, CONFIG.hidden_size))
    target = jnp.roll(x, 1, axis=1).at[:, 0].set(0.0)  # the token before: attention has to learn to look back
    variables = jax.jit(block.init)(jax.random.key(0), x)
    print("linen parameters:", ", ".join(sorted(variables["params"]["attention"])))

    @jax.jit
    def train_step(params: Any) -> tuple[Any, jax.Array]:
        def loss(params: Any) -> jax.Array:
            return jnp.mean((block.apply({"params": params}, x) - target) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, gradients), value

    params, first = train_step(variables["params"])
    for _ in range(30):
        params, last = train_step(params)
    print(f"loss {first:.3f} -> {last:.3f} in 31 steps")
    variables = {"params": params}

    # The last token of each request again, now absorbed and over the cache.
    cached = LENGTH - 1
    cu_seqlens = jnp.arange(3, dtype=jnp.int32) * cached
    prefill = jax.jit(functools.partial(block.apply, method=Block.prefill), static_argnames=("max_q_len",))
    prompt = x[:, :cached].reshape(-1, CONFIG.hidden_size)
    latent, k_rope = prefill(variables, prompt, cu_seqlens, max_q_len=cached)
    block_tables = jnp.asarray([[1], [0]], jnp.int32)
    prompts = Step.dense(block_tables, jnp.full(2, cached, jnp.int32), new_tokens=cached, page_size=16)
    kv_cache = jnp.zeros((2, 16, CONFIG.cache_dim))
    kv_cache = tsmla_jax.write_kv_cache(kv_cache, latent, k_rope, prompts.slot_mapping.reshape(-1))
    decode = jax.jit(functools.partial(block.apply, method=Block.decode))
    step = Step.dense(block_tables, jnp.full(2, LENGTH, jnp.int32), page_size=16)
    y, _ = decode(variables, x[:, cached:], kv_cache, step)
    difference = float(jnp.abs(y - jax.jit(block.apply)(variables, x)[:, cached:]).max())
    print(f"decode over the cache differs from the whole sequence by {difference:.1e}")
    if not (last < 0.9 * first and difference < 1e-4):
        raise SystemExit("the linen block did not train, or decode and prefill disagree")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()

"""Train a small MLA transformer with optax, and compare its losses step by step with the reference implementation.

    python examples/train_transformer.py [--steps 50] [--implementation cute]

Requests of different lengths are packed one after the other, without padding between them. Each one repeats a random
pattern of tokens, which the model learns to continue: attention has to look one pattern back. On a GPU the products are
in bfloat16 and the parameters in float32; on Hopper both passes of attention are kernels. Needs
`pip install '.[flax]'` in a clone, which brings optax.
"""

import argparse
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import tsmla_jax
from tsmla_jax.nn import MLAConfig, MLAttention

VOCABULARY, PATTERN, LAYERS = 32, 2, 2
TOKENS, REQUESTS, MAX_LEN = 512, 8, 96

CONFIG = MLAConfig(  # head dims of DeepSeek, for which there are kernels
    hidden_size=128,
    num_attention_heads=2,
    kv_lora_rank=64,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
)


class Block(nnx.Module):
    """Attention and a feed-forward layer, each behind a norm and beside a residual."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        width = CONFIG.hidden_size
        self.attention_norm, self.mlp_norm = nnx.RMSNorm(width, rngs=rngs), nnx.RMSNorm(width, rngs=rngs)
        self.attention = MLAttention(CONFIG, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array, cu_seqlens: jax.Array, implementation: str | None) -> jax.Array:
        """x [T, E], requests packed one after the other."""
        x = x + self.attention(
            self.attention_norm(x), cu_seqlens_q=cu_seqlens, max_q_len=MAX_LEN, implementation=implementation
        )
        return x + self.down(nnx.silu(self.up(self.mlp_norm(x))))


class Transformer(nnx.Module):
    """Tokens [T] to logits [T, vocabulary]."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embedding = nnx.Embed(VOCABULARY, CONFIG.hidden_size, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(CONFIG.hidden_size, rngs=rngs)
        self.head = nnx.Linear(CONFIG.hidden_size, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array, cu_seqlens: jax.Array, implementation: str | None) -> jax.Array:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cu_seqlens, implementation)
        return self.head(self.norm(x))


def batches(steps: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Tokens [T] of packed requests, and where each request starts [B + 1]. Tokens after the last request belong to
    none."""
    rng = np.random.default_rng(0)
    for _ in range(steps):
        lens = rng.integers(PATTERN + 1, TOKENS // REQUESTS, REQUESTS)
        lens[0] = rng.integers(TOKENS // REQUESTS, MAX_LEN)
        tokens = np.zeros(TOKENS, np.int32)
        cu_seqlens = np.concatenate([[0], np.cumsum(lens)]).clip(max=TOKENS).astype(np.int32)
        for first, stop in itertools.pairwise(cu_seqlens):
            tokens[first:stop] = np.resize(rng.integers(0, VOCABULARY, PATTERN), stop - first)
        yield tokens, cu_seqlens


def loss_of(logits: jax.Array, tokens: jax.Array, cu_seqlens: jax.Array) -> jax.Array:
    """The mean cross entropy of the tokens that follow a whole pattern of the same request."""
    row = jnp.arange(TOKENS - 1)
    start = cu_seqlens[jnp.searchsorted(cu_seqlens, row, side="right") - 1]
    counts = (row - start >= PATTERN - 1) & ~jnp.isin(row + 1, cu_seqlens) & (row + 1 < cu_seqlens[-1])
    each = optax.softmax_cross_entropy_with_integer_labels(logits[:-1].astype(jnp.float32), tokens[1:])
    return jnp.where(counts, each, 0).sum() / counts.sum()


def train(steps: int, implementation: str | None, dtype: Any) -> list[float]:
    """The loss of every step. The products are in `dtype`, parameters and optimizer in float32."""
    graph, params = nnx.split(Transformer(nnx.Rngs(0)))
    optimizer = optax.adam(3e-3)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, tokens: jax.Array, cu_seqlens: jax.Array) -> tuple[Any, Any, jax.Array]:
        def loss(params: Any) -> jax.Array:
            model = nnx.merge(graph, jax.tree.map(lambda x: x.astype(dtype), params))
            return loss_of(model(tokens, cu_seqlens, implementation), tokens, cu_seqlens)

        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, value

    state, losses = optimizer.init(params), []
    for tokens, cu_seqlens in batches(steps):
        params, state, value = step(params, state, tokens, cu_seqlens)
        losses.append(float(value))
    return losses


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="train a small MLA transformer")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--implementation", default=None, help="of mla_prefill_kv; by default the best that can run")
    options = parser.parse_args(arguments)
    on_gpu = jax.default_backend() == "gpu"
    dtype = jnp.bfloat16 if on_gpu else jnp.float32
    print(f"{jax.devices()[0].device_kind}, {jnp.dtype(dtype).name}, {chosen(dtype)}")
    losses = train(options.steps, options.implementation, dtype)
    wanted = train(options.steps, "reference", dtype)
    apart = [abs(a - b) / wanted[0] for a, b in zip(losses, wanted, strict=True)]
    for i in sorted({*range(0, options.steps, max(1, options.steps // 8)), options.steps - 1}):
        print(f"step {i:3d}  loss {losses[i]:.4f}  reference {wanted[i]:.4f}  apart {apart[i]:.1e}")
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; at most {max(apart):.1e} of the first loss from the reference's")
    if not (losses[-1] < 0.5 * losses[0] and max(apart) < (0.05 if on_gpu else 1e-3)):
        raise SystemExit("the model did not train, or not as the reference does")


def chosen(dtype: Any) -> str:
    """Which implementation None stands for here, and what `explain` notes of it."""
    heads, width = CONFIG.num_attention_heads, CONFIG.qk_nope_head_dim + CONFIG.v_head_dim
    q = jax.ShapeDtypeStruct((TOKENS, heads, CONFIG.qk_nope_head_dim + CONFIG.qk_rope_head_dim), dtype)
    kv = jax.ShapeDtypeStruct((TOKENS, heads, width), dtype)
    k_rope = jax.ShapeDtypeStruct((TOKENS, CONFIG.qk_rope_head_dim), dtype)
    offsets = jax.ShapeDtypeStruct((REQUESTS + 1,), jnp.int32)
    found = tsmla_jax.explain(
        "mla_prefill_kv",
        q,
        kv,
        k_rope,
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        max_q_len=MAX_LEN,
        max_kv_len=MAX_LEN,
        softmax_scale=CONFIG.softmax_scale,
    )
    return "; ".join([f"implementation {found.chosen}", *found.notes.get(found.chosen, ())])


if __name__ == "__main__":
    main()

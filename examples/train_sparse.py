"""Train a small DeepSeek-V3.2 transformer: a dense warm-up of its indexer, then sparse attention with both losses.

    python examples/train_sparse.py [--warm_up 60] [--steps 200] [--implementation cute]

In the warm-up every token attends to its whole text, and `indexer_loss` over all keys teaches the indexer what the
attention looks at. Then each token attends to the keys that the indexer chooses, the model is trained by its own loss
and the indexer by `indexer_loss` over these keys. The model's gradients and the indexer's never meet, as in V3.2's
report; here both train from the first step on, as there is no model yet.

Texts of different lengths are packed one after the other. Each repeats a random pattern of tokens, which the model
learns to continue: the indexer has to choose the few keys that lie whole patterns back. The losses are compared step by
step with those of the reference implementation. On a GPU the products are in bfloat16 and the parameters in float32.
Needs `pip install '.[flax]'` in a clone, which brings optax.
"""

import argparse
import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from tsmla_jax.nn import MLAConfig, V32Attention, V32Config

VOCABULARY, PATTERN, LAYERS = 32, 2, 2
TOKENS, TEXTS, MAX_LEN = 256, 6, 64

CONFIG = V32Config(
    MLAConfig(  # latent and head dims of DeepSeek, for which there are kernels
        hidden_size=128,
        num_attention_heads=4,
        q_lora_rank=64,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    ),
    index_n_heads=4,
    index_head_dim=64,
    index_topk=16,
)


class Block(nnx.Module):
    """Sparse attention and a feed-forward layer, each behind a norm and beside a residual."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        width = CONFIG.mla.hidden_size
        self.attention_norm, self.mlp_norm = nnx.RMSNorm(width, rngs=rngs), nnx.RMSNorm(width, rngs=rngs)
        self.attention = V32Attention(CONFIG, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array, cu_seqlens: jax.Array, **options: Any) -> tuple[jax.Array, jax.Array]:
        """x [T, E], texts packed one after the other, and the indexer's loss of each token [T]."""
        found = self.attention.prefill(self.attention_norm(x), cu_seqlens_q=cu_seqlens, max_q_len=MAX_LEN, **options)
        x = x + found.y
        return x + self.down(nnx.silu(self.up(self.mlp_norm(x)))), found.index_loss


class Transformer(nnx.Module):
    """Tokens [T] to logits [T, vocabulary] and the layers' mean index loss [T]."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embedding = nnx.Embed(VOCABULARY, CONFIG.mla.hidden_size, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(CONFIG.mla.hidden_size, rngs=rngs)
        self.head = nnx.Linear(CONFIG.mla.hidden_size, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array, cu_seqlens: jax.Array, **options: Any) -> tuple[jax.Array, jax.Array]:
        x, index_losses = self.embedding(tokens), []
        for block in self.blocks:
            x, index_loss = block(x, cu_seqlens, **options)
            index_losses.append(index_loss)
        return self.head(self.norm(x)), jnp.stack(index_losses).mean(0)


def batches(steps: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Tokens [T] of packed texts, and where each text starts [B + 1]. Tokens after the last text belong to none."""
    rng = np.random.default_rng(0)
    for _ in range(steps):
        lens = rng.integers(PATTERN + 1, TOKENS // TEXTS, TEXTS)
        lens[0] = rng.integers(TOKENS // TEXTS, MAX_LEN)
        tokens = np.zeros(TOKENS, np.int32)
        cu_seqlens = np.concatenate([[0], np.cumsum(lens)]).clip(max=TOKENS).astype(np.int32)
        for first, stop in itertools.pairwise(cu_seqlens):
            tokens[first:stop] = np.resize(rng.integers(0, VOCABULARY, PATTERN), stop - first)
        yield tokens, cu_seqlens


class Losses(NamedTuple):
    """The losses of one step."""

    model: jax.Array
    indexer: jax.Array


def losses_of(logits: jax.Array, index_loss: jax.Array, tokens: jax.Array, cu_seqlens: jax.Array) -> Losses:
    """The mean cross entropy of the tokens that follow a whole pattern of the same text, and the mean index loss."""
    row = jnp.arange(TOKENS - 1)
    start = cu_seqlens[jnp.searchsorted(cu_seqlens, row, side="right") - 1]
    counts = (row - start >= PATTERN - 1) & ~jnp.isin(row + 1, cu_seqlens) & (row + 1 < cu_seqlens[-1])
    each = optax.softmax_cross_entropy_with_integer_labels(logits[:-1].astype(jnp.float32), tokens[1:])
    return Losses(jnp.where(counts, each, 0).sum() / counts.sum(), index_loss.sum() / cu_seqlens[-1])


def train(steps: int, warm_up: int, implementation: str | None, dtype: Any) -> list[Losses]:
    """The losses of every step, the first warm_up of them dense. The products are in `dtype`, parameters and optimizer
    in float32."""
    graph, params = nnx.split(Transformer(nnx.Rngs(0)))
    optimizer = optax.adam(3e-3)

    @functools.partial(jax.jit, donate_argnums=(0, 1), static_argnames="dense")
    def step(params: Any, state: Any, tokens: jax.Array, cu_seqlens: jax.Array, dense: bool) -> tuple[Any, Any, Losses]:
        def loss(params: Any) -> tuple[jax.Array, Losses]:
            model = nnx.merge(graph, jax.tree.map(lambda x: x.astype(dtype), params))
            found = model(tokens, cu_seqlens, dense=dense, implementation=implementation)
            losses = losses_of(*found, tokens, cu_seqlens)
            return losses.model + losses.indexer, losses

        gradients, losses = jax.grad(loss, has_aux=True)(params)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, losses

    state, losses = optimizer.init(params), []
    for i, (tokens, cu_seqlens) in enumerate(batches(steps)):
        params, state, found = step(params, state, tokens, cu_seqlens, dense=i < warm_up)
        losses.append(found)
    return [Losses(*map(float, each)) for each in losses]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="train a small DeepSeek-V3.2 transformer")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--warm_up", type=int, default=60, help="dense steps before the sparse ones")
    parser.add_argument("--implementation", default=None, help="of the operations; by default the best that can run")
    options = parser.parse_args(arguments)
    on_gpu = jax.default_backend() == "gpu"
    dtype = jnp.bfloat16 if on_gpu else jnp.float32
    print(f"{jax.devices()[0].device_kind}, {jnp.dtype(dtype).name}, {options.warm_up} dense steps first")
    losses = train(options.steps, options.warm_up, options.implementation, dtype)
    wanted = train(options.steps, options.warm_up, "reference", dtype)
    apart = [max(abs(a - b) for a, b in zip(x, y, strict=True)) for x, y in zip(losses, wanted, strict=True)]
    shown = sorted({*range(0, options.steps, max(1, options.steps // 10)), options.warm_up, options.steps - 1})
    for i in (i for i in shown if i < options.steps):
        print(
            f"step {i:3d} {'dense ' if i < options.warm_up else 'sparse'}  loss {losses[i].model:.4f}, indexer"
            f" {losses[i].indexer:.4f}  reference {wanted[i].model:.4f}, {wanted[i].indexer:.4f}  apart {apart[i]:.1e}"
        )
    first, last = losses[0], losses[-1]
    # Rounding changes what later steps choose, so that losses part after some steps, and both go down.
    worst = max(apart[: 10 if on_gpu else 40]) / wanted[0].model
    ends = [float(np.mean([each.model for each in of[-5:]])) for of in (losses, wanted)]
    print(
        f"loss {first.model:.3f} -> {last.model:.3f}, indexer {first.indexer:.3f} -> {last.indexer:.3f}; at most"
        f" {worst:.1e} of the first loss from the reference's"
    )
    if not (max(ends) < 0.5 * first.model and worst < 0.02):
        raise SystemExit("the model did not train, or not as the reference does")


if __name__ == "__main__":
    main()

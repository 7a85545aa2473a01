"""A jit decode loop with only the functional ops: one MLA layer, a paged cache, three requests of different lengths.

    python examples/decode_loop.py

No Flax and no checkpoint: parameters are a plain dict, the cache is one array, and a step is a pure function whose
cache is donated, so it is updated in place. Instead of a model's head, each new token's input is made from the output
of the one before. The last lines check the loop against one expanded prefill over all the tokens.
"""

import argparse
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

import tsmla_jax
from tsmla_jax.nn import MLAConfig, Step, functional, init_params

PAGE_SIZE = 16
STEPS = 12


def next_input(y: jax.Array) -> jax.Array:
    """Stands for the rest of a model: from a layer's output to the next token's input, of unit size."""
    return y / jnp.sqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-6)


@functools.partial(jax.jit, static_argnames=("config",), donate_argnames=("kv_cache",))
def decode_loop(
    params: functional.Params,
    config: MLAConfig,
    x: jax.Array,
    kv_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """STEPS tokens for each request in one program. x [B, E] is the first; inputs and outputs are [STEPS, B, E]."""

    def step(
        carry: tuple[jax.Array, jax.Array, jax.Array], _: None
    ) -> tuple[tuple[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
        x, kv_cache, seq_lens = carry
        seq_lens = seq_lens + 1  # the new token included
        y, kv_cache = functional.decode(
            params, config, x[:, None], kv_cache, Step.dense(block_tables, seq_lens, page_size=PAGE_SIZE)
        )
        return (next_input(y[:, 0]), kv_cache, seq_lens), (x, y[:, 0])

    (_, kv_cache, _), (inputs, outputs) = jax.lax.scan(step, (x, kv_cache, seq_lens), length=STEPS)
    return inputs, outputs, kv_cache


def main() -> None:
    config = MLAConfig(hidden_size=256, num_attention_heads=8, kv_lora_rank=64, qk_rope_head_dim=16, q_lora_rank=96)
    params = init_params(jax.random.key(0), config)
    lens = np.asarray([37, 5, 20], np.int32)
    prompts = jax.random.normal(jax.random.key(1), (int(lens.sum()), config.hidden_size))
    cu_seqlens = jnp.asarray(np.cumsum([0, *lens]), jnp.int32)

    # Pages for the prompt and the tokens to come, dealt out of one pool.
    pages = -(-(lens + STEPS) // PAGE_SIZE)
    block_tables = np.zeros((len(lens), pages.max()), np.int32)
    for request, count in enumerate(pages):
        block_tables[request, :count] = pages[:request].sum() + np.arange(count)
    kv_cache = jnp.zeros((int(pages.sum()), PAGE_SIZE, config.cache_dim))

    # The prompts: expanded attention, and their latents into the cache.
    prefill = jax.jit(functools.partial(functional.prefill, config=config), static_argnames=("max_q_len",))
    y, latent, k_rope = prefill(params, x=prompts, cu_seqlens_q=cu_seqlens, max_q_len=int(lens.max()))
    tables, seq_lens = jnp.asarray(block_tables), jnp.asarray(lens)
    prompt_step = Step.ragged(tables, seq_lens, cu_seqlens, total_tokens=len(prompts), page_size=PAGE_SIZE)
    write = jax.jit(tsmla_jax.write_kv_cache, donate_argnames=("kv_cache",))
    kv_cache = write(kv_cache, latent, k_rope, prompt_step.slot_mapping)

    first = next_input(y[cu_seqlens[1:] - 1])
    inputs, outputs, kv_cache = decode_loop(params, config, first, kv_cache, tables, seq_lens)

    # The same tokens in one pass.
    parts = [(prompts[a:b], inputs[:, r]) for r, (a, b) in enumerate(itertools.pairwise(cu_seqlens.tolist()))]
    whole = jnp.concatenate([tokens for pair in parts for tokens in pair])
    ends = cu_seqlens + STEPS * jnp.arange(len(lens) + 1, dtype=jnp.int32)
    expected, _, _ = prefill(params, x=whole, cu_seqlens_q=ends, max_q_len=int(lens.max()) + STEPS)
    worst = max(
        float(jnp.abs(expected[end - STEPS : end] - outputs[:, request]).max())
        for request, end in enumerate(ends[1:].tolist())
    )
    print(f"{STEPS} tokens for {len(lens)} requests, {kv_cache.nbytes} bytes of cache in {kv_cache.shape[0]} pages")
    print(f"largest difference from one expanded prefill: {worst:.1e}")
    if worst > 1e-4:
        raise SystemExit("the decode loop and the prefill disagree")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()

"""The kernels of few tokens on a Hopper GPU, against the same computations in XLA."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tsmla_jax import sparse
from tsmla_jax.generate import few_tokens as few_token_mlp
from tsmla_jax.generate import moe
from tsmla_jax.generate.config import MoEConfig
from tsmla_jax.nn import MLAConfig, Step, few_tokens, functional, init_params
from tsmla_jax.nn.mla import few_tokens as mla_few_tokens
from tsmla_jax.nn.norms import Norm, rms_norm
from tsmla_jax.nn.products.block_scaled import BlockScaled
from tsmla_jax.nn.v32.projections import normed_keys
from tsmla_jax.ops.selected import layouts
from tsmla_kernels.contract.layouts import V4_PACKED

pytestmark = pytest.mark.gpu


def random(seed: int, *shape: int, dtype: Any = jnp.bfloat16, scale: float = 1.0) -> jax.Array:
    return (scale * jax.random.normal(jax.random.key(seed), shape)).astype(dtype)


def weight(seed: int, narrow: bool, *shape: int) -> jax.Array | BlockScaled:
    if not narrow:
        return random(seed, *shape, scale=0.05)
    blocks = (*shape[:-2], *(-(-size // 128) for size in shape[-2:]))
    return BlockScaled(random(seed, *shape, dtype=jnp.float8_e4m3fn), jnp.full(blocks, 0.05, jnp.float32))


def close(got: jax.Array, want: jax.Array, tolerance: float = 1e-2) -> None:
    found, right = (np.asarray(x, np.float64) for x in (got, want))
    assert np.linalg.norm(found - right) <= tolerance * np.linalg.norm(right)


@pytest.mark.parametrize("tokens", [1, 5, 16])
def test_a_product(tokens: int) -> None:
    x, matrix, norm = random(1, tokens, 2112), weight(2, False, 3648, 2048), Norm(random(3, 2048), 1e-6)
    residual = random(4, tokens, 3648)
    assert few_tokens.why_not_matmul(x, matrix, norm) == []
    got = jax.jit(lambda: few_tokens.matmul(x, matrix, norm=norm, residual=residual))()
    wide = rms_norm(x[:, :2048], *norm).astype(jnp.float32) @ jnp.asarray(matrix, jnp.float32).T
    close(got, wide + residual.astype(jnp.float32))


@pytest.mark.parametrize(
    ("terms", "rows", "normed", "gated"),
    [(7168, 2112, True, False), (1536, 24576, True, False), (16384, 7168, False, False), (7168, 36864, True, True)],
)
def test_a_product_of_one_token(terms: int, rows: int, normed: bool, gated: bool) -> None:
    """V3's matrices, through a ring."""
    x, matrix = random(1, 1, terms), weight(2, True, rows, terms)
    norm, residual = Norm(random(3, terms), 1e-6) if normed else None, None if gated else random(4, 1, rows)
    assert few_tokens.why_not_matmul(x, matrix, norm, gated=gated) == []
    got = jax.jit(lambda: few_tokens.matmul(x, matrix, norm=norm, gated=gated, residual=residual))()
    terms_of_x = x if norm is None else rms_norm(x, *norm)
    wide = terms_of_x.astype(jnp.float32) @ jnp.asarray(matrix.widened(jnp.bfloat16), jnp.float32).T  # type: ignore[union-attr]
    gate, up = jnp.split(wide, 2, axis=-1)
    close(got, jax.nn.silu(gate) * up if residual is None else wide + residual.astype(jnp.float32))


def test_one_token_of_large_experts() -> None:
    """V3's, of which a few are here."""
    config = MoEConfig(16, 8, 2048, 1, "noaux_tc", 4, 2, True, 2.5, scoring="sigmoid")
    params: dict[str, Any] = {"router": random(5, 16, 7168, dtype=jnp.float32, scale=0.02)}
    params |= {"gate_up": weight(6, True, 17, 4096, 7168), "down": weight(7, True, 17, 7168, 2048)}
    params["correction_bias"] = random(8, 16, dtype=jnp.float32, scale=0.1)
    x, norm, valid = random(1, 1, 7168), Norm(random(2, 7168), 1e-6), jnp.ones(1, bool)
    assert few_token_mlp.why_not(params, config, x, norm) == []
    ids = jnp.zeros(1, jnp.int32)
    want = jax.jit(lambda: moe.mixture_of_experts(params, rms_norm(x, *norm), valid, config, ids))()
    close(jax.jit(lambda: few_token_mlp.mlp(params, config, x, norm, valid, ids))() - x, want)


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, 16])
def test_experts(tokens: int, narrow: bool) -> None:
    config = MoEConfig(64, 6, 1408, 2, "greedy", 1, 1, False, 1.0)
    params = {"router": random(5, 64, 2048, dtype=jnp.float32, scale=0.05)}
    params |= {"gate_up": weight(6, narrow, 66, 2816, 2048), "down": weight(7, narrow, 66, 2048, 1408)}  # type: ignore[dict-item]
    x, norm, valid = random(1, tokens, 2048), Norm(random(2, 2048), 1e-6), jnp.ones(tokens, bool)
    ids = jnp.zeros(tokens, jnp.int32)
    want = jax.jit(lambda: moe.mixture_of_experts(params, rms_norm(x, *norm), valid, config, ids))()
    close(jax.jit(lambda: few_token_mlp.mlp(params, config, x, norm, valid, ids))() - x, want)
    logits = few_tokens.router_logits(x, params["router"], norm=norm)
    experts, weights = moe.choose_experts(params, x, config, ids, valid, logits[None])
    inner = few_tokens.experts_up(x, params["gate_up"], experts, norm=norm)
    close(few_tokens.experts_down(inner, params["down"], experts, weights), want)


@pytest.mark.parametrize("rank", [None, 1536])
@pytest.mark.parametrize("tokens", [1, 5, 16])
def test_attention(tokens: int, rank: int | None) -> None:
    config = MLAConfig(
        hidden_size=2048,
        num_attention_heads=16,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        q_lora_rank=rank,
    )
    made = init_params(jax.random.key(0), config)
    params = functional.fold(jax.tree.map(lambda x: x.astype(jnp.bfloat16), made), config)
    x, norm, cache = random(1, tokens, 2048), Norm(random(2, 2048), 1e-6), random(3, 9 * tokens, 64, 576)
    tables = jnp.arange(9 * tokens, dtype=jnp.int32).reshape(tokens, 9)
    step = Step.dense(tables, jnp.arange(tokens, dtype=jnp.int32) * 37 + 1, page_size=64)
    assert mla_few_tokens.why_not(params, config, x, norm, cache) == []
    got, written = jax.jit(lambda: mla_few_tokens.decode(params, config, x, norm, cache, step))()
    y, want = jax.jit(lambda: functional.decode(params, config, rms_norm(x, *norm)[:, None], cache, step))()
    close(got - x, y[:, 0])
    close(written, want, 1e-3)


@pytest.mark.parametrize("tokens", [1, 16])
def test_rows_of_packed_caches(tokens: int) -> None:
    """Latents and indexer keys are those that the caches' own writes make of normed rows."""
    joint, q, w_uk = random(1, tokens, 2112), random(2, tokens, 16 * 192), random(3, 16, 512, 128)
    latent, keys = Norm(random(4, 512), 1e-6), random(5, tokens, 128)
    cos, sin = (random(seed, tokens, 32, dtype=jnp.float32) for seed in (6, 7))
    slots = jnp.arange(tokens, dtype=jnp.int32) * 11 + 3
    cache, key_cache = jnp.zeros((4, 64, 656), jnp.uint8), jnp.zeros((4, 64, 132), jnp.uint8)
    rope = few_tokens.Rope(cos, sin, True, "interleaved")
    got = jax.jit(lambda: few_tokens.queries(q, joint, w_uk, cache, slots, norm=latent, rope=rope))()
    normed = rms_norm(joint[:, 1536:2048], *latent)
    layout: dict[str, Any] = {"rope_interleave": True, "rope_layout": "interleaved"}
    written = sparse.write_packed_kv_cache(cache, normed, joint[:, 2048:], slots, cos, sin, **layout)
    assert (got.cache == written).mean() > 0.9999
    norm = few_tokens.LayerNorm(random(8, 128), random(9, 128), 1e-6)
    half = few_tokens.Rope(cos, sin, False, "halves")
    assert few_tokens.why_not_index_keys(keys, half, norm, key_cache) == []
    made = few_tokens.write_index_keys_by_kernel(key_cache, keys, slots, norm=norm, rope=half)
    params = {"indexer_k_norm": norm.weight, "indexer_k_norm_bias": norm.bias}
    want = sparse.write_indexer_cache(key_cache, normed_keys(params, keys), slots, cos, sin, rope_layout="halves")
    assert (made == want).mean() > 0.999


def test_a_window_row() -> None:
    cache, rows = jnp.zeros((8, V4_PACKED.page_bytes(64)), jnp.uint8), random(1, 16, 512, dtype=jnp.float32)
    slots = jnp.arange(16, dtype=jnp.int32) * 19 - 1
    got = jax.jit(lambda: few_tokens.write_window(cache, rows, slots, page_size=64))()
    assert (got == jax.jit(lambda: layouts.write_v4_cache(cache, rows, slots, page_size=64))()).all()

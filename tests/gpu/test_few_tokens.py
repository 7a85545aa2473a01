"""The kernels of few tokens on a Hopper GPU, against the same computations in XLA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.whole_models.models import MODELS
from tsmla_jax import sparse
from tsmla_jax.generate import few_tokens as few_token_mlp
from tsmla_jax.generate import moe, streams
from tsmla_jax.generate.config import MoEConfig, StreamsConfig
from tsmla_jax.nn import MLAConfig, Step, few_token_streams, few_tokens, functional, init_params
from tsmla_jax.nn.mla import few_tokens as mla_few_tokens
from tsmla_jax.nn.norms import Norm, rms_norm, rms_norm_fixed_order
from tsmla_jax.nn.products.block_scaled import BlockScaled
from tsmla_jax.nn.products.norm_rope import Columns, Rope, norm_rope
from tsmla_jax.nn.v4 import V4Config
from tsmla_jax.nn.v4 import few_tokens as v4_few_tokens
from tsmla_jax.nn.v4 import functional as functional_v4
from tsmla_jax.nn.v32.projections import normed_keys
from tsmla_jax.ops.selected import layouts
from tsmla_jax.ops.selected.v4 import angles, rope_table
from tsmla_kernels.contract.layouts import V4_PACKED

pytestmark = pytest.mark.gpu


def random(seed: int, *shape: int, dtype: Any = jnp.bfloat16, scale: float = 1.0) -> jax.Array:
    return (scale * jax.random.normal(jax.random.key(seed), shape)).astype(dtype)


def weight(seed: int, narrow: bool, *shape: int) -> jax.Array | BlockScaled:
    if not narrow:
        return random(seed, *shape, scale=0.05)
    blocks = (*shape[:-2], *(-(-size // 128) for size in shape[-2:]))
    return BlockScaled(random(seed, *shape, dtype=jnp.float8_e4m3fn), jnp.full(blocks, 0.05, jnp.float32))


def run(function: Callable[..., Any], *arrays: Any) -> Any:
    """A function's results, compiled. `arrays`: what it reads, of which many would take minutes as constants."""
    return jax.jit(function)(*arrays)


def close(got: jax.Array, want: jax.Array, tolerance: float = 1e-2) -> None:
    found, right = (np.asarray(x, np.float64) for x in (got, want))
    assert np.linalg.norm(found - right) <= tolerance * np.linalg.norm(right)


@pytest.mark.parametrize("tokens", [1, 5, 16])
def test_a_product(tokens: int) -> None:
    x, matrix, norm = random(1, tokens, 2112), weight(2, False, 3648, 2048), Norm(random(3, 2048), 1e-6)
    residual = random(4, tokens, 3648)
    assert few_tokens.why_not_matmul(x, matrix, norm) == []
    got = run(lambda x, matrix: few_tokens.matmul(x, matrix, norm=norm, residual=residual), x, matrix)
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
    got = run(lambda x, matrix: few_tokens.matmul(x, matrix, norm=norm, gated=gated, residual=residual), x, matrix)
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
    want = run(lambda params: moe.mixture_of_experts(params, rms_norm(x, *norm), valid, config, ids), params)
    close(run(lambda params: few_token_mlp.mlp(params, config, x, norm, valid, ids), params) - x, want)


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, 16])
def test_experts(tokens: int, narrow: bool) -> None:
    config = MoEConfig(64, 6, 1408, 2, "greedy", 1, 1, False, 1.0)
    params = {"router": random(5, 64, 2048, dtype=jnp.float32, scale=0.05)}
    params |= {"gate_up": weight(6, narrow, 66, 2816, 2048), "down": weight(7, narrow, 66, 2048, 1408)}  # type: ignore[dict-item]
    x, norm, valid = random(1, tokens, 2048), Norm(random(2, 2048), 1e-6), jnp.ones(tokens, bool)
    ids = jnp.zeros(tokens, jnp.int32)
    want = run(lambda params: moe.mixture_of_experts(params, rms_norm(x, *norm), valid, config, ids), params)
    close(run(lambda params: few_token_mlp.mlp(params, config, x, norm, valid, ids), params) - x, want)
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
    got, written = run(lambda *given: mla_few_tokens.decode(given[0], config, x, norm, given[1], step), params, cache)
    y, want = run(
        lambda params, cache: functional.decode(params, config, rms_norm(x, *norm)[:, None], cache, step), params, cache
    )
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


@pytest.mark.parametrize("tokens", [1, 16])
def test_rows_of_a_window(tokens: int) -> None:
    """Latents as the window's own write makes them of rows that are normed and rotated, and queries normed."""
    joint, slots = random(1, tokens, 1600), jnp.arange(tokens, dtype=jnp.int32) * 19 - (tokens > 1)
    cache = jnp.zeros((8, V4_PACKED.page_bytes(64)), jnp.uint8)
    low, kv = Norm(random(2, 1024, dtype=jnp.float32), 1e-6), Norm(random(3, 512, dtype=jnp.float32), 1e-6)
    table, positions = (
        rope_table(jnp.float32(10.0) ** -(jnp.arange(32) / 8), 100),
        jnp.arange(tokens, dtype=jnp.int32) * 5,
    )
    rope = few_tokens.Rope(*angles(positions, table), True, "interleaved")
    kinds: dict[str, Any] = {"low_norm": low, "norm": kv, "page_size": 64}
    assert v4_few_tokens.why_not_window(joint, cache, rope_dim=64, **kinds) == []
    got = jax.jit(lambda: v4_few_tokens.write_window_by_kernel(cache, joint, slots, rope=rope, **kinds))()
    rows = norm_rope(joint, Columns(1024, 1, 512), kv, Rope(positions, table), dtype=jnp.float32)[:, 0]
    want = jax.jit(lambda: layouts.write_v4_cache(cache, rows, slots, page_size=64))()
    assert (got.cache == want).mean() > 0.9999
    close(got.low, norm_rope(joint, Columns(0, 1, 1024), low)[:, 0])


@pytest.mark.parametrize("pooled", [1, 2])
def test_products_of_a_token_of_v4(pooled: int) -> None:
    config = V4Config.from_hf(MODELS["v4-slice", "fp8"], pooled - 1)
    assert len(config.compressors) == pooled
    rows = 1536 + 64 * (pooled - 1)
    params = {"in_proj": random(1, rows, 4096, scale=0.05), "compressor_rows_proj": random(2, 1024 * pooled, 4096)}
    params |= {"indexer_rows_proj": random(3, 512, 4096), "o_a_proj": random(4, 8, 1024, 4096, scale=0.05)}
    params |= {"o_b_proj": random(5, 4096, 8192, scale=0.05), "q_b_proj": random(6, 32768, 1024, scale=0.05)}
    x = random(7, 1, 4096)
    assert v4_few_tokens.why_not_inputs(params, config, x) == []
    got = run(lambda params: v4_few_tokens.inputs_by_kernel(params, config, x), params)
    projected, weights = functional_v4.project_in(params, config, x)
    close(got.projected, projected[:, :1536])
    close(got.index_weights, weights)
    for name, _ in config.compressors:
        close(got.pooled[name], functional_v4.compressor_rows(params, name, x), 1e-5)
    heads, table = random(8, 1, 64, 512), rope_table(jnp.float32(10.0) ** -(jnp.arange(32) / 8), 100)
    rope = few_tokens.Rope(*angles(jnp.array([77]), table), True, "interleaved")
    assert v4_few_tokens.why_not_outputs(params["o_a_proj"], heads, 64) == []
    mixed = run(lambda weight: v4_few_tokens.outputs_by_kernel(weight, heads, rope), params["o_a_proj"])
    back = norm_rope(heads.reshape(1, -1), Columns(0, 64, 512), rope=Rope(jnp.array([77]), table, inverse=True))
    close(mixed, jnp.einsum("gi,gri->gr", back.reshape(8, 4096), params["o_a_proj"]).reshape(1, -1))
    for name, terms in (("o_b_proj", mixed), ("q_b_proj", x[:, :1024])):
        made = run(lambda params, name=name, terms=terms: v4_few_tokens.matrix(params, name, terms), params)
        close(made, terms @ params[name].T)


def test_a_mix_of_streams() -> None:
    """Twice, the second time with a block's result to be written first."""
    tokens = 1
    params = {"fn": random(1, 24, 16384, dtype=jnp.float32, scale=0.1), "base": random(2, 24, dtype=jnp.float32)}
    params["scale"] = jnp.array([1.0, 0.5, 2.0])
    x, norm = random(3, tokens, 4, 4096), Norm(random(4, 4096, dtype=jnp.float32), 1e-6)
    config = StreamsConfig(4, sinkhorn_iterations=20, eps=1e-6, norm_eps=1e-6)
    assert few_token_streams.why_not(x) == []
    first = jax.jit(lambda: streams.mix_streams(params, x, norm, config))()
    out = random(5, tokens, 4096)
    given = few_token_streams.Unwritten(out, first.write, first.mix, x)
    second = jax.jit(lambda: streams.mix_streams(params, given, norm, config))()
    # The compiled kernel rounds a stream once, after its product and its sum; write_streams rounds both.
    for found, before, tolerance in ((first, x, 0.0), (second, streams.write_streams(*given), 4e-3)):
        close(found.streams, before, tolerance)
        read, write, mix = jax.jit(lambda x: streams.read_streams(params, x, norm, config))(found.streams)
        close(found.read, read)
        close(found.write, write, 1e-4)
        close(found.mix, mix, 1e-4)
    params = {"fn": params["fn"][:4], "base": params["base"][:4], "scale": params["scale"][:1]}
    given = few_token_streams.Unwritten(out, second.write, second.mix, second.streams)
    closed = jax.jit(lambda: streams.close_normed(params, given, norm, config))()
    want = streams.close_streams(params, streams.write_streams(*given), config)
    close(closed, rms_norm_fixed_order(want, *norm))

"""A step of up to 16 tokens: the same values as of the parts, and on Hopper one kernel for each part."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tsmla_jax.generate import few_tokens as few_token_mlp
from tsmla_jax.generate import moe
from tsmla_jax.generate.config import LayerConfig, MoEConfig
from tsmla_jax.generate.model import Batch, Scales, StepOptions, decoder_layer
from tsmla_jax.nn import MLAConfig, QueryScale, Step, few_tokens, functional, init_params, v32
from tsmla_jax.nn.mla import few_tokens as mla_few_tokens
from tsmla_jax.nn.norms import Norm, rms_norm
from tsmla_jax.nn.products.block_scaled import BlockScaled, with_products
from tsmla_jax.nn.v32 import V32Config
from tsmla_jax.nn.v32 import few_tokens as v32_few_tokens
from tsmla_jax.ops.kernel_call import kernel_call_p

PAGE = 64
LOW_RANK = MLAConfig(
    hidden_size=256,
    num_attention_heads=2,
    kv_lora_rank=128,
    qk_nope_head_dim=128,
    qk_rope_head_dim=16,
    v_head_dim=64,
    q_lora_rank=128,
)
CONFIG = dataclasses.replace(LOW_RANK, q_lora_rank=None)
HOPPER = dataclasses.replace(CONFIG, kv_lora_rank=512, qk_rope_head_dim=64)
EXPERTS = MoEConfig(8, 3, 128, 1, "greedy", 1, 1, True, 1.5)


def random(seed: int, *shape: int, dtype: Any = jnp.bfloat16, scale: float = 1.0) -> jax.Array:
    return jnp.asarray(scale * np.random.default_rng(seed).standard_normal(shape), dtype)


def step(texts: int) -> Step:
    tables = jnp.arange(2 * texts, dtype=jnp.int32).reshape(texts, 2)
    return Step.dense(tables, jnp.arange(1, texts + 1, dtype=jnp.int32), page_size=PAGE)


def attention(config: MLAConfig) -> dict[str, Any]:
    shapes = jax.eval_shape(lambda: functional.fold(init_params(jax.random.key(0), config), config))
    return {name: random(index, *shape.shape, scale=0.06) for index, (name, shape) in enumerate(shapes.items())}


def mlp(count: int | None = None) -> dict[str, Any]:
    """A gated MLP, or the stacks of experts with their router."""
    stack = () if count is None else (count,)
    router = {} if count is None else {"router": random(7, EXPERTS.num_experts, 256, dtype=jnp.float32, scale=0.1)}
    return {"gate_up": random(5, *stack, 256, 256, scale=0.1), "down": random(6, *stack, 256, 128, scale=0.1), **router}


def close(got: jax.Array, want: jax.Array, tolerance: float = 1e-2) -> None:
    found, right = (np.asarray(x, np.float64) for x in (got, want))
    assert np.linalg.norm(found - right) <= tolerance * np.linalg.norm(right)


SCALED = dataclasses.replace(LOW_RANK, query_scale=QueryScale(0.5, 2))


@pytest.mark.parametrize("config", [CONFIG, SCALED], ids=["one matrix", "low rank, scaled queries"])
def test_attention_is_that_of_decode(config: MLAConfig) -> None:
    params, texts = attention(config), 3
    x, cache = random(1, texts, 256), random(2, 2 * texts, PAGE, config.cache_dim)
    norm = Norm(random(3, 256), 1e-6)
    got, written = jax.jit(lambda: mla_few_tokens.decode(params, config, x, norm, cache, step(texts)))()
    y, want = jax.jit(lambda: functional.decode(params, config, rms_norm(x, *norm)[:, None], cache, step(texts)))()
    close(got, np.float32(x) + np.float32(y)[:, 0])
    close(written, want)


def test_scales_of_queries_and_of_the_cache() -> None:
    params, x, norm = attention(CONFIG), random(1, 2, 256), Norm(random(3, 256), 1e-6)
    cache = random(2, 4, PAGE, CONFIG.cache_dim).astype(jnp.float8_e4m3fn)
    scales = {"kv_scale": jnp.float32(0.5), "q_scale": jnp.float32(0.25)}
    got, written = jax.jit(lambda: mla_few_tokens.decode(params, CONFIG, x, norm, cache, step(2), **scales))()
    y, want = jax.jit(
        lambda: functional.decode(params, CONFIG, rms_norm(x, *norm)[:, None], cache, step(2), **scales)
    )()
    close(got, np.float32(x) + np.float32(y)[:, 0])
    close(written, want)


V32 = V32Config(LOW_RANK, index_n_heads=16, index_head_dim=128, index_topk=4)


def test_the_sparse_layer_is_that_of_attend() -> None:
    """Ragged tokens, over keys as they are; the positions of the choice are the same."""
    shapes = jax.eval_shape(lambda: v32.functional.fold(v32.init_params(jax.random.key(0), V32), V32))
    params = {name: random(index, *shape.shape, scale=0.06) for index, (name, shape) in enumerate(shapes.items())}
    x, norm = random(1, 5, 256), Norm(random(3, 256), 1e-6)
    cache = v32.init_cache(V32, 4, PAGE, kv_dtype=jnp.bfloat16, indexer_dtype=jnp.bfloat16)
    cache = v32.V32Cache(*(random(index, *part.shape) for index, part in enumerate(cache)))
    lens, offsets = jnp.array([40, 9], jnp.int32), jnp.array([0, 3, 5], jnp.int32)
    tables = jnp.arange(4, dtype=jnp.int32).reshape(2, 2)
    ragged = Step.ragged(tables, lens, offsets, total_tokens=5, page_size=PAGE)
    options = v32.functional.Options(None, None, None, "direct", None)
    got = jax.jit(lambda: v32_few_tokens.attend(params, V32, x, norm, cache, ragged, options, keep=True))()
    given = {"selected": got.selected, "form": "direct"}
    y, want = jax.jit(lambda: v32.attend(params, V32, rms_norm(x, *norm), cache, ragged, **given))()
    close(got.y, np.float32(x) + np.float32(y))
    for part, other in zip(got.cache, want, strict=True):
        close(part, other)


def test_the_mlp_and_the_experts() -> None:
    x, norm = random(1, 5, 256), Norm(random(2, 256), 1e-6)
    valid, tokens = np.arange(5) != 3, np.zeros(5, np.int32)
    dense, mixed = mlp(), mlp(EXPERTS.num_experts + EXPERTS.num_shared)
    want = jax.jit(lambda: x + moe.gated_mlp(rms_norm(x, *norm), dense["gate_up"], dense["down"]))()
    close(jax.jit(lambda: few_token_mlp.mlp(dense, None, x, norm, valid, tokens))(), want)
    want = jax.jit(lambda: x + moe.mixture_of_experts(mixed, rms_norm(x, *norm), valid, EXPERTS, tokens))()
    got = jax.jit(lambda: few_token_mlp.mlp(mixed, EXPERTS, x, norm, valid, tokens))()
    close(np.asarray(got)[valid], np.asarray(want)[valid])


def test_wide_rows_and_limits() -> None:
    x, weight, residual = random(1, 2, 300), random(2, 32, 256), random(3, 2, 16)
    both = np.asarray(x, np.float32)[:, :256] @ np.asarray(weight, np.float32).T
    gate, up = np.minimum(both[:, :16], 1.0), np.clip(both[:, 16:], -1.0, 1.0)
    want = gate / (1 + np.exp(-gate)) * up + np.asarray(residual, np.float32)
    got = jax.jit(lambda: few_tokens.matmul(x, weight, gated=True, limit=1.0, residual=residual))()
    close(got, want, 2e-2)


# ---- on Hopper


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch, cache_directory: Any) -> Any:
    """Programs are traced for a Hopper GPU that is not here."""
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    jax.clear_caches()
    yield
    jax.clear_caches()


def primitives(jaxpr: Any) -> list[str]:
    """The kernels and products of a traced program: names of kernels, and of the primitives that are some of XLA's."""
    found: list[str] = []
    for equation in jaxpr.eqns:
        if equation.primitive is kernel_call_p:
            found.append(equation.params["kernel"].name)
        elif equation.primitive.name in ("pallas_call", "dot_general", "reduce_sum", "scatter"):
            found.append(equation.params.get("name") or equation.primitive.name)
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns") and equation.primitive.name != "pallas_call":
                found += primitives(inner)
    return found


def traced(config: MLAConfig, experts: int | None, texts: int, **changes: Any) -> list[str]:
    """What a decoder layer's step of one token each is made of."""
    layer: dict[str, Any] = {"attention": attention(config), "mlp": mlp(experts)}
    layer |= {"attention_norm": random(8, 256), "mlp_norm": random(9, 256), **changes.pop("layer", {})}
    cache = changes.pop("cache", random(2, 2 * texts, PAGE, config.cache_dim))
    batch = Batch(jnp.zeros(texts, jnp.int32), step(texts))
    options = StepOptions("decode", page_size=PAGE, **changes)
    whole = LayerConfig(config, EXPERTS, None, 1e-6)
    x = random(1, texts, 256)
    jaxpr = jax.make_jaxpr(lambda *arrays: decoder_layer(arrays[0], whole, *arrays[1:], options, None))(
        layer, x, cache, batch, Scales()
    )
    return primitives(jaxpr.jaxpr)


ATTENTION = ["few_token_matmul", "few_token_queries", "mla_decode", "dot_general", "few_token_matmul"]
"""mla_decode is two kernels."""
ALONE = ["few_token_matmul", "few_token_queries", "mla_decode", "few_token_values", "few_token_matmul"]
"""Attention of one token, whose mla_decode is one kernel."""
DENSE = ["few_token_matmul", "few_token_matmul"]
MIXTURE = ["few_token_router", "few_token_choose_up", "few_token_experts_down"]
"""Of one token."""


def test_the_kernels_of_a_layer(hopper: None) -> None:
    count, low_rank = EXPERTS.num_experts + EXPERTS.num_shared, dataclasses.replace(HOPPER, q_lora_rank=128)
    assert traced(HOPPER, count, 1) == [*ALONE, *MIXTURE]
    assert traced(low_rank, count, 1) == ["few_token_matmul", *ALONE, *MIXTURE]
    assert traced(HOPPER, None, 16) == [*ATTENTION, *DENSE]
    several = traced(HOPPER, count, 16)
    assert several[: len(ATTENTION)] == ATTENTION and "grouped_matmul_gated" in several


def test_the_kernels_of_a_sparse_layer(hopper: None) -> None:
    """Over packed caches one kernel makes absorbed queries and writes latents, another writes the indexer's keys; over
    keys as they are the indexer's keys are written apart."""
    config = V32Config(
        dataclasses.replace(HOPPER, q_lora_rank=128), index_n_heads=64, index_head_dim=128, index_topk=64
    )
    shapes = jax.eval_shape(lambda: v32.functional.fold(v32.init_params(jax.random.key(0), config), config))
    params = {name: random(index, *shape.shape, scale=0.06) for index, (name, shape) in enumerate(shapes.items())}
    x, norm = random(1, 2, 256), Norm(random(3, 256), 1e-6)
    tables = jnp.arange(4, dtype=jnp.int32).reshape(2, 2)
    ragged = Step.ragged(tables, jnp.full(2, 9), jnp.arange(3, dtype=jnp.int32), total_tokens=2, page_size=PAGE)
    options = v32.functional.Options(None, None, None, None, None)

    def made(**dtypes: Any) -> list[str]:
        cache = v32.init_cache(config, 4, PAGE, **dtypes)
        jaxpr = jax.make_jaxpr(
            lambda params, x, cache: v32_few_tokens.attend(params, config, x, norm, cache, ragged, options)
        )(params, x, cache)
        return primitives(jaxpr.jaxpr)

    packed = made(kv_dtype=jnp.uint8)
    assert [packed.count(name) for name in ("few_token_queries", "few_token_index_key")] == [1, 1]
    assert not {"write_packed_kv_cache", "write_indexer_cache"} & {*packed}
    plain = made(indexer_dtype=jnp.bfloat16)
    assert "few_token_queries" in plain and "few_token_index_key" not in plain


def test_one_token_with_many_terms_takes_products_of_groups(hopper: Any) -> None:
    def reasons(hidden: int, width: int) -> list[str]:
        def stack(*shape: int) -> BlockScaled:
            values = jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn)
            scales = jax.ShapeDtypeStruct((shape[0], shape[1] // 128, shape[2] // 128), jnp.float32)
            return BlockScaled(values, scales)  # type: ignore[arg-type]

        params = {"router": None, "gate_up": stack(9, 2 * width, hidden), "down": stack(9, hidden, width)}
        x, norm = jax.ShapeDtypeStruct((1, hidden), jnp.bfloat16), Norm(jnp.ones(hidden, jnp.bfloat16), 1e-6)
        return few_token_mlp.why_not(params, EXPERTS, x, norm)  # type: ignore[arg-type]

    assert not reasons(7168, 4608)
    for sizes in ((7168, 4736), (12416, 2048)):
        assert "products of groups of rows" in reasons(*sizes)[0]


def test_what_keeps_the_kernels_from_a_step(hopper: None) -> None:
    def few(*args: Any, **changes: Any) -> list[str]:
        return [name for name in traced(*args, **changes) if name.startswith("few_token")]

    assert few(HOPPER, None, 17) == []
    assert few(HOPPER, None, 2, implementation="xla") == DENSE
    biased = {**attention(HOPPER), "in_proj_bias": random(1, 2 * 192 + 576), "o_proj_bias": random(2, 256)}
    assert few(dataclasses.replace(HOPPER, attention_bias=True), None, 2, layer={"attention": biased}) == DENSE
    assert few(HOPPER, None, 2, layer={"mlp_norm": random(1, 256, dtype=jnp.float32)}) == ATTENTION[:2] + ATTENTION[4:]
    reasons = mla_few_tokens.why_not({}, HOPPER, random(1, 2, 256), Norm(random(1, 256), 1e-6), random(1, 2, PAGE, 576))
    assert reasons == ["parameters are not folded"]


def test_weights_that_other_products_multiply(hopper: None) -> None:
    x, norm = random(1, 4, 256), Norm(random(2, 256), 1e-6)
    weight = BlockScaled(jnp.zeros((256, 256), jnp.float8_e4m3fn), jnp.ones((2, 2)))
    (reason,) = few_tokens.why_not_matmul(x, weight, norm)
    assert "block_scaled_matmul" in reason
    assert few_tokens.why_not_matmul(x, weight.widened(jnp.bfloat16), norm) == []
    assert few_tokens.why_not_matmul(x[:1], weight, norm) == []
    long = BlockScaled(jnp.zeros((256, 18560), jnp.float8_e4m3fn), jnp.ones((2, 145)))
    (reason,) = few_tokens.why_not_matmul(random(1, 1, 18560), long)
    assert "except for one token of at most 18432 terms" in reason
    assert few_tokens.why_not_experts(x, weight_stack(), weight_stack(), 3, norm) == []
    (reason,) = few_tokens.why_not_dtypes(x, with_products(weight, "quantized"), norm=norm)
    assert "quantized" in reason
    (reason,) = few_tokens.why_not_matmul(x.astype(jnp.float16), weight)
    assert "float16" in reason
    (reason,) = few_tokens.why_not_matmul(
        x, weight.widened(jnp.bfloat16), Norm(random(2, 256, dtype=jnp.float32), 1e-6)
    )
    assert "a norm's weight is float32" in reason
    (reason,) = few_tokens.why_not_matmul(x, weight.widened(jnp.float32))
    assert "a weight is float32" in reason


def test_indexer_keys_of_pages_that_are_not_aligned(hopper: None) -> None:
    """Each second page of an odd number of keys begins at no multiple of 8 bytes."""
    keys, norm = random(1, 2, 128), few_tokens.LayerNorm(random(2, 128), random(3, 128), 1e-6)
    rope = few_tokens.Rope(*(random(seed, 2, 32, dtype=jnp.float32) for seed in (4, 5)), True, "interleaved")
    assert few_tokens.why_not_index_keys(keys, rope, norm, jnp.zeros((3, 64, 132), jnp.uint8)) == []
    for size in (1, 63):
        reasons = few_tokens.why_not_index_keys(keys, rope, norm, jnp.zeros((3, size, 132), jnp.uint8))
        assert reasons == [f"page_size (Z) is {size}; few_token_index_key takes even page sizes"]


def weight_stack() -> BlockScaled:
    """The matrices of four experts."""
    return BlockScaled(jnp.zeros((4, 256, 256), jnp.float8_e4m3fn), jnp.ones((4, 2, 2)))

"""The layer against transformers' DeepSeek attention: every path, both portable implementations, both model families.

transformers runs in float64 and decodes with its DynamicCache; the layer runs in float32 over a paged cache whose
unused slots hold NaN and whose unused table entries hold 2^31 - 1.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tsmla_jax
from tsmla_jax.nn import MLAConfig, Step, functional, params_from_hf

TOLERANCE = 1e-5
PAGE = 4
# xla on every combination; reference on the four that hold every pair of choices, among them V2-Lite (v2, yarn, q_proj)
# and V3 (v3, yarn, q_lora).
CASES = [
    pytest.param(
        family, yarn, rank, name, id=f"{name}-{family}-{'yarn' if yarn else 'plain'}-{'q_lora' if rank else 'q'}"
    )
    for family in ("v2", "v3")
    for yarn in (False, True)
    for rank in (None, 48)
    for name in ("reference", "xla")
    if name == "xla" or (family == "v3") ^ yarn ^ (rank is not None)
]
each_case = pytest.mark.parametrize(("family", "yarn", "q_lora_rank", "implementation"), CASES)


@dataclasses.dataclass
class Paged:
    """A paged cache, the table of its requests' pages, and how many tokens of each are in it."""

    cache: jax.Array
    tables: jax.Array
    lens: np.ndarray[Any, Any]


def ragged(parts: Sequence[np.ndarray[Any, Any]], total: int = 36) -> tuple[jax.Array, jax.Array]:
    """Requests packed, NaN rows of padding behind them (one total: tests share programs), and cu_seqlens."""
    lens = [len(part) for part in parts]
    packed = np.concatenate([*parts, np.full((total - sum(lens), parts[0].shape[1]), np.nan)])
    return jnp.asarray(packed, jnp.float32), jnp.asarray(np.cumsum([0, *lens]), jnp.int32)


def assert_close(y: jax.Array, parts: Sequence[np.ndarray[Any, Any]]) -> None:
    expected = np.concatenate(parts)
    got = np.asarray(y, np.float64).reshape(-1, expected.shape[1])[: len(expected)]
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE)


def empty_cache(config: MLAConfig, final_lens: Sequence[int], dtype: Any = jnp.float32) -> Paged:
    """NaN everywhere, pages of the requests scattered over the pool, unused entries out of any bounds."""
    pages = [-(-length // PAGE) for length in final_lens]
    pool = np.random.default_rng(5).permutation(sum(pages) + 3)
    tables = np.full((len(final_lens), max(pages) + 1), 2**31 - 1, np.int32)
    taken = 0
    for request, count in enumerate(pages):
        tables[request, :count] = pool[taken : taken + count]
        taken += count
    cache = jnp.full((len(pool), PAGE, config.cache_dim), jnp.nan, dtype)
    return Paged(cache, jnp.asarray(tables), np.zeros(len(final_lens), np.int32))


@functools.cache
def jitted(function: Callable[..., Any]) -> Callable[..., Any]:
    names = inspect.signature(function).parameters
    static = [name for name in ("config", "max_q_len", "context_chunk", "implementation") if name in names]
    return jax.jit(function, static_argnames=static)


@functools.partial(jax.jit, static_argnames=("total_tokens", "max_q_len"))
def ragged_step(tables: jax.Array, seq_lens: jax.Array, cu_seqlens: jax.Array, **sizes: int) -> Step:
    return Step.ragged(tables, seq_lens, cu_seqlens, page_size=PAGE, **sizes)


def step_of(state: Paged, parts: Sequence[np.ndarray[Any, Any]], **sizes: int) -> tuple[jax.Array, Step]:
    """New tokens of every request, packed, and their step; the state's lengths include them from here on."""
    x, cu_seqlens = ragged(parts, sizes["total_tokens"])
    state.lens = state.lens + np.asarray([len(part) for part in parts], np.int32)
    return x, ragged_step(state.tables, jnp.asarray(state.lens), cu_seqlens, **sizes)


def filled(run: Any, config: MLAConfig, params: Any) -> Paged:
    """A cache with the prompt of every request, by the expanded prefill."""
    state = empty_cache(config, [len(x) for x in run.x])
    prompts = [x[:n] for x, n in zip(run.x, run.prompt_lens, strict=True)]
    x, step = step_of(state, prompts, total_tokens=36, max_q_len=16)
    _, latent, k_rope = jitted(functional.prefill)(
        params, config, x, cu_seqlens_q=step.cu_seqlens_q, max_q_len=16, implementation="reference"
    )
    state.cache = jitted(tsmla_jax.write_kv_cache)(state.cache, latent, k_rope, step.slot_mapping)
    return state


def decode(
    params: Any, config: MLAConfig, state: Paged, parts: Sequence[np.ndarray[Any, Any]], implementation: str
) -> jax.Array:
    """One ragged decode step with these new tokens."""
    x, step = step_of(state, parts, total_tokens=13, max_q_len=5)
    y, state.cache = jitted(functional.decode)(params, config, x, state.cache, step, implementation=implementation)
    return y


def setup(oracle: Any, family: str, yarn: bool, q_lora_rank: int | None) -> tuple[Any, MLAConfig, Any]:
    """The results of transformers, and our layer's config and weights."""
    run = oracle(family, yarn, q_lora_rank)
    config = MLAConfig.from_hf(run.config)
    return run, config, params_from_hf(config, run.tensors, jnp.float32)


@each_case
def test_expanded_prefill(oracle: Any, family: str, yarn: bool, q_lora_rank: int | None, implementation: str) -> None:
    run, config, params = setup(oracle, family, yarn, q_lora_rank)
    x, cu_seqlens = ragged(run.x)
    y, _, _ = jitted(functional.prefill)(
        params, config, x, cu_seqlens_q=cu_seqlens, max_q_len=16, implementation=implementation
    )
    assert_close(y, run.y)


@each_case
def test_absorbed_decode(oracle: Any, family: str, yarn: bool, q_lora_rank: int | None, implementation: str) -> None:
    """One token a request, from the first decoded token to the last, in x [B, 1, E]."""
    run, config, params = setup(oracle, family, yarn, q_lora_rank)
    state = filled(run, config, params)
    for i in range(len(run.x[0]) - run.prompt_lens[0]):
        new = [x[n + i : n + i + 1] for x, n in zip(run.x, run.prompt_lens, strict=True)]
        state.lens = state.lens + 1
        x, lens = jnp.asarray(np.stack(new), jnp.float32), jnp.asarray(state.lens)
        step = Step.dense(state.tables, lens, page_size=PAGE)
        y, state.cache = jitted(functional.decode)(params, config, x, state.cache, step, implementation=implementation)
        assert_close(y, [y[n + i : n + i + 1] for y, n in zip(run.y, run.prompt_lens, strict=True)])


@each_case
def test_ragged_decode(oracle: Any, family: str, yarn: bool, q_lora_rank: int | None, implementation: str) -> None:
    """Two steps whose requests bring 3, 1 and 0, then 1, 3 and 4 new tokens."""
    run, config, params = setup(oracle, family, yarn, q_lora_rank)
    state = filled(run, config, params)
    for counts in ((3, 1, 0), (1, 3, 4)):
        begin = state.lens
        spans = [slice(a, a + count) for a, count in zip(begin, counts, strict=True)]
        y = decode(params, config, state, [x[span] for x, span in zip(run.x, spans, strict=True)], implementation)
        assert_close(y, [y[span] for y, span in zip(run.y, spans, strict=True)])


@each_case
def test_chunked_context(oracle: Any, family: str, yarn: bool, q_lora_rank: int | None, implementation: str) -> None:
    """New tokens on top of 0 to 12 cached ones, taken 5 at a time; in two calls, the first without any context."""
    run, config, params = setup(oracle, family, yarn, q_lora_rank)
    state = empty_cache(config, [len(x) for x in run.x])
    for stops in ((6, 0, 12), (len(run.x[0]), len(run.x[1]), len(run.x[2]))):
        spans = [slice(a, b) for a, b in zip(state.lens, stops, strict=True)]
        parts = [x[span] for x, span in zip(run.x, spans, strict=True)]
        x, step = step_of(state, parts, total_tokens=36, max_q_len=16)
        y, state.cache = jitted(functional.prefill_with_context)(
            params, config, x, state.cache, step, context_chunk=5, implementation=implementation
        )
        assert_close(y, [y[span] for y, span in zip(run.y, spans, strict=True)])


@pytest.mark.parametrize(("family", "q_lora_rank"), [("v2", None), ("v3", 48)])
def test_biases_and_the_other_rope_layout(oracle: Any, family: str, q_lora_rank: int | None) -> None:
    """attention_bias in every projection that has one; results don't depend on how the cache stores rope."""
    run = oracle(family, True, q_lora_rank, True)
    pairs = MLAConfig.from_hf(run.config)
    halves = MLAConfig.from_hf(run.config, rope_layout="halves")
    assert pairs.attention_bias
    params = params_from_hf(pairs, run.tensors, jnp.float32)
    caches = []
    for config in (pairs, halves):
        state = filled(run, config, params)
        new = [x[n:] for x, n in zip(run.x, run.prompt_lens, strict=True)]
        y = decode(params, config, state, new, "xla")
        assert_close(y, [y[n:] for y, n in zip(run.y, run.prompt_lens, strict=True)])
        caches.append(np.asarray(state.cache))
    rope = np.s_[..., pairs.kv_lora_rank :]
    assert not np.array_equal(caches[0][rope], caches[1][rope], equal_nan=True)
    first, second = caches[1][rope][..., :8], caches[1][rope][..., 8:]
    np.testing.assert_array_equal(caches[0][rope], np.stack([first, second], -1).reshape(caches[0][rope].shape))


def test_transformers_with_rope_columns_in_halves(oracle: Any) -> None:
    """A checkpoint with rope_interleave false: its columns permuted, the same attention."""
    run = oracle("v3", True, 48)
    config = MLAConfig.from_hf({**run.config, "rope_interleave": False})
    order = np.concatenate([np.arange(0, 16, 2), np.arange(1, 16, 2)])
    params = dict(params_from_hf(config, run.tensors, jnp.float32))
    rope_of_q = params["q_b_proj"][..., config.qk_nope_head_dim :][..., order]
    params["q_b_proj"] = params["q_b_proj"].at[..., config.qk_nope_head_dim :].set(rope_of_q)
    rope_of_k = params["kv_a_proj_with_mqa"][:, config.kv_lora_rank :][:, order]
    params["kv_a_proj_with_mqa"] = params["kv_a_proj_with_mqa"].at[:, config.kv_lora_rank :].set(rope_of_k)
    x, cu_seqlens = ragged(run.x)
    y, _, _ = jitted(functional.prefill)(params, config, x, cu_seqlens_q=cu_seqlens, max_q_len=16)
    assert_close(y, run.y)

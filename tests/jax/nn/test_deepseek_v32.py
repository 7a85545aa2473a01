"""V3.2's attention layer against transformers' own, eager, float32: prefill, 300 decode steps, ragged chunks."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.jax.nn import hf_layers
from tsmla_jax.nn import deepseek_v32 as v32
from tsmla_jax.nn import functional

PAGE, PROMPT, LENGTH = 16, 21, hf_layers.V32_LENGTH
SPLIT_LENGTH = 120


def build(kv_dtype: Any = jnp.float32, indexer_dtype: Any = jnp.float32) -> tuple[Any, ...]:
    fields, tensors, x, y = hf_layers.v32_layer()
    config = v32.V32Config.from_hf(fields)
    params = v32.v32_params_from_hf(config, tensors)
    pages = -(-LENGTH // PAGE)
    tables = jnp.asarray(np.random.default_rng(0).permutation(2 * pages).reshape(2, pages), jnp.int32)
    cache = v32.init_v32_cache(config, 2 * pages, PAGE, kv_dtype=kv_dtype, indexer_dtype=indexer_dtype)

    # Not what is compiled but how fast: unoptimised code compiles in half the time.
    @functools.partial(jax.jit, donate_argnums=1, compiler_options={"xla_backend_optimization_level": 0})
    def run(x: jax.Array, cache: v32.V32Cache, seq_lens: jax.Array, cu: jax.Array) -> tuple[jax.Array, v32.V32Cache]:
        requests, positions = functional.ragged_positions(cu, seq_lens - jnp.diff(cu), x.shape[0])
        return v32.attend(
            params,
            config,
            x,
            cache,
            block_tables=tables,
            seq_lens=seq_lens,
            cu_seqlens_q=cu,
            slot_mapping=functional.slots_of(tables, requests, positions, page_size=PAGE),
        )

    return config, run, cache, x, y


def ints(x: object) -> jax.Array:
    return jnp.asarray(x, jnp.int32)


def test_prefill_and_300_decode_steps() -> None:
    _, run, cache, x, y = build()
    out, cache = run(np.concatenate(x[:, :PROMPT]), cache, ints([PROMPT, PROMPT]), ints([0, PROMPT, 2 * PROMPT]))
    got = [np.asarray(out).reshape(2, PROMPT, -1)]
    for position in range(PROMPT, LENGTH):
        out, cache = run(x[:, position], cache, ints([position + 1] * 2), ints([0, 1, 2]))
        got.append(np.asarray(out)[:, None])
    np.testing.assert_allclose(np.concatenate(got, axis=1), y, rtol=1e-5, atol=1e-5)


def test_ragged_chunks_with_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TSMLA_CHECK", "1")  # the layer passes its own checks
    _, run, cache, x, y = build()
    done = [0, 0]
    for counts in [(50, 3), (1, 140), (199, 0), (0, 90)]:
        rows = [x[r, done[r] : done[r] + n] for r, n in enumerate(counts)]
        padded = np.concatenate([*rows, np.zeros((200 - sum(counts), x.shape[2]), np.float32)])
        done = [a + n for a, n in zip(done, counts, strict=True)]
        out, cache = run(padded, cache, ints(done), ints([0, counts[0], sum(counts)]))
        for r, first in ((0, 0), (1, counts[0])):
            want = y[r, done[r] - counts[r] : done[r]]
            np.testing.assert_allclose(np.asarray(out)[first : first + counts[r]], want, rtol=1e-5, atol=1e-5)


built = functools.cache(build)


@functools.cache
def caches_after_one_call() -> list[np.ndarray]:
    _, run, empty, x, _ = built()
    x = np.concatenate(x[:, :SPLIT_LENGTH])
    cache = run(x, jax.tree.map(jnp.copy, empty), ints([SPLIT_LENGTH] * 2), ints([0, SPLIT_LENGTH, len(x)]))[1]
    return [np.asarray(leaf) for leaf in jax.tree.leaves(cache)]


@settings(max_examples=8)
@given(data=st.data())
def test_no_split_shows_in_outputs_or_caches(data: st.DataObject) -> None:
    _, run, empty, x, y = built()
    want = caches_after_one_call()
    cache = hf_layers.run_split(data, run, empty, x, y, SPLIT_LENGTH)
    for got, whole in zip(jax.tree.leaves(cache), want, strict=True):
        np.testing.assert_allclose(np.asarray(got), whole, rtol=1e-5, atol=1e-5)


def test_fp8_indexer_keys_choose_nearly_the_same() -> None:
    _, run, cache, x, y = build(jnp.bfloat16, jnp.uint8)
    out, _ = run(np.concatenate(x), cache, ints([LENGTH, LENGTH]), ints([0, LENGTH, 2 * LENGTH]))
    error = np.asarray(out, np.float32).reshape(y.shape) - y
    # Some tokens choose another key at the edge of their 12; most choose the same ones.
    assert np.median(np.abs(error).max(-1)) < 0.02 * np.abs(y).max()


def test_refuses() -> None:
    fields, tensors, _, _ = hf_layers.v32_layer()
    config = v32.V32Config.from_hf(fields)
    assert set(v32.v32_hf_shapes(config)) == set(tensors)
    with pytest.raises(ValueError, match=r"tensor 'indexer.wk.weight' is missing"):
        v32.v32_params_from_hf(config, {k: t for k, t in tensors.items() if k != "indexer.wk.weight"})
    with pytest.raises(ValueError, match=r"tensor 'indexer.k_norm.bias' must have shape"):
        v32.v32_params_from_hf(config, {**tensors, "indexer.k_norm.bias": np.zeros(3)})
    with pytest.raises(ValueError, match="index_topk"):
        v32.V32Config.from_hf({k: value for k, value in fields.items() if k != "index_topk"})
    with pytest.raises(ValueError, match="q_lora_rank must not be None"):
        v32.V32Config.from_hf({**fields, "q_lora_rank": None})
    with pytest.raises(ValueError, match="kv_dtype: got uint8 with kv_lora_rank=32"):
        v32.init_v32_cache(config, 1, 4, kv_dtype=jnp.uint8)

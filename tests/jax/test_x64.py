"""Under jax_enable_x64 Python's integers are 64 bits wide: every operation still traces, and gives the same dtypes."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tsmla_jax
from tsmla_jax.nn import MLAConfig, param_shapes
from tsmla_jax.nn.mla import functional
from tsmla_jax.nn.step import Step
from tsmla_jax.ops.explain import OPERATIONS
from tsmla_jax.sparse import CompressorState, init_v4_cache, write_indexer_cache, write_v4_cache

BF16, F32, I32, FP8, U8 = jnp.bfloat16, jnp.float32, jnp.int32, jnp.float8_e4m3fn, jnp.uint8


def of(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def calls() -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """A call of each operation: its arrays, and its static options."""
    cache, tables, lens, starts = of(BF16, 6, 16, 48), of(I32, 3, 2), of(I32, 3), of(I32, 4)
    rows, slots, angles = (of(BF16, 5, 32), of(BF16, 5, 16)), of(I32, 5), of(F32, 5, 8)
    lengths = {"max_q_len": 4, "max_kv_len": 4, "softmax_scale": 0.1}
    index = of(BF16, 5, 2, 32), of(F32, 5, 2), of(BF16, 6, 16, 32)
    state = CompressorState(of(F32, 3, 8, 2, 64), of(I32, 3, 8))
    norm_and_rope = of(F32, 64), of(F32, 99, 16)
    ragged = {"latent_dim": 32, "max_q_len": 2, "softmax_scale": 0.1}
    return {
        "mla_decode": ((of(BF16, 5, 2, 48), cache, tables, lens, starts), ragged),
        "mla_prefill": ((of(BF16, 5, 2, 24), of(BF16, 5, 2, 24), of(BF16, 5, 2, 16), starts, starts), lengths),
        "mla_prefill_kv": ((of(BF16, 5, 2, 24), of(BF16, 5, 2, 32), of(BF16, 5, 8), starts, starts), lengths),
        "write_kv_cache": ((cache, *rows, slots), {}),
        "rope_write_kv_cache": (
            (cache, of(BF16, 5, 2, 32), of(BF16, 5, 2, 16), *rows, slots, angles, angles),
            {},
        ),
        "gather_kv_cache": ((cache, tables, lens, lens), {"total_len": 9}),
        "merge_attention_states": (([of(BF16, 5, 2, 16)] * 2, [of(F32, 5, 2)] * 2), {}),
        "sparse_mla": ((of(BF16, 5, 2, 48), cache, of(I32, 5, 8), slots), {"latent_dim": 32, "softmax_scale": 0.1}),
        "indexer_logits": ((of(F32, 5, 2, 32), of(F32, 5, 2), of(F32, 6, 16, 32), of(I32, 5, 2), slots), {}),
        "indexer_selected_logits": ((of(BF16, 5, 2, 32), of(F32, 5, 2), of(BF16, 6, 16, 32), of(I32, 5, 8), slots), {}),
        "indexer_loss": (
            (*index, of(BF16, 5, 2, 48), cache, of(F32, 5, 2), tables, lens, starts),
            {"softmax_scale": 0.1},
        ),
        "select_topk": ((of(F32, 5, 32), slots), {"k": 4}),
        "selection_bits": ((of(I32, 5, 4),), {"num_keys": 30}),
        "indexer_topk": (
            (of(F32, 5, 2, 32), of(F32, 5, 2), of(F32, 6, 16, 32), tables, lens, starts),
            {"k": 4, "return_slots": True},
        ),
        "compress_write_kv_cache": (
            (of(F32, 3, 8, 64), of(F32, 5, 2, 64), of(F32, 4, 64), state, *norm_and_rope, tables, lens, lens, starts),
            {"ratio": 4, "overlap": False, "eps": 1e-6},
        ),
        "indexer_quantize": ((of(BF16, 5, 2, 128), of(BF16, 5, 2)), {}),
        "block_scaled_matmul": ((of(FP8, 5, 256), of(FP8, 130, 256), of(F32, 5, 2), of(F32, 2, 2)), {}),
        "grouped_block_scaled_matmul": (
            (of(FP8, 5, 256), of(FP8, 3, 130, 256), of(F32, 5, 2), of(F32, 3, 2, 2), starts),
            {},
        ),
        "quantize_blocks": ((of(BF16, 5, 130),), {}),
        "write_indexer_cache": ((of(U8, 3, 16, 132), of(BF16, 5, 128), slots), {}),
        "write_packed_kv_cache": ((of(U8, 3, 16, 656), of(BF16, 5, 512), of(BF16, 5, 64), slots), {}),
        "compress_kv": ((of(F32, 5, 2, 64), of(F32, 4, 64), state, lens, lens, starts), {"ratio": 4, "overlap": True}),
    }


NAMED = {
    "mla_decode": ("cu_seqlens_q",),
    "mla_prefill": ("cu_seqlens_q", "cu_seqlens_kv"),
    "mla_prefill_kv": ("cu_seqlens_q", "cu_seqlens_kv"),
    "indexer_topk": ("cu_seqlens_q",),
    "indexer_loss": ("block_tables", "seq_lens", "cu_seqlens_q"),
    "compress_kv": ("state_slots", "seq_lens", "cu_seqlens_q"),
    "compress_write_kv_cache": ("state_slots", "seq_lens", "cu_seqlens_q"),
}
"""The arrays at the end of a call that are passed by keyword."""


def results(name: str, implementation: str) -> Any:
    arrays, options = calls()[name]
    named = NAMED.get(name, ())

    def run(*arrays: Any) -> Any:
        count = len(arrays) - len(named)
        by_name = dict(zip(named, arrays[count:], strict=True))
        function = OPERATIONS[name].function
        return function(*arrays[:count], **by_name, **options, implementation=implementation)

    return jax.tree.map(lambda x: (x.shape, x.dtype.name), jax.eval_shape(run, *arrays))


def test_every_operation_is_called() -> None:
    assert set(calls()) == set(OPERATIONS)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name: str, implementation: str) -> None:
    usual = results(name, implementation)
    with jax.enable_x64(True):
        assert results(name, implementation) == usual


def test_writes_reach_their_slots() -> None:
    rows, slots = np.arange(24, dtype=np.float32).reshape(3, 8) + 1, np.array([5, -1, 2], np.int32)
    with jax.enable_x64(True):
        dense = tsmla_jax.write_kv_cache(jnp.zeros((2, 4, 8), F32), jnp.asarray(rows), None, slots)
        v4 = write_v4_cache(
            init_v4_cache(2, layout="plain", cache_dtype="bfloat16", page_size=4, head_dim=8), jnp.asarray(rows), slots
        )
    want = np.zeros((8, 8), np.float32)
    want[[5, 2]] = rows[[0, 2]]
    np.testing.assert_array_equal(np.asarray(dense).reshape(8, 8), want)
    np.testing.assert_array_equal(np.asarray(v4, np.float32).reshape(8, 8), want)


def test_the_indexers_cache() -> None:
    with jax.enable_x64(True):
        written = jax.eval_shape(write_indexer_cache, of(U8, 2, 64, 132), of(BF16, 3, 128), of(I32, 3))
    assert written.dtype == jnp.uint8


def test_the_layer() -> None:
    config = MLAConfig(
        hidden_size=32,
        num_attention_heads=2,
        q_lora_rank=None,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        rope_theta=1e4,
    )
    params = {name: of(BF16, *shape) for name, shape in param_shapes(config).items()}
    cache, tables, lens, starts = of(BF16, 6, 16, 48), of(I32, 3, 2), of(I32, 3), of(I32, 4)

    def decode(params: Any, x: Any, cache: Any, tables: Any, lens: Any, slots: Any) -> Any:
        return functional.decode(params, config, x, cache, Step(tables, lens, slots))

    def prefill(params: Any, x: Any, cache: Any, tables: Any, lens: Any, slots: Any, starts: Any) -> Any:
        step = Step(tables, lens, slots, starts, 5)
        return functional.prefill_with_context(params, config, x, cache, step, context_chunk=16)

    with jax.enable_x64(True):
        dense, after = jax.eval_shape(decode, params, of(BF16, 3, 1, 32), cache, tables, lens, of(I32, 3, 1))
        ragged, _ = jax.eval_shape(prefill, params, of(BF16, 5, 32), cache, tables, lens, of(I32, 5), starts)
    assert (dense.dtype, after.dtype, ragged.dtype) == (jnp.bfloat16,) * 3


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_without_it_doubles_of_numpy_are_floats_as_under_jit(implementation: str) -> None:
    """And no code of this project asks jax for a float64 that it can't have: warnings are errors."""
    rng = np.random.default_rng(0)
    q, cache = rng.normal(size=(2, 1, 3, 12)), rng.normal(size=(4, 5, 12))
    tables, lens = np.array([[0, 3], [2, 1]], np.int32), np.array([7, 5], np.int32)

    def attend(q: Any, cache: Any) -> jax.Array:
        options = {"latent_dim": 8, "softmax_scale": 0.3, "implementation": implementation}
        return tsmla_jax.mla_decode(q, cache, tables, lens, **options)

    with warnings.catch_warnings(action="error"):
        out = attend(q, cache)
    assert out.dtype == F32
    np.testing.assert_array_equal(out, attend(q.astype(np.float32), cache.astype(np.float32)))

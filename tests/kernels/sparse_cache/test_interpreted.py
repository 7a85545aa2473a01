"""The source of the kernels that write packed caches, run thread by thread on numbers, against the references: every
byte, without a GPU. See cache_interpreter.py."""

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.emulator.cache_interpreter import PACKED_CACHES, Interpreter
from tests.kernels.cache_ops.test_interpreted import wider
from tsmla_jax import sparse
from tsmla_kernels.contract.layouts import IndexerCacheSpec
from tsmla_kernels.contract.packed import IndexerWriteSpec
from tsmla_kernels.sparse_cache.config import (
    WARPS,
    IndexerQuantizeConfig,
    IndexerWriteConfig,
    PackedWriteConfig,
    indexer_write_reasons,
)

BF16, F32 = "bfloat16", "float32"
KINDS = {BF16: ml_dtypes.bfloat16, "float16": np.float16, F32: np.float32}
THREADS, PAGES, PAGE = 32 * WARPS, 3, 6
SIZES = (1.0, 1e-6, 448.0, 1e30, 0.0, 449.0, 2.0**-20)  # of rows; float16 has no such sizes


def rows_of(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    """Normal rows of many sizes, one of them with infinities."""
    drawn = np.random.default_rng(seed).normal(size=shape)
    if dtype != "float16":
        drawn *= np.resize(SIZES, shape[:-1])[..., None]
        drawn.reshape(-1, shape[-1])[-1, ::5] = np.inf
    return drawn.astype(KINDS[dtype])


def slots_of(tokens: int, dtype: str) -> np.ndarray:
    slots = np.random.default_rng(tokens).permutation(PAGES * PAGE)[:tokens].astype(dtype)
    slots[1::4] = np.resize([-1, PAGES * PAGE] if dtype == "int32" else [2**32 + 3, -(2**32) + 3], len(slots[1::4]))
    return slots


def bytes_of(row: int) -> np.ndarray:
    return np.random.default_rng(row).integers(0, 256, (PAGES, PAGE, row), np.uint8)


def angles_of(tokens: int, width: int) -> list[np.ndarray]:
    turn = np.random.default_rng(width).uniform(0, 6, (tokens, width)).astype(np.float32)
    return [np.cos(turn), np.sin(turn)]


def reference(op: str, *arrays: Any, **options: Any) -> Any:
    return getattr(sparse, op)(*map(jnp.asarray, arrays), implementation="reference", **options)


def in_range(slots: np.ndarray) -> np.ndarray:
    return np.where((slots >= 0) & (slots < PAGES * PAGE), slots, -1).astype(np.int32)


@pytest.mark.parametrize(
    "config",
    [
        PackedWriteConfig(BF16),
        PackedWriteConfig(BF16, True, False, "halves", slot_dtype="int64"),
        PackedWriteConfig("float16", True, True, "halves"),
        PackedWriteConfig(F32, True, False, "interleaved", slot_dtype="int64"),
    ],
    ids=str,
)
def test_packed_rows(config: PackedWriteConfig) -> None:
    tokens = 9
    machine = Interpreter(PACKED_CACHES)
    kernel, put = machine.module.WritePackedKvCache(config), machine.memory.tensor
    latent, k_rope = rows_of((tokens, 512), config.in_dtype, 1), rows_of((tokens, 64), config.in_dtype, 2)
    k_rope = np.where(np.isfinite(k_rope), k_rope, 1).astype(k_rope.dtype)
    slots, cache = slots_of(tokens, config.slot_dtype), bytes_of(656)
    angles = angles_of(tokens, 32) if config.rotates else []
    written = put(cache)
    turning = [put(wider(x, 4)) for x in angles] or [None, None]
    operands = put(wider(latent, 8)), put(wider(k_rope, 8)), put(slots), *turning, written
    machine.launch(kernel.write, THREADS, -(-tokens // WARPS), *operands, meeting=True)
    layouts = {"rope_interleave": config.rope_interleave, "rope_layout": config.rope_layout} if angles else {}
    want = reference("write_packed_kv_cache", cache, latent, k_rope, in_range(slots), *angles, **layouts)
    np.testing.assert_array_equal(written.array, np.asarray(want))


ROTATIONS = [(0, 0, "halves"), (64, 0, "halves"), (64, 64, "interleaved"), (128, 0, "halves"), (32, 48, "halves")]


@pytest.mark.parametrize("rotation", ROTATIONS, ids=str)
def test_indexer_keys(rotation: tuple[int, int, str]) -> None:
    tokens, (width, offset, layout) = 11, rotation
    dtype, slot_dtype = (BF16, "int64") if width == 64 else (F32, "int32")
    config = IndexerWriteConfig(dtype, width, offset, layout, slot_dtype)
    machine = Interpreter(PACKED_CACHES)
    spec = IndexerWriteSpec(tokens, IndexerCacheSpec(PAGES, PAGE, 128, True), dtype, None)
    assert indexer_write_reasons(spec) == []
    kernel, put = machine.module.WriteIndexerCache(config), machine.memory.tensor
    keys, slots, cache = rows_of((tokens, 128), dtype, 3), slots_of(tokens, slot_dtype), bytes_of(132)
    keys = np.where(np.isfinite(keys), keys, 1).astype(keys.dtype)  # inf - inf, where a key is rotated
    angles = angles_of(tokens, width // 2) if width else []
    written = put(cache)
    operands = put(wider(keys, 8)), put(slots), *([put(x) for x in angles] or [None, None]), written
    machine.launch(kernel.write, THREADS, -(-tokens // (2 * WARPS)), *operands, meeting=True)
    options = {"rope_offset": offset, "rope_layout": layout} if width else {}
    want = reference("write_indexer_cache", cache, keys, in_range(slots), *angles, **options)
    np.testing.assert_array_equal(written.array, np.asarray(want))


@pytest.mark.parametrize(
    ("heads", "unroll", "rotation"), [(16, 4, ROTATIONS[1]), (12, 4, ROTATIONS[2]), (8, 1, ROTATIONS[0])], ids=str
)
def test_indexer_queries(heads: int, unroll: int, rotation: tuple[int, int, str]) -> None:
    tokens, (width, offset, layout) = 3, rotation
    config = IndexerQuantizeConfig(BF16, F32, heads, width, offset, layout, unroll)
    machine = Interpreter(PACKED_CACHES)
    kernel, put = machine.module.IndexerQuantize(config), machine.memory.tensor
    q = rows_of((tokens, heads, 128), BF16, 4)
    q = np.where(np.isfinite(q), q, 1).astype(q.dtype)
    weights = np.random.default_rng(5).normal(size=(tokens, heads)).astype(np.float32)
    angles = angles_of(tokens, width // 2) if width else []
    rows = tokens * heads
    q8, folded = put(np.zeros((rows, 128), ml_dtypes.float8_e4m3fn)), put(np.zeros(rows, np.float32))
    given = put(wider(q.reshape(-1, 128), 8)), put(weights.reshape(-1)), *([put(x) for x in angles] or [None, None])
    grid = -(-rows // (WARPS * config.warp_rows))
    machine.launch(kernel.quantize, THREADS, grid, *given, q8, folded, meeting=True)
    options = {"rope_offset": offset, "rope_layout": layout} if width else {}
    want_q8, want = reference("indexer_quantize", q, weights, *angles, **options)
    np.testing.assert_array_equal(
        q8.array.reshape(q.shape).astype(np.float32), np.asarray(want_q8).astype(np.float32)
    )
    np.testing.assert_allclose(folded.array.reshape(weights.shape), np.asarray(want), rtol=3e-7)

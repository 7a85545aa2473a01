"""The cache kernels' source, run thread by thread on numbers, against the references: every store, without a GPU. See
cache_interpreter.py."""

import itertools
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import tsmla_jax
from tests.emulator.cache_interpreter import Interpreter
from tsmla_kernels.cache_ops.config import GatherConfig, RopeWriteConfig, WriteConfig

KINDS = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float32": np.float32,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
}
BF16, F16, F32, FP8 = KINDS
PAGES, PAGE = 5, 16
SCALE = np.asarray([0.37], np.float32)
SPECIAL = (0.0, -0.0, np.inf, -np.inf, np.nan, 448, 463.9, 464, 465, -1e30, 2.0**-9, 1.5 * 2.0**-10, 2.0**-10, 17, 19)


def values(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    """Normal values with special ones among them."""
    rng = np.random.default_rng(seed)
    drawn = rng.normal(size=shape) * 8
    if drawn.size:
        drawn.reshape(-1)[rng.choice(drawn.size, min(drawn.size, len(SPECIAL)), replace=False)] = SPECIAL[: drawn.size]
    with np.errstate(over="ignore", invalid="ignore"):
        return drawn.astype(KINDS[dtype])


def slots_of(tokens: int, dtype: str = "int32") -> np.ndarray:
    slots = np.random.default_rng(tokens).permutation(PAGES * PAGE)[:tokens].astype(dtype)
    illegal = [-1, PAGES * PAGE, -(2**31), 2**31 - 1]
    if dtype == "int64":
        illegal = [2**32 + 3, -(2**32) + 3, *illegal]  # whose lower halves are slots of the cache
    slots[1::6] = np.resize(illegal, len(slots[1::6]))
    return slots


def wider(array: np.ndarray, more: int) -> np.ndarray:
    """The rows as the first columns of wider ones, the others NaN."""
    return np.concatenate([array, np.full((*array.shape[:-1], more), np.nan, array.dtype)], axis=-1)


def assert_same(got: np.ndarray, want: Any) -> None:
    assert got.dtype == np.asarray(want).dtype
    np.testing.assert_array_equal(got.astype(np.float32), np.asarray(want, np.float32))


def reference(op: str, *arrays: Any, **options: Any) -> Any:
    return getattr(tsmla_jax, op)(*map(jnp.asarray, arrays), implementation="reference", **options)


@pytest.mark.parametrize(
    "config",
    [
        WriteConfig(BF16, BF16),
        WriteConfig(BF16, FP8),
        WriteConfig(F32, FP8, 128, 0, unroll=1),
        WriteConfig(F16, BF16, 64, 16, unroll=4),
        WriteConfig(BF16, FP8, 64, 16, slot_dtype="int64"),
    ],
    ids=str,
)
def test_write(config: WriteConfig) -> None:
    for tokens in (1, 19):
        machine = Interpreter()
        kernel, put = machine.module.WriteKvCache(config), machine.memory.tensor
        cache = values((PAGES, PAGE, config.head_dim), config.kv_dtype, 1)
        latent = values((tokens, config.latent_dim), config.in_dtype, 2)
        k_rope = values((tokens, config.rope_dim), config.in_dtype, 3)
        slots, written = slots_of(tokens, config.slot_dtype), put(cache)
        rope = wider(k_rope, 16) if config.rope_dim else latent
        step = kernel.tiling.rows * config.unroll
        operands = put(wider(latent, 8)), put(rope), put(slots), put(SCALE), written
        machine.launch(kernel.write, kernel.tiling.threads, -(-tokens // step), *operands)
        known = np.where((slots >= 0) & (slots < PAGES * PAGE), slots, -1).astype(np.int32)
        want = reference("write_kv_cache", cache, latent, k_rope, known, kv_scale=float(SCALE[0]))
        assert_same(written.array, want)


@pytest.mark.parametrize(("interleave", "layout"), list(itertools.product((True, False), ("interleaved", "halves"))))
@pytest.mark.parametrize(("q_dtype", "kv_dtype"), [(BF16, BF16), (FP8, FP8), (BF16, FP8)])
def test_rope_write(q_dtype: str, kv_dtype: str, interleave: bool, layout: str) -> None:
    heads = 3
    sizes = [(7, 64, 32, 2)]
    if interleave and layout == "interleaved":
        sizes.append((3, 512, 64, 1))  # DeepSeek's widths
    for tokens, latent_dim, rope_dim, unroll in sizes:
        config = RopeWriteConfig(BF16, q_dtype, kv_dtype, latent_dim, rope_dim, interleave, layout, unroll)
        machine = Interpreter()
        kernel, put = machine.module.RopeWriteKvCache(config), machine.memory.tensor
        cache = values((PAGES, PAGE, config.head_dim), kv_dtype, 1)
        nope = values((tokens, heads, latent_dim), BF16, 2)
        rope = np.random.default_rng(3).normal(size=(tokens, heads, rope_dim)).astype(ml_dtypes.bfloat16)
        latent, k_rope = values((tokens, latent_dim), BF16, 4), -rope[:, 0]
        cos, sin = np.random.default_rng(5).uniform(-1, 1, (2, tokens, rope_dim // 2)).astype(np.float32)
        slots, written = slots_of(tokens), put(cache)
        q = put(np.zeros((tokens * heads, config.head_dim), KINDS[q_dtype]))
        step = kernel.tiling.rows * unroll
        operands = [
            put(x.reshape(-1, x.shape[-1])) for x in (wider(nope, 8), wider(rope, 64), latent, wider(k_rope, 8))
        ]
        operands += [put(slots), put(wider(cos, 4)), put(sin), put(SCALE), put(2 * SCALE), q, written]
        grid = -(-tokens * (heads + 1) // step)
        arrays = machine.module.RopeWriteArrays(*operands)
        machine.launch(kernel.rotate_and_write, kernel.tiling.threads, grid, arrays, heads)
        want_q, want = reference(
            "rope_write_kv_cache", cache, nope, rope, latent, k_rope, slots, cos, sin, q_dtype=q_dtype,
            q_scale=float(SCALE[0]), kv_scale=float(2 * SCALE[0]), rope_interleave=interleave, rope_layout=layout,
        )  # fmt: skip
        assert_same(q.array.reshape(tokens, heads, -1), want_q)
        assert_same(written.array, want)


@pytest.mark.parametrize(
    ("config", "requests"),
    [
        (GatherConfig(BF16, BF16, 64), 3),
        (GatherConfig(FP8, F32, 64, rounds=2, unroll=1), 3),
        (GatherConfig(FP8, BF16, 1200, rounds=8, unroll=2), 300),
    ],
    ids=str,
)
def test_gather(config: GatherConfig, requests: int) -> None:
    rng = np.random.default_rng(requests)
    cache = values((PAGES, PAGE, config.head_dim), config.kv_dtype, 1)
    tables = rng.integers(0, PAGES, (requests, 2)).astype(np.int32)
    starts = rng.integers(0, 20, requests).astype(np.int32)
    lens = (rng.integers(0, 12, requests) * rng.integers(0, 2, requests)).astype(np.int32)
    if requests > 256:  # several segments, the last request of one not empty, and few rows in all
        lens[3:292], lens[127] = 0, 5
    tables[0], lens[1], starts[2] = (2**31 - 1, -(2**31)), 9, 27
    total = int(lens.sum()) + 3
    machine = Interpreter()
    kernel, put = machine.module.GatherKvCache(config), machine.memory.tensor
    kernel.storage = None
    out = put(np.full((total, config.head_dim), 7, KINDS[config.out_dtype]))
    operands = put(cache), put(tables), put(starts), put(lens), put(SCALE), out
    grid = -(-total // config.cta_rows)
    machine.launch(kernel.gather, kernel.tiling.threads, grid, *operands, meeting=True)
    want = reference(
        "gather_kv_cache", cache, tables, starts, lens, total_len=total, kv_scale=float(SCALE[0]),
        out_dtype=KINDS[config.out_dtype],
    )  # fmt: skip
    assert_same(out.array, want)

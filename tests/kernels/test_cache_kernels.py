"""The kernels that write, gather and pack caches, compiled and run on the machine of tests/emulator/ptx: every byte is
that of the references, for dtypes, widths and values that test_on_machine.py's calls do not have; and their objects."""

from __future__ import annotations

import functools
import json
import types
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import torch

import tsmla_jax
from tests.emulator.launcher import Gpu
from tests.emulator.ptx import machine
from tests.emulator.ptx.launcher import EmulatedLauncher
from tests.kernels.object_checks import check_object
from tsmla_jax import sparse
from tsmla_kernels.cache_ops.config import GatherConfig, RopeWriteConfig, WriteConfig
from tsmla_kernels.catalog import (
    GATHER_KV_CACHE,
    INDEXER_QUANTIZE,
    ROPE_WRITE_KV_CACHE,
    WRITE_INDEXER_CACHE,
    WRITE_KV_CACHE,
    WRITE_PACKED_KV_CACHE,
)
from tsmla_kernels.kernel import Config, Kernel
from tsmla_kernels.launch import ArrayView
from tsmla_kernels.sparse_cache.config import IndexerQuantizeConfig, IndexerWriteConfig, PackedWriteConfig

pytestmark = [
    pytest.mark.skipif(machine.COMPILER is None, reason="needs g++, which builds the machine"),
]

BF16, F16, F32, FP8 = "bfloat16", "float16", "float32", "float8_e4m3fn"
KINDS = {BF16: ml_dtypes.bfloat16, F16: np.float16, F32: np.float32, FP8: ml_dtypes.float8_e4m3fn}
PAGES, PAGE = 5, 16
SCALE = np.asarray([0.37], np.float32)
SPECIAL = (0.0, -0.0, np.inf, -np.inf, np.nan, 448, 463.9, 464, 465, -1e30, 2.0**-9, 1.5 * 2.0**-10, 2.0**-10, 17, 19)
SIZES = (1.0, 1e-6, 448.0, 1e30, 0.0, 449.0, 2.0**-20)
"""Of rows of packed caches; float16 has no such sizes."""

MOST_REGISTERS = 40
"""Of rows of DeepSeek's width: five CTAs of 288 threads on a multiprocessor, of 65536 registers and 2048 threads."""


def run(kernel: Kernel, config: Config, *inputs: np.ndarray, **results: np.ndarray) -> list[np.ndarray]:
    """The outputs of a kernel on these inputs. `results` has what lies in the outputs that are no input's memory."""
    assert type(config)(**json.loads(kernel.config_json(config))) == config
    launcher = EmulatedLauncher(Gpu(), kernel, config)
    most = MOST_REGISTERS if getattr(config, "head_dim", 0) == 576 else 255
    check_object(launcher.emulated.compiled, kernels=1, registers=most)
    assert len(launcher.emulated.compiled.module) < 64 << 10  # it travels in every program that calls it
    memory: dict[str, np.ndarray] = {}
    given = iter(inputs)
    for operand in launcher.operands:
        if operand.alias:
            memory[operand.name] = memory[operand.alias]
            continue
        array = results[operand.name] if operand.output else next(given)
        aligned = torch.empty(array.nbytes, dtype=torch.uint8).numpy()
        memory[operand.name] = aligned.view(array.dtype).reshape(array.shape)
        memory[operand.name][...] = array
    launcher(0, [ArrayView(array.ctypes.data, array.shape, str(array.dtype)) for array in memory.values()])
    assert launcher.emulated.hazards == []
    return [memory[operand.name] for operand in launcher.operands if operand.output]


def values(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    """Normal values with special ones among them."""
    rng = np.random.default_rng(seed)
    drawn = rng.normal(size=shape) * 8
    if drawn.size:
        drawn.reshape(-1)[rng.choice(drawn.size, len(SPECIAL), replace=False)] = SPECIAL
    with np.errstate(over="ignore", invalid="ignore"):
        return drawn.astype(KINDS[dtype])


def short(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    """Values of so few bits that their products with angles_of's are exact, however a compiler fuses the sum of two."""
    return np.random.default_rng(seed).normal(size=shape).astype(ml_dtypes.bfloat16).astype(KINDS[dtype])


def sized(rows: np.ndarray, infinite: bool = False) -> np.ndarray:
    """The rows at many sizes, the last one with infinities if any may be."""
    if rows.dtype != np.float16:
        exponents = np.frexp(np.resize(SIZES, rows.shape[:-1]))[1]  # powers of two keep their values short
        rows = (rows.astype(np.float32) * np.ldexp(np.float32(1), exponents)[..., None]).astype(rows.dtype)
    if infinite:
        rows.reshape(-1, rows.shape[-1])[-1, ::5] = np.inf
    return rows


def angles_of(tokens: int, width: int) -> list[np.ndarray]:
    return list(np.random.default_rng(width).integers(-64, 65, (2, tokens, width)).astype(np.float32) / 64)


def slots_of(tokens: int, dtype: str = "int32") -> np.ndarray:
    slots = np.random.default_rng(tokens).permutation(PAGES * PAGE)[:tokens].astype(dtype)
    illegal = [-1, PAGES * PAGE, -(2**31), 2**31 - 1]
    if dtype == "int64":
        illegal = [2**32 + 3, -(2**32) + 3, *illegal]  # whose lower halves are slots of the cache
    slots[1::4] = np.resize(illegal, len(slots[1::4]))
    return slots


def in_range(slots: np.ndarray) -> np.ndarray:
    return np.where((slots >= 0) & (slots < PAGES * PAGE), slots, -1).astype(np.int32)


def wider(array: np.ndarray, more: int) -> np.ndarray:
    """The rows as the first columns of wider ones, the others NaN."""
    return np.concatenate([array, np.full((*array.shape[:-1], more), np.nan, array.dtype)], axis=-1)


def flat(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1, array.shape[-1])


def reference(package: types.ModuleType, op: str, *arrays: Any, **options: Any) -> Any:
    """Compiled as one, with scales as operands: XLA would multiply by the inverse of a constant."""
    scales = {name: np.float32(value) for name, value in options.items() if isinstance(value, float)}
    fixed = {name: value for name, value in options.items() if name not in scales}
    run = functools.partial(getattr(package, op), implementation="reference", **fixed)
    return jax.jit(run)(*arrays, **scales)


def assert_same(got: np.ndarray, want: Any) -> None:
    assert got.dtype == np.asarray(want).dtype
    np.testing.assert_array_equal(got.astype(np.float32).reshape(want.shape), np.asarray(want, np.float32))


@pytest.mark.parametrize(
    "config",
    [
        WriteConfig(BF16, BF16),
        WriteConfig(F32, FP8, 128, 0, unroll=1),
        WriteConfig(F16, BF16, 64, 16, unroll=4),
        WriteConfig(BF16, FP8, slot_dtype="int64"),
    ],
    ids=str,
)
def test_write(config: WriteConfig) -> None:
    for tokens in (1, 19):
        cache = values((PAGES, PAGE, config.head_dim), config.kv_dtype, 1)
        latent = values((tokens, config.latent_dim), config.in_dtype, 2)
        k_rope = values((tokens, config.rope_dim), config.in_dtype, 3)
        slots, rope = slots_of(tokens, config.slot_dtype), wider(k_rope, 16) if config.rope_dim else latent
        (written,) = run(WRITE_KV_CACHE, config, cache, wider(latent, 8), rope, slots, SCALE)
        given = cache, latent, k_rope, in_range(slots)
        assert_same(written, reference(tsmla_jax, "write_kv_cache", *given, kv_scale=float(SCALE[0])))


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        (RopeWriteConfig(BF16, BF16, BF16, rope_layout="halves"), 7),
        (RopeWriteConfig(BF16, FP8, FP8), 3),
        (RopeWriteConfig(BF16, BF16, FP8, 64, 32, False, "interleaved", 2), 7),
        (RopeWriteConfig(F16, FP8, FP8, 64, 32, False, "halves", 2), 7),
    ],
    ids=str,
)
def test_rope_write(config: RopeWriteConfig, tokens: int) -> None:
    heads, dtype = 3, config.in_dtype
    cache = values((PAGES, PAGE, config.head_dim), config.kv_dtype, 1)
    nope, latent = values((tokens, heads, config.latent_dim), dtype, 2), values((tokens, config.latent_dim), dtype, 4)
    rope = short((tokens, heads, config.rope_dim), dtype, 3)
    k_rope, slots, (cos, sin) = -rope[:, 0], slots_of(tokens), angles_of(tokens, config.rope_dim // 2)
    rows = flat(wider(nope, 8)), flat(wider(rope, 64)), latent, wider(k_rope, 8)
    given = cache, *rows, slots, wider(cos, 4), sin, SCALE, 2 * SCALE
    q = np.zeros((tokens * heads, config.head_dim), KINDS[config.q_dtype])
    found = run(ROPE_WRITE_KV_CACHE, config, *given, q=q)
    want = reference(
        tsmla_jax, "rope_write_kv_cache", cache, nope, rope, latent, k_rope, slots, cos, sin, q_dtype=config.q_dtype,
        q_scale=float(SCALE[0]), kv_scale=float(2 * SCALE[0]), rope_interleave=config.rope_interleave,
        rope_layout=config.rope_layout,
    )  # fmt: skip
    for got, wanted in zip(found, want, strict=True):
        assert_same(got, wanted)


@pytest.mark.parametrize(
    ("config", "requests"),
    [
        (GatherConfig(BF16, BF16), 3),
        (GatherConfig(FP8, F32, rounds=2, unroll=1), 3),
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
    total, kind = int(lens.sum()) + 3, KINDS[config.out_dtype]
    given = cache, tables, starts, lens
    (out,) = run(GATHER_KV_CACHE, config, *given, SCALE, out=np.full((total, config.head_dim), 7, kind))
    options = {"total_len": total, "kv_scale": float(SCALE[0]), "out_dtype": kind}
    assert_same(out, reference(tsmla_jax, "gather_kv_cache", *given, **options))


@pytest.mark.parametrize(
    "config",
    [
        PackedWriteConfig(BF16, slot_dtype="int64"),
        PackedWriteConfig(F16, True, True, "halves"),
        PackedWriteConfig(F32, True, False, "interleaved", slot_dtype="int64"),
    ],
    ids=str,
)
def test_packed_rows(config: PackedWriteConfig) -> None:
    tokens = 9
    latent = sized(np.random.default_rng(1).normal(size=(tokens, 512)).astype(KINDS[config.in_dtype]), infinite=True)
    k_rope, slots = sized(short((tokens, 64), config.in_dtype, 2)), slots_of(tokens, config.slot_dtype)
    cache = np.random.default_rng(656).integers(0, 256, (PAGES, PAGE, 656), np.uint8)
    angles = angles_of(tokens, 32) if config.rotates else []
    given = cache, wider(latent, 8), wider(k_rope, 8), slots, *(wider(x, 4) for x in angles)
    (written,) = run(WRITE_PACKED_KV_CACHE, config, *given)
    layouts = {"rope_interleave": config.rope_interleave, "rope_layout": config.rope_layout} if angles else {}
    rows = latent, k_rope, in_range(slots)
    assert_same(written, reference(sparse, "write_packed_kv_cache", cache, *rows, *angles, **layouts))


@pytest.mark.parametrize(
    "config",
    [
        IndexerWriteConfig(BF16, 64, 64, "interleaved", "int64"),
        IndexerWriteConfig(F32, 128, 0, "halves"),
        IndexerWriteConfig(F32, 32, 48, "halves"),
        IndexerWriteConfig(F16),
    ],
    ids=str,
)
def test_indexer_keys(config: IndexerWriteConfig) -> None:
    tokens, width = 11, config.rope_dim
    keys, slots = sized(short((tokens, 128), config.in_dtype, 3)), slots_of(tokens, config.slot_dtype)
    cache = np.random.default_rng(132).integers(0, 256, (PAGES, PAGE, 132), np.uint8)
    angles = angles_of(tokens, width // 2) if width else []
    (written,) = run(WRITE_INDEXER_CACHE, config, cache, wider(keys, 8), slots, *angles)
    options = {"rope_offset": config.rope_offset, "rope_layout": config.rope_layout} if width else {}
    assert_same(written, reference(sparse, "write_indexer_cache", cache, keys, in_range(slots), *angles, **options))


@pytest.mark.parametrize(
    "config",
    [
        IndexerQuantizeConfig(BF16, BF16, 16, 64, 0, "halves", 4),
        IndexerQuantizeConfig(BF16, F32, 12, 64, 64, "interleaved", 4),
        IndexerQuantizeConfig(F32, F32, 8, unroll=1),
    ],
    ids=str,
)
def test_indexer_queries(config: IndexerQuantizeConfig) -> None:
    tokens, heads, width = 3, config.num_heads, config.rope_dim
    q = sized(short((tokens, heads, 128), config.in_dtype, 4))
    weights = np.random.default_rng(5).normal(size=(tokens, heads)).astype(KINDS[config.weights_dtype])
    angles = angles_of(tokens, width // 2) if width else []
    given, rows = (flat(wider(q, 8)), weights.reshape(-1), *angles), tokens * heads
    empty = {"q8": np.zeros((rows, 128), KINDS[FP8]), "folded_weights": np.zeros(rows, np.float32)}
    q8, folded = run(INDEXER_QUANTIZE, config, *given, **empty)
    options = {"rope_offset": config.rope_offset, "rope_layout": config.rope_layout} if width else {}
    want_q8, want = reference(sparse, "indexer_quantize", q, weights, *angles, **options)
    assert_same(q8, want_q8)
    np.testing.assert_allclose(folded.reshape(weights.shape), np.asarray(want), rtol=3e-7)

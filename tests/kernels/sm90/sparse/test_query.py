"""Q's move to its place, in f16: every 16 bytes of it are read and written by one thread alone, as there is no barrier
between the two, and every column arrives where the keys' columns meet it.

The moves are the kernel's own functions, run for one thread after the other.
"""

from __future__ import annotations

import struct
import types
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.emulator.numeric_cute import numeric
from tests.emulator.warp_model import swizzled

pytest.importorskip("cutlass")

from tsmla_kernels.sm90.decode.query import StagedQuery
from tsmla_kernels.sm90.latent import query
from tsmla_kernels.sm90.latent.query import QueryCopy, q_pair_place
from tsmla_kernels.sm90.sparse.config import SparseConfig
from tsmla_kernels.sm90.sparse.query import SparseQuery
from tsmla_kernels.sm90.sparse.stages import sparse_ring
from tsmla_kernels.sm90.warp import DTYPES

THREADS, CHUNK = 128, 16  # bytes
KINDS: dict[str, dict[str, Any]] = {
    "v32": {},
    "v4": {"layout": "v4", "head_dim": 512, "page_size": 64, "page_span": 64},
    "e4m3": {"layout": "plain", "kv_dtype": "float8_e4m3fn"},
    "e4m3, 512 wide": {"layout": "plain", "kv_dtype": "float8_e4m3fn", "head_dim": 512},
    "16 bits": {"layout": "plain", "kv_dtype": "bfloat16"},
    "16 bits, 512 wide": {"layout": "plain", "kv_dtype": "bfloat16", "head_dim": 512},
}


class Word(int):
    """A register of 32 bits."""

    def __and__(self, other: int) -> Word:
        return Word(int(self) & other)

    def __lshift__(self, count: int) -> Word:
        return Word(int(self) << count & 0xFFFFFFFF)

    def bitcast(self, dtype: Any) -> float:
        assert dtype is query.Float32
        (number,) = struct.unpack("<f", struct.pack("<I", int(self) & 0xFFFFFFFF))
        return float(number)


class Registers:
    """A tensor in registers; None in its index is a mode that stays."""

    def __init__(self, words: np.ndarray) -> None:
        self.words = words

    def fill(self, value: int) -> None:
        self.words[:] = value

    def __getitem__(self, index: tuple[int | None, ...]) -> Any:
        found = self.words[tuple(slice(None) if i is None else i for i in index)]
        return Registers(found) if None in index else Word(found)

    def __setitem__(self, index: int, value: int) -> None:
        self.words[index] = value


class SharedMemory:
    """Bytes from address 0 on, and the threads that have read or written each chunk of them."""

    def __init__(self, contents: np.ndarray) -> None:
        self.words = contents.view(np.uint32).reshape(-1, CHUNK // 4)
        self.threads: list[set[int]] = [set() for _ in self.words]
        self.thread = 0

    def copy(self, source: Any, target: Any) -> None:
        """Four words between registers and the chunk of an address."""
        (address,) = (x for x in (source, target) if not isinstance(x, Registers))
        assert address % CHUNK == 0
        self.threads[address // CHUNK].add(self.thread)
        if isinstance(source, Registers):
            self.words[address // CHUNK] = source.words
        else:
            target.words[:] = self.words[address // CHUNK]


def two_halves(low: float, high: float) -> Word:
    return Word(int.from_bytes(struct.pack("<2e", low, high), "little"))


def greater_halves(top: int, pair: int) -> Word:
    # Magnitudes of f16 are ordered as their bits are.
    return Word(max(top & 0xFFFF, pair & 0x7FFF) | max(top >> 16, pair >> 16 & 0x7FFF) << 16)


def run_move(copy: QueryCopy, memory: SharedMemory, target: int, sources: Any, valid_rows: int) -> float:
    """`move` by all threads. Return the greatest magnitude that they found."""
    cute = types.SimpleNamespace(
        make_rmem_tensor=lambda shape, _: Registers(np.zeros(shape, np.uint32)), autovec_copy=memory.copy
    )
    names = {
        "cute": cute,
        "cutlass": types.SimpleNamespace(
            **{name: getattr(query.cutlass, name) for name in ("BFloat16", "Float16")},
            range=lambda *bounds, unroll: range(*bounds),
            range_constexpr=range,
        ),
        "Int32": Word,
        "kept": lambda value: value,
        "four_words": lambda address: address,
        "two_halves": two_halves,
        "greater_halves": greater_halves,
    }
    device, source = types.SimpleNamespace(**vars(copy)), types.SimpleNamespace(**vars(copy.source))
    device.source = source
    for owner, of, methods in (
        (device, copy, ("move", "clear", "place", "group", "move_groups")),
        (source, copy.source, ("row", "words")),
    ):
        for name in methods:
            function = numeric(getattr(type(of), name))
            function.__globals__.update(names)  # type: ignore[attr-defined]
            setattr(owner, name, types.MethodType(function, owner))
    top = Word(0)
    for memory.thread in range(THREADS):
        top = greater_halves(top, device.move(target, sources, valid_rows, memory.thread))
    return float(np.array([top], np.uint32).view(np.float16).max())


def rows_of(name: str, rows: int, columns: int) -> np.ndarray:
    dtype = ml_dtypes.bfloat16 if name == "bfloat16" else np.float16
    return np.random.default_rng(rows + columns).standard_normal((rows, columns)).astype(dtype)


def tiles_of(q: np.ndarray) -> np.ndarray:
    """Rows as tiles of 64 columns, whose rows of 128 bytes are swizzled."""
    rows, columns = q.shape
    place: Any = np.arange(rows)[:, None] * 128 + np.arange(64) * 2
    tiles = np.zeros((columns // 64, rows * 64), np.uint16)
    tiles[:, swizzled(place, 3) // 2] = q.view(np.uint16).reshape(rows, -1, 64).transpose(1, 0, 2)
    return tiles.reshape(-1)


def permuted(q: np.ndarray) -> np.ndarray:
    """The pairs of every 16 columns in the order in which keys meet them."""
    order = sorted(range(8), key=q_pair_place)
    return q.reshape(len(q), q.shape[1] // 16, 8, 2)[:, :, order].reshape(q.shape)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("p_rows", [16, 32, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_q_is_moved_in_place(kind: str, p_rows: int, dtype: str) -> None:
    config = SparseConfig(dtype, p_rows, **KINDS[kind])
    q, valid = rows_of(dtype, p_rows, config.head_dim), p_rows - 5
    copy, memory = SparseQuery(config, sparse_ring(config)).copy, SharedMemory(tiles_of(q))
    top = run_move(copy, memory, 0, (0, 0), valid)
    assert max(map(len, memory.threads)) == 1
    cut = config.e4m3_columns
    as_they_are = config.bf16_columns
    natural = q[:, cut:] if as_they_are else q[:, cut:].astype(np.float16)
    want = np.concatenate([permuted(q[:, :cut].astype(np.float16)).view(np.uint16), natural.view(np.uint16)], 1)
    want[valid:] = 0
    np.testing.assert_array_equal(memory.words.reshape(-1).view(np.uint16), tiles_of(want))
    if dtype == "bfloat16":  # numbers that stay bf16 need no range
        assert top == np.abs(q[:valid, : cut if as_they_are else None].astype(np.float16)).max(initial=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("p_rows", [16, 32, 64])
def test_q_is_moved_from_stages(p_rows: int, dtype: str) -> None:
    """Of the dense decode: from one stage of 32 rows, or two."""
    depth, stage_rows = 576, 32
    stages, valid = max(p_rows // stage_rows, 1), p_rows - 5
    q = rows_of(dtype, stages * stage_rows, depth)
    stored = np.concatenate([tiles_of(q[stage_rows * i :][:stage_rows]) for i in range(stages)])
    target = stored.nbytes
    memory = SharedMemory(np.concatenate([stored, np.full(p_rows * depth, 0xFFFF, np.uint16)]))
    copy = QueryCopy(StagedQuery(stage_rows), depth=depth, p_rows=p_rows, q_dtype=DTYPES[dtype])
    sources = 0, target // stages * (stages - 1)
    top = run_move(copy, memory, target, sources, valid)
    assert all(len(threads) == 1 for threads in memory.threads[target // CHUNK :])
    want = permuted(q[:p_rows].astype(np.float16)).view(np.uint16)
    want[valid:] = 0
    np.testing.assert_array_equal(memory.words.reshape(-1).view(np.uint16)[target // 2 :], tiles_of(want))
    if dtype == "bfloat16":
        assert top == np.abs(q[:valid].astype(np.float16)).max()

"""Decode of 16-bit queries over an fp8 cache: K from a stage to WGMMA's first operand, Q's columns in the same order,
and P from the accumulator to the rows that the values read.

The addresses and the order are the kernel's own functions; ldmatrix, stmatrix and the layouts of the copies and of
WGMMA are modelled here, a warp at a time, as the PTX manual defines them.
"""

import numpy as np
import pytest

pytest.importorskip("cutlass")

from tsmla_kernels.sm90.mla_decode_mixed import key_fragment, key_row, p_row, place

LANES = np.arange(32)
BLOCK, WARPS = 64, 4


def swizzled(address: int, bits: int) -> int:
    """SW64 (2 bits) or SW128 (3): 16-byte groups of a row, exchanged by the row's number."""
    return address ^ ((address >> 7) & (2**bits - 1)) << 4


def stage_of(keys: np.ndarray) -> np.ndarray:
    """Bytes [64 keys, columns] as TMA leaves them: tiles of 64 columns, SW64."""
    memory = np.zeros(keys.size, np.uint8)
    for key, column in np.ndindex(*keys.shape):
        memory[swizzled(column // 64 * 64 * BLOCK + key * 64 + column % 64, 2)] = keys[key, column]
    return memory


def ldmatrix(memory: np.ndarray, addresses: np.ndarray) -> list[np.ndarray]:
    """Four registers [32 lanes, 4 bytes]: lane l has bytes 4 (l % 4) and on of row l // 4."""
    registers = []
    for i in range(4):
        starts = addresses[8 * i : 8 * i + 8]
        assert len(set(starts // 16 % 8)) == 8  # no two rows share banks
        rows = np.stack([memory[a : a + 16] for a in starts])
        registers.append(rows.reshape(8, 4, 4)[LANES // 4, LANES % 4])
    return registers


def stmatrix_transposed(memory: np.ndarray, addresses: np.ndarray, registers: list[np.ndarray]) -> None:
    """Lane l has elements (l // 4, 2 (l % 4)) and the next of a matrix [8, 8] of 16 bits, whose columns become rows."""
    words = memory.view(np.uint16)
    for i, register in enumerate(registers):
        rows = addresses[8 * i : 8 * i + 8]
        assert len(set(rows // 16 % 8)) == 8
        for lane in LANES:
            for e in range(2):
                at = rows[2 * (lane % 4) + e] // 2 + lane // 4
                assert words[at] == 0  # written once
                words[at] = register[lane, e]


def first_operand(memory: np.ndarray, warp: int, step: int) -> np.ndarray:
    """What WGMMA takes as its rows of a step of 16 columns, [16, 16]: as read_keys and widen_keys leave it."""
    four = ldmatrix(memory, key_fragment(key_row(LANES, warp), step // 2, BLOCK))
    low, high = four[2 * (step % 2)], four[2 * (step % 2) + 1]
    operand = np.zeros((16, 16), np.uint8)
    # Register 0: rows g, columns 2 q; 1: rows g + 8; 2 and 3: eight columns further. One register is two elements.
    for register, pair in enumerate([low[:, :2], high[:, :2], low[:, 2:], high[:, 2:]]):
        for e in range(2):
            operand[LANES // 4 + register % 2 * 8, 2 * (LANES % 4) + e + register // 2 * 8] = pair[:, e]
    return operand


@pytest.mark.parametrize("columns", [128, 320, 576])
def test_keys_and_queries_meet_column_by_column(columns: int) -> None:
    keys = np.random.default_rng(columns).integers(1, 255, (BLOCK, columns)).astype(np.uint8)
    memory = stage_of(keys)
    column_at = np.zeros(16, int)  # which column of 16 lies at a place of Q
    for pair in range(8):
        column_at[2 * place(pair) : 2 * place(pair) + 2] = 2 * pair, 2 * pair + 1
    assert sorted(column_at) == list(range(16))
    for warp in range(WARPS):
        for step in range(columns // 16):
            expected = keys[16 * warp : 16 * warp + 16, 16 * step + column_at]
            np.testing.assert_array_equal(first_operand(memory, warp, step), expected)


@pytest.mark.parametrize("rows", [16, 32, 64])
def test_p_comes_out_as_rows_by_keys(rows: int) -> None:
    p = np.random.default_rng(rows).integers(1, 2**16, (BLOCK, rows)).astype(np.uint16)  # as S^T: keys by rows
    memory = np.zeros(rows * 2 * BLOCK, np.uint8)
    for warp in range(WARPS):
        for v in range(0, rows // 8, 2):
            registers = []
            for j in range(2):
                for i in range(2):
                    key, row = 16 * warp + LANES // 4 + 8 * i, 8 * (v + j) + 2 * (LANES % 4)
                    registers.append(np.stack([p[key, row], p[key, row + 1]], 1))
            stmatrix_transposed(memory, p_row(LANES, warp) + 1024 * v, registers)
    for row in range(rows):
        for key in range(BLOCK):
            assert memory.view(np.uint16)[swizzled(row * 128 + key * 2, 3) // 2] == p[key, row]

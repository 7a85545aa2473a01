"""A model of a warp's instructions on shared memory and registers, and of the layouts of TMA and WGMMA.

It follows the PTX manual. Tests use it to check a kernel's addresses without a GPU."""

import numpy as np

LANES = np.arange(32)


def swizzled(address: int, bits: int) -> int:
    """The address after the swizzle SW64 (2 bits) or SW128 (3), which permutes a row's 16-byte groups by its number."""
    return address ^ ((address >> 7) & (2**bits - 1)) << 4


def narrow_tiles(matrix: np.ndarray) -> np.ndarray:
    """Bytes [rows, columns] as TMA writes them: column tiles of 64, SW64."""
    memory = np.zeros(matrix.size, np.uint8)
    for row, column in np.ndindex(*matrix.shape):
        memory[swizzled(column // 64 * 64 * len(matrix) + row * 64 + column % 64, 2)] = matrix[row, column]
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


def ldmatrix_transposed(memory: np.ndarray, addresses: np.ndarray) -> list[np.ndarray]:
    """Four registers [32 lanes, 4 bytes]: lane l has elements [2 (l % 4)] and [2 (l % 4) + 1] of column l // 4."""
    registers = []
    for i in range(4):
        rows = np.stack([memory[a : a + 16].view(np.uint16) for a in addresses[8 * i : 8 * i + 8]])
        pairs = np.stack([rows[2 * (LANES % 4), LANES // 4], rows[2 * (LANES % 4) + 1, LANES // 4]], 1)
        registers.append(pairs.view(np.uint8))
    return registers


def registers_of_p(p: np.ndarray, warp: int, v: int) -> list[np.ndarray]:
    """What a softmax warp has of P, keys by rows as in S^T: its 16 keys and the 16 rows from 8 v on, four registers
    [32 lanes, 2 elements] as `stmatrix_transposed` takes them."""
    registers = []
    for j in range(2):
        for i in range(2):
            key, row = 16 * warp + LANES // 4 + 8 * i, 8 * (v + j) + 2 * (LANES % 4)
            registers.append(np.stack([p[key, row], p[key, row + 1]], 1))
    return registers


def stmatrix_transposed(memory: np.ndarray, addresses: np.ndarray, registers: list[np.ndarray]) -> None:
    """Lane l has elements (l // 4, 2 (l % 4)) and the next of a matrix [8, 8] of 16 bits, whose columns become rows."""
    words = memory.view(np.uint16)
    for i, register in enumerate(registers):
        rows = addresses[8 * i : 8 * i + 8]
        assert len(set(rows // 16 % 8)) == 8
        for lane in LANES:
            for e in range(2):
                index = rows[2 * (lane % 4) + e] // 2 + lane // 4
                assert words[index] == 0  # written once
                words[index] = register[lane, e]

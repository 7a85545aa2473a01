"""The order of keys in fp8 prefill: V as the kernel transposes it, and P as it packs it, meet in WGMMA's operands.

The addresses and selectors are the kernel's own functions; ldmatrix, prmt, stmatrix and the layouts of the copies and
of WGMMA are modelled here, a warp at a time, as the PTX manual defines them.
"""

import numpy as np
import pytest

pytest.importorskip("cutlass")

from tsmla_kernels.sm90.mla_prefill import (
    EVEN_COLUMNS,
    ODD_COLUMNS,
    P_IN_WORD,
    P_WORDS,
    p_address,
    turning_addresses,
)

LANES = np.arange(32)
COLUMNS = 128


def swizzled(address: int, bits: int) -> int:
    """SW64 (2 bits) or SW128 (3): 16-byte groups of a row, exchanged by the row's number."""
    return address ^ ((address >> 7) & (2**bits - 1)) << 4


def landing_of(v: np.ndarray) -> np.ndarray:
    """V [keys, 128] as TMA leaves it: two tiles of 64 columns, SW64."""
    keys = len(v)
    memory = np.zeros(v.size, np.uint8)
    for key in range(keys):
        for column in range(COLUMNS):
            memory[swizzled(column // 64 * 64 * keys + key * 64 + column % 64, 2)] = v[key, column]
    return memory


def ldmatrix_transposed(memory: np.ndarray, addresses: np.ndarray) -> list[np.ndarray]:
    """Four registers [32 lanes, 4 bytes]: lane l has elements [2 (l % 4)] and [2 (l % 4) + 1] of column l // 4."""
    registers = []
    for i in range(4):
        rows = np.stack([memory[a : a + 16].view(np.uint16) for a in addresses[8 * i : 8 * i + 8]])
        pairs = np.stack([rows[2 * (LANES % 4), LANES // 4], rows[2 * (LANES % 4) + 1, LANES // 4]], 1)
        registers.append(pairs.view(np.uint8))
    return registers


def prmt(a: np.ndarray, b: np.ndarray, selectors: np.ndarray) -> np.ndarray:
    both = np.concatenate([a, b], 1)
    return np.stack([both[LANES, selectors >> 4 * j & 7] for j in range(4)], 1)


def stmatrix(memory: np.ndarray, addresses: np.ndarray, registers: list[np.ndarray]) -> None:
    """Lane l's four bytes go to bytes 4 (l % 4) of row l // 4; that no two rows share banks is the kernel's promise."""
    for i, register in enumerate(registers):
        rows = addresses[8 * i : 8 * i + 8]
        assert len(set(rows // 16 % 8)) == 8
        for lane in LANES:
            at = rows[lane // 4] + 4 * (lane % 4)
            assert not memory[at : at + 4].any()  # written once
            memory[at : at + 4] = register[lane]


def turned(v: np.ndarray) -> np.ndarray:
    """V transposed by both warps, as `turn_values` does it."""
    block = len(v)
    memory, landing = np.zeros((block + 127) // 128 * 128 * COLUMNS, np.uint8), landing_of(v)
    even = np.where(LANES >= 16, ODD_COLUMNS, EVEN_COLUMNS)
    odd = np.where(LANES >= 16, EVEN_COLUMNS, ODD_COLUMNS)
    for warp in range(2):
        _, source, target = turning_addresses(LANES, warp, 0, 0, block)
        for u in range(block // 32):
            for c in range(4):
                words = ldmatrix_transposed(landing, (source ^ c * 16) + u * 2048)
                packed = [prmt(*words[i : i + 2], columns) for i in (0, 2) for columns in (even, odd)]
                stmatrix(memory, (target ^ u % 4 * 32) + u // 4 * 128 * COLUMNS + c * 2048, packed)
    return memory


def key_at(position: int) -> int:
    """Which key lies at a position of the operands' k axis: of 16, lane q of a row has 2q, 2q + 1, 2q + 8, 2q + 9."""
    lane, byte = position % 16 // 4, position % 4
    return position // 16 * 16 + 2 * lane + byte % 2 + byte // 2 * 8


@pytest.mark.parametrize("block", [96, 128, 192])
def test_v_is_transposed_with_its_keys_in_the_order_of_p(block: int) -> None:
    v = np.random.default_rng(block).integers(1, 255, (block, COLUMNS)).astype(np.uint8)
    memory = turned(v)
    for column in range(COLUMNS):
        for position in range(block):
            at = swizzled(position // 128 * 128 * COLUMNS + column * 128 + position % 128, 3)
            assert memory[at] == v[key_at(position), column]


def test_p_is_packed_in_the_same_order() -> None:
    """Element j of the accumulator's 64 values of a lane is of row l // 4 + 8 (j // 2 % 2) and key
    8 (j // 4) + 2 (l % 4) + j % 2."""
    block, rows = 128, 64
    memory = np.zeros(rows * 128, np.uint8)
    p = np.random.default_rng(0).integers(1, 255, (rows, block)).astype(np.uint8)
    for warp in range(4):
        target = p_address(32 * warp + LANES, LANES, 0)
        for k in range(block // 32):
            words = []
            for at in P_WORDS:
                j = np.array([16 * k + at + i for i in P_IN_WORD])
                row = 16 * warp + LANES[:, None] // 4 + 8 * (j // 2 % 2)
                words.append(p[row, 8 * (j // 4) + 2 * (LANES[:, None] % 4) + j % 2])
            stmatrix(memory, target ^ k * 32, words)
    for row in range(rows):
        for position in range(block):
            assert memory[swizzled(row * 128 + position, 3)] == p[row, key_at(position)]

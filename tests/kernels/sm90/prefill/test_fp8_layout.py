"""The order of keys in fp8 prefill: the transposed V and the packed P have one order of keys.

The tests call the kernel's functions for addresses and selectors, and warp_model for instructions and layouts.
"""

import numpy as np
import pytest

from tests.emulator.warp_model import LANES, ldmatrix_transposed, narrow_tiles, prmt, stmatrix, swizzled

pytest.importorskip("cutlass")

from tsmla_kernels.sm90.prefill.softmax import VALUE_OFFSETS, WORD_OFFSETS, p_address
from tsmla_kernels.sm90.prefill.transpose import EVEN_COLUMNS, ODD_COLUMNS, transpose_addresses

COLUMNS = 128


def transposed(v: np.ndarray) -> np.ndarray:
    """V transposed by both warps, as `ValueTransposer.transpose_block` does it."""
    block = len(v)
    memory, landing = np.zeros((block + 127) // 128 * 128 * COLUMNS, np.uint8), narrow_tiles(v)
    even = np.where(LANES >= 16, ODD_COLUMNS, EVEN_COLUMNS)
    odd = np.where(LANES >= 16, EVEN_COLUMNS, ODD_COLUMNS)
    for warp in range(2):
        addresses = transpose_addresses(LANES, warp, landing=0, transposed=0, block=block)
        for u in range(block // 32):
            for c in range(4):
                words = ldmatrix_transposed(landing, (addresses.source ^ c * 16) + u * 2048)
                packed = [prmt(*words[i : i + 2], columns) for i in (0, 2) for columns in (even, odd)]
                stmatrix(memory, (addresses.target ^ u % 4 * 32) + u // 4 * 128 * COLUMNS + c * 2048, packed)
    return memory


def key_of_position(position: int) -> int:
    """The key at a position of the operands' k axis: of 16 keys lane q of a row has 2q, 2q + 1, 2q + 8, 2q + 9."""
    lane, byte = position % 16 // 4, position % 4
    return position // 16 * 16 + 2 * lane + byte % 2 + byte // 2 * 8


@pytest.mark.parametrize("block", [96, 128, 192])
def test_v_is_transposed_with_its_keys_in_the_order_of_p(block: int) -> None:
    v = np.random.default_rng(block).integers(1, 255, (block, COLUMNS)).astype(np.uint8)
    memory = transposed(v)
    for column in range(COLUMNS):
        for position in range(block):
            address = swizzled(position // 128 * 128 * COLUMNS + column * 128 + position % 128, 3)
            assert memory[address] == v[key_of_position(position), column]


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
            for word in WORD_OFFSETS:
                j = np.array([16 * k + word + i for i in VALUE_OFFSETS])
                row = 16 * warp + LANES[:, None] // 4 + 8 * (j // 2 % 2)
                words.append(p[row, 8 * (j // 4) + 2 * (LANES[:, None] % 4) + j % 2])
            stmatrix(memory, target ^ k * 32, words)
    for row in range(rows):
        for position in range(block):
            assert memory[swizzled(row * 128 + position, 3)] == p[row, key_of_position(position)]

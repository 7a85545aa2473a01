"""Decode of 16-bit queries over an fp8 cache: K from a stage to WGMMA's first operand, Q's columns in the same order,
and P from the accumulator to the rows that the values read.

The addresses and the order are the kernel's own functions; warp_model has the instructions and the copies' layout.
"""

import numpy as np
import pytest

from tests.emulator.warp_model import LANES, ldmatrix, narrow_tiles, registers_of_p, stmatrix_transposed, swizzled

pytest.importorskip("cutlass")

from tsmla_kernels.sm90.decode.scores_mixed import key_fragment, key_row
from tsmla_kernels.sm90.latent.key_softmax import p_row
from tsmla_kernels.sm90.latent.query import q_pair_place

BLOCK, WARPS = 64, 4


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
    memory = narrow_tiles(keys)
    column_at = np.zeros(16, int)  # which column of 16 lies at a place of Q
    for pair in range(8):
        column_at[2 * q_pair_place(pair) : 2 * q_pair_place(pair) + 2] = 2 * pair, 2 * pair + 1
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
            stmatrix_transposed(memory, p_row(LANES, warp) + 1024 * v, registers_of_p(p, warp, v))
    for row in range(rows):
        for key in range(BLOCK):
            assert memory.view(np.uint16)[swizzled(row * 128 + key * 2, 3) // 2] == p[key, row]

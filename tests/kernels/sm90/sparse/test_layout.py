"""Gathered rows from a stage to WGMMA's first operands: keys for K Q^T, and values with their scales for P V.

The addresses are the kernel's own functions; warp_model has the instructions.
"""

import numpy as np
import pytest

from tests.emulator.warp_model import LANES, ldmatrix, ldmatrix_transposed

pytest.importorskip("cutlass")

from tsmla_kernels.sm90.sparse.config import SparseConfig
from tsmla_kernels.sm90.sparse.query import chunk_64
from tsmla_kernels.sm90.sparse.scores import key_row
from tsmla_kernels.sm90.sparse.scores_fp8 import columns_of
from tsmla_kernels.sm90.sparse.stages import Stages, sparse_ring
from tsmla_kernels.sm90.sparse.values import last_row

BLOCK, WARPS = 64, 4
CONFIGS = {
    "v32": SparseConfig("bfloat16", 16),
    "v4": SparseConfig("bfloat16", 16, "v4", head_dim=512, page_size=64, page_span=64),
    "plain": SparseConfig("float16", 16, "plain", "float8_e4m3fn"),
}


def stage_of(config: SparseConfig) -> tuple[np.ndarray, np.ndarray]:
    """(a block's rows, the stage with these rows)."""
    rows = np.random.default_rng(config.pitch).integers(1, 255, (BLOCK, config.row_bytes)).astype(np.uint8)
    stage = np.zeros((BLOCK, config.pitch), np.uint8)
    stage[:, : config.row_bytes] = rows
    return rows, stage.reshape(-1)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_warp_reads_its_16_keys(name: str) -> None:
    """Lane 4 g + q has bytes 4 q and on of keys g and g + 8, of both halves of a fragment of 32 bytes."""
    config = CONFIGS[name]
    rows, stage = stage_of(config)
    for warp in range(WARPS):
        for at in (0, 32, config.row_bytes - 32):
            four = ldmatrix(stage, key_row(LANES, warp, config.pitch) + at)
            for register, lanes in enumerate(four):
                keys = 16 * warp + LANES // 4 + 8 * (register % 2)
                first = at + 16 * (register // 2) + 4 * (LANES % 4)
                expected = rows[keys[:, None], first[:, None] + np.arange(4)]
                np.testing.assert_array_equal(lanes, expected)


def test_v4s_rope_is_transposed_into_rows_of_latents() -> None:
    """Register i of a step: latent g + 8 (i % 2) of the warp's tile, keys 8 (i // 2) + 2 q and the next one."""
    config = CONFIGS["v4"]
    rows, stage = stage_of(config)
    words = rows[:, config.rope_offset :].copy().view(np.uint16)
    for warp in range(WARPS):
        for step in range(BLOCK // 16):
            chunk = config.rope_offset // 16 + 2 * warp
            address = last_row(LANES, config.pitch, chunk, 1) + 16 * step * config.pitch
            for i, register in enumerate(ldmatrix_transposed(stage, address)):
                latent = 16 * warp + LANES // 4 + 8 * (i % 2)
                for e in range(2):
                    key = 16 * step + 8 * (i // 2) + 2 * (LANES % 4) + e
                    np.testing.assert_array_equal(register.copy().view(np.uint16)[:, e], words[key, latent])


def test_v4s_lower_last_tiles_are_read_16_keys_at_a_time() -> None:
    """Registers 0 and 2: two keys of latents 2 g and 2 g + 1 of the tile, of the first and the second eight keys."""
    config = CONFIGS["v4"]
    rows, stage = stage_of(config)
    for warp in range(WARPS):
        tile = 4 * warp + 3
        for step in range(BLOCK // 16):
            registers = ldmatrix_transposed(stage, last_row(LANES, config.pitch, tile, 0) + 16 * step * config.pitch)
            for i in range(2):
                for byte in range(4):
                    key = 16 * step + 8 * i + 2 * (LANES % 4) + byte // 2
                    expected = rows[key, 16 * tile + 2 * (LANES // 4) + byte % 2]
                    np.testing.assert_array_equal(registers[2 * i][:, byte], expected)


def test_the_table_of_scales_has_a_lanes_pairs_side_by_side() -> None:
    """A value lane reads, at the place of key 2 q, the scales of keys 8 i + 2 q and the next one for i = 0, 1, ..."""
    config = CONFIGS["v4"]
    stages = Stages(config, sparse_ring(config))
    places = [stages.scale_place(key) for key in range(BLOCK)]
    assert sorted(places) == list(range(0, stages.scales_of_group, 2))
    for q in range(4):
        for eight in range(8):
            for e in range(2):
                assert stages.scale_place(8 * eight + 2 * q + e) == stages.scale_place(2 * q) + 4 * eight + 2 * e


@pytest.mark.parametrize("config", [
    SparseConfig("float8_e4m3fn", 16),
    SparseConfig("float8_e4m3fn", 64, "plain", "float8_e4m3fn", 512),
    SparseConfig("float8_e4m3fn", 64, "plain", "float8_e4m3fn", 576),
], ids=["v32", "plain 512", "plain 576"])  # fmt: skip
def test_queries_of_e4m3_meet_every_column_of_a_key_once(config: SparseConfig) -> None:
    """A fragment of 32 bytes meets the step of Q with the same columns: 32 of e4m3, or 16 of bf16 behind them. Groups
    of rows with scales have one scale each."""
    e4m3, bf16 = [], []
    for n, columns in enumerate(columns_of(config)):
        for i, at in enumerate(columns.fragments):
            if columns.bf16:
                first = config.e4m3_columns + (at - config.rope_offset) // 2
                assert first == config.e4m3_columns + 16 * (columns.first_step + i)
                bf16 += range(first, first + 16)
            else:
                assert at == 32 * (columns.first_step + i) and at // 128 == n
                e4m3 += range(at, at + 32)
    assert e4m3 == list(range(config.e4m3_columns)) and bf16 == list(range(config.e4m3_columns, config.head_dim))


def test_rows_of_64_bytes_are_swizzled_as_wgmma_reads_them() -> None:
    """PTX's swizzle of 64 bytes: bits 4 and 5 of an address are xored with bits 7 and 8."""
    for row in range(64):
        for chunk in range(4):
            plain = row * 64 + chunk * 16
            assert chunk_64(row, chunk) == plain ^ ((plain >> 7 & 3) << 4)

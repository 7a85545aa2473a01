"""Rows of x that an index picks: the warps that load scales copy these rows, too, because TMA copies only rows that lie
together."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from tsmla_kernels.sm90.products.config import BLOCK, ProductConfig
from tsmla_kernels.sm90.products.memory import Arrays, Shared, Tile
from tsmla_kernels.sm90.warp import DTYPES

CHUNK = 16
"""Bytes that a lane copies at a time."""
ROW_CHUNKS = BLOCK // CHUNK
"""Chunks of a row of a box, which has 128 bytes of each row."""


class PickedRows:
    """Device functions of a scale warp that copy a block of the tile's rows of x into a stage.

    Lane i holds the indices of the rows of x for rows i, i + 32 and so on of the tile. Eight
    lanes copy 128 bytes of a row.
    """

    def __init__(self, config: ProductConfig) -> None:
        self.config = config
        self.boxes = config.x_boxes
        self.item_bytes = DTYPES[config.x_dtype].width // 8

    @cute.jit
    def numbers(self, arrays: Arrays, tile: Tile, found: cute.Tensor) -> None:
        """Find the indices of a lane's rows of x. An index that x does not have becomes the nearest that it has; the
        index for a place past the group is 0."""
        lane, last = cute.arch.lane_idx(), Int32(arrays.x.shape[0]) - 1
        for i in cutlass.range_constexpr(cute.size(found)):
            row = Int32(0)
            if lane + 32 * i < cutlass.min(tile.rows, self.config.tokens):
                row = cutlass.min(cutlass.max(arrays.rows[tile.row + lane + 32 * i], 0), last)
            found[i] = row

    @cute.jit
    def copy(self, arrays: Arrays, shared: Shared, index: Int32, tile: Tile, b: Int32, found: cute.Tensor) -> None:
        """Start the copies of block `b` into stage `index`. Terms past the last one become 0."""
        config = self.config
        lane = cute.arch.lane_idx()
        pitch = Int32(arrays.x.shape[1]) * self.item_bytes
        here, chunk = lane // ROW_CHUNKS, lane % ROW_CHUNKS
        for i in cutlass.range_constexpr(-(-config.tokens // 4)):
            row = cute.arch.shuffle_sync(found[i // 8], 4 * (i % 8) + here)
            token = 4 * i + here
            if token < cutlass.min(tile.rows, config.tokens):
                source = arrays.x.iterator.toint() + Int64(row) * Int64(pitch)
                for half in cutlass.range_constexpr(self.boxes):
                    byte = (b * self.boxes + half) * BLOCK + chunk * CHUNK
                    target = shared.x.toint() + (index * self.boxes + half) * (config.tokens * BLOCK)
                    target += token * BLOCK + (chunk ^ (token % 8)) * CHUNK
                    exists = Int32(0)
                    if byte < pitch:
                        exists = Int32(CHUNK)
                    copy_chunk(target, source + Int64(cutlass.min(byte, pitch - CHUNK)), exists)
        cute.arch.cp_async_commit_group()

    def wait(self) -> None:
        """Wait for the lane's copies, so that WGMMAs see them after the next barrier."""
        cute.arch.cp_async_wait_group(0)
        cute.arch.fence_proxy("async.shared", space="cta")


def copy_chunk(target: Int32, source: Int64, count: Int32) -> None:
    """Start the copy of 16 bytes to shared memory. Only the first `count` bytes are read; the others become 0."""
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};", read_only_args=[target, source, count]
    )

"""The end of a tile: O divided by the rows' sums to `out`, and the rows' log-sum-exp."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from tsmla_kernels.sm90.prefill.config import GROUP_ROWS
from tsmla_kernels.sm90.prefill.memory import Results, Rows, ThreadIndex, Tile
from tsmla_kernels.sm90.prefill.traits import KernelTraits
from tsmla_kernels.sm90.warp import LN_2, WarpHelpers


class Epilogue(WarpHelpers):
    """Device code that stores a tile's results."""

    def __init__(self, traits: KernelTraits) -> None:
        self.traits = traits

    @cute.jit
    def store(
        self, results: Results, rows: Rows, tiles: cute.Tensor, slot: Int32, thread: ThreadIndex, out_scale: Float32
    ):
        """Store the rows of a warpgroup's tile, which `slot` describes. Rows without keys get 0 and -inf."""
        traits, out, lse = self.traits, results.out, results.lse
        first, tile_rows = (
            tiles[Tile.FIRST_ROW, slot] + thread.group * GROUP_ROWS,
            tiles[Tile.ROWS, slot] - thread.group * GROUP_ROWS,
        )
        head = tiles[Tile.HEAD, slot]
        quad = thread.lane % 4
        column_groups = traits.v_head_dim // 8
        for i in cutlass.range_constexpr(2):
            row = thread.row + 8 * i
            total = rows.total[i]
            total += cute.arch.shuffle_sync_bfly(total, offset=1)
            total += cute.arch.shuffle_sync_bfly(total, offset=2)
            factor, row_lse = Float32(0.0), -Float32.inf
            if total > 0.0 or total != total:
                factor = out_scale / total
                row_lse = (rows.maximum[i] + cute.math.log2(total, fastmath=True)) * LN_2
            out_row = Int64(first + row) * results.heads + head
            # A lane holds 2 columns of each group of 8. The four lanes of a row exchange columns so that each has the
            # 8 columns, 16 bytes, of one group in four, and a row's stores fill whole sectors.
            line = cute.make_tensor(
                (out.iterator + (out_row * traits.v_head_dim + quad * 8)).align(16),
                cute.make_layout((8, column_groups // 4), stride=(1, 32)),
            )
            pairs = cute.make_rmem_tensor((8,), traits.out_dtype)
            words = cute.recast_tensor(pairs, Int32)
            for g in cutlass.range_constexpr(column_groups // 4):
                for j in cutlass.range_constexpr(4):
                    pairs[2 * j] = (rows.o[i, 8 * g + 2 * j] * factor).to(traits.out_dtype)
                    pairs[2 * j + 1] = (rows.o[i, 8 * g + 2 * j + 1] * factor).to(traits.out_dtype)
                self.transpose_quad(words, quad)
                if row < tile_rows:
                    cute.autovec_copy(pairs, line[None, g])
            if row < tile_rows and quad == 0:
                lse[first + row, head] = row_lse

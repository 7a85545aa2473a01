"""The three warps next to the producer warp of indexer_logits. They write -inf into the columns that a token does not
see. If config.writes_rows, they also write each row's request and how many keys the row sees."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from tsmla_kernels.sm90.logits.config import LogitsConfig
from tsmla_kernels.sm90.logits.memory import Arrays
from tsmla_kernels.sm90.logits.share import rows_before

FILL_WARPS = 3
FILL_COLUMNS = 8192  # columns of a row that a warp fills at once


class Fill:
    """Device functions of the filling warps."""

    def __init__(self, config: LogitsConfig) -> None:
        self.config = config

    @cute.jit
    def run(self, arrays: Arrays, warp: Int32) -> None:
        """Fill this warp's parts (FILL_COLUMNS columns of a row). The filling warps of all CTAs take parts in turn."""
        block_idx, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        rows, width = arrays.logits.shape[0], arrays.logits.shape[1]
        parts = (width + (FILL_COLUMNS - 1)) // FILL_COLUMNS
        for i in cutlass.range(block_idx * FILL_WARPS + warp, rows * parts, grid * FILL_WARPS, unroll=1):
            row = i // parts
            first = (i - row * parts) * FILL_COLUMNS
            keys, _ = self.row(arrays, row)
            begin = cutlass.max(keys, first)
            end = cutlass.min(first + FILL_COLUMNS, width)
            if begin < end:
                self.fill(arrays.logits, row, begin, end)

    @cute.jit
    def write_rows(self, arrays: Arrays, warp: Int32) -> None:
        """Write each row's request and how many keys the row sees. A lane takes one row at a time."""
        block_idx, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        rows, before = arrays.logits.shape[0], rows_before(arrays)
        first = (block_idx * FILL_WARPS + warp) * 32 + cute.arch.lane_idx()
        for row in cutlass.range(first, rows, grid * (FILL_WARPS * 32), unroll=1):
            keys, request = self.row(arrays, row)
            arrays.row_lens[before + row] = keys
            arrays.row_requests[before + row] = request

    @cute.jit
    def row(self, arrays: Arrays, row: Int32):
        """(how many keys `row` sees, its request). A row that belongs to no request sees no keys."""
        requests = arrays.seq_lens.shape[0]
        keys, low = Int32(0), Int32(0)
        if const_expr(self.config.ragged):
            row += rows_before(arrays)
            high = requests
            while high - low > 1:
                middle = (low + high) // 2
                if arrays.cu_seqlens_q[middle] <= row:
                    low = middle
                else:
                    high = middle
            if requests > 0:
                end = arrays.cu_seqlens_q[low + 1]
                if row < end:
                    keys = arrays.seq_lens[low] - end + 1 + row
        else:
            keys, low = arrays.seq_lens[row], row
        return cutlass.max(cutlass.min(keys, arrays.logits.shape[1]), 0), low

    @cute.jit
    def fill(self, logits: cute.Tensor, row: Int32, begin: Int32, end: Int32) -> None:
        """Write -inf into the columns [begin, end) of a row, 16 bytes per lane from the first multiple of 16 bytes on.
        A row begins at a multiple of 64 bytes, and `end` is a multiple of 4 columns."""
        lane = cute.arch.lane_idx()
        address = logits.iterator.toint() + Int64(row) * Int64(logits.shape[1]) * 4
        aligned = cutlass.min((begin + 3) // 4 * 4, end)
        if begin + lane < aligned:
            self.store(address + Int64(begin + lane) * 4, 1)
        for i in cutlass.range(aligned + lane * 4, end, 128, unroll=4):
            self.store(address + Int64(i) * 4, 4)

    def store(self, address: Int64, count: int) -> None:
        """Write -inf into `count` columns at `address`, a multiple of 4 * `count` bytes."""
        pointer = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=4 * count)
        values = cute.make_rmem_tensor((count,), Float32)
        values.fill(-float("inf"))
        cute.autovec_copy(values, cute.make_tensor(pointer, cute.make_layout(count)))

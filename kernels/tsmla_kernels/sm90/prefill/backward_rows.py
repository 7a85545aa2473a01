"""What prefill's gradient needs of query rows: their terms and zeroed sums before the main kernel, dq after it."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from tsmla_kernels.sm90.prefill.backward_config import Q_ROWS
from tsmla_kernels.sm90.prefill.backward_memory import (
    P_BITS,
    Factors,
    Offsets,
    Saved,
    Scale,
    Sums,
    Term,
    Traits,
)
from tsmla_kernels.sm90.prefill.backward_plan import first_terms
from tsmla_kernels.sm90.warp import LOG2_E

ROW_THREADS = 256
CTA_HEADS = 4  # heads whose rows' terms a CTA computes, of one tile of queries
LANES = 16  # that share a row of out
VECTOR = 8  # elements of out that a lane loads at once
DQ_BLOCK = 16  # columns of dq that a thread converts
UNROLL = 4


def dq_position(column: int) -> int:
    """Where in a row of dq_sum a column lies. A lane of the main kernel holds columns 2q, 2q + 1, 2q + 8 and 2q + 9 of
    16; they lie side by side, so that it adds 16 bytes at once and a row's four lanes add 64."""
    block, within = column - column % DQ_BLOCK, column % DQ_BLOCK
    return block + (within % 8) // 2 * 4 + within // 8 * 2 + within % 2


def global_tensor(tensor: cute.Tensor, offset: Int64, count: int) -> cute.Tensor:
    """`count` elements of a dense tensor in global memory from element `offset` on, a multiple of 16 bytes."""
    address = tensor.iterator.toint() + offset * (tensor.element_type.width // 8)
    pointer = cute.make_ptr(tensor.element_type, address, cute.AddressSpace.gmem, assumed_align=16)
    return cute.make_tensor(pointer, cute.make_layout(count))


class RowKernels:
    """Device code for query rows."""

    def __init__(self, traits: Traits) -> None:
        self.traits = traits

    # ---- before the main kernel

    @cute.jit
    def prepare_rows(self, offsets: Offsets, saved: Saved, sums: Sums, tile: Int32, first_head: Int32):
        """One CTA: the terms of one tile of row_terms and CTA_HEADS heads. Rows of no request see no key."""
        tidx = cute.arch.thread_idx()[0]
        batch, heads = offsets.cu_seqlens_q.shape[0] - 1, saved.lse.shape[1]
        e = self.owner(offsets, tile, batch)
        first_row = self.clamped(offsets, e)
        row_begin = first_row + (tile - first_terms(first_row, e)) * Q_ROWS
        row_end = self.clamped(offsets, e + 1)
        lane = tidx % LANES
        for first in cutlass.range(0, Q_ROWS * CTA_HEADS, UNROLL * ROW_THREADS // LANES, unroll=1):
            rows, products = [], []
            for u in cutlass.range_constexpr(UNROLL):
                item = first + u * (ROW_THREADS // LANES) + tidx // LANES
                row, head = item // CTA_HEADS, first_head + item % CTA_HEADS
                rows.append((row, head))
                product = Float32(0.0)
                if row_begin + row < row_end and head < heads:
                    product = self.partial_product(saved, row_begin + row, head, lane)
                products.append(product)
            for u in cutlass.range_constexpr(UNROLL):
                row, head = rows[u]
                total = products[u]
                for offset in (8, 4, 2, 1):
                    total += cute.arch.shuffle_sync_bfly(total, offset=offset)
                if lane == 0 and head < heads:
                    lse, delta = -Float32.inf, Float32(0.0)
                    if row_begin + row < row_end:
                        row_lse = saved.lse[row_begin + row, head]
                        if row_lse != -Float32.inf:
                            lse = P_BITS - row_lse * LOG2_E
                            delta = (saved.dlse[row_begin + row, head] - total) * 2.0**-P_BITS
                    sums.row_terms[head, tile, Term.LSE, row] = lse
                    sums.row_terms[head, tile, Term.DELTA, row] = delta

    @cute.jit
    def owner(self, offsets: Offsets, tile: Int32, batch: Int32):
        """The request whose rows a tile of row_terms has: the last one that begins at or before the tile."""
        low, high = Int32(0), batch
        while high - low > 1:
            middle = (low + high) // 2
            if first_terms(self.clamped(offsets, middle), middle) <= tile:
                low = middle
            else:
                high = middle
        return low

    @cute.jit
    def clamped(self, offsets: Offsets, e: Int32):
        """The first query row of request `e`, within the operands."""
        return cutlass.min(cutlass.max(offsets.cu_seqlens_q[e], 0), offsets.total_q)

    @cute.jit
    def partial_product(self, saved: Saved, row: Int32, head: Int32, lane: Int32):
        """A lane's part of rowsum(dout * out)."""
        width, heads = self.traits.v_head_dim, saved.lse.shape[1]
        total = Float32(0.0)
        for part in cutlass.range_constexpr(width // (LANES * VECTOR)):
            at = (Int64(row) * heads + head) * width + part * LANES * VECTOR + lane * VECTOR
            out = cute.make_rmem_tensor((VECTOR,), self.traits.dtype)
            dout = cute.make_rmem_tensor((VECTOR,), self.traits.dtype)
            cute.autovec_copy(global_tensor(saved.out, at, VECTOR), out)
            cute.autovec_copy(global_tensor(saved.dout, at, VECTOR), dout)
            for i in cutlass.range_constexpr(VECTOR):
                total += out[i].to(Float32) * dout[i].to(Float32)
        return total

    @cute.jit
    def zero_sums(self, sums: Sums, cta: Int32, ctas: Int32):
        """One CTA of `ctas`: its share of dq's sums, and of the counters."""
        tidx = cute.arch.thread_idx()[0]
        zeros = cute.make_rmem_tensor((4,), Float32)
        zeros.fill(0.0)
        lines, width = sums.dq_sum.shape[0] * sums.dq_sum.shape[1], self.traits.qk_head_dim
        vectors = lines * (width // 4)
        for i in cutlass.range(cta * ROW_THREADS + tidx, vectors, ctas * ROW_THREADS, unroll=4):
            cute.autovec_copy(zeros, global_tensor(sums.dq_sum, Int64(i) * 4, 4))
        if const_expr(self.traits.deterministic):
            none = cute.make_rmem_tensor((4,), Int32)
            none.fill(0)
            counters = cute.size(sums.turns) // 4
            for i in cutlass.range(cta * ROW_THREADS + tidx, counters, ctas * ROW_THREADS, unroll=1):
                cute.autovec_copy(none, global_tensor(sums.turns, Int64(i) * 4, 4))

    # ---- after it

    @cute.jit
    def store_dq(self, sums: Sums, scales: cute.Tensor, dq: cute.Tensor):
        """A thread: DQ_BLOCK columns of a row of dq from their sums."""
        tidx = cute.arch.thread_idx()[0]
        thread = cute.arch.block_idx()[0] * ROW_THREADS + tidx
        width, blocks = self.traits.qk_head_dim, self.traits.qk_head_dim // DQ_BLOCK
        total_q, heads = dq.shape[0], dq.shape[1]
        scale = scales[Scale.LOGITS]
        line = thread // blocks  # of dq_sum
        if line < heads * total_q:
            column = thread % blocks * DQ_BLOCK
            head, row = line // total_q, line % total_q
            total = cute.make_rmem_tensor((DQ_BLOCK,), Float32)
            cute.autovec_copy(global_tensor(sums.dq_sum, Int64(line) * width + column, DQ_BLOCK), total)
            rounded = cute.make_rmem_tensor((DQ_BLOCK,), self.traits.dtype)
            for i in cutlass.range_constexpr(DQ_BLOCK):
                rounded[i] = (total[dq_position(i)] * scale).to(self.traits.dtype)
            at = (Int64(row) * heads + head) * width + column
            cute.autovec_copy(rounded, global_tensor(dq, at, DQ_BLOCK))


def factors(scales: cute.Tensor) -> Factors:
    """The scales as the main kernel uses them."""
    logits = scales[Scale.LOGITS]
    return Factors(logits, logits * LOG2_E, scales[Scale.OUTPUT] * 2.0**-P_BITS)

"""Device code of the kernels before and after the main kernel of prefill's gradient. The first writes the terms of
query rows and zeroes the sums; the last writes dq and dk_rope from their sums."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from tsmla_kernels.sm90.constants import LOG2_E
from tsmla_kernels.sm90.prefill.backward.config import BLOCK_ROWS, Q_ROWS, SINK_TERMS
from tsmla_kernels.sm90.prefill.backward.memory import Factors, Saved, SinkGradient, Sums, Term, Traits
from tsmla_kernels.sm90.prefill.backward.plan import first_index
from tsmla_kernels.sm90.prefill.backward.sums import sum_position
from tsmla_kernels.sm90.prefill.memory import Scale
from tsmla_kernels.sm90.prefill.plan import Requests
from tsmla_kernels.sm90.warp import global_tensor, rounds

ROW_THREADS = 256
CTA_HEADS = 4  # heads of a CTA, which has one tile of queries
LANES = 16  # lanes that share a row of out
VECTOR = 8  # elements of out that a lane loads at once
SUM_VECTOR = 16  # sums that a thread converts at once
SUM_UNROLL = 4
UNROLL = 4
LEAST_SHARE = 64.0
"""Where the keys have less than 2^-64 of a row's weight beside its sink, they are given that much if the cotangent of
lse must pass through their weights. It changes gradients by 2^-64 of the part that they have through out."""


def count_of(tensor: cute.Tensor) -> Int64:
    """The number of elements of a dense tensor. `cute.size` would multiply the sizes in 32 bits, but dq_sum may
    have 2^31 elements or more."""
    count = Int64(1)
    for size in tensor.shape:
        count = count * size
    return count


class RowKernels:
    """Device code for query rows."""

    def __init__(self, traits: Traits) -> None:
        self.traits = traits

    # ---- before the main kernel

    @cute.jit
    def prepare_rows(
        self,
        requests: Requests,
        saved: Saved,
        sums: Sums,
        sinks: SinkGradient | None,
        tile: Int32,
        first_head: Int32,
    ):
        """Compute, in one CTA, the terms of one tile of queries for CTA_HEADS heads. Rows of the tile past the
        request's end get the terms of a row that sees no key."""
        tidx = cute.arch.thread_idx()[0]
        batch, heads = requests.cu_seqlens_q.shape[0] - 1, saved.lse.shape[1]
        e = self.owner(requests, tile, batch)
        first_row = self.clamped(requests, e)
        row_begin = first_row + (tile - first_index(first_row, e, Q_ROWS)) * Q_ROWS
        row_end = self.clamped(requests, e + 1)
        lane = tidx % LANES
        sink, of_sink = Float32(0.0), Float32(0.0)  # all rows of a thread have one head
        if const_expr(sinks is not None):
            sink = sinks.sinks[cutlass.min(first_head + tidx // LANES % CTA_HEADS, heads - 1)] * LOG2_E
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
                            lse = -row_lse * LOG2_E
                            delta = saved.dlse[row_begin + row, head]
                            if const_expr(sinks is not None):
                                lse, delta, weight = beside_sink(lse, delta, sink)
                                of_sink -= weight * total
                            delta -= total
                    sums.row_terms[head, Int64(tile), Term.LSE, row] = lse
                    sums.row_terms[head, Int64(tile), Term.DELTA, row] = delta
        if const_expr(sinks is not None):
            own_head = first_head + tidx // LANES % CTA_HEADS
            if lane == 0 and own_head < heads:
                sinks.terms[own_head, Int64(tile), tidx // LANES // CTA_HEADS] = of_sink

    @cute.jit
    def owner(self, requests: Requests, tile: Int32, batch: Int32):
        """The request to which a tile of row_terms belongs: the last one whose first tile is at or before `tile`."""
        low, high = Int32(0), batch
        while high - low > 1:
            middle = (low + high) // 2
            if first_index(self.clamped(requests, middle), middle, Q_ROWS) <= tile:
                low = middle
            else:
                high = middle
        return low

    @cute.jit
    def clamped(self, requests: Requests, e: Int32):
        """The first query row of request `e`, clamped to the operands' rows."""
        return cutlass.min(cutlass.max(requests.cu_seqlens_q[e], 0), requests.total_q)

    @cute.jit
    def partial_product(self, saved: Saved, row: Int32, head: Int32, lane: Int32):
        """Compute a lane's part of rowsum(dout * out)."""
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
        """Zero the share that CTA `cta` of `ctas` has of the sums and, if deterministic, of the counters."""
        tidx = cute.arch.thread_idx()[0]
        traits = self.traits
        first, step = Int64(cta) * ROW_THREADS + tidx, Int64(ctas) * ROW_THREADS
        zeros = cute.make_rmem_tensor((4,), Float32)
        zeros.fill(0.0)
        targets = (sums.dq_sum, sums.rope_sum) if traits.rope_columns else (sums.dq_sum,)
        for target in targets:
            for i in cutlass.range(rounds(count_of(target) // 4, first, step), unroll=4):
                cute.autovec_copy(zeros, global_tensor(target, (first + i * step) * 4, 4))
        if const_expr(traits.deterministic):
            counters = (sums.turns, sums.rope_turns) if traits.rope_columns else (sums.turns,)
            for target in counters:
                for i in cutlass.range(rounds(count_of(target), first, step), unroll=1):
                    cute.make_tensor(target.iterator + (first + i * step), cute.make_layout(1))[0] = Int32(0)

    # ---- after the main kernel

    @cute.jit
    def store_dq(
        self, requests: Requests, sums: Sums, factor: Float32, dq: cute.Tensor, tile: Int32, first_head: Int32
    ) -> None:
        """Store, in one CTA, dq of one tile of queries for CTA_HEADS heads, from dq's sums."""
        tidx = cute.arch.thread_idx()[0]
        heads, batch = dq.shape[1], requests.cu_seqlens_q.shape[0] - 1
        e = self.owner(requests, tile, batch)
        first_row, row_end = self.clamped(requests, e), self.clamped(requests, e + 1)
        relative = (tile - first_index(first_row, e, Q_ROWS)) * Q_ROWS
        block = first_index(first_row, e, BLOCK_ROWS) + relative // BLOCK_ROWS
        row_lanes = self.traits.dq_columns // SUM_VECTOR  # vectors of sums in a row of a block
        block_lanes = BLOCK_ROWS * row_lanes
        half_lanes = Q_ROWS // BLOCK_ROWS * block_lanes
        lanes = 2 * half_lanes * cutlass.min(CTA_HEADS, heads - first_head)
        for first in cutlass.range(tidx, lanes, SUM_UNROLL * ROW_THREADS, unroll=1):
            totals, places = [], []
            for u in cutlass.range_constexpr(SUM_UNROLL):
                item = first + u * ROW_THREADS
                half, lane = item // half_lanes, item % half_lanes
                head = first_head + half // 2
                row = first_row + relative + self.row_of_sums(lane, row_lanes)
                exists = item < lanes and row >= first_row and row < row_end
                total = cute.make_rmem_tensor((SUM_VECTOR,), Float32)
                if exists:
                    line = (Int64(head) * 2 + half % 2) * sums.dq_sum.shape[2] + block
                    at = (line * block_lanes + lane) * SUM_VECTOR
                    cute.autovec_copy(global_tensor(sums.dq_sum, at, SUM_VECTOR), total)
                column = (half % 2) * self.traits.dq_columns + self.sixteen_of_sums(lane, row_lanes) * SUM_VECTOR
                totals.append(total)
                places.append((exists, (Int64(row) * heads + head) * self.traits.qk_head_dim + column))
            for u in cutlass.range_constexpr(SUM_UNROLL):
                exists, at = places[u]
                rounded = cute.make_rmem_tensor((SUM_VECTOR,), self.traits.dtype)
                for i in cutlass.range_constexpr(SUM_VECTOR):
                    rounded[i] = (totals[u][sum_position(0, i, self.traits.dq_columns)] * factor).to(self.traits.dtype)
                if exists:
                    cute.autovec_copy(rounded, global_tensor(dq, at, SUM_VECTOR))

    @cute.jit
    def store_sinks(self, sinks: SinkGradient, first_head: Int32) -> None:
        """Store, in one CTA, the gradient of CTA_HEADS sinks: a warp adds the partial sums of one, in a fixed order."""
        warp, lane = cute.arch.thread_idx()[0] // 32, cute.arch.lane_idx()
        head = first_head + warp
        if warp < CTA_HEADS and head < sinks.sinks.shape[0]:
            count = sinks.terms.shape[1] * SINK_TERMS
            total = Float32(0.0)
            for i in cutlass.range(lane, count, 32, unroll=4):
                total += sinks.terms[head, Int64(i // SINK_TERMS), i % SINK_TERMS]
            for offset in (16, 8, 4, 2, 1):
                total += cute.arch.shuffle_sync_bfly(total, offset=offset)
            if lane == 0:
                sinks.gradient[head] = total

    def row_of_sums(self, vector: Int32, row_vectors: int) -> Int32:
        """The row, in a tile, of the vector of 16 sums with index `vector`. A row has `row_vectors` vectors."""
        if self.traits.wide:
            return vector // (BLOCK_ROWS * row_vectors) * BLOCK_ROWS + vector % BLOCK_ROWS
        return vector // row_vectors

    def sixteen_of_sums(self, vector: Int32, row_vectors: int) -> Int32:
        """The index of a vector's 16 columns among those of its row."""
        if self.traits.wide:
            return vector % (BLOCK_ROWS * row_vectors) // BLOCK_ROWS
        return vector % row_vectors ^ vector // row_vectors % 2

    @cute.jit
    def store_rope(self, sums: Sums, factor: Float32, dk_rope: cute.Tensor, cta: Int32, ctas: Int32):
        """Store the share of the shared rope columns' gradient that CTA `cta` of `ctas` CTAs has. A thread takes 16
        columns at once."""
        tidx = cute.arch.thread_idx()[0]
        partials, total_kv = sums.rope_sum.shape[0], sums.rope_sum.shape[1]
        row_items = self.traits.rope_columns // SUM_VECTOR
        for item in cutlass.range(cta * ROW_THREADS + tidx, total_kv * row_items, ctas * ROW_THREADS, unroll=1):
            row, sixteen = item // row_items, item % row_items
            total = cute.make_rmem_tensor((SUM_VECTOR,), Float32)
            total.fill(0.0)
            for partial in cutlass.range(partials, unroll=4):
                part = cute.make_rmem_tensor((SUM_VECTOR,), Float32)
                at = ((Int64(partial) * total_kv + row) * row_items + (sixteen ^ row % 2)) * SUM_VECTOR
                cute.autovec_copy(global_tensor(sums.rope_sum, at, SUM_VECTOR), part)
                for i in cutlass.range_constexpr(SUM_VECTOR):
                    total[i] = total[i] + part[i]
            rounded = cute.make_rmem_tensor((SUM_VECTOR,), self.traits.dtype)
            for i in cutlass.range_constexpr(SUM_VECTOR):
                rounded[i] = (total[sum_position(0, i, self.traits.rope_columns)] * factor).to(self.traits.dtype)
            cute.autovec_copy(rounded, global_tensor(dk_rope, Int64(item) * SUM_VECTOR, SUM_VECTOR))

    @cute.jit
    def zero_dq(self, requests: Requests, dq: cute.Tensor, section: Int32, sections: Int32):
        """Zero dq of the rows that belong to no request, before the first request and after the last. CTA `section` of
        `sections` CTAs zeroes every `sections`-th of these rows."""
        tidx = cute.arch.thread_idx()[0]
        vectors = dq.shape[1] * (self.traits.qk_head_dim // VECTOR)  # vectors in a row of all heads
        first, last = self.clamped(requests, Int32(0)), self.clamped(requests, requests.cu_seqlens_q.shape[0] - 1)
        zeros = cute.make_rmem_tensor((VECTOR,), self.traits.dtype)
        zeros.fill(0.0)
        for row in cutlass.range(section, first + requests.total_q - last, sections, unroll=1):
            at_row = row
            if row >= first:
                at_row += last - first
            for i in cutlass.range(tidx, vectors, ROW_THREADS, unroll=1):
                at = (Int64(at_row) * vectors + i) * VECTOR
                cute.autovec_copy(zeros, global_tensor(dq, at, VECTOR))


@cute.jit
def beside_sink(lse: Float32, dlse: Float32, sink: Float32):
    """A row's terms in base 2 if its head has a sink. `lse` is -lse of the keys alone. Returns -lse of the keys and the
    sink together; the cotangent of lse that belongs to it; and the sink's part of the row's weight."""
    keys = -lse
    whole = cute.arch.fmax(keys, sink) + cute.math.log2(
        1.0 + cute.math.exp2(-cute.arch.fmax(keys - sink, sink - keys), fastmath=True), fastmath=True
    )
    if dlse != 0.0:  # weights of which nothing is left would lose it
        whole = cute.arch.fmin(whole, keys + LEAST_SHARE)
        dlse = dlse * cute.math.exp2(whole - keys, fastmath=True)
    return -whole, dlse, cute.arch.rcp_approx(1.0 + cute.math.exp2(keys - sink, fastmath=True))


def factors(scales: cute.Tensor) -> Factors:
    """The scales in the form in which the main kernel uses them."""
    logits = scales[Scale.LOGITS]
    return Factors(logits, logits * LOG2_E, scales[Scale.OUTPUT])

"""Device code of the kernels before and after the main kernel. The first writes the terms of query rows and zeroes the
sums; the last writes the caches' gradients from their sums."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from tsmla_kernels.sm90.constants import LOG2_E
from tsmla_kernels.sm90.sparse_backward.bounds import greatest, magnitude, scale_of, split_scale
from tsmla_kernels.sm90.sparse_backward.config import LATENT_DIM
from tsmla_kernels.sm90.sparse_backward.memory import Saved, Sums, Term, Traits, Weight
from tsmla_kernels.sm90.warp import global_tensor, rounds

ROW_THREADS = 256
WARP_ROWS = 4  # query rows that a warp takes at once
CTA_ROWS = ROW_THREADS // 32 * WARP_ROWS
VECTOR = 8  # elements of 16 bits that a lane loads or stores at once
THREAD_VECTORS = 4  # vectors of the caches' gradients that a thread writes
CTA_VECTORS = ROW_THREADS * THREAD_VECTORS


class RowKernels:
    """Device code for rows of queries and of the caches."""

    def __init__(self, traits: Traits) -> None:
        self.traits = traits

    @cute.jit
    def prepare_rows(self, saved: Saved, sums: Sums, sink_terms: cute.Tensor, first_row: Int32):
        """Compute, in one warp, the terms of WARP_ROWS query rows."""
        lane = cute.arch.lane_idx()
        rows, heads = sums.row_terms.shape[1], saved.lse.shape[1]
        products = []
        for u in cutlass.range_constexpr(WARP_ROWS):
            product = Float32(0.0)
            if first_row + u < rows:
                product = self.partial_product(saved, first_row + u, lane)
            products.append(product)
        for u in cutlass.range_constexpr(WARP_ROWS):
            row, total = first_row + u, products[u]
            for offset in (16, 8, 4, 2, 1):
                total += cute.arch.shuffle_sync_bfly(total, offset=offset)
            if lane == 0 and row < rows:
                token, head = row // heads, row % heads
                row_lse = saved.lse[token, head]
                lse, share, shift, sink_term = -Float32.inf, Float32(0.0), Float32(0.0), Float32(0.0)
                if row_lse != -Float32.inf:
                    lse, share = -row_lse * LOG2_E, Float32(1.0)
                    if const_expr(self.traits.config.sinks):
                        ratio = cute.math.exp2((saved.sinks[head] - row_lse) * LOG2_E, fastmath=True)
                        share = 1.0 / (1.0 + ratio)
                        inverse = cute.math.exp2((row_lse - saved.sinks[head]) * LOG2_E, fastmath=True)
                        sink_term = -total / (1.0 + inverse)
                    shift = saved.d_lse[token, head] - share * total
                sums.row_terms[Int32(Term.LSE), Int64(row)] = lse
                sums.row_terms[Int32(Term.SHARE), Int64(row)] = share
                sums.row_terms[Int32(Term.SHIFT), Int64(row)] = shift
                if const_expr(self.traits.config.sinks):
                    sink_terms[token, head] = sink_term

    @cute.jit
    def partial_product(self, saved: Saved, row: Int32, lane: Int32):
        """Compute a lane's part of rowsum(d_out * out)."""
        total = Float32(0.0)
        for part in cutlass.range_constexpr(LATENT_DIM // (32 * VECTOR)):
            at = Int64(row) * LATENT_DIM + (part * 32 + lane) * VECTOR
            out = cute.make_rmem_tensor((VECTOR,), self.traits.dtype)
            d_out = cute.make_rmem_tensor((VECTOR,), self.traits.dtype)
            cute.autovec_copy(global_tensor(saved.out, at, VECTOR), out)
            cute.autovec_copy(global_tensor(saved.d_out, at, VECTOR), d_out)
            for i in cutlass.range_constexpr(VECTOR):
                total += out[i].to(Float32) * d_out[i].to(Float32)
        return total

    @cute.jit
    def weigh_row(self, saved: Saved, q: cute.Tensor, sums: Sums, row: Int32):
        """Compute, in one warp, one query row's two `Weight`s, from the row's terms, which this warp has stored."""
        lane, head_dim = cute.arch.lane_idx(), self.traits.head_dim
        longest, square, widest = Float32(0.0), Float32(0.0), Float32(0.0)
        for part in cutlass.range_constexpr(LATENT_DIM // (32 * VECTOR)):
            d_out = self.vector(saved.d_out, Int64(row) * LATENT_DIM + (part * 32 + lane) * VECTOR)
            for i in cutlass.range_constexpr(VECTOR):
                longest, square = greatest(longest, magnitude(d_out[i])), square + d_out[i] * d_out[i]
        for part in cutlass.range_constexpr((head_dim + 32 * VECTOR - 1) // (32 * VECTOR)):
            column = (part * 32 + lane) * VECTOR
            if column < head_dim:
                query = self.vector(q, Int64(row) * head_dim + column)
                for i in cutlass.range_constexpr(VECTOR):
                    widest = greatest(widest, magnitude(query[i]))
        for offset in (16, 8, 4, 2, 1):
            longest = greatest(longest, cute.arch.shuffle_sync_bfly(longest, offset=offset))
            square += cute.arch.shuffle_sync_bfly(square, offset=offset)
            widest = greatest(widest, cute.arch.shuffle_sync_bfly(widest, offset=offset))
        if lane == 0:
            share = sums.row_terms[Int32(Term.SHARE), Int64(row)]
            shift = sums.row_terms[Int32(Term.SHIFT), Int64(row)]
            reach = magnitude(Float32(saved.scales[0])) * widest
            sums.row_weights[Int32(Weight.ALONE), Int64(row)] = share * longest + reach * magnitude(shift)
            length = cute.math.sqrt(square, fastmath=True)
            sums.row_weights[Int32(Weight.BY_LENGTH), Int64(row)] = reach * share * length

    @cute.jit
    def vector(self, tensor: cute.Tensor, offset: Int64):
        """VECTOR numbers in float32."""
        numbers = cute.make_rmem_tensor((VECTOR,), self.traits.dtype)
        cute.autovec_copy(global_tensor(tensor, offset, VECTOR), numbers)
        wide = cute.make_rmem_tensor((VECTOR,), Float32)
        wide.store(numbers.load().to(Float32))
        return wide

    @cute.jit
    def measure_keys(self, caches: tuple[cute.Tensor, ...], sums: Sums, warp: Int32, warps: Int32):
        """Compute the lengths of every `warps`-th key's value, from key `warp` on, and zero these keys' bounds and
        counts."""
        lane, head_dim = cute.arch.lane_idx(), self.traits.head_dim
        of_first = caches[0].shape[0] * caches[0].shape[1]
        for row in cutlass.range(warp, sums.key_lengths.shape[0], warps, unroll=1):
            address = caches[0].iterator.toint() + Int64(row) * self.traits.row_bytes
            if const_expr(self.traits.config.two_caches):
                if row >= of_first:
                    address = caches[1].iterator.toint() + Int64(row - of_first) * self.traits.row_bytes
            pointer = cute.make_ptr(self.traits.dtype, address, cute.AddressSpace.gmem, assumed_align=16)
            line = cute.make_tensor(pointer, cute.make_layout(head_dim))
            square = Float32(0.0)
            for part in cutlass.range_constexpr(LATENT_DIM // (32 * VECTOR)):
                numbers = self.vector(line, Int64((part * 32 + lane) * VECTOR))
                for i in cutlass.range_constexpr(VECTOR):
                    square += numbers[i] * numbers[i]
            for offset in (16, 8, 4, 2, 1):
                square += cute.arch.shuffle_sync_bfly(square, offset=offset)
            if lane == 0:
                sums.key_lengths[row] = cute.math.sqrt(square, fastmath=True)
                sums.key_bounds[row], sums.key_counts[row] = Int32(0), Int32(0)

    @cute.jit
    def zero_sums(self, sums: Sums, cta: Int32, ctas: Int32):
        """Zero the share of the sums that CTA `cta` of `ctas` CTAs has."""
        zeros = cute.make_rmem_tensor((4,), sums.kv_sum.element_type)
        zeros.fill(0)
        count = Int64(sums.kv_sum.shape[0]) * (self.traits.head_dim // 4)
        first = Int64(cta) * ROW_THREADS + cute.arch.thread_idx()[0]
        step = Int64(ctas) * ROW_THREADS
        for i in cutlass.range(rounds(count, first, step), unroll=4):
            cute.autovec_copy(zeros, global_tensor(sums.kv_sum, (first + i * step) * 4, 4))
            if const_expr(self.traits.config.deterministic):
                cute.autovec_copy(zeros, global_tensor(sums.kv_carry, (first + i * step) * 4, 4))

    @cute.jit
    def store_keys(self, sums: Sums, d_caches: tuple[cute.Tensor, ...], cta: Int32, columns: Int32):
        """Store the share of the caches' gradients that CTA `cta` has. columns: of the indices."""
        row_vectors = self.traits.head_dim // VECTOR
        count = Int64(sums.kv_sum.shape[0]) * row_vectors
        of_first = Int64(d_caches[0].shape[0]) * d_caches[0].shape[1] * row_vectors
        for u in cutlass.range_constexpr(THREAD_VECTORS):
            vector = Int64(cta) * CTA_VECTORS + u * ROW_THREADS + cute.arch.thread_idx()[0]
            if vector < count:
                total = cute.make_rmem_tensor((VECTOR,), sums.kv_sum.element_type)
                if const_expr(self.traits.config.deterministic):
                    cute.autovec_copy(global_tensor(sums.kv_sum, vector * VECTOR, VECTOR), total)
                    for i in cutlass.range_constexpr(0, VECTOR, 2):  # `integers` added the first's sign to the second
                        total[i + 1] -= total[i] >> 31
                else:  # the columns have `Adder`'s order
                    first = vector // 2 * (2 * VECTOR) + vector % 2 * 2
                    for i in cutlass.range_constexpr(0, VECTOR, 2):
                        address = sums.kv_sum.iterator.toint() + (first + 2 * i) * 4
                        pointer = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=8)
                        pair = cute.make_tensor(total.iterator + i, cute.make_layout(2))
                        cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(2)), pair)
                numbers = cute.make_rmem_tensor((VECTOR,), Float32)
                numbers.store(total.load().to(Float32))
                if const_expr(self.traits.config.deterministic):
                    carry = cute.make_rmem_tensor((VECTOR,), Int32)
                    cute.autovec_copy(global_tensor(sums.kv_carry, vector * VECTOR, VECTOR), carry)
                    row = Int32(vector // row_vectors)
                    factor, reach = split_scale(scale_of(sums.key_bounds[row], sums.key_counts[row], columns))
                    inverse = 1.0 / factor
                    for i in cutlass.range_constexpr(VECTOR):
                        numbers[i] = numbers[i] * inverse + Float32(carry[i]) * reach
                rounded = cute.make_rmem_tensor((VECTOR,), self.traits.dtype)
                rounded.store(numbers.load().to(self.traits.dtype))
                if const_expr(self.traits.config.two_caches):
                    if vector < of_first:
                        cute.autovec_copy(rounded, global_tensor(d_caches[0], vector * VECTOR, VECTOR))
                    else:
                        cute.autovec_copy(rounded, global_tensor(d_caches[1], (vector - of_first) * VECTOR, VECTOR))
                else:
                    cute.autovec_copy(rounded, global_tensor(d_caches[0], vector * VECTOR, VECTOR))

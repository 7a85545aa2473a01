"""Queries of 16 bits become f16, the dtype in which they are multiplied by keys that are widened in registers.

bf16 queries are multiplied by a power of 2 if they exceed f16's range.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from tsmla_kernels.sm90.decode.softmax import any_of_warps, sync_softmax, tree
from tsmla_kernels.sm90.warp import quotient, remainder

# bf16 queries become f16 unscaled if the greatest number of a row tile is in [2^-4, 2^15): then only numbers below
# 2^-17 lose bits. The bounds are f16's bits.
PLAIN_FROM, PLAIN_TO = 11 << 10, 30 << 10
COPY, FIND, SCALE = 0, 1, 2  # kinds of a pass over Q: see copy_rows
WARPS = 4  # of the softmax warpgroup


def q_pair_place(pair):
    """The new place of pair `pair` of 16 columns of Q. Lane q has four neighbouring columns of a key, which WGMMA takes
    as columns 2 q, 2 q + 1, 2 q + 8 and 2 q + 9. Q's columns are permuted to match."""
    return 4 * (pair % 2) + pair // 2


class QueryCopy:
    """Moves a row tile's Q from the ring's stages to its own place, in f16.

    Attributes:
      depth: columns of a row. p_rows: rows in Q's place. q_rows: rows of a stage. q_dtype: of Q in the stages.
      natural_from: the groups of 16 columns from this one on are not permuted. as_they_are: nor made f16.
      in_flight: groups of 16 columns that a thread copies at once.
    """

    def __init__(self, depth: int, p_rows: int, q_rows: int, q_dtype: Any) -> None:
        self.depth, self.p_rows, self.q_rows, self.q_dtype = depth, p_rows, q_rows, q_dtype
        self.natural_from, self.as_they_are, self.in_flight = depth // 16, False, 1

    @cute.jit
    def keep(self, target: Int32, sources: Any, valid_rows: Int32, t: Int32, tops: cute.Tensor):
        """Move Q to `target`, in f16. Return the factor by which the logits must be multiplied.

        The pairs of 16 columns are permuted: see q_pair_place. Rows past the tile's end become 0. tops: scratch.
        """
        top = self.copy_rows(target, sources, valid_rows, t, Float32(1.0), COPY)
        factor = Float32(1.0)
        if const_expr(self.q_dtype == cutlass.BFloat16):
            top = cutlass.max(top & 0xFFFF, (top >> 16) & 0xFFFF)
            big = any_of_warps(Int32(top >= PLAIN_TO))
            enough = any_of_warps(Int32(top >= PLAIN_FROM))
            if big != 0 or enough == 0:
                # Scale the greatest finite number to between 2^14 and 2^15.
                top = self.copy_rows(target, sources, valid_rows, t, Float32(1.0), FIND)
                top = cute.arch.warp_redux_sync(top, "max")
                if t % 32 == 0:
                    tops[t // 32, 0] = Int32(top).bitcast(Float32)
                sync_softmax()
                greatest = tree(cute.arch.fmax, [tops[w, 0] for w in range(WARPS)])
                power = (greatest.bitcast(Int32) & 0x7F800000) - (14 << 23)
                # Clamp to powers that have a reciprocal; zeros stay zeros.
                power = cutlass.min(cutlass.max(power, 1 << 23), 253 << 23)
                factor = power.bitcast(Float32)
                inverse = (Int32(254 << 23) - power).bitcast(Float32)
                self.copy_rows(target, sources, valid_rows, t, inverse, SCALE)
        cute.arch.fence_proxy("async.shared", space="cta")
        sync_softmax()
        return factor

    @cute.jit
    def copy_rows(
        self, target: Int32, sources: Any, valid_rows: Int32, t: Int32, factor: Float32, kind: cutlass.Constexpr[int]
    ):
        """One pass of `keep`.

        COPY: copy Q; return the thread's greatest magnitudes but NaN, as a pair of f16. FIND: copy nothing; return the
        thread's greatest finite magnitude, as fp32. SCALE: copy Q times `factor`.
        """
        row, first = remainder(t, self.p_rows), quotient(t, self.p_rows)
        target = target + row * 128
        source = self.row_source(sources, row, kind)
        groups, at_once = self.depth // 16, 128 // self.p_rows
        words = cute.make_rmem_tensor((4, 2), Int32)
        halves = cute.make_rmem_tensor((4, 2), Int32) if const_expr(self.natural_from < groups) else words
        ordered = cute.make_rmem_tensor((4, 2), Int32)
        top = Int32(0)  # a pair of f16; an fp32 number if `kind` is FIND
        for base in cutlass.range(0, groups, at_once, unroll=self.in_flight if const_expr(kind == COPY) else 1):
            group = base + first
            if group < groups:
                words.fill(0)
                tile, chunk = group // 4, 2 * (group % 4)
                if row < valid_rows:
                    for h in cutlass.range_constexpr(2):
                        cute.autovec_copy(self.source_words(source, row, tile, chunk + h, kind), words[None, h])
                for i in cutlass.range_constexpr(8):
                    pair = words[i]
                    if const_expr(self.q_dtype == cutlass.BFloat16):
                        numbers = [(pair << 16).bitcast(Float32), (pair & -65536).bitcast(Float32)]
                        if const_expr(kind == FIND):
                            for number in numbers:
                                bits = number.bitcast(Int32) & 0x7FFFFFFF
                                top = cutlass.max(top, bits * Int32(bits < 0x7F800000))
                        elif const_expr(kind == SCALE):
                            numbers = [number * factor for number in numbers]
                        pair = two_halves(*numbers)
                        if const_expr(kind == COPY):
                            top = greater_halves(top, pair)
                    if const_expr(self.natural_from < groups):
                        halves[i] = pair
                        if const_expr(self.as_they_are and kind == SCALE):
                            words[i] = two_bf16(*numbers)
                    else:
                        ordered[q_pair_place(i)] = pair
                if const_expr(self.natural_from < groups):
                    natural = words if const_expr(self.as_they_are) else halves
                    for i in cutlass.range_constexpr(8):
                        place = q_pair_place(i)
                        ordered[place] = natural[place] if group >= self.natural_from else halves[i]
                if const_expr(kind != FIND):
                    for h in cutlass.range_constexpr(2):
                        there = target + tile * (self.p_rows * 128) + (((chunk + h) ^ (row & 7)) << 4)
                        cute.autovec_copy(ordered[None, h], four_words(there))
        return top

    @cute.jit
    def row_source(self, sources: Any, row: Int32, kind: cutlass.Constexpr[int]):
        """Where row `row` begins; `sources` are the addresses of the one or two stages that have Q."""
        source, source_high = sources
        if row >= self.q_rows:
            source = source_high
        return source + remainder(row, self.q_rows) * 128

    @cute.jit
    def source_words(self, source: Any, row: Int32, tile: Int32, chunk: Int32, kind: cutlass.Constexpr[int]):
        """Four words of a row: 16 bytes `chunk` of 64 columns `tile`. `source` is what row_source returned."""
        return four_words(source + tile * (self.q_rows * 128) + ((chunk ^ (row & 7)) << 4))


def two_halves(low: Float32, high: Float32) -> Int32:
    """Round two numbers to a pair of f16."""
    return cute.arch.inline_ptx(
        "cvt.rn.f16x2.f32 {$w0}, {$r1}, {$r0};", write_only_types=[Int32], read_only_args=[low, high]
    )


def two_bf16(low: Float32, high: Float32) -> Int32:
    """Round two numbers to a pair of bf16."""
    return cute.arch.inline_ptx(
        "cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};", write_only_types=[Int32], read_only_args=[low, high]
    )


def greater_halves(top: Int32, pair: Int32) -> Int32:
    """The greater of `top` and the magnitude of `pair`, for each of the two f16. NaN is ignored."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 size; abs.f16x2 size, {$r1}; max.f16x2 {$w0}, {$r0}, size; }",
        write_only_types=[Int32],
        read_only_args=[top, pair],
    )


def four_words(address: Int32) -> cute.Tensor:
    """Four words of shared memory at `address`."""
    pointer = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=16)
    return cute.make_tensor(pointer, cute.make_layout(4))

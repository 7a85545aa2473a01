"""The softmax of a block of scores: S to P, the rows' maxima and sums, and O brought to the new maximum."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from tsmla_kernels.sm90.prefill.config import GROUP_ROWS
from tsmla_kernels.sm90.prefill.memory import Buffers, KernelTraits, Products, Rows, Stage, release
from tsmla_kernels.sm90.warp import WarpHelpers

# fp8: P is scaled by 2^5, so that values above 2^-11 of the greatest one when the maximum last moved keep all their
# bits. The scale is a power of two, so that this greatest value itself is exact. The maximum moves when a sum of four
# values of P passes e4m3's greatest value, 3.8 bits later at most.
P_SCALE_BITS = 5
E4M3_MAX = 448.0
# The accumulator has 16 values a lane for 32 keys, which fp8 packs into 4 words of 4 values.
WORD_OFFSETS = (0, 2, 8, 10)  # where the values of a word begin in the 16
VALUE_OFFSETS = (0, 1, 4, 5)  # and where the values of a word are from there on


def p_address(thread: Int32, lane: Int32, buffer: Int32) -> Int32:
    """fp8: the byte address of the row of P that a thread of a warpgroup names to stmatrix first."""
    row = (thread // 32) * 16 + lane % 16
    return buffer + row * 128 + ((lane // 16) ^ (lane % 8)) * 16


class OperandP(WarpHelpers):
    """Device code that converts P and puts it where WGMMA reads it."""

    def __init__(self, traits: KernelTraits) -> None:
        self.traits = traits

    @cute.jit
    def write(self, acc_s: cute.Tensor, target: cutlass.Constexpr):
        """Write P, which `acc_s` holds in float32, to `Products.p_target`.

        With 16 bits the registers have the accumulator's own order. With fp8 the keys have the order in which the
        transpose warps leave V's.
        """
        traits = self.traits
        if const_expr(traits.fp8):
            words = []
            for k in cutlass.range_constexpr(traits.block // 32):
                # Keys 0 to 15 of both of the thread's rows, then keys 16 to 31 of both.
                words += [self.pack_e4m3(*(acc_s[16 * k + w + i] for i in VALUE_OFFSETS)) for w in WORD_OFFSETS]
            self.write_words(words, target)
        else:
            cute.make_tensor(target.iterator, acc_s.layout).store(acc_s.load().to(traits.dtype))

    def write_words(self, p_words, target: Int32):
        """fp8: write P's words, four for every 32 keys."""
        for k in range(self.traits.block // 32):
            address = (target ^ ((k % 4) * 32)) + (k // 4) * (GROUP_ROWS * 128)
            self.store_matrices(address, *(p_words[4 * k + w] for w in range(4)))
        # Each warp's tensor core reads only the warp's own rows, so the warp alone needs the fence.
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()

    def pack_e4m3(self, a: Float32, b: Float32, c: Float32, d: Float32):
        """A word of four values in e4m3, the first in the lowest byte."""
        return cute.arch.inline_ptx(
            "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0};"
            " cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2}; mov.b32 {$w0}, {low, high}; }",
            write_only_types=[Int32],
            read_only_args=[a, b, c, d],
        )

    def scale_e4m3(self, word: Int32, factor: Float32):
        """A word of four values in e4m3, each times `factor`."""
        return cute.arch.inline_ptx(
            "{ .reg .b16 low, high; .reg .b32 a, b, f; cvt.rn.f16x2.f32 f, {$r1}, {$r1}; mov.b32 {low, high}, {$r0};"
            " cvt.rn.f16x2.e4m3x2 a, low; cvt.rn.f16x2.e4m3x2 b, high; mul.rn.f16x2 a, a, f; mul.rn.f16x2 b, b, f;"
            " cvt.rn.satfinite.e4m3x2.f16x2 low, a; cvt.rn.satfinite.e4m3x2.f16x2 high, b;"
            " mov.b32 {$w0}, {low, high}; }",
            write_only_types=[Int32],
            read_only_args=[word, factor],
        )


class Softmax:
    """Device code of the softmax in a compute warpgroup."""

    def __init__(self, traits: KernelTraits) -> None:
        self.traits = traits
        self.operand_p = OperandP(traits)

    @cute.jit
    def mask(self, rows: Rows, n: Int32, lane: Int32):
        """Set the scores of block `n` that a row does not see to -inf."""
        s, limit = rows.s, rows.limit
        for i in cutlass.range_constexpr(2):
            seen = limit[i] - n * self.traits.block - (lane % 4) * 2
            for c in cutlass.range_constexpr(self.traits.block // 4):
                s[i, c] = cutlass.select_((c // 2) * 8 + c % 2 < seen, s[i, c], -Float32.inf)

    @cute.jit
    def update_maximum(self, rows: Rows):
        """Raise the rows' running maximum to that of S, and rescale the sums. Returns the factors for O's rows."""
        s, maximum, total = rows.s, rows.maximum, rows.total
        factor = cute.make_rmem_tensor((2,), Float32)
        for i in cutlass.range_constexpr(2):
            # Four chains hide the latency of a comparison.
            highs = [s[i, c] for c in range(4)]
            for c in cutlass.range_constexpr(4, self.traits.block // 4):
                highs[c % 4] = cute.arch.fmax(highs[c % 4], s[i, c])
            high = cute.arch.fmax(cute.arch.fmax(highs[0], highs[1]), cute.arch.fmax(highs[2], highs[3]))
            new = self.raised(maximum[i], high, rows.scale)
            factor[i] = cute.math.exp2(maximum[i] - new, fastmath=True)
            maximum[i] = new
            total[i] = total[i] * factor[i]
        return factor

    def raised(self, maximum: Float32, high: Float32, scale: Float32):
        """A row's maximum, base 2 and scaled, after the greatest score `high` of one of its four lanes."""
        high = cute.arch.fmax(high, cute.arch.shuffle_sync_bfly(high, offset=1))
        high = cute.arch.fmax(high, cute.arch.shuffle_sync_bfly(high, offset=2))
        return cute.arch.fmax(maximum, high * scale - P_SCALE_BITS if self.traits.fp8 else high * scale)

    @cute.jit
    def exponentiate(self, rows: Rows, i: cutlass.Constexpr[int]):
        """Replace row `i` of S by P, and add P to the row's sum."""
        s, maximum, total = rows.s, rows.maximum, rows.total
        sums = [total[i], Float32(0.0)]
        for c in cutlass.range_constexpr(self.traits.block // 4):
            p = cute.math.exp2(s[i, c] * rows.scale - maximum[i], fastmath=True)
            s[i, c] = p
            sums[c % 2] += p
        total[i] = sums[0] + sums[1]

    @cute.jit
    def finish_block(self, products: Products, rows: Rows, v: Buffers, v_stage: Stage):
        """Turn S into P with its exact maximum, and release V of the block before once its product is done."""
        traits, o = self.traits, rows.o
        factor = self.update_maximum(rows)
        moved = cute.arch.vote_any_sync(factor[0] != 1.0 or factor[1] != 1.0)
        self.exponentiate(rows, 0)
        if const_expr(not traits.fp8):
            # V arrived long ago, but this wait ends a basic block: the assembler moves the wait for O up to the start
            # of its block. O is done by now, and the rest of the softmax hides the wait's latency.
            cute.arch.mbarrier_wait(v.full + v_stage.index, v_stage.phase)
            warpgroup.wait_group(0)
            release(v.empty + v_stage.index)
        if moved:
            if const_expr(traits.fp8):
                warpgroup.wait_group(0)
            for c in cutlass.range_constexpr(traits.v_head_dim // 4):
                o[0, c] = o[0, c] * factor[0]
                o[1, c] = o[1, c] * factor[1]
        self.exponentiate(rows, 1)
        if const_expr(traits.fp8):
            # The branch above ends a basic block, so the assembler puts this wait right behind the branch. The product
            # before has then read P, so that P's memory is free too.
            warpgroup.wait_group(0)
            release(v.empty + v_stage.index)
        self.operand_p.write(products.acc_s, products.p_target)


class LaggingSoftmax:
    """Device code of the softmax with the maximum of the blocks before.

    P's sums are needed anyway, and they bound P. Only if a sum of four does not fit into e4m3 does the warp take the
    maximum of this block and make P again. S must still be there for that, so the block is done in two halves: the
    registers do not hold all of S and all of P.
    """

    def __init__(self, traits: KernelTraits, softmax: Softmax) -> None:
        self.traits = traits
        self.softmax = softmax
        self.operand_p = OperandP(traits)

    @cute.jit
    def finish_block(self, products: Products, rows: Rows, v: Buffers, v_index: Int32):
        """As `Softmax.finish_block`."""
        steps, total = self.traits.block // 32, rows.total
        p_words = cute.make_rmem_tensor((4 * steps,), Int32)
        sums = cute.make_rmem_tensor((2,), Float32)
        for half in (range(steps // 2), range(steps // 2, steps)):
            greatest = self.exponentiate(products.acc_s, rows, p_words, sums, half)
            fits = cute.arch.vote_all_sync(greatest <= E4M3_MAX)  # false where one of them is NaN
            if not fits:
                warpgroup.wait_group(0)
                self.catch_up(rows, p_words, half.start)
                self.exponentiate(products.acc_s, rows, p_words, sums, half)
            for i in cutlass.range_constexpr(2):
                total[i] += sums[i]
        # The branch above ends a basic block, so the assembler puts this wait right behind the branch. The product
        # before has then read P, so that P's memory is free too.
        warpgroup.wait_group(0)
        release(v.empty + v_index)
        self.operand_p.write_words(p_words, products.p_target)

    def exponentiate(self, acc_s, rows: Rows, p_words, sums, steps: range):
        """P of these steps of 32 keys: its words, its rows' sums, and, returned, the greatest sum of four values."""
        maximum, totals, greatest = rows.maximum, [Float32(0.0), Float32(0.0)], Float32(0.0)
        for k in steps:
            fours = []
            for w, offset in enumerate(WORD_OFFSETS):
                row = w % 2
                p = [
                    cute.math.exp2(acc_s[16 * k + offset + i] * rows.scale - maximum[row], fastmath=True)
                    for i in VALUE_OFFSETS
                ]
                p_words[4 * k + w] = self.operand_p.pack_e4m3(*p)
                fours.append((p[0] + p[1]) + (p[2] + p[3]))
                totals[row] += fours[-1]
            for pair in (fours[:2], fours[2:]):
                greatest = self.max_of_three(greatest, *pair)
        for row in range(2):
            sums[row] = totals[row]
        return greatest

    def max_of_three(self, a: Float32, b: Float32, c: Float32):
        """The greatest of three values that are not negative. Their bits compare as integers, for which there is one
        instruction with three operands; for floats there is none."""
        return cute.arch.inline_ptx(
            "{ .reg .b32 x, y; mov.b32 x, {$r0}; mov.b32 y, {$r1}; max.s32 x, x, y; mov.b32 y, {$r2};"
            " max.s32 x, x, y; mov.b32 {$w0}, x; }",
            write_only_types=[Float32],
            read_only_args=[a, b, c],
        )

    @cute.jit
    def catch_up(self, rows: Rows, p_words: cute.Tensor, first: cutlass.Constexpr[int]):
        """Raise the rows' maximum to that of S from step `first` on; rescale O, the sums, and P's words before."""
        traits, s, o, maximum, total = self.traits, rows.s, rows.o, rows.maximum, rows.total
        for i in cutlass.range_constexpr(2):
            high = s[i, 8 * first]
            for c in cutlass.range_constexpr(8 * first + 1, traits.block // 4):
                high = cute.arch.fmax(high, s[i, c])
            new = self.softmax.raised(maximum[i], high, rows.scale)
            factor = cute.math.exp2(maximum[i] - new, fastmath=True)
            maximum[i] = new
            total[i] = total[i] * factor
            for c in cutlass.range_constexpr(traits.v_head_dim // 4):
                o[i, c] = o[i, c] * factor
            for w in cutlass.range_constexpr(i, 4 * first, 2):
                p_words[w] = self.operand_p.scale_e4m3(p_words[w], factor)

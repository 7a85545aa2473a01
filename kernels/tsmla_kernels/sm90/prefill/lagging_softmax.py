"""fp8's softmax of a block without a mask: no search for the maximum."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from tsmla_kernels.sm90.prefill.memory import Buffers, Products, Rows, release
from tsmla_kernels.sm90.prefill.operand_p import VALUE_OFFSETS, WORD_OFFSETS, OperandP
from tsmla_kernels.sm90.prefill.softmax import E4M3_MAX, Softmax
from tsmla_kernels.sm90.prefill.traits import KernelTraits


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

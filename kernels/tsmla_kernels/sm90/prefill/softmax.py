"""The softmax of a block of scores: P from S, the rows' maxima and sums, and O rescaled to a new maximum."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from tsmla_kernels.sm90.prefill.config import GROUP_ROWS
from tsmla_kernels.sm90.prefill.memory import Buffers, KernelTraits, Products, Rows, Stage
from tsmla_kernels.sm90.prefill.selection import SelectedKeys
from tsmla_kernels.sm90.warp import release, store_matrices

# fp8: P is 2^5 for a score that equals the row's running maximum. Values of P from 2^-6 up are normal e4m3 numbers with
# all mantissa bits, and 2^5 is exact. So P keeps these bits down to 2^-11 of its value at the maximum. The maximum is
# raised when a sum of four values of P exceeds e4m3's greatest value, 448; until then no score is more than
# log2(448 / 2^5) = 3.8 bits above the maximum.
P_SCALE_BITS = 5
E4M3_MAX = 448.0
# fp8: a lane has 16 values of P for 32 keys (8 keys of each of its two rows) and packs them into 4 words.
WORD_OFFSETS = (0, 2, 8, 10)  # index, among the 16 values, of the first value of each word
VALUE_OFFSETS = (0, 1, 4, 5)  # offsets of a word's four values from its first value


def p_address(thread: Int32, lane: Int32, buffer: Int32) -> Int32:
    """fp8: the byte address of the row of P that a warpgroup's thread passes to stmatrix for the first 32 keys."""
    row = (thread // 32) * 16 + lane % 16
    return buffer + row * 128 + ((lane // 16) ^ (lane % 8)) * 16


class Softmax:
    """Device code of the softmax with the exact maximum, and of P as WGMMA's operand."""

    def __init__(self, traits: KernelTraits) -> None:
        self.traits = traits
        self.selected_keys = SelectedKeys(traits)

    @cute.jit
    def mask(self, rows: Rows, block_index: Int32, lane: Int32) -> None:
        """Set the scores of block `block_index` that a row does not see to -inf."""
        s, limit = rows.s, rows.limit
        for i in cutlass.range_constexpr(2):
            visible = limit[i] - block_index * self.traits.block - (lane % 4) * 2
            for c in cutlass.range_constexpr(self.traits.block // 4):
                s[i, c] = cutlass.select_((c // 2) * 8 + c % 2 < visible, s[i, c], -Float32.inf)

    @cute.jit
    def update_maximum(self, rows: Rows) -> cute.Tensor:
        """Raise the rows' running maximum to the maximum of S, and rescale the sums. Returns the factors for O's
        rows."""
        s, maximum, total = rows.s, rows.maximum, rows.total
        factor = cute.make_rmem_tensor((2,), Float32)
        for i in cutlass.range_constexpr(2):
            # Four chains hide the latency of a comparison.
            maxima = [s[i, c] for c in range(4)]
            for c in cutlass.range_constexpr(4, self.traits.block // 4):
                maxima[c % 4] = cute.arch.fmax(maxima[c % 4], s[i, c])
            lane_maximum = cute.arch.fmax(cute.arch.fmax(maxima[0], maxima[1]), cute.arch.fmax(maxima[2], maxima[3]))
            new_maximum = self.raise_maximum(maximum[i], lane_maximum, rows.scale)
            factor[i] = cute.math.exp2(maximum[i] - new_maximum, fastmath=True)
            maximum[i] = new_maximum
            total[i] = total[i] * factor[i]
        return factor

    def raise_maximum(self, maximum: Float32, lane_maximum: Float32, scale: Float32) -> Float32:
        """The new maximum of a row, base 2 and scaled, from the old one and the four lanes' greatest scores."""
        for offset in (1, 2):
            lane_maximum = cute.arch.fmax(lane_maximum, cute.arch.shuffle_sync_bfly(lane_maximum, offset=offset))
        scaled = lane_maximum * scale
        return cute.arch.fmax(maximum, scaled - P_SCALE_BITS if self.traits.fp8 else scaled)

    @cute.jit
    def exponentiate(self, rows: Rows, i: cutlass.Constexpr[int]) -> None:
        """Replace row `i` of S by P, and add P to the row's sum."""
        s, maximum, total = rows.s, rows.maximum, rows.total
        sums = [total[i], Float32(0.0)]
        for c in cutlass.range_constexpr(self.traits.block // 4):
            p = cute.math.exp2(s[i, c] * rows.scale - maximum[i], fastmath=True)
            s[i, c] = p
            sums[c % 2] += p
        total[i] = sums[0] + sums[1]

    @cute.jit
    def start_tile(self, rows: Rows, block_index: Int32, unmasked_keys: Int32, lane: Int32) -> None:
        """Replace S of a tile's first block by P. All rows of the warpgroup see the first `unmasked_keys` keys."""
        if const_expr(self.traits.selection):
            self.selected_keys.mask(rows, block_index, lane, limited=True)
        else:
            if (block_index + 1) * self.traits.block > unmasked_keys:
                self.mask(rows, block_index, lane)
        self.update_maximum(rows)
        for i in cutlass.range_constexpr(2):
            self.exponentiate(rows, i)

    @cute.jit
    def finish_block(self, products: Products, rows: Rows, v: Buffers, v_stage: Stage) -> None:
        """Replace S by P with the exact maximum. Rescale O. Release V of the block before when its P V has been added
        to O."""
        traits, o = self.traits, rows.o
        factor = self.update_maximum(rows)
        needs_rescale = cute.arch.vote_any_sync(factor[0] != 1.0 or factor[1] != 1.0)
        self.exponentiate(rows, 0)
        if const_expr(not traits.fp8):
            # V arrived long ago; this wait is here because it ends a basic block. The assembler moves wait_group(0) up
            # to the start of its basic block: that is now here, not above `exponentiate`. O is done by now, and the
            # rest of the softmax hides the latency of O's first use.
            cute.arch.mbarrier_wait(v.full + v_stage.index, v_stage.phase)
            warpgroup.wait_group(0)
            release(v.empty + v_stage.index)
        if needs_rescale:
            if const_expr(traits.fp8):
                warpgroup.wait_group(0)
            for c in cutlass.range_constexpr(traits.v_head_dim // 4):
                o[0, c] = o[0, c] * factor[0]
                o[1, c] = o[1, c] * factor[1]
        self.exponentiate(rows, 1)
        if const_expr(traits.fp8):
            # The branch above ends a basic block, so the assembler puts this wait right after the branch. After the
            # wait, P V of the block before is done, so `write_p` may overwrite that block's P.
            warpgroup.wait_group(0)
            release(v.empty + v_stage.index)
        self.write_p(products.acc_s, products.p_target)

    @cute.jit
    def write_p(self, acc_s: cute.Tensor, target: cute.Tensor | Int32) -> None:
        """Write P, which `acc_s` has in float32, to `Products.p_target`.

        With 16 bits P keeps the accumulator's order in registers. With fp8 the keys of P are stored in the order in
        which the transpose warps store V's keys.
        """
        traits = self.traits
        if const_expr(traits.fp8):
            p_words = []
            for k in cutlass.range_constexpr(traits.block // 32):
                # Keys 0 to 15 of both of the thread's rows, then keys 16 to 31 of both rows.
                p_words += [self.pack_e4m3(*(acc_s[16 * k + w + i] for i in VALUE_OFFSETS)) for w in WORD_OFFSETS]
            self.write_p_words(p_words, target)
        else:
            cute.make_tensor(target.iterator, acc_s.layout).store(acc_s.load().to(traits.dtype))

    def write_p_words(self, p_words: cute.Tensor | list[Int32], target: Int32) -> None:
        """fp8: write P's words, four for every 32 keys."""
        for k in range(self.traits.block // 32):
            address = (target ^ ((k % 4) * 32)) + (k // 4) * (GROUP_ROWS * 128)
            store_matrices(address, *(p_words[4 * k + w] for w in range(4)))
        # Each warp's tensor core reads only that warp's rows, so a warp waits only for itself.
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()

    def pack_e4m3(self, a: Float32, b: Float32, c: Float32, d: Float32) -> Int32:
        """Pack four values in e4m3 into a word, the first in the lowest byte."""
        return cute.arch.inline_ptx(
            "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0};"
            " cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2}; mov.b32 {$w0}, {low, high}; }",
            write_only_types=[Int32],
            read_only_args=[a, b, c, d],
        )

    def scale_e4m3(self, word: Int32, factor: Float32) -> Int32:
        """Multiply each of a word's four values in e4m3 by `factor`."""
        return cute.arch.inline_ptx(
            "{ .reg .b16 low, high; .reg .b32 a, b, f; cvt.rn.f16x2.f32 f, {$r1}, {$r1}; mov.b32 {low, high}, {$r0};"
            " cvt.rn.f16x2.e4m3x2 a, low; cvt.rn.f16x2.e4m3x2 b, high; mul.rn.f16x2 a, a, f; mul.rn.f16x2 b, b, f;"
            " cvt.rn.satfinite.e4m3x2.f16x2 low, a; cvt.rn.satfinite.e4m3x2.f16x2 high, b;"
            " mov.b32 {$w0}, {low, high}; }",
            write_only_types=[Int32],
            read_only_args=[word, factor],
        )


class LaggingSoftmax:
    """Device code of fp8's softmax without a mask: P is computed with the maximum of the blocks before.

    The sums of P are needed anyway, and no value of P is greater than a sum in which it is a term. If a sum of four
    values exceeds e4m3's range, the warp takes the maximum of this block and computes P again from S. The registers do
    not have room for all of S and all of P, so a block is done in two halves.
    """

    def __init__(self, traits: KernelTraits, softmax: Softmax) -> None:
        self.traits = traits
        self.softmax = softmax

    @cute.jit
    def finish_block(self, products: Products, rows: Rows, v: Buffers, v_index: Int32) -> None:
        """Do what `Softmax.finish_block` does, for a block without a mask."""
        steps, total = self.traits.block // 32, rows.total
        p_words = cute.make_rmem_tensor((4 * steps,), Int32)
        sums = cute.make_rmem_tensor((2,), Float32)
        for half in (range(steps // 2), range(steps // 2, steps)):
            max_sum = self.exponentiate(products.acc_s, rows, p_words, sums, half)
            fits = cute.arch.vote_all_sync(max_sum <= E4M3_MAX)  # false for NaN
            if not fits:
                warpgroup.wait_group(0)
                self.catch_up(rows, p_words, half.start)
                self.exponentiate(products.acc_s, rows, p_words, sums, half)
            for i in cutlass.range_constexpr(2):
                total[i] += sums[i]
        # P V of the block before is done after this wait, so its P and V may be overwritten.
        warpgroup.wait_group(0)
        release(v.empty + v_index)
        self.softmax.write_p_words(p_words, products.p_target)

    def exponentiate(
        self, acc_s: cute.Tensor, rows: Rows, p_words: cute.Tensor, sums: cute.Tensor, steps: range
    ) -> Float32:
        """Write P's words and the rows' sums for `steps`, of 32 keys each. Returns the greatest sum of four values of
        P."""
        maximum, totals, max_sum = rows.maximum, [Float32(0.0), Float32(0.0)], Float32(0.0)
        for k in steps:
            sums_of_four = []
            for w, offset in enumerate(WORD_OFFSETS):
                row = w % 2
                p = [
                    cute.math.exp2(acc_s[16 * k + offset + i] * rows.scale - maximum[row], fastmath=True)
                    for i in VALUE_OFFSETS
                ]
                p_words[4 * k + w] = self.softmax.pack_e4m3(*p)
                sums_of_four.append((p[0] + p[1]) + (p[2] + p[3]))
                totals[row] += sums_of_four[-1]
            for pair in (sums_of_four[:2], sums_of_four[2:]):
                max_sum = self.max_of_three(max_sum, *pair)
        for row in range(2):
            sums[row] = totals[row]
        return max_sum

    def max_of_three(self, a: Float32, b: Float32, c: Float32) -> Float32:
        """The greatest of three values that are not negative. They are compared as integers, because there is an
        instruction for three integers but not for three floats."""
        return cute.arch.inline_ptx(
            "{ .reg .b32 x, y; mov.b32 x, {$r0}; mov.b32 y, {$r1}; max.s32 x, x, y; mov.b32 y, {$r2};"
            " max.s32 x, x, y; mov.b32 {$w0}, x; }",
            write_only_types=[Float32],
            read_only_args=[a, b, c],
        )

    @cute.jit
    def catch_up(self, rows: Rows, p_words: cute.Tensor, first_step: cutlass.Constexpr[int]) -> None:
        """Raise the rows' maximum to the maximum of S from step `first_step` on. Rescale O, the sums, and P's words of
        the steps before."""
        traits, s, o, maximum, total = self.traits, rows.s, rows.o, rows.maximum, rows.total
        for i in cutlass.range_constexpr(2):
            lane_maximum = s[i, 8 * first_step]
            for c in cutlass.range_constexpr(8 * first_step + 1, traits.block // 4):
                lane_maximum = cute.arch.fmax(lane_maximum, s[i, c])
            new_maximum = self.softmax.raise_maximum(maximum[i], lane_maximum, rows.scale)
            factor = cute.math.exp2(maximum[i] - new_maximum, fastmath=True)
            maximum[i] = new_maximum
            total[i] = total[i] * factor
            for c in cutlass.range_constexpr(traits.v_head_dim // 4):
                o[i, c] = o[i, c] * factor
            for w in cutlass.range_constexpr(i, 4 * first_step, 2):
                p_words[w] = self.softmax.scale_e4m3(p_words[w], factor)

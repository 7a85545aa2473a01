"""P as the operand of O += P V: in registers for 16-bit operands, in shared memory for fp8."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from tsmla_kernels.sm90.prefill.config import GROUP_ROWS
from tsmla_kernels.sm90.prefill.traits import KernelTraits
from tsmla_kernels.sm90.warp import WarpHelpers

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

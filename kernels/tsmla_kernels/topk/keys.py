"""The order of float32 as integers: keys, the bins of a histogram, and entries that hold a key and a position."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, Uint64

NAN = float("nan")
LOWEST_NUMBER = 0x007FFFFF
"""The key of -inf."""


def ordered(value: Float32) -> Uint32:
    """A number that is greater for a greater float. Only NaN has the number 0; 0.0 and -0.0 have the same number."""
    return cute.arch.inline_ptx(
        "{ .reg .f32 t; .reg .b32 m; .reg .pred p;"
        " add.rn.f32 t, {$r0}, 0f00000000; mov.b32 {$w0}, t; shr.s32 m, {$w0}, 31; or.b32 m, m, 0x80000000;"
        " xor.b32 {$w0}, {$w0}, m; setp.nan.f32 p, t, t; selp.b32 {$w0}, 0, {$w0}, p; }",
        write_only_types=[Uint32],
        read_only_args=[value],
    )


@cute.jit
def least_float(key: Uint32) -> Float32:
    """The least float whose ordered number is at least `key`. NaN if `key` is 0 or above inf's number."""
    # Only NaN has a number below that of -inf.
    if key > 0:
        key = cutlass.max(key, Uint32(LOWEST_NUMBER))
    return cute.arch.inline_ptx(
        "{ .reg .b32 m; shr.s32 m, {$r0}, 31; not.b32 m, m; or.b32 m, m, 0x80000000; xor.b32 m, m, {$r0};"
        " mov.b32 {$w0}, m; }",
        write_only_types=[Float32],
        read_only_args=[key],
    )


def pair_bins(low: Float32, high: Float32):
    """The bins of two floats, as byte offsets in a histogram. A bin is the upper 12 bits of the float's f16, rounded
    towards zero and mapped so that bins ascend with the floats. NaN falls into -inf's bin; -0.0, and every float that
    rounds to it, falls into 0.0's."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 p, m; cvt.rz.f16x2.f32 p, {$r1}, {$r0}; mov.b32 m, 0; add.rn.f16x2 p, p, m;"
        " mov.b32 m, 0xFC00FC00; max.f16x2 p, p, m; prmt.b32 m, p, 0, 0xBB99; or.b32 m, m, 0x80008000;"
        " xor.b32 p, p, m; shr.u32 m, p, 2; and.b32 {$w0}, m, 0x3FFC; shr.u32 m, p, 18; and.b32 {$w1}, m, 0x3FFC; }",
        write_only_types=[Int32, Int32],
        read_only_args=[low, high],
    )


NAN_BIN = 0x03FF >> 4
"""The bin of -inf, whose f16 is 0xFC00, and of NaN."""


@cute.jit
def bin_floor(index: Int32) -> Uint32:
    """The least ordered number of the floats whose bin (see pair_bins) is at least `index`."""
    found = Uint32(0)
    number = index * 16
    if number > 0x8000:
        found = ordered(f16_value(number - 0x8000))
    else:
        # Let m be the greatest f16 magnitude, as bits, of the bins from `index` on. A negative float rounds towards
        # zero to at most m if and only if it is above minus the f16 with the bits m + 1 (`magnitude`).
        magnitude = cutlass.max(Int32(0x7FFF) - number, 0) + 1
        if magnitude <= 0x7C00:
            found = ordered(-f16_value(magnitude)) + 1
    return found


def f16_value(bits: Int32) -> Float32:
    """The value, as float32, of the f16 with the bits `bits`."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 h; cvt.u16.u32 h, {$r0}; cvt.f32.f16 {$w0}, h; }",
        write_only_types=[Float32],
        read_only_args=[bits],
    )


def entry(key: Uint32, position: Int32) -> Uint64:
    """A key and a position in one number: greater for a greater key and, of equal keys, for the lower position."""
    return (Uint64(key) << Uint64(32)) | Uint64(Uint32(~position))


def key_of(value: Uint64) -> Int32:
    """The key in an entry."""
    return Int32(Uint32(value >> Uint64(32)))


def position_of(value: Uint64) -> Int32:
    """The position in an entry."""
    return ~Int32(Uint32(value & Uint64(0xFFFFFFFF)))


def joined(low: Int32, high: Int32) -> Uint64:
    """The entry whose two words are `low` and `high`."""
    return (Uint64(Uint32(high)) << Uint64(32)) | Uint64(Uint32(low))

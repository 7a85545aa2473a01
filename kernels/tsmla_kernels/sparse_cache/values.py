"""Device functions that the kernels of the packed caches share: power-of-two scales of e4m3, and the rotation of a row
in half a warp."""

from __future__ import annotations

import struct

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from tsmla_kernels.cache_ops.kernels import DTYPES, load, row_address
from tsmla_kernels.sparse_cache.config import LANE_VALUES, IndexerQuantizeConfig, IndexerWriteConfig

MANTISSA_BITS = 23
MANTISSA_MASK = (1 << MANTISSA_BITS) - 1
BIAS = 127
FP8_MAX_EXPONENT = 8
FP8_MAX_MANTISSA = 0x600000
"""448 is 1.75 * 2^8: a maximum m * 2^e is at most 448 * 2^k if e - 8 < k, or if e - 8 == k and m <= 1.75."""


def float_bits(value: float) -> int:
    """The bits of a float32."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def greatest_bits(values, count):
    """The bits of the greatest magnitude among the first `count` values, as float32. Compared as integers, the bits of
    a greater magnitude are greater, and those of a NaN are above all numbers."""
    bits = Uint32(0)
    for i in range(count):
        magnitude = values[i].to(Float32).bitcast(Uint32) & 0x7FFFFFFF
        bits = cutlass.max(bits, magnitude)
    return bits


@cute.jit
def scale_exponent(bits: Uint32, floor: cutlass.Constexpr[float]):
    """ceil(log2(max(amax, floor) / 448)) from the bits of amax, as tsmla_jax.ops.selected.numerics does."""
    bits = Int32(cutlass.max(bits, Uint32(float_bits(floor))))
    exponent = (bits >> MANTISSA_BITS) - (BIAS + FP8_MAX_EXPONENT)
    if (bits & MANTISSA_MASK) > FP8_MAX_MANTISSA:
        exponent += 1
    return exponent


def power_of_two(exponent):
    """2^exponent, which must be a normal float32."""
    return ((exponent + BIAS) << MANTISSA_BITS).bitcast(Float32)


def ask(dtype: str, address: Int64) -> Float32:
    """Load a value at an address of global memory, as float32. The load is issued here: the compiler would move a plain
    load down to its first use, after waits for other loads."""
    kind = f"b{DTYPES[dtype].width}"
    widen = {
        "bfloat16": "cvt.u32.u16 t, h; shl.b32 t, t, 16; mov.b32 {$w0}, t;",
        "float16": "cvt.f32.f16 {$w0}, h;",
        "float32": "mov.b32 {$w0}, h;",
    }[dtype]
    return cute.arch.inline_ptx(
        f"{{ .reg .{kind} h; .reg .b32 t; ld.volatile.global.{kind} h, [{{$r0}}]; {widen} }}",
        write_only_types=[Float32],
        read_only_args=[address],
    )


def rotated_pair(a: Float32, b: Float32, cos: Float32, sin: Float32) -> tuple[Float32, Float32]:
    """(a cos - b sin, b cos + a sin). In both, the first product is exact; the second product is rounded, and so is the
    sum."""
    return cute.arch.inline_ptx(
        "{ .reg .f32 s, t; mul.rn.f32 s, {$r1}, {$r3}; neg.f32 s, s; mul.rn.f32 t, {$r0}, {$r3};"
        " fma.rn.f32 {$w0}, {$r0}, {$r2}, s; fma.rn.f32 {$w1}, {$r1}, {$r2}, t; }",
        write_only_types=[Float32, Float32],
        read_only_args=[a, b, cos, sin],
    )


class RowRotation:
    """Rope on some columns of rows of 128, which half a warp holds, with LANE_VALUES columns per lane. A lane's columns
    are neighbours, unless pairs have their members in different halves of the rotated columns: a lane that rotates
    then has LANE_VALUES / 2 neighbours of the first half, and their partners in the second half. `config` gives
    rope_dim, rope_offset and rope_layout."""

    def __init__(self, config: IndexerWriteConfig | IndexerQuantizeConfig) -> None:
        self.dim, self.offset = config.rope_dim, config.rope_offset
        self.halves = config.rope_layout == "halves" and config.rope_dim > 0

    def inside(self, lane: Int32):
        """Whether a lane's columns are rotated."""
        column = lane * LANE_VALUES - self.offset
        return (column >= 0) & (column < self.dim)

    @cute.jit
    def columns(self, lane: Int32):
        """The first column of each group of neighbouring columns that a lane has: one group, or two groups of half the
        size."""
        first = lane * LANE_VALUES
        if const_expr(not self.halves):
            return (first,)
        second = first + LANE_VALUES // 2
        if self.inside(lane):
            first = self.offset + ((first - self.offset) >> 1)
            second = first + self.dim // 2
        return first, second

    @cute.jit
    def angles(self, cos: cute.Tensor, sin: cute.Tensor, token: Int32, lane: Int32):
        """(cos, sin) of a lane's pairs; any values if the lane does not rotate."""
        width = LANE_VALUES // 2
        first = (lane * LANE_VALUES - self.offset) >> 1
        first = cutlass.min(cutlass.max(first, 0), self.dim // 2 - width)
        return [load(Float32, row_address(table, token, first * 4), width) for table in (cos, sin)]

    @cute.jit
    def rotate(self, values: cute.Tensor, angles: list[cute.Tensor], lane: Int32):
        """Rotate the lane's float32 values in place; `lane` is its index among the row's 16 lanes."""
        cos, sin = angles
        if self.inside(lane):
            for i in cutlass.range_constexpr(LANE_VALUES // 2):
                if const_expr(self.halves):
                    both = rotated_pair(values[i], values[i + LANE_VALUES // 2], cos[i], sin[i])
                    values[i], values[i + LANE_VALUES // 2] = both
                else:
                    even, odd = values[2 * i], values[2 * i + 1]
                    values[2 * i] = even * cos[i] - odd * sin[i]
                    values[2 * i + 1] = odd * cos[i] + even * sin[i]

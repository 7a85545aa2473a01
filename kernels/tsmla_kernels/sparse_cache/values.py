"""What the kernels of the packed caches do alike: power-of-two scales of e4m3, the rotation of a row in half a warp."""

from __future__ import annotations

import struct

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from tsmla_kernels.cache_ops.kernels import load, row_address
from tsmla_kernels.sparse_cache.config import LANE_VALUES, IndexerQuantizeConfig, IndexerWriteConfig

MANTISSA_BITS = 23
MANTISSA_MASK = (1 << MANTISSA_BITS) - 1
BIAS = 127
FP8_MAX_EXPONENT = 8
FP8_MAX_MANTISSA = 0x600000
"""448 is 1.75 * 2^8: a maximum m * 2^e fits below 448 * 2^k where e - 8 < k, or e - 8 == k and m <= 1.75."""


def float_bits(value: float) -> int:
    """The bits of a float32."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def greatest_bits(values, count):
    """The bits of the greatest magnitude among `count` float32 registers; as integers they ascend with the magnitudes,
    and a NaN is above all numbers."""
    bits = Uint32(0)
    for i in range(count):
        magnitude = values[i].to(Float32).bitcast(Uint32) & 0x7FFFFFFF
        bits = cutlass.max(bits, magnitude)
    return bits


@cute.jit
def scale_exponent(bits: Uint32, floor: cutlass.Constexpr):
    """ceil(log2(max(amax, floor) / 448)) from the bits of amax, as tsmla_jax.sparse computes it."""
    bits = Int32(cutlass.max(bits, Uint32(float_bits(floor))))
    exponent = (bits >> MANTISSA_BITS) - (BIAS + FP8_MAX_EXPONENT)
    if (bits & MANTISSA_MASK) > FP8_MAX_MANTISSA:
        exponent += 1
    return exponent


def power_of_two(exponent):
    """2^exponent of a normal number."""
    return ((exponent + BIAS) << MANTISSA_BITS).bitcast(Float32)


class RowRotation:
    """Rope on some columns of rows of 128 that half a warp holds, LANE_VALUES columns a lane. `config` has rope_dim,
    rope_offset and rope_layout."""

    def __init__(self, config: IndexerWriteConfig | IndexerQuantizeConfig) -> None:
        self.dim, self.offset = config.rope_dim, config.rope_offset
        self.halves = config.rope_layout == "halves"

    @cute.jit
    def angles(self, cos: cute.Tensor, sin: cute.Tensor, token: Int32, lane: Int32):
        """(cos, sin) of a lane's columns: one of each for a pair of neighbours, or for a column where pairs lie in
        halves."""
        width = LANE_VALUES if const_expr(self.halves) else LANE_VALUES // 2
        half = self.dim // 2
        column = lane * LANE_VALUES - self.offset
        first = column
        if const_expr(self.halves):
            if column >= half:
                first = column - half
        else:
            first = column >> 1
        first = cutlass.min(cutlass.max(first, 0), half - width)
        return [load(Float32, row_address(table, token, first * 4), width) for table in (cos, sin)]

    @cute.jit
    def rotate(self, values: cute.Tensor, angles: cutlass.Constexpr, lane: Int32):
        """Rotate the lane's float32 values in place. All lanes of the warp; `lane` is that of the row."""
        cos, sin = angles
        column = lane * LANE_VALUES - self.offset
        inside = (column >= 0) & (column < self.dim)
        if const_expr(self.halves):
            distance = self.dim // 2 // LANE_VALUES
            partner, sign = cute.arch.lane_idx() + distance, Float32(-1.0)
            if column >= self.dim // 2:
                partner, sign = cute.arch.lane_idx() - distance, Float32(1.0)
            for i in cutlass.range_constexpr(LANE_VALUES):
                other = cute.arch.shuffle_sync(values[i], partner & 31)
                if inside:
                    values[i] = values[i] * cos[i] + sign * (other * sin[i])
        else:
            if inside:
                for i in cutlass.range_constexpr(LANE_VALUES // 2):
                    even, odd = values[2 * i], values[2 * i + 1]
                    values[2 * i] = even * cos[i] - odd * sin[i]
                    values[2 * i + 1] = odd * cos[i] + even * sin[i]

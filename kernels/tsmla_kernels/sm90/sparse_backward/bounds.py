"""How the sums of a key's gradient stay exact integers: additions of integers give the same bits in any order.

Each key has a reach, a power of 2: an eighth of the greatest bound on what a tile of heads would add to it if P had the
same weight for all keys of a token. A number below the reach is rounded to an integer, in units so small that as many
of them as the key gets stay below 2^30. Of a larger number the multiple of the reach goes to a second array of sums.
So the bounds need no P, and one that is too small or too large costs time or bits, but the sum is right.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

LIMIT_BITS = 30  # the magnitude of a sum, as an integer, stays below 2 to this power
LEAST_COUNT = 1 << 9  # additions that are counted at least, so that what is added once stays below 2^21
ROUNDER, ROUNDER_BITS = 1.5 * 2.0**23, 0x4B400000
"""A float and its bits. A number of magnitude below 2^22 that is added to it is rounded to an integer, and the bits of
the sum are these bits plus the integer. A conversion takes another instruction and waits longer."""
PART = 0.125  # of the bound is the reach; typical numbers are a hundredth of the bound
CARRY_PART = 2.0**-30  # for each addition and column of the indices at least, so that the second sums have room
MANTISSA_BITS, BIAS = 23, 127
LEAST_EXPONENT, GREATEST_EXPONENT = BIAS - 90, BIAS + 120  # exponent bits of the reach
INFINITE, NOT_A_NUMBER = 0x7F800000, 0x7FC00000  # bits of float32
FACTOR_MASK, REACH_MASK = NOT_A_NUMBER, 255  # parts of a scale; a factor may be NaN


@cute.jit
def magnitude(x: Float32):
    """|x|."""
    return (x.bitcast(Int32) & 0x7FFFFFFF).bitcast(Float32)


@cute.jit
def greatest(a: Float32, b: Float32):
    """The greater of two numbers that are not negative; NaN if either is NaN."""
    return cutlass.max(a.bitcast(Int32), b.bitcast(Int32)).bitcast(Float32)


@cute.jit
def scale_of(bound: Int32, count: Int32, columns: Int32):
    """The scale of a key's numbers: the bits of the factor by which they are multiplied, a power of 2, plus the
    exponent bits of the reach. bound, count: the key's in the workspaces. columns: of the indices. The factor is NaN if
    the bound is not finite."""
    part = cutlass.max(PART, Float32(count) * Float32(columns) * CARRY_PART)
    reach = ((bound.bitcast(Float32) * part).bitcast(Int32) >> MANTISSA_BITS) + 1
    reach = cutlass.min(cutlass.max(reach, LEAST_EXPONENT), GREATEST_EXPONENT)
    twice = 2 * cutlass.max(count, LEAST_COUNT) - 1
    above = Float32(twice).bitcast(Int32) >> MANTISSA_BITS  # the exponent bits of the next power of 2
    scale = (3 * BIAS + LIMIT_BITS - above - reach << MANTISSA_BITS) + reach
    if bound >= INFINITE:
        scale = Int32(NOT_A_NUMBER)
    return scale


@cute.jit
def inverse_of(power: Float32):
    """1 / power, for a power of 2, by its exponent alone."""
    return ((2 * BIAS << MANTISSA_BITS) - power.bitcast(Int32)).bitcast(Float32)


@cute.jit
def split_scale(scale: Int32):
    """The factor and the reach of a key."""
    factor = (scale & FACTOR_MASK).bitcast(Float32)
    reach = ((scale & REACH_MASK) << MANTISSA_BITS).bitcast(Float32)
    return factor, reach

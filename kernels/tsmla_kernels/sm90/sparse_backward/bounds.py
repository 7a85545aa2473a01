"""How far the sums of a key's gradient can reach, which makes them exact integers: additions of integers give the same
bits in any order.

What a tile of heads adds to a number of a key's gradient is at most the sum over heads of P times the row's
weights (`Weight`), with |dS| bounded by the lengths of dO and of the key's value. The greatest of these bounds,
times how many there are, bounds the sum and all its parts. A key's factor is the power of 2 that brings this below
2^30.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

LIMIT_BITS = 30  # the magnitude of a sum, as an integer, stays below 2 to this power
MANTISSA_BITS, BIAS = 23, 127
GREATEST_EXPONENT = 254  # the exponent bits of the greatest finite float32
INFINITE, NOT_A_NUMBER = 0x7F800000, 0x7FC00000  # bits of float32


@cute.jit
def magnitude(x: Float32):
    """|x|."""
    return (x.bitcast(Int32) & 0x7FFFFFFF).bitcast(Float32)


@cute.jit
def greatest(a: Float32, b: Float32):
    """The greater of two numbers that are not negative; NaN if either is NaN."""
    return cutlass.max(a.bitcast(Int32), b.bitcast(Int32)).bitcast(Float32)


@cute.jit
def factor_of(bound: Int32, count: Int32):
    """The power of 2 by which a key's numbers are multiplied. bound: the bits of the greatest bound on what is added at
    once. count: how many bounds there were. The factor is NaN if bound times count is not finite."""
    total = bound.bitcast(Float32) * Float32(count)
    bits = total.bitcast(Int32)
    exponent = BIAS + BIAS + LIMIT_BITS - 1 - (bits >> MANTISSA_BITS)
    exponent = cutlass.min(cutlass.max(exponent, 1), GREATEST_EXPONENT - 1)
    factor = (exponent << MANTISSA_BITS).bitcast(Float32)
    if bits >= INFINITE:
        factor = Int32(NOT_A_NUMBER).bitcast(Float32)
    return factor

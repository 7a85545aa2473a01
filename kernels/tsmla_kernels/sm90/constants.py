"""Numbers that the Hopper kernels share. Imports no cutlass."""

import math

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
# A running maximum begins with the least float32: it is no greater than any finite score, and yet finite, so that a row
# without keys needs no case of its own.
LOWEST = -(2.0**128 - 2.0**104)
FP8 = "float8_e4m3fn"
SMEM_BYTES = 232_448  # most shared memory of one CTA on sm_90, in bytes
MOST_KEYS = (1 << 31) - (1 << 13)  # most keys of a request: positions a few blocks or pages past them still fit int32

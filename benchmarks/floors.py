"""Rates of an H100 and an H200, from which floors of times are computed; sizes of the dense cache's rows and pages."""

from __future__ import annotations

LATENT, ROPE, PAGE = 512, 64, 64
"""Columns of a dense cache's row, and rows of a page."""
BYTES_PER_KEY = {"bf16": 2 * (LATENT + ROPE), "fp8": LATENT + ROPE}

# Measured on an H200: the reads of a large copy, and a plain bf16 matrix product on random data. That fp8 is twice as
# fast is assumed, from the tensor cores' rates.
BYTES_PER_S = 4.35e12
FLOPS_PER_S = {"bf16": 798e12, "fp8": 1596e12}
# Measured on an H100. Its products are taken to be as fast as an H200's, which has the same cores.
H100_BYTES_PER_S = 3.09e12


def bytes_per_s(device: str) -> float:
    """Bytes that the memory of a GPU reads in a second, as measured: of an H100 if `device` names one, else of an
    H200."""
    return H100_BYTES_PER_S if "H100" in device else BYTES_PER_S


def floor_us(flops: float, moved: float, dtype: str = "bf16") -> float:
    """Microseconds that an H200 takes at these rates for so many operations of that dtype or for so many bytes,
    whichever is longer."""
    return max(flops / FLOPS_PER_S[dtype], moved / BYTES_PER_S) * 1e6

"""Pairs of f16 and bf16 in words of 32 bits."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32

from tsmla_kernels.sm90.latent.query import two_halves


def times(pair: Int32, factors: Int32) -> Int32:
    """Multiply two pairs of f16, element by element."""
    return cute.arch.inline_ptx(
        "mul.rn.f16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[pair, factors]
    )


def greatest(a: Int32, b: Int32, c: Int32) -> Int32:
    """The greatest of three pairs of f16, element by element."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 ab; max.f16x2 ab, {$r0}, {$r1}; max.f16x2 {$w0}, ab, {$r2}; }",
        write_only_types=[Int32],
        read_only_args=[a, b, c],
    )


def as_f16(pair: Int32, dtype: str) -> Int32:
    """A pair of bf16 or f16 as a pair of f16, in another register than `pair`, so that WGMMA may read the result while
    `pair` is loaded again."""
    return same(pair) if dtype == "float16" else from_bf16(pair)


def same(pair: Int32) -> Int32:
    """A copy of a pair of f16 in another register, made by a multiplication by 1."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 ones; mov.b32 ones, 0x3C003C00; mul.rn.f16x2 {$w0}, {$r0}, ones; }",
        write_only_types=[Int32],
        read_only_args=[pair],
    )


def from_bf16(pair: Int32) -> Int32:
    """A pair of bf16 as a pair of f16."""
    return two_halves((pair << 16).bitcast(Float32), (pair & -65536).bitcast(Float32))

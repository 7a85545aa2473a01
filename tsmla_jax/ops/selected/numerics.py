"""Bit-exact pieces of the sparse caches: power-of-two scales, e4m3 rounding, byte views, interleaved rope.

A cache written by one chunking of a sequence must equal, bit for bit, the cache written by another. XLA compiles each
shape anew, so every function here either has one correctly rounded result or pins its order of operations.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from tsmla_kernels.contract import FP8_MAX

E4M3 = jnp.float8_e4m3fn
_MANTISSA_BITS = 23
_MANTISSA_MASK = (1 << _MANTISSA_BITS) - 1
_EXPONENT_BIAS = 127
# 448 = 1.75 * 2^8: amax / 448 <= 2^k exactly when amax = m * 2^e (1 <= m < 2) has e - 8 < k, or e - 8 == k, m <= 1.75.
_FP8_MAX_EXPONENT = 8
_FP8_MAX_MANTISSA = 0x600000


def scale_exponent(amax: Array, floor: float) -> Array:
    """ceil(log2(max(amax, floor) / 448)) as int32, computed on the bits: no logarithm and no division to round.

    amax: f32, non-negative; floor: a positive normal number.
    """
    bits = lax.bitcast_convert_type(jnp.maximum(amax.astype(jnp.float32), jnp.float32(floor)), jnp.int32)
    exponent = (bits >> _MANTISSA_BITS) - _EXPONENT_BIAS - _FP8_MAX_EXPONENT
    return exponent + ((bits & _MANTISSA_MASK) > _FP8_MAX_MANTISSA).astype(jnp.int32)


def ordered(x: Array) -> Array:
    """Integers of x's width that compare as the values of x do: 0.0 and -0.0 alike, and NaN below every number. XLA's
    own comparisons take subnormal numbers for 0 on CPUs."""
    bits, magnitude = _bits(x)
    least = jnp.iinfo(bits.dtype).min
    return jnp.where(magnitude > _infinity(x), least, jnp.where(bits < 0, -magnitude, magnitude))


def is_unordered(x: Array) -> Array:
    """Whether XLA's own comparisons order an element of x otherwise than `ordered`: true for NaN and subnormal
    numbers.
    """
    _, magnitude = _bits(x)
    least_normal, _ = _bits(jnp.asarray(jnp.finfo(x.dtype).tiny, x.dtype))
    unsigned = f"uint{8 * x.dtype.itemsize}"  # the differences below 0 wrap round to the greatest numbers
    above = (magnitude - least_normal).astype(unsigned) > (_infinity(x) - least_normal).astype(unsigned)
    return above & (magnitude != 0)


def _bits(x: Array) -> tuple[Array, Array]:
    """The bits of floats as signed integers, and the same bits without the sign bit."""
    bits = lax.bitcast_convert_type(x, f"int{8 * x.dtype.itemsize}")
    return bits, bits & jnp.iinfo(bits.dtype).max


def _infinity(x: Array) -> Array:
    return _bits(jnp.asarray(jnp.inf, x.dtype))[0]


def exp2_int(exponent: Array) -> Array:
    """2^exponent as f32, exact, for exponents of normal numbers (-126 to 127)."""
    return lax.bitcast_convert_type((exponent + _EXPONENT_BIAS) << _MANTISSA_BITS, jnp.float32)


def quantize_pow2(x: Array, floor: float) -> tuple[Array, Array, Array]:
    """x as e4m3 with one power-of-two scale over the last axis: (values, scales f32, scale exponents i32)."""
    x = x.astype(jnp.float32)
    exponent = scale_exponent(jnp.max(jnp.abs(x), axis=-1), floor)
    # Multiplying by an exact power of two is the division, with nothing to round.
    scaled = x * exp2_int(-exponent)[..., None]
    return jnp.clip(scaled, -FP8_MAX, FP8_MAX).astype(E4M3), exp2_int(exponent), exponent


def quantize_per_tensor(x: Array, scale: float | Array) -> Array:
    """x rounded to bf16, divided by `scale`, clamped to 448 and rounded to e4m3."""
    x = x.astype(jnp.bfloat16).astype(jnp.float32)
    # XLA turns a division by a broadcast scalar into a multiplication by its reciprocal, which is one ulp off. After
    # the barrier the divisor is an array like any other, and the division is the IEEE one.
    divisor = lax.optimization_barrier(jnp.broadcast_to(jnp.asarray(scale, jnp.float32), x.shape))
    return jnp.clip(x / divisor, -FP8_MAX, FP8_MAX).astype(E4M3)


def ue8m0_to_f32(code: Array) -> Array:
    """UE8M0 bytes as f32: 2^(code - 127); 255 is NaN."""
    bits = code.astype(jnp.int32)
    normal = lax.bitcast_convert_type(bits << _MANTISSA_BITS, jnp.float32)
    tiny = lax.bitcast_convert_type(jnp.int32(1 << (_MANTISSA_BITS - 1)), jnp.float32)  # 2^-127 has no normal form
    return jnp.where(bits == 255, jnp.float32(jnp.nan), jnp.where(bits == 0, tiny, normal))


def exponent_to_ue8m0(exponent: Array) -> Array:
    """Exponents as UE8M0 bytes."""
    return (exponent + _EXPONENT_BIAS).astype(jnp.uint8)


def to_bytes(x: Array) -> Array:
    """The little-endian bytes of x; the bytes of one element lie along the last axis."""
    raw = lax.bitcast_convert_type(x, jnp.uint8)
    return raw if x.dtype.itemsize == 1 else raw.reshape(*x.shape[:-1], x.shape[-1] * x.dtype.itemsize)


def from_bytes(raw: Array, dtype: jnp.dtype | type) -> Array:
    """The inverse of to_bytes."""
    size = jnp.dtype(dtype).itemsize
    if size == 1:
        return lax.bitcast_convert_type(raw, dtype)
    return lax.bitcast_convert_type(raw.reshape(*raw.shape[:-1], raw.shape[-1] // size, size), dtype)


def rotate_pairs(x: Array, cos: Array, sin: Array, *, inverse: bool = False) -> Array:
    """Rotate the pairs (2i, 2i + 1) of the last axis by the angles whose cos and sin are given; f32 arithmetic."""
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    sin = -sin if inverse else sin
    # The barrier rounds each product on its own: results must not depend on whether a compiler fuses it into the sum.
    a, b, c, d = lax.optimization_barrier((even * cos, odd * sin, odd * cos, even * sin))
    return jnp.stack([a - b, c + d], axis=-1).reshape(x.shape)


def tree_sum(x: Array, axis: int = -1) -> Array:
    """Sum over `axis` in one fixed order (the second half added to the first, again and again), whatever the shape is.

    A plain reduction is free to vectorise differently for each shape, and then rounds differently.
    """
    return _tree(jnp.add, x, axis)


def tree_max(x: Array, axis: int = -1) -> Array:
    """Maximum over `axis`, by halves. A plain reduction gives the same result, but XLA's CPU backend then hands large
    shapes, and the operations after the reduction, to a library whose exponential rounds differently."""
    return _tree(jnp.maximum, x, axis)


def _tree(combine: Callable[[Array, Array], Array], x: Array, axis: int) -> Array:
    axis = axis % x.ndim
    while (size := x.shape[axis]) > 1:
        half = size // 2
        first, second, rest = (
            lax.slice_in_dim(x, start, stop, axis=axis)
            for start, stop in ((0, half), (half, 2 * half), (2 * half, size))
        )
        x = combine(first, second)
        if size % 2:
            x = jnp.concatenate([x, rest], axis=axis)
    return lax.squeeze(x, (axis,))


def rms_norm(x: Array, weight: Array | None, eps: float) -> Array:
    """RMS norm in f32 with a fixed order of summation; without `weight` the normed values are not multiplied.

    Barriers make a compiler round each product that it could fuse into a sum; on a GPU each barrier costs a kernel. The
    squares and the mean have none where there is nothing to round: f32 holds all digits of a 16-bit value's square, and
    a power of two scales exactly, unless the result is subnormal.
    """
    width, exact = x.shape[-1], x.dtype.itemsize == 2
    x = x.astype(jnp.float32)
    mean = tree_sum(x * x if exact else lax.optimization_barrier(x * x)) * jnp.float32(1.0 / width)
    if width & (width - 1):
        mean = lax.optimization_barrier(mean)
    factor = lax.optimization_barrier(lax.rsqrt(mean + jnp.float32(eps)))
    normed = x * factor[..., None]
    return normed if weight is None else lax.optimization_barrier(normed) * weight.astype(jnp.float32)


def gather_bytes(cache: Array, page: Array, start: Array, width: int) -> Array:
    """[..., width] bytes of cache [P, page_bytes] from (page, start)."""
    numbers = lax.GatherDimensionNumbers(offset_dims=(page.ndim,), collapsed_slice_dims=(0,), start_index_map=(0, 1))
    index = jnp.stack([page, start], axis=-1)
    return lax.gather(cache, index, numbers, slice_sizes=(1, width), mode=lax.GatherScatterMode.CLIP)


def scatter_bytes(cache: Array, page: Array, start: Array, rows: Array) -> Array:
    """cache [P, page_bytes] with rows [T, width] written at (page, start); rows whose page does not exist are
    dropped.
    """
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
    )
    index = jnp.stack([page, start], axis=-1)
    return lax.scatter(cache, index, rows, numbers, mode=lax.GatherScatterMode.FILL_OR_DROP)

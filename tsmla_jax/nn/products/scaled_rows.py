"""Activations in f16 with a power-of-two scale for each row and group of columns, which products with e4m3 weights
multiply.

f16 has eleven bits of a value, three more than bf16, but only between 2^-14 and 2^16. Divided by the scale, the
greatest value of a group is at most 2, be it 1e-30 or 1e30 (at most 4, if it is 2^127 or more). Written in Pallas for
GPUs (Triton).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from tsmla_jax.nn.products.block_scaled import BLOCK
from tsmla_jax.nn.products.triton import plgpu

_PARTS = 32  # the most parts of a row, BLOCK columns each, that one program scales
_EXPONENT, _LEAST, _GREATEST = 0x7F800000, 0x00800000, 0x7E800000  # an f32's exponent, 2^-126, 2^126
_ONE_SQUARED = 0x7F000000  # twice the bits of 1; subtracting the bits of a power of two leaves those of its inverse


class ScaledRows(NamedTuple):
    """Activations x [T, K] as values times scales.

    values  f16 [T, K], at most 2 in size (4 where x is 2^127 or more); infinite or NaN where x is
    scales  f32 [T, K / W], powers of two, for W columns each
    """

    values: jax.Array
    scales: jax.Array

    @property
    def width(self) -> int:
        """W, the columns of a scale."""
        return self.values.shape[1] // self.scales.shape[1]


def scaled(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x [..., W] as values in f16 times scales [...] in f32: a row's scale is the greatest power of two that is not
    above its greatest magnitude, between 2^-126 and 2^126."""
    wide = x.astype(jnp.float32)
    bits = lax.bitcast_convert_type(jnp.abs(wide).max(axis=-1), jnp.int32) & _EXPONENT
    bits = jnp.clip(bits, _LEAST, _GREATEST)
    inverse = lax.bitcast_convert_type(_ONE_SQUARED - bits, jnp.float32)
    return (wide * inverse[..., None]).astype(jnp.float16), lax.bitcast_convert_type(bits, jnp.float32)


def scaled_rows(x: jax.Array) -> ScaledRows:
    """x [T, K] of 16 bits with a scale for every BLOCK columns, as one kernel; K is a multiple of BLOCK."""
    rows, depth = x.shape
    parts = depth // BLOCK
    if not rows:
        return ScaledRows(jnp.zeros((0, depth), jnp.float16), jnp.zeros((0, parts), jnp.float32))
    own = min(_PARTS, pl.next_power_of_2(parts))
    values, scales = pl.pallas_call(
        functools.partial(_scale, own),
        grid=(rows, pl.cdiv(parts, own)),
        out_shape=[
            jax.ShapeDtypeStruct((rows, parts, BLOCK), jnp.float16),
            jax.ShapeDtypeStruct((rows, parts), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=jax.default_backend() == "cpu",
        name="scale_rows",
    )(x.reshape(rows, parts, BLOCK))
    return ScaledRows(values.reshape(rows, depth), scales)


def _scale(own: int, x_ref: Any, values_ref: Any, scales_ref: Any) -> None:
    """Scale some parts of one row."""
    row, parts = pl.program_id(0), pl.program_id(1) * own + jnp.arange(own, dtype=jnp.int32)
    exists = parts < scales_ref.shape[1]
    at = (row, parts[:, None], jnp.arange(BLOCK, dtype=jnp.int32)[None, :])
    mask = jnp.broadcast_to(exists[:, None], (own, BLOCK))
    values, scales = scaled(plgpu.load(x_ref.at[at], mask=mask, other=0.0))
    plgpu.store(values_ref.at[at], values, mask=mask)
    plgpu.store(scales_ref.at[row, parts], scales, mask=exists)

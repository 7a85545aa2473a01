"""The definition of quantize_blocks: block by block, the largest magnitude becomes 448."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tsmla_jax.ops.selected import numerics
from tsmla_kernels.contract.products import BLOCK, INVERSE_MAX, LEAST_AMAX, QuantizeBlocksSpec
from tsmla_kernels.contract.rules import FP8, FP8_MAX


def quantize_blocks(x: jax.Array, *, spec: QuantizeBlocksSpec) -> tuple[jax.Array, jax.Array]:
    """values and scales, as the public quantize_blocks documents them."""
    terms = x.shape[-1]
    padded = jnp.pad(x.astype(jnp.float32), [(0, 0)] * (x.ndim - 1) + [(0, -terms % BLOCK)])
    blocks = padded.reshape(*x.shape[:-1], padded.shape[-1] // BLOCK, BLOCK)
    amax = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
    if spec.power_of_two:
        scales = numerics.exp2_int(numerics.scale_exponent(amax, LEAST_AMAX))
    else:
        scales = jnp.maximum(amax, LEAST_AMAX) * INVERSE_MAX
    # XLA's maximum on a CPU may pass over a NaN.
    scales = jnp.where(jnp.all(jnp.isfinite(blocks), axis=-1, keepdims=True), scales, jnp.nan)
    values = jnp.clip(blocks / scales, -FP8_MAX, FP8_MAX).astype(FP8)
    return values.reshape(padded.shape)[..., :terms], scales[..., 0]

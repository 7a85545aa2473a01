"""block_scaled_matmul: the product of activations, e4m3 or wider, and a weight that has scales for blocks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from tsmla_jax.ops.inputs import describe_call
from tsmla_jax.ops.operation import Implementation, Operation, Preference
from tsmla_kernels.contract import products
from tsmla_kernels.contract.products import ProductSpec
from tsmla_kernels.contract.rules import FP8

if TYPE_CHECKING:
    from tsmla_jax.array_types import Array, Float, Float32, UInt8


def block_scaled_matmul(
    x: Float[Array, "T K"],
    weight: Float[Array, "N K"] | UInt8[Array, "N K/2"],
    x_scales: Float32[Array, "T K/128"] | None,
    weight_scales: Float32[Array, "N/128 K/128"] | UInt8[Array, "N K/32"],
    *,
    gated: bool = False,
    limit: float | None = None,
    out_dtype: str = "bfloat16",
    implementation: Preference = None,
) -> Float[Array, "T N"] | tuple[Float[Array, "T N/2"], Float32[Array, "T N/256"]]:
    """The product of activations and the transpose of a weight: e4m3 with a scale for every 128 x 128 block, or e2m1
    with a scale for every 32 columns of a row (MXFP4).

    With operands of e4m3 out[t, n] = sum over k of x[t, k] * x_scales[t, k / 128] * weight[n, k] *
    weight_scales[n / 128, k / 128]; wider x has no scales, and weights of e2m1 have scales
    2^(weight_scales[n, k / 32] - 127). Sums are float32, but Hopper's tensor cores keep fewer bits of a sum of 128
    products of e4m3. As fp8_gemm_nt in DeepGEMM and the linear layers of DeepSeek-V3's own inference code
    (arXiv:2412.19437, section 3.3).

    Args:
      x: [T, K] float8_e4m3fn, see quantize_blocks; or bfloat16, float16 or float32, which are multiplied without being
        quantised.
      weight: [N, K] float8_e4m3fn, as checkpoints hold it; or, with x of 16 or 32 bits, [N, K / 2] uint8: two numbers
        of e2m1 a byte, the first in the lower four bits.
      x_scales: [T, ceil(K / 128)] float32, a scale for every 128 columns of a row. None unless x is float8_e4m3fn.
      weight_scales: for e4m3 [ceil(N / 128), ceil(K / 128)] float32, a scale for every 128 x 128 weights;
        `weight_scale_inv` in checkpoints. For e2m1 [N, ceil(K / 32)] uint8, exponents s in e8m0: 2^(s - 127) is the
        scale of 32 columns of a row. The kernel takes 2^-127 as 0.
      gated: whether the result is silu(gate) * up, computed in float32, [T, N / 2]: gate is x times the weight's first
        N / 2 rows, up is x times its last N / 2 rows, as in an MLP.
      limit: with gated, `gate` is clipped to at most limit, and `up` to [-limit, limit], as `swiglu_limit` in
        DeepSeek-V4; None for no limit.
      out_dtype: "bfloat16", "float16", "float32", or with gated "float8_e4m3fn".
      implementation: "cute", "xla", "reference", several of these in order, or None for the best; see `explain`.

    Returns:
      [T, N] in out_dtype, [T, N / 2] with gated. If out_dtype is float8_e4m3fn: values and scales, as quantize_blocks
      makes them of the float32 result.

    Raises:
      TypeError, ValueError: an argument is not legal.
      NotImplementedError: the named implementation can't run this call, or a derivative is asked for; "reference" has
        one.
    """
    spec = OPERATION.spec(
        x=x,
        weight=weight,
        x_scales=x_scales,
        weight_scales=weight_scales,
        gated=gated,
        limit=limit,
        out_dtype=out_dtype,
    )
    chosen = OPERATION.select(spec, implementation)
    x_scales = None if x_scales is None else jnp.asarray(x_scales)
    arrays = (jnp.asarray(x), jnp.asarray(weight), x_scales, jnp.asarray(weight_scales))
    out: Array | tuple[Array, Array] = chosen.call(arrays, lambda: out_specs(spec, arrays[0], arrays[1]), spec=spec)
    return out


def out_specs(spec: ProductSpec, x: jax.Array, weight: jax.Array) -> PartitionSpec | tuple[PartitionSpec, ...]:
    """The PartitionSpec of the product, or those of its values and scales. Rows are split as x's are, or whole if an
    index picks them. Columns are split as the weight's rows are; they are whole if these lie over the same mesh axis as
    the product's rows, or if the product is gated, whose columns are each made of both halves of the weight."""
    rows = None if spec.num_picked is not None else jax.typeof(x).sharding.spec[0]
    columns = None if spec.gated else jax.typeof(weight).sharding.spec[-2]
    out = PartitionSpec(rows, None if columns == rows else columns)
    return (out, out) if spec.out_dtype == FP8 else out


def _implementations() -> Mapping[str, Implementation]:
    from tsmla_jax.ops import device
    from tsmla_jax.ops.block_scaled_matmul import cute, reference, xla

    return {
        "cute": Implementation(cute.block_scaled_matmul, cute.why_not, device.why_not_by_default),
        "xla": Implementation(xla.block_scaled_matmul),
        "reference": Implementation(reference.block_scaled_matmul),
    }


OPERATION = Operation(block_scaled_matmul, partial(describe_call, products.product_spec), _implementations)

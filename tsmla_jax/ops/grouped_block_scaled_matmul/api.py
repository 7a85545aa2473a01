"""grouped_block_scaled_matmul: products of groups of rows, each with the group's own weight, as experts have them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import jax.numpy as jnp

from tsmla_jax.ops import checks
from tsmla_jax.ops.block_scaled_matmul.api import out_specs
from tsmla_jax.ops.inputs import describe_call
from tsmla_jax.ops.operation import Implementation, Operation, Preference
from tsmla_kernels.contract import products

if TYPE_CHECKING:
    from tsmla_jax.array_types import Array, Float, Float32, Int32, UInt8


def grouped_block_scaled_matmul(
    x: Float[Array, "T K"],
    weight: Float[Array, "E N K"] | UInt8[Array, "E N K/2"],
    x_scales: Float32[Array, "T K/128"] | None,
    weight_scales: Float32[Array, "E N/128 K/128"] | UInt8[Array, "E N K/32"] | None,
    cu_rows: Int32[Array, " E+1"],
    *,
    rows: Int32[Array, " R"] | None = None,
    gated: bool = False,
    limit: float | None = None,
    out_dtype: str = "bfloat16",
    implementation: Preference = None,
) -> Float[Array, "R N"] | tuple[Float[Array, "R N/2"], Float32[Array, "R N/256"]]:
    """`block_scaled_matmul` of each group of rows with the group's own weight, as for tokens sorted by expert.

    As jax.lax.ragged_dot, and m_grouped_fp8_gemm_nt_contiguous in DeepGEMM, but groups need no padding.

    Args:
      x: [T, K], as in block_scaled_matmul; the rows of a group come together, unless `rows` says where they are.
      weight: [E, N, K] float8_e4m3fn, or [E, N, K / 2] uint8 of e2m1, as in block_scaled_matmul; or [E, N, K] bfloat16
        or float16, with x of the same dtype. More weights may follow, which are not read.
      x_scales: [T, ceil(K / 128)] float32, as in block_scaled_matmul. None unless x is float8_e4m3fn.
      weight_scales: [E, ceil(N / 128), ceil(K / 128)] float32, or for e2m1 [E, N, ceil(K / 32)] uint8, as in
        block_scaled_matmul. None if weight has 16 bits.
      cu_rows: [E + 1] int32, ascending from 0: group e has the result's rows cu_rows[e] to cu_rows[e + 1] - 1; a group
        may be empty. It stays on the device.
      rows: [R] int32, for each row of the result the row of x that it is computed from. This saves a sorted copy of x,
        which would hold a token once for each of its experts. None for x's rows in order, R = T.
      gated, limit: as in block_scaled_matmul.
      out_dtype: "bfloat16", "float16", "float32", or with gated "float8_e4m3fn".
      implementation: "cute", "xla", "reference", several of these in order, or None for the best; see `explain`.

    Returns:
      [R, N] in out_dtype, [R, N / 2] with gated; if out_dtype is float8_e4m3fn, values and scales as in
      block_scaled_matmul. Rows from cu_rows[E] on are 0, whatever x or `rows` holds there, NaN included. With "xla" a
      NaN or an infinity in the weight of one group may reach the rows of others.

    Raises:
      TypeError, ValueError: an argument is not legal; under TSMLA_CHECK=1 also cu_rows that descend or end past R, and
        rows that x does not have.
      NotImplementedError: the named implementation can't run this call, or a derivative is asked for; "reference" has
        one.
    """
    spec = OPERATION.spec(
        x=x,
        weight=weight,
        x_scales=x_scales,
        weight_scales=weight_scales,
        cu_rows=cu_rows,
        rows=rows,
        gated=gated,
        limit=limit,
        out_dtype=out_dtype,
    )
    chosen = OPERATION.select(spec, implementation)
    given = (x_scales, weight_scales, rows)
    x_scales, weight_scales, rows = (None if array is None else jnp.asarray(array) for array in given)
    cu_rows = checks.grouped_product(spec, jnp.asarray(cu_rows), rows)
    arrays = (jnp.asarray(x), jnp.asarray(weight), x_scales, weight_scales, cu_rows, rows)
    out: Array | tuple[Array, Array] = chosen.call(arrays, lambda: out_specs(spec, arrays[0], arrays[1]), spec=spec)
    return out


def _implementations() -> Mapping[str, Implementation]:
    from tsmla_jax.ops import device
    from tsmla_jax.ops.grouped_block_scaled_matmul import cute, reference, xla

    return {
        "cute": Implementation(cute.grouped_block_scaled_matmul, cute.why_not, device.why_not_by_default),
        "xla": Implementation(xla.grouped_block_scaled_matmul),
        "reference": Implementation(reference.grouped_block_scaled_matmul),
    }


OPERATION = Operation(
    grouped_block_scaled_matmul, partial(describe_call, products.grouped_product_spec), _implementations
)

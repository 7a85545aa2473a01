"""quantize_blocks: activations in e4m3, with a scale for every 128 columns of a row."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import jax.numpy as jnp

from tsmla_jax.ops.inputs import describe_call
from tsmla_jax.ops.operation import Implementation, Operation, Preference, same_spec
from tsmla_kernels.contract import products

if TYPE_CHECKING:
    from tsmla_jax.array_types import Array, Float, Float32


def quantize_blocks(
    x: Float[Array, "*rows K"], *, power_of_two: bool = False, implementation: Preference = None
) -> tuple[Float[Array, "*rows K"], Float32[Array, "*rows K/128"]]:
    """Quantise activations to e4m3 with a scale for every 128 columns of a row, as block_scaled_matmul takes them.

    The scale s is max |x| / 448 over the block; values are x / s, rounded to nearest even. act_quant in DeepSeek-V3's
    inference code and per_token_group_quant_fp8 in vLLM do the same.

    Args:
      x: [..., K] float16, bfloat16 or float32. The last block may be shorter.
      power_of_two: round scales up to powers of two (`scale_fmt: ue8m0` in checkpoints' configs).
      implementation: "cute", "xla", "reference", several of these in order, or None for the best; see `explain`.

    Returns:
      values [..., K] float8_e4m3fn and scales [..., ceil(K / 128)] float32. The largest magnitude of a block is taken
      to be at least 1e-10; the values and the scale of a block with a NaN or an
      infinity are NaN.

    Raises:
      TypeError, ValueError: an argument is not legal.
      NotImplementedError: the named implementation can't run this call.
    """
    spec = OPERATION.spec(x=x, power_of_two=power_of_two)
    chosen = OPERATION.select(spec, implementation)
    x = jnp.asarray(x)
    results: tuple[Array, Array] = chosen.call((x,), lambda: (same_spec(x), same_spec(x)), spec=spec)
    return results


def _implementations() -> Mapping[str, Implementation]:
    from tsmla_jax.ops import device
    from tsmla_jax.ops.quantize_blocks import cute, reference, xla

    return {
        "cute": Implementation(cute.quantize_blocks, cute.why_not, device.why_not_by_default),
        "xla": Implementation(xla.quantize_blocks),
        "reference": Implementation(reference.quantize_blocks),
    }


OPERATION = Operation(quantize_blocks, partial(describe_call, products.quantize_blocks_spec), _implementations)

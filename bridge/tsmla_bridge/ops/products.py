"""block_scaled_matmul, grouped_block_scaled_matmul and quantize_blocks on torch tensors.

On a Hopper GPU by the catalog's kernels, one launch each; in torch operations on CPUs and where a kernel can't serve
the call: sizes that its reasons name, tensors with gaps. None reads a value on the host, so that all can be captured
into CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tsmla_bridge import operators, products_reference
from tsmla_bridge.runtime import data_checks, devices, loaded_kernels, tensors
from tsmla_bridge.runtime.tensors import DTYPES, dtype_name
from tsmla_kernels.catalog import BLOCK_SCALED_MATMUL, GROUPED_BLOCK_SCALED_MATMUL, QUANTIZE_BLOCKS
from tsmla_kernels.contract import products, values
from tsmla_kernels.contract.products import ProductSpec
from tsmla_kernels.kernel import Kernel
from tsmla_kernels.sm90.products.config import product_config, quantize_config


def block_scaled_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scales: torch.Tensor | None,
    weight_scales: torch.Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
    implementation: str | None = None,
) -> torch.Tensor:
    """The product of activations and the transpose of a weight of e4m3 with a scale for every 128 x 128, as
    tsmla_jax.block_scaled_matmul defines it:
    out[t, n] = sum over k of x[t, k] * x_scales[t, k / 128] * weight[n, k] * weight_scales[n / 128, k / 128].

    Args:
      x: [T, K] float8_e4m3fn, see quantize_blocks; or bfloat16, float16 or float32, which then meet the weights as they
        are.
      weight: [N, K] float8_e4m3fn.
      x_scales: [T, K / 128] float32, rounded up: of each row and 128 terms. None unless x is float8_e4m3fn.
      weight_scales: [N / 128, K / 128] float32, both rounded up: of each 128 x 128 weights.
      out_dtype: torch.bfloat16, torch.float16 or torch.float32.
      out: [T, N] in out_dtype for the result, or None.
      implementation: "cute" (the kernel), "reference" (torch operations), or None: the kernel where it can run.

    Returns:
      [T, N] in out_dtype; `out` if it is given.

    Raises:
      TypeError, ValueError: an argument is not legal; the message names it, what it got and what is legal.
      NotImplementedError: the named implementation can't run this call, with every reason.
    """
    arguments = (x, weight, x_scales, weight_scales, out_dtype, implementation)
    if torch.compiler.is_compiling() or operators.is_traced(x, weight, derivatives=False):
        if out is None:
            return torch.ops.tsmla.block_scaled_matmul(*arguments)
        torch.ops.tsmla.block_scaled_matmul_into(*arguments, out)
        return out
    return _dense(*arguments, out)


def grouped_block_scaled_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scales: torch.Tensor | None,
    weight_scales: torch.Tensor,
    cu_rows: torch.Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
    implementation: str | None = None,
) -> torch.Tensor:
    """`block_scaled_matmul` of each group of rows with the group's own weight, as
    tsmla_jax.grouped_block_scaled_matmul defines it.

    Args:
      x: [T, K], as of block_scaled_matmul; the rows of a group come together.
      weight: [E, N, K] float8_e4m3fn; more weights may follow, which are not read.
      x_scales: [T, K / 128] float32, rounded up: of each row and 128 terms. None unless x is float8_e4m3fn.
      weight_scales: [E, N / 128, K / 128] float32, both rounded up: of each 128 x 128 weights.
      cu_rows: [E + 1] int32, ascending from 0: rows cu_rows[e] to cu_rows[e + 1] are those of group e; there may be
        none.
      out_dtype: torch.bfloat16, torch.float16 or torch.float32.
      out: [T, N] in out_dtype for the result, or None.
      implementation: "cute" (the kernel), "reference" (torch operations), or None: the kernel where it can run.

    Returns:
      [T, N] in out_dtype; `out` if it is given. Rows from cu_rows[E] on are 0, whatever x holds there, NaN included.

    Raises:
      TypeError, ValueError: an argument is not legal; the message names it, what it got and what is legal.
      NotImplementedError: the named implementation can't run this call, with every reason.
    """
    arguments = (x, weight, x_scales, weight_scales, cu_rows, out_dtype, implementation)
    if torch.compiler.is_compiling() or operators.is_traced(x, weight, derivatives=False):
        if out is None:
            return torch.ops.tsmla.grouped_block_scaled_matmul(*arguments)
        torch.ops.tsmla.grouped_block_scaled_matmul_into(*arguments, out)
        return out
    return _grouped(*arguments, out)


def quantize_blocks(
    x: torch.Tensor, *, power_of_two: bool = False, implementation: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise activations to e4m3 with a scale for every 128 of a row, as tsmla_jax.quantize_blocks defines it: the
    scale s is max |x| / 448 over the block, values are x / s.

    Args:
      x: [..., K] float16, bfloat16 or float32. The last block may be a part.
      power_of_two: round scales up to powers of two (`scale_fmt: ue8m0` in checkpoints' configs).
      implementation: "cute" (the kernel), "reference" (torch operations), or None: the kernel where it can run.

    Returns:
      values [..., K] float8_e4m3fn and scales [..., K / 128] float32, rounded up. The largest magnitude of a block is
      taken to be at least 1e-10; a block with a NaN or an infinity has values that are NaN.

    Raises:
      TypeError, ValueError: an argument is not legal; the message names it, what it got and what is legal.
      NotImplementedError: the named implementation can't run this call, with every reason.
    """
    if torch.compiler.is_compiling() or operators.is_traced(x, derivatives=False):
        return torch.ops.tsmla.quantize_blocks(x, power_of_two, implementation)
    return _quantize(x, power_of_two, implementation)


def _dense(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scales: torch.Tensor | None,
    weight_scales: torch.Tensor,
    out_dtype: torch.dtype,
    implementation: str | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    given = {"x": x, "weight": weight, "x_scales": x_scales, "weight_scales": weight_scales}
    spec = tensors.describe_call(products.product_spec, **given, out_dtype=_name(out_dtype))
    return _multiply(BLOCK_SCALED_MATMUL, products_reference.block_scaled_matmul, spec, given, implementation, out)


def _grouped(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scales: torch.Tensor | None,
    weight_scales: torch.Tensor,
    cu_rows: torch.Tensor,
    out_dtype: torch.dtype,
    implementation: str | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    given = {"x": x, "weight": weight, "x_scales": x_scales, "weight_scales": weight_scales, "cu_rows": cu_rows}
    spec = tensors.describe_call(products.grouped_product_spec, **given, out_dtype=_name(out_dtype))
    data_checks.check(values.grouped_product, spec, cu_rows)
    definition = products_reference.grouped_block_scaled_matmul
    return _multiply(GROUPED_BLOCK_SCALED_MATMUL, definition, spec, given, implementation, out)


def _multiply(
    kernel: Kernel,
    definition: Callable[..., torch.Tensor],
    spec: ProductSpec,
    given: dict[str, Any],
    implementation: str | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    read = {name: tensor for name, tensor in given.items() if tensor is not None}

    def why_not() -> list[str]:
        reasons = kernel.reasons(spec) + loaded_kernels.layout_reasons(read)
        return reasons + operators.derivative_reasons(*read.values())

    shape, device = (spec.num_rows, spec.num_columns), given["x"].device
    by_kernel = loaded_kernels.is_chosen(kernel, implementation, device, why_not)
    if out is not None:
        tensors.check_output("out", out, shape, DTYPES[spec.out_dtype], device)
    if not by_kernel or spec.num_rows == 0:
        result = definition(spec, *given.values())
        return result if out is None else out.copy_(result)
    if out is None:
        out = torch.empty(shape, dtype=DTYPES[spec.out_dtype], device=device)
    config = product_config(spec, devices.num_sms(devices.index_of(device)))
    arrays = {name: loaded_kernels.view(tensor) for name, tensor in (read | {"out": out}).items()}
    loaded_kernels.run_on(kernel, config, device, arrays)
    return out


def _name(out_dtype: Any) -> str:
    """The contract's name of the result's dtype."""
    if not isinstance(out_dtype, torch.dtype):
        raise TypeError(f"out_dtype: got {type(out_dtype).__name__}; legal: a torch.dtype")
    return dtype_name(out_dtype)


def _quantize(x: torch.Tensor, power_of_two: bool, implementation: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    spec = tensors.describe_call(products.quantize_blocks_spec, x=x, power_of_two=power_of_two)

    def why_not() -> list[str]:
        reasons = QUANTIZE_BLOCKS.reasons(spec) + loaded_kernels.layout_reasons({"x": x})
        return reasons + operators.derivative_reasons(x)

    if not loaded_kernels.is_chosen(QUANTIZE_BLOCKS, implementation, x.device, why_not) or x.numel() == 0:
        return products_reference.quantize_blocks(spec, x)
    values, scales = _new_blocks(x)
    rows = x.numel() // x.shape[-1]
    arrays = {"x": loaded_kernels.view(x, (rows, x.shape[-1]))}
    arrays |= {
        name: loaded_kernels.view(to, (rows, to.shape[-1])) for name, to in (("values", values), ("scales", scales))
    }
    config = quantize_config(spec, devices.num_sms(devices.index_of(x.device)))
    loaded_kernels.run_on(QUANTIZE_BLOCKS, config, x.device, arrays)
    return values, scales


# ---- the operators

_PRODUCT = "Tensor x, Tensor weight, Tensor? x_scales, Tensor weight_scales"
_OPTIONS = "ScalarType out_dtype, str? implementation"


def _new_out(x: Any, weight: Any, *others: Any) -> Any:
    return x.new_empty((x.shape[0], weight.shape[-2]), dtype=others[-2])


def _register(name: str, multiply: Callable[..., torch.Tensor], arguments: str) -> None:
    """tsmla::name, which returns the product, and tsmla::{name}_into, which writes it to the caller's memory."""

    def write_into(*given: Any) -> None:
        multiply(*given)

    operator = operators.register(name, multiply, f"({arguments}, {_OPTIONS}) -> Tensor")
    schema = f"({arguments}, {_OPTIONS}, Tensor(a!) out) -> ()"
    operators.register(f"{name}_into", write_into, schema, writes=("out",))
    operators.refuse_backward(operator, name, "pass implementation='reference' outside of torch.compile")
    operators.register_fake(operator, _new_out)


_register("block_scaled_matmul", _dense, _PRODUCT)
_register("grouped_block_scaled_matmul", _grouped, f"{_PRODUCT}, Tensor cu_rows")

quantize_operator = operators.register(
    "quantize_blocks", _quantize, "(Tensor x, bool power_of_two, str? implementation) -> (Tensor, Tensor)"
)
operators.refuse_backward(quantize_operator, "quantize_blocks", "an eager call has one")


def _new_blocks(x: Any, *_: Any) -> Any:
    scales = (*x.shape[:-1], products.blocks_of(x.shape[-1]))
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), x.new_empty(scales, dtype=torch.float32)


operators.register_fake(quantize_operator, _new_blocks)

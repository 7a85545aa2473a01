"""block_scaled_matmul, grouped_block_scaled_matmul and quantize_blocks on torch tensors.

On a Hopper GPU the catalog's kernels run the calls, one launch each. Torch operations do so on CPUs, on other GPUs,
and, unless "cute" is named, where a derivative is asked for or a kernel can't serve the call: dtypes and sizes that its
reasons name, tensors with gaps or not at multiples of 16 bytes. No call reads a value on the host, except under
TSMLA_CHECK=1 outside of a capture, so CUDA graphs can capture all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tsmla_bridge import operators, products_reference
from tsmla_bridge.products_reference import Result
from tsmla_bridge.runtime import data_checks, devices, loaded_kernels, tensors
from tsmla_bridge.runtime.tensors import DTYPES
from tsmla_kernels.catalog import BLOCK_SCALED_MATMUL, GROUPED_BLOCK_SCALED_MATMUL, QUANTIZE_BLOCKS
from tsmla_kernels.contract import products, values
from tsmla_kernels.contract.products import ProductSpec
from tsmla_kernels.contract.rules import FP8
from tsmla_kernels.kernel import Kernel
from tsmla_kernels.sm90.products.config import product_config, quantize_config


def block_scaled_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scales: torch.Tensor | None,
    weight_scales: torch.Tensor,
    *,
    gated: bool = False,
    limit: float | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Result | None = None,
    implementation: str | None = None,
) -> Result:
    """The product of activations and the transpose of a weight, as tsmla_jax.block_scaled_matmul defines it. The weight
    is e4m3 with a scale for every 128 x 128 block, or e2m1 with a scale for every 32 columns of a row (MXFP4). If x and
    weight are e4m3, out[t, n] = sum over k of
    x[t, k] * x_scales[t, k // 128] * weight[n, k] * weight_scales[n // 128, k // 128].

    Args:
      x: [T, K] float8_e4m3fn, see quantize_blocks; or bfloat16, float16 or float32, which are multiplied without being
        quantised.
      weight: [N, K] float8_e4m3fn; or, with x of 16 or 32 bits and K even, [N, K / 2] uint8: two numbers of e2m1 a
        byte, the first in the lower four bits.
      x_scales: [T, ceil(K / 128)] float32, a scale for every 128 columns of a row. None unless x is float8_e4m3fn.
      weight_scales: for e4m3 [ceil(N / 128), ceil(K / 128)] float32, a scale for every 128 x 128 weights. For e2m1
        [N, ceil(K / 32)] uint8, exponents s in e8m0: 2^(s - 127) is the scale of 32 columns of a row, NaN if s is 255.
        The kernel takes 2^-127 as 0.
      gated: whether the result is silu(gate) * up, computed in float32, [T, N / 2]: gate is x times the weight's first
        N / 2 rows, up is x times its last N / 2 rows. N must be even.
      limit: with gated, a number above 0: `gate` is clipped to at most limit, and `up` to [-limit, limit]; None for no
        limit.
      out_dtype: torch.bfloat16, torch.float16, torch.float32, or with gated torch.float8_e4m3fn.
      out: a tensor for the result, or if out_dtype is float8_e4m3fn a tuple of two, for values and scales; or None.
      implementation: "cute" (the kernel), "reference" (torch operations), or None: on Hopper the kernel if it can run,
        else torch operations.

    Returns:
      [T, N] in out_dtype, [T, N / 2] with gated; if out_dtype is float8_e4m3fn, values and scales, as quantize_blocks
      makes them of the float32 result. `out` if it is given.

    Raises:
      TypeError, ValueError: an argument is not legal; the message names it, what it got and what is legal.
      NotImplementedError: the named implementation can't run this call, with every reason; or backward() asks for the
        derivative of a call that runs as an operator of torch (under torch.compile, say).
      RuntimeError: CUDA refused a launch, or a kernel would have to be loaded during a capture.
    """
    arguments = (x, weight, x_scales, weight_scales, gated, limit, out_dtype, implementation)
    if torch.compiler.is_compiling() or operators.is_traced(x, weight, derivatives=False):
        return _traced("block_scaled_matmul", arguments, out)
    return _dense(*arguments, out)


def grouped_block_scaled_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scales: torch.Tensor | None,
    weight_scales: torch.Tensor | None,
    cu_rows: torch.Tensor,
    *,
    rows: torch.Tensor | None = None,
    gated: bool = False,
    limit: float | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Result | None = None,
    implementation: str | None = None,
) -> Result:
    """`block_scaled_matmul` of each group of rows with the group's own weight, as
    tsmla_jax.grouped_block_scaled_matmul defines it.

    Args:
      x: [T, K], as in block_scaled_matmul; the rows of a group come together, unless `rows` says where they are.
      weight: [E, N, K] float8_e4m3fn, or [E, N, K / 2] uint8 of e2m1, as in block_scaled_matmul; or [E, N, K] bfloat16
        or float16, with x of the same dtype. More weights may follow, which are not read.
      x_scales: [T, ceil(K / 128)] float32, as in block_scaled_matmul. None unless x is float8_e4m3fn.
      weight_scales: [E, ceil(N / 128), ceil(K / 128)] float32, or for e2m1 [E, N, ceil(K / 32)] uint8, as in
        block_scaled_matmul. None if weight has 16 bits.
      cu_rows: [E + 1] int32, ascending from 0: group e has the result's rows cu_rows[e] to cu_rows[e + 1] - 1; a group
        may be empty.
      rows: [R] int32, for each row of the result the row of x that it is computed from, so that no sorted copy of x is
        written; None for x's rows in order, R = T.
      gated, limit: as in block_scaled_matmul.
      out_dtype: torch.bfloat16, torch.float16, torch.float32, or with gated torch.float8_e4m3fn.
      out: a tensor for the result, or if out_dtype is float8_e4m3fn a tuple of two, for values and scales; or None.
      implementation: "cute" (the kernel), "reference" (torch operations), or None: on Hopper the kernel if it can run,
        else torch operations.

    Returns:
      [R, N] in out_dtype, [R, N / 2] with gated; if out_dtype is float8_e4m3fn, values and scales. `out` if it is
      given. Rows from cu_rows[E] on are 0, whatever x or `rows` holds there, NaN included.

    Raises:
      TypeError, ValueError: an argument is not legal; the message names it, what it got and what is legal.
      NotImplementedError: the named implementation can't run this call, with every reason; or backward() asks for the
        derivative of a call that runs as an operator of torch (under torch.compile, say).
      RuntimeError: CUDA refused a launch, or a kernel would have to be loaded during a capture.
    """
    arguments = (x, weight, x_scales, weight_scales, cu_rows, rows, gated, limit, out_dtype, implementation)
    if torch.compiler.is_compiling() or operators.is_traced(x, weight, derivatives=False):
        return _traced("grouped_block_scaled_matmul", arguments, out)
    return _grouped(*arguments, out)


def quantize_blocks(
    x: torch.Tensor, *, power_of_two: bool = False, implementation: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise activations to e4m3 with a scale for every 128 columns of a row, as tsmla_jax.quantize_blocks defines
    it: the scale s is max |x| / 448 over the block, values are x / s.

    Args:
      x: [..., K] float16, bfloat16 or float32. The last block may be shorter.
      power_of_two: round scales up to powers of two (`scale_fmt: ue8m0` in checkpoints' configs).
      implementation: "cute" (the kernel), "reference" (torch operations), or None: on Hopper the kernel if it can run,
        else torch operations.

    Returns:
      values [..., K] float8_e4m3fn and scales [..., ceil(K / 128)] float32. The largest magnitude of a block is taken
      to be at least 1e-10; a block with a NaN or an infinity has values that are NaN.

    Raises:
      TypeError, ValueError: an argument is not legal; the message names it, what it got and what is legal.
      NotImplementedError: the named implementation can't run this call, with every reason; or backward() asks for the
        derivative of a call that runs as an operator of torch (under torch.compile, say).
      RuntimeError: CUDA refused a launch, or a kernel would have to be loaded during a capture.
    """
    if torch.compiler.is_compiling() or operators.is_traced(x, derivatives=False):
        return torch.ops.tsmla.quantize_blocks(x, power_of_two, implementation)
    return _quantize(x, power_of_two, implementation)


def _dense(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scales: torch.Tensor | None,
    weight_scales: torch.Tensor,
    gated: bool,
    limit: float | None,
    out_dtype: torch.dtype,
    implementation: str | None,
    out: Result | None = None,
) -> Result:
    given = {"x": x, "weight": weight, "x_scales": x_scales, "weight_scales": weight_scales}
    form = {"gated": gated, "limit": limit, "out_dtype": tensors.named_dtype("out_dtype", out_dtype)}
    spec = tensors.describe_call(products.product_spec, **given, **form)
    return _multiply(BLOCK_SCALED_MATMUL, products_reference.block_scaled_matmul, spec, given, implementation, out)


def _grouped(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scales: torch.Tensor | None,
    weight_scales: torch.Tensor | None,
    cu_rows: torch.Tensor,
    rows: torch.Tensor | None,
    gated: bool,
    limit: float | None,
    out_dtype: torch.dtype,
    implementation: str | None,
    out: Result | None = None,
) -> Result:
    given = {"x": x, "weight": weight, "x_scales": x_scales, "weight_scales": weight_scales, "cu_rows": cu_rows}
    given |= {"rows": rows}
    form = {"gated": gated, "limit": limit, "out_dtype": tensors.named_dtype("out_dtype", out_dtype)}
    spec = tensors.describe_call(products.grouped_product_spec, **given, **form)
    data_checks.check(values.grouped_product, spec, cu_rows, *(() if rows is None else (rows,)))
    definition = products_reference.grouped_block_scaled_matmul
    return _multiply(GROUPED_BLOCK_SCALED_MATMUL, definition, spec, given, implementation, out)


def _multiply(
    kernel: Kernel,
    definition: Callable[..., Result],
    spec: ProductSpec,
    given: dict[str, Any],
    implementation: str | None,
    out: Result | None,
) -> Result:
    read = {name: tensor for name, tensor in given.items() if tensor is not None}

    def why_not() -> list[str]:
        reasons = kernel.reasons(spec) + loaded_kernels.layout_reasons(read)
        return reasons + operators.derivative_reasons(*read.values())

    device, kinds = given["x"].device, _results(spec)
    by_kernel = loaded_kernels.is_chosen(kernel, implementation, device, why_not)
    results = None if out is None else _outputs(out, kinds, device, read)
    if not by_kernel or spec.num_rows == 0:
        found = definition(spec, *given.values())
        for tensor, result in zip(results or (), found if isinstance(found, tuple) else (found,), strict=False):
            tensor.copy_(result)
        return found if out is None else out
    if results is not None:
        tensors.mark_written(*results)
    else:
        results = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in kinds.values()]
    config = product_config(spec, devices.num_sms(devices.index_of(device)))
    written = dict(zip(kinds, results, strict=True))
    arrays = {name: loaded_kernels.view(tensor) for name, tensor in (read | written).items()}
    loaded_kernels.run_on(kernel, config, device, arrays)
    return results[0] if len(results) == 1 else (results[0], results[1])


def _results(spec: ProductSpec) -> dict[str, tuple[tuple[int, int], torch.dtype]]:
    """The shapes and dtypes of a call's results, by the kernel's names."""
    rows, columns = spec.num_rows, spec.out_columns
    out = {"out": ((rows, columns), DTYPES[spec.out_dtype])}
    if spec.out_dtype == FP8:
        out["out_scales"] = ((rows, products.blocks_of(columns)), torch.float32)
    return out


def _outputs(
    out: Result,
    kinds: dict[str, tuple[tuple[int, int], torch.dtype]],
    device: torch.device,
    read: dict[str, torch.Tensor],
) -> list[torch.Tensor]:
    """The caller's tensors for the results, after their checks.

    read: the call's tensors, by argument.
    """
    given = _tensors_of(out, len(kinds))
    names = ("out",) if len(kinds) == 1 else ("out[0]", "out[1]")
    taken = dict(read)
    for name, tensor, (shape, dtype) in zip(names, given, kinds.values(), strict=True):
        tensors.check_output(name, tensor, shape, dtype, device)
        tensors.check_apart(name, tensor, taken)
        taken[name] = tensor
    return given


def _tensors_of(out: Result, count: int) -> list[torch.Tensor]:
    """The one or two tensors of `out`. TypeError if there are not `count` of them."""
    given = list(out) if isinstance(out, tuple) else [out]
    if len(given) != count:
        legal = "one tensor" if count == 1 else "values and scales, a tuple of two tensors"
        raise TypeError(f"out: got {len(given)} tensors; legal: {legal}, or None")
    return given


def _traced(name: str, arguments: tuple[Any, ...], out: Result | None) -> Result:
    """Run the call as an operator of torch.library, which returns one result or two, or writes to `out`."""
    of_two = arguments[-2] == torch.float8_e4m3fn
    if out is None:
        result: Result = getattr(torch.ops.tsmla, f"quantized_{name}" if of_two else name)(*arguments)
        return result
    values, *scales = _tensors_of(out, 2 if of_two else 1)
    getattr(torch.ops.tsmla, f"{name}_into")(*arguments, values, scales[0] if scales else None)
    return out


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
_GROUPED = "Tensor x, Tensor weight, Tensor? x_scales, Tensor? weight_scales, Tensor cu_rows, Tensor? rows"
_OPTIONS = "bool gated, float? limit, ScalarType out_dtype, str? implementation"


def _new_out(x: Any, weight: Any, *others: Any) -> Any:
    *picks, gated, _, dtype, _ = others[2:]
    rows = x.shape[0] if len(picks) < 2 or picks[1] is None else picks[1].shape[0]
    return x.new_empty((rows, weight.shape[-2] // 2 if gated else weight.shape[-2]), dtype=dtype)


def _new_quantized(x: Any, *others: Any) -> Any:
    values = _new_out(x, *others)
    return values, x.new_empty((values.shape[0], products.blocks_of(values.shape[1])), dtype=torch.float32)


def _register(name: str, multiply: Callable[..., Result], arguments: str) -> None:
    """Register tsmla::{name}, which returns the product, tsmla::quantized_{name}, which returns its e4m3 values and
    scales, and tsmla::{name}_into, which writes either to the caller's memory."""

    def write_into(*given: Any) -> None:
        *call, out, out_scales = given
        multiply(*call, out if out_scales is None else (out, out_scales))

    schema = f"({arguments}, {_OPTIONS}, Tensor(a!) out, Tensor(b!)? out_scales) -> ()"
    operators.register(f"{name}_into", write_into, schema, writes=("out", "out_scales"))
    for one, results, fake in ((name, "Tensor", _new_out), (f"quantized_{name}", "(Tensor, Tensor)", _new_quantized)):
        operator = operators.register(one, multiply, f"({arguments}, {_OPTIONS}) -> {results}")
        operators.refuse_backward(operator, name, "pass implementation='reference' outside of torch.compile")
        operators.register_fake(operator, fake)


_register("block_scaled_matmul", _dense, _PRODUCT)
_register("grouped_block_scaled_matmul", _grouped, _GROUPED)

quantize_operator = operators.register(
    "quantize_blocks", _quantize, "(Tensor x, bool power_of_two, str? implementation) -> (Tensor, Tensor)"
)
operators.refuse_backward(quantize_operator, "quantize_blocks", "an eager call has one")


def _new_blocks(x: Any, *_: Any) -> Any:
    scales = (*x.shape[:-1], products.blocks_of(x.shape[-1]))
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), x.new_empty(scales, dtype=torch.float32)


operators.register_fake(quantize_operator, _new_blocks)

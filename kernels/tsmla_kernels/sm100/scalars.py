"""Float32 arguments of TokenSpeed's kernels that no host value can stand for. Imports cutlass."""

from __future__ import annotations

import contextlib
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm


class LoadedFloat32:
    """A float32 in device memory, times a constant, where a kernel's host function expects a Float32 by value.

    Up to the launch this is a pointer (the DSL asks an argument for the values that it consists of, and builds it again
    inside the kernel from its parameters); inside it is the number, loaded where it is used. So XLA may compute the
    scale on the device, and the kernel's source stays as it is.
    """

    def __init__(self, pointer: Any, factor: float = 1.0) -> None:
        self._pointer, self._factor = pointer, factor

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        # The DSL casts an argument that isn't what its annotation says.
        return Float32

    def __mul__(self, factor: float) -> LoadedFloat32:
        return LoadedFloat32(self._pointer, self._factor * factor)

    def __extract_mlir_values__(self) -> list[Any]:
        return cutlass.extract_mlir_values(self._pointer)

    def __new_from_mlir_values__(self, values: list[Any]) -> Float32:
        return _Float32AtUse(cutlass.new_from_mlir_values(self._pointer, values), self._factor)


class _Float32AtUse(Float32):
    """A Float32 whose value is loaded anew by every operation that takes it: a register that held it through the
    kernel's loops, where a parameter takes none, would make most of these kernels spill."""

    def __init__(self, pointer: Any, factor: float) -> None:
        self._pointer, self._factor = pointer, factor

    @property
    def dtype(self) -> Any:
        return Float32

    @property
    def value(self) -> Any:
        with _outside_vectorized_loops():
            loaded = cute.make_tensor(self._pointer, cute.make_layout((1,)))[0]
            return (loaded if self._factor == 1.0 else loaded * Float32(self._factor)).value


def _outside_vectorized_loops() -> contextlib.AbstractContextManager[Any]:
    """Where operations are put that the compiler can't make vectors of: before the outermost loop that it shall."""
    block: Any = ir.InsertionPoint.current.block
    operation, loop = block.owner, None
    while operation is not None:
        if "cutlass.vectorize" in operation.operation.attributes:
            loop = operation
        operation = operation.operation.parent
    return contextlib.nullcontext() if loop is None else ir.InsertionPoint(loop.operation)


def float_of_sizes(high: Any, low: Any) -> Float32:
    """The float32 that config.scale_sizes made two arrays' sizes of."""
    bits = ((high.shape[0] - 1) << 16) | (low.shape[0] - 1)
    return Float32(llvm.bitcast(Float32.mlir_type, Int32(bits).ir_value()))


def outputs_and_scales(operands: tuple[Any, ...], traced: bool) -> tuple[tuple[Any, ...], tuple[Any, Any]]:
    """A launcher's operands after its inputs, as (outputs, (the logits' scale, the outputs' scale)): traced scales are
    one array before the outputs, others the four config.SCALE_OPERANDS after them."""
    if traced:
        scales, *outputs = operands
        return tuple(outputs), (LoadedFloat32(scales.iterator), LoadedFloat32(scales.iterator + 1))
    return operands[:-4], (float_of_sizes(*operands[-4:-2]), float_of_sizes(*operands[-2:]))

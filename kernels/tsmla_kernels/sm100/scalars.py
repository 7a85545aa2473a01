"""Float32 arguments of other packages' kernels: loaded from device memory, or found from the sizes of arrays. Imports
cutlass."""

from __future__ import annotations

import contextlib
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm


class LoadedFloat32:
    """A float32 in device memory, times a constant, in the place of a Float32 that a host function takes by value.

    Until the launch this is a pointer: the DSL asks an argument for its values and builds it again inside the kernel
    from the kernel's parameters. Inside the kernel it is the number, loaded where it is used. XLA can thus compute the
    scale on the device, without a change of the kernel's source.
    """

    def __init__(self, pointer: Any, factor: float = 1.0) -> None:
        self._pointer, self._factor = pointer, factor

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        # The DSL casts an argument whose class isn't the annotated one.
        return Float32

    def __mul__(self, factor: float) -> LoadedFloat32:
        return LoadedFloat32(self._pointer, self._factor * factor)

    def __extract_mlir_values__(self) -> list[Any]:
        return cutlass.extract_mlir_values(self._pointer)

    def __new_from_mlir_values__(self, values: list[Any]) -> Float32:
        return _Float32AtUse(cutlass.new_from_mlir_values(self._pointer, values), self._factor)


class _Float32AtUse(Float32):
    """A Float32 that every operation loads again. Keeping it in a register through the kernel's loops would make most
    of these kernels spill; a parameter needs no register."""

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
    """A context that inserts operations before the outermost loop that the compiler must vectorize, if inside one."""
    block: Any = ir.InsertionPoint.current.block
    operation, loop = block.owner, None
    while operation is not None:
        if "cutlass.vectorize" in operation.operation.attributes:
            loop = operation
        operation = operation.operation.parent
    return contextlib.nullcontext() if loop is None else ir.InsertionPoint(loop.operation)


def float_of_sizes(high: Any, low: Any) -> Float32:
    """The float32 that config.scale_sizes encoded as the sizes of two arrays."""
    bits = ((high.shape[0] - 1) << 16) | (low.shape[0] - 1)
    return Float32(llvm.bitcast(Float32.mlir_type, Int32(bits).ir_value()))


def outputs_and_scales(operands: tuple[Any, ...], traced: bool) -> tuple[tuple[Any, ...], tuple[Any, Any]]:
    """A launcher's operands after its inputs, as (outputs, (the logits' scale, the outputs' scale)). Traced scales are
    one array before the outputs; scales by value are the four config.SCALE_OPERANDS after the outputs."""
    if traced:
        scales, *outputs = operands
        return tuple(outputs), (LoadedFloat32(scales.iterator), LoadedFloat32(scales.iterator + 1))
    return operands[:-4], (float_of_sizes(*operands[-4:-2]), float_of_sizes(*operands[-2:]))

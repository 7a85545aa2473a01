"""The host function that is every compiled object's entry. Imports cutlass: only compile.py imports this module.

XLA's custom call passes the stream, and each array as a pointer to a descriptor {address, pointer to its sizes as
int64}. The runtime's own handler (cutlass.jax's) calls the entry in this way, and any other caller can as well. The
descriptors are read here, and not by cutlass.jax, so jax is not needed, and the sizes for which a kernel is specialised
become constants; the other sizes stay dynamic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Int32, Int64
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass._mlir_helpers import op

from tsmla_kernels.kernel import Operand

DTYPES = {
    "bfloat16": cutlass.BFloat16,
    "float16": cutlass.Float16,
    "float32": cutlass.Float32,
    "int32": cutlass.Int32,
    "int64": cutlass.Int64,
    "int8": cutlass.Int8,
    "uint8": cutlass.Uint8,
    "float8_e4m3fn": cutlass.Float8E4M3FN,
}
DESCRIPTOR_ALIGN = 8


@cute.jit
def entry(
    stream: cuda.CUstream, *descriptors: cute.Pointer, launcher: cutlass.Constexpr, operands: cutlass.Constexpr
) -> None:
    forget_source_lines()
    tensors = [tensor_of(descriptor, operand) for descriptor, operand in zip(descriptors, operands, strict=True)]
    launcher(stream, *tensors)


def forget_source_lines() -> None:
    """Make the DSL trace without looking up the source line of every operation, which takes a quarter of a compilation.
    By default the DSL looks the lines up for diagnostics if it reports the assembler's remarks; the objects have the
    same bytes without them. A version of the DSL that keeps the setting elsewhere goes on looking them up."""
    setting = getattr(op, "_set_enable_frame_filtering", None)
    if setting is not None:
        setting(False)


def placeholders(operands: tuple[Operand, ...]) -> list[Any]:
    """Null descriptors, for cute.compile."""
    null: Callable[..., Any] = cute.runtime.nullptr
    return [null(cutlass.Int8, AddressSpace.generic, assumed_align=DESCRIPTOR_ALIGN) for _ in operands]


def tensor_of(descriptor: Any, operand: Operand) -> Any:
    """The cute.Tensor that a descriptor describes; called while the entry is traced."""
    generic = llvm.PointerType.get(int(AddressSpace.generic))
    int64 = ir.IntegerType.get_signless(64)
    loaded = llvm.load(llvm.StructType.get_literal([generic, generic]), descriptor.to_llvm_ptr())
    address = llvm.addrspacecast(llvm.PointerType.get(int(AddressSpace.gmem)), llvm.extractvalue(generic, loaded, [0]))
    sizes_address = llvm.extractvalue(generic, loaded, [1])

    sizes: list[Any] = []
    for axis, size in enumerate(operand.shape):
        if size is None:
            pointer = llvm.getelementptr(
                generic, sizes_address, [], ir.DenseI32ArrayAttr.get([axis]), elem_type=int64, no_wrap_flags=0
            )
            size = Int64(llvm.load(int64, pointer))
        sizes.append(size)
    strides: list[Any] = []
    stride: Any = 1
    for size in reversed(sizes):
        strides.insert(0, stride)
        stride = size * stride
    if operand.wide and isinstance(strides[0], int) and strides[0] > 1:
        strides[0] = cute.assume(Int64(strides[0]), divby=strides[0])
    shape = tuple(size if isinstance(size, int) else Int32(size) for size in sizes)
    pointer = cute.make_ptr(DTYPES[operand.dtype], address, AddressSpace.gmem, assumed_align=operand.align)
    return cute.make_tensor(pointer, cute.make_layout(shape, stride=tuple(strides)))

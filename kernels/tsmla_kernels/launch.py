"""Launching compiled objects without a framework: addresses and shapes in, one kernel launch out.

The objects are those that XLA's custom call launches (see host_entry.py), loaded by the DSL's runtime library through
its C interface; with a warm cache nothing of cutlass is imported. Whoever owns the memory (torch, or a benchmark)
passes each array's address and the stream; nothing is copied, allocated or synchronised, so a launch can be captured
in a CUDA graph.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tsmla_kernels import cache
from tsmla_kernels.catalog import Config, Kernel, Operand
from tsmla_kernels.compile import ENTRY_PREFIX

LIBRARY = "libcute_dsl_runtime.so"


class ArrayView(NamedTuple):
    """A dense, row-major array in device memory. dtype is its name, as in the catalog."""

    address: int
    shape: tuple[int, ...]
    dtype: str


def runtime_library(prefer: str = "cu13") -> Path | None:
    """The DSL's runtime: named in CUTE_DSL_LIBS, or inside nvidia_cutlass_dsl, there for CUDA 12 ("cu12") or 13
    ("cu13"); None if it isn't installed."""
    for named in os.environ.get("CUTE_DSL_LIBS", "").split(os.pathsep):
        if named.endswith(LIBRARY) and Path(named).is_file():
            return Path(named)
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for version in sorted(("cu12", "cu13"), key=lambda version: version != prefer):
        for folder in folders:
            if (library := Path(folder, version, "lib", LIBRARY)).is_file():
                return library
    return None


class Launcher:
    """A kernel for one config, loaded and ready to be launched from any thread.

    Raises, when built: what cache.load_or_compile raises; FileNotFoundError if the runtime isn't installed;
    RuntimeError if the runtime refuses the object (no GPU, or one of another architecture).
    """

    def __init__(self, kernel: Kernel, config: Config, arch: str) -> None:
        self.operands = kernel.operands(config)
        self.name = kernel.name
        module = cache.load_or_compile(kernel, config, arch).module
        self._runtime = _runtime()
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        size, none = ctypes.c_size_t(len(module)), ctypes.c_size_t(0)
        create = self._runtime.CuteDSLRT_Module_Create_From_Bytes
        self._check(create(ctypes.byref(self._module), module, size, None, none))
        prefix = ENTRY_PREFIX.encode()
        self._check(self._runtime.CuteDSLRT_Module_Get_Function(ctypes.byref(self._function), self._module, prefix))
        # (address of the arguments, their number) -> 0, or the runtime's error
        self._run: Callable[[int, int], int] = functools.partial(
            self._runtime.CuteDSLRT_Function_Run, self._function.value
        )
        self._bound: dict[tuple[tuple[int, ...], ...], Launch] = {}

    def bind(self, shapes: Sequence[tuple[int, ...]]) -> Launch:
        """The launch on arrays of these shapes, one for each of self.operands, in order.

        Raises ValueError if a shape isn't what its operand says; dtypes are the caller's to check.
        """
        for operand, shape in zip(self.operands, shapes, strict=True):
            operand.check(shape, operand.dtype)
        return Launch(self.name, self.operands, shapes, self._run, self._check)

    def __call__(self, stream: int, arrays: Sequence[ArrayView]) -> None:
        """Launch on `stream` (a cudaStream_t as an int) of the current device; returns at once.

        Args:
          arrays: one for each of self.operands, in order, outputs and workspaces included.

        Raises:
          ValueError: an array isn't what its operand says; the message names it.
          RuntimeError: CUDA refused the launch.
        """
        for operand, array in zip(self.operands, arrays, strict=True):
            operand.check(array.shape, array.dtype)
        shapes = tuple(array.shape for array in arrays)
        if (launch := self._bound.get(shapes)) is None:
            if len(self._bound) >= MAX_BOUND:
                self._bound.clear()
            launch = self._bound[shapes] = self.bind(shapes)
        launch(stream, [array.address for array in arrays])

    def _check(self, result: int) -> None:
        if result:
            name = self._runtime.CuteDSLRT_GetErrorName(result).decode()
            said = self._runtime.CuteDSLRT_GetErrorString(result).decode()
            raise RuntimeError(f"{self.name}: the CuTe DSL runtime says {name}: {said}")


class Launch:
    """A launch whose sizes are settled, so that only the stream and the addresses are left: what is repeated at every
    call costs a few microseconds. Any number of threads may use one at the same time."""

    def __init__(
        self,
        name: str,
        operands: Sequence[Operand],
        shapes: Sequence[tuple[int, ...]],
        run: Callable[[int, int], int],
        check: Callable[[int], None],
    ) -> None:
        self._name, self._run, self._check = name, run, check
        self._operands = tuple(operands)
        self._where = slice(FIRST_DESCRIPTOR, FIRST_DESCRIPTOR + 2 * len(operands), 2)
        # Of the words as one number, the bits that addresses must not have: alignments are powers of two.
        self._misaligned = sum(
            (operand.align - 1) << 64 * at
            for operand, at in zip(operands, range(self._where.stop)[self._where], strict=True)
        )
        self._sizes = [(ctypes.c_int64 * len(shape))(*shape) for shape in shapes]
        self._count = len(self._operands) + 2
        # Blocks that no launch is using. A list's pop and append are atomic.
        self._free: list[_Arguments] = []

    def __call__(self, stream: int, addresses: Sequence[int]) -> None:
        """Launch on `stream` of the current device, with the arrays at these addresses; returns at once.

        Raises:
          ValueError: an address isn't aligned as its operand needs it.
          RuntimeError: CUDA refused the launch.
        """
        try:
            block = self._free.pop()
        except IndexError:
            block = _Arguments(self._sizes)
        words = block.words
        words[STREAM_WORD] = stream
        words[self._where] = addresses  # type: ignore[call-overload]  # any sequence does
        if int.from_bytes(block.memory, "little") & self._misaligned:
            self._refuse(addresses)
        if error := self._run(block.arguments, self._count):
            self._check(error)
        if words[ERROR_WORD]:
            raise RuntimeError(f"{self._name}: the launch failed with CUDA error {words[ERROR_WORD]}")
        self._free.append(block)

    def _refuse(self, addresses: Sequence[int]) -> None:
        for operand, address in zip(self._operands, addresses, strict=True):
            if address % operand.align:
                raise ValueError(f"{operand.name}: got address {address:#x}; it must be a multiple of {operand.align}")


STREAM_WORD, ERROR_WORD, FIRST_DESCRIPTOR = 0, 1, 2
MAX_BOUND = 64  # launches that a Launcher keeps for its own __call__


class _Arguments:
    """What the compiled entry reads at one launch, all in words of 64 bits: the stream; where it puts CUDA's error; a
    descriptor {address, pointer to its sizes} for each array; pointers to those; and pointers to all of these, which
    are the entry's arguments. A launch fills in the stream and the addresses."""

    def __init__(self, sizes: Sequence[ctypes.Array[ctypes.c_int64]]) -> None:
        count = len(sizes)
        pointers = FIRST_DESCRIPTOR + 2 * count
        arguments = pointers + count
        self.words = words = (ctypes.c_int64 * (arguments + count + 2))()
        base, word = ctypes.addressof(words), ctypes.sizeof(ctypes.c_int64)
        for i, size in enumerate(sizes):
            descriptor = FIRST_DESCRIPTOR + 2 * i
            words[descriptor + 1] = ctypes.addressof(size)
            words[pointers + i] = base + word * descriptor
            words[arguments + 1 + i] = base + word * (pointers + i)
        words[arguments] = base + word * STREAM_WORD
        words[arguments + count + 1] = base + word * ERROR_WORD
        self.arguments = base + word * arguments
        self.memory = memoryview(words).cast("B")[: word * pointers]  # up to the last descriptor


@functools.cache
def _runtime() -> Any:
    path = runtime_library()
    if path is None:
        raise FileNotFoundError(f"{LIBRARY} was not found; it is part of nvidia-cutlass-dsl")
    library = ctypes.CDLL(str(path))
    for name in ("CuteDSLRT_GetErrorName", "CuteDSLRT_GetErrorString"):
        getattr(library, name).restype = ctypes.c_char_p
    library.CuteDSLRT_Function_Run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    return library

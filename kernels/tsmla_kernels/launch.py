"""Launching compiled objects without a framework: addresses and shapes in, one kernel launch out.

The objects are those that XLA's custom call launches (see entry.py), loaded by the DSL's runtime library through its C
interface; with a warm cache nothing of cutlass is imported. The owner of the memory (torch, or a benchmark) passes the
address of each array and the stream; nothing is copied, allocated or synchronised, so a launch can be captured in a
CUDA graph.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tsmla_kernels import object_cache
from tsmla_kernels.compile import ENTRY_PREFIX
from tsmla_kernels.kernel import Config, Kernel, Operand

LIBRARY = "libcute_dsl_runtime.so"


Run = Callable[[ctypes.c_void_p, ctypes.c_size_t], int]
"""(address of the entry's arguments, how many they are) -> 0, or the runtime's error."""


Launch = Callable[[int, Sequence[int]], None]
"""A launch on arrays of fixed sizes. It takes the stream, a cudaStream_t of the current device, and the addresses of
the arrays, and returns at once. Any number of threads may call the same launch at once. It raises ValueError if an
address isn't aligned as its operand must be, and RuntimeError if CUDA refuses the launch."""


class ArrayView(NamedTuple):
    """A dense, row-major array in device memory. dtype is its name, as in the catalog."""

    address: int
    shape: tuple[int, ...]
    dtype: str


def runtime_library(prefer: str | None = None) -> Path | None:
    """The DSL's runtime library: the one that CUTE_DSL_LIBS names, or one inside nvidia_cutlass_dsl, which may have it
    for CUDA 12 ("cu12") and 13 ("cu13"). None if the library isn't installed.

    prefer: the CUDA version to take ("cu12" or "cu13"), if both are there. None means the version for which the torch
    that this process has imported was built, or cu13 without torch. A driver that serves a torch for CUDA 12 may be too
    old for CUDA 13."""
    if prefer is None:
        prefer = _cuda_of_torch()
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


def why_not_made(kernel: Kernel, config: Config, arch: str) -> list[str]:
    """Why no object is stored or can be compiled: the package with the kernel's code isn't installed. Empty if that is
    not so."""
    package = kernel.package
    if package is None or importlib.util.find_spec(package.module) is not None:
        return []
    if object_cache.is_stored(kernel, config, arch):
        return []
    return [f"{kernel.name} is made of {package.distribution}, which is not installed: {package.install}"]


def _cuda_of_torch() -> str:
    version = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
    return "cu12" if isinstance(version, str) and version.partition(".")[0] in ("11", "12") else "cu13"


class Launcher:
    """A kernel for one config, loaded and ready to be launched from any thread.

    Raises, when built: what object_cache.load_or_compile raises; FileNotFoundError if the runtime isn't installed;
    RuntimeError if the runtime refuses the object (no GPU, or one of another architecture).
    """

    def __init__(self, kernel: Kernel, config: Config, arch: str) -> None:
        self.operands = kernel.operands(config)
        self.name = kernel.name
        module = object_cache.load_or_compile(kernel, config, arch).module
        self._runtime = _runtime()
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        size, none = ctypes.c_size_t(len(module)), ctypes.c_size_t(0)
        create = self._runtime.CuteDSLRT_Module_Create_From_Bytes
        self._check(create(ctypes.byref(self._module), module, size, None, none))
        prefix = ENTRY_PREFIX.encode()
        self._check(self._runtime.CuteDSLRT_Module_Get_Function(ctypes.byref(self._function), self._module, prefix))
        self._run: Run = functools.partial(self._runtime.CuteDSLRT_Function_Run, self._function)
        self._bound: dict[tuple[tuple[int, ...], ...], Launch] = {}

    def bind(self, shapes: Sequence[tuple[int, ...]]) -> Launch:
        """The launch on arrays of these shapes, one for each of self.operands, in order.

        Raises ValueError if a shape doesn't fit its operand. The caller checks the dtypes.
        """
        for operand, shape in zip(self.operands, shapes, strict=True):
            operand.check(shape, operand.dtype)
            operand.check_sizes(shape)
        return launch_of(self.name, self.operands, shapes, self._run, self._check)

    def __call__(self, stream: int, arrays: Sequence[ArrayView]) -> None:
        """Launch on `stream` (a cudaStream_t as an int) of the current device; returns at once.

        Args:
          arrays: one for each of self.operands, in order, outputs and workspaces included.

        Raises:
          ValueError: an array doesn't fit its operand; the message names the operand.
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


def launch_of(
    name: str,
    operands: Sequence[Operand],
    shapes: Sequence[tuple[int, ...]],
    run: Run,
    check: Callable[[int], None],
) -> Launch:
    """A launch of the kernel `name` on arrays of these shapes. `run` starts it; `check` raises the error that `run`
    returns, unless that is 0. Everything that depends on neither stream nor addresses is computed here, and a call
    looks nothing up on an object, so a call costs little more than CUDA's part of it."""
    address_words = slice(FIRST_DESCRIPTOR, FIRST_DESCRIPTOR + 2 * len(operands), 2)
    # The bits that must be 0 in the addresses, with all words read as one number: alignments are powers of two.
    misaligned = sum(
        (operand.align - 1) << 64 * word
        for operand, word in zip(operands, range(address_words.stop)[address_words], strict=True)
    )
    sizes = [(ctypes.c_int64 * len(shape))(*shape) for shape in shapes]
    # Blocks that no launch is using. A list's pop and append are atomic.
    free: list[_Arguments] = []
    number_of = int.from_bytes

    def launch(stream: int, addresses: Sequence[int]) -> None:
        try:
            block = free.pop()
        except IndexError:
            block = _Arguments(sizes, run)
        words = block.words
        words[STREAM_WORD] = stream
        words[address_words] = addresses  # type: ignore[call-overload]  # any sequence does
        if number_of(block.memory, "little") & misaligned:
            raise _misaligned(operands, addresses)
        if error := block.run():
            check(error)
        if words[ERROR_WORD]:
            raise RuntimeError(f"{name}: the launch failed with CUDA error {words[ERROR_WORD]}")
        free.append(block)

    return launch


def _misaligned(operands: Sequence[Operand], addresses: Sequence[int]) -> ValueError:
    operand, address = next((o, a) for o, a in zip(operands, addresses, strict=True) if a % o.align)
    return ValueError(f"{operand.name}: got address {address:#x}; it must be a multiple of {operand.align}")


STREAM_WORD, ERROR_WORD, FIRST_DESCRIPTOR = 0, 1, 2
MAX_BOUND = 64  # launches that a Launcher keeps for its own __call__


class _Arguments:
    """The memory that the compiled entry reads at one launch, in words of 64 bits: the stream; CUDA's error, which the
    entry writes; for each array a descriptor {address, pointer to its sizes}; pointers to the descriptors; and pointers
    to the stream, to those pointers and to the error, which are the entry's arguments. A launch fills in the stream and
    the addresses, and calls `run`."""

    def __init__(self, sizes: Sequence[ctypes.Array[ctypes.c_int64]], run: Run) -> None:
        count = len(sizes)
        pointers = FIRST_DESCRIPTOR + 2 * count
        arguments = pointers + count
        self.words = (ctypes.c_int64 * (arguments + count + 2))()
        word = ctypes.sizeof(ctypes.c_int64)
        address = range(ctypes.addressof(self.words), 1 << 64, word)  # of a word
        descriptors = [number for size in sizes for number in (0, ctypes.addressof(size))]
        to_descriptors = address[FIRST_DESCRIPTOR:pointers:2]
        to_arguments = (address[STREAM_WORD], *address[pointers:arguments], address[ERROR_WORD])
        self.words[FIRST_DESCRIPTOR:] = [*descriptors, *to_descriptors, *to_arguments]
        # As C's types once: converting Python's numbers at every call is half of what a call through ctypes costs.
        self.run = functools.partial(run, ctypes.c_void_p(address[arguments]), ctypes.c_size_t(count + 2))
        self.memory = memoryview(self.words).cast("B")[: word * pointers]  # up to the last descriptor


@functools.cache
def _runtime() -> Any:
    path = runtime_library()
    if path is None:
        raise FileNotFoundError(f"{LIBRARY} was not found; it is part of nvidia-cutlass-dsl")
    library = ctypes.CDLL(str(path))
    for name in ("CuteDSLRT_GetErrorName", "CuteDSLRT_GetErrorString"):
        getattr(library, name).restype = ctypes.c_char_p
    return library

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
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tsmla_kernels import cache
from tsmla_kernels.catalog import Config, Kernel
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
        self._name = kernel.name
        module = cache.load_or_compile(kernel, config, arch).module
        self._runtime = _runtime()
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        size, none = ctypes.c_size_t(len(module)), ctypes.c_size_t(0)
        create = self._runtime.CuteDSLRT_Module_Create_From_Bytes
        self._check(create(ctypes.byref(self._module), module, size, None, none))
        prefix = ENTRY_PREFIX.encode()
        self._check(self._runtime.CuteDSLRT_Module_Get_Function(ctypes.byref(self._function), self._module, prefix))

        # The entry's arguments are pointers to values: the stream, a pointer to each array's descriptor {address,
        # pointer to its sizes}, and last where it puts CUDA's error. All stay where they are; a launch only fills them
        # in.
        count = len(self.operands)
        self._stream, self._error = ctypes.c_void_p(), ctypes.c_int32()
        self._sizes = [(ctypes.c_int64 * len(operand.shape))() for operand in self.operands]
        self._descriptors = [(ctypes.c_void_p * 2)(None, ctypes.addressof(sizes)) for sizes in self._sizes]
        self._pointers = (ctypes.c_void_p * count)(*map(ctypes.addressof, self._descriptors))
        pointer_size = ctypes.sizeof(ctypes.c_void_p)
        self._arguments = (ctypes.c_void_p * (count + 2))(
            ctypes.addressof(self._stream),
            *(ctypes.addressof(self._pointers) + pointer_size * i for i in range(count)),
            ctypes.addressof(self._error),
        )
        self._lock = threading.Lock()

    def __call__(self, stream: int, arrays: Sequence[ArrayView]) -> None:
        """Launch on `stream` (a cudaStream_t as an int) of the current device; returns at once.

        Args:
          arrays: one for each of self.operands, in order, outputs and workspaces included.

        Raises:
          ValueError: an array isn't what its operand says; the message names it.
          RuntimeError: CUDA refused the launch.
        """
        with self._lock:
            for operand, array, sizes, descriptor in zip(
                self.operands, arrays, self._sizes, self._descriptors, strict=True
            ):
                operand.check(array.shape, array.dtype)
                if array.address % operand.align:
                    raise ValueError(
                        f"{operand.name}: got address {array.address:#x}; it must be a multiple of {operand.align}"
                    )
                descriptor[0] = array.address
                sizes[:] = list(array.shape)
            self._stream.value = stream
            self._error.value = 0
            result = self._runtime.CuteDSLRT_Function_Run(
                self._function, self._arguments, ctypes.c_size_t(len(self._arguments))
            )
            if self._error.value:
                raise RuntimeError(f"{self._name}: the launch failed with CUDA error {self._error.value}")
            self._check(result)

    def _check(self, result: int) -> None:
        if result:
            name = self._runtime.CuteDSLRT_GetErrorName(result).decode()
            said = self._runtime.CuteDSLRT_GetErrorString(result).decode()
            raise RuntimeError(f"{self._name}: the CuTe DSL runtime says {name}: {said}")


@functools.cache
def _runtime() -> Any:
    path = runtime_library()
    if path is None:
        raise FileNotFoundError(f"{LIBRARY} was not found; it is part of nvidia-cutlass-dsl")
    library = ctypes.CDLL(str(path))
    for name in ("CuteDSLRT_GetErrorName", "CuteDSLRT_GetErrorString"):
        getattr(library, name).restype = ctypes.c_char_p
    return library

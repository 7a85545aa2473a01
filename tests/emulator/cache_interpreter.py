"""The cache kernels' own source, run thread by thread in Python: what CuTe DSL would trace is executed with numbers.

Stand-ins take the place of cutlass while the module is imported under another name. Global memory is regions of bytes
with gaps between them, so a load or store that is misaligned, or touches anything but one array, is an error. Where the
threads of a CTA meet, they are Python's threads. Only what the cache kernels use is here.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np

import tsmla_kernels

SOURCE = Path(tsmla_kernels.__file__).parent / "cache_ops" / "kernels.py"
REGION = 1 << 32
"""Bytes of address space that each array has to itself."""


class Dtype:
    """A number's type; called, it makes one."""

    def __init__(self, kind: Any) -> None:
        self.kind = np.dtype(kind)
        self.width = self.kind.itemsize * 8

    def __call__(self, value: float) -> Any:
        return int(value) if self.kind.kind == "i" else Values(np.asarray(value, self.kind))


DTYPES = {
    "bfloat16": Dtype(ml_dtypes.bfloat16),
    "float16": Dtype(np.float16),
    "float32": Dtype(np.float32),
    "float8_e4m3fn": Dtype(ml_dtypes.float8_e4m3fn),
    "int32": Dtype(np.int32),
    "int64": Dtype(np.int64),
}


class Values:
    """Numbers in registers, with the conversions and the arithmetic of the device."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def to(self, dtype: Dtype) -> Values:
        array = self.array
        if dtype is DTYPES["float8_e4m3fn"]:
            array = np.clip(array, -448, 448)
        with np.errstate(over="ignore", invalid="ignore"):
            return Values(array.astype(dtype.kind))

    def _with(self, other: Values, compute: Callable[[Any, Any], Any]) -> Values:
        assert self.array.dtype == other.array.dtype == np.float32
        with np.errstate(all="ignore"):
            return Values(np.asarray(compute(self.array, other.array), np.float32))

    def __mul__(self, other: Values) -> Values:
        return self._with(other, np.multiply)

    def __truediv__(self, other: Values) -> Values:
        return self._with(other, np.divide)

    def __add__(self, other: Values) -> Values:
        return self._with(other, np.add)

    def __sub__(self, other: Values) -> Values:
        return self._with(other, np.subtract)


class Registers:
    """A tensor in registers."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __getitem__(self, index: int) -> Values:
        return Values(self.array[index])

    def __setitem__(self, index: int, value: Values) -> None:
        assert value.array.dtype == self.array.dtype
        self.array[index] = value.array

    def load(self) -> Values:
        return Values(self.array.copy())

    def store(self, values: Values) -> None:
        assert values.array.dtype == self.array.dtype
        self.array[:] = values.array

    def fill(self, value: float) -> None:
        self.array[:] = value


class Memory:
    """Global memory: each array a region of its own."""

    def __init__(self) -> None:
        self.regions: list[np.ndarray] = []

    def tensor(self, array: np.ndarray) -> Tensor:
        """A copy of `array` in memory, as an operand."""
        self.regions.append(np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8).copy())
        return Tensor(self, (len(self.regions)) * REGION, array.shape, DTYPES[array.dtype.name])

    def view(self, address: int, size: int) -> np.ndarray:
        """The bytes at an address, which must be those of one array."""
        region, offset = divmod(address, REGION)
        assert 0 < region <= len(self.regions), f"address {address:#x} is in no array"
        there = self.regions[region - 1]
        assert offset + size <= len(there), f"bytes {offset} to {offset + size} of an array of {len(there)}"
        return there[offset : offset + size]


class Tensor:
    """An array in global memory: an operand of a kernel, or some values at an address."""

    def __init__(self, memory: Memory, address: int, shape: tuple[int, ...], dtype: Dtype) -> None:
        self.memory, self.address, self.shape, self.element_type = memory, address, shape, dtype

    @property
    def iterator(self) -> Pointer:
        return Pointer(self.memory, self.address, self.element_type)

    def numpy(self) -> np.ndarray:
        size = int(np.prod(self.shape)) * self.element_type.width // 8
        return self.memory.view(self.address, size).view(self.element_type.kind).reshape(self.shape)

    def __getitem__(self, index: int) -> Any:
        size = self.element_type.width // 8
        value = self.memory.view(self.address + index * size, size).view(self.element_type.kind)[0]
        return int(value) if self.element_type.kind.kind == "i" else Values(np.asarray(value))


class Pointer:
    """A typed address."""

    def __init__(self, memory: Memory, address: int, dtype: Dtype) -> None:
        self.memory, self.address, self.dtype = memory, address, dtype

    def toint(self) -> int:
        return self.address

    def __add__(self, elements: int) -> Pointer:
        return Pointer(self.memory, self.address + elements * self.dtype.width // 8, self.dtype)


def stand_in(name: str, **attributes: Any) -> Any:
    """A module of that name and those attributes."""
    module = types.ModuleType(name)
    for key, value in attributes.items():
        setattr(module, key, value)
    return module


class Cta:
    """What the threads of a CTA share: shared memory, and where they meet."""

    def __init__(self, block: int, threads: int) -> None:
        self.block, self.threads = block, threads
        self.barrier = threading.Barrier(threads)
        self.shared: dict[str, list[int]] = {}
        self.lanes: dict[int, list[int]] = {}
        self.warps = [threading.Barrier(min(32, threads - first)) for first in range(0, threads, 32)]


class Interpreter:
    """The module of kernels, and the memory they work on."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.here = threading.local()
        self.module = self._import()

    def launch(self, run: Callable[..., None], threads: int, grid: int, *operands: Any, meeting: bool = False) -> None:
        """Run a kernel for every thread of every CTA; `meeting` if its threads wait for each other."""
        for block in range(grid):
            cta = Cta(block, threads)
            failures: list[BaseException] = []

            def thread(index: int, cta: Cta = cta, failures: list[BaseException] = failures) -> None:
                self.here.thread, self.here.cta = index, cta
                try:
                    run(*operands)
                except BaseException as error:
                    failures.append(error)
                    cta.barrier.abort()
                    for warp in cta.warps:
                        warp.abort()

            if meeting:
                running = [threading.Thread(target=thread, args=(index,)) for index in range(threads)]
                for each in running:
                    each.start()
                for each in running:
                    each.join()
            else:
                for index in range(threads):
                    thread(index)
            first = next((e for e in failures if not isinstance(e, threading.BrokenBarrierError)), None)
            if first or failures:
                raise first or failures[0]

    # ---- stand-ins

    def _import(self) -> Any:
        arch = types.SimpleNamespace(
            thread_idx=lambda: (self.here.thread, 0, 0),
            block_idx=lambda: (self.here.cta.block, 0, 0),
            sync_threads=lambda: self.here.cta.barrier.wait(),
            shuffle_sync_up=self._shuffle_up,
        )
        same = self._same
        cute = stand_in(
            "cutlass.cute",
            jit=same,
            kernel=same,
            struct=same,
            arch=arch,
            ceil_div=lambda a, b: -(-a // b),
            size=lambda values: len(values.array),
            make_layout=lambda shape: shape,
            make_ptr=self._pointer,
            make_tensor=lambda pointer, count: Tensor(pointer.memory, pointer.address, (count,), pointer.dtype),
            make_rmem_tensor=lambda shape, dtype: Registers(np.full(shape, 123, dtype.kind)),
            autovec_copy=self._copy,
        )
        cutlass = stand_in(
            "cutlass",
            AddressSpace=types.SimpleNamespace(gmem=1),
            BFloat16=DTYPES["bfloat16"],
            Float16=DTYPES["float16"],
            Float32=DTYPES["float32"],
            Float8E4M3FN=DTYPES["float8_e4m3fn"],
            Int32=DTYPES["int32"],
            Int64=DTYPES["int64"],
            Constexpr=object,
            const_expr=lambda value: value,
            range_constexpr=range,
            range=lambda count, unroll: range(count),
            min=min,
            max=max,
            cute=cute,
            utils=stand_in("cutlass.utils", SmemAllocator=lambda: types.SimpleNamespace(allocate=self._allocate)),
        )
        driver = stand_in("cuda.bindings.driver")
        bindings = stand_in("cuda.bindings", driver=driver)
        stand_ins = {
            "cutlass": cutlass,
            "cutlass.cute": cute,
            "cutlass.utils": cutlass.utils,
            "cuda": stand_in("cuda", bindings=bindings),
            "cuda.bindings": bindings,
            "cuda.bindings.driver": driver,
        }
        spec = importlib.util.spec_from_file_location("interpreted_cache_kernels", SOURCE)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        with mock.patch.dict(sys.modules, stand_ins):
            spec.loader.exec_module(module)
        return module

    @staticmethod
    def _same(function: Any) -> Any:
        return function

    def _pointer(self, dtype: Dtype, address: int, space: Any, assumed_align: int) -> Pointer:
        assert address % assumed_align == 0, f"address {address:#x} is no multiple of {assumed_align}"
        return Pointer(self.memory, address, dtype)

    def _copy(self, source: Any, target: Any) -> None:
        def array(side: Any) -> np.ndarray:
            return side.numpy() if isinstance(side, Tensor) else side.array

        assert array(source).dtype == array(target).dtype and array(source).shape == array(target).shape
        array(target)[:] = array(source)

    def _allocate(self, _: Any) -> Any:
        cta = self.here.cta

        class Storage:
            def __getattr__(self, name: str) -> Any:
                return types.SimpleNamespace(get_tensor=lambda size: cta.shared.setdefault(name, [123456789] * size))

        return Storage()

    def _shuffle_up(self, value: int, *, offset: int, mask_and_clamp: int) -> int:
        cta, thread = self.here.cta, self.here.thread
        warp, lane = divmod(thread, 32)
        lanes = cta.lanes.setdefault(warp, [0] * 32)
        lanes[lane] = value
        cta.warps[warp].wait()
        other = lanes[lane - offset] if lane >= offset else value
        cta.warps[warp].wait()
        return other

"""The cache kernels' own source, run thread by thread in Python: the code that CuTe DSL would trace runs on numbers.

Stand-ins replace cutlass while the module is imported under another name. Global memory is regions of bytes with gaps
between them, so a misaligned load or store, or one that touches more than one array, is an error. A kernel whose
threads wait for each other runs on Python's threads. Only the parts of cutlass that the cache kernels use are here.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np

import tsmla_kernels

FOLDER = Path(tsmla_kernels.__file__).parent
CACHE_OPS = ("cache_ops.kernels",)
PACKED_CACHES = (*CACHE_OPS, "sparse_cache.values", "sparse_cache.kernels")
"""Modules that an Interpreter imports, in their order; the last one has the kernels."""
REGION = 1 << 32
"""Bytes of address space that each array has to itself."""


class Word(int):
    """An integer in a register, whose bits may be taken for a float's."""

    def bitcast(self, dtype: Dtype) -> Values:
        return Values(np.asarray(int(self) & 0xFFFFFFFF, np.uint32).view(dtype.kind))

    def _word(name: str) -> Any:  # type: ignore[misc]
        return lambda self, *others: Word(getattr(int, name)(self, *others))

    __add__, __sub__, __and__, __lshift__, __rshift__, __neg__ = map(
        _word, ("__add__", "__sub__", "__and__", "__lshift__", "__rshift__", "__neg__")
    )


class Dtype:
    """A number's type; called, it makes one."""

    def __init__(self, kind: Any) -> None:
        self.kind = np.dtype(kind)
        self.width = self.kind.itemsize * 8

    def __call__(self, value: float) -> Any:
        return Word(value) if self.kind.kind in "iu" else Values(np.asarray(value, self.kind))


DTYPES = {
    "bfloat16": Dtype(ml_dtypes.bfloat16),
    "float16": Dtype(np.float16),
    "float32": Dtype(np.float32),
    "float8_e4m3fn": Dtype(ml_dtypes.float8_e4m3fn),
    "uint8": Dtype(np.uint8),
    "uint32": Dtype(np.uint32),
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

    def bitcast(self, dtype: Dtype) -> Any:
        return Word(int(self.array.view(dtype.kind)))

    def _float32(compute: Callable[[Any, Any], Any]) -> Any:  # type: ignore[misc]
        def method(self: Values, other: Values) -> Values:
            assert self.array.dtype == other.array.dtype == np.float32
            with np.errstate(all="ignore"):
                return Values(np.asarray(compute(self.array, other.array), np.float32))

        return method

    __mul__, __truediv__, __add__, __sub__ = map(_float32, (np.multiply, np.divide, np.add, np.subtract))


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
        return Tensor(Pointer(self, len(self.regions) * REGION, DTYPES[array.dtype.name]), array.shape)

    def view(self, address: int, size: int) -> np.ndarray:
        """The bytes at an address, which must be those of one array."""
        region, offset = divmod(address, REGION)
        assert 0 < region <= len(self.regions), f"address {address:#x} is in no array"
        found = self.regions[region - 1]
        assert offset + size <= len(found), f"bytes {offset} to {offset + size} of an array of {len(found)}"
        return found[offset : offset + size]


@dataclass(frozen=True)
class Pointer:
    """A typed address."""

    memory: Memory
    address: int
    dtype: Dtype

    def toint(self) -> int:
        return self.address

    def __add__(self, elements: int) -> Pointer:
        return Pointer(self.memory, self.address + elements * self.dtype.width // 8, self.dtype)

    def read(self, count: int) -> np.ndarray:
        return self.memory.view(self.address, count * self.dtype.width // 8).view(self.dtype.kind)


@dataclass(frozen=True)
class Tensor:
    """An array in global memory: an operand of a kernel, or some values at an address."""

    iterator: Pointer
    shape: tuple[int, ...]

    @property
    def element_type(self) -> Dtype:
        return self.iterator.dtype

    @property
    def array(self) -> np.ndarray:
        return self.iterator.read(int(np.prod(self.shape))).reshape(self.shape)

    def __getitem__(self, index: int) -> Any:
        (value,) = (self.iterator + index).read(1)
        return Word(value) if self.element_type.kind.kind == "i" else Values(np.asarray(value))

    def __setitem__(self, index: int, value: Values) -> None:
        assert value.array.dtype == self.element_type.kind
        (self.iterator + index).read(1)[:] = value.array


def stand_in(name: str, **attributes: Any) -> Any:
    """A module of that name and those attributes."""
    module = types.ModuleType(name)
    for key, value in attributes.items():
        setattr(module, key, value)
    return module


class Cta:
    """The state that the threads of a CTA share: shared memory and barriers."""

    def __init__(self, block: int, threads: int) -> None:
        self.block, self.threads = block, threads
        self.barrier = threading.Barrier(threads)
        self.shared: dict[str, list[int]] = {}
        self.lanes: dict[int, list[Any]] = {}
        self.warps = [threading.Barrier(min(32, threads - first)) for first in range(0, threads, 32)]


class Interpreter:
    """The last of some modules, which has kernels, and the memory they work on."""

    def __init__(self, modules: tuple[str, ...] = CACHE_OPS) -> None:
        self.memory = Memory()
        self.here = threading.local()
        self.module = self._import(modules)

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

    def _import(self, modules: tuple[str, ...]) -> Any:
        arch = types.SimpleNamespace(
            thread_idx=lambda: (self.here.thread, 0, 0),
            lane_idx=lambda: self.here.thread % 32,
            shuffle_sync=self._shuffle,
            shuffle_sync_bfly=lambda value, *, offset: self._shuffle(value, self.here.thread % 32 ^ offset),
            block_idx=lambda: (self.here.cta.block, 0, 0),
            sync_threads=lambda: self.here.cta.barrier.wait(),
            shuffle_sync_up=self._shuffle_up,
        )
        cute = stand_in(
            "cutlass.cute",
            **dict.fromkeys(("jit", "kernel", "struct"), lambda function: function),
            arch=arch,
            ceil_div=lambda a, b: -(-a // b),
            size=lambda values: len(values.array),
            make_layout=lambda shape: shape,
            make_ptr=self._pointer,
            make_tensor=lambda pointer, count: Tensor(pointer, (count,)),
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
            Uint32=DTYPES["uint32"],
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
        with mock.patch.dict(sys.modules, stand_ins):
            for name in modules:
                full = f"tsmla_kernels.{name}"
                spec = importlib.util.spec_from_file_location(full, FOLDER / f"{name.replace('.', '/')}.py")
                assert spec is not None and spec.loader is not None
                module = sys.modules[full] = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
                if name == "sparse_cache.values":
                    self._replace_assembly(module)
        return module

    @staticmethod
    def _replace_assembly(module: Any) -> None:
        """Python in the place of what is written in PTX."""
        module.ask = lambda dtype, address: module.load(module.DTYPES[dtype], address, 1)[0].to(module.Float32)
        module.rotated_pair = lambda a, b, cos, sin: (a * cos - b * sin, b * cos + a * sin)

    def _pointer(self, dtype: Dtype, address: int, space: Any, assumed_align: int) -> Pointer:
        assert address % assumed_align == 0, f"address {address:#x} is no multiple of {assumed_align}"
        return Pointer(self.memory, address, dtype)

    @staticmethod
    def _copy(source: Any, target: Any) -> None:
        assert source.array.dtype == target.array.dtype and source.array.shape == target.array.shape
        target.array[:] = source.array

    def _allocate(self, _: Any) -> Any:
        cta = self.here.cta

        class Storage:
            def __getattr__(self, name: str) -> Any:
                return types.SimpleNamespace(get_tensor=lambda size: cta.shared.setdefault(name, [123456789] * size))

        return Storage()

    def _shuffle_up(self, value: int, *, offset: int, mask_and_clamp: int) -> Any:
        lane = self.here.thread % 32
        other = self._shuffle(value, max(lane - offset, 0))
        return other if lane >= offset else value

    def _shuffle(self, value: Any, source: int) -> Any:
        """The value that the warp's lane `source` gives."""
        assert 0 <= source < 32
        cta = self.here.cta
        warp, lane = divmod(self.here.thread, 32)
        lanes = cta.lanes.setdefault(warp, [None] * 32)
        lanes[lane] = value
        cta.warps[warp].wait()
        other = lanes[source]
        cta.warps[warp].wait()
        return other

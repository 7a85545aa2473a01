"""Compiled Hopper kernels on a CPU: the object's own host function launches them, and a machine in C++ runs their PTX.

What is modelled: warps whose lanes diverge and meet, shared memory with NaN in it, mbarriers, named and cluster
barriers, tensor maps, bulk and tensor copies that arrive late and in any order, WGMMA with its descriptors and
swizzles, the async proxy. What is found: wrong numbers, reads and writes outside of arrays, barriers that never
complete or get too many arrivals, accesses of two threads to shared memory that no barrier orders (in whatever order
they ran: for what the other lanes of its warp did, an elected lane arrives only after bar.warp.sync), memory that is
written again while a copy or a product reads it, a missing fence.proxy.async, shared memory that is used after its
block has ended, arrays that a call's first kernel touches before griddepcontrol.wait if it is a programmatic dependent
launch. What is not: anything below PTX (ptxas' work, registers, timing), races in global memory, and the approximate
instructions' last bits.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.emulator.ptx.encode import Encoded, encode
from tests.emulator.ptx.program import parse
from tsmla_kernels.compile import ENTRY_PREFIX, compile_kernel
from tsmla_kernels.kernel import Config, Kernel

SOURCES = Path(__file__).with_name("machine")
FLAGS = ("-std=c++20", "-O2", "-ffp-contract=off", "-fPIC", "-shared")
BUDGET = 400_000_000
"""Instructions of warps that one launch may take."""

COMPILER = shutil.which("g++")


class Memory(NamedTuple):
    """An array that a kernel may touch; an input may only be read."""

    name: str
    address: int
    size: int
    writable: bool


class Part(NamedTuple):
    """Some clusters of the kernels whose names contain `kernel`, and nothing of other kernels: for grids that are too
    large to run."""

    kernel: str
    clusters: Sequence[int]


class Order(NamedTuple):
    """Attributes:
    seed: of the random order in which warps run and copies arrive.
    resident: the number of clusters that run at a time: a further one starts when one has ended, as on a GPU that has
      no room for more of them.
    part: what runs; None is everything.
    """

    seed: int = 0
    resident: int = 4
    part: Part | None = None


IN_ORDER = Order()


class _Encoded(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("words", ctypes.POINTER(ctypes.c_int32)),
        ("word_count", ctypes.c_int64),
        ("handler_names", ctypes.POINTER(ctypes.c_char_p)),
        ("opcodes", ctypes.POINTER(ctypes.c_char_p)),
        ("constants", ctypes.POINTER(ctypes.c_uint64)),
        ("constant_kinds", ctypes.POINTER(ctypes.c_int32)),
        ("constant_count", ctypes.c_int32),
        ("registers", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("parameters", ctypes.POINTER(ctypes.c_int32)),
        ("parameter_count", ctypes.c_int32),
        ("parameter_bytes", ctypes.c_int32),
    )


def _array(kind: Any, values: Sequence[Any]) -> Any:
    return (kind * max(1, len(values)))(*values)


def _structure(encoded: Encoded) -> _Encoded:
    function = encoded.function
    parameters = [number for p in function.parameters.values() for number in (p.offset, p.size)]
    return _Encoded(
        function.name.encode(),
        _array(ctypes.c_int32, encoded.words),
        len(encoded.words),
        _array(ctypes.c_char_p, [name.encode() for name in encoded.handlers]),
        _array(ctypes.c_char_p, [opcode.encode() for opcode in encoded.opcodes]),
        _array(ctypes.c_uint64, [value for value, _ in encoded.constants]),
        _array(ctypes.c_int32, [kind for _, kind in encoded.constants]),
        len(encoded.constants),
        len(function.registers),
        function.threads,
        _array(ctypes.c_int32, parameters),
        len(parameters) // 2,
        function.parameter_bytes,
    )


def _build(command: Sequence[str], target: Path) -> Path:
    """Run the compiler so that of several processes which do so at once each finds a whole file."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder, target.name)
        done = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
        made.replace(target)
    return target


@functools.cache
def library(folder: Path) -> ctypes.CDLL:
    """The machine, built in this folder unless it lies there."""
    sources = sorted(SOURCES.iterdir())
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    target = folder / f"machine-{digest}.so"
    if not target.exists():
        _build([str(COMPILER), *FLAGS, str(SOURCES / "machine.cpp")], target)
    found = ctypes.CDLL(str(target))
    for name in ("machine_error", "machine_hazards"):
        getattr(found, name).restype = ctypes.c_char_p
    found.machine_reset.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int)
    found.machine_region.argtypes = (ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int)
    return found


class _LaunchConfig(ctypes.Structure):
    """cudaLaunchConfig_t."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint32),
    )


class Machine:
    """The machine with the kernels of a module and the memory of one call.

    Raises AssertionError, with the kernel's name, the instruction and its line in the PTX, for what would be an error
    or a hang on a GPU.
    """

    def __init__(self, programs: Sequence[_Encoded], memory: Sequence[Memory], order: Order) -> None:
        self.library = library(Path(tempfile.gettempdir()))
        self.library.machine_reset(order.seed, BUDGET, order.resident)
        if order.part is not None:
            clusters = _array(ctypes.c_uint64, order.part.clusters)
            self.library.machine_part(order.part.kernel.encode(), clusters, len(order.part.clusters))
        for program in programs:
            self.check(self.library.machine_program(ctypes.byref(program)))
        for part in memory:
            self.library.machine_region(part.name.encode(), part.address, part.size, part.writable)

    def check(self, failed: int = 0) -> None:
        error = self.library.machine_error().decode()
        assert not failed and not error, error

    @property
    def hazards(self) -> list[str]:
        """What the kernels did that the hardware forgives only sometimes."""
        return list(self.library.machine_hazards().decode().splitlines())


class _LaunchAttribute(ctypes.Structure):
    """cudaLaunchAttribute with a value of one word."""

    _fields_ = (("id", ctypes.c_int32), ("padding", ctypes.c_int32), ("value", ctypes.c_uint32 * 16))


PROGRAMMATIC_SERIALIZATION = 6
"""cudaLaunchAttributeProgrammaticStreamSerialization."""


def run_text(
    text: str,
    memory: Sequence[Memory],
    arguments: Sequence[int],
    order: Order = IN_ORDER,
    programmatic: Sequence[bool] = (False,),
    blocks: int = 1,
) -> list[str]:
    """Run the one kernel of a module's text, whose parameters have 64 bits, as blocks with 4 KB of shared memory each.
    programmatic: of each launch of it in the call, whether it is a programmatic dependent one. Returns the hazards."""
    (program,) = [encode(function) for function in parse(text).values()]
    machine = Machine([_structure(program)], memory, order)
    kernel = ctypes.c_void_p()
    name = program.function.name.encode()
    machine.check(machine.library._cudaLibraryGetKernel(ctypes.byref(kernel), None, name))
    attributes = (_LaunchAttribute * 1)(_LaunchAttribute(PROGRAMMATIC_SERIALIZATION, 0, (1,)))
    values = [ctypes.c_uint64(value) for value in arguments]
    pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    for count in map(int, programmatic):
        config = _LaunchConfig(
            (blocks, 1, 1), (program.function.threads, 1, 1), 4096, None, ctypes.addressof(attributes), count
        )
        machine.check(machine.library._cudaLaunchKernelEx(ctypes.byref(config), kernel, pointers))
    return machine.hazards


class EmulatedKernel:
    """A kernel compiled for one config, ready to run here.

    Attributes:
      compiled: the object.
      programs: of the kernels that the host function launches.
      hazards: what the latest run did that the hardware forgives only sometimes.
    """

    def __init__(self, kernel: Kernel, config: Config, arch: str = "sm_90a") -> None:
        self.name = kernel.name
        self._folder = tempfile.TemporaryDirectory(prefix="tsmla-ptx-")
        folder = Path(self._folder.name)
        options = f"{kernel.compiler_options} --keep-ptx --dump-dir {folder}"
        self.compiled = compile_kernel(dataclasses.replace(kernel, compiler_options=options), config, arch)
        (text,) = folder.glob("*.ptx")
        self.programs = [encode(function) for function in parse(text.read_text()).values()]
        self._structures = [_structure(program) for program in self.programs]
        module = folder / "host.o"
        module.write_bytes(self.compiled.module)
        machine = library(Path(tempfile.gettempdir()))._name
        linked = _build([str(COMPILER), "-shared", str(module), machine], folder / "host.so")
        # The machine's functions of the CUDA runtime come before those of the DSL's library, which may be loaded.
        self._host = ctypes.CDLL(str(linked), mode=os.RTLD_NOW | os.RTLD_DEEPBIND)
        self._entry = getattr(self._host, _entry_name(module))
        self._library = ctypes.c_void_p()
        self.hazards: list[str] = []

    def run(self, arguments: ctypes.c_void_p, memory: Sequence[Memory], order: Order = IN_ORDER) -> None:
        """Call the host function, as tsmla_kernels.launch does; every kernel has run when this returns.

        Raises AssertionError, with the kernel's name, the instruction and its line in the PTX, for what would be an
        error or a hang on a GPU.
        """
        machine = Machine(self._structures, memory, order)
        for step in ("init", "load"):
            machine.check(getattr(self._host, f"{ENTRY_PREFIX}_cuda_{step}")(ctypes.byref(self._library)))
        self._entry(arguments)
        machine.check()
        self.hazards = machine.hazards


def _entry_name(module: Path) -> str:
    symbols = subprocess.run(["nm", str(module)], capture_output=True, text=True, check=True).stdout.split()
    return next(symbol for symbol in symbols if symbol.startswith(f"_mlir_{ENTRY_PREFIX}_cutlass_entry"))

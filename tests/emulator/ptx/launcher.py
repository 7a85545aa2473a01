"""The bridge on the machine: its calls on CPU tensors run the compiled kernels, host functions and PTX."""

from __future__ import annotations

import ctypes
import math
from typing import ClassVar

import pytest

from tests.emulator import launcher
from tests.emulator.ptx.machine import EmulatedKernel, Memory, Order
from tsmla_bridge.runtime import loaded_kernels
from tsmla_kernels.kernel import ITEMSIZE, Config, Kernel, Operand

HOPPER = "sm_90a"


class EmulatedLauncher(launcher.StandInLauncher):
    """A Launcher of a kernel that the machine runs.

    Attributes:
      compiled: the kernels that were compiled, by name, config and architecture; many launchers share one.
      arch: the architecture of the next launcher's kernel.
      order: of the next launch.
      hazards: of all launches.
    """

    compiled: ClassVar[dict[tuple[str, str, str], EmulatedKernel]] = {}
    arch: ClassVar[str] = HOPPER
    order: ClassVar[Order] = Order()
    hazards: ClassVar[list[str]] = []

    def __init__(self, gpu: launcher.Gpu, kernel: Kernel, config: Config) -> None:
        super().__init__(gpu, kernel, config)
        key = (kernel.name, kernel.config_json(config), self.arch)
        if key not in self.compiled:
            self.compiled[key] = EmulatedKernel(kernel, config, self.arch)
        self.emulated = self.compiled[key]

    def _run(self, arguments: ctypes.c_void_p, count: ctypes.c_size_t) -> int:
        pointers = (ctypes.c_int64 * count.value).from_address(arguments.value or 0)
        stream = ctypes.c_int64.from_address(pointers[0]).value
        tensors = {operand.name: self._operand(operand, pointers[1 + i]) for i, operand in enumerate(self.operands)}
        self.gpu.launches.append((stream, tensors))
        memory = [self._memory(operand, pointers[1 + i]) for i, operand in enumerate(self.operands)]
        written = {part.address for part in memory if part.writable}
        parts = [part for part in memory if part.size and (part.writable or part.address not in written)]
        self.emulated.run(arguments, parts, self.order)
        self.hazards.extend(f"{self.name}: {hazard}" for hazard in self.emulated.hazards)
        return 0

    def _memory(self, operand: Operand, pointer: int) -> Memory:
        address, sizes = (ctypes.c_int64 * 2).from_address(ctypes.c_int64.from_address(pointer).value)
        shape = tuple((ctypes.c_int64 * len(operand.shape)).from_address(sizes))
        return Memory(operand.name, address, math.prod(shape) * ITEMSIZE[operand.dtype], operand.output)


def install(monkeypatch: pytest.MonkeyPatch, arch: str = HOPPER) -> launcher.Gpu:
    """From here on CPU tensors are on a GPU of this architecture, for which the machine stands in. A kernel that runs
    on several architectures is chosen there as on Hopper, without being named."""
    gpu = launcher.install(monkeypatch)
    gpu.capability = (int(arch[3:-2]), int(arch[-2]))
    monkeypatch.setattr(loaded_kernels, "PROVEN", (arch,))
    monkeypatch.setattr(EmulatedLauncher, "arch", arch)
    monkeypatch.setattr(loaded_kernels, "_load", lambda kernel, config, index: EmulatedLauncher(gpu, kernel, config))
    monkeypatch.setattr(EmulatedLauncher, "hazards", [])
    return gpu

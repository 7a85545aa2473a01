"""Launches of compiled kernels on numpy arrays, by the machine."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.emulator.ptx.machine import EmulatedKernel, Memory, Order
from tsmla_kernels.kernel import Config, Kernel


@functools.cache
def emulated(kernel: Kernel, config: Config) -> EmulatedKernel:
    """The kernel for one config, compiled once."""
    return EmulatedKernel(kernel, config)


def launch(kernel: Kernel, config: Config, arrays: Mapping[str, np.ndarray], order: Order) -> EmulatedKernel:
    """Run the kernel on arrays by their operands' names, written in place; an alias is the same array. An array that
    the kernel does not have is left alone."""
    kept: list[Any] = [ctypes.c_int64(0)]  # the stream
    pointers, memory = [ctypes.addressof(kept[0])], []
    for operand in kernel.operands(config):
        array = arrays[operand.name]
        assert array.flags.c_contiguous and array.ctypes.data % operand.align == 0
        sizes = (ctypes.c_int64 * array.ndim)(*array.shape)
        descriptor = (ctypes.c_int64 * 2)(array.ctypes.data, ctypes.addressof(sizes))
        slot = ctypes.c_int64(ctypes.addressof(descriptor))
        kept += [sizes, descriptor, slot]
        pointers.append(ctypes.addressof(slot))
        memory.append(Memory(operand.name, array.ctypes.data, array.nbytes, operand.output))
    kept.append(ctypes.c_int64(0))  # the status
    pointers.append(ctypes.addressof(kept[-1]))
    written = {part.address for part in memory if part.writable}
    given = [part for part in memory if part.writable or part.address not in written]
    arguments = (ctypes.c_int64 * len(pointers))(*pointers)
    run = emulated(kernel, config)
    run.run(ctypes.cast(arguments, ctypes.c_void_p), given, order)
    return run

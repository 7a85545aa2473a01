"""Scales by value and in memory: what compiled code makes of two arrays' sizes and of a pointer, run on this CPU."""

from __future__ import annotations

import ctypes
import types

import pytest

cute = pytest.importorskip("cutlass.cute")

import cutlass  # noqa: E402
from cutlass import Float32, Int32  # noqa: E402
from cutlass.cute.runtime import make_ptr  # noqa: E402

from tsmla_kernels.sm100.config import scale_sizes  # noqa: E402
from tsmla_kernels.sm100.scalars import LoadedFloat32, float_of_sizes  # noqa: E402


@cute.jit
def show(high: Int32, low: Int32, factor: Float32) -> None:
    sized = [types.SimpleNamespace(shape=(size,)) for size in (high, low)]
    cute.printf("{}", float_of_sizes(*sized) * factor)


def test_sizes_become_the_scale_again(capfd: pytest.CaptureFixture[str]) -> None:
    scales = {0.1352337789: 1.0, -2.5: 1.0, 448.0: 1.0, 1e-30: 1e30, 3e38: 1e-38, 0.0: 1.0}
    for scale, factor in scales.items():
        high, low = scale_sizes(scale, 1.0)[:2]
        show(Int32(high), Int32(low), Float32(factor))
    printed = [float(line) for line in capfd.readouterr().out.split()]
    assert printed == pytest.approx([scale * factor for scale, factor in scales.items()], abs=1e-6)  # six digits of it


@cute.jit
def show_products(pointer: cute.Pointer, factor: Float32, times: Int32) -> None:
    loaded = LoadedFloat32(pointer) * 2.0
    loaded = loaded.__new_from_mlir_values__(cutlass.extract_mlir_values(loaded))  # as at a kernel's entry
    total = Float32(0.0)
    for _ in range(times):
        if factor > 0.0:
            total += factor * loaded + loaded
    cute.printf("{} {} {} {}", total, loaded * factor, loaded / factor, loaded <= factor)


def test_a_scale_in_memory_is_a_number_in_every_operation(capfd: pytest.CaptureFixture[str]) -> None:
    memory = ctypes.c_float(0.375)
    pointer = make_ptr(Float32, ctypes.addressof(memory), cute.AddressSpace.generic)
    show_products(pointer, Float32(4.0), Int32(3))
    memory.value = -8.0
    show_products(pointer, Float32(0.5), Int32(1))
    first, second = (line.split() for line in capfd.readouterr().out.splitlines())
    assert [float(x) for x in first[:3]] == [11.25, 3.0, 0.1875]
    assert [float(x) for x in second[:3]] == [-24.0, -8.0, -32.0]
    assert first[3] == second[3]

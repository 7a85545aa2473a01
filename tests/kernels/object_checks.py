"""Checks of every compiled Hopper kernel."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

from tsmla_kernels import object_cache
from tsmla_kernels.compile import CompiledObject
from tsmla_kernels.kernel import Config, Kernel
from tsmla_kernels.resources import resource_report

ARCH = "sm_90a"


def all_but_slow(names: Iterable[str], fast: Collection[str]) -> list[Any]:
    """Parameters of these names; those that are not fast are left to the runs of the slow tests."""
    return [pytest.param(name, marks=() if name in fast else pytest.mark.slow) for name in names]


def check_compiled(kernel: Kernel, config: Config, kernels: int) -> None:
    """The kernel's object for Hopper passes check_object."""
    check_object(object_cache.load_or_compile(kernel, config, ARCH), kernels)


def check_object(compiled: CompiledObject, kernels: int, registers: int = 255) -> None:
    """An object with this number of kernels of at most `registers` a thread, without spills, local memory or
    serialised WGMMA, and small enough to be part of every program that calls it."""
    report = resource_report(compiled)
    assert len(report.kernels) == kernels
    for kernel in report.kernels:
        assert kernel.stack_bytes == 0, f"{kernel.name}: {kernel.stack_bytes} bytes of local memory a thread"
        assert kernel.registers <= registers, f"{kernel.name}: {kernel.registers} registers a thread"
    assert report.serialised == ()
    assert "Used" in compiled.log and "registers" in compiled.log  # the assembler did speak
    assert " spill stores" not in compiled.log.replace(" 0 bytes spill stores", "")
    assert len(compiled.module) < 1 << 20

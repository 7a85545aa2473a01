"""Checks of every compiled Hopper kernel."""

from tsmla_kernels.compile import CompiledObject
from tsmla_kernels.resources import resource_report


def assert_stays_in_registers(compiled: CompiledObject, kernels: int) -> None:
    """An object with this number of kernels, without spills, local memory or serialised WGMMA."""
    report = resource_report(compiled)
    assert len(report.kernels) == kernels
    for kernel in report.kernels:
        assert kernel.stack_bytes == 0, f"{kernel.name}: {kernel.stack_bytes} bytes of local memory a thread"
        assert kernel.registers <= 255
    assert report.serialised == ()
    assert "Used" in compiled.log and "registers" in compiled.log  # the assembler did speak
    assert " spill stores" not in compiled.log.replace(" 0 bytes spill stores", "")


def assert_small_enough_to_embed(compiled: CompiledObject) -> None:
    # The object is part of every program that calls it.
    assert len(compiled.module) < 1 << 20

"""Scales by value: what the launcher's compiled host code makes of two arrays' sizes, run on this CPU."""

from __future__ import annotations

import types

import pytest

cute = pytest.importorskip("cutlass.cute")

from cutlass import Float32, Int32  # noqa: E402

from tsmla_kernels.sm100.choose import scale_sizes  # noqa: E402
from tsmla_kernels.sm100.scalars import float_of_sizes  # noqa: E402


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

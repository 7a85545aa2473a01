"""The objects as they are compiled for SM100, SM103 and SM107: nothing spilled, no warnings. Needs no GPU."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tsmla_kernels import object_cache
from tsmla_kernels.catalog import MLA_DECODE_SM100, MLA_PREFILL_SM100
from tsmla_kernels.compile import CompiledObject
from tsmla_kernels.resources import resource_report
from tsmla_kernels.sm100.config import ARCHS, DecodeConfig, PrefillConfig

pytest.importorskip("torch")
pytest.importorskip("tokenspeed_mla")

FP8 = "float8_e4m3fn"
DECODES = (
    DecodeConfig(FP8, 16, 4),  # one tile of 64 rows, on SM100
    DecodeConfig(FP8, 16, 1, page_size=32),
    DecodeConfig(FP8, 128, 1),
    DecodeConfig(FP8, 96, 4),  # packed across query tokens
    DecodeConfig(FP8, 48, 3, page_size=16),
    DecodeConfig(FP8, 8, 8, page_size=16),
    DecodeConfig(FP8, 128, 2, page_size=32),
    DecodeConfig("bfloat16", 16, 1),
    DecodeConfig("bfloat16", 128, 1),
    DecodeConfig("bfloat16", 128, 4, page_size=16),
    DecodeConfig("bfloat16", 96, 4),
    DecodeConfig("bfloat16", 16, 4, page_size=128),
    DecodeConfig("float16", 64, 2, page_size=32),
    DecodeConfig("float16", 128, 1),
)
PREFILLS = tuple(PrefillConfig(dtype, causal) for dtype in (FP8, "bfloat16") for causal in (True, False))
FAST = (
    (MLA_DECODE_SM100, DECODES[0], "sm_100a"),
    (MLA_PREFILL_SM100, PREFILLS[2], "sm_107a"),
)
"""Compiled in every run of the tests, each in some seconds; the others are slow tests."""

LISTED = tuple((MLA_DECODE_SM100, config, arch) for arch in ARCHS for config in DECODES) + tuple(
    (MLA_PREFILL_SM100, config, arch) for arch in ARCHS for config in PREFILLS
)
TRACED = tuple(
    (kernel, type(config)(**{**vars(config), "traced_scales": True}), arch) for kernel, config, arch in LISTED
)


def name(value: Any) -> str:
    return getattr(value, "name", None) or re.sub(r"\w+=", "", str(value))


# The DSL warns that loops of the package are slow to compile, which makes no difference to the object.
ADVICE = re.compile(r"DSLOptimizationWarning: This static loop has \d+ iterations, which may be very slow to compile")


def compiled(kernel: Any, config: Any, arch: str) -> tuple[CompiledObject, str]:
    found = object_cache.load_or_compile(kernel, config, arch)
    return found, ADVICE.sub("", " ".join(re.sub(r"\x1b\[[0-9;]*m", "", found.log).split()))


@pytest.mark.parametrize(
    ("kernel", "config", "arch"),
    [pytest.param(*each, marks=() if each in FAST else pytest.mark.slow) for each in LISTED + TRACED],
    ids=name,
)
def test_objects_have_no_spills_and_no_warnings(kernel: Any, config: Any, arch: str) -> None:
    found, said = compiled(kernel, config, arch)
    report = resource_report(found)
    # One object has the whole kernel, the split kernel and the merge of splits.
    assert len(report.kernels) == (3 if kernel is MLA_DECODE_SM100 else 1)
    assert [each.stack_bytes for each in report.kernels] == [0] * len(report.kernels)
    spilled = re.findall(r"(\d+) bytes spill stores", said)
    assert spilled == ["0"] * len(report.kernels)  # the assembler did report, for each kernel
    assert "warning" not in said.lower() and report.serialised == ()
    assert len(found.module) < 1 << 19  # it is part of every program that calls it


def test_operands_follow_the_launchers_order() -> None:
    import inspect

    from tsmla_kernels.sm100.mla_decode import MlaDecode
    from tsmla_kernels.sm100.mla_prefill import MlaPrefill

    for kernel, launcher, config in (
        (MLA_DECODE_SM100, MlaDecode, DECODES[0]),
        (MLA_PREFILL_SM100, MlaPrefill, PREFILLS[0]),
    ):
        operands = kernel.operands(config)
        inputs = [operand.name for operand in operands if not operand.output]
        assert list(inspect.signature(launcher.__call__).parameters)[2:-1] == inputs
        assert [operand.output for operand in operands] == sorted(operand.output for operand in operands)

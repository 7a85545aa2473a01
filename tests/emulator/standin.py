"""Kernels that compile in a fraction of a second and take operands as the real ones do, to test the code around them.

Imports no cutlass until a launcher is built, because the records below must cost nothing to import.
"""

import dataclasses
import os
from collections.abc import Mapping

from tsmla_kernels.catalog import MLA_DECODE
from tsmla_kernels.kernel import Kernel, Operand


@dataclasses.dataclass(frozen=True)
class ScaleConfig:
    """Rows of `width` floats times a factor. fault: "" or how the kernel is to be bad: "local_memory", "trace", or
    "end", which ends the process that compiles."""

    width: int
    fault: str = ""


def scale_operands(config: ScaleConfig) -> tuple[Operand, ...]:
    return (
        Operand("x", "float32", (None, config.width)),
        Operand("factor", "float32", (1,), align=4),
        Operand("out", "float32", (None, config.width), output=True, wide=True),
    )


def scale_reasons(options: Mapping[str, str]) -> list[str]:
    return []


def scale_config(options: Mapping[str, str]) -> ScaleConfig:
    return ScaleConfig(int(options["width"]), options.get("fault", ""))


SCALE = Kernel(
    name="scale",
    archs=("sm_90a",),
    launcher="tests.emulator.standin_kernels:Scale",
    config=ScaleConfig,
    operands=scale_operands,
    spec_from_options=dict,  # the options are the spec
    reasons=scale_reasons,
    config_for=scale_config,
    presets=(("narrow", (("width", "32"),)), ("wide", (("width", "64"),))),
)

DECODE = dataclasses.replace(MLA_DECODE, launcher="tests.emulator.standin_kernels:Decode")
"""mla_decode's operands, and a kernel that writes its results so that a GPU test could tell it from the real one."""


def count_builds(config: object) -> None:
    """Leave a mark for each compilation, in whatever process it happens."""
    if path := os.environ.get("STANDIN_BUILDS"):
        with open(path, "a") as file:
            file.write(f"{config}\n")

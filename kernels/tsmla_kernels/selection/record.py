"""selection_bits, for Hopper and newer architectures: its operands and its record."""

from __future__ import annotations

from tsmla_kernels.cache_ops.config import ARCHS
from tsmla_kernels.kernel import Kernel, Operand
from tsmla_kernels.options import selection_bits_spec
from tsmla_kernels.selection.config import SelectionBitsConfig, selection_bits_config, selection_bits_reasons


def selection_bits_operands(config: SelectionBitsConfig) -> tuple[Operand, ...]:
    """The operands: the positions [T, k]; lengths and starts [T], if `config` has them; and the words [T, W]."""
    each = [name for name in ("lengths", "starts") if getattr(config, name)]
    return (
        Operand("positions", "int32", (None, None), align=4),
        *(Operand(name, "int32", (None,), align=4) for name in each),
        Operand("selection", "int32", (None, None), True),
    )


SELECTION_BITS = Kernel(
    name="selection_bits",
    archs=ARCHS,
    launcher="tsmla_kernels.selection.kernel:SelectionBits",
    config=SelectionBitsConfig,
    operands=selection_bits_operands,
    spec_from_options=selection_bits_spec,
    reasons=selection_bits_reasons,
    config_for=selection_bits_config,
    presets=(("deepseek-v3.2", ()),),
)

"""block_scaled_matmul, grouped_block_scaled_matmul and quantize_blocks on Hopper: operands and records."""

from __future__ import annotations

import dataclasses

from tsmla_kernels.contract.products import PACKED
from tsmla_kernels.kernel import Kernel, Operand
from tsmla_kernels.options import grouped_product_spec, product_spec, quantize_blocks_spec
from tsmla_kernels.sm90.constants import FP8
from tsmla_kernels.sm90.products.config import (
    ProductConfig,
    QuantizeConfig,
    product_config,
    product_reasons,
    quantize_config,
    quantize_reasons,
)


def product_operands(config: ProductConfig) -> tuple[Operand, ...]:
    """The operands. All sizes are read at the launch. K is a multiple of 16 (packed: 128), N of 8 or, if gated, of
    256."""
    stack = (None,) if config.grouped else ()
    x_scales = () if config.wide else (Operand("x_scales", "float32", (None, None), align=4),)
    weight = config.x_dtype if config.plain else PACKED if config.packed else FP8
    of_weight = PACKED if config.packed else "float32"
    weight_scales = () if config.plain else (Operand("weight_scales", of_weight, (*stack, None, None), align=4),)
    offsets = (Operand("cu_rows", "int32", (None,), align=4),) if config.grouped else ()
    return (
        Operand("x", config.x_dtype, (None, None)),
        Operand("weight", weight, (*stack, None, None)),
        *x_scales,
        *weight_scales,
        *offsets,
        *((Operand("rows", "int32", (None,), align=4),) if config.picked else ()),
        Operand("out", config.out_dtype, (None, None), output=True),
        *((Operand("out_scales", "float32", (None, None), output=True, align=4),) if config.quantized else ()),
    )


BLOCK_SCALED_MATMUL = Kernel(
    name="block_scaled_matmul",
    archs=("sm_90a",),
    launcher="tsmla_kernels.sm90.products.kernel:BlockScaledMatmul",
    config=ProductConfig,
    operands=product_operands,
    spec_from_options=product_spec,
    reasons=product_reasons,
    config_for=product_config,
    presets=(),
)

GROUPED_BLOCK_SCALED_MATMUL = dataclasses.replace(
    BLOCK_SCALED_MATMUL, name="grouped_block_scaled_matmul", spec_from_options=grouped_product_spec
)


def quantize_operands(config: QuantizeConfig) -> tuple[Operand, ...]:
    """The operands. All sizes are read at the launch; K is a multiple of 8."""
    return (
        Operand("x", config.in_dtype, (None, None)),
        Operand("values", FP8, (None, None), output=True),
        Operand("scales", "float32", (None, None), output=True, align=4),
    )


QUANTIZE_BLOCKS = Kernel(
    name="quantize_blocks",
    archs=("sm_90a",),
    launcher="tsmla_kernels.sm90.products.quantize:QuantizeBlocks",
    config=QuantizeConfig,
    operands=quantize_operands,
    spec_from_options=quantize_blocks_spec,
    reasons=quantize_reasons,
    config_for=quantize_config,
    presets=(),
)

"""The kernels of the paged cache, for any architecture: their operands and their records."""

from __future__ import annotations

from functools import partial

from tsmla_kernels.cache_ops.config import (
    ARCHS,
    GatherConfig,
    RopeWriteConfig,
    WriteConfig,
    gather_config,
    gather_reasons,
    rope_write_config,
    rope_write_reasons,
    write_config,
    write_reasons,
)
from tsmla_kernels.kernel import Kernel, Operand
from tsmla_kernels.options import cache_gather_spec, cache_write_spec, config_of, rope_write_spec


def cache_write_operands(config: WriteConfig) -> tuple[Operand, ...]:
    """latent and k_rope may be wider than L and R: their first columns are what is read."""
    return (
        Operand("kv_cache", config.kv_dtype, (None, None, config.head_dim), wide=True),
        Operand("latent", config.in_dtype, (None, None)),
        Operand("k_rope", config.in_dtype, (None, None)),
        Operand("slot_mapping", "int32", (None,), align=4),
        Operand("kv_scale", "float32", (1,), align=4),
        Operand("new_kv_cache", config.kv_dtype, (None, None, config.head_dim), True, wide=True, alias="kv_cache"),
    )


def rope_write_operands(config: RopeWriteConfig) -> tuple[Operand, ...]:
    """N = T * H query rows. Rows of the inputs, cos and sin may be wider than L, R and R / 2, as those of
    cache_write_operands."""
    return (
        Operand("kv_cache", config.kv_dtype, (None, None, config.head_dim), wide=True),
        *(Operand(name, config.in_dtype, (None, None)) for name in ("q_nope", "q_rope", "latent", "k_rope")),
        Operand("slot_mapping", "int32", (None,), align=4),
        Operand("cos", "float32", (None, None)),
        Operand("sin", "float32", (None, None)),
        Operand("q_scale", "float32", (1,), align=4),
        Operand("kv_scale", "float32", (1,), align=4),
        Operand("q", config.q_dtype, (None, config.head_dim), output=True),
        Operand("new_kv_cache", config.kv_dtype, (None, None, config.head_dim), True, wide=True, alias="kv_cache"),
    )


def cache_gather_operands(config: GatherConfig) -> tuple[Operand, ...]:
    """Operands of gather_kv_cache, as its contract has them."""
    return (
        Operand("kv_cache", config.kv_dtype, (None, None, config.head_dim), wide=True),
        Operand("block_tables", "int32", (None, None), align=4),
        Operand("starts", "int32", (None,), align=4),
        Operand("lens", "int32", (None,), align=4),
        Operand("kv_scale", "float32", (1,), align=4),
        Operand("out", config.out_dtype, (None, config.head_dim), output=True),
    )


WRITE_KV_CACHE = Kernel(
    name="write_kv_cache",
    archs=ARCHS,
    launcher="tsmla_kernels.cache_ops.kernels:WriteKvCache",
    config=WriteConfig,
    operands=cache_write_operands,
    from_options=partial(config_of, cache_write_spec, write_reasons, write_config),
)

ROPE_WRITE_KV_CACHE = Kernel(
    name="rope_write_kv_cache",
    archs=ARCHS,
    launcher="tsmla_kernels.cache_ops.kernels:RopeWriteKvCache",
    config=RopeWriteConfig,
    operands=rope_write_operands,
    from_options=partial(config_of, rope_write_spec, rope_write_reasons, rope_write_config),
)

GATHER_KV_CACHE = Kernel(
    name="gather_kv_cache",
    archs=ARCHS,
    launcher="tsmla_kernels.cache_ops.kernels:GatherKvCache",
    config=GatherConfig,
    operands=cache_gather_operands,
    from_options=partial(config_of, cache_gather_spec, gather_reasons, gather_config),
)

"""The kernels of the paged cache, for Hopper and newer architectures: their operands and their records."""

from __future__ import annotations

from tsmla_kernels.cache_ops import config as cache_config
from tsmla_kernels.kernel import ITEMSIZE, Kernel, Operand
from tsmla_kernels.options import cache_gather_spec, cache_write_spec, rope_write_spec


def cache_write_operands(config: cache_config.WriteConfig) -> tuple[Operand, ...]:
    """The operands. Rows of latent and k_rope may be wider than L and R; only their first columns are read."""
    return (
        Operand("kv_cache", config.kv_dtype, (None, None, config.head_dim), wide=True),
        Operand("latent", config.in_dtype, (None, None)),
        Operand("k_rope", config.in_dtype, (None, None)),
        Operand("slot_mapping", config.slot_dtype, (None,), align=ITEMSIZE[config.slot_dtype]),
        Operand("kv_scale", "float32", (1,), align=4),
        Operand("new_kv_cache", config.kv_dtype, (None, None, config.head_dim), True, wide=True, alias="kv_cache"),
    )


def rope_write_operands(config: cache_config.RopeWriteConfig) -> tuple[Operand, ...]:
    """The operands, for N = T * H query rows. Rows of the inputs, cos and sin may be wider than L, R and R / 2, as in
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


def cache_gather_operands(config: cache_config.GatherConfig) -> tuple[Operand, ...]:
    """The operands, as in the contract of gather_kv_cache."""
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
    archs=cache_config.ARCHS,
    launcher="tsmla_kernels.cache_ops.kernels:WriteKvCache",
    config=cache_config.WriteConfig,
    operands=cache_write_operands,
    spec_from_options=cache_write_spec,
    reasons=cache_config.write_reasons,
    config_for=cache_config.write_config,
)

ROPE_WRITE_KV_CACHE = Kernel(
    name="rope_write_kv_cache",
    archs=cache_config.ARCHS,
    launcher="tsmla_kernels.cache_ops.kernels:RopeWriteKvCache",
    config=cache_config.RopeWriteConfig,
    operands=rope_write_operands,
    spec_from_options=rope_write_spec,
    reasons=cache_config.rope_write_reasons,
    config_for=cache_config.rope_write_config,
)

GATHER_KV_CACHE = Kernel(
    name="gather_kv_cache",
    archs=cache_config.ARCHS,
    launcher="tsmla_kernels.cache_ops.kernels:GatherKvCache",
    config=cache_config.GatherConfig,
    operands=cache_gather_operands,
    spec_from_options=cache_gather_spec,
    reasons=cache_config.gather_reasons,
    config_for=cache_config.gather_config,
)

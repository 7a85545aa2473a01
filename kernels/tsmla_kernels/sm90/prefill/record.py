"""mla_prefill and mla_prefill_kv on Hopper: their operands and their record."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from tsmla_kernels.contract import PrefillSpec, attention_out_dtype
from tsmla_kernels.kernel import Kernel, Operand
from tsmla_kernels.options import config_of, flag, prefill_spec
from tsmla_kernels.sm90.prefill import config as sm90_prefill

SHARED_ROPE_DIM = 64
"""R of the objects for mla_prefill_kv that `tsmla compile` makes."""


def mla_prefill_operands(config: sm90_prefill.PrefillConfig) -> tuple[Operand, ...]:
    """q, k and v as mla_prefill takes them, or kv and k_rope as mla_prefill_kv does; the number of heads is read at the
    launch."""
    workspaces = sm90_prefill.prefill_workspaces(1, 1)
    k_dim, v_dim, rope_dim = config.qk_head_dim, config.v_head_dim, config.rope_dim
    keys = (Operand("k", config.dtype, (None, None, k_dim)), Operand("v", config.dtype, (None, None, v_dim)))
    if rope_dim:
        kv = Operand("kv", config.dtype, (None, None, k_dim - rope_dim + v_dim))
        keys = (kv, Operand("k_rope", config.dtype, (None, rope_dim)))
    return (
        Operand("q", config.dtype, (None, None, k_dim)),
        *keys,
        Operand("cu_seqlens_q", "int32", (None,), align=4),
        Operand("cu_seqlens_kv", "int32", (None,), align=4),
        Operand("scales", "float32", (2,), align=4),
        Operand("out", attention_out_dtype(config.dtype), (None, None, v_dim), output=True),
        Operand("lse", "float32", (None, None), output=True, align=4),
        *(Operand(name, dtype, (None, *shape[1:]), output=True) for name, (shape, dtype) in workspaces.items()),
    )


def mla_prefill_config(options: Mapping[str, str]) -> sm90_prefill.PrefillConfig:
    """The config of options on the command line; shared_rope=true is for mla_prefill_kv."""
    if not flag(options, "shared_rope"):
        return config_of(prefill_spec, sm90_prefill.prefill_reasons, sm90_prefill.prefill_config, options)

    def reasons(spec: PrefillSpec) -> list[str]:
        return sm90_prefill.prefill_reasons(spec) + sm90_prefill.shared_rope_reasons(spec, SHARED_ROPE_DIM)

    return config_of(prefill_spec, reasons, partial(sm90_prefill.prefill_config, rope_dim=SHARED_ROPE_DIM), options)


MLA_PREFILL = Kernel(
    name="mla_prefill",
    archs=("sm_90a",),
    launcher="tsmla_kernels.sm90.prefill.kernel:MlaPrefill",
    config=sm90_prefill.PrefillConfig,
    operands=mla_prefill_operands,
    from_options=mla_prefill_config,
)

"""merge_attention_states, for Hopper and newer architectures: its operands and its record."""

from __future__ import annotations

from tsmla_kernels.cache_ops.config import ARCHS
from tsmla_kernels.kernel import Kernel, Operand
from tsmla_kernels.merge.config import MergeConfig, merge_config, merge_reasons
from tsmla_kernels.options import merge_spec


def merge_operands(config: MergeConfig) -> tuple[Operand, ...]:
    """The operands. Rows of the partial results may be wider than L; only their first columns are read. The result may
    be written over the first partial result, if the caller no longer needs it."""
    parts = range(config.parts)
    return (
        *(Operand(f"out_{i}", config.dtype, (None, None)) for i in parts),
        *(Operand(f"lse_{i}", "float32", (None,), align=4) for i in parts),
        Operand("out", config.dtype, (None, config.head_dim), True, alias="out_0"),
        Operand("lse", "float32", (None,), True, align=4, alias="lse_0"),
    )


MERGE_ATTENTION_STATES = Kernel(
    name="merge_attention_states",
    archs=ARCHS,
    launcher="tsmla_kernels.merge.kernel:MergeAttentionStates",
    config=MergeConfig,
    operands=merge_operands,
    spec_from_options=merge_spec,
    reasons=merge_reasons,
    config_for=merge_config,
)

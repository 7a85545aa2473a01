"""mla_decode on Hopper: its operands and its record."""

from __future__ import annotations

from tsmla_kernels.kernel import Kernel, Operand
from tsmla_kernels.options import decode_spec
from tsmla_kernels.sm90.decode.config import DecodeConfig, decode_config, decode_reasons, workspace_shapes


def mla_decode_operands(config: DecodeConfig) -> tuple[Operand, ...]:
    """The operands, for N = T * H query rows; the workspaces are those of config.workspace_shapes. q_rope [N, W] has
    the rope columns first. The kernel reads no other columns. So W need only be the distance from one row to the next,
    and the memory may end with the last row's rope columns. If heads_first, q is [H, T, L].
    """
    head_dim = config.latent_dim + config.rope_dim
    # The workspaces' static sizes don't depend on the number of multiprocessors, the batch or the table.
    workspaces = workspace_shapes(config, 1, 1, 1)
    q_rope = (Operand("q_rope", config.dtype, (None, None)),) if config.split_q else ()
    visible_lens = (Operand("visible_lens", "int32", (None,), align=4),) if config.visible_lens else ()
    q_shape = (config.num_heads, None, config.q_dim) if config.heads_first else (None, config.q_dim)
    return (
        Operand("q", config.dtype, q_shape),
        *q_rope,
        Operand("kv_cache", config.cache_dtype, (None, config.page_size, head_dim), wide=True),
        Operand("block_tables", "int32", (None, None), align=4),
        Operand("seq_lens", "int32", (None,), align=4),
        Operand("cu_seqlens_q", "int32", (None,), align=4),
        *visible_lens,
        Operand("scales", "float32", (2,), align=4),
        Operand("out", config.out_dtype, (None, config.latent_dim), output=True),
        Operand("lse", "float32", (None,), output=True, align=4),  # XLA may put lse into the middle of another array
        *(
            Operand(name, dtype, (None, *shape[1:]), output=True, wide=True)
            for name, (shape, dtype) in workspaces.items()
        ),
    )


MLA_DECODE = Kernel(
    name="mla_decode",
    archs=("sm_90a",),
    launcher="tsmla_kernels.sm90.decode.kernel:MlaDecode",
    config=DecodeConfig,
    operands=mla_decode_operands,
    spec_from_options=decode_spec,
    reasons=decode_reasons,
    config_for=decode_config,
)

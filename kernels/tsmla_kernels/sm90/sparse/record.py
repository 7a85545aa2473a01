"""sparse_mla on Hopper: its operands and its record."""

from __future__ import annotations

from tsmla_kernels.contract.layouts import V32_PACKED
from tsmla_kernels.kernel import V32_MODEL, Kernel, Operand
from tsmla_kernels.options import sparse_mla_spec
from tsmla_kernels.sm90.sparse.config import (
    NUM_SCALES,
    SparseConfig,
    sparse_config,
    sparse_reasons,
    workspace_shapes,
)


def sparse_mla_operands(config: SparseConfig) -> tuple[Operand, ...]:
    """The operands, for N = T * H query rows; the workspaces are those of config.workspace_shapes.

    A cache is the array of the call: [P, span, 656] of V3.2 rows, [P, page_bytes] of V4 pages, or a plain [P, span, D].
    `scales` are softmax_scale * q_scale, kv_scale and compressed_kv_scale; a scale that a call does not have is 1.
    """
    rows: tuple[int | None, ...] = {
        "v32": (None, None, V32_PACKED.row_bytes),
        "v4": (None, None),
        "plain": (None, None, config.head_dim),
    }[config.layout]
    names = ("kv_cache", "compressed_kv_cache") if config.two_caches else ("kv_cache",)
    lengths = (Operand("lengths", "int32", (None,), align=4),) if config.lengths else ()
    sinks = (Operand("sinks", "float32", (config.num_heads,), align=4),) if config.sinks else ()
    # The workspaces' static sizes don't depend on the number of multiprocessors, the tokens or the columns.
    workspaces = workspace_shapes(config, 1, 1, 1)
    return (
        Operand("q", config.dtype, (None, config.head_dim)),
        *(Operand(name, config.kv_dtype, rows, wide=True) for name in names),
        Operand("indices", "int32", (None, None), align=4, wide=True),
        *lengths,
        *sinks,
        Operand("scales", "float32", (NUM_SCALES,), align=4),
        Operand("out", config.shape.out_dtype, (None, config.shape.latent_dim), output=True),
        Operand("lse", "float32", (None,), output=True, align=4),  # XLA may put lse into the middle of another array
        *(
            Operand(name, dtype, (None, *shape[1:]), output=True, wide=True)
            for name, (shape, dtype) in workspaces.items()
        ),
    )


SPARSE_MLA = Kernel(
    name="sparse_mla",
    archs=("sm_90a",),
    launcher="tsmla_kernels.sm90.sparse.kernel:SparseMla",
    config=SparseConfig,
    operands=sparse_mla_operands,
    spec_from_options=sparse_mla_spec,
    reasons=sparse_reasons,
    config_for=sparse_config,
    flags=("lengths", "sinks"),
    presets=((V32_MODEL, (("num_heads", "128"), ("layout", "v32"))),),
)

"""The gradient of sparse_mla on Hopper: its operands and its record."""

from __future__ import annotations

from tsmla_kernels.kernel import V32_MODEL, Kernel, Operand
from tsmla_kernels.options import sparse_gradient_spec
from tsmla_kernels.sm90.sparse_backward.config import (
    LATENT_DIM,
    NUM_SCALES,
    SparseBackwardConfig,
    backward_workspaces,
    sparse_backward_config,
    sparse_backward_reasons,
)


def sparse_backward_operands(config: SparseBackwardConfig) -> tuple[Operand, ...]:
    """The operands of sparse_mla over plain caches [P, span, D], its results and their cotangents, the gradients of q
    and of the caches, `sink_terms` (if there are sinks), and the workspaces of `backward_workspaces`.

    sink_terms [T, H] are the tokens' shares of the gradient of the sinks, which is their sum over T.
    """
    names = ("kv_cache", "compressed_kv_cache") if config.two_caches else ("kv_cache",)
    rows, row_terms = (None, None, config.head_dim), (None, None)
    lengths = (Operand("lengths", "int32", (None,), align=4),) if config.lengths else ()
    sinks = (Operand("sinks", "float32", (None,), align=4),) if config.sinks else ()
    sink_terms = (Operand("sink_terms", "float32", row_terms, output=True, align=4),) if config.sinks else ()
    workspaces = backward_workspaces(config, 1, 1, 1, 1)
    return (
        Operand("q", config.dtype, rows),
        *(Operand(name, config.dtype, rows, wide=True) for name in names),
        Operand("indices", "int32", (None, None), align=4, wide=True),
        *lengths,
        *sinks,
        Operand("scales", "float32", (NUM_SCALES,), align=4),
        Operand("out", config.dtype, (None, None, LATENT_DIM)),
        Operand("lse", "float32", row_terms, align=4),
        Operand("d_out", config.dtype, (None, None, LATENT_DIM)),
        Operand("d_lse", "float32", row_terms, align=4),
        Operand("d_q", config.dtype, rows, output=True),
        *(Operand(f"d_{name}", config.dtype, rows, output=True, wide=True) for name in names),
        *sink_terms,
        Operand("kv_sum", workspaces["kv_sum"][1], (None, config.head_dim), output=True, wide=True),
        Operand("row_terms", workspaces["row_terms"][1], (3, None), output=True),
        *(
            Operand(name, dtype, _SHAPES.get(name, (None,)), output=True)
            for name, (_, dtype) in list(workspaces.items())[2:]
        ),
    )


_SHAPES: dict[str, tuple[int | None, ...]] = {
    "kv_carry": (None, None),
    "row_weights": (2, None),
    "union_slots": (None, None),
    "union_bits": (None, None),
}
"""The shapes of workspaces with two axes, except kv_sum and row_terms."""


SPARSE_MLA_BACKWARD = Kernel(
    name="sparse_mla_backward",
    archs=("sm_90a",),
    launcher="tsmla_kernels.sm90.sparse_backward.kernel:SparseMlaBackward",
    config=SparseBackwardConfig,
    operands=sparse_backward_operands,
    spec_from_options=sparse_gradient_spec,
    reasons=sparse_backward_reasons,
    config_for=sparse_backward_config,
    flags=("lengths", "sinks"),
    presets=((V32_MODEL, (("num_heads", "128"),)),),
)

"""sparse_mla on Hopper: the operands and records of its two kernels, and which of them serves a call."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tsmla_kernels.contract import not_runnable
from tsmla_kernels.contract.layouts import V32_PACKED
from tsmla_kernels.kernel import V32_MODEL, Kernel, Operand
from tsmla_kernels.options import sparse_mla_spec
from tsmla_kernels.sm90.sparse.config import (
    NUM_SCALES,
    SparseConfig,
    launches,
    sparse_config,
    workspace_shapes,
)
from tsmla_kernels.sm90.sparse.union_config import (
    UnionConfig,
    sparse_form,
    sparse_mla_reasons,
    union_config,
    union_reasons,
    union_workspaces,
)

if TYPE_CHECKING:
    from tsmla_kernels.contract.rules import Dim
    from tsmla_kernels.contract.sparse import SparseMLASpec


PER_COLUMN = ("union_slots", "union_bits")
"""Workspaces whose number of columns depends on the call."""


def sparse_mla_operands(config: SparseConfig | UnionConfig) -> tuple[Operand, ...]:
    """The operands, for N = T * H query rows. The workspaces are those of workspaces_of.

    A cache is passed as the call has it: [P, span, 656] of V3.2 rows, [P, page_bytes] of V4 pages, or plain [P, span,
    D]. `scales` are softmax_scale * q_scale, kv_scale and compressed_kv_scale; a scale that the call does not have is
    1. With split_q there is q_rope [N, W], which has the rope columns first, as in mla_decode; if heads_first, q is
    [H, T, L].
    """
    alone = config.alone if isinstance(config, UnionConfig) else config
    rows: tuple[int | None, ...] = {
        "v32": (None, None, V32_PACKED.row_bytes),
        "v4": (None, None),
        "plain": (None, None, config.head_dim),
    }[config.layout]
    names = ("kv_cache", "compressed_kv_cache") if config.two_caches else ("kv_cache",)
    lengths = (Operand("lengths", "int32", (None,), align=4),) if config.lengths else ()
    sinks = (Operand("sinks", "float32", (config.num_heads,), align=4),) if config.sinks else ()
    # The workspaces' static sizes don't depend on the number of multiprocessors, the tokens or the columns.
    workspaces = workspaces_of(config, 1, 1, 1)
    q_rope = (Operand("q_rope", config.dtype, (None, None)),) if alone.split_q else ()
    return (
        Operand("q", config.dtype, (config.num_heads, None, alone.q_dim) if alone.heads_first else (None, alone.q_dim)),
        *q_rope,
        *(Operand(name, config.kv_dtype, rows, wide=True) for name in names),
        Operand("indices", "int32", (None, None), align=4, wide=True),
        *lengths,
        *sinks,
        Operand("scales", "float32", (NUM_SCALES,), align=4),
        Operand("out", alone.shape.out_dtype, (None, alone.shape.latent_dim), output=True),
        Operand("lse", "float32", (None,), output=True, align=4),  # XLA may put lse into the middle of another array
        *((Operand("max_logits", "float32", (None,), output=True, align=4),) if config.max_logits else ()),
        *(
            Operand(name, dtype, (None, None) if name in PER_COLUMN else (None, *shape[1:]), output=True, wide=True)
            for name, (shape, dtype) in workspaces.items()
        ),
    )


def workspaces_of(
    config: SparseConfig | UnionConfig, num_sms: int, num_tokens: int, num_selected: int
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shapes and dtypes of the workspaces of a launch that serves `num_tokens` tokens, in the order of its operands."""
    find = union_workspaces if isinstance(config, UnionConfig) else workspace_shapes
    return find(config, num_sms, num_tokens, num_selected)  # type: ignore[arg-type]


SPARSE_MLA_UNION = Kernel(
    name="sparse_mla_union",
    archs=("sm_90a",),
    launcher="tsmla_kernels.sm90.sparse.union_kernel:SparseMlaUnion",
    config=UnionConfig,
    operands=sparse_mla_operands,
    spec_from_options=sparse_mla_spec,
    reasons=union_reasons,
    config_for=union_config,
    flags=("lengths", "sinks"),
    presets=(),  # SPARSE_MLA has them; its `instead` says which calls launch this kernel
)


def kernel_of(spec: SparseMLASpec) -> Kernel:
    """The kernel for the form that the call names, or else for the form that follows from the call's sizes."""
    return SPARSE_MLA_UNION if sparse_form(spec).name == "union" else SPARSE_MLA


SPARSE_MLA = Kernel(
    name="sparse_mla",
    archs=("sm_90a",),
    launcher="tsmla_kernels.sm90.sparse.kernel:SparseMla",
    config=SparseConfig,
    operands=sparse_mla_operands,
    spec_from_options=sparse_mla_spec,
    reasons=sparse_mla_reasons,
    config_for=sparse_config,
    flags=("lengths", "sinks"),
    presets=((V32_MODEL, (("num_heads", "128"), ("layout", "v32"))),),
    instead=kernel_of,
)


class Serving(NamedTuple):
    """The kernel that serves a call, and its configuration."""

    kernel: Kernel
    config: SparseConfig | UnionConfig

    def launches(self, num_tokens: Dim, num_selected: Dim) -> list[tuple[Dim, Dim]]:
        """For each launch that a call takes, the range [first, stop) of tokens that the launch serves."""
        if isinstance(self.config, UnionConfig):
            return [(0, num_tokens)]
        return launches(self.config, num_tokens, num_selected)


def serving(spec: SparseMLASpec, *, lengths: bool, sinks: bool) -> Serving:
    """The kernel that serves a call, and its configuration: see kernel_of.

    Raises:
      NotImplementedError: the form that the call names cannot serve it, for example on a device that has only a few of
        a larger call's heads.
    """
    kernel = kernel_of(spec)
    if reasons := kernel.reasons(spec):
        raise not_runnable("sparse_mla", "cute", reasons)
    return Serving(kernel, kernel.config_for(spec, lengths=lengths, sinks=sinks))

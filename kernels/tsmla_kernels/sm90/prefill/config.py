"""Which Hopper prefill kernel serves a call: its static configuration and its workspaces. Imports no cutlass.

A configuration does not depend on the numbers of heads, requests and tokens, so one compiled object serves all of them.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from tsmla_kernels.sm90.constants import FP8

if TYPE_CHECKING:
    from tsmla_kernels.contract import PrefillSpec
    from tsmla_kernels.contract.rules import Dim

GROUP_ROWS = 64  # query rows of one warpgroup: the M of its WGMMA
PLAN_WORDS = 8  # int32 words of one row of the plan
PROGRESS_WORDS = 2  # words of memory.Progress. `progress` has one word per CTA, so a grid has at least 2 CTAs
HEAD_DIMS = ((192, 128), (128, 128), (64, 64), (256, 256))
FP8_HEAD_DIMS = ((192, 128), (256, 256))
SELECTION_HEAD_DIMS = ((192, 128), (256, 256))
WIDE = 256  # values of this width leave room for fewer keys in a block


@dataclasses.dataclass(frozen=True)
class PrefillConfig:
    """The static choices of a compiled prefill. The numbers of heads, requests and tokens are dynamic.

    Attributes:
      dtype: the dtype of q, k, v and out: "bfloat16" or "float16"; or "float8_e4m3fn" with a bfloat16 out.
      qk_head_dim, v_head_dim: widths of q and k, and of v and out.
      rope_dim: 0 if k and v are separate arrays. Otherwise R: all heads share the last R columns of k, and the operands
        are kv [Tk, H, K - R + V] and k_rope [Tk, R].
      causal: whether query i of n sees, of m keys, only keys j <= i + m - n.
      groups: compute warpgroups, each with 64 query rows of a tile.
      block: keys of one pipeline stage.
      stages: the number of stages of K, and of V.
      wide_v: whether the operand v is [Tk, H, W], whose first V columns are the values.
      selection: whether a query row sees, of those keys, only the ones that its words of bits select.
      sinks: whether each head has a logit of its own that takes weight from the keys and has no value.
      max_logits: whether each row's greatest logit is a result.
    """

    dtype: str
    qk_head_dim: int = 192
    v_head_dim: int = 128
    rope_dim: int = 0
    causal: bool = True
    groups: int = 2
    block: int = 128
    stages: int = 2
    wide_v: bool = False
    selection: bool = False
    sinks: bool = False
    max_logits: bool = False

    @property
    def tile_rows(self) -> int:
        """How many query rows a tile has at most; a CTA handles one tile at a time."""
        return GROUP_ROWS * self.groups


def prefill_reasons(spec: PrefillSpec) -> list[str]:
    """Why the Hopper prefill kernel cannot run this call; empty if it can."""
    reasons = []
    if spec.q_dtype not in ("bfloat16", "float16", FP8):
        reasons.append(f"q.dtype is {spec.q_dtype}; the sm_90 prefill kernel takes bfloat16, float16 or {FP8}")
    head_dims = FP8_HEAD_DIMS if spec.q_dtype == FP8 else HEAD_DIMS
    if (spec.qk_head_dim, spec.v_head_dim) not in head_dims:
        legal = ", ".join(f"{k} and {v}" for k, v in head_dims)
        reasons.append(
            f"the head dims of k and v are {spec.qk_head_dim} and {spec.v_head_dim}; the sm_90 prefill kernel takes"
            f" {legal}{f' in {FP8}' if spec.q_dtype == FP8 else ''}"
        )
    elif spec.selection and (spec.qk_head_dim, spec.v_head_dim) not in SELECTION_HEAD_DIMS:
        legal = ", ".join(f"{k} and {v}" for k, v in SELECTION_HEAD_DIMS)
        reasons.append(
            f"the head dims of k and v are {spec.qk_head_dim} and {spec.v_head_dim} with a selection; the sm_90 prefill"
            f" kernel takes {legal} with one"
        )
    if spec.max_logits and spec.q_dtype == FP8:
        reasons.append(f"return_max_logits is True with {FP8}, whose running maximum in the sm_90 kernel isn't exact")
    return reasons


def shared_rope_reasons(spec: PrefillSpec, rope_dim: int) -> list[str]:
    """Why the kernel cannot read kv and k_rope directly, apart from the reasons against `spec`; empty if it can."""
    if spec.q_dtype == FP8:
        return [f"q.dtype is {FP8}; the sm_90 prefill kernel takes that only with k and v"]
    if rope_dim % 64 or not 0 < rope_dim < spec.qk_head_dim:
        return [f"the rope width is {rope_dim}; the sm_90 prefill kernel takes a multiple of 64 below k's head dim"]
    return []


def block_keys(spec: PrefillSpec) -> int:
    """How many keys a block has. If K and V have 256 columns, shared memory has room for two stages of 80 keys, or of
    96 keys in fp8, where a block has a multiple of 32. A selection has words of 32 keys, and a lane loads a power of
    two of them."""
    if spec.v_head_dim < WIDE:
        return 128
    if spec.selection:
        return 64
    return 96 if spec.q_dtype == FP8 else 80


def prefill_config(spec: PrefillSpec, rope_dim: int = 0, *, wide_v: bool = False) -> PrefillConfig:
    """The configuration that serves `spec`. For rope_dim and wide_v see PrefillConfig."""
    return PrefillConfig(
        dtype=spec.q_dtype,
        qk_head_dim=spec.qk_head_dim,
        v_head_dim=spec.v_head_dim,
        rope_dim=rope_dim,
        causal=spec.causal,
        groups=3 if spec.q_dtype == FP8 and spec.v_head_dim < WIDE else 2,
        block=block_keys(spec),
        wide_v=wide_v,
        selection=spec.selection,
        sinks=spec.sinks,
        max_logits=spec.max_logits,
    )


def prefill_workspaces(batch: Dim, num_sms: int = 132) -> dict[str, tuple[tuple[Dim, ...], str]]:
    """Shapes and dtypes of the kernel's workspaces, in the order of its operands.

    The plan has a row for each request, and two more rows, for the query rows before the first request and after the
    last. `progress` has one word per CTA: the launch takes the grid's size from the length of `progress`."""
    return {"plan": ((batch + 2, PLAN_WORDS), "int32"), "progress": ((max(num_sms, PROGRESS_WORDS),), "int32")}

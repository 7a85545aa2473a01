"""Which calls Hopper's kernel of prefill's gradient serves, its configuration and its workspaces. Imports no cutlass.

As in prefill's config.py, a configuration does not depend on the numbers of heads, requests and tokens, so one compiled
object serves all of them.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from tsmla_kernels.sm90.prefill.config import PROGRESS_WORDS

if TYPE_CHECKING:
    from tsmla_kernels.contract import PrefillSpec
    from tsmla_kernels.contract.rules import Dim

Q_ROWS = 64  # query rows of one step
STAGES = 2  # pipeline stages of Q and of dS; if wide, also of dO
ROPE_PARTIALS = 16  # deterministic: partial sums of the shared rope columns' gradient; head h adds to sum h % 16
BLOCK_ROWS = 8  # query rows of a block of dq's sums
SINK_TERMS = 4  # partial sums of a sink's gradient that a tile of queries makes
PLAN_WORDS = 8  # int32 words of one row of the plan
DTYPES = ("bfloat16", "float16")
HEAD_DIMS = ((192, 128), (256, 256))


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """The static choices of a compiled backward pass. Everything else is dynamic.

    Attributes:
      dtype: the dtype of q, k, v, out, their gradients and out's cotangent: "bfloat16" or "float16".
      qk_head_dim, v_head_dim: widths of q and k, and of v and out.
      rope_dim: 0 if k and v are separate arrays. Otherwise R: all heads share the last R columns of k, and the operands
        are kv [Tk, H, K - R + V] and k_rope [Tk, R].
      causal: whether query i of n sees, of m keys, only keys j <= i + m - n.
      deterministic: whether sums over key tiles are added in a fixed order, so that repeated calls give equal bits.
      selection: whether a query row sees, of those keys, only the ones that its words of bits select.
      sinks: whether heads have sinks, whose gradient is then a result, too.
    """

    dtype: str
    qk_head_dim: int = 192
    v_head_dim: int = 128
    rope_dim: int = 0
    causal: bool = True
    deterministic: bool = False
    selection: bool = False
    sinks: bool = False

    @property
    def wide(self) -> bool:
        """Whether the registers of two warpgroups have no room for dK and dV of 128 keys: WIDE.md says how the work is
        divided then."""
        return self.v_head_dim > 128

    @property
    def key_rows(self) -> int:
        """The keys of one tile: 64 for each of the two warpgroups of dK and dV, or if `wide` the same 64 for both."""
        return 64 if self.wide else 128


def backward_reasons(spec: PrefillSpec) -> list[str]:
    """Why the Hopper kernel cannot compute the gradient of this call; empty if it can."""
    reasons = []
    if spec.q_dtype not in DTYPES:
        reasons.append(f"q.dtype is {spec.q_dtype}; the sm_90 prefill gradient takes {' or '.join(DTYPES)}")
    if (spec.qk_head_dim, spec.v_head_dim) not in HEAD_DIMS:
        legal = ", ".join(f"{k} and {v}" for k, v in HEAD_DIMS)
        reasons.append(
            f"the head dims of k and v are {spec.qk_head_dim} and {spec.v_head_dim}; the sm_90 prefill gradient takes"
            f" {legal}"
        )
    return reasons


def backward_config(spec: PrefillSpec, rope_dim: int = 0) -> BackwardConfig:
    """The configuration that serves the gradient of `spec`. For rope_dim see BackwardConfig."""
    return BackwardConfig(
        dtype=spec.q_dtype,
        qk_head_dim=spec.qk_head_dim,
        v_head_dim=spec.v_head_dim,
        rope_dim=rope_dim,
        causal=spec.causal,
        deterministic=spec.deterministic,
        selection=spec.selection,
        sinks=spec.sinks,
    )


def backward_workspaces(
    config: BackwardConfig, batch: Dim, total_q_len: Dim, total_kv_len: Dim, num_heads: Dim, num_sms: int = 132
) -> dict[str, tuple[tuple[Dim, ...], str]]:
    """Shapes and dtypes of the kernel's workspaces, in the order of its operands.

    dq_sum: float32 sums of dq. A block has BLOCK_ROWS rows of one request and half of the columns, in the order of
      `sum_position` or, if the config is wide, of `wide_sum_position`.
    row_terms: for each head and tile of Q_ROWS queries of one request, -lse in base 2, then the cotangent of lse minus
      rowsum(dout * out). With sinks, of the lse of the keys and the sink together.
    turns: if deterministic, how many key tiles have been added to each half of the columns of a tile of dq. If wide,
      the first of a tile's two counters says how many warps of key tiles have added to all its columns.
    plan: a row for each request, and two for the keys that belong to no request.
    progress: one word per CTA, because the launch takes the grid's size from its length.
    sink_terms: only with sinks. For each head and tile of Q_ROWS queries, SINK_TERMS numbers whose sum is the tile's
      part of the sink's gradient.
    rope_sum, rope_turns: only if rope_dim > 0. Float32 sums of the gradient of k's shared columns; and, if
      deterministic, how many heads have been added to each half of a key tile's rows. If wide, the first of a tile's
      two counters says how many warps have added to all its rows.
    """
    tiles = total_q_len // Q_ROWS + batch
    blocks = total_q_len // BLOCK_ROWS + batch
    deterministic = config.deterministic
    shapes = {
        "dq_sum": ((num_heads, 2, blocks, BLOCK_ROWS * config.qk_head_dim // 2), "float32"),
        "row_terms": ((num_heads, tiles, 2, Q_ROWS), "float32"),
        "turns": ((num_heads if deterministic else 1, tiles if deterministic else 1, 2), "int32"),
        "plan": ((batch + 2, PLAN_WORDS), "int32"),
        "progress": ((max(num_sms, PROGRESS_WORDS),), "int32"),
    }
    if config.sinks:
        shapes["sink_terms"] = ((num_heads, tiles, SINK_TERMS), "float32")
    if config.rope_dim:
        partials = ROPE_PARTIALS if deterministic else 1
        key_tiles = total_kv_len // config.key_rows + batch if deterministic else 1
        shapes["rope_sum"] = ((partials, total_kv_len, config.rope_dim), "float32")
        shapes["rope_turns"] = ((partials, key_tiles, 2), "int32")
    return shapes

"""Which merge kernel serves a call: static configurations. Imports no cutlass.

Everything here is a pure function of dtypes, widths and the number of partial results, so one compiled object serves
every number of rows.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from tsmla_kernels.cache_ops.config import INPUTS, MAX_THREADS, Tiling, tiling

if TYPE_CHECKING:
    from tsmla_kernels.contract import MergeSpec

MAX_PARTS = 8  # partial results that a thread holds at once


@dataclasses.dataclass(frozen=True)
class MergeConfig:
    """The static facts that an object of merge_attention_states is compiled for.

    Attributes:
      dtype: the dtype of all outs; all lses are float32.
      head_dim: L. parts: N, the number of partial results.
      unroll: rows that a thread has in flight at once.
    """

    dtype: str
    head_dim: int
    parts: int = 2
    unroll: int = 2

    @property
    def tiling(self) -> Tiling:
        return tiling(self.head_dim, self.dtype)


def merge_reasons(spec: MergeSpec) -> list[str]:
    """Why the kernel cannot run this call; empty if it can."""
    reasons = []
    if spec.out_dtype not in INPUTS:
        reasons.append(f"outs' dtype is {spec.out_dtype}; the merge kernel takes {', '.join(INPUTS)}")
    if spec.lse_dtype != "float32":
        reasons.append(f"lses' dtype is {spec.lse_dtype}; the merge kernel takes float32")
    if spec.num_parts > MAX_PARTS:
        reasons.append(f"there are {spec.num_parts} parts; the merge kernel takes at most {MAX_PARTS}")
    if reasons:
        return reasons
    vector = tiling(1, spec.out_dtype).vector
    if not isinstance(spec.head_dim, int) or spec.head_dim % vector or not 0 < spec.head_dim <= MAX_THREADS * vector:
        legal = f"a multiple of {vector} up to {MAX_THREADS * vector}"
        reasons.append(f"v_head_dim (L) is {spec.head_dim}; in {spec.out_dtype} the merge kernel takes {legal}")
    return reasons


def merge_config(spec: MergeSpec) -> MergeConfig:
    """The configuration that serves `spec`."""
    assert isinstance(spec.head_dim, int)
    # Bytes in flight per thread: 64 for two parts, 16 per part for more.
    return MergeConfig(spec.out_dtype, spec.head_dim, spec.num_parts, unroll=2 if spec.num_parts <= 2 else 1)

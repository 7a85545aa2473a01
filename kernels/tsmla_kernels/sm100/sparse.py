"""Attention over selected rows on Blackwell by the kernel of the package nvidia-cudnn-frontend: rows of 16 bits.

The device code is the package's, in its form for 64 heads. A call with more heads has several rows of queries for each
token. A row without keys gets the lse +inf from the package's kernel.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass.cute as cute

from tsmla_kernels.sm100.packages import CUDNN, module_of
from tsmla_kernels.sm100.scalars import outputs_and_scales
from tsmla_kernels.sm100.sparse_config import SparseConfig


class SparseMla:
    """One compiled sparse_mla: `config` is static; the sizes of queries, rows and indices are dynamic.

    Operands of the launcher, in order, with Q rows of 64 heads each: q [Q, 64, D]; rows [N, D], whose first 512 columns
    are the values; indices [Q, K] i32, K a multiple of 64, -1 for no row; lengths [Q] i32; out [Q, 64, 512]; max_logits
    [Q, 64] f32; lse [Q, 64] f32 (natural logarithm); and the four of sm100.config.SCALE_OPERANDS, whose first two give
    the logits' scale.

    Raises ModuleNotFoundError if nvidia-cudnn-frontend isn't installed.
    """

    def __init__(self, config: SparseConfig) -> None:
        self.config = config
        path = "deepseek_sparse_attention.sparse_attention_forward.dsa_fwd_sm100_head64"
        kernel: Any = module_of(CUDNN, path).SparseAttentionForwardSm100Head64
        self.attend = kernel(head_dim=config.head_dim, indexer_topk=0)

    @cute.jit
    def __call__(
        self,
        stream: cuda.CUstream,
        q: cute.Tensor,
        rows: cute.Tensor,
        indices: cute.Tensor,
        lengths: cute.Tensor,
        *others: cute.Tensor,
    ):
        (out, max_logits, lse), (logit_scale, _) = outputs_and_scales(others, traced=False)
        self.attend(q, rows, indices, out, max_logits, lse, None, None, lengths, logit_scale, stream)

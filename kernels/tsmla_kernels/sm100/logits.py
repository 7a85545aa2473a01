"""The indexer's logits on Blackwell by the kernel of the package flashinfer-python: e4m3 queries and packed keys.

The device code is the package's. This launcher gives the package's host function the views that it expects. Each query
token is a request of its own, whose keys the kernel reads by blocks of SPLIT_KEYS.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Int32

from tsmla_kernels.sm100.logits_config import HEAD_DIM, KEY_BLOCK, ROW_BYTES, LogitsConfig
from tsmla_kernels.sm100.mla_decode import target_arch
from tsmla_kernels.sm100.packages import FLASHINFER, module_of


class IndexerLogits:
    """One compiled indexer_logits: `config` is static; T, P, M and the lengths are dynamic.

    Operands of the launcher, in order: q [T, Hi, 128] e4m3; weights [T, Hi] f32; k_cache [P, Z, 132] u8; block_tables
    [T, M] i32; seq_lens [T] i32; schedule [config.num_ctas + 1, 2] i32; logits [T, N] f32, where N is a multiple of
    SPLIT_KEYS and the columns behind a token's keys get any values.

    Raises ModuleNotFoundError if flashinfer-python isn't installed.
    """

    def __init__(self, config: LogitsConfig) -> None:
        self.config = config
        kernel: Any = module_of(FLASHINFER, "attn_scores.kernels.fp8_paged_mqa_logits").FP8MQALogitsKernel
        self.score = kernel(
            block_kv=KEY_BLOCK,
            phys_block_kv=config.page_size,
            num_heads=config.num_heads,
            head_dim=HEAD_DIM,
            next_n=1,
            num_sms=config.num_ctas,
            arch=target_arch(),
        )

    @cute.jit
    def __call__(
        self,
        stream: cuda.CUstream,
        q: cute.Tensor,
        weights: cute.Tensor,
        k_cache: cute.Tensor,
        block_tables: cute.Tensor,
        seq_lens: cute.Tensor,
        schedule: cute.Tensor,
        logits: cute.Tensor,
    ):
        tokens, heads = q.shape[0], self.config.num_heads
        page_bytes = self.config.page_size * ROW_BYTES
        pages = cute.make_tensor(
            k_cache.iterator, cute.make_layout((k_cache.shape[0], page_bytes), stride=(k_cache.stride[0], 1))
        )
        queries = cute.make_tensor(
            q.iterator, cute.make_layout((heads, HEAD_DIM, tokens), stride=(HEAD_DIM, 1, heads * HEAD_DIM))
        )
        by_head = cute.make_tensor(weights.iterator, cute.make_layout((heads, tokens), stride=(1, heads)))
        self.score(
            pages,
            queries,
            by_head,
            logits,
            block_tables,
            seq_lens,
            schedule,
            Int32(k_cache.shape[0]),
            Int32(tokens),
            stream,
        )

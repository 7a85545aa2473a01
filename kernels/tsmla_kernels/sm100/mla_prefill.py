"""Ragged prefill attention (192 wide keys, 128 wide values) on Blackwell by the package tokenspeed-mla: fp8 and bf16.

The device code is the package's, in the configuration that its own wrapper uses. The longest query's length decides the
grid. It is passed as the size of an operand, so that one object serves every length.
"""

from __future__ import annotations

import math

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from tsmla_kernels.sm100.config import QK_HEAD_DIM, V_HEAD_DIM, PrefillConfig
from tsmla_kernels.sm100.packages import TOKENSPEED, needed
from tsmla_kernels.sm100.scalars import outputs_and_scales

LOG2_E = math.log2(math.e)


class MlaPrefill:
    """One compiled prefill: `config` is static; the numbers of tokens, requests and heads, the lengths and the scales
    are dynamic.

    Operands of the launcher, in order: q [Tq, H, 192], k [Tk, H, 192], v [Tk, H, 128], cu_seqlens_q and cu_seqlens_kv
    [B + 1] i32; scales [2] f32 (the logits' and the output's), only if config.traced_scales; out [Tq, H, 128];
    lse [Tq, H] f32 (natural logarithm); longest_q int8 [max_q_len], of which only the size is read; and the four of
    config.SCALE_OPERANDS, only without config.traced_scales.

    Raises ModuleNotFoundError if tokenspeed-mla or torch isn't installed.
    """

    def __init__(self, config: PrefillConfig) -> None:
        self.config = config
        with needed(TOKENSPEED):
            from tokenspeed_mla.fmha import BlackwellFusedMultiHeadAttentionForward
            from tokenspeed_mla.fmha_helpers import MaskEnum

        self.attention = BlackwellFusedMultiHeadAttentionForward(
            qk_acc_dtype=Float32,
            pv_acc_dtype=Float32,
            mma_tiler=(128, 128),
            head_dim=(QK_HEAD_DIM, V_HEAD_DIM),
            is_persistent=False,
            mask_type=MaskEnum.WINDOW_MASK_INFERENCE if config.causal else MaskEnum.RESIDUAL_MASK,
            enable_ex2_emulation=False,
            enable_skip_correction=True,
        )

    @cute.jit
    def __call__(
        self,
        stream: cuda.CUstream,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        cu_seqlens_q: cute.Tensor,
        cu_seqlens_kv: cute.Tensor,
        *others: cute.Tensor,
    ):
        (out, lse, longest_q), (logit_scale, out_scale) = outputs_and_scales(others, self.config.traced_scales)
        heads = q.shape[1]
        sizes = (
            cu_seqlens_q.shape[0] - 1,
            longest_q.shape[0],
            q.shape[0],
            k.shape[0],
            heads,
            heads,
            Int32(QK_HEAD_DIM),
            Int32(V_HEAD_DIM),
        )
        self.attention(
            five_axes(q),
            five_axes(k),
            five_axes(v),
            five_axes(out),
            sizes,
            cu_seqlens_q,
            cu_seqlens_kv,
            lse,
            logit_scale * LOG2_E,
            logit_scale,
            out_scale,
            None,
            None,
            Int32(0) if cutlass.const_expr(self.config.causal) else None,
            None,
            None,
            stream,
            False,
        )


def five_axes(tensor: cute.Tensor) -> cute.Tensor:
    """A view of [T, H, D] as the package takes it: (1, T, heads of k, query heads for each of these, D)."""
    tokens, heads, width = tensor.shape
    return cute.make_tensor(tensor.iterator, cute.make_layout((1, tokens, heads, 1, width)))

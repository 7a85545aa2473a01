"""Absorbed MLA decode on Blackwell by the kernels of the package tokenspeed-mla: fp8, bf16 and f16.

The device code is the package's. This launcher gives the package's host function the views that it expects, reads the
number of splits from the workspace's shape, and launches one kernel or, if keys are split, two. So one object serves
every batch. `local_visible_lens` tells the package how many keys each query token sees. With this array the package
masks with -inf (without it, with a score of -1e6, which is not below every fp8 score), and a row that sees no key gets
out 0 and lse -inf, whatever the request's length.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cutlass_dsl.cutlass import CuTeDSL

from tsmla_kernels.sm100.config import (
    LATENT_DIM,
    ROPE_DIM,
    DecodeConfig,
    capability,
    query_tiles,
    reducer_splits,
)
from tsmla_kernels.sm100.packages import TOKENSPEED, needed
from tsmla_kernels.sm100.scalars import outputs_and_scales


class MlaDecode:
    """One compiled decode: `config` is static; B, P, M, the lengths and the scales are dynamic.

    Operands of the launcher, in order: q [B, S, H, 576]; kv_cache [P, Z, 576]; block_tables [B, M] i32 with M * Z a
    multiple of 128; seq_lens [B] i32; visible_lens [B, S] i32 (how many keys each query token sees, at most seq_lens);
    scales [2] f32 (the logits' and the output's), only if config.traced_scales; out [B, S, H, 512]; lse [B, S, H] f32
    (**base 2**); workspace int8 [splits, bytes] of config.workspace_shape; and the four of config.SCALE_OPERANDS, only
    without config.traced_scales.

    Raises ModuleNotFoundError if tokenspeed-mla isn't installed; bf16 and f16 need torch, too.
    """

    def __init__(self, config: DecodeConfig) -> None:
        self.config = config
        # A kernel object keeps values derived from its launch's arguments, so each of the two launches has
        # a kernel object of its own.
        self.whole, self.split = (attention(config, target_arch()) for _ in range(2))

    @cute.jit
    def __call__(
        self,
        stream: cuda.CUstream,
        q: cute.Tensor,
        kv_cache: cute.Tensor,
        block_tables: cute.Tensor,
        seq_lens: cute.Tensor,
        visible_lens: cute.Tensor,
        *others: cute.Tensor,
    ):
        config = self.config
        (out, lse, workspace), (logit_scale, out_scale) = outputs_and_scales(others, config.traced_scales)
        views = decode_views(q, kv_cache, out, lse, config)
        visible = cute.make_tensor(
            visible_lens.iterator, cute.make_layout(tuple(visible_lens.shape), stride=(config.max_q_len, 1))
        )
        # The fp8 class takes one more argument: lengths for context parallelism.
        lengths = (seq_lens, seq_lens) if cutlass.const_expr(config.fp8) else (seq_lens,)
        ends = (*lengths, None, logit_scale, out_scale, stream, False, visible)
        splits = workspace.shape[0]
        if splits == 1:
            self.whole(*views[:4], block_tables, *views[4:], None, Int32(1), *ends)
        else:
            flat = cute.make_tensor(workspace.iterator, cute.make_layout((splits * workspace.shape[1],)))
            self.split(*views[:4], block_tables, *views[4:], flat, splits, *ends)


def attention(config: DecodeConfig, arch: str) -> Any:
    """The package's kernel for `config`, with the options that the package's own wrapper would choose."""
    tiles = query_tiles(config, arch)
    options: dict[str, Any] = dict(
        compute_capability=capability(arch),
        acc_dtype=Float32,
        lse_dtype=Float32,
        mma_qk_tiler_mn=(tiles.rows, 128),
        mma_pv_tiler_mn=(tiles.rows, 256),
        max_active_clusters=1,  # used by the persistent schedule only, which is for fixed lengths
        page_size=config.page_size,
        is_persistent=False,
        is_var_seq=True,
        is_var_split_kv=False,
        fold_sq_factor=tiles.fold,
        is_causal=True,  # without effect: visible_lens decides
        num_heads=config.num_heads,
        seq_len_q=config.max_q_len,
        window_left=-1,
        pack_q=tiles.packed,
    )
    with needed(TOKENSPEED):
        if not config.fp8:
            from tokenspeed_mla.mla_decode_fp16 import BlackwellMultiHeadLatentAttentionForwardFP16

            return BlackwellMultiHeadLatentAttentionForwardFP16(skip_correction_threshold=0.0, **options)
        from tokenspeed_mla.mla_decode_fp8 import BlackwellMultiHeadLatentAttentionForwardFP8
    splits = reducer_splits(config, arch)
    return BlackwellMultiHeadLatentAttentionForwardFP8(
        skip_correction_threshold=8.0,
        reducer_max_splits=splits,
        # A merging thread holds its columns of every split, and would spill with 64 splits of a whole row.
        reducer_d_tiles=2 if splits > 32 else 1,
        partial_fp16=False,
        **options,
    )


def decode_views(q: Any, kv_cache: Any, out: Any, lse: Any, config: DecodeConfig) -> tuple[Any, ...]:
    """q_latent, q_rope, c_latent, c_rope, o and lse as the package's host function takes them.

    Strides that the config determines are constants, which saves registers. The sizes that the package computes its
    schedule and its workspace from must stay run-time values."""
    tokens, heads = config.max_q_len, config.num_heads
    latent_dim = cute.assume(Int32(LATENT_DIM), divby=LATENT_DIM)
    out_strides = (tokens * heads * LATENT_DIM, heads * LATENT_DIM, LATENT_DIM, 1)
    return (
        columns(q, 0, LATENT_DIM),
        columns(q, LATENT_DIM, ROPE_DIM),
        columns(kv_cache, 0, LATENT_DIM),
        columns(kv_cache, LATENT_DIM, ROPE_DIM),
        cute.make_tensor(out.iterator, cute.make_layout((*tuple(out.shape)[:3], latent_dim), stride=out_strides)),
        cute.make_tensor(lse.iterator, cute.make_layout(tuple(lse.shape), stride=(tokens * heads, heads, 1))),
    )


def columns(tensor: Any, start: int, count: int) -> Any:
    """tensor[..., start:start + count] as a view."""
    shape = (*tuple(tensor.shape)[:-1], count)
    return cute.make_tensor(tensor.iterator + start, cute.make_layout(shape, stride=tuple(tensor.stride)))


def target_arch() -> str:
    """The architecture that the DSL compiles for now."""
    return str(CuTeDSL._get_dsl().envar.arch)

"""Decode, prefill and its gradient by other projects, over torch tensors. Each function plans what can be planned
ahead, and returns a function without arguments that runs the kernel on the current stream.

Decode takes q [B, S, H, 576], cache [P, 64, 576], and table [B, M] and lens [B] int32. All masks are causal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.floors import LATENT, ROPE

Run = Callable[[], Any]


def flashmla(q: Any, cache: Any, table: Any, lens: Any, scale: float) -> Run:
    """FlashMLA's dense decode, 16 bits; out [B, S, H, 512] and lse [B, H, S]."""
    operator, pages = torch.ops._flashmla_C.dense_decode_fwd, cache.unsqueeze(2)
    *_, schedule, splits = operator(q, pages, LATENT, lens, table, scale, True, None, None, None)
    return lambda: operator(q, pages, LATENT, lens, table, scale, True, schedule, splits, None)[:2]


def flashmla_fp8(q: Any, cache: Any, table: Any, lens: Any, scale: float, scales: tuple[Any, Any]) -> Run:
    """FlashMLA's dense decode, q and cache e4m3, with their scales as tensors of one value; out
    [B, S, H, 512] bfloat16 and lse [B, H, S]."""
    library, pages = torch.ops._flashmla_extension_C, cache.unsqueeze(2)
    schedule, splits = library.get_mla_decoding_metadata_dense_fp8(lens, q.shape[1] * q.shape[2], 1)
    arguments = (q, pages, LATENT, lens, table, scale, True, schedule, splits, *scales)
    return lambda: tuple(library.fwd_kvcache_mla_fp8(*arguments))


def _fa3(q: Any, k: Any, v: Any, scale: float, *, longest: tuple[int, int], cu_q: Any, cu_k: Any = None,
         q_latent: Any = None, lens: Any = None, table: Any = None, schedule: Any = None) -> Run:  # fmt: skip
    """FlashAttention-3 as vLLM builds it: its operator takes all arguments by position."""
    new_keys, rotary, descales, window = (None,) * 2, (None,) * 3, (None,) * 3, (-1, -1)
    arguments = (
        q, k, v, *new_keys, q_latent, None, cu_q, cu_k, None, None, lens, *longest, table, None, None, *rotary,
        *descales, scale, True, *window, 0.0, True, schedule, 0, None, 0, None, 1, 0, None,
    )  # fmt: skip
    return lambda: torch.ops._vllm_fa3_C.fwd(*arguments)[:2]


def fa3(q: Any, cache: Any, table: Any, lens: Any, scale: float) -> Run:
    """FlashAttention-3's absorbed MLA, 16 bits, pages of any size; out [B * S, H, 512] and lse."""
    b, s, h, width = q.shape
    latent, rope = q.view(b * s, h, width).split((LATENT, ROPE), -1)
    offsets = torch.arange(0, b * s + 1, s, device=q.device, dtype=torch.int32)
    longest, pages = int(lens.max()), cache.unsqueeze(2)
    schedule = torch.ops._vllm_fa3_C.get_scheduler_metadata(
        b, s, longest, h, 1, ROPE, LATENT, q.dtype, lens, offsets, None, None, None, None, cache.shape[1], 0, True, -1,
        -1, False, 0, None, 0,
    )  # fmt: skip
    return _fa3(rope, pages[..., LATENT:], pages[..., :LATENT], scale, longest=(s, longest), cu_q=offsets,
                q_latent=latent, lens=lens, table=table, schedule=schedule)  # fmt: skip


def fa4(q: Any, cache: Any, table: Any, lens: Any, scale: float) -> Run:
    """FlashAttention-4's absorbed MLA for Hopper, of flash_attn.cute; out [B * S, H, 512] and lse."""
    from flash_attn.cute.interface import _flash_attn_fwd  # type: ignore[import-not-found]

    b, s, h, width = q.shape
    latent, rope = (x.contiguous() for x in q.view(b * s, h, width).split((LATENT, ROPE), -1))
    pages = cache.unsqueeze(2)
    options = {
        "cu_seqlens_q": torch.arange(0, b * s + 1, s, device=q.device, dtype=torch.int32), "seqused_k": lens,
        "max_seqlen_q": s, "max_seqlen_k": int(lens.max()), "page_table": table, "softmax_scale": scale,
        "causal": True, "num_splits": 0, "return_lse": True, "pack_gqa": True,
    }  # fmt: skip
    return lambda: _flash_attn_fwd(rope, pages[..., LATENT:], pages[..., :LATENT], qv=latent, **options)[:2]


# ---- prompts: q and k [T, H, 192], v [T, H, 128], or all with 256 columns; cu: cu_q and cu_kv, [B + 1] int32


def fa3_prefill(q: Any, k: Any, v: Any, cu: tuple[Any, Any], longest: tuple[int, int], scale: float) -> Run:
    """FlashAttention-3's attention of prompts; out and lse."""
    return _fa3(q, k, v, scale, longest=longest, cu_q=cu[0], cu_k=cu[1])


def fa4_prefill(q: Any, k: Any, v: Any, cu: tuple[Any, Any], longest: tuple[int, int], scale: float) -> Run:
    """FlashAttention-4's attention of prompts, for Hopper; out and lse."""
    from flash_attn.cute.interface import _flash_attn_fwd

    options = {"cu_seqlens_q": cu[0], "cu_seqlens_k": cu[1], "max_seqlen_q": longest[0], "max_seqlen_k": longest[1]}
    return lambda: _flash_attn_fwd(q, k, v, **options, softmax_scale=scale, causal=True)[:2]


def cudnn_prefill(q: Any, k: Any, v: Any, batch: int, scale: float) -> Run:
    """cuDNN's attention of prompts through torch, for requests of one length; out, and None for lse."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    heads_first = [x.view(batch, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v)]

    def run() -> tuple[Any, None]:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True, scale=scale)
        return out.transpose(1, 2).reshape(v.shape), None

    return run


# ---- the gradient: of one request [T, H, .], or by FlashAttention-4 of several


def cudnn_gradient(q: Any, k: Any, v: Any, d_out: Any, scale: float) -> Run:
    """cuDNN's backward pass of one request, by the operator of torch's autograd; the gradients of q, k and v."""
    forward = torch.ops.aten._scaled_dot_product_cudnn_attention
    backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    q, k, v, d_out = (x[None].transpose(1, 2) for x in (q, k, v, d_out))
    out, lse, cu_q, cu_k, longest_q, longest_k, *random, _ = forward(q, k, v, None, True, 0.0, True, scale=scale)
    given = (d_out, q, k, v, out, lse, *random, None, cu_q, cu_k, longest_q, longest_k, 0.0, True)
    return lambda: [x.transpose(1, 2)[0] for x in backward(*given, scale=scale)]


def fa4_gradient(inputs: tuple[Any, ...], saved: tuple[Any, Any, Any], cu: Any, longest: int, scale: float) -> Run:
    """FlashAttention-4's gradients of q, k and v, from out and lse [T, H] of our forward pass, and d_out."""
    from flash_attn.cute.interface import _flash_attn_bwd

    out, lse, d_out = saved
    by_head, options = lse.t().contiguous(), {"softmax_scale": scale, "causal": True, "deterministic": False}
    if len(cu) == 2:
        whole, given = [x[None] for x in inputs], (out[None], d_out[None], by_head[None])
        return lambda: [x[0] for x in _flash_attn_bwd(*whole, *given, **options)[:3]]
    options |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": longest, "max_seqlen_k": longest}
    return lambda: _flash_attn_bwd(*inputs, out, d_out, by_head, **options)[:3]

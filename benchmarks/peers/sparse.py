"""Sparse attention and the indexer of other projects, over torch tensors. Each function plans what can be planned
ahead, and returns a function without arguments; `padded` and `v4_rows` only prepare operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from benchmarks.floors import LATENT, PAGE
from benchmarks.peers import dense

Run = Callable[[], Any]
V4_ROW = 584  # bytes of a row of a V4 page, as FlashMLA counts them


def padded(x: Any, axis: int) -> Any:
    """Queries or sinks with heads of zeros added, up to 64 or 128 heads, as the engines pad them for FlashMLA."""
    heads = x.shape[axis]
    more = (64 if heads <= 64 else 128) - heads
    return torch.nn.functional.pad(x, (0, 0, 0, more) if axis == -2 else (0, more)) if more else x


def v4_rows(pages: Any) -> Any:
    """V4 pages [P, bytes] as FlashMLA takes them."""
    return torch.as_strided(pages, (len(pages), PAGE, 1, V4_ROW), (pages.stride(0), V4_ROW, V4_ROW, 1))


def _decode(namespace: str, q: Any, kv: Any, indices: Any, scale: float, sinks: Any = None, extra: Any = None,
            extra_indices: Any = None) -> Run:  # fmt: skip
    """FlashMLA's sparse decode. Its schedule is a kernel of its own, which an engine runs once a step."""
    operator = getattr(torch.ops, namespace).sparse_decode_fwd
    first = (q, kv, indices, None, sinks)
    rest = (extra, extra_indices, None, LATENT, scale, None)
    *_, schedule, splits = operator(*first, None, None, *rest)
    return lambda: operator(*first, schedule, splits, *rest)[:2]


NAMESPACES = {"flashmla": "_flashmla_C", "legacy": "flash_mla_legacy"}
"""The operators' namespaces of vLLM's build of FlashMLA, and of SGLang's frozen build of FlashMLA's Hopper kernels."""


def v32(name: str, q: Any, cache: Any, indices: Any, scale: float) -> Run:
    """FlashMLA's sparse decode of V3.2's rows. q [B, S, 64 or 128, 576]; cache uint8 [P, 64, 656]; indices [B, S, K], K
    a multiple of 64."""
    return _decode(NAMESPACES[name], q, cache.unsqueeze(2), indices, scale)


def v4(name: str, q: Any, caches: tuple[Any, Any], indices: tuple[Any, Any], scale: float, sinks: Any) -> Run:
    """FlashMLA's sparse decode of V4's pages. q [B, S, 64 or 128, 512]; caches and indices are pairs: of the window and
    of the compressed entries."""
    near, far = map(v4_rows, caches)
    return _decode(NAMESPACES[name], q, near, indices[0], scale, sinks, far, indices[1])


def package_decode(given: dict[str, Any]) -> Run:
    """sgl-flash-mla's sparse decode with flash_mla_with_kvcache's arguments, its schedule made beforehand."""
    operator = torch.ops.flash_mla_legacy.sparse_decode_fwd
    names = ("q", "k_cache", "indices", "topk_length", "attn_sink")
    extra = ("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length", "head_dim_v", "softmax_scale")
    first, rest = ([given.get(name) for name in each] for each in (names, (*extra, "kv_format")))
    *_, schedule, splits = operator(*first, None, None, *rest)
    return lambda: operator(*first, schedule, splits, *rest)[:2]


def package_dense(given: dict[str, Any]) -> Run:
    """sgl-flash-mla's dense decode with flash_mla_with_kvcache's arguments, its schedule made beforehand."""
    library = torch.ops.flash_mla_legacy
    names = ("q", "k_cache", "head_dim_v", "cache_seqlens", "block_table", "softmax_scale", "causal")
    arguments = [given[name] for name in names]
    if given["is_fp8_kvcache"]:
        rows = given["q"].shape[1] * given["q"].shape[2]
        schedule, splits = library.get_mla_decoding_metadata_dense_fp8(given["cache_seqlens"], rows, 1)
        scales = (given["descale_q"], given["descale_k"])
        return lambda: tuple(library.fwd_kvcache_mla_fp8(*arguments, schedule, splits, *scales))
    *_, schedule, splits = library.dense_decode_fwd(*arguments, None, None)
    return lambda: library.dense_decode_fwd(*arguments, schedule, splits)[:2]


def fa3(q: Any, rows: Any, indices: Any, scale: float, lengths: Any = None) -> Run:
    """FA3 over bf16 rows [N, 576]: to it each row is a page, and a token's slots [T, K] are its block table. lengths
    [T]: how many of its slots a token selects, if not all."""
    counts = lengths
    if lengths is None:
        counts = torch.full((len(q),), indices.shape[1], dtype=torch.int32, device=q.device)
    return dense.fa3(q[:, None], rows[:, None], indices, counts, scale)


def prefill(q: Any, rows: Any, indices: Any, scale: float, lengths: Any, sinks: Any) -> Run:
    """FlashMLA's sparse prefill of q [T, 64 or 128, D] over bf16 rows [N, D]; it returns out, maxima and lse."""
    arguments = (q, rows[:, None], indices[:, None], scale, LATENT, sinks, lengths, None)
    return lambda: torch.ops._flashmla_C.sparse_prefill_fwd(*arguments)


def widen(cache: Any, tokens: int) -> Run:
    """vLLM's copy of the rows of one request's pages, in order, in bf16; the function returns the copy."""
    table = torch.arange(len(cache), dtype=torch.int32, device=cache.device)[None]
    starts = torch.zeros(1, dtype=torch.int32, device=cache.device)
    out = torch.empty(tokens, 576, dtype=torch.bfloat16, device=cache.device)

    def run() -> Any:
        torch.ops._C_cache_ops.cp_gather_and_upconvert_fp8_kv_cache(cache, out, table, starts, 1, None)
        return out

    return run


# ---- the indexer


def deep_gemm_paged(q: Any, cache: Any, weights: Any, lens: Any, tables: Any, columns: int) -> Run:
    """Logits [B * S, columns] of q e4m3 [B, S, H, 128] over packed pages; lens [B, S]. More than two tokens a request
    go as requests of their own, as in vLLM on Hopper."""
    import deep_gemm  # type: ignore[import-not-found]

    tokens = q.shape[1]
    if tokens > 2:
        q, lens, tables = q.flatten(0, 1)[:, None], lens.flatten()[:, None], tables.repeat_interleave(tokens, 0)
    lens, pages = lens.contiguous(), cache.unsqueeze(2)
    schedule = deep_gemm.get_paged_mqa_logits_metadata(lens, PAGE, deep_gemm.get_num_sms())
    return lambda: deep_gemm.fp8_fp4_paged_mqa_logits(
        (q, None), pages, weights, lens, tables, schedule, columns, clean_logits=False
    )


def deep_gemm_prefill(q: Any, keys: tuple[Any, Any], weights: Any, ends: Any) -> Run:
    """Logits of a prompt's tokens over keys [N, 128] and their scales [N] in one piece; token t sees those below its
    end."""
    import deep_gemm

    starts = torch.zeros_like(ends)
    return lambda: deep_gemm.fp8_fp4_mqa_logits((q, None), keys, weights, starts, ends, clean_logits=False)


def cudnn_logits(q: Any, keys: tuple[Any, Any], weights: Any, first: int) -> Run:
    """cudnn-frontend's logits of q e4m3 [B, S, H, 128], weights [B * S, H], over keys [B, N, 128] and their scales
    [B, N], each request's in one piece; a request's token s sees the keys 0 to first + s. The function's first call
    compiles. The function also takes scales of q: here they are 1, because the weights include them."""
    from cudnn.deepseek_sparse_attention.indexer_forward.api import indexer_forward_wrapper

    values, scales = (x.unsqueeze(2) for x in keys)
    weights, q_scale = weights.view(q.shape[:3]), torch.ones(q.shape[:3], device=q.device)
    firsts = torch.full((len(q),), first, dtype=torch.int32, device=q.device)
    out = torch.empty(*q.shape[:2], values.shape[1], device=q.device)
    return lambda: indexer_forward_wrapper(
        q, values, weights, ratio=1, out=out, precision="fp8", q_scale=q_scale, k_scale=scales, q_causal_offsets=firsts
    )["scores"]


def cudnn_topk(logits: Any, lens: Any, k: int, ordered: bool) -> Run:
    """cudnn-frontend's positions of the k largest of each row, in any order, or ascending if `ordered`. The kernel is
    compiled here, before the function is returned."""
    from cudnn.deepseek_sparse_attention.indexer_top_k.api import IndexerTopK

    kernel = IndexerTopK(logits, lens, k, return_val=False, deterministic=ordered)
    kernel.check_support()
    kernel.compile()
    out = torch.full((len(logits), k), -1, dtype=torch.int32, device=logits.device)
    work = torch.empty(kernel.scratch_workspace_bytes(), dtype=torch.uint8, device=logits.device)
    return lambda: kernel.execute(logits, lens, out_indices=out, workspace=work)[0]


MOST_COOPERATIVE = 32  # the most rows that cooperative_topk takes
TOPK = {"vllm_cooperative": "vllm_c", "vllm_persistent": "vllm_c", "vllm_rows": "vllm_c", "sgl": "sgl",
        "cudnn": "cudnn_frontend", "cudnn_ordered": "cudnn_frontend"}  # fmt: skip
"""Kernels for the largest logits of each row, and the library of each."""


class Memory(NamedTuple):
    """The memory that a top-k writes to, its workspace, and the length of the longest row."""

    chosen: Any
    work: Any
    longest: int


def topk(name: str, logits: Any, lens: Any, k: int, memory: Memory | None = None) -> Run:
    """The positions of the k largest of each row by the kernel `name` of TOPK: int32 [T, k], in any order; the kernel
    "cudnn_ordered" gives them ascending.

    Raises:
      ValueError: the kernel takes fewer rows.
    """
    rows, columns = logits.shape
    if name.startswith("cudnn"):
        return cudnn_topk(logits, lens, k, name.endswith("ordered"))
    if memory is None:
        work = torch.zeros(1 << 20, dtype=torch.uint8, device=logits.device)
        memory = Memory(torch.full((rows, k), -1, dtype=torch.int32, device=logits.device), work, int(lens.max()))
    out, work, longest = memory
    if name == "vllm_cooperative":
        if rows > MOST_COOPERATIVE:
            raise ValueError(f"logits: got {rows} rows; legal: at most {MOST_COOPERATIVE}")
        call = torch.ops._C.cooperative_topk, (logits, lens, out, work, k, longest)
    elif name == "vllm_persistent":
        call = torch.ops._C.persistent_topk, (logits, lens, out, work, k, columns)
    elif name == "vllm_rows":
        ends = (torch.zeros_like(lens), lens)
        call = torch.ops._C.top_k_per_row_prefill, (logits, *ends, out, rows, *logits.stride(), k)
    else:
        call = torch.ops.sgl_kernel.fast_topk, (logits, out, lens, None)

    def run() -> Any:
        call[0](*call[1])
        return out

    return run


def cudnn_gradient(q: Any, kv: Any, indices: Any, saved: tuple[Any, Any, Any], scale: float) -> Run:
    """cudnn-frontend's gradients of q and kv [P, Z, D], from out, lse and the cotangent of out. The function's first
    call compiles. The function always takes sinks: here sinks of -inf, which have no weight."""
    from cudnn.deepseek_sparse_attention.sparse_attention_backward import sparse_attention_backward_wrapper

    out, lse, d_out = saved
    rows = kv.view(-1, kv.shape[-1])
    sinks = torch.full((q.shape[1],), -torch.inf, device=q.device)
    d_q, d_rows = torch.empty_like(q), torch.empty_like(rows)

    def run() -> tuple[Any, Any]:
        sparse_attention_backward_wrapper(
            q, rows, out, d_out, lse, sinks, indices, softmax_scale=scale, dq=d_q, dkv=d_rows
        )
        return d_q, d_rows.view(kv.shape)

    return run

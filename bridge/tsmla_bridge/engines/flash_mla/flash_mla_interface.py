"""flash_mla_with_kvcache and get_mla_metadata: absorbed attention over a paged latent cache, as package flash_mla
(github.com/deepseek-ai/FlashMLA) defines them."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from tsmla_bridge.ops import mla_decode, sparse_mla
from tsmla_bridge.runtime.tensors import TENSOR
from tsmla_kernels import contract
from tsmla_kernels.contract.rules import show

V32_ROW = 656  # bytes of a token in DeepSeek-V3.2's packed cache

_NAMES = {
    "latent_dim": "head_dim_v",
    "kv_cache": "k_cache",
    "block_tables": "block_table",
    "seq_lens": "cache_seqlens",
    "lengths": "topk_length",
    "sinks": "attn_sink",
}
_ARGUMENT = re.compile(r"^(lengths|sinks)(?=:)|\b(latent_dim|kv_cache|block_tables|seq_lens)\b")
"""An argument of this project's operations in an error's text. Two of the names are words, too."""


@dataclasses.dataclass
class FlashMLASchedMeta:
    """What get_mla_metadata returns. Empty: the kernels make their schedule on the device at every call."""


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """The metadata that flash_mla_with_kvcache takes. The arguments of all the package's versions are accepted, and
    ignored: one result serves any number of calls of any lengths."""
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: Any,
    num_splits: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the last S query tokens of each request over its latent cache.

    Args:
      q: [B, S, H, D], float16 or bfloat16. One with gaps between tokens is copied first; the cache never is.
      k_cache: [P, Z, 1, D] in q's dtype, or float8_e4m3fn of scale 1, which the package doesn't take.
      block_table: [B, M] int32, pages of each request in order. cache_seqlens: [B] int32; 0 is legal.
      head_dim_v: L, the leading columns that are values.
      tile_scheduler_metadata, num_splits: what get_mla_metadata returned; ignored.
      softmax_scale: factor of the logits, 1 / sqrt(D) by default.
      causal: query i of S sees keys j < cache_seqlens - (S - 1) + i, else all j < cache_seqlens.
      is_fp8_kvcache: whether k_cache is fp8.
      indices: [B, S, K] int32, the slots of k_cache that each query token sees, page * Z + offset, -1 for none; then
        k_cache has packed rows of DeepSeek-V3.2, 656 bytes a token, causal is False, and block_table, cache_seqlens are
        ignored. topk_length: [B] int32, how many of a request's K columns count. attn_sink: [H] float32, a logit a
        head that takes weight and has no value; lse is without it.
      extra_k_cache, extra_indices_in_kvcache, extra_topk_length: a second cache, DeepSeek-V4's; refused.

    Returns:
      out [B, S, H, L] in q's dtype and lse [B, H, S] float32, natural logarithm. Rows that see no key give 0 and +inf.

    Raises:
      ValueError, TypeError: an argument is not legal.
      NotImplementedError: two caches, packed rows of another model, or no kernel runs the call.
    """
    extra = {
        "extra_k_cache": extra_k_cache, "extra_indices_in_kvcache": extra_indices_in_kvcache,
        "extra_topk_length": extra_topk_length,
    }  # fmt: skip
    if given := [name for name, value in extra.items() if value is not None]:
        _refuse(f"flash_mla_with_kvcache: got {', '.join(given)}")
    optional = {
        "block_table": block_table, "cache_seqlens": cache_seqlens, "indices": indices, "topk_length": topk_length,
        "attn_sink": attn_sink,
    }  # fmt: skip
    present = {name: value for name, value in optional.items() if value is not None}
    for name, value in {"q": q, "k_cache": k_cache, **present}.items():
        if not isinstance(value, torch.Tensor):
            raise contract.not_an_array(name, value, TENSOR)
    if q.dim() != 4:
        raise ValueError(f"q: got shape {show(tuple(q.shape))}; legal: [B, S, H, D]")
    softmax_scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    if indices is not None:
        if causal or not is_fp8_kvcache:
            raise ValueError(
                f"causal, is_fp8_kvcache: got {causal}, {is_fp8_kvcache}; with indices they must be False and True"
            )
        return _sparse_decode(q, k_cache, indices, topk_length, attn_sink, head_dim_v, softmax_scale)
    if given := [name for name in ("attn_sink", "topk_length") if name in present]:
        raise ValueError(f"{', '.join(given)}: got tensors; they go with indices alone")
    if block_table is None or cache_seqlens is None:
        raise ValueError("block_table, cache_seqlens: got None; without indices both are needed")
    if k_cache.dim() != 4 or k_cache.shape[2] != 1:
        raise ValueError(f"k_cache: got shape {show(tuple(k_cache.shape))}; legal: [P, Z, 1, D]")
    if is_fp8_kvcache != (k_cache.dtype == torch.float8_e4m3fn):
        raise ValueError(f"is_fp8_kvcache: got {is_fp8_kvcache} for a cache of {k_cache.dtype}; they must agree")
    out, lse = _call(
        mla_decode.mla_decode,
        q.contiguous(),
        k_cache.select(2, 0),
        block_table,
        cache_seqlens,
        softmax_scale=softmax_scale,
        latent_dim=head_dim_v,
        causal=causal,
        return_lse=True,
    )
    return out, _as_the_packages(lse)


def _call(operation: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """operation(*arguments, **options), whose errors have the names of the package's arguments."""
    try:
        return operation(*arguments, **options)
    except (TypeError, ValueError, NotImplementedError) as error:
        said = _ARGUMENT.sub(lambda name: _NAMES[name[0]], str(error))
        kind = next(kind for kind in (TypeError, ValueError, NotImplementedError) if isinstance(error, kind))
        raise kind(said) from None


def _as_the_packages(lse: torch.Tensor) -> torch.Tensor:
    """lse [B, S, H] as [B, H, S], with +inf where no key is seen."""
    return lse.masked_fill(lse == -math.inf, math.inf).transpose(1, 2)


def _sparse_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    topk_length: torch.Tensor | None,
    attn_sink: torch.Tensor | None,
    head_dim_v: int,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The call with indices, each query token a row of sparse_mla."""
    if k_cache.dim() != 4 or k_cache.shape[2:] != (1, V32_ROW):
        _refuse(f"flash_mla_with_kvcache: got indices for a k_cache of shape {show(tuple(k_cache.shape))}")
    batch, q_len, heads, head_dim = q.shape
    if indices.dim() != 3 or indices.shape[:2] != (batch, q_len):
        raise ValueError(
            f"indices: got shape {show(tuple(indices.shape))}; legal: [B, S, K] = [{batch}, {q_len}, K], B and S from q"
        )
    if topk_length is not None and topk_length.shape != (batch,):
        raise ValueError(
            f"topk_length: got shape {show(tuple(topk_length.shape))}; legal: [B] = [{batch}], B from q"
        )
    lengths = None if topk_length is None else topk_length.repeat_interleave(q_len)
    out, lse = _call(
        sparse_mla.sparse_mla,
        q.reshape(batch * q_len, heads, head_dim),
        k_cache.select(2, 0).view(torch.uint8),
        indices.reshape(batch * q_len, indices.shape[2]),
        lengths,
        softmax_scale=softmax_scale,
        latent_dim=head_dim_v,
        sinks=attn_sink,
        return_lse=True,
    )
    return out.view(batch, q_len, heads, -1), _as_the_packages(lse.view(batch, q_len, heads))


def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    indexer_topk: int = 0,
) -> NoReturn:
    """Sparse prefill: raises NotImplementedError."""
    _refuse("flash_mla_sparse_fwd")


def _refuse(what: str) -> NoReturn:
    raise NotImplementedError(
        f"{what}: of sparse attention only decode over DeepSeek-V3.2's packed cache ([P, Z, 1, {V32_ROW}]) runs behind"
        " flash_mla's functions here; tsmla_bridge.sparse_mla takes V4's two caches"
    )

"""flash_mla_with_kvcache, its metadata and flash_mla_sparse_fwd: absorbed attention, as package flash_mla
(github.com/deepseek-ai/FlashMLA) and SGLang's build of it (sgl-flash-mla) define them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from tsmla_bridge.engines import naming
from tsmla_bridge.engines.flash_mla import selected
from tsmla_bridge.engines.flash_mla.selected import FAR, NEAR, Selection
from tsmla_bridge.ops import mla_decode
from tsmla_kernels.contract.rules import show


@dataclasses.dataclass
class FlashMLASchedMeta:
    """The first result of get_mla_metadata. It is empty: the kernels make their schedule on the device at every call.

    Attributes:
      tile_scheduler_metadata, num_splits: a schedule of get_mla_decoding_metadata, kept and never read.
    """

    tile_scheduler_metadata: torch.Tensor | None = None
    num_splits: torch.Tensor | None = None


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """The metadata that flash_mla_with_kvcache takes. One result serves any number of calls of any lengths. All
    arguments are ignored: versions of flash_mla differ in them."""
    return FlashMLASchedMeta(), None


def get_mla_decoding_metadata(
    seqlens_k: torch.Tensor,
    num_q_tokens_per_head_k: int,
    h_k: int,
    h_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
    use_legacy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A schedule as tensors [1, 8] and [B + 1] int32, which engines slice, and copy to where a CUDA graph reads it.

    The kernels make their own schedule on the device, so these hold zeros. seqlens_k [B] gives B and the device;
    all other arguments are ignored.
    """
    batch, device = seqlens_k.shape[0], seqlens_k.device
    return (
        torch.zeros((1, 8), dtype=torch.int32, device=device),
        torch.zeros(batch + 1, dtype=torch.int32, device=device),
    )


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
    is_fp8_kvcache: bool | None = None,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    enable_batch_invariant: bool = False,
    use_legacy: bool = False,
    kv_format: str | None = None,
    descale_q: torch.Tensor | None = None,
    descale_k: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the last S query tokens of each request over its latent cache.

    Args:
      q: [B, S, H, D], float16, bfloat16, or float8_e4m3fn over a dense cache of that dtype or V3.2's packed rows. A q
        that isn't contiguous is copied first; the cache is never copied.
      k_cache: [P, Z, 1, D] in q's dtype or float8_e4m3fn; with indices one of the packed layouts below.
      block_table: [B, M] int32, pages of each request in order. If it is the first columns of wider rows, cache_seqlens
        may count keys of the pages after them.
      cache_seqlens: [B] int32, keys of each request; 0 is legal.
      head_dim_v: L, the leading columns that are values.
      tile_scheduler_metadata, num_splits: what get_mla_metadata returned; ignored.
      softmax_scale: factor of the logits, 1 / sqrt(D) by default.
      causal: query i of S sees keys j < cache_seqlens - (S - 1) + i, else all j < cache_seqlens.
      is_fp8_kvcache: whether k_cache is fp8; None for what k_cache and indices say.
      indices: [B, S, K] int32, the slots of k_cache that each query token sees, page * Z + offset, -1 for none; then
        k_cache is [P, Z, 1, 656], DeepSeek-V3.2's packed rows, or [P, Z, 1, 584], V4's packed pages, each padded to a
        multiple of 576 bytes; causal is False, and block_table, cache_seqlens are ignored.
      topk_length: with indices, [B] int32, how many of a request's K columns count.
      attn_sink: with indices, [H] float32, one more logit for each head, which takes weight and has no value; lse does
        not count it.
      extra_k_cache, extra_indices_in_kvcache, extra_topk_length: a second cache of V4's pages, attended to beside a
        k_cache of V4's pages, with its own page size, indices and lengths.
      enable_batch_invariant: a request's rows are bitwise the same whatever else is in the batch.
      use_legacy: which of sgl-flash-mla's two sets of kernels; ignored.
      kv_format: with indices, None or "V32" for V3.2's rows of 656 bytes.
      descale_q, descale_k: without indices, float32 of one element: q and k_cache hold values / descale.

    Returns:
      out [B, S, H, L] in q's dtype, bfloat16 for float8_e4m3fn, and lse [B, H, S] float32, natural logarithm. Rows that
      see no key give 0 and +inf (-inf with indices, after `selected.read_no_lse`); merge_attention_states takes both as
      the lse of no key.

    Raises:
      ValueError, TypeError: an argument is not legal.
      NotImplementedError: no kernel runs the call; or with indices kv_format is neither None nor "V32" over V3.2's
        rows.
      RuntimeError: CUDA refused a launch, or a kernel would have to be loaded during a capture.
    """
    extra = dict(zip(FAR, (extra_k_cache, extra_indices_in_kvcache, extra_topk_length), strict=True))
    selecting = {"attn_sink": attn_sink, "topk_length": topk_length}
    descaling = {"descale_q": descale_q, "descale_k": descale_k}
    optional = {"block_table": block_table, "cache_seqlens": cache_seqlens, "indices": indices}
    optional |= selecting | extra | descaling
    present = naming.given_tensors({"q": q, "k_cache": k_cache}, optional)
    if q.dim() != 4:
        raise ValueError(f"q: got shape {show(tuple(q.shape))}; legal: [B, S, H, D]")
    softmax_scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    if is_fp8_kvcache is None:
        is_fp8_kvcache = indices is not None or k_cache.dtype == torch.float8_e4m3fn
    if indices is not None:
        if given := [name for name in descaling if name in present]:
            why = "packed rows hold their scales and q has none"
            raise ValueError(f"{', '.join(given)}: got tensors; with indices legal: None, as {why}")
        if causal or not is_fp8_kvcache:
            raise ValueError(
                f"causal, is_fp8_kvcache: got {causal}, {is_fp8_kvcache}; with indices they must be False and True"
            )
        near, far = Selection(NEAR, k_cache, indices, topk_length), None
        if extra_k_cache is not None and extra_indices_in_kvcache is not None:
            far = Selection(FAR, extra_k_cache, extra_indices_in_kvcache, extra_topk_length)
        elif given := [name for name in extra if name in present]:
            raise ValueError(
                f"{', '.join(given)}: got tensors; extra_k_cache and extra_indices_in_kvcache go together, "
                "extra_topk_length with both"
            )
        if kv_format is not None and (kv_format != "V32" or near.is_v4):
            held = "V4's rows" if near.is_v4 else "V3.2's rows"
            raise NotImplementedError(
                f"kv_format: got {kv_format!r} and {held}; legal: None, or 'V32' with V3.2's rows"
            )
        out, lse = selected.attend(
            q, near, far, head_dim_v=head_dim_v, softmax_scale=softmax_scale, attn_sink=attn_sink,
            batch_invariant=enable_batch_invariant,
        )  # fmt: skip
        return out, selected.lse_of_selected(lse).transpose(1, 2)
    if given := [name for name in selecting | extra if name in present]:
        raise ValueError(f"{', '.join(given)}: got tensors; they go only with indices")
    if kv_format is not None:
        raise ValueError(f"kv_format: got {kv_format!r}; without indices legal: None")
    if block_table is None or cache_seqlens is None:
        missing = [name for name in ("block_table", "cache_seqlens") if name not in present]
        raise ValueError(f"{', '.join(missing)}: got None; without indices legal: a tensor")
    if k_cache.dim() != 4 or k_cache.shape[2] != 1:
        raise ValueError(f"k_cache: got shape {show(tuple(k_cache.shape))}; legal: [P, Z, 1, D]")
    if is_fp8_kvcache != (k_cache.dtype == torch.float8_e4m3fn):
        raise ValueError(f"is_fp8_kvcache: got {is_fp8_kvcache} for a cache of {k_cache.dtype}; they must agree")
    out, lse = naming.call(
        mla_decode.mla_decode,
        naming.FLASH_MLA_DECODE,
        q.contiguous(),
        k_cache.select(2, 0),
        _whole_rows(block_table),
        cache_seqlens,
        softmax_scale=softmax_scale,
        latent_dim=head_dim_v,
        causal=causal,
        q_scale=_one("descale_q", descale_q),
        kv_scale=_one("descale_k", descale_k),
        batch_invariant=enable_batch_invariant,
        return_lse=True,
    )
    return out, selected.as_the_packages(lse).transpose(1, 2)


def _whole_rows(table: torch.Tensor) -> torch.Tensor:
    """A table widened to the full rows of the tensor that it was sliced from, as far as its memory goes.

    flash_mla's own kernels read a row as far as its request's keys go, whatever the table's width. SGLang relies on
    that: it captures its graphs with a slice of one column, all that the lengths of the capture need, of a buffer that
    it fills before each replay."""
    if table.dim() != 2 or table.stride(1) != 1 or not len(table):
        return table
    pitch, begin = table.stride(0), table.storage_offset()
    held = table.untyped_storage().nbytes() // table.element_size() - begin - (len(table) - 1) * pitch
    width = min(pitch, held)
    return table.as_strided((len(table), width), (pitch, 1)) if width > table.shape[1] else table


def _one(name: str, scale: torch.Tensor | None) -> torch.Tensor | None:
    """A float32 tensor of one element as a scalar, ValueError for any other; None for None."""
    if scale is None:
        return None
    if scale.numel() != 1 or scale.dtype != torch.float32:
        raise ValueError(
            f"{name}: got {scale.dtype} of shape {show(tuple(scale.shape))}; legal: float32 of one element, or None"
        )
    return scale.reshape(())


def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    indexer_topk: int = 0,
    *,
    use_legacy: bool = False,
    return_log2_lse: bool | None = None,
) -> tuple[torch.Tensor, None, torch.Tensor | None]:
    """Attention of each query token over the rows selected for it: a prompt's tokens, over keys that lie in order.

    Args:
      q: [s_q, h_q, d_qk] bfloat16 or float16, any number of heads; d_qk is 576 or 512.
      kv: [s_kv, 1, d_qk] in q's dtype, contiguous.
      indices: [s_q, 1, topk] int32, rows of kv; -1 or s_kv and more for none.
      sm_scale: factor of the logits.
      d_v: the leading columns that are values.
      attn_sink: [h_q] float32, one more logit for each head, which takes weight and has no value; lse does not count
        it.
      topk_length: [s_q] int32, how many columns of each row of indices count.
      indexer_topk, use_legacy: ignored.
      return_log2_lse: True for lse in base 2, False for none, None for the natural logarithm.

    Returns:
      out [s_q, h_q, d_v] in q's dtype; None in place of the package's max_logits, which cost time; lse
      [s_q, h_q] float32, or None. Rows that see no key give 0 and +inf (-inf after `selected.read_no_lse`);
      merge_attention_states takes both as the lse of no key.

    Raises:
      ValueError, TypeError: an argument is not legal.
      NotImplementedError: no kernel runs the call.
      RuntimeError: CUDA refused a launch, or a kernel would have to be loaded during a capture.
    """
    optional = {"attn_sink": attn_sink, "topk_length": topk_length}
    naming.given_tensors({"q": q, "kv": kv, "indices": indices}, optional)
    out, lse = selected.attend_rows(q, kv, indices, topk_length, d_v=d_v, sm_scale=sm_scale, attn_sink=attn_sink)
    if return_log2_lse is False:
        return out, None, None
    return out, None, selected.lse_of_selected(lse / math.log(2) if return_log2_lse else lse)

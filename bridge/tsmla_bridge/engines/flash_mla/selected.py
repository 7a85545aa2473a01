"""Attention over selected slots in flash_mla's layouts: what its functions ask of `sparse_mla`."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from tsmla_bridge.engines import naming
from tsmla_bridge.engines.flash_mla import joining, warming
from tsmla_bridge.runtime.tensors import dtype_name
from tsmla_kernels.contract.layouts import V4_PACKED, V32_PACKED
from tsmla_kernels.contract.rules import show

_COLUMN_MULTIPLE = 4
"""Indices that select from two caches have a multiple of this many columns."""


class Names(NamedTuple):
    """flash_mla's names of the arguments that make a Selection."""

    cache: str
    indices: str
    lengths: str


NEAR = Names("k_cache", "indices", "topk_length")
FAR = Names("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length")


class Selection(NamedTuple):
    """A cache [P, Z, 1, bytes a token], its slots that each query token sees, [B, S, K] int32, and how many of a
    request's columns count: [B] int32, or None for all K."""

    names: Names
    cache: torch.Tensor
    indices: torch.Tensor
    lengths: torch.Tensor | None

    def check(self, batch: int, q_len: int) -> None:
        """ValueError unless indices and lengths are int32 and fit q."""
        shape = tuple(self.indices.shape)
        if len(shape) != 3 or shape[:2] != (batch, q_len):
            legal = f"[B, S, K] = [{batch}, {q_len}, K], B and S from q"
            raise ValueError(f"{self.names.indices}: got shape {show(shape)}; legal: {legal}")
        if self.lengths is not None and self.lengths.shape != (batch,):
            shape = tuple(self.lengths.shape)
            raise ValueError(f"{self.names.lengths}: got shape {show(shape)}; legal: [B] = [{batch}], B from q")
        for name, array in ((self.names.indices, self.indices), (self.names.lengths, self.lengths)):
            if array is not None and array.dtype != torch.int32:
                raise ValueError(f"{name}: got dtype {dtype_name(array.dtype)}; legal: int32")

    @property
    def is_v4(self) -> bool:
        """Whether the cache has DeepSeek-V4's rows, and not V3.2's; ValueError if it has neither."""
        cache, v32, v4 = self.cache, V32_PACKED.row_bytes, V4_PACKED.row_bytes
        if cache.dim() != 4 or cache.shape[2] != 1 or cache.shape[3] not in (v32, v4) or cache.element_size() != 1:
            raise ValueError(
                f"{self.names.cache}: got {cache.dtype} of shape {show(tuple(cache.shape))}; with indices legal: "
                f"[P, Z, 1, {v32}] (V3.2's rows) or [P, Z, 1, {v4}] (V4's) of one byte an element"
            )
        return bool(cache.shape[3] == v4)

    @property
    def page_size(self) -> int:
        return self.cache.shape[1]

    def pages(self) -> torch.Tensor:
        """The cache as sparse_mla takes it: [P, Z, 656], or [P, bytes of a page] of V4, uint8. ValueError if the pages
        of V4 have gaps within or lack their padding."""
        cache = self.cache.view(torch.uint8)
        if not self.is_v4:
            return cache.select(2, 0)
        count, page_size, _, width = cache.shape
        least = V4_PACKED.page_bytes(page_size)
        size = cache.stride(0) if count > 1 else least
        held = cache.untyped_storage().nbytes() - cache.storage_offset()
        if cache.stride()[1:] != (width, cache.stride(2), 1) or size < least or held < count * size:
            raise ValueError(
                f"{self.names.cache}: got strides {show(cache.stride())} in memory of {held} bytes; legal: rows of a "
                f"page side by side, and pages padded to a multiple of {V4_PACKED.data_row_bytes} bytes, the last one "
                f"too: {least} bytes or more for {page_size} tokens"
            )
        return cache.as_strided((count, size), (size, 1))

    def columns(self, tokens: int) -> joining.Columns:
        """The indices of each token, [T, K], and the lengths of each request, [B]."""
        slots = self.indices.reshape(tokens, self.indices.shape[2])
        return joining.Columns(slots if slots.stride(1) == 1 else slots.contiguous(), self.lengths)


def attend(
    q: torch.Tensor,
    near: Selection,
    far: Selection | None,
    *,
    head_dim_v: int,
    softmax_scale: float,
    attn_sink: torch.Tensor | None,
    batch_invariant: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [B, S, H, L] and lse [B, S, H] of queries [B, S, H, D] over the slots of one or two caches, as `sparse_mla`
    returns them.

    Raises:
      ValueError: shapes or caches that don't fit each other, or two caches that don't both have V4's rows.
      TypeError, ValueError, NotImplementedError, RuntimeError: as sparse_mla says.
    """
    batch, q_len, heads, head_dim = q.shape
    near.check(batch, q_len)
    options: dict[str, Any] = {"page_size": near.page_size} if near.is_v4 else {}
    tokens = batch * q_len
    if far is None:
        indices, lengths = near.columns(tokens)
        lengths = lengths if lengths is None else joining.per_token(lengths, tokens)
    else:
        far.check(batch, q_len)
        if not (near.is_v4 and far.is_v4):
            raise ValueError(
                f"{FAR.cache}: got a second cache; legal: None, or V4's rows beside V4's rows in {NEAR.cache}"
            )
        window = near.indices.shape[2]
        indices, lengths = joining.joined(near.columns(tokens), far.columns(tokens), _COLUMN_MULTIPLE)
        options |= {"compressed_kv_cache": far.pages(), "window": window, "compressed_page_size": far.page_size}
    out, lse = naming.call(
        warming.sparse_mla,
        naming.FLASH_MLA_DECODE,
        q.reshape(tokens, heads, head_dim).contiguous(),
        near.pages(),
        indices,
        lengths,
        softmax_scale=softmax_scale,
        latent_dim=head_dim_v,
        sinks=attn_sink,
        batch_invariant=batch_invariant,
        **options,
    )
    return out.view(batch, q_len, heads, head_dim_v), lse.view(batch, q_len, heads)


def attend_rows(
    q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, lengths: torch.Tensor | None, *, d_v: int,
    sm_scale: float, attn_sink: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """out [T, H, L] and lse [T, H] of queries [T, H, D] over rows kv [N, 1, D] selected by indices [T, 1, K], in which
    any number outside of 0 to N - 1 selects nothing.

    Raises:
      ValueError: shapes that don't fit each other.
      TypeError, ValueError, NotImplementedError, RuntimeError: as sparse_mla says.
    """
    if q.dim() != 3:
        raise ValueError(f"q: got shape {show(tuple(q.shape))}; legal: [s_q, h_q, d_qk]")
    if kv.dim() != 3 or kv.shape[1:] != (1, q.shape[2]):
        raise ValueError(f"kv: got shape {show(tuple(kv.shape))}; legal: [s_kv, 1, {q.shape[2]}], d_qk from q")
    if indices.dim() != 3 or indices.shape[:2] != (q.shape[0], 1):
        raise ValueError(f"indices: got shape {show(tuple(indices.shape))}; legal: [{q.shape[0]}, 1, topk], s_q from q")
    if lengths is not None and lengths.shape != q.shape[:1]:
        raise ValueError(f"topk_length: got shape {show(tuple(lengths.shape))}; legal: [{q.shape[0]}], s_q from q")
    chosen = indices.select(1, 0)
    out, lse = naming.call(
        warming.sparse_mla,
        naming.FLASH_MLA_PREFILL,
        q.contiguous(),
        kv,
        chosen.masked_fill(chosen >= kv.shape[0], -1),
        lengths,
        softmax_scale=sm_scale,
        latent_dim=d_v,
        sinks=attn_sink,
    )
    return out, lse


_lse_is_read = True
"""Whether anybody reads the lse of calls with indices."""


def read_no_lse() -> None:
    """From now on give the lse of calls with indices as `sparse_mla` does, with -inf where no key is seen. This saves a
    kernel in every call of an engine that reads no such lse."""
    global _lse_is_read
    _lse_is_read = False


def lse_of_selected(lse: torch.Tensor) -> torch.Tensor:
    """The lse of a call with indices as the package flash_mla gives it; unchanged after `read_no_lse`."""
    return as_the_packages(lse) if _lse_is_read else lse


def as_the_packages(lse: torch.Tensor) -> torch.Tensor:
    """lse with +inf where no key is seen; one kernel."""
    return torch.nan_to_num(lse, nan=math.nan, posinf=math.inf, neginf=math.inf)

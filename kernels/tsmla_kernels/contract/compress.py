"""The arguments and results of compress_write_kv_cache. Imports neither jax nor torch; axes as in contract.sparse."""

from __future__ import annotations

from dataclasses import dataclass

from tsmla_kernels.contract.layouts import CacheSpec, cache_spec, indexer_cache_spec
from tsmla_kernels.contract.rules import (
    FLOATS,
    Array,
    Scale,
    check_array,
    check_ints,
    check_scale,
    show,
)
from tsmla_kernels.contract.sparse import CompressSpec, compress_spec


@dataclass(frozen=True)
class CompressWriteSpec:
    """The static facts of one compress_write_kv_cache call.

    Attributes:
      compress: the spec of the pooling.
      cache: "v4" (packed pages), "indexer" (packed keys), or the dtype of a plain cache.
      num_pages, page_size: P and Z of the cache.
      weight_dtype: the dtype of the norm's weights. rope_dim: R. eps: the norm's epsilon.
    """

    compress: CompressSpec
    cache: str
    num_pages: int
    page_size: int
    weight_dtype: str
    rope_dim: int
    eps: float


def compress_write_spec(
    *,
    cache: Array,
    kv_score: Array,
    ape: Array,
    state: Array,
    state_positions: Array,
    norm_weight: Array,
    cos_sin: Array,
    block_tables: Array,
    state_slots: Array,
    seq_lens: Array,
    cu_seqlens_q: Array,
    ratio: int,
    overlap: bool,
    eps: float,
    kv_scale: Scale = None,
    page_size: int | None = None,
) -> CompressWriteSpec:
    """The spec of compress_write_kv_cache, or ValueError / TypeError naming the argument that is not legal."""
    compress = compress_spec(
        kv_score=kv_score,
        ape=ape,
        state=state,
        state_positions=state_positions,
        state_slots=state_slots,
        seq_lens=seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        ratio=ratio,
        overlap=overlap,
    )
    channels = compress.channels
    kind, where = _layout(cache, page_size)
    if where.head_dim != channels:
        raise ValueError(f"cache: got rows of width {where.head_dim}; kv_score's C is {channels}")
    check_scale("kv_scale", kv_scale)
    if kv_scale is not None and kind != "float8_e4m3fn":
        raise ValueError(f"kv_scale: got a scale with a cache of {cache.dtype}; legal with float8_e4m3fn only")
    check_array("norm_weight", norm_weight, "C", FLOATS, (channels, "C, kv_score's channels"))
    check_array("cos_sin", cos_sin, "N R", ("float32",))
    rope_dim = cos_sin.shape[1]
    if rope_dim % 2 or rope_dim > channels or cos_sin.shape[0] < 1:
        raise ValueError(
            f"cos_sin: got shape {show(cos_sin.shape)}; legal: N at least 1, R even and at most {channels}"
        )
    check_ints("block_tables", block_tables, "B M", (compress.num_requests, "B, seq_lens's requests"))
    if isinstance(eps, bool) or not isinstance(eps, int | float):
        raise TypeError(f"eps: got {type(eps).__name__}; legal: a static float")
    if not 0 <= eps < float("inf"):  # false for NaN
        raise ValueError(f"eps: got {eps}; legal: a finite number, at least 0")
    return CompressWriteSpec(
        compress=compress,
        cache=kind,
        num_pages=where.num_pages,
        page_size=where.page_size,
        weight_dtype=norm_weight.dtype,
        rope_dim=rope_dim,
        eps=float(eps),
    )


def _layout(cache: Array, page_size: int | None) -> tuple[str, CacheSpec]:
    """The cache's kind, as CompressWriteSpec names it, and its spec."""
    if cache.dtype == "uint8" and len(cache.shape) == 3:
        return "indexer", indexer_cache_spec(cache).as_plain()
    where = cache_spec("cache", cache, page_size=page_size)
    return (where.layout if where.layout == "v4" else where.dtype), where

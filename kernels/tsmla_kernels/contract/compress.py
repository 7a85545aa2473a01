"""The arguments and results of compress_kv and compress_write_kv_cache, with the axes of contract.sparse.

Imports neither jax nor torch.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from tsmla_kernels.contract.layouts import CacheSpec, cache_spec, indexer_cache_spec
from tsmla_kernels.contract.rules import (
    FLOATS,
    Array,
    Scale,
    check_array,
    check_ints,
    check_scale,
    check_size,
    show,
    static_bool,
    static_int,
)


@dataclass(frozen=True)
class CompressSpec:
    """The static facts of one compress_kv call. `overlap`: how many times `ratio` tokens are pooled into one entry: 2
    if each token has two series of kv and score, else 1."""

    num_tokens: int
    num_requests: int
    ratio: int
    overlap: int
    channels: int
    num_states: int
    ring: int

    @property
    def window(self) -> int:
        """Tokens pooled into one entry."""
        return self.ratio * self.overlap

    @property
    def num_entries(self) -> int:
        """The static bound on the entries that one call completes."""
        return max_compressed_entries(self.num_tokens, self.num_requests, self.ratio)


def max_compressed_entries(num_tokens: int, num_requests: int, ratio: int) -> int:
    """The most entries that `num_tokens` new tokens of `num_requests` requests can complete."""
    return min(num_tokens, num_tokens // ratio + num_requests)


def compress_spec(
    *,
    kv_score: Array,
    ape: Array,
    state: Array,
    state_positions: Array,
    state_slots: Array,
    seq_lens: Array,
    cu_seqlens_q: Array,
    ratio: int,
    overlap: bool,
    state_names: tuple[str, str] = ("state.kv_score", "state.positions"),
) -> CompressSpec:
    """The spec of compress_kv, or ValueError / TypeError naming the argument that is not legal. state_names: how the
    caller names state and state_positions."""
    state_name, positions_name = state_names
    ratio = static_int("ratio", ratio, minimum=1)
    series = 2 if static_bool("overlap", overlap) else 1
    check_array("kv_score", kv_score, "T 2 W", ("float32",))
    check_size("kv_score", kv_score, 1, 2, "kv, score")
    num_tokens, _, width = kv_score.shape
    if width < 1 or width % series:
        raise ValueError(
            f"kv_score: got shape {show(kv_score.shape)}; its width must be a positive multiple of {series}, the "
            f"number of series"
        )
    check_array("ape", ape, "ratio W", ("float32",), (ratio, "ratio"), (width, "kv_score's width"))
    check_array(state_name, state, "N ring 2 W", ("float32",))
    check_size(state_name, state, 2, 2, "kv, score")
    check_size(state_name, state, 3, width, "kv_score's width")
    num_states, ring = state.shape[:2]
    if ring < ratio * series:
        raise ValueError(
            f"{state_name}: got a ring of {ring} tokens; legal: at least {ratio * series}, the tokens pooled "
            f"into one entry (ratio {ratio} x {series} series)"
        )
    states = (num_states, f"N, as in {state_name}"), (ring, f"ring, as in {state_name}")
    check_ints(positions_name, state_positions, "N ring", *states)
    check_ints("seq_lens", seq_lens, "B")
    num_requests = seq_lens.shape[0]
    if num_states == 0 and num_requests != 0:
        raise ValueError(f"{state_name}: got shape {show(state.shape)}; legal: a state for each request under way")
    check_ints("state_slots", state_slots, "B", (num_requests, "B, seq_lens's requests"))
    check_ints("cu_seqlens_q", cu_seqlens_q, "B + 1", (num_requests + 1, "B + 1, B from seq_lens"))
    return CompressSpec(
        num_tokens=num_tokens,
        num_requests=num_requests,
        ratio=ratio,
        overlap=series,
        channels=width // series,
        num_states=num_states,
        ring=ring,
    )


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
    state_names: tuple[str, str] = ("state.kv_score", "state.positions"),
) -> CompressWriteSpec:
    """The spec of compress_write_kv_cache, or ValueError / TypeError naming the argument that is not legal. state_names
    as in compress_spec."""
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
        state_names=state_names,
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
    if not 0 <= eps <= sys.float_info.max:  # false for NaN
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
    if len(cache.shape) == 3 and page_size is not None and static_int("page_size", page_size) != cache.shape[1]:
        raise ValueError(f"page_size: got {page_size}; legal for a cache of three axes: None or Z, {cache.shape[1]}")
    if cache.dtype == "uint8" and len(cache.shape) == 3:
        return "indexer", indexer_cache_spec(cache, "cache").as_plain()
    where = cache_spec("cache", cache, page_size=page_size)
    return (where.layout if where.layout == "v4" else where.dtype), where

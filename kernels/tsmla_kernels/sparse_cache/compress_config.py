"""Which kernel of compress_write_kv_cache serves a call: static configurations. Imports no cutlass."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from tsmla_kernels.contract.layouts import INDEXER, V4_PACKED

if TYPE_CHECKING:
    from tsmla_kernels.contract.compress import CompressWriteSpec

PLAIN = ("bfloat16", "float16", "float32", "float8_e4m3fn")
WEIGHTS = ("bfloat16", "float16", "float32")
LANE_CHANNELS = 4
"""Neighbouring channels that a thread pools: 16 bytes of a row."""
MAX_THREADS = 256
MOST_KEPT = 1 << 32  # most values that a call may write to a ring: a thread copies four at once and counts in int32
MAX_CLUSTER = 4
ROWS_AT_ONCE = 4
"""Rows of a window that a thread has in flight."""


@dataclasses.dataclass(frozen=True)
class CompressWriteConfig:
    """The static facts that an object of compress_write_kv_cache is compiled for. Tokens, requests, states, the rows
    of a state's ring, pages, and the page size of a cache of three axes are dynamic.

    Attributes:
      ratio: tokens per entry. series: 2 if an entry also pools the `ratio` tokens before its own, for which each
        token has a second kv and score; else 1. channels: C.
      cache: "v4" (packed pages of two axes), "indexer" (packed keys), or the dtype of a plain cache.
      weight_dtype: the dtype of the norm's weights.
      rope_dim: how many channels, the last ones, are rotated.
      eps: the norm's epsilon.
      page_size: rows of a "v4" page; 0 otherwise.
      cluster: CTAs that share a window. parts: parts of a CTA's rows, each pooled by its own threads.
    """

    ratio: int
    series: int
    channels: int
    cache: str
    weight_dtype: str
    rope_dim: int
    eps: float
    page_size: int = 0
    cluster: int = 1
    parts: int = 1

    @property
    def window(self) -> int:
        """How many tokens are pooled into one entry."""
        return self.ratio * self.series

    @property
    def width(self) -> int:
        """W: columns of a token's kv, and as many of its scores."""
        return self.series * self.channels

    @property
    def lanes(self) -> int:
        """Threads that hold a row of channels."""
        return self.channels // LANE_CHANNELS

    @property
    def cta_rows(self) -> int:
        """How many rows of a window a CTA pools."""
        return self.window // self.cluster

    @property
    def threads(self) -> int:
        return self.lanes * self.parts

    @property
    def merged(self) -> int:
        """How many CTAs' sums the first CTA of a cluster merges."""
        return self.cluster if self.cluster > 1 else 0

    @property
    def scale_group(self) -> int:
        """Channels that share a scale; 0 for a plain cache."""
        return {"v4": V4_PACKED.group, "indexer": INDEXER.head_dim}.get(self.cache, 0)


def compress_write_reasons(spec: CompressWriteSpec) -> list[str]:
    """Why the kernel cannot run this call; empty if it can."""
    reasons, window = [], spec.compress.window
    channels = spec.compress.channels
    if channels not in (128, 256, 512, 1024):
        reasons.append(f"C is {channels}; the kernel takes 128, 256, 512 and 1024")
    if window & (window - 1):
        reasons.append(f"an entry pools {window} tokens; the kernel takes powers of two")
    if spec.rope_dim % LANE_CHANNELS:
        reasons.append(f"rope_dim (R) is {spec.rope_dim}; the kernel takes multiples of {LANE_CHANNELS}")
    if spec.weight_dtype not in WEIGHTS:
        reasons.append(f"norm_weight.dtype is {spec.weight_dtype}; the kernel takes {', '.join(WEIGHTS)}")
    if spec.cache not in ("v4", "indexer", *PLAIN):
        reasons.append(f"cache.dtype is {spec.cache}; the kernel takes uint8, {', '.join(PLAIN)}")
    if spec.cache == "indexer" and channels != INDEXER.head_dim:
        reasons.append(f"C is {channels}; the kernel writes indexer keys of {INDEXER.head_dim}")
    tokens, ring = spec.compress.num_tokens, spec.compress.ring
    kept = min(tokens, ring) if isinstance(tokens, int) and isinstance(ring, int) else 0
    if kept * 2 * channels * spec.compress.overlap > MOST_KEPT:
        reasons.append(
            f"a request may keep {kept} new tokens in its ring (T is {tokens}, state has rings of {ring}); the kernel"
            f" copies at most {MOST_KEPT} numbers of one request"
        )
    return reasons


def compress_write_config(spec: CompressWriteSpec) -> CompressWriteConfig:
    """The configuration that serves `spec`."""
    compress = spec.compress
    lanes = compress.channels // LANE_CHANNELS
    # A thread pools ROWS_AT_ONCE rows if MAX_THREADS and MAX_CLUSTER allow so many threads, otherwise more.
    shares = max(compress.window // ROWS_AT_ONCE, 1)
    parts = min(shares, max(MAX_THREADS // lanes, 1))
    return CompressWriteConfig(
        ratio=compress.ratio,
        series=compress.overlap,
        channels=compress.channels,
        cache=spec.cache,
        weight_dtype=spec.weight_dtype,
        rope_dim=spec.rope_dim,
        eps=spec.eps,
        page_size=spec.page_size if spec.cache == "v4" else 0,
        cluster=min(shares // parts, MAX_CLUSTER),
        parts=parts,
    )

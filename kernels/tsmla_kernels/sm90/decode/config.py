"""Which Hopper decode kernel serves a call: the static configuration and its workspaces. Imports no cutlass.

Everything here is a pure function of static shapes and the number of multiprocessors (SMs), so that one compiled
object serves every batch, page count, table width and length.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from tsmla_kernels.sm90.constants import FP8, SMEM_BYTES

if TYPE_CHECKING:
    from tsmla_kernels.contract import DecodeSpec

ROWS = 64  # query rows (tokens x heads) of one CTA: the M of one warpgroup's WGMMA
OVERHEAD = 5  # what starting a piece costs, in key blocks: Q, the first keys' latency, the epilogue
SHARERS = 32  # lanes of the scores that have keys of a query row, where each of their four warps has keys of its own
FEW_ROWS = 32  # query rows, at most, whose partial results are in fp32
INVARIANT_CHUNKS = 32  # most pieces a request is cut into when batch_invariant
INVARIANT_MIN_KEYS = 512  # fewest keys of such a piece


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """What a decode object is compiled for. All else is dynamic.

    Attributes:
      dtype: of q: "bfloat16", "float16", or "float8_e4m3fn" with a cache of it.
      kv_dtype: of the cache: q's, or "float8_e4m3fn". None: q's.
      num_heads: H.
      max_q_len: S, or the longest query of a ragged batch.
      latent_dim: L. rope_dim: R. page_size: Z.
      ragged: whether query rows are found through cu_seqlens_q.
      causal: whether query i of S sees only keys j < seq_len - (S - 1) + i.
      batch_invariant: cut requests at fixed keys, so that a row's bits do not depend on the rest of the batch.
      cluster: CTAs (1 or 2) that walk the same keys with different rows; each loads half and multicasts it.
    """

    dtype: str
    num_heads: int
    max_q_len: int
    latent_dim: int = 512
    rope_dim: int = 64
    page_size: int = 64
    ragged: bool = False
    causal: bool = True
    batch_invariant: bool = False
    cluster: int = 1
    kv_dtype: str | None = None

    @property
    def cache_dtype(self) -> str:
        return self.kv_dtype or self.dtype

    @property
    def fp8_scores(self) -> bool:
        """Whether Q K^T is multiplied in fp8: where queries and cache are."""
        return self.dtype == FP8

    @property
    def mixed(self) -> bool:
        """Whether queries of 16 bits meet an fp8 cache, which is widened in the kernel."""
        return self.cache_dtype == FP8 and not self.fp8_scores

    @property
    def fp8_cache(self) -> bool:
        return self.cache_dtype == FP8

    @property
    def block(self) -> int:
        """Keys of one pipeline stage."""
        return 64 if self.cache_dtype == FP8 else 32

    @property
    def q_rows(self) -> int:
        """Query rows that a stage takes."""
        return self.block // 2 if self.mixed else self.block

    @property
    def p_rows(self) -> int:
        """Query rows as the product of the values has them: where the cache is fp8, no more than a tile may have."""
        if self.cache_dtype != FP8:
            return ROWS
        rows = min(self.max_q_len * self.num_heads, ROWS)
        return next(n for n in (16, 32, ROWS) if n >= rows)

    @property
    def q_may_take_two_stages(self) -> bool:
        return self.p_rows > self.q_rows

    @property
    def out_dtype(self) -> str:
        return "bfloat16" if self.dtype == FP8 else self.dtype

    @property
    def head_dim(self) -> int:
        return self.latent_dim + self.rope_dim

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one stage: a block of keys, and P where the rope columns cannot hold it.

        Where Q is the first operand of Q K^T, P has as many rows as WGMMA, be there query rows for them or not.
        """
        p_bytes = (self.p_rows if self.mixed else ROWS) * self.block * 2
        if self.cache_dtype == FP8:
            return self.block * self.head_dim + p_bytes
        return self.block * self.head_dim * 2 + (0 if self.rope_dim else p_bytes)

    @property
    def exchanged_words(self) -> int:
        """Words of shared memory in which the scores' warps tell each other of their keys, where these are parted."""
        # What each lane has of a row, what that changes, and the row's maximum: MlaDecodeMixed.score.
        return self.p_rows * (SHARERS + 2 + 1) if self.mixed else 0

    @property
    def stages(self) -> int:
        others = 4096  # barriers, descriptions of pieces, row factors
        if self.fp8_scores:
            others += ROWS * self.head_dim  # Q
        elif self.mixed:
            others += self.p_rows * self.head_dim * 2 + self.exchanged_words * 4
        return min(8, (SMEM_BYTES - others) // self.stage_bytes)

    @property
    def tile_rows(self) -> int:
        """Query rows that a cluster handles at once."""
        return ROWS * self.cluster

    @property
    def few_rows(self) -> bool:
        """Whether a row tile is so small that merging its pieces takes instructions rather than bytes."""
        return self.max_q_len * self.num_heads <= FEW_ROWS

    @property
    def partial_dtype(self) -> str:
        """Of a piece's result. In f16 it is half the bytes to write and to read again, but takes a scale of its own."""
        return "float32" if self.few_rows else "float16"

    @property
    def partial_needs_scale(self) -> bool:
        """Whether a piece's result might lie beyond what partial_out holds, so that the value warps scale it."""
        return self.partial_dtype == "float16" and self.cache_dtype == "bfloat16"

    @property
    def partial_is_lane_order(self) -> bool:
        """Whether partial_out has columns as a WGMMA accumulator's lanes hold them: 2 from each of four groups of 8
        together, of which the quad has four."""
        return not self.fp8_cache

    @property
    def max_tiles(self) -> int:
        """Row tiles of the longest query."""
        return -(-self.max_q_len * self.num_heads // self.tile_rows)


def decode_reasons(spec: DecodeSpec) -> list[str]:
    """Why the Hopper decode kernel cannot run this call; empty if it can."""
    reasons = []
    if spec.q_dtype not in ("bfloat16", "float16", FP8):
        reasons.append(f"q.dtype is {spec.q_dtype}; the sm_90 decode kernel takes bfloat16, float16 or {FP8}")
    if spec.kv_dtype not in (spec.q_dtype, FP8):
        reasons.append(
            f"kv_cache.dtype is {spec.kv_dtype}; the sm_90 decode kernel takes q's dtype, {spec.q_dtype}, or {FP8}"
        )
    if spec.page_size not in (16, 32, 64, 128):
        reasons.append(f"page size is {spec.page_size}; the sm_90 decode kernel takes 16, 32, 64 or 128")
    if spec.latent_dim not in (256, 512):
        reasons.append(f"latent_dim is {spec.latent_dim}; the sm_90 decode kernel takes 256 or 512")
    if spec.rope_dim not in (0, 64):
        reasons.append(f"the rope width is {spec.rope_dim}; the sm_90 decode kernel takes 0 or 64")
    return reasons


def decode_config(spec: DecodeSpec) -> DecodeConfig:
    """The configuration that serves `spec`.

    One CTA holds 64 rows. With more rows than that a request's keys are needed by several CTAs: two of them form a
    cluster and multicast, which halves the reads of the L2 cache.
    """
    return DecodeConfig(
        dtype=spec.q_dtype,
        num_heads=spec.num_heads,
        max_q_len=spec.max_q_len,
        latent_dim=spec.latent_dim,
        rope_dim=spec.rope_dim,
        page_size=spec.page_size,
        ragged=spec.ragged,
        causal=spec.causal and spec.max_q_len > 1,
        batch_invariant=spec.batch_invariant,
        cluster=2 if spec.max_q_len * spec.num_heads > ROWS else 1,
        kv_dtype=FP8 if spec.kv_dtype == FP8 else None,
    )


def invariant_chunk(config: DecodeConfig, max_pages: int) -> int:
    """Key blocks of one piece of a request when batch_invariant: depends on the table's width alone."""
    blocks = -(-max_pages * config.page_size // config.block)
    return INVARIANT_MIN_KEYS // config.block - 1 - (-blocks // INVARIANT_CHUNKS)


def workspace_shapes(
    config: DecodeConfig, num_sms: int, batch: int, max_pages: int
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shapes and dtypes of the kernel's workspaces, in the order of its operands.

    `split_info` has one entry for each cluster of the grid, whose size the kernel takes from it; when batch_invariant
    entries for each row tile of each request follow. A cluster leaves at most two pieces of requests that other
    clusters share: the end of one and the start of another. `partial_lse` has a row's log-sum-exp of a piece, base 2,
    and what the first and the second half of its columns of `partial_out` are to be multiplied by.
    """
    parts = max(1, num_sms // config.cluster)
    if config.batch_invariant:
        units = batch * config.max_tiles
        blocks = -(-max_pages * config.page_size // config.block)
        slots = units * -(-blocks // invariant_chunk(config, max_pages))
        entries = parts + units
    else:
        slots = entries = 2 * parts
    return {
        "partial_out": ((slots, config.tile_rows, config.latent_dim), config.partial_dtype),
        "partial_lse": ((slots, 3, config.tile_rows), "float32"),
        "split_info": ((entries, 4), "int32"),
    }

"""Which Hopper decode kernel serves a call: the static configuration and its workspaces. Imports no cutlass.

Everything here is a pure function of static shapes and the number of multiprocessors (SMs), so that one compiled
object serves every batch, page count, table width and length.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import TYPE_CHECKING

from tsmla_kernels.sm90.constants import FP8, MOST_KEYS, SMEM_BYTES
from tsmla_kernels.sm90.latent import shape as latent_shape
from tsmla_kernels.sm90.latent.shape import FEW_ROWS, ROWS, LatentShape

if TYPE_CHECKING:
    from tsmla_kernels.contract import DecodeSpec
    from tsmla_kernels.contract.rules import Dim

SHARERS = 32  # softmax lanes that have scores of one query row, if each softmax warp has 16 keys of a block
MAX_STAGES = 6  # with more stages, warps would be further apart than LOOKAHEAD and PIECES_KEPT (memory.py) allow


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """The static choices of a compiled mla_decode. Everything else is dynamic.

    Attributes:
      dtype: q's dtype: "bfloat16", "float16", or "float8_e4m3fn" if the cache also has it.
      kv_dtype: the cache's dtype: None (q's dtype) or "float8_e4m3fn".
      num_heads: H.
      max_q_len: S or, if ragged, the bound on the query tokens of a request.
      latent_dim: L. rope_dim: R. page_size: Z.
      ragged: whether query rows are found through cu_seqlens_q.
      causal: whether query i of S sees only keys j < seq_len - (S - 1) + i.
      batch_invariant: whether requests are cut at fixed keys, so that a row's bits do not depend on the rest of the
        batch.
      cluster: CTAs of a cluster, 1 or 2. Two CTAs walk the same keys with different rows; each loads half of the keys
        and multicasts them.
      split_q: whether the rope columns of q are a separate array, whose rows may be wider.
      heads_first: whether the latent columns of a split q are [H, T, L], the order in which a product over heads writes
        them.
      visible_lens: whether an array says how many keys each token sees, in place of the causal rule.
      fp8_p: whether P is rounded to e4m3, so that P V is multiplied in fp8.
      merged: whether a second kernel merges the pieces; if not, the caller does.
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
    split_q: bool = False
    heads_first: bool = False
    visible_lens: bool = False
    fp8_p: bool = False
    merged: bool = True

    @property
    def cache_dtype(self) -> str:
        return self.kv_dtype or self.dtype

    @property
    def fp8_scores(self) -> bool:
        """Whether queries and cache are fp8, so that Q K^T is multiplied in fp8."""
        return self.dtype == FP8

    @property
    def mixed(self) -> bool:
        """Whether queries have 16 bits and the cache is fp8, which the kernel widens."""
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
        """Query rows that a stage holds."""
        return self.block // 2 if self.mixed else self.block

    @property
    def p_rows(self) -> int:
        """Query rows of P V: the least of 16, 32 and 64 that is enough for a CTA's rows."""
        rows = min(self.max_q_len * self.num_heads, ROWS)
        return next(n for n in (16, 32, ROWS) if n >= rows)

    @property
    def transposed_out(self) -> bool:
        """Whether P V is computed as O^T = V^T P^T, so that WGMMA's 64 rows are latents, not query rows. Such kernels
        have registers for a fourth warpgroup, which copies: O is narrow, or Q is in shared memory."""
        return self.fp8_cache or self.p_rows < ROWS

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
    def q_dim(self) -> int:
        """Columns of the operand q."""
        return self.latent_dim if self.split_q else self.head_dim

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one stage: a block of keys, and P unless P overwrites the keys' rope columns.

        If Q is the first operand of Q K^T, P has all 64 rows of WGMMA, however few query rows there are.
        """
        p_bytes = (self.p_rows if self.mixed else ROWS) * self.block * (1 if self.fp8_p else 2)
        if self.cache_dtype == FP8:
            return self.block * self.head_dim + p_bytes
        return self.block * self.head_dim * 2 + (0 if self.rope_dim else p_bytes)

    @property
    def exchanged_words(self) -> int:
        """Shared-memory words for reducing over keys across the four softmax warps (mixed kernel only)."""
        # key_softmax.Exchange: for each row, the partials of its lanes, its two changes and its maximum.
        return self.p_rows * (SHARERS + 2 + 1) if self.mixed else 0

    @property
    def stages(self) -> int:
        reserved = 4096  # barriers, descriptions of pieces, row factors
        if self.fp8_scores:
            reserved += ROWS * self.head_dim  # Q
        elif self.mixed:
            reserved += self.p_rows * self.head_dim * 2 + self.exchanged_words * 4
        return min(MAX_STAGES, (SMEM_BYTES - reserved) // self.stage_bytes)

    @cached_property
    def shape(self) -> LatentShape:
        """The facts from which the common parts of the latent attention kernels are built."""
        few_rows = self.max_q_len * self.num_heads <= FEW_ROWS
        return LatentShape(
            num_heads=self.num_heads,
            max_q_len=self.max_q_len,
            latent_dim=self.latent_dim,
            head_dim=self.head_dim,
            page_size=self.page_size,
            block=self.block,
            tile_rows=ROWS * self.cluster,
            q_rows=self.q_rows,
            p_rows=self.p_rows,
            few_rows=few_rows,
            min_share=1 if few_rows else 2,  # a shorter share costs more in merging than it saves
            out_dtype=self.out_dtype,
            partial_needs_scale=not few_rows and self.cache_dtype == "bfloat16",
            partial_is_lane_order=not self.transposed_out,
            cluster=self.cluster,
            ragged=self.ragged,
            causal=self.causal,
            visible_lens=self.visible_lens,
            batch_invariant=self.batch_invariant,
        )


def decode_reasons(spec: DecodeSpec) -> list[str]:
    """Why the Hopper decode kernel cannot run this call; empty if it can."""
    reasons = []
    if spec.q_dtype not in ("bfloat16", "float16", FP8):
        reasons.append(f"q.dtype is {spec.q_dtype}; the sm_90 decode kernel takes bfloat16, float16 or {FP8}")
    elif spec.kv_dtype not in (spec.q_dtype, FP8):
        reasons.append(
            f"kv_cache.dtype is {spec.kv_dtype}; the sm_90 decode kernel takes q's dtype, {spec.q_dtype}, or {FP8}"
        )
    if spec.page_size not in (16, 32, 64, 128):
        reasons.append(f"page size is {spec.page_size}; the sm_90 decode kernel takes 16, 32, 64 or 128")
    if spec.latent_dim not in (256, 512):
        reasons.append(f"latent_dim is {spec.latent_dim}; the sm_90 decode kernel takes 256 or 512")
    if spec.rope_dim not in (0, 64):
        reasons.append(f"the rope width is {spec.rope_dim}; the sm_90 decode kernel takes 0 or 64")
    return reasons or _size_reasons(spec)


def _size_reasons(spec: DecodeSpec) -> list[str]:
    """Why the schedule cannot count a request's keys, or the blocks of all row tiles. Empty if it can, or if a size is
    symbolic."""
    sizes = (spec.batch, spec.total_q_len, spec.max_q_len, spec.num_heads, spec.max_pages)
    if not all(isinstance(size, int) for size in sizes):
        return []
    keys = spec.max_pages * spec.page_size
    if keys > MOST_KEYS:
        return [f"block_tables hold {keys} keys a request (M * Z); the sm_90 decode kernel takes at most {MOST_KEYS}"]
    q_rows = spec.total_q_len * spec.num_heads
    length = latent_shape.line_length(decode_config(spec).shape, spec.batch, spec.max_pages, q_rows)
    if length > latent_shape.MOST_BLOCKS:
        return [
            f"{spec.batch} requests of {keys} keys (M * Z) are up to {length} blocks; the sm_90 decode kernel shares"
            f" out at most {latent_shape.MOST_BLOCKS}"
        ]
    return []


def reads_heads_first(num_heads: int) -> bool:
    """Whether the kernel can copy a q of [H, T, L]. One copy takes some heads of one token or all heads of some tokens,
    so H must be a power of 2."""
    return num_heads & (num_heads - 1) == 0


def decode_config(spec: DecodeSpec, *, split_q: bool = False, heads_first: bool = False) -> DecodeConfig:
    """The configuration that serves `spec`; split_q and heads_first as in DecodeConfig.

    One CTA holds 64 rows. If a request has more rows, several CTAs need its keys: two of them form a cluster and
    multicast, which halves the reads of the L2 cache.
    """
    rows = spec.max_q_len * spec.num_heads
    return DecodeConfig(
        dtype=spec.q_dtype,
        num_heads=spec.num_heads,
        max_q_len=spec.max_q_len,
        latent_dim=spec.latent_dim,
        rope_dim=spec.rope_dim,
        page_size=spec.page_size,
        ragged=spec.ragged,
        causal=spec.causal and spec.max_q_len > 1 and not spec.visible_lens,
        batch_invariant=spec.batch_invariant,
        cluster=2 if rows > ROWS else 1,
        kv_dtype=FP8 if spec.kv_dtype == FP8 else None,
        split_q=split_q,
        heads_first=heads_first,
        visible_lens=spec.visible_lens,
        # With few rows P V is not the limit.
        fp8_p=spec.fp8_probabilities and spec.q_dtype == FP8 and rows > FEW_ROWS,
        merged=spec.merged,
    )


def launches(config: DecodeConfig, batch: Dim, max_pages: Dim) -> list[tuple[Dim, Dim]]:
    """The requests [first, stop) of each launch that a call takes: see latent.shape.launches."""
    return latent_shape.launches(config.shape, batch, max_pages)


def workspace_shapes(
    config: DecodeConfig, num_sms: int, batch: int, max_pages: int
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shapes and dtypes of the kernel's workspaces: see latent.shape.workspace_shapes."""
    return latent_shape.workspace_shapes(config.shape, num_sms, batch, max_pages)

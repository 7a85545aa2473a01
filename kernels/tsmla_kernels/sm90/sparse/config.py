"""Which Hopper kernel of sparse_mla serves a call: the static configuration and its workspaces. Imports no cutlass.

The counts of tokens, of the indices' columns and of pages are dynamic, and so are all lengths. The query row of a head
has the index token * H + head. The common parts of the latent attention kernels treat a token as a request with one
query token.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import TYPE_CHECKING

from tsmla_kernels.contract.layouts import V4_PACKED, V32_PACKED
from tsmla_kernels.sm90.constants import FP8, MOST_KEYS, SMEM_BYTES
from tsmla_kernels.sm90.latent import shape as latent_shape
from tsmla_kernels.sm90.latent.shape import FEW_ROWS, ROWS, LatentShape

if TYPE_CHECKING:
    from tsmla_kernels.contract.layouts import CacheSpec
    from tsmla_kernels.contract.rules import Dim
    from tsmla_kernels.contract.sparse import SparseMLASpec

MIN_STAGES = 2
MAX_STAGES = 5
GATHER_WARPS = 4
PARTIALS_PAD = 8  # words between two warps' partials, so that lanes read a row's four partials from different banks
LATENT_DIM = 512
BLOCK = 64  # keys of a stage
MAX_SLOTS = 1 << 31  # num_pages * page_span must stay below this: slots are int32
Q_STEPS = 31  # 16-column steps of Q that fit into the softmax warps' registers
NUM_SCALES = 3  # the operand `scales`: softmax_scale * q_scale, kv_scale, compressed_kv_scale
PLAIN = (FP8, "bfloat16", "float16")
FEW_HEADS = 32  # row tiles of up to this many heads fit with any kind of cache rows
FEW_TILES = {"v32": 4, "v4": 64, "plain": 4}  # up to this many row tiles of 64, tiles of 32 are faster
MANY_TILES = 384  # from this many row tiles on, of more columns, another compiled kernel deals them out in turn
WHOLE_TILES = 528  # up to this many row tiles, of up to WHOLE_COLUMNS columns, CTAs have whole tiles
WHOLE_COLUMNS = 256
WIDTHS = {"v32": (576,), "v4": (512,), "plain": (512, 576)}
"""Widths of a key that the kernel takes, by the cache's layout."""


@dataclasses.dataclass(frozen=True)
class SparseConfig:
    """The static choices of a compiled sparse_mla. Everything else is dynamic.

    Attributes:
      dtype: q's dtype: "bfloat16", "float16" or, over V3.2 and plain rows of e4m3, "float8_e4m3fn".
      num_heads: H. head_dim: D, the width of a key. Values are its first 512 columns.
      layout: the layout of the caches' rows: "v32", "v4" or "plain".
      kv_dtype: the caches' dtype. Plain rows have e4m3, "bfloat16" or "float16", packed rows "uint8".
      page_size, page_span: rows of a page, and slots from one page to the next. (0, 0) if the layout is not "v4"
        and every slot of a page has a row, so that slot i is row i.
      window: leading columns of the indices that select from the first cache; None if there is only one cache.
      compressed_page_size, compressed_page_span: the same for the second cache.
      lengths: whether tokens have lengths; otherwise all columns of the indices are active.
      sinks: whether heads have sinks.
      max_logits: whether each row's greatest logit is a result.
      tile_rows: query rows that one CTA works on at once: 64, or 32 if more CTAs are faster, or if the cache's rows
        have 1,152 bytes and leave no room for 64 query rows.
      batch_invariant: whether tokens are cut at fixed columns, so that a row's bits do not depend on the rest of the
        batch.
      dealt: whether row tiles are dealt out in turn, if there are enough of them: see deal.py.
      early_q: whether the Q of a piece, from the third on or, if `whole`, from the second on, is requested as soon as
        the products with the previous Q are done.
      tokens: query tokens of a row tile. If there are several, the indices are the union of these tokens' slots, and
        the operand union_bits says which of the tokens select each slot: see union_config.py.
      skips: whether there may be negative lengths, each of which leaves the row tile to another launch.
      whole: whether CTAs have whole row tiles, which leaves no schedule and nothing to merge: see whole.py.
      split_q: whether the rope columns of q are a separate array, whose rows may be wider. Only if takes_split_q.
      heads_first: whether the latent columns of a split q are [H, T, L], the order in which a product over heads writes
        them.
    """

    dtype: str
    num_heads: int
    layout: str = "v32"
    kv_dtype: str = "uint8"
    head_dim: int = 576
    page_size: int = 0
    page_span: int = 0
    window: int | None = None
    compressed_page_size: int = 0
    compressed_page_span: int = 0
    lengths: bool = False
    sinks: bool = False
    max_logits: bool = False
    tile_rows: int = ROWS
    batch_invariant: bool = False
    dealt: bool = False
    early_q: bool = False
    tokens: int = 1
    skips: bool = False
    whole: bool = False
    split_q: bool = False
    heads_first: bool = False

    @property
    def fp8_queries(self) -> bool:
        """Whether columns of e4m3 are multiplied by queries of e4m3 without widening. The dtype of out is then
        bfloat16."""
        return self.dtype == FP8

    @property
    def two_caches(self) -> bool:
        return self.window is not None

    @property
    def two_scales(self) -> bool:
        """Whether each of the two caches has a scale of its own for its rows."""
        return self.two_caches and self.layout == "plain"

    @property
    def p_rows(self) -> int:
        """Query rows of P V."""
        rows = next(n for n in (16, 32, ROWS) if n >= min(self.tokens * self.num_heads, ROWS))
        return min(rows, self.tile_rows)

    @property
    def plain_16_bits(self) -> bool:
        """Whether all numbers of the caches' rows have 16 bits."""
        return self.layout == "plain" and self.kv_dtype != FP8

    @property
    def q_in_registers(self) -> bool:
        """Whether the kernel of rows_16bit.py serves the call: S = Q K^T with Q in registers, and O += P V, both with
        keys in shared memory. The other kernels have K and V^T in registers."""
        return self.plain_16_bits and self.p_rows == ROWS and self.dtype == self.kv_dtype and self.tokens == 1

    @property
    def early_p(self) -> bool:
        """Whether the value warps begin a block's P V as soon as its P is stored, because the ring's two stages leave
        no other block to gather while one waits for its P V. Otherwise P V waits until the next block's K Q^T is
        nearly done."""
        return self.plain_16_bits and self.stages == MIN_STAGES

    @cached_property
    def shape(self) -> LatentShape:
        """The facts from which the common parts of the latent attention kernels are built: a token is a request, and a
        column of the indices is a page of one key."""
        return LatentShape(
            num_heads=self.num_heads,
            max_q_len=self.tokens,
            latent_dim=LATENT_DIM,
            head_dim=self.head_dim,
            page_size=1,
            block=BLOCK,
            tile_rows=self.tile_rows,
            q_rows=BLOCK // 2,
            p_rows=self.p_rows,
            few_rows=self.p_rows <= FEW_ROWS,
            min_share=1,
            out_dtype="bfloat16" if self.fp8_queries else self.dtype,
            partial_needs_scale=self.q_in_registers and self.dtype == "bfloat16",
            partial_is_lane_order=self.q_in_registers,
            batch_invariant=self.batch_invariant,
            skips=self.skips,
            max_logits=self.max_logits,
        )

    @property
    def row_bytes(self) -> int:
        """Bytes that one bulk copy takes of a row: all but V4's scales."""
        plain = self.head_dim * (1 if self.kv_dtype == FP8 else 2)
        return {"v32": V32_PACKED.row_bytes, "v4": V4_PACKED.data_row_bytes, "plain": plain}[self.layout]

    @property
    def pitch(self) -> int:
        """Bytes of shared memory for a row. If ldmatrix reads the rows, they lie as far apart: an odd multiple of 16,
        so that it, which reads eight rows at once, reads each bank once."""
        if self.q_in_registers:
            return self.row_bytes
        return self.row_bytes + (16 if self.row_bytes % 32 == 0 else 0)

    @property
    def e4m3_columns(self) -> int:
        """How many leading columns of a key are e4m3; the other columns have 16 bits."""
        plain = 0 if self.kv_dtype == FP8 else self.head_dim
        return self.head_dim - {"v32": V32_PACKED.rope_dim, "v4": V4_PACKED.rope_dim, "plain": plain}[self.layout]

    @property
    def bf16_columns(self) -> bool:
        """Whether packed rows' bf16 columns are multiplied by bf16 columns of Q, so that neither becomes f16."""
        return self.layout != "plain" and self.dtype in ("bfloat16", FP8)

    @property
    def scale_group(self) -> int:
        """How many columns of e4m3 share one scale of the row; 0 if rows have no scales."""
        return {"v32": V32_PACKED.group, "v4": V4_PACKED.group, "plain": 0}[self.layout]

    @property
    def scales_offset(self) -> int:
        """The offset in a stage of the first row's f32 scales (V3.2), or of the table of f16 scales behind P (V4)."""
        return V32_PACKED.latent_dim if self.layout == "v32" else self.keys_bytes + self.p_bytes

    @property
    def rope_offset(self) -> int:
        """The offset in a row of its columns of 16 bits."""
        return self.row_bytes - 2 * (self.head_dim - self.e4m3_columns)

    @property
    def takes_split_q(self) -> bool:
        """Whether there is a form of this kernel with split_q."""
        return self.q_in_registers and self.head_dim > LATENT_DIM

    @property
    def q_dim(self) -> int:
        """Columns of the operand q."""
        return LATENT_DIM if self.split_q else self.head_dim

    @property
    def stage_keys(self) -> int:
        """How many keys a stage holds. With Q in registers few are left for scores, so a stage has half of a block."""
        return BLOCK // 2 if self.q_in_registers else BLOCK

    @property
    def keys_bytes(self) -> int:
        """Shared memory of a stage's keys."""
        return self.stage_keys * self.pitch

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one stage: its keys, their P, and the table of V4's scales."""
        table = 1024 if self.layout == "v4" else 0  # 7 groups x 64 keys of f16; P begins at a multiple of 1024
        return self.keys_bytes + self.p_bytes + table

    @property
    def p_bytes(self) -> int:
        return self.p_rows * self.stage_keys * 2

    @property
    def exchanged_words(self) -> int:
        """Shared-memory words for reducing over keys. For each query row they have the partials of four warps, two
        changes (see Exchange) and the maximum."""
        return 4 * (self.shape.p_rows + PARTIALS_PAD) + self.shape.p_rows * (2 + 1)

    @property
    def q_shared_steps(self) -> int:
        """If Q is in registers, how many of its 16-column steps, the last ones, are in shared memory instead. Greatest
        logits over two caches with scales take the registers of one more."""
        return self.head_dim // 16 - Q_STEPS + (self.two_scales and self.max_logits)

    @property
    def q_shared_columns(self) -> int:
        """How many columns of Q shared memory has: whole tiles of 64."""
        return -(-self.q_shared_steps // 4) * 64 if self.q_in_registers else self.head_dim

    @property
    def q_bytes(self) -> int:
        """Shared memory of Q. If queries are e4m3, they are followed by bf16 copies of those columns that have 16 bits
        in keys."""
        row = self.head_dim + 2 * (self.head_dim - self.e4m3_columns) if self.fp8_queries else 2 * self.q_shared_columns
        return self.shape.p_rows * row

    @property
    def stages(self) -> int:
        reserved = 4096  # barriers, descriptions of pieces, row factors
        free = SMEM_BYTES - reserved - self.q_bytes - self.exchanged_words * 4
        return min(MAX_STAGES, free // self.stage_bytes)

    @property
    def lookahead(self) -> int:
        """How many pieces ahead of the value warpgroups pieces are described.

        After piece n the scheduling warp describes piece n + lookahead. Before that, the last piece with a description
        is n + lookahead - 1, but the gathering warps can already have filled all stages with pieces n + 1 to n + stages
        (if each has one block), and then read the description of piece n + stages + 1. So stages + 2 is enough.
        """
        return max(self.stages, 4) + 2


def sparse_reasons(spec: SparseMLASpec) -> list[str]:
    """Why the Hopper kernel of sparse_mla cannot run this call; empty if it can."""
    reasons = []
    if spec.max_logits and spec.q_dtype == FP8:
        reasons.append(f"return_max_logits is True with q of {FP8}; the sm_90 sparse kernel takes 16 bits with it")
    if spec.q_dtype not in ("bfloat16", "float16", FP8):
        reasons.append(f"q.dtype is {spec.q_dtype}; the sm_90 sparse kernel takes bfloat16, float16 or {FP8}")
    if spec.q_dtype == FP8 and not (spec.cache.layout == "v32" or spec.cache.dtype == FP8):
        reasons.append(
            f"q.dtype is {FP8} and kv_cache has {spec.cache.layout} rows of {spec.cache.dtype}; the sm_90 sparse kernel"
            f" takes such queries over V3.2 rows and plain rows of {FP8}"
        )
    if not isinstance(spec.num_heads, int):
        reasons.append(f"num_heads is {spec.num_heads}; the sm_90 sparse kernel is compiled for a number")
    if spec.latent_dim != LATENT_DIM:
        reasons.append(f"latent_dim is {spec.latent_dim}; the sm_90 sparse kernel takes {LATENT_DIM}")
    reasons += _cache_reasons("kv_cache", spec.cache)
    if spec.compressed is not None:
        reasons += _cache_reasons("compressed_kv_cache", spec.compressed)
        if (spec.compressed.layout, spec.compressed.dtype) != (spec.cache.layout, spec.cache.dtype):
            reasons.append(
                f"compressed_kv_cache has {spec.compressed.layout} rows of {spec.compressed.dtype} and kv_cache"
                f" {spec.cache.layout} rows of {spec.cache.dtype}; the sm_90 sparse kernel takes the same rows in both"
            )
    return reasons or _size_reasons(spec)


def _size_reasons(spec: SparseMLASpec) -> list[str]:
    """Why the schedule cannot count a token's columns or the call's blocks; empty if it can, or if sizes are
    symbolic."""
    tokens, selected = spec.num_tokens, spec.num_selected
    if not (isinstance(tokens, int) and isinstance(selected, int)):
        return []
    if selected > MOST_KEYS:
        return [f"indices have {selected} columns (K); the sm_90 sparse kernel takes at most {MOST_KEYS}"]
    length = latent_shape.line_length(sparse_config(spec).shape, tokens, selected, tokens * spec.num_heads)
    if length > latent_shape.MOST_BLOCKS:
        return [
            f"{tokens} tokens of {selected} columns (K) are up to {length} blocks; the sm_90 sparse kernel shares out"
            f" at most {latent_shape.MOST_BLOCKS}"
        ]
    return []


def _cache_reasons(name: str, cache: CacheSpec) -> list[str]:
    reasons = []
    if cache.layout == "plain" and cache.dtype not in PLAIN:
        reasons.append(f"{name}.dtype is {cache.dtype}; the sm_90 sparse kernel takes packed rows, {', '.join(PLAIN)}")
    if cache.head_dim not in WIDTHS[cache.layout]:
        legal = " or ".join(map(str, WIDTHS[cache.layout]))
        reasons.append(f"{name}'s keys are {cache.head_dim} wide; the sm_90 sparse kernel takes {legal}")
    if isinstance(cache.num_slots, int) and cache.num_slots >= MAX_SLOTS:
        reasons.append(f"{name} has {cache.num_slots} slots; the sm_90 sparse kernel counts them below 2^31")
    return reasons


def sparse_config(spec: SparseMLASpec, *, lengths: bool = False, sinks: bool = False) -> SparseConfig:
    """The configuration that serves `spec`; `lengths` and `sinks` say whether the call has these operands. A call whose
    q is two arrays takes it with split_q, if takes_split_q."""
    page_size, page_span = _pages(spec.cache)
    compressed_page_size, compressed_page_span = (0, 0) if spec.compressed is None else _pages(spec.compressed)
    return SparseConfig(
        dtype=spec.q_dtype,
        num_heads=spec.num_heads,
        layout=spec.cache.layout,
        kv_dtype=spec.cache.dtype,
        head_dim=spec.head_dim,
        page_size=page_size,
        page_span=page_span,
        window=None if spec.compressed is None else spec.window,
        compressed_page_size=compressed_page_size,
        compressed_page_span=compressed_page_span,
        lengths=lengths,
        sinks=sinks,
        max_logits=spec.max_logits,
        tile_rows=_tile_rows(spec),
        batch_invariant=spec.batch_invariant,
        dealt=not spec.batch_invariant and _has_many_tiles(spec) and not _whole(spec),
        whole=_whole(spec),
        # The scales of two plain caches and greatest logits leave no registers for it.
        early_q=(_has_many_tiles(spec) or _whole(spec))
        and not (spec.max_logits and spec.compressed and spec.cache.layout == "plain"),
    )


def _has_many_tiles(spec: SparseMLASpec) -> bool:
    """Whether it is known that the call has at least MANY_TILES row tiles."""
    return isinstance(spec.num_tokens, int) and _row_tiles(spec, _tile_rows(spec)) >= MANY_TILES


def _tile_rows(spec: SparseMLASpec) -> int:
    """`tile_rows` of a SparseConfig. A call of few tiles of 64 heads takes tiles of 32 instead, because these keep more
    CTAs busy and their code that runs once costs less."""
    if spec.num_heads <= FEW_HEADS:
        return ROWS
    if spec.cache.layout == "plain" and spec.cache.dtype not in (FP8, spec.q_dtype) and spec.head_dim > LATENT_DIM:
        return FEW_HEADS  # with 64 rows of Q in shared memory only one stage of such keys would fit
    if spec.batch_invariant or not isinstance(spec.num_tokens, int):
        return ROWS
    return FEW_HEADS if _row_tiles(spec, ROWS) <= FEW_TILES[spec.cache.layout] else ROWS


def _whole(spec: SparseMLASpec) -> bool:
    """Whether the call's CTAs have whole row tiles: there are few tiles, which have few keys."""
    known = isinstance(spec.num_tokens, int) and isinstance(spec.num_selected, int)
    if spec.batch_invariant or not known or spec.num_selected > WHOLE_COLUMNS:
        return False
    return _row_tiles(spec, _tile_rows(spec)) <= WHOLE_TILES


def _row_tiles(spec: SparseMLASpec, tile_rows: int) -> int:
    """How many tiles of `tile_rows` heads of one token the call has."""
    return spec.num_tokens * -(-spec.num_heads // tile_rows)


def _pages(cache: CacheSpec) -> tuple[int, int]:
    """(page_size, page_span) of a SparseConfig."""
    if cache.layout != "v4" and cache.page_size == cache.span:
        return 0, 0
    return cache.page_size, cache.span


def launches(config: SparseConfig, num_tokens: Dim, num_selected: Dim) -> list[tuple[Dim, Dim]]:
    """The tokens [first, stop) of each launch that a call takes: see latent.shape.launches."""
    return latent_shape.launches(config.shape, num_tokens, num_selected)


def workspace_shapes(
    config: SparseConfig, num_sms: int, num_tokens: int, num_selected: int
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shapes and dtypes of the kernel's workspaces for a launch that serves `num_tokens` tokens, in the order of the
    operands: see latent.shape.workspace_shapes. They depend on num_tokens and num_selected only if batch_invariant."""
    return latent_shape.workspace_shapes(config.shape, num_sms, num_tokens, num_selected)

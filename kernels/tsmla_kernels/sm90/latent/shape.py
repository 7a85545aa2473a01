"""The facts of a call that the common parts of the latent attention kernels are built from, and the workspaces of a
launch. Imports no cutlass.

A request has a row of a block table and some query tokens. In sparse_mla each token is a request. Its row has the
indices of the selected keys, as pages of one key.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from tsmla_kernels.kernel import ITEMSIZE

if TYPE_CHECKING:
    from tsmla_kernels.contract.rules import Dim

ROWS = 64  # most query rows (tokens x heads) of one CTA's part of a row tile; also M of a WGMMA
OVERHEAD = 5  # the cost of a piece besides its blocks (Q, the first keys' latency, the epilogue), in key blocks
FEW_ROWS = 32  # if no row tile has more query rows than this, partial results are fp32
MOST_BLOCKS = 1 << 30  # longest line of a launch, in blocks: the schedule's int32 numbers may reach twice its length
INVARIANT_MAX_PIECES = 32  # most pieces of a request if batch_invariant
INVARIANT_MIN_KEYS = 512  # fewest keys of a piece but a tile's last one if batch_invariant
INVARIANT_WORKSPACE = 1 << 28  # most bytes of partial results of one launch if batch_invariant


@dataclasses.dataclass(frozen=True)
class LatentShape:
    """The static sizes and rules of a call.

    Attributes:
      num_heads: H. max_q_len: S, or the longest query of a ragged batch.
      latent_dim: L. head_dim: D, the width of a key. page_size: Z.
      block: how many keys a stage of the ring holds.
      tile_rows: query rows of a row tile, which a cluster handles at once.
      q_rows: query rows that a stage of the ring holds, if Q goes through the ring. p_rows: query rows of P V.
      few_rows: whether a row tile is so small that instructions, not bytes, limit the merging of its pieces.
      min_share: fewest key blocks of a cluster's share.
      out_dtype: the dtype of out.
      partial_needs_scale: whether a piece's result may exceed the range of partial_out's dtype. The value warps then
        scale the result.
      partial_is_lane_order: whether partial_out has its columns in the order of a WGMMA accumulator's lanes: the four
        lanes of a row have 8 columns each, 2 from each of four groups of 8.
      cluster: CTAs of a cluster, which walk the same keys with different rows.
      ragged: whether query rows are found through cu_seqlens_q.
      causal: whether query i of S sees only keys j < seq_len - (S - 1) + i.
      visible_lens: whether an array says how many keys each token sees, in place of the causal rule.
      batch_invariant: whether requests are cut at fixed keys, so that a row's bits do not depend on the rest of the
        batch.
      skips: whether a request with a negative length belongs to another launch, which computes its rows. If
        set, each request has max_q_len tokens, except the last one, which has the remaining tokens.
      max_logits: whether each row's greatest logit is a result.
    """

    num_heads: int
    max_q_len: int
    latent_dim: int
    head_dim: int
    page_size: int
    block: int
    tile_rows: int
    q_rows: int
    p_rows: int
    few_rows: bool
    min_share: int
    out_dtype: str
    partial_needs_scale: bool
    partial_is_lane_order: bool
    cluster: int = 1
    ragged: bool = False
    causal: bool = False
    visible_lens: bool = False
    batch_invariant: bool = False
    skips: bool = False
    max_logits: bool = False

    @property
    def partial_dtype(self) -> str:
        """The dtype of a piece's result. f16 halves the bytes that are written and read again, but takes more
        instructions, which limit the merging of few rows."""
        return "float32" if self.few_rows else "float16"

    @property
    def partial_numbers(self) -> int:
        """How many numbers `partial_lse` has for each row of a piece."""
        return 3 + self.max_logits

    @property
    def max_tiles(self) -> int:
        """How many row tiles the longest query has."""
        return -(-self.max_q_len * self.num_heads // self.tile_rows)


def invariant_piece_blocks(shape: LatentShape, max_pages: int) -> int:
    """How many key blocks a piece of a request has if batch_invariant. This depends on the table's width only."""
    blocks = _blocks(shape, max_pages)
    return INVARIANT_MIN_KEYS // shape.block - 1 - (-blocks // INVARIANT_MAX_PIECES)


def launches(shape: LatentShape, batch: Dim, max_pages: Dim) -> list[tuple[Dim, Dim]]:
    """The requests [first, stop) of each launch that a call takes. One launch takes all, unless the partial results of
    a large batch_invariant batch exceed INVARIANT_WORKSPACE bytes: then each launch takes as many requests as fit.
    A row's bits depend neither on the batch nor on the launch."""
    if not shape.batch_invariant or not (isinstance(batch, int) and isinstance(max_pages, int)):
        return [(0, batch)]
    row_bytes = shape.latent_dim * ITEMSIZE[shape.partial_dtype] + shape.partial_numbers * ITEMSIZE["float32"]
    slots = shape.max_tiles * -(-_blocks(shape, max_pages) // invariant_piece_blocks(shape, max_pages))
    each = max(1, INVARIANT_WORKSPACE // (max(slots, 1) * shape.tile_rows * row_bytes))  # no slots without pages
    return [(first, min(first + each, batch)) for first in range(0, batch, each)]


def line_length(shape: LatentShape, batch: int, max_pages: int, q_rows: int) -> int:
    """The greatest possible length of the line of a call's largest launch: the key blocks of all row tiles, plus
    OVERHEAD for each piece, if every request fills its table. `q_rows` are the call's tokens times heads."""
    blocks, pieces = _blocks(shape, max_pages), 1
    if shape.batch_invariant:
        pieces = -(-blocks // invariant_piece_blocks(shape, max_pages))
    largest = max((stop - first for first, stop in launches(shape, batch, max_pages)), default=0)
    return min(largest * shape.max_tiles, largest + q_rows // shape.tile_rows) * (blocks + OVERHEAD * pieces)


def workspace_shapes(
    shape: LatentShape, num_sms: int, batch: int, max_pages: int
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shapes and dtypes of a kernel's workspaces, in the order of its operands, for a launch that serves `batch`
    requests.

    A cluster has two slots of `partial_out` and two entries of `split_info`, because it makes at most two pieces of row
    tiles that other clusters share: the end of one tile and the start of another. If batch_invariant, a row tile has
    its own slots and one entry; these entries follow one unused entry for each cluster. The kernel derives the number
    of clusters from the number of entries. `partial_lse` has these numbers for each row of a piece: its base-2
    log-sum-exp, the factors for the first and the second half of its columns in `partial_out`, and, if the call returns
    greatest logits, the row's greatest logit among the piece's keys.
    """
    num_clusters = max(1, num_sms // shape.cluster)
    if shape.batch_invariant:
        row_tiles = batch * shape.max_tiles
        slots = row_tiles * -(-_blocks(shape, max_pages) // invariant_piece_blocks(shape, max_pages))
        entries = num_clusters + row_tiles
    else:
        slots = entries = 2 * num_clusters
    return {
        "partial_out": ((slots, shape.tile_rows, shape.latent_dim), shape.partial_dtype),
        "partial_lse": ((slots, shape.partial_numbers, shape.tile_rows), "float32"),
        "split_info": ((entries, 4), "int32"),
    }


def _blocks(shape: LatentShape, max_pages: int) -> int:
    """How many key blocks a full row of the block table has."""
    return -(-max_pages * shape.page_size // shape.block)

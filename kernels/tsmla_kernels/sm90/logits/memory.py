"""Records of indexer_logits: words of shared memory, and the bundles that its device functions pass on."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from tsmla_kernels.sm90.operands import TmaCopy


class Piece(IntEnum):
    """Words that describe a piece: a range of key blocks of one tile of query tokens."""

    BLOCK_BEGIN = 0
    BLOCK_END = 1  # if it equals BLOCK_BEGIN, the CTA has no further piece
    ROW = 2  # the tile's first row of q and of the logits
    TOKENS = 3  # query tokens of the tile
    FIRST_KEYS = 4  # keys that the tile's first token sees


class Arrays(NamedTuple):
    """The arrays of a launch. cu_seqlens_q is None if each request has one token; row_lens and row_requests are None
    if config.writes_rows is False."""

    q: cute.Tensor
    weights: cute.Tensor
    k_cache: cute.Tensor
    block_tables: cute.Tensor
    seq_lens: cute.Tensor
    cu_seqlens_q: cute.Tensor | None
    logits: cute.Tensor
    row_lens: cute.Tensor | None
    row_requests: cute.Tensor | None


class Tma(NamedTuple):
    """The TMA loads of queries and keys."""

    q: TmaCopy
    keys: TmaCopy


class Mma(NamedTuple):
    """The tiled MMAs of a product: for its first step, and for the steps that add to it."""

    first: cute.TiledMma
    more: cute.TiledMma


class Buffers(NamedTuple):
    """Buffers in shared memory, each with a `full` and an `empty` barrier. `memory` has keys or queries; `scales` has
    the keys' scales or the heads' weights."""

    memory: cute.Pointer
    scales: cute.Pointer
    full: cute.Pointer
    empty: cute.Pointer


class Shared(NamedTuple):
    """A CTA's shared memory. pieces: a tensor [word of Piece, stage of Q]: each stage's piece."""

    q: Buffers
    keys: Buffers
    pieces: cute.Tensor


class Stage(NamedTuple):
    """A stage of a ring, and the parity with which its barrier is waited for."""

    index: Int32
    phase: Int32


class Request(NamedTuple):
    """A request: how many keys and query tokens it has, and the row of its first token."""

    keys: Int32
    tokens: Int32
    row: Int32


class Position(NamedTuple):
    """A place on the line of all tiles' key blocks: request, tile (counted from the request's end), block."""

    request: Int32
    tile: Int32
    block: Int32


class Share(NamedTuple):
    """A CTA's share of the work: the position of its first block, that block's request, and the number of blocks."""

    position: Position
    request: Request
    blocks: Int32


class Extent(NamedTuple):
    """Facts for the copies of a piece: how many keys its request has, how many blocks the piece has, and a page for
    each lane: lane i has the block table's entry i, counted from that of the piece's first block."""

    keys: Int32
    blocks: Int32
    pages: Int32

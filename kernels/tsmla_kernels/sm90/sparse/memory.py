"""Records of the sparse kernel: the bundles that its device functions pass on."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu.warpgroup import SmemLayoutAtomKind

from tsmla_kernels.sm90.latent.key_softmax import Exchange
from tsmla_kernels.sm90.latent.memory import Place, Results, Running
from tsmla_kernels.sm90.sparse.config import GATHER_WARPS

PIECES_KEPT = 16  # descriptions kept: of pieces described ahead, and of pieces that the slowest warp still reads
GATHER_WARP = 12  # the first gathering warp, which also finds the first piece
GATHER_ROWS = 64 // GATHER_WARPS  # rows of a block that a gathering warp copies
FIRST_PIECES_THREADS = 32 + 32 * GATHER_WARPS  # the scheduling warp and the gathering warps


class Arrays(NamedTuple):
    """The launcher's operands but q and the caches.

    Attributes:
      indices: [T, K] i32. lengths: [T] i32; if the call has no lengths, a tensor of that shape whose values are not
        read.
      sinks: [H] f32, or None. scales: [3] f32.
      out: [N, L]. lse: [N] f32, natural log. max_logits: [N] f32, or None if the call returns no greatest logits.
      partial_out, partial_lse, split_info: the workspaces of config.workspace_shapes.
      bits, token_lengths: None if a row tile has one token. If it has several, the indices are unions; bits has, for
        each slot, a bit for each token of the group, and token_lengths a length for each token: see UnionArrays.
      q_rope: [N, W], the rope columns of q, if they are a separate array, otherwise None.
    """

    indices: cute.Tensor
    lengths: cute.Tensor
    sinks: cute.Tensor | None
    scales: cute.Tensor
    out: cute.Tensor
    lse: cute.Tensor
    partial_out: cute.Tensor
    partial_lse: cute.Tensor
    split_info: cute.Tensor
    bits: cute.Tensor | None = None
    token_lengths: cute.Tensor | None = None
    max_logits: cute.Tensor | None = None
    q_rope: cute.Tensor | None = None


class Query(NamedTuple):
    """The copy of Q into shared memory: the TMA atom and tensor, the operand q, Q's place in shared memory, and the
    barrier on which Q arrives."""

    atom: cute.CopyAtom
    tma: cute.Tensor
    q: cute.Tensor
    place: cute.Pointer
    full: cute.Pointer


class Scratch(NamedTuple):
    """Shared memory of the softmax warpgroup: Q, scratch for reducing over keys, and `valid` and `of_tokens` of
    Gather."""

    query: Query
    exchange: cute.Pointer
    valid: cute.Tensor
    of_tokens: cute.Tensor | None


class Gather(NamedTuple):
    """Operands and shared memory of the gathering warps.

    Attributes:
      q, q_rope, indices: operands; q_rope is None if q is one array. caches: one cache or two.
      ring: the address of the ring's first stage. full, empty: the ring's barriers.
      valid: [GATHER_WARPS, stages], a word for the rows that a gathering warp copies to a stage. It has a bit for each
        row, which says whether the row's slot exists; or, if a row tile has several tokens, a bit for each token, which
        says whether the token selects any of these rows.
      pieces: the descriptions of pieces.
      bits: as in Arrays. of_tokens: [keys of a stage, stages], for each row the bits of the tokens that select it, or 0
        if the row's slot does not exist. None if a row tile has one token.
    """

    q: cute.Tensor
    q_rope: cute.Tensor | None
    caches: tuple[cute.Tensor, ...]
    indices: cute.Tensor
    ring: Int32
    full: cute.Pointer
    empty: cute.Pointer
    valid: cute.Tensor
    pieces: cute.Tensor
    bits: cute.Tensor | None
    of_tokens: cute.Tensor | None


class Step(NamedTuple):
    """A step of K Q^T: 16 columns of K. It has the index of their fragment; which half of the fragment they are (None:
    all of it, because the columns have 16 bits); and the index of the group that has their scale (None: no scale)."""

    fragment: int
    half: int | None
    group: int | None


class QueryTile(NamedTuple):
    """The layout of a row tile's Q in shared memory: its dtype, its swizzle and its columns."""

    dtype: type
    swizzle: SmemLayoutAtomKind
    columns: int


class QueryOperands(NamedTuple):
    """The MMA of K Q^T and Q as its operand, and a second such pair for columns that are multiplied as bf16. If there
    are no such columns, the second pair is the first."""

    mma_qk: cute.TiledMma
    t_q: cute.Tensor
    mma_16: cute.TiledMma
    t_q_16: cute.Tensor


class Held(NamedTuple):
    """The values that a softmax thread keeps from piece to piece, and views of shared memory.

    Attributes:
      mma_qk, t_q, mma_16, t_q_16: as in QueryOperands. query: the copy of Q.
      acc: S^T of a block. part: the part of S^T that a group of columns adds, if queries are e4m3 and rows have scales.
      narrow: fragments of K in the cache's dtype. wide: steps of K converted to f16, if queries have 16 bits.
      factors: scales of the lane's two keys.
      k_offset, scales_offset, p_offset: the offsets in a stage of the lane's row of K, its first key's scales, and its
        row of P.
      p_words: P, packed into the words that are stored. exchanged: shared-memory scratch. running: the lane's maxima
        and sums.
      valid, of_tokens: as in Gather. scales: the operand. results: the arrays for finished rows.
      place: the thread's place. signals: 1 if the lane arrives on `ready` in Ring.signal_if, otherwise 0.
    """

    mma_qk: cute.TiledMma
    t_q: cute.Tensor
    mma_16: cute.TiledMma
    t_q_16: cute.Tensor
    query: Query
    acc: cute.Tensor
    part: cute.Tensor | None
    narrow: cute.Tensor
    wide: cute.Tensor | None
    factors: cute.Tensor
    k_offset: Int32
    scales_offset: Int32
    p_offset: Int32
    p_words: cute.Tensor
    exchanged: Exchange
    running: Running
    valid: cute.Tensor
    of_tokens: cute.Tensor | None
    scales: cute.Tensor
    results: Results
    place: Place
    signals: Int32

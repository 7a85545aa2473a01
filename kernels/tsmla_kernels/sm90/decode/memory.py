"""Records of decode alone: its operands, the words of the copying warp, and the bundles of its device functions."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

COPY_STATE_WORDS = 8
PIECES_KEPT = 8  # size of the ring of descriptions; fewer pieces are described but not yet finished at any time
LOOKAHEAD = 4  # a piece is described this many pieces before the value warpgroups reach it
FIRST_PIECES_THREADS = 64  # the scheduling warp and the copying warp


class CopyState(IntEnum):
    """Words of shared memory in which the copying warp keeps its state. In kernels without a warpgroup for
    copies O takes most of the copying warp's registers."""

    BLOCK = 0  # next key block of the current piece
    BLOCK_END = 1
    FIRST_PAGE = 2  # index, in the block table, of the page in pages[0]
    NEXT_PIECE = 3
    Q_STAGES = 4  # how many stages of the next piece's Q have been requested
    ENDED = 5  # 1 after the last piece
    FILLED = 6  # how many stages `Copier.begin` has requested


class Tma(NamedTuple):
    """TMA atoms and the global tensors that they copy: see Copier.tensor_maps."""

    q_atom: cute.CopyAtom
    q: cute.Tensor
    keys_atom: cute.CopyAtom
    keys: cute.Tensor
    q_rope_atom: cute.CopyAtom | None = None  # if the rope columns are a separate array
    q_rope: cute.Tensor | None = None


class Arrays(NamedTuple):
    """The launcher's operands after q, q_rope and kv_cache. They are read and written by ordinary instructions.

    Attributes:
      block_tables: [B, M] i32. seq_lens: [B] i32.
      cu_seqlens_q: [B + 1] i32, read only if ragged; pass seq_lens otherwise.
      scales: [2] f32, the logits' scale and the output's.
      out: [N, L]. lse: [N] f32, natural log.
      partial_out, partial_lse, split_info: the workspaces of config.workspace_shapes.
      visible_lens: [T] i32, how many keys each token sees. None if each token sees all keys or the causal rule says how
        many.
    """

    block_tables: cute.Tensor
    seq_lens: cute.Tensor
    cu_seqlens_q: cute.Tensor
    scales: cute.Tensor
    out: cute.Tensor
    lse: cute.Tensor
    partial_out: cute.Tensor
    partial_lse: cute.Tensor
    split_info: cute.Tensor
    visible_lens: cute.Tensor | None = None


class Copies(NamedTuple):
    """Operands and shared memory of the copying warp.

    Attributes:
      tma, block_tables: operands.
      keys: the ring's stages of keys. full: the ring's barriers.
      pieces: the ring of descriptions. state: the words of CopyState.
      pages: TABLE_AHEAD pages of the current request.
      rank: this CTA's index in its cluster.
    """

    tma: Tma
    block_tables: cute.Tensor
    keys: cute.Tensor
    pieces: cute.Tensor
    state: cute.Tensor
    pages: cute.Tensor
    full: cute.Pointer
    rank: Int32


class Scratch(NamedTuple):
    """Shared memory of the softmax warpgroup: Q or Q's rope columns, and scratch for reducing over keys."""

    q: cute.Pointer
    exchange: cute.Pointer


class ThreadScores(NamedTuple):
    """A lane's S and P of a block, as [row, key]. They share registers unless the softmax speculates (see Softmax)."""

    s: cute.Tensor
    p: cute.Tensor

"""Records of the decode kernels: words of shared memory and barriers by name, and what travels together."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from tsmla_kernels.sm90.decode.config import ROWS


class Piece(IntEnum):
    """Words of a piece's description. A piece is some key blocks of one row tile: what a cluster works on at a time."""

    BLOCK_BEGIN = 0
    BLOCK_END = 1  # BLOCK_BEGIN if there is no piece: the end of the cluster's work
    KEYS = 2  # of the request
    FIRST_TOKEN_KEYS = 3  # keys that the request's first query token sees, where causal
    ROW_IN_REQUEST = 4  # first query row of this CTA
    ROW = 5  # the same row of q and out
    VALID_ROWS = 6
    SLOT = 7  # of partial_out; -1: the piece is the whole row tile, and goes to out
    REQUEST = 8
    Q_STAGES = 9  # stages of the ring that Q takes


class SplitEntry(IntEnum):
    """Words of a row of split_info: what `combine` must know of a row tile that was cut."""

    ROW = 0  # first row of out
    ROWS = 1
    SLOT = 2  # of the first piece
    PIECES = 3  # how many, 0: nothing to merge; plus Busy's flags


class Busy(IntEnum):
    """Flags beside SplitEntry.PIECES: the cluster of a tile's first or last piece has another tile to merge too."""

    FIRST = 1 << 16
    LAST = 1 << 17


class CopyState(IntEnum):
    """Words in which the copying warp keeps its place: its registers may be taken by O."""

    BLOCK = 0  # the next key block of the piece under way
    BLOCK_END = 1
    FIRST_PAGE = 2  # position in the block table of the first page in `pages`
    NEXT_PIECE = 3
    Q_STAGES = 4  # stages of the next piece's Q that are under way
    ENDED = 5
    FILLED = 6  # stages that were asked for before the warps took their roles


COPY_STATE_WORDS = 8
PIECES_KEPT = 8  # places in the ring of descriptions: the pieces that the stages filled ahead may belong to
LOOKAHEAD = 4  # pieces that are described before the slowest reader comes to them


class ScheduleState(IntEnum):
    """Words in which the scheduling warp keeps its place in the cluster's share of the batch."""

    REQUEST = 0
    TILE = 1  # row tile of the request
    TILE_START = 2  # where that begins on its line
    BEGIN = 3  # of the share, on the line
    END = 4
    KIND = 5  # a ScheduleKind
    PIECE_OF_TILE = 6  # the next, where batch_invariant; -1: the first one that begins in the share
    EQUAL_COST = 7  # length of every row tile on the line; 0 where they differ
    TRACKS = 8  # or the first word of the cluster's requests, where these are given out by their length


class ScheduleKind(IntEnum):
    """How a batch is shared out: see BatchShare.share."""

    LINE = 0
    WHOLE = 1
    CUT = 2
    PACKED = 3


class Barrier(IntEnum):
    """Named barriers of the attention kernel; 0 is sync_threads."""

    SOFTMAX = 1  # the four warps of the softmax warpgroup
    FIRST_PIECES = 2  # the scheduling warp has described the first pieces: the copying warp waits
    Q_READ = 3  # to 6, by piece % PIECE_BARRIERS: Q's stages were read, value warps wait
    KEYS_READ = 7  # to 10, likewise: a piece's last keys were read


PIECE_BARRIERS = 4  # the softmax warpgroup is fewer pieces ahead of the value warpgroups
SOFTMAX_THREADS = 128
FIRST_PIECES_THREADS = 64
READ_THREADS = 384  # of the softmax warpgroup and the two value warpgroups


class CombineBarrier(IntEnum):
    """Named barriers of the combine kernel."""

    GROUP = 1  # and 2: one for each thread group


class Tma(NamedTuple):
    """TMA atoms and the global tensors that they copy: see DecodeKernel.tensor_maps."""

    q_atom: cute.CopyAtom
    q: cute.Tensor
    keys_atom: cute.CopyAtom
    keys: cute.Tensor


class Operands(NamedTuple):
    """Operands of the launcher. All shapes but H, L, R and Z are dynamic; N = T * H query rows.

    Attributes:
      q: [N, D]. kv_cache: [P, Z, D]. block_tables: [B, M] i32. seq_lens: [B] i32.
      cu_seqlens_q: [B + 1] i32, read only when ragged: pass seq_lens otherwise.
      scales: [2] f32, the logits' scale and the output's.
      out: [N, L]. lse: [N] f32, natural log.
      partial_out, partial_lse, split_info: the workspaces of config.workspace_shapes.
    """

    q: cute.Tensor
    kv_cache: cute.Tensor
    block_tables: cute.Tensor
    seq_lens: cute.Tensor
    cu_seqlens_q: cute.Tensor
    scales: cute.Tensor
    out: cute.Tensor
    lse: cute.Tensor
    partial_out: cute.Tensor
    partial_lse: cute.Tensor
    split_info: cute.Tensor


class Arrays(NamedTuple):
    """The operands that the attention kernel reads and writes by ordinary instructions."""

    block_tables: cute.Tensor
    seq_lens: cute.Tensor
    cu_seqlens_q: cute.Tensor
    scales: cute.Tensor
    out: cute.Tensor
    lse: cute.Tensor
    partial_out: cute.Tensor
    partial_lse: cute.Tensor
    split_info: cute.Tensor








class Schedule(NamedTuple):
    """What the scheduling warp reads and writes.

    Attributes:
      block_tables, seq_lens, cu_seqlens_q, partial_lse, split_info: the kernel's operands.
      pieces: the ring of descriptions, [Piece, place].
      state: a ScheduleState, and the cluster's requests or the number of tracks.
      num_clusters, cluster_index: of the grid. rank: of this CTA in its cluster.
      all_rows: rows of out.
      order: scratch for sorting requests.
    """

    block_tables: cute.Tensor
    seq_lens: cute.Tensor
    cu_seqlens_q: cute.Tensor
    partial_lse: cute.Tensor
    split_info: cute.Tensor
    pieces: cute.Tensor
    state: cute.Tensor
    num_clusters: Int32
    cluster_index: Int32
    rank: Int32
    all_rows: Int32
    order: cute.Tensor


class Copies(NamedTuple):
    """What the copying warp reads and writes.

    Attributes:
      tma, block_tables: of the operands.
      keys: the ring, as stages of keys. full: its barriers.
      pieces: the ring of descriptions. state: a CopyState.
      pages: TABLE_AHEAD pages of the request under way.
      rank: of this CTA in its cluster.
    """

    tma: Tma
    block_tables: cute.Tensor
    keys: cute.Tensor
    pieces: cute.Tensor
    state: cute.Tensor
    pages: cute.Tensor
    full: cute.Pointer
    rank: Int32


class Shared(NamedTuple):
    """Shared memory of the attention kernel: the ring, and what goes with its stages.

    Attributes:
      keys, p: the keys and P of all stages.
      full, empty, ready: the barriers of all stages.
      rescale: [ROWS, stages], what O's rows are multiplied by before a stage's product.
      moved: [4, stages], whether `rescale` holds anything for 16 rows.
      inverse: [ROWS, places], 1 / row sum of a piece.
      pieces: the ring of descriptions.
    """

    keys: cute.Tensor
    p: cute.Tensor
    full: cute.Pointer
    empty: cute.Pointer
    ready: cute.Pointer
    rescale: cute.Tensor
    moved: cute.Tensor
    inverse: cute.Tensor
    pieces: cute.Tensor


class Scratch(NamedTuple):
    """Shared memory of the softmax warpgroup: Q, or its rope columns, and where its warps exchange row values."""

    q: cute.Pointer
    exchange: cute.Pointer


class ThreadScores(NamedTuple):
    """A lane's S and P of a block, by rows: the same registers if P overwrites S."""

    s: cute.Tensor
    p: cute.Tensor


class Running(NamedTuple):
    """A lane's rows while their keys go by: the running maxima m (base 2, scaled) and the sums l."""

    m: cute.Tensor
    l: cute.Tensor


class Place(NamedTuple):
    """A thread of the softmax warpgroup: its number there, its warp, its lane, and the first of its two query rows."""

    thread: Int32
    warp: Int32
    lane: Int32
    row_low: Int32



@dataclass(frozen=True)
class Described:
    """A piece's description by words: `piece[Piece.KEYS]`. Not a slice: its address would be computed earlier."""

    pieces: cute.Tensor
    place: Int32

    def __getitem__(self, word: Piece) -> Int32:
        return self.pieces[word, self.place]

    def __setitem__(self, word: Piece, value: Int32) -> None:
        self.pieces[word, self.place] = value


class Stage(NamedTuple):
    """A stage of the ring and the parity of its barriers."""

    index: Int32
    phase: Int32


class KeyRange(NamedTuple):
    """Key blocks [begin, end)."""

    begin: Int32
    end: Int32


class Taken(NamedTuple):
    """When Q has been taken: the first stage of keys, its parity, and the scale of the logits, base 2."""

    index: Int32
    phase: Int32
    scale: Float32


class Scored(NamedTuple):
    """When a piece's blocks have been scored: the stage behind them, its parity, and the stage of the last block."""

    index: Int32
    phase: Int32
    last: Int32


class Results(NamedTuple):
    """Where a row's results go: 1 / sum for the epilogue, and log-sum-exps; `out_scale` multiplies the output."""

    inverse: cute.Tensor
    lse: cute.Tensor
    partial_lse: cute.Tensor
    out_scale: Float32
    rank: Int32


class Ahead(NamedTuple):
    """A stage that comes next: whether it has arrived, its address, the stage behind it and that one's parity."""

    arrived: Int32
    address: Int32
    following: Int32
    phase: Int32









@cute.jit
def two_rows(values: cute.Tensor, column: Int32, v: cutlass.Constexpr[int], lane: Int32, pair: cute.Tensor):
    """The lane's two query rows of the v-th eight, of column `column` of `values`, into `pair`."""
    source = (values.iterator + (column * ROWS + 8 * v + lane % 4 * 2)).align(8)
    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(2)), pair)

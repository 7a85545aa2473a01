"""Records of the latent attention kernels: words of shared memory, barriers, and the bundles that device functions pass
on."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from tsmla_kernels.sm90.latent.shape import ROWS


class Piece(IntEnum):
    """Words of a piece's description. A piece, a cluster's unit of work, is a range of key blocks of one row tile."""

    BLOCK_BEGIN = 0
    BLOCK_END = 1  # if equal to BLOCK_BEGIN, there is no piece, and the cluster's work ends
    KEYS = 2  # the request's length
    FIRST_TOKEN_KEYS = 3  # keys that the request's first query token sees, if causal
    FEWEST_KEYS = 3  # with visible_lens, in place of FIRST_TOKEN_KEYS: fewest keys that a token of the row tile sees
    ROW_IN_REQUEST = 4  # this CTA's first query row, counted in the request
    ROW = 5  # this CTA's first query row, counted in q and out
    VALID_ROWS = 6  # how many of this CTA's rows exist; may be negative
    SLOT = 7  # the slot of partial_out; -1: the piece is a whole row tile, and its result goes to out
    REQUEST = 8
    Q_STAGES = 9  # how many stages of the ring Q takes, if Q goes through the ring


class SplitEntry(IntEnum):
    """Words of a row of split_info, which describes a cut row tile to the combine kernel."""

    ROW = 0  # the tile's first row of out
    ROWS = 1
    SLOT = 2  # the first piece's slot
    PIECES = 3  # how many pieces, plus flags of Busy; 0 if there is nothing to merge


class Busy(IntEnum):
    """Flags in SplitEntry.PIECES: the cluster of a tile's first or last piece must also merge a second tile."""

    FIRST = 1 << 16
    LAST = 1 << 17


class ScheduleState(IntEnum):
    """Words in which the scheduling warp keeps the cluster's share of the batch and its place in the share."""

    REQUEST = 0
    TILE = 1  # the row tile's index among its request's row tiles on the line
    TILE_START = 2  # where the tile begins on its line; PACKED: the index of its request among the cluster's requests
    BEGIN = 3  # where the share begins on the line
    END = 4
    KIND = 5  # a ScheduleKind
    PIECE_OF_TILE = 6  # if batch_invariant, index of the tile's next piece; -1: the first one that begins in the share
    EQUAL_COST = 7  # length of every row tile on the line; 0 if each tile's length follows from its keys
    TRACKS = 8  # how many tracks; in kernels that may sort requests, the first word of the cluster's requests


class ScheduleKind(IntEnum):
    """How a batch is shared out: see BatchShare.share."""

    LINE = 0
    WHOLE = 1
    CUT = 2
    PACKED = 3


class Barrier(IntEnum):
    """Named barriers of the attention kernel; 0 is sync_threads."""

    SOFTMAX = 1  # synchronises the four warps of the softmax warpgroup
    FIRST_PIECES = 2  # copying warps wait until the scheduling warp has described the first pieces
    Q_READ = 3  # 3 + piece % PIECE_BARRIERS: value warpgroups wait until the softmax warpgroup has read Q
    KEYS_READ = 7  # 7 + piece % PIECE_BARRIERS: value warpgroups wait until softmax warps have read the last keys
    SUMS = 11  # 11 + piece % PIECE_BARRIERS: value warpgroups wait until softmax warps have written `inverse`


PIECE_BARRIERS = 4  # more than the pieces by which the softmax warpgroup may be ahead of the value warpgroups
SCHEDULE_WARP = 8  # the first warp of the second value warpgroup
SOFTMAX_THREADS = 128
PIECE_THREADS = 384  # the softmax warpgroup and both value warpgroups


class CombineBarrier(IntEnum):
    """Named barriers of the combine kernel."""

    GROUP = 1  # 1 and 2: one for each thread group


class Schedule(NamedTuple):
    """Operands and shared memory of the scheduling warp.

    Attributes:
      block_tables, seq_lens, cu_seqlens_q, partial_lse, split_info: operands.
      pieces: the ring of descriptions, [Piece, place].
      state: the words of ScheduleState.
      num_clusters, cluster_index: how many clusters the grid has, and this cluster's index. rank: this CTA's index in
        its cluster.
      all_rows: rows of out.
      order: scratch for sorting requests.
      visible_lens: [T] i32, how many keys each token sees; None without such an array.
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
    visible_lens: cute.Tensor | None = None


class Request(NamedTuple):
    """A request's size: how many keys it has, its first row of q and out, and how many query rows, row tiles and key
    blocks it has."""

    keys: Int32
    first_row: Int32
    rows: Int32
    tiles: Int32
    blocks: Int32


class FixedPieces(NamedTuple):
    """How row tiles are cut if batch_invariant: how many key blocks a piece has, and how many slots of partial_out a
    tile has."""

    blocks: Int32
    slots: Int32


class Track(NamedTuple):
    """A cluster's track: its index, how many clusters share it, and this cluster's position among these clusters."""

    index: Int32
    clusters: Int32
    position: Int32


class Measure(NamedTuple):
    """A batch's size, and the size of this lane's request: the request whose index is the lane's index.

    Attributes:
      total: length of the line, or of each track. row_tiles: how many row tiles lie on it.
      longest: key blocks of the longest request.
      tracks: how many tracks there are; 1 if all row tiles lie on one line.
      tiles, blocks: how many row tiles on the line, and how many key blocks, this lane's request has.
    """

    total: Int32
    row_tiles: Int32
    longest: Int32
    tracks: Int32
    tiles: Int32
    blocks: Int32


class Sharing(NamedTuple):
    """How a batch is shared out: a ScheduleKind, the length of a share, and the length of every tile on the line (0 if
    each tile's length follows from its keys)."""

    kind: Int32
    length: Int32
    equal_cost: Int32


class Share(NamedTuple):
    """A cluster's share of the batch, as ScheduleState keeps it; `length` is END - BEGIN."""

    request: Int32
    tile: Int32
    tile_start: Int32
    begin: Int32
    length: Int32
    kind: Int32
    equal_cost: Int32
    tracks: Int32


class Shared(NamedTuple):
    """The ring in shared memory, and the words by which the warpgroups inform each other about its stages.

    Attributes:
      keys, p: keys and P of all stages.
      full, empty, ready: mbarriers of all stages.
      rescale: [ROWS, stages], the factors by which O's rows are multiplied before a stage's P V.
      moved: [4, stages], whether O's rows 0 to 15, 16 to 31, ... must be multiplied; only then are their factors
        written and read.
      inverse: [ROWS, inverses_kept], the factor of each row of O: see RowResults.finish_row. A piece has one column.
      pieces: the ring of descriptions, [Piece, place].
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


class Running(NamedTuple):
    """The running maxima m (base 2, scaled) and sums l of a lane's query rows. m may be less than the greatest score,
    so `highest` has the greatest P of each row among the lane's keys, as pairs of f16: P is exp2 of a score minus m. It
    is None if the call returns no greatest logits."""

    m: cute.Tensor
    l: cute.Tensor
    highest: cute.Tensor | None = None


class Place(NamedTuple):
    """A thread of the softmax warpgroup: its index, its warp, its lane, the first of its two query rows."""

    thread: Int32
    warp: Int32
    lane: Int32
    row_low: Int32


@dataclass(frozen=True)
class Described:
    """A piece's description: `piece[Piece.KEYS]` is one of its words. It is not a slice of `pieces`, because a slice's
    address would be computed before it is needed."""

    pieces: cute.Tensor
    place: Int32

    def __getitem__(self, word: Piece) -> Int32:
        return self.pieces[word, self.place]

    def __setitem__(self, word: Piece, value: Int32) -> None:
        self.pieces[word, self.place] = value


class Blocks(NamedTuple):
    """The key blocks of a piece: its description, the first block, and the block after the last. If begin == end, the
    cluster's work has ended."""

    piece: Described
    begin: Int32
    end: Int32


class Taken(NamedTuple):
    """The state after Q has been taken: the first stage of keys, its parity, and the scale of the logits, base 2."""

    index: Int32
    phase: Int32
    scale: Float32


class Scored(NamedTuple):
    """The state after a piece's blocks have been scored: the stage after them, its parity, and the last block's
    stage."""

    index: Int32
    phase: Int32
    last: Int32


class Results(NamedTuple):
    """The arrays for a row's factor and log-sum-exp: see RowResults.finish_row. out_scale: the output's scale. rank:
    this CTA's index in its cluster. sinks: [H], or None. max_logits: [N], or None if the call returns no greatest
    logits."""

    inverse: cute.Tensor
    lse: cute.Tensor
    partial_lse: cute.Tensor
    out_scale: Float32
    rank: Int32
    sinks: cute.Tensor | None = None
    max_logits: cute.Tensor | None = None


class Ahead(NamedTuple):
    """The next stage: whether it has arrived, its address, the stage after it, and that stage's parity."""

    arrived: Int32
    address: Int32
    following: Int32
    phase: Int32


@cute.jit
def two_rows(values: cute.Tensor, column: Int32, v: cutlass.Constexpr[int], lane: Int32, pair: cute.Tensor):
    """Read into `pair`, from column `column` of `values`, the values of the lane's two query rows: row
    8 v + 2 (lane % 4) and the next one."""
    source = (values.iterator + (column * ROWS + 8 * v + lane % 4 * 2)).align(8)
    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(2)), pair)

"""The names of all records, buffers and barriers of the kernels that compute sparse_mla's gradient."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from tsmla_kernels.sm90.operands import Block, TmaCopy
from tsmla_kernels.sm90.sparse_backward.config import BLOCK, LATENT_DIM, TILE_HEADS, SparseBackwardConfig
from tsmla_kernels.sm90.storage import storage_of_fields
from tsmla_kernels.sm90.warp import DTYPES

ADDING_GROUPS = 2  # warpgroups that compute the keys' gradients, behind the one that computes scores
COMPUTE_WARPS = 4 * (1 + ADDING_GROUPS)
COMPUTE_THREADS = 32 * COMPUTE_WARPS
GATHER_WARP = COMPUTE_WARPS  # the first of the warps that gather keys
GATHER_WARPS = 4
GATHER_ROWS = 16  # rows of a block that a warp gathers
THREADS = 32 * (GATHER_WARP + GATHER_WARPS)
SLOTS_KEPT = 3  # how many blocks' row indices are kept: gathering is at most two blocks ahead of the additions
COLUMN_TILE = 32  # columns of a block side by side in shared memory
COMPUTE_REGISTERS, OTHER_REGISTERS = 160, 32
WIDE, NARROW = 128, 96  # columns of dQ that a WGMMA computes; for 224 the compiler finds too few registers


class Barrier(IntEnum):
    """Named barriers of compute threads, of all if nothing else is said. Id 0 is `sync_threads`."""

    READ = 1  # P and dS of the block before have been read
    WRITTEN = 2  # P and dS lie in shared memory
    SCORED = 5  # in the warpgroup of scores: what its threads have stored lies in shared memory


class Term(IntEnum):
    """The three numbers that row_terms has for a query row."""

    LSE = 0  # -lse in base 2; -inf if the row saw no key
    SHARE = 1  # what the sink leaves of the weights, 1 / (1 + exp(sink - lse)), or 1; 0 if the row saw no key
    SHIFT = 2  # lse's cotangent minus share * rowsum(d_out * out); 0 if the row saw no key


class Weight(IntEnum):
    """The two numbers that row_weights has for a query row."""

    ALONE = 0  # the most that a weight of 1 adds to a number of a key's gradient, whatever the key is
    BY_LENGTH = 1  # the most that a weight of 1 adds besides, for each unit of the length of the key's value


class Operands(NamedTuple):
    """The arrays of a launch. `record.py` gives their shapes."""

    q: cute.Tensor
    caches: tuple[cute.Tensor, ...]
    indices: cute.Tensor
    lengths: cute.Tensor
    sinks: cute.Tensor
    scales: cute.Tensor
    out: cute.Tensor
    lse: cute.Tensor
    d_out: cute.Tensor
    d_lse: cute.Tensor
    d_q: cute.Tensor
    d_caches: tuple[cute.Tensor, ...]
    sink_terms: cute.Tensor
    sums: Sums
    unions: Unions


class Copies(NamedTuple):
    """The TMA loads of a tile of heads."""

    q: TmaCopy
    d_out: TmaCopy


class Saved(NamedTuple):
    """The results of the forward pass, their cotangents, the sinks and the scales."""

    out: cute.Tensor
    lse: cute.Tensor
    d_out: cute.Tensor
    d_lse: cute.Tensor
    sinks: cute.Tensor
    scales: cute.Tensor


class Keys(NamedTuple):
    """The arrays from which keys are gathered. Row i of `indices` has the slots of token i, or the union of group i's
    slots. lengths[i] says how many, if the config has lengths or groups of tokens; if it has groups, a negative number
    says that this launch has no work for the token or group. bits: of each slot of a union, bit j says whether token j
    of the group selects it."""

    caches: tuple[cute.Tensor, ...]
    indices: cute.Tensor
    lengths: cute.Tensor
    bits: cute.Tensor


class Unions(NamedTuple):
    """The workspaces of groups of tokens: see UnionArrays. If each token is alone, other arrays stand for them."""

    slots: cute.Tensor
    bits: cute.Tensor
    lengths: cute.Tensor
    token_lengths: cute.Tensor


class Sums(NamedTuple):
    """The workspaces: see `backward_workspaces`. Unless deterministic, other arrays stand for the last four."""

    kv_sum: cute.Tensor
    row_terms: cute.Tensor
    kv_carry: cute.Tensor
    row_weights: cute.Tensor
    key_lengths: cute.Tensor
    key_bounds: cute.Tensor
    key_counts: cute.Tensor


class Mma(NamedTuple):
    """The tiled MMAs. The `first` ones start a sum; the others add to one."""

    scores_first: cute.TiledMma
    scores: cute.TiledMma
    wide_dq: cute.TiledMma
    dq: cute.TiledMma
    dkv_first: cute.TiledMma
    dkv: cute.TiledMma


class Item(NamedTuple):
    """The work of a CTA: a token, how many heads it has and the first of the tile's, which row of the indices has the
    keys, and how many blocks of keys there are. A group's heads are heads of token 0, which then has the heads of all
    tokens, one token after the other."""

    token: Int32
    heads: Int32
    first_head: Int32
    indices: Int32
    blocks: Int32


class ThreadIndex(NamedTuple):
    """A thread of a compute warpgroup. `group` is the index of the warpgroup among those of its role. `row` is the
    first of the thread's two heads in the tile; the second is `row` + 8."""

    group: Int32
    thread: Int32
    lane: Int32
    row: Int32


class Shared(NamedTuple):
    """The shared memory of the main kernel.

    `keys` has one block of gathered rows. `p` and `ds` are P and dS, [heads, keys]. `rows` [key, block % SLOTS_KEPT]
    has the row in kv_sum of each key, or -1 if it does not exist. `valid` [warp, token of the group, block %
    SLOTS_KEPT] has a bit for each of a gathering warp's rows, set if the row exists and the token selects it. `terms`
    [Term, head] has the terms of the tile's heads. If deterministic, `scales`, indexed as `rows`, has the
    scale of each key's numbers (bounds.py).
    """

    queries_full: cute.Pointer
    keys_full: cute.Pointer
    keys_empty: cute.Pointer
    q: cute.Pointer
    d_out: cute.Pointer
    keys: cute.Pointer
    p: cute.Pointer
    ds: cute.Pointer
    rows: cute.Tensor
    valid: cute.Tensor
    scales: cute.Tensor
    terms: cute.Tensor


class Traits:
    """Static sizes, dtypes and layouts that all parts of the kernel share. Sizes are counted in elements."""

    def __init__(self, config: SparseBackwardConfig) -> None:
        self.config = config
        self.dtype = DTYPES[config.dtype]
        self.element_bytes = self.dtype.width // 8
        self.head_dim = config.head_dim
        self.row_bytes = self.head_dim * self.element_bytes
        # Columns of dQ: those of the warpgroup of scores, then those of each warpgroup that adds.
        self.scorer_dq = (WIDE,)
        self.adder_dq = (NARROW, (self.head_dim - WIDE) // ADDING_GROUPS - NARROW)
        # Columns of the keys' gradient that a warpgroup computes at once: as many as there are registers for.
        self.chunk_columns = COLUMN_TILE if self.head_dim > LATENT_DIM else 2 * COLUMN_TILE
        self.early_columns = (self.head_dim // 64 + 1) // 2 * 64  # of a block's keys: those that are copied first
        self.q = Block(TILE_HEADS, self.head_dim, COLUMN_TILE, TILE_HEADS)
        self.d_out = Block(TILE_HEADS, LATENT_DIM, COLUMN_TILE, TILE_HEADS)
        # Each part of dQ's columns needs whole column tiles of keys.
        self.keys = Block(BLOCK, self.head_dim, COLUMN_TILE, BLOCK)
        self.scores = Block(TILE_HEADS, BLOCK, BLOCK, TILE_HEADS)

    def bytes_of(self, block: Block) -> int:
        return block.elements * self.element_bytes

    def memory_of(self, block: Block) -> Any:
        """The field of a struct of shared memory that has the block."""
        return cute.struct.Align[cute.struct.MemRange[self.dtype, block.elements], 1024]


def make_storage(traits: Traits) -> Any:
    """The struct of the main kernel's shared memory. Raises ValueError if it exceeds a CTA's shared memory."""

    fields: dict[str, Any] = {
        "queries_full": cute.struct.MemRange[Int64, 1],
        "keys_full": cute.struct.MemRange[Int64, 2],
        "keys_empty": cute.struct.MemRange[Int64, 1],
        "rows": cute.struct.Align[cute.struct.MemRange[Int32, SLOTS_KEPT * BLOCK], 16],
        "valid": cute.struct.Align[cute.struct.MemRange[Int32, SLOTS_KEPT * GATHER_WARPS * traits.config.tokens], 16],
        "scales": cute.struct.Align[cute.struct.MemRange[Int32, SLOTS_KEPT * BLOCK], 16],
        "terms": cute.struct.Align[cute.struct.MemRange[Float32, len(Term) * TILE_HEADS], 16],
        "q": traits.memory_of(traits.q),
        "d_out": traits.memory_of(traits.d_out),
        "keys": traits.memory_of(traits.keys),
        "p": traits.memory_of(traits.scores),
        "ds": traits.memory_of(traits.scores),
    }
    return storage_of_fields(fields, traits.config)


def shared_memory(storage: cute.struct, tokens: int) -> Shared:
    """Views of the allocated `storage`. tokens: how many a group has."""
    tensors = ("rows", "valid", "scales", "terms")
    pointers = {name: getattr(storage, name).data_ptr() for name in Shared._fields if name not in tensors}
    rows, scales = (
        x.get_tensor(cute.make_layout((BLOCK, SLOTS_KEPT), stride=(1, BLOCK))) for x in (storage.rows, storage.scales)
    )
    valid = storage.valid.get_tensor(cute.make_layout((GATHER_WARPS, tokens, SLOTS_KEPT)))
    terms = storage.terms.get_tensor(cute.make_layout((len(Term), TILE_HEADS), stride=(TILE_HEADS, 1)))
    return Shared(rows=rows, valid=valid, scales=scales, terms=terms, **pointers)


def init_mbarriers(shared: Shared) -> None:
    """Initialise the mbarriers, in one thread, with the number of arrivals that complete a phase."""
    cute.arch.mbarrier_init(shared.queries_full, 1)
    for part in range(2):
        cute.arch.mbarrier_init(shared.keys_full + part, 32 * GATHER_WARPS)
    cute.arch.mbarrier_init(shared.keys_empty, COMPUTE_WARPS)

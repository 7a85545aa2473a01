"""The names of all records, buffers and barriers of the kernels that compute prefill's gradient."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from tsmla_kernels.sm90.operands import Block, TmaCopy
from tsmla_kernels.sm90.prefill.backward.config import Q_ROWS, STAGES, BackwardConfig, backward_workspaces
from tsmla_kernels.sm90.prefill.memory import SELECTION_OPERANDS, Buffers, Selection, Stage, named_operands
from tsmla_kernels.sm90.storage import storage_of_fields
from tsmla_kernels.sm90.warp import DTYPES

GROUPS = 2  # compute warpgroups of dK and dV, each with half of a tile's keys unless both have all; halves of dQ
GROUP_KEYS = 64
COMPUTE_WARPS = 4 * GROUPS
DQ_GROUP = GROUPS  # the warpgroup that computes dQ, if the config is wide
DQ_WARPS = 4
TILE_SLOTS = 4  # places in the ring of tile descriptors: the producer is at most two tiles ahead of an epilogue
TILE_WORDS = 12
BUFFERS = {"q": STAGES, "k": 1, "v": 1, "dout": 1, "ds": STAGES, "sums": GROUPS}  # shared-memory buffers of each array
WIDE_BUFFERS = {"q": STAGES, "k": 1, "v": 1, "dout": STAGES, "ds": STAGES, "p": 1}  # the same, if the config is wide
NO_HEAD = -1  # Tile.HEAD at the end of the sequence of tiles


class Tile(IntEnum):
    """Words of a tile descriptor: up to `key_rows` keys of one head of one request, and the queries that see them."""

    HEAD = 0  # NO_HEAD ends the sequence of tiles
    FIRST_KEY = 1
    KEYS = 2
    STEPS = 3  # how many steps the tile takes; a step has Q_ROWS queries
    FIRST_ROW = 4  # the first row of the first step's queries
    ROWS = 5  # rows from FIRST_ROW to the request's end
    FIRST_TERMS = 6  # the index in row_terms of the first step's tile of queries
    DIAGONAL = 7  # causal: query FIRST_ROW + x sees key j of the tile if x >= j + DIAGONAL
    FIRST_BLOCK = 8  # the index in dq_sum of the first step's first block
    ORDER = 9  # the tile's index among the request's key tiles: these add to dq's sums in this order
    ROPE_TURN = 10  # the index of the key tile's counters in rope_turns


class Term(IntEnum):
    """The two terms that row_terms has for each query row and head."""

    LSE = 0  # -lse in base 2; -inf if the row saw no key
    DELTA = 1  # lse's cotangent minus rowsum(dout * out); 0 if the row saw no key


class Operands(NamedTuple):
    """The arrays of a launch, all dense, in the launcher's order, except for `selection`: see `named_operands`.

    q [Tq, H, K], k [Tk, H, K], v [Tk, H, V] in the config's dtype; cu_seqlens_q and cu_seqlens_kv [B + 1] int32; scales
    [2] float32, see `Scale`; out [Tq, H, V] and lse [Tq, H] float32 (natural log), the forward pass's results; their
    cotangents dout and dlse; the gradients dq, dk and dv; the workspaces of `backward_workspaces`, the last two only
    with a `rope_dim`. `sinks` is there if the config has sinks. With a `rope_dim` R > 0, `k` is kv [Tk, H, K - R + V],
    whose rows have the key without its rope columns, then the value; `v` is k_rope [Tk, R], which all heads share; `dk`
    and `dv` are the gradients of kv and k_rope.
    """

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    cu_seqlens_q: cute.Tensor
    cu_seqlens_kv: cute.Tensor
    scales: cute.Tensor
    out: cute.Tensor
    lse: cute.Tensor
    dout: cute.Tensor
    dlse: cute.Tensor
    dq: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor
    dq_sum: cute.Tensor
    row_terms: cute.Tensor
    turns: cute.Tensor
    plan: cute.Tensor
    progress: cute.Tensor
    rope_sum: cute.Tensor | None = None
    rope_turns: cute.Tensor | None = None
    selection: Selection | None = None
    sinks: SinkGradient | None = None


class SinkGradient(NamedTuple):
    """The sinks [H], their gradient, and its partial sums [H, tiles, SINK_TERMS]."""

    sinks: cute.Tensor
    gradient: cute.Tensor
    terms: cute.Tensor


def backward_operands(tensors: tuple[cute.Tensor, ...], config: BackwardConfig) -> Operands:
    """The arrays of a launch of the gradient by name. Sinks follow the offsets and the selection; their gradient
    follows that of the values."""
    rest, sinks = list(tensors), None
    if config.sinks:
        given = rest.pop(SELECTION_OPERANDS.stop if config.selection else SELECTION_OPERANDS.start)
        workspaces = list(backward_workspaces(config, 1, 1, 1, 1))
        gradient = rest.pop(-len(workspaces) - 1)
        sinks = SinkGradient(given, gradient, rest.pop(workspaces.index("sink_terms") - len(workspaces)))
    return named_operands(Operands, tuple(rest), config.selection)._replace(sinks=sinks)


class Copies(NamedTuple):
    """The TMA loads of the operands. `rope` loads K's rope columns if all heads share them, else it equals `k`."""

    q: TmaCopy
    k: TmaCopy
    rope: TmaCopy
    v: TmaCopy
    dout: TmaCopy


class Saved(NamedTuple):
    """The results of the forward pass, and their cotangents."""

    out: cute.Tensor
    lse: cute.Tensor
    dout: cute.Tensor
    dlse: cute.Tensor


class Sums(NamedTuple):
    """Workspaces: the float32 sums of dq and of the shared rope columns, the counters that order the additions, and the
    terms of query rows. Without shared rope columns `rope_sum` and `rope_turns` are placeholders."""

    dq_sum: cute.Tensor
    row_terms: cute.Tensor
    turns: cute.Tensor
    rope_sum: cute.Tensor
    rope_turns: cute.Tensor


class KeyGradients(NamedTuple):
    """The gradients of keys and values, [Tk, H, columns]. With shared rope columns both are dkv [Tk, H, K - R + V]: dk
    without its rope columns, then dv."""

    dk: cute.Tensor
    dv: cute.Tensor


class Mma(NamedTuple):
    """The tiled MMAs. `scores_first` and `dq_first` start a sum; the others add to one."""

    scores_first: cute.TiledMma
    scores: cute.TiledMma
    dk: cute.TiledMma
    dv: cute.TiledMma
    dq_first: cute.TiledMma
    dq: cute.TiledMma


class Shared(NamedTuple):
    """The shared memory of the main kernel. `Traits.buffers` says how many buffers each array has; row_terms has as
    many as `q`.

    row_terms arrive with Q, and Q's barriers release them. `ds` is dS transposed, [key_rows, Q_ROWS]. `sums` has a
    buffer for each compute warpgroup, with the float32 numbers that a reducer warp adds to the sums in global memory.
    `p` is P in float32, which one warpgroup passes to the other. Wide kernels have `p`, all others have `sums`.
    """

    tiles: cute.Tensor
    row_terms: cute.Tensor
    q: Buffers
    k: Buffers
    v: Buffers
    dout: Buffers
    ds: Buffers
    sums: Buffers | None = None
    p: Buffers | None = None


class Accumulators(NamedTuple):
    """A warpgroup's registers: the accumulators S, dP, dK and dV, P in float32, and P and dS as WGMMA operands."""

    s: cute.Tensor
    p_float: cute.Tensor
    dp: cute.Tensor
    p: cute.Tensor
    ds: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor


class Factors(NamedTuple):
    """The logits' scale, the same scale times log2(e), and the output's scale."""

    logits: Float32
    logits_log2: Float32
    output: Float32


class Step(NamedTuple):
    """A step of a tile: the stage of its queries, the slot of the tile's descriptor, and the index of the queries'
    tile, counted from the descriptor's first row."""

    stage: Stage
    slot: Int32
    queries: Int32


class Operand(NamedTuple):
    """An operand in shared memory: its buffers, and the block that each buffer has."""

    buffers: Buffers
    block: Block


class Traits:
    """Static sizes, dtypes and layouts that all parts of the kernel share. Sizes are counted in elements."""

    def __init__(self, config: BackwardConfig) -> None:
        self.config = config
        self.dtype = DTYPES[config.dtype]
        self.element_bytes = self.dtype.width // 8
        self.causal, self.deterministic = config.causal, config.deterministic
        self.selection = config.selection
        self.qk_head_dim, self.v_head_dim = config.qk_head_dim, config.v_head_dim
        self.rope_columns, self.nope_columns = config.rope_dim, config.qk_head_dim - config.rope_dim
        self.dq_columns = self.qk_head_dim // GROUPS
        self.dq_part = 64 if config.wide else self.dq_columns  # columns that a warpgroup computes at once
        self.staging_bytes = Q_ROWS * self.dq_columns * 4  # bytes of a warpgroup's sums in shared memory
        # Each half of dq's columns needs whole column tiles of K.
        k_width = 64 if self.dq_columns % 64 == 0 else 32
        self.q = Block(Q_ROWS, self.qk_head_dim, 64, Q_ROWS)
        self.wide, self.key_rows = config.wide, config.key_rows
        self.buffers = WIDE_BUFFERS if self.wide else BUFFERS
        key_rows = self.key_rows
        self.k = Block(key_rows, self.qk_head_dim, k_width, key_rows)
        self.nope = self.k._replace(columns=self.nope_columns)
        self.rope = self.k._replace(columns=self.rope_columns)
        self.v = Block(key_rows, self.v_head_dim, 64, key_rows)
        self.dout = Block(Q_ROWS, self.v_head_dim, 64, Q_ROWS)
        self.ds = Block(key_rows, Q_ROWS, 64, key_rows)
        self.groups = GROUPS + self.wide  # warpgroups before the producer's
        self.threads = 128 * (self.groups + 1)
        self.producer_warp = 4 * self.groups
        # Registers per thread of each warpgroup: at most 512 in all, as an SM has for each of its 128 lanes.
        self.registers = (208, 216, 64, 24) if self.wide else (240, 240, 24)

    def query_tile(self, step: Int32, steps: Int32) -> Int32:
        """The index of the tile of queries that step `step` takes. If deterministic, the last queries come first: the
        key tile that adds to dq before this one starts with the same queries, so this one can follow it closely."""
        return steps - 1 - step if self.deterministic else step

    def bytes_of(self, block: Block) -> int:
        return block.elements * self.element_bytes


def make_storage(traits: Traits):
    """The struct of the main kernel's shared memory. Raises ValueError if it exceeds a CTA's shared memory."""

    def barriers(count: int):
        return cute.struct.MemRange[Int64, count]

    def buffers(count: int, block: Block):
        return cute.struct.Align[cute.struct.MemRange[traits.dtype, count * block.rows * block.columns], 1024]

    fields: dict[str, Any] = {}
    for name, count in traits.buffers.items():
        fields |= {f"{name}_full": barriers(count), f"{name}_empty": barriers(count)}
    fields["tiles"] = cute.struct.MemRange[Int32, TILE_SLOTS * TILE_WORDS]
    fields["row_terms"] = cute.struct.Align[cute.struct.MemRange[Float32, STAGES * len(Term) * Q_ROWS], 128]
    for name, count in traits.buffers.items():
        if name not in ("sums", "p"):
            fields[name] = buffers(count, getattr(traits, name))
    floats = {"p": traits.key_rows * Q_ROWS} if traits.wide else {"sums": GROUPS * Q_ROWS * traits.dq_columns}
    for name, count in floats.items():
        fields[name] = cute.struct.Align[cute.struct.MemRange[Float32, count], 128]
    return storage_of_fields(fields, traits.config)


def shared_memory(traits: Traits, storage: cute.struct) -> Shared:
    """Views of the allocated `storage`."""

    def buffers(name: str) -> Buffers:
        memory, full, empty = (getattr(storage, name + end).data_ptr() for end in ("", "_full", "_empty"))
        return Buffers(memory, full, empty)

    tiles = storage.tiles.get_tensor(cute.make_layout((TILE_WORDS, TILE_SLOTS), stride=(1, TILE_WORDS)))
    terms = cute.make_layout((Q_ROWS, len(Term), STAGES), stride=(1, Q_ROWS, len(Term) * Q_ROWS))
    return Shared(tiles, storage.row_terms.get_tensor(terms), **{name: buffers(name) for name in traits.buffers})


def init_mbarriers(traits: Traits, shared: Shared) -> None:
    """Initialise the mbarriers, in one thread, with the number of arrivals that complete a phase. A warp arrives once;
    only at `q.empty` do all its lanes arrive."""
    copied = (1, COMPUTE_WARPS)  # arrivals on `full` and on `empty`
    arrivals = {
        "q": (1, COMPUTE_WARPS * 32),
        # Reducer warps read the tile descriptor that arrives with K, the warpgroup of dQ both.
        "k": (1, COMPUTE_WARPS + (DQ_WARPS if traits.wide else GROUPS)),
        "v": copied,
        "dout": copied,
        "ds": (COMPUTE_WARPS // GROUPS, DQ_WARPS) if traits.wide else (COMPUTE_WARPS, COMPUTE_WARPS),
        "sums": (COMPUTE_WARPS // GROUPS, 1),
        "p": (COMPUTE_WARPS // GROUPS, COMPUTE_WARPS // GROUPS),
    }
    for name, count in traits.buffers.items():
        buffers = getattr(shared, name)
        for index in range(count):
            cute.arch.mbarrier_init(buffers.full + index, arrivals[name][0])
            cute.arch.mbarrier_init(buffers.empty + index, arrivals[name][1])

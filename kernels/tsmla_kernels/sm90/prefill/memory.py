"""The names of all records, buffers and barriers of the prefill kernels."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.nvgpu.warpgroup import SmemLayoutAtomKind

from tsmla_kernels.sm90.constants import FP8
from tsmla_kernels.sm90.operands import TmaCopy
from tsmla_kernels.sm90.prefill.config import GROUP_ROWS, WIDE, PrefillConfig, prefill_workspaces
from tsmla_kernels.sm90.storage import storage_of_fields
from tsmla_kernels.sm90.warp import DTYPES

Named = TypeVar("Named")

TILE_SLOTS = 8  # places in the ring of tile descriptors: the producer is at most three tiles ahead of an epilogue
TILE_WORDS = 8
WARPGROUP_THREADS = 128
TURN_THREADS = 2 * WARPGROUP_THREADS
TRANSPOSE_WARPS = 2  # fp8: the warps that transpose V, 64 columns at a time


class KernelTraits:
    """Dtypes, sizes and layouts that a config fixes at compile time.

    Sizes are in elements. A column tile has 64 columns with both element sizes, so that the boxes of TMA and the
    swizzled layouts have equal shapes.
    """

    def __init__(self, config: PrefillConfig) -> None:
        self.config = config
        self.fp8 = config.dtype == FP8
        # With 256 columns the products set the pace, so that whichever warpgroup is ready may issue them.
        self.turns = not self.fp8 and config.v_head_dim < WIDE
        self.dtype = DTYPES[config.dtype]
        self.out_dtype = cutlass.BFloat16 if self.fp8 else self.dtype
        self.element_bytes = self.dtype.width // 8
        self.mma_k = 32 // self.element_bytes  # the K of one WGMMA
        self.swizzle_kind = SmemLayoutAtomKind.K_SW64 if self.fp8 else SmemLayoutAtomKind.K_SW128
        self.qk_head_dim, self.v_head_dim = config.qk_head_dim, config.v_head_dim
        self.causal, self.groups = config.causal, config.groups
        self.selection, self.sinks, self.max_logits = config.selection, config.sinks, config.max_logits
        self.block, self.stages, self.tile_rows = config.block, config.stages, config.tile_rows
        self.k_column_tiles, self.v_column_tiles = self.qk_head_dim // 64, self.v_head_dim // 64
        self.rope_column_tiles = config.rope_dim // 64
        self.nope_column_tiles = self.k_column_tiles - self.rope_column_tiles
        self.q_elements = GROUP_ROWS * self.qk_head_dim
        self.k_elements, self.v_elements = self.block * self.qk_head_dim, self.block * self.v_head_dim
        # fp8: in transposed V and in P the keys fill whole tiles of 128.
        self.transposed_keys = (self.block + 127) // 128 * 128
        self.transposed_elements = self.transposed_keys * self.v_head_dim
        self.p_elements = GROUP_ROWS * self.transposed_keys
        self.threads = WARPGROUP_THREADS * (self.groups + 1)
        self.producer_warp = 4 * self.groups
        self.compute_registers, self.producer_registers = {2: (232, 40), 3: (160, 32)}[self.groups]
        if not self.fp8 and self.groups != 2:
            raise ValueError(f"groups: got {self.groups} with dtype {config.dtype}; legal: 2")

    def layout_atom(self) -> cute.ComposedLayout:
        """The swizzled layout of Q, K and V in shared memory."""
        return warpgroup.make_smem_layout_atom(self.swizzle_kind, self.dtype)


class PlanWord(IntEnum):
    """Words of a row of the plan. A row describes one request."""

    TILES_END = 0  # tiles of all requests up to and including this one
    FIRST_ROW = 1  # the first row of the request's queries
    ROWS = 2
    FIRST_KEY = 3
    KEYS = 4
    HEAD_TILES = 5  # tiles of one head
    SECTION_HEADS = 6  # heads whose tiles follow each other, so that K and V stay in L2
    REQUEST = 7  # backward pass: the request's index in cu_seqlens


class Progress(IntEnum):
    """Words of `progress`. The array is longer: it has one word per CTA, because the launch takes the grid's size from
    its length."""

    NEXT_TILE = 0  # the next tile to claim; in the forward pass a CTA's first tile is not claimed
    TILES = 1  # how many tiles there are


class Tile(IntEnum):
    """Words of a tile descriptor. A tile is up to `tile_rows` query rows of one head of one request."""

    BLOCKS = 0  # key blocks; 0 ends the sequence of tiles
    KEYS = 1  # keys of the request
    FIRST_ROW_KEYS = 2  # causal: keys that the tile's first row sees
    FIRST_ROW = 3
    ROWS = 4
    HEAD = 5
    FIRST_KEY = 6


class Scale(IntEnum):
    """Words of `scales`."""

    LOGITS = 0
    OUTPUT = 1


class Barrier(IntEnum):
    """Named barriers of 16-bit kernels. Each is the first of two ids: compute warpgroup g uses id + g. Id 0 is
    `sync_threads`."""

    TURN = 1  # 256 threads: warpgroup g waits for the other one, which arrives when it has issued its products
    V_ZEROED = 3  # 128 threads: warpgroup g meets after it has zeroed V's rows past the request's end


class Operands(NamedTuple):
    """The arrays of a launch, in the launcher's order, except for `selection`, `sinks` and `max_logits`:
    see `prefill_operands`.

    q [Tq, H, K], k [Tk, H, K], v [Tk, H, V] in the config's dtype; cu_seqlens_q and cu_seqlens_kv [B + 1] int32; scales
    [2] float32, see `Scale`; out [Tq, H, V]; lse [Tq, H] float32 (natural log); and the workspaces of
    `config.prefill_workspaces`; if the config has them, sinks [H] and max_logits [Tq, H], both float32. With a
    `rope_dim` R > 0, `k` is kv [Tk, H, K - R + V], whose rows have the key without its rope columns, then the value;
    `v` is k_rope [Tk, R], which all heads share. If `wide_v`, `v` is [Tk, H, W], whose first V columns are the values.
    """

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    cu_seqlens_q: cute.Tensor
    cu_seqlens_kv: cute.Tensor
    scales: cute.Tensor
    out: cute.Tensor
    lse: cute.Tensor
    plan: cute.Tensor
    progress: cute.Tensor
    selection: Selection | None = None
    sinks: cute.Tensor | None = None
    max_logits: cute.Tensor | None = None


class Selection(NamedTuple):
    """Which keys query rows select, in global memory: `words` [R, W] int32, where bit j of word w stands for key 32 w +
    j of the row's request, and `rows` [Tq] int32, the row of `words` that each query row has. A query row whose entry
    in `rows` is negative selects all keys. W must be a multiple of 4, so that a lane loads a row's words of a block
    at once."""

    words: cute.Tensor
    rows: cute.Tensor


class Optional(NamedTuple):
    """The operands that a call may lack."""

    selection: Selection | None
    sinks: cute.Tensor | None
    max_logits: cute.Tensor | None


SELECTION_OPERANDS = slice(5, 7)  # the places of Selection's arrays among the launcher's


def named_operands(named: Callable[..., Named], tensors: tuple[cute.Tensor, ...], selection: bool) -> Named:
    """The launcher's arrays by name, in the tuple `named`. Those of a selection follow the offsets."""
    if not selection:
        return named(*tensors)
    first, last = tensors[: SELECTION_OPERANDS.start], tensors[SELECTION_OPERANDS.stop :]
    return named(*first, *last, selection=Selection(*tensors[SELECTION_OPERANDS]))


def prefill_operands(tensors: tuple[cute.Tensor, ...], config: PrefillConfig) -> Operands:
    """The arrays of a launch of the forward kernel by name. Sinks follow the offsets and the selection, the greatest
    logits follow lse."""
    rest, optional = list(tensors), {}
    if config.sinks:
        optional["sinks"] = rest.pop(SELECTION_OPERANDS.stop if config.selection else SELECTION_OPERANDS.start)
    if config.max_logits:
        optional["max_logits"] = rest.pop(-len(prefill_workspaces(1)) - 1)
    return named_operands(Operands, tuple(rest), config.selection)._replace(**optional)


class Copies(NamedTuple):
    """The TMA loads of the operands. `rope` loads K's rope columns if all heads share them, else it equals `k`."""

    q: TmaCopy
    k: TmaCopy
    rope: TmaCopy
    v: TmaCopy


class Mma(NamedTuple):
    """The tiled MMAs. `first` starts S = Q K^T, `qk` adds to S, and `pv` adds to O."""

    first: cute.TiledMma
    qk: cute.TiledMma
    pv: cute.TiledMma


class Schedule(NamedTuple):
    """The workspaces that the planner writes: plan [rows, `PlanWord`] and progress [`Progress`]."""

    plan: cute.Tensor
    progress: cute.Tensor


class Results(NamedTuple):
    """The results out [Tq, H, V] and lse [Tq, H] in global memory, and H; the rows' greatest logits [Tq, H] if the call
    returns them, and the sinks [H] that out is computed with, if there are any."""

    out: cute.Tensor
    lse: cute.Tensor
    heads: Int32
    max_logits: cute.Tensor | None = None
    sinks: cute.Tensor | None = None


class Buffers(NamedTuple):
    """The buffers of one array in shared memory. Each buffer has a `full` and an `empty` mbarrier."""

    memory: cute.Pointer
    full: cute.Pointer
    empty: cute.Pointer


class Shared(NamedTuple):
    """The shared memory of the attention kernel.

    `tiles` is the ring of tile descriptors [word, slot]. `q` has one buffer per compute warpgroup; `k` and `v` have one
    per stage. TMA writes V to `landing`. With 16 bits `landing` is `v` itself; with fp8 it has its own buffers,
    and `v` has V transposed. `p` is fp8's P, one buffer per compute warpgroup.
    """

    tiles: cute.Tensor
    q: Buffers
    k: Buffers
    v: Buffers
    landing: Buffers
    p: cute.Pointer


class Stage(NamedTuple):
    """The index of a stage in a ring of buffers, and the parity for which a warp waits at one of the stage's
    barriers."""

    index: Int32
    phase: Int32


class ThreadIndex(NamedTuple):
    """A thread of a compute warpgroup. `row` is the first of its two rows; the second is `row` + 8."""

    group: Int32
    thread: Int32
    lane: Int32
    row: Int32


class Products(NamedTuple):
    """WGMMA's operands and accumulators in one warpgroup.

    The softmax writes P to `p_target`: the registers of operand `p`; with fp8 the address in shared memory that this
    lane passes to stmatrix for the first 32 keys.
    """

    mma: Mma
    thr_qk: cute.core.ThrMma
    thr_pv: cute.core.ThrMma
    q: cute.Tensor
    p: cute.Tensor
    p_target: cute.Tensor | Int32
    acc_s: cute.Tensor
    acc_o: cute.Tensor


class Rows(NamedTuple):
    """The softmax state of this thread's two rows: S and O [2, columns], and for each row the maximum of `scale` * S
    (fp8: minus P_SCALE_BITS), the sum of P, and the number of keys that the row sees. `scale` is the logits' scale
    times log2(e). `selected` is there if the call has a selection."""

    s: cute.Tensor
    o: cute.Tensor
    maximum: cute.Tensor
    total: cute.Tensor
    limit: cute.Tensor
    scale: Float32
    selected: Selected | None = None


class Selected(NamedTuple):
    """The selection's part in a thread's softmax state: for each of its two query rows, the index of that row's words
    in `Selection.words` (negative: all keys), and the words [2 rows, block / 32] of one block of keys."""

    places: cute.Tensor
    words: cute.Tensor


def make_storage(traits: KernelTraits) -> Any:
    """The struct of the attention kernel's shared memory. Raises ValueError if it exceeds a CTA's shared memory."""

    def barriers(count: int) -> Any:
        return cute.struct.MemRange[Int64, count]

    def buffers(count: int, elements: int) -> Any:
        return cute.struct.Align[cute.struct.MemRange[traits.dtype, count * elements], 1024]

    groups, stages = traits.groups, traits.stages
    fields = {"q_full": barriers(groups), "q_empty": barriers(groups)}
    fields |= {name: barriers(stages) for name in ("k_full", "k_empty", "v_full", "v_empty")}
    if traits.fp8:
        fields |= {name: barriers(stages) for name in ("landing_full", "landing_empty")}
    fields["tiles"] = cute.struct.MemRange[Int32, TILE_SLOTS * TILE_WORDS]
    fields["q"] = buffers(groups, traits.q_elements)
    fields["k"] = buffers(stages, traits.k_elements)
    fields["v"] = buffers(stages, traits.transposed_elements if traits.fp8 else traits.v_elements)
    if traits.fp8:
        fields["landing"] = buffers(stages, traits.v_elements)
        fields["p"] = buffers(groups, traits.p_elements)
    return storage_of_fields(fields, traits.config)


def shared_memory(traits: KernelTraits, storage: cute.struct) -> Shared:
    """Views of the allocated `storage`."""
    q = Buffers(storage.q.data_ptr(), storage.q_full.data_ptr(), storage.q_empty.data_ptr())
    k = Buffers(storage.k.data_ptr(), storage.k_full.data_ptr(), storage.k_empty.data_ptr())
    v = Buffers(storage.v.data_ptr(), storage.v_full.data_ptr(), storage.v_empty.data_ptr())
    landing, p = v, v.memory
    if traits.fp8:
        landing = Buffers(storage.landing.data_ptr(), storage.landing_full.data_ptr(), storage.landing_empty.data_ptr())
        p = storage.p.data_ptr()
    tiles = storage.tiles.get_tensor(cute.make_layout((TILE_WORDS, TILE_SLOTS), stride=(1, TILE_WORDS)))
    return Shared(tiles, q, k, v, landing, p)


def init_mbarriers(traits: KernelTraits, shared: Shared) -> None:
    """Initialise the mbarriers, in one thread, with the number of arrivals that complete a phase."""
    compute_warps = 4 * traits.groups
    for group in range(traits.groups):
        cute.arch.mbarrier_init(shared.q.full + group, 1)
        cute.arch.mbarrier_init(shared.q.empty + group, 4)
    for stage in range(traits.stages):
        cute.arch.mbarrier_init(shared.k.full + stage, 1)
        cute.arch.mbarrier_init(shared.v.full + stage, TRANSPOSE_WARPS if traits.fp8 else 1)
        cute.arch.mbarrier_init(shared.k.empty + stage, compute_warps)
        cute.arch.mbarrier_init(shared.v.empty + stage, compute_warps)
        if traits.fp8:
            cute.arch.mbarrier_init(shared.landing.full + stage, 1)
            cute.arch.mbarrier_init(shared.landing.empty + stage, TRANSPOSE_WARPS)

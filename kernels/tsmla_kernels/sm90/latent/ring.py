"""The ring of shared-memory stages that keys and P go through: P's layout, barriers, and pieces' descriptions."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.nvgpu.warpgroup import SmemLayoutAtomKind

from tsmla_kernels.sm90.latent.memory import (
    PIECE_BARRIERS,
    PIECE_THREADS,
    Ahead,
    Barrier,
    Blocks,
    Described,
    Piece,
    Shared,
)
from tsmla_kernels.sm90.latent.shape import ROWS
from tsmla_kernels.sm90.warp import advance, remainder, store_matrices, uniform


class RingLayout(NamedTuple):
    """The static facts of a ring, whatever its stages hold besides P.

    Attributes:
      stages: how many stages. block: how many keys a stage holds. p_rows: how many rows of P the value warpgroups read.
      dtype, q_dtype, p_dtype: the dtypes of the keys, of Q and of P in shared memory. p_swizzle: the swizzle of P's
        rows.
      stage_elements: how many elements lie from one stage's beginning to the next one's.
      p_offset: bytes from the beginning of a stage to its P.
      pieces_kept: how many places the ring of descriptions has.
      inverses_kept: for how many pieces the rows' factors are kept. It must be greater than the number of pieces by
        which the softmax warpgroup may be ahead of the value warpgroups.
      releasing_lanes: how many lanes of a value warp arrive on `empty`. Every lane that reads `rescale` or `moved` must
        arrive, because racecheck tracks only arriving lanes.
      filling_warps: how many warps arrive on `full`.
      cluster: how many CTAs may write a stage.
    """

    stages: int
    block: int
    p_rows: int
    dtype: type[cutlass.Numeric]
    q_dtype: type[cutlass.Numeric]
    p_dtype: type[cutlass.Numeric]
    p_swizzle: SmemLayoutAtomKind
    stage_elements: int
    p_offset: int
    pieces_kept: int
    inverses_kept: int
    releasing_lanes: int
    filling_warps: int = 1
    cluster: int = 1


class Ring:
    """The ring of a kernel.

    Attributes: the fields of RingLayout; itemsize: bytes of an element of the keys; elements: elements of all stages;
    p_row_bytes: bytes of a row of P.
    """

    def __init__(self, layout: RingLayout) -> None:
        self.stages, self.block, self.p_rows = layout.stages, layout.block, layout.p_rows
        self.dtype, self.q_dtype = layout.dtype, layout.q_dtype
        self.p_dtype, self.p_swizzle, self.p_offset = layout.p_dtype, layout.p_swizzle, layout.p_offset
        self.p_row_bytes = layout.block * layout.p_dtype.width // 8
        self.itemsize, self.stage_elements = layout.dtype.width // 8, layout.stage_elements
        self.elements = self.stages * self.stage_elements
        self.pieces_kept, self.inverses_kept = layout.pieces_kept, layout.inverses_kept
        self.releasing_lanes, self.filling_warps = layout.releasing_lanes, layout.filling_warps
        self.cluster = layout.cluster

    def advance(self, index: Int32, phase: Int32) -> tuple[Int32, Int32]:
        """The stage after `index`, and the parity of its barriers."""
        return advance(index, phase, self.stages)

    # ---- layout

    @cute.jit
    def views(self, storage: cute.struct, keys: cute.Tensor) -> Shared:
        """The ring in shared memory as Shared. `keys` are the keys of all stages."""
        full, empty, ready = storage.full.data_ptr(), storage.empty.data_ptr(), storage.ready.data_ptr()
        pieces = storage.pieces.get_tensor(cute.make_layout((len(Piece), self.pieces_kept), stride=(1, len(Piece))))
        rescale = storage.rescale.get_tensor(cute.make_layout((ROWS, self.stages), stride=(1, ROWS)))
        moved = storage.moved.get_tensor(cute.make_layout((4, self.stages), stride=(1, 4)))
        inverse = storage.inverse.get_tensor(cute.make_layout((ROWS, self.inverses_kept), stride=(1, ROWS)))
        return Shared(
            keys=keys,
            p=self.p_of_stages(storage.ring.data_ptr()),
            full=full,
            empty=empty,
            ready=ready,
            rescale=rescale,
            moved=moved,
            inverse=inverse,
            pieces=pieces,
        )

    @cute.jit
    def p_of_stages(self, ring: cute.Pointer):
        """The P of all stages."""
        atom = warpgroup.make_smem_layout_atom(self.p_swizzle, self.p_dtype)
        tile = cute.tile_to_shape(atom, (self.p_rows, self.block), (0, 1)).outer
        layout = cute.make_layout(
            (*tile.shape, self.stages),
            stride=(*tile.stride, self.stage_elements * self.dtype.width // self.p_dtype.width),
        )
        begin = ring + self.p_offset // self.itemsize
        return cute.make_tensor(cute.recast_ptr(begin, atom.inner, dtype=self.p_dtype), layout)

    @cute.jit
    def stage_p(self, shared: Shared, address: Int32):
        """The P of the stage at `address`, for WGMMA."""
        pointer = cute.make_ptr(self.p_dtype, address + self.p_offset, cute.AddressSpace.smem, assumed_align=1024)
        swizzle = warpgroup.make_smem_layout_atom(self.p_swizzle, self.p_dtype).inner
        return cute.make_tensor(
            cute.recast_ptr(pointer, swizzle, dtype=self.p_dtype), cute.slice_(shared.p.layout, (None, None, 0))
        )

    @cute.jit
    def address(self, s_k: cute.Tensor, index: Int32):
        """The address of stage `index`.

        WGMMA takes its descriptors from uniform registers. The compiler does not see that a stage's index is uniform,
        so it would move the descriptors there one by one, which took a fifth of the softmax warpgroup's time. The
        address therefore goes through an instruction whose result is uniform.
        """
        return uniform(s_k.iterator.toint() + index * (self.stage_elements * self.itemsize))

    @cute.jit
    def described(self, number: Int32, pieces: cute.Tensor) -> Blocks:
        """The key blocks of piece `number`."""
        piece = Described(pieces, remainder(number, self.pieces_kept))
        return Blocks(piece, uniform(piece[Piece.BLOCK_BEGIN]), uniform(piece[Piece.BLOCK_END]))

    @cute.jit
    def store_p(self, address: Int32, p_words: cute.Tensor):
        """Store a warp's P to shared memory. The first row that the lane passes to stmatrix begins at `address`."""
        for i in cutlass.range_constexpr(self.p_row_bytes // 32):
            four = [p_words[4 * i + j] for j in range(4)]
            store_matrices(address ^ (i << 5), *four)
        cute.arch.sync_warp()

    # ---- barriers

    @cute.jit
    def init_barriers(self, shared: Shared):
        """Initialise the ring's barriers."""
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(self.stages):
                cute.arch.mbarrier_init(shared.full + i, self.filling_warps)
                cute.arch.mbarrier_init(shared.empty + i, 8 * self.releasing_lanes * self.cluster)
                cute.arch.mbarrier_init(shared.ready + i, 4 * 8)  # eight lanes of each softmax warp arrive in `signal`

    @cute.jit
    def look_ahead(self, index: Int32, phase: Int32, shared: Shared) -> Ahead:
        """Poll the next stage, and return it as Ahead.

        Call after the last Q K^T step: polling is slow, and between the steps it would stall WGMMA.
        """
        arrived = Int32(cute.arch.mbarrier_test_wait(shared.full + index, phase))
        address = self.address(shared.keys, index)
        following, phase_following = self.advance(index, phase)
        return Ahead(arrived, address, following, phase_following)

    def signals(self, lane: Int32) -> cutlass.Boolean:
        """Whether a lane arrives on `ready` in `signal`."""
        return lane % 4 == 0

    @cute.jit
    def signal(self, ready: cute.Pointer, index: Int32, lane: Int32):
        """Signal that a softmax warp has finished its part of a stage: Q's rows are in registers, or P is in shared
        memory.

        The eight lanes that may write row factors arrive, because racecheck tracks only arriving lanes.
        """
        cute.arch.sync_warp()
        if self.signals(lane):
            cute.arch.mbarrier_arrive(ready + index)

    def signal_if(self, holds: Int32, ready: cute.Pointer, index: Int32) -> None:
        """Arrive on `ready` in the lanes whose `holds` is 1. Call after sync_warp. The code has no branch, because the
        compiler would split the sequence of WGMMAs at a branch, and the WGMMAs after the branch would begin late."""
        cute.arch.inline_ptx(
            "{ .reg .pred holds; setp.ne.s32 holds, {$r0}, 0; @holds mbarrier.arrive.shared::cta.b64 _, [{$r1}]; }",
            read_only_args=[holds, (ready + index).toint()],
        )

    def arrive_for(self, what: Barrier, number: Int32) -> None:
        """Tell the value warpgroups that the softmax warpgroup has done `what` for piece `number`. Q_READ, KEYS_READ:
        it has read the piece's Q, or its last block's keys, by ordinary loads. SUMS: it has written the factors of
        the piece's rows (`inverse`).

        After Q_READ and KEYS_READ value warps may overwrite the memory by ordinary stores. `ready` orders these stores
        as well, but only eight lanes of a warp arrive there, and racecheck tracks only arriving lanes.
        """
        cute.arch.barrier_arrive(barrier_id=what + remainder(number, PIECE_BARRIERS), number_of_threads=PIECE_THREADS)

    def wait_for(self, what: Barrier, number: Int32) -> None:
        """Make a value warp wait until the softmax warpgroup has called arrive_for with the same arguments."""
        cute.arch.barrier(barrier_id=what + remainder(number, PIECE_BARRIERS), number_of_threads=PIECE_THREADS)

    @cute.jit
    def release(self, index: Int32, empty: cute.Pointer):
        """Release a stage that a value warp has finished with: arrive on `empty` of every CTA that may write the stage.

        All lanes may have read `rescale` and `moved`, but an arrival orders only the reads of the lane that arrives. So
        the warp is synchronised first.
        """
        cute.arch.sync_warp()
        if const_expr(self.releasing_lanes > 1):
            if cute.arch.lane_idx() < self.releasing_lanes:
                self.arrive(empty + index)
        else:
            with cute.arch.elect_one():
                self.arrive(empty + index)

    @cute.jit
    def arrive(self, barrier: cute.Pointer):
        """Arrive on `barrier` of each CTA of the cluster."""
        if const_expr(self.cluster == 1):
            cute.arch.mbarrier_arrive(barrier)
        else:
            for peer in cutlass.range_constexpr(self.cluster):
                cute.arch.mbarrier_arrive(barrier, peer)

"""The ring of shared-memory stages that decode's keys, queries and P go through: its layout and its barriers."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.nvgpu.warpgroup import SmemLayoutAtomKind

from tsmla_kernels.sm90.decode.config import ROWS, DecodeConfig
from tsmla_kernels.sm90.decode.memory import (
    PIECE_BARRIERS,
    PIECE_THREADS,
    PIECES_KEPT,
    Ahead,
    Barrier,
    Blocks,
    Described,
    Piece,
    Shared,
)
from tsmla_kernels.sm90.warp import DTYPES, advance, remainder, store_matrices, uniform


class Ring:
    """The ring of a decode kernel.

    Attributes:
      dtype, q_dtype, p_dtype: of the keys, of Q, and of P, in shared memory.
      keys_swizzle, q_swizzle, p_swizzle: the swizzles of their rows there.
      block, q_rows: keys, or query rows, of a stage. p_rows: rows of P that the value warpgroups read.
      depth: columns of a key. column_tiles: groups of 64 columns. box: keys of one TMA copy; a page may be shorter than
        a stage.
      stage_elements: elements from one stage to the next. elements: of all stages. itemsize: bytes of an element.
      p_offset: bytes from the beginning of a stage to its P.
      pieces_kept: places in the ring of descriptions.
      inverses_kept: pieces whose row sums are kept: the softmax warpgroup is fewer pieces ahead of the values.
      releasing_lanes: lanes of a value warp that arrive on `empty`. Must include every lane that reads `rescale` or
        `moved`, because racecheck tracks only arriving lanes.
    """

    pieces_kept = PIECES_KEPT

    def __init__(self, config: DecodeConfig) -> None:
        self.mixed, self.cluster = config.mixed, config.cluster
        self.dtype, self.q_dtype = DTYPES[config.cache_dtype], DTYPES[config.dtype]
        self.stages, self.block, self.q_rows, self.p_rows = config.stages, config.block, config.q_rows, config.p_rows
        self.depth, self.column_tiles = config.head_dim, config.head_dim // 64
        self.box = min(config.block, config.page_size)
        self.itemsize = self.dtype.width // 8
        self.stage_elements = config.stage_bytes // self.itemsize
        self.elements = self.stages * self.stage_elements
        wide, narrow = SmemLayoutAtomKind.K_SW128, SmemLayoutAtomKind.K_SW64
        if config.fp8_cache:
            self.p_dtype, self.p_swizzle = cutlass.Float16, wide
            self.keys_swizzle, self.q_swizzle = narrow, wide if config.mixed else narrow
            self.p_offset = config.block * config.head_dim
        else:
            self.p_dtype, self.p_swizzle = self.dtype, narrow
            self.keys_swizzle = self.q_swizzle = wide
            # P overwrites the rope columns of its own keys, which nothing reads after S.
            self.p_offset = config.block * config.latent_dim * 2
        self.releasing_lanes = 4 if config.transposed_out else 1
        # A piece takes two stages or more. With a cache of 16 bits the value warps read its row sums before they
        # release its last stage.
        self.inverses_kept = config.stages // 2 + 1 if config.fp8_cache else (config.stages + 1) // 2

    def advance(self, index: Int32, phase: Int32) -> tuple[Int32, Int32]:
        """The stage after `index`, and the parity of its barriers."""
        return advance(index, phase, self.stages)

    # ---- layout

    @cute.jit
    def views(self, storage: cutlass.Constexpr) -> Shared:
        """The ring in shared memory."""
        full, empty, ready = storage.full.data_ptr(), storage.empty.data_ptr(), storage.ready.data_ptr()
        pieces = storage.pieces.get_tensor(cute.make_layout((len(Piece), self.pieces_kept), stride=(1, len(Piece))))
        rescale = storage.rescale.get_tensor(cute.make_layout((ROWS, self.stages), stride=(1, ROWS)))
        moved = storage.moved.get_tensor(cute.make_layout((4, self.stages), stride=(1, 4)))
        inverse = storage.inverse.get_tensor(cute.make_layout((ROWS, self.inverses_kept), stride=(1, ROWS)))
        keys, p = self.stage_views(storage.ring.data_ptr())
        return Shared(keys, p, full, empty, ready, rescale, moved, inverse, pieces)

    @cute.jit
    def stage_views(self, ring: cute.Pointer):
        """The keys and the P of all stages."""
        tile = cute.tile_to_shape(
            warpgroup.make_smem_layout_atom(self.keys_swizzle, self.dtype), (self.block, self.depth), (0, 1)
        )
        key_layout = cute.make_layout(
            (*tile.outer.shape, self.stages), stride=(*tile.outer.stride, self.stage_elements)
        )
        p_tile = cute.tile_to_shape(
            warpgroup.make_smem_layout_atom(self.p_swizzle, self.p_dtype), (self.p_rows, self.block), (0, 1)
        )
        p_layout = cute.make_layout(
            (*p_tile.outer.shape, self.stages),
            stride=(*p_tile.outer.stride, self.stage_elements * self.dtype.width // self.p_dtype.width),
        )
        p_begin = ring + self.p_offset // self.itemsize
        return (
            cute.make_tensor(cute.recast_ptr(ring, tile.inner, dtype=self.dtype), key_layout),
            cute.make_tensor(cute.recast_ptr(p_begin, p_tile.inner, dtype=self.p_dtype), p_layout),
        )

    @cute.jit
    def stage_tensors(self, shared: Shared, address: Int32):
        """The keys and the P of the stage at `address`, for WGMMA."""
        keys_ptr = cute.make_ptr(self.dtype, address, cute.AddressSpace.smem, assumed_align=1024)
        p_ptr = cute.make_ptr(self.p_dtype, address + self.p_offset, cute.AddressSpace.smem, assumed_align=1024)
        keys_swizzle = warpgroup.make_smem_layout_atom(self.keys_swizzle, self.dtype).inner
        p_swizzle = warpgroup.make_smem_layout_atom(self.p_swizzle, self.p_dtype).inner
        keys = cute.make_tensor(
            cute.recast_ptr(keys_ptr, keys_swizzle, dtype=self.dtype), cute.slice_(shared.keys.layout, (None, None, 0))
        )
        p = cute.make_tensor(
            cute.recast_ptr(p_ptr, p_swizzle, dtype=self.p_dtype), cute.slice_(shared.p.layout, (None, None, 0))
        )
        return keys, p

    @cute.jit
    def address(self, s_k: cute.Tensor, index: Int32):
        """The address of stage `index`.

        WGMMA takes its descriptors from uniform registers, and the compiler does not see that a stage's index is
        uniform: it moved every descriptor there one by one, which took a fifth of the softmax warpgroup's time. So the
        address goes through an instruction whose result is uniform.
        """
        return uniform(s_k.iterator.toint() + index * (self.stage_elements * self.itemsize))

    @cute.jit
    def boxes(self, s_k: cute.Tensor, keys: cutlass.Constexpr[int]):
        """The ring as TMA boxes of `keys` rows: (keys, 64, tiles, box in block, box in columns, stage)."""
        tiles = self.column_tiles if const_expr(keys == self.block) else 1
        return cute.make_tensor(
            s_k.iterator,
            cute.make_layout(
                ((8, keys // 8), 64, tiles, self.block // keys, self.column_tiles // tiles, self.stages),
                stride=((64, 512), 1, 64 * self.block, 64 * keys, 64 * self.block * tiles, self.stage_elements),
            ),
        )

    @cute.jit
    def q_boxes(self, s_k: cute.Tensor):
        """The ring as TMA boxes of Q's rows. If Q has the keys' dtype, a stage takes as many rows of Q as keys."""
        if const_expr(self.mixed):
            swizzle = warpgroup.make_smem_layout_atom(self.q_swizzle, self.q_dtype).inner
            boxes = cute.make_tensor(
                cute.recast_ptr(s_k.iterator, swizzle, dtype=self.q_dtype),
                cute.make_layout(
                    ((8, self.q_rows // 8), 64, self.column_tiles, 1, 1, self.stages),
                    stride=((64, 512), 1, 64 * self.q_rows, 0, 0, self.stage_elements // 2),
                ),
            )
        else:
            boxes = self.boxes(s_k, self.block)
        return boxes

    @cute.jit
    def described(self, number: Int32, pieces: cute.Tensor) -> Blocks:
        """The key blocks of piece `number`."""
        piece = Described(pieces, remainder(number, self.pieces_kept))
        return Blocks(piece, uniform(piece[Piece.BLOCK_BEGIN]), uniform(piece[Piece.BLOCK_END]))

    @cute.jit
    def store_p(self, address: Int32, p_words: cute.Tensor):
        """Store a warp's P to shared memory. The lane's first row of it begins at `address`."""
        for i in cutlass.range_constexpr(self.block // 16):
            four = [p_words[4 * i + j] for j in range(4)]
            store_matrices(address ^ (i << 5), *four)
        cute.arch.sync_warp()

    # ---- barriers

    @cute.jit
    def init_barriers(self, shared: Shared):
        """Initialise the ring's barriers."""
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(self.stages):
                cute.arch.mbarrier_init(shared.full + i, 1)
                cute.arch.mbarrier_init(shared.empty + i, 8 * self.releasing_lanes * self.cluster)
                cute.arch.mbarrier_init(shared.ready + i, 4 * 8)  # signal() of the four softmax warps

    @cute.jit
    def look_ahead(self, index: Int32, phase: Int32, shared: Shared) -> Ahead:
        """Poll the next stage: has it arrived, its address, the stage after it, that stage's parity.

        Call after the last Q K^T step: polling is slow, and among the steps it stalls WGMMA.
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
        """A softmax warp has finished its part of a stage: Q's rows are in registers, or P is in shared memory.

        The eight lanes that write row factors arrive, because racecheck tracks only arriving lanes.
        """
        cute.arch.sync_warp()
        if self.signals(lane):
            cute.arch.mbarrier_arrive(ready + index)

    def signal_if(self, holds: Int32, ready: cute.Pointer, index: Int32) -> None:
        """Arrive on `ready` by the lanes whose `holds` is 1, after sync_warp. No branch: the compiler would separate
        the WGMMAs before it from the WGMMAs after it, which would begin late."""
        cute.arch.inline_ptx(
            "{ .reg .pred holds; setp.ne.s32 holds, {$r0}, 0; @holds mbarrier.arrive.shared::cta.b64 _, [{$r1}]; }",
            read_only_args=[holds, (ready + index).toint()],
        )

    def arrive_for(self, what: Barrier, number: Int32) -> None:
        """The softmax warpgroup has read Q_READ: piece `number`'s Q, or KEYS_READ: its last keys, by ordinary loads; or
        it has written SUMS: its row sums.

        Value warps may then overwrite what was read by ordinary stores. `ready` orders that too, but by eight lanes of
        a warp, and racecheck tracks only arriving lanes.
        """
        cute.arch.barrier_arrive(barrier_id=what + remainder(number, PIECE_BARRIERS), number_of_threads=PIECE_THREADS)

    def wait_for(self, what: Barrier, number: Int32) -> None:
        """A value warp waits for arrive_for."""
        cute.arch.barrier(barrier_id=what + remainder(number, PIECE_BARRIERS), number_of_threads=PIECE_THREADS)

    @cute.jit
    def release(self, index: Int32, empty: cute.Pointer):
        """A value warp has finished with a stage: arrive on `empty` of every CTA that may write the stage.

        All lanes have read `rescale` and `moved`, and an arrival is only that of the lane which makes it.
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

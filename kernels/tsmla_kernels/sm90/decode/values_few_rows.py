"""O^T += V^T P^T of decode for queries and cache of 16 bits, if a row tile has at most 32 query rows.

Both operands are in shared memory. O takes a quarter or half of the registers and instructions that 64 query rows take.
The instructions matter: in a short piece each runs once, and must be fetched first. Every warp stores a part of each
row.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.nvgpu.warpgroup import Field

from tsmla_kernels.sm90.decode.config import DecodeConfig
from tsmla_kernels.sm90.decode.copies import Copier
from tsmla_kernels.sm90.decode.stages import Stages
from tsmla_kernels.sm90.decode.values_fp8 import ValuesFp8
from tsmla_kernels.sm90.latent.memory import Barrier, Blocks, Described, Shared, two_rows
from tsmla_kernels.sm90.latent.values import Held, OutRows, WideValues
from tsmla_kernels.sm90.latent.walk import PieceWalk
from tsmla_kernels.sm90.warp import uniform


class ValuesFewRows(ValuesFp8):
    """P V with P and V of 16 bits, over 16 or 32 query rows. A warp has 16 latents of each of m_tiles tiles of 64; a
    lane has latents lane // 4 and lane // 4 + 8 of these 16."""

    def __init__(self, config: DecodeConfig, stages: Stages, walk: PieceWalk, copier: Copier) -> None:
        super().__init__(config, stages, walk, copier)
        self.wide = WideValues(config.shape, self.ring, neighbours=1)

    def mma(self) -> cute.TiledMma:
        """The MMA of V^T P^T: 64 latents by query rows."""
        dtype = self.ring.dtype
        return sm90.make_trivial_tiled_mma(
            dtype, dtype, OperandMajorMode.MN, OperandMajorMode.K, Float32, (1, 1, 1), (64, self.p_rows)
        )

    def fragments(self) -> tuple[None, None, cute.Tensor]:
        """`wide`, `narrow` and `factors` of Held. V^T is not read into registers."""
        return None, None, cute.make_rmem_tensor((2, self.p_rows // 8), Float32)

    def offset(self, half: Int32, first_tile: Int32, lane: Int32) -> Int32:
        """The byte offset at which this warpgroup's latents begin in a stage."""
        return uniform(half * (self.half * self.block * self.ring.itemsize))

    def first_tile(self, half: Int32, warp: Int32) -> Int32:
        """The index of a warp's first tile of 16 latents. The warp's next tiles follow at distances of 64 latents."""
        return half * (self.half // 16) + warp

    @cute.jit
    def pass_q(self, piece: Described, number: Int32, index: Int32, phase: Int32, shared: Shared):
        """Release the stage that held Q. Return the next stage and the parity of that stage."""
        self.ring.release(index, shared.empty)
        return self.ring.advance(index, phase)

    def wait_for_sums(self, number: Int32) -> None:
        """Do nothing: add_blocks has waited."""

    @cute.jit
    def add_blocks(
        self, blocks: Blocks, number: Int32, index: Int32, phase: Int32, held: Held, shared: Shared
    ) -> tuple[Int32, Int32]:
        """Add P V of a piece's key blocks to O. Return the next stage and the parity of that stage."""
        mma_pv, lane = held.mma_pv, held.lane
        thr = mma_pv.get_slice(held.thread)
        for b in cutlass.range(blocks.begin, blocks.end, unroll=1):
            address = self.ring.address(shared.keys, index)
            stage_p = self.ring.stage_p(shared, address)
            t_v = mma_pv.make_fragment_A(thr.partition_A(self.values_at(address + held.offset)))
            t_p = mma_pv.make_fragment_B(thr.partition_B(stage_p))
            cute.arch.mbarrier_wait(shared.ready + index, phase)
            # Only the lanes that arrive on `empty` read `moved` and `rescale`: racecheck tracks no other lanes.
            flag = Int32(0)
            if lane < self.ring.releasing_lanes and b > blocks.begin:
                flag = shared.moved[lane, index]
            # Order the writes of P and of zeros before WGMMA's reads, as in Values16bit.
            cute.arch.fence_proxy("async.shared", space="cta")
            self.wide.rescale_out(held.o, shared.rescale, flag, index, lane)
            warpgroup.fence()
            # The first block's product replaces the old O.
            mma_pv.set(Field.ACCUMULATE, b > blocks.begin)
            for k in cutlass.range_constexpr(self.block // 16):
                cute.gemm(mma_pv, held.acc, t_v[None, None, k], t_p[None, None, k], held.acc)
                mma_pv.set(Field.ACCUMULATE, True)
            warpgroup.commit_group()
            if b + 1 == blocks.end:
                self.ring.wait_for(Barrier.SUMS, number)
                for v in cutlass.range_constexpr(self.p_rows // 8):
                    two_rows(shared.inverse, number % self.ring.inverses_kept, v, lane, held.factors[None, v])
            warpgroup.wait_group(0)
            self.ring.release(index, shared.empty)
            index, phase = self.ring.advance(index, phase)
        return index, phase

    def values_at(self, address: Int32) -> cute.Tensor:
        """This warpgroup's latents of a block's keys as [latent, key]; they begin at `address`."""
        atom = warpgroup.make_smem_layout_atom(self.stages.keys_swizzle, self.ring.dtype)
        keys = cute.tile_to_shape(atom, (self.block, self.half), (0, 1))
        pointer = cute.make_ptr(self.ring.dtype, address, cute.AddressSpace.smem, assumed_align=1024)
        begin = cute.recast_ptr(pointer, keys.inner, dtype=self.ring.dtype)
        return cute.make_tensor(begin, cute.select(keys.outer, mode=[1, 0]))

    @cute.jit
    def store_rows(
        self, target: cute.Pointer, o: cute.Tensor, rows: OutRows, valid_rows: Int32, dtype: type[cutlass.Numeric]
    ):
        """Store a lane's part of O from `target` on: two latents of every tile, two rows of every eight."""
        singles = cute.make_tensor(
            target,
            cute.make_layout((2, 2, self.p_rows // 8, self.m_tiles), stride=(8, self.latent, 8 * self.latent, 64)),
        )
        for v in cutlass.range_constexpr(self.p_rows // 8):
            if 8 * v < valid_rows:
                for i in cutlass.range_constexpr(2):
                    if rows.lane % 4 * 2 + (8 * v + i) < valid_rows:
                        for tile in cutlass.range_constexpr(self.m_tiles):
                            for e in cutlass.range_constexpr(2):
                                singles[e, i, v, tile] = (o[i, e, v, tile] * rows.factors[i, v]).to(dtype)

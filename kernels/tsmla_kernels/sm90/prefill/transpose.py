"""The transposition of V in shared memory, for fp8: WGMMA takes 8-bit operands only if their k axis is contiguous."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from tsmla_kernels.sm90.prefill.memory import TILE_SLOTS, TRANSPOSE_WARPS, KernelTraits, Shared, Tile
from tsmla_kernels.sm90.warp import advance, load_transposed, store_matrices

EVEN_COLUMNS, ODD_COLUMNS = 0x6420, 0x7531  # prmt selectors of one column's bytes in two registers of column pairs


class TransposeAddresses(NamedTuple):
    """Byte addresses in shared memory that one lane of a transpose warp uses for the first stage.

    `half` is where the warp's first column tile of the landing buffer begins. `source` is the address in V that the
    lane first passes to ldmatrix, and `target` the address in transposed V that it first passes to stmatrix. All other
    addresses follow from `source` and `target`: an exclusive or moves within a row, an addition to other rows.
    """

    half: Int32
    source: Int32
    target: Int32


def transpose_addresses(lane: Int32, warp: Int32, landing: Int32, transposed: Int32, block: int) -> TransposeAddresses:
    """The addresses of lane `lane` in transpose warp `warp`, for buffers that begin at `landing` and `transposed`."""
    half = landing + warp * (64 * block)
    source = half + lane * 64 + ((lane // 2) % 4) * 16
    # Lane l passes the target of row l % 8 of matrix l / 8. Two matrices come from the same registers. In their upper
    # halves the first matrix has the even columns and the second the odd columns; in their lower halves the first has
    # the odd columns and the second the even ones. So the rows of a matrix lie in eight different groups of banks.
    odd = ((lane // 4) % 2) ^ ((lane // 8) % 2)
    column = warp * 64 + (lane % 8) * 2 + odd
    target = transposed + column * 128 + ((lane // 16) ^ (column % 8)) * 16
    return TransposeAddresses(half, source, target)


class ValueTransposer:
    """Device code of the two transpose warps, which take V's column tiles in turn.

    ldmatrix transposes pairs of columns; prmt then joins bytes of two registers into four keys of a column. Of each 16
    keys, lane q of a row gets keys 2q, 2q + 1, 2q + 8 and 2q + 9. V keeps this order of keys, because the accumulator
    has the scores in the same order: P becomes WGMMA's operand without an exchange between lanes.
    """

    def __init__(self, traits: KernelTraits) -> None:
        self.traits = traits
        self.stages = traits.stages
        self.warp_tiles = range(traits.v_column_tiles // TRANSPOSE_WARPS)
        # Bytes from a warp's column tile to its next one, in the landing buffer and in transposed V.
        self.source_step, self.target_step = (TRANSPOSE_WARPS * 64 * width for width in (traits.block, 128))

    @cute.jit
    def transpose_blocks(self, shared: Shared, warp: Int32) -> None:
        """Transpose this warp's columns of V in every block, until a tile descriptor has no blocks."""
        traits = self.traits
        tiles, landing, v = shared.tiles, shared.landing, shared.v
        lane = cute.arch.lane_idx()
        addresses = transpose_addresses(lane, warp, landing.memory.toint(), v.memory.toint(), traits.block)
        even_columns, odd_columns = Int32(EVEN_COLUMNS), Int32(ODD_COLUMNS)
        if lane >= 16:
            even_columns, odd_columns = odd_columns, even_columns

        index, phase = Int32(0), Int32(0)
        slot = Int32(0)
        cute.arch.mbarrier_wait(landing.full, 0)
        blocks = tiles[Tile.BLOCKS, slot]
        while blocks > 0:
            # Only the first block may reach past the request's end: blocks go from the last to the first.
            keys = tiles[Tile.KEYS, slot] - (blocks - 1) * traits.block
            for _ in cutlass.range(blocks, unroll=1):
                cute.arch.mbarrier_wait(landing.full + index, phase)
                if keys < traits.block:
                    # Memory past the request's end may hold NaN, and 0 * NaN must not reach O.
                    for row in cutlass.range(cutlass.max(keys, 0) + lane // 4, traits.block, 8, unroll=1):
                        zeros = addresses.half + index * traits.v_elements + row * 64 + (lane % 4) * 16
                        for tile in self.warp_tiles:
                            self.store_zeros(zeros + tile * self.source_step)
                    cute.arch.sync_warp()
                cute.arch.mbarrier_wait(v.empty + index, phase ^ 1)
                self.transpose_block(addresses, index, even_columns, odd_columns)
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(landing.empty + index)
                    cute.arch.mbarrier_arrive(v.full + index)
                keys = Int32(traits.block)
                index, phase = advance(index, phase, self.stages)
            slot = (slot + 1) % TILE_SLOTS
            cute.arch.mbarrier_wait(landing.full + index, phase)
            blocks = tiles[Tile.BLOCKS, slot]

    def transpose_block(
        self, addresses: TransposeAddresses, index: Int32, even_columns: Int32, odd_columns: Int32
    ) -> None:
        """Transpose this warp's columns of the block in stage `index`; each ldmatrix reads 32 keys of 16 columns."""
        traits = self.traits
        first_source = addresses.source + index * traits.v_elements
        first_target = addresses.target + index * traits.transposed_elements
        for tile, step in itertools.product(self.warp_tiles, range(traits.block // 32)):
            source, target = first_source + tile * self.source_step, first_target + tile * self.target_step
            step_target = (target ^ ((step % 4) * 32)) + (step // 4) * 128 * traits.v_head_dim
            for group in range(4):
                pairs = load_transposed((source ^ (group * 16)) + step * 2048)
                a, b = (cute.arch.prmt(*pairs[:2], columns) for columns in (even_columns, odd_columns))
                c, d = (cute.arch.prmt(*pairs[2:], columns) for columns in (even_columns, odd_columns))
                store_matrices(step_target + group * 2048, a, b, c, d)

    def store_zeros(self, address: Int32) -> None:
        """Store 16 bytes of zeros."""
        cute.arch.inline_ptx("st.shared.v4.b32 [{$r0}], {0, 0, 0, 0};", read_only_args=[address])

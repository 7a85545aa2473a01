"""The producer warp of prefill's gradient: it claims tiles of keys, and copies K, V, Q, dO and the rows' terms."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from tsmla_kernels.sm90.operands import Block, TmaCopy
from tsmla_kernels.sm90.prefill.backward.config import Q_ROWS, STAGES
from tsmla_kernels.sm90.prefill.backward.memory import (
    NO_HEAD,
    TILE_SLOTS,
    Copies,
    Operands,
    Shared,
    Sums,
    Term,
    Tile,
    Traits,
)
from tsmla_kernels.sm90.prefill.backward.plan import BackwardPlanner
from tsmla_kernels.sm90.prefill.memory import Buffers, Schedule, Stage
from tsmla_kernels.sm90.warp import advance

EVICT_FIRST, EVICT_LAST = 0x12F0000000000000, 0x14F0000000000000  # L2 policies: keys are read once, queries often
TERMS_BYTES = len(Term) * Q_ROWS * 4


class Producer:
    """Device code of the producer warp."""

    def __init__(self, traits: Traits, planner: BackwardPlanner) -> None:
        self.traits, self.planner = traits, planner

    def make_copies(self, operands: Operands) -> Copies:
        """The TMA loads of the operands."""
        traits = self.traits
        q, dout = self.make_copy(operands.q, traits.q), self.make_copy(operands.dout, traits.dout)
        k = self.make_copy(operands.k, traits.nope)
        if traits.rope_columns == 0:
            return Copies(q, k, k, self.make_copy(operands.v, traits.v), dout)
        k_rope = operands.v
        rope_heads = cute.make_tensor(
            k_rope.iterator,
            cute.make_layout((k_rope.shape[0], 1, k_rope.shape[1]), stride=(k_rope.stride[0], 0, 1)),
        )
        v = self.make_copy(operands.k, traits.v, traits.nope_columns)
        return Copies(q, k, self.make_copy(rope_heads, traits.rope), v, dout)

    def make_copy(self, x: cute.Tensor, block: Block, first_column: int = 0) -> TmaCopy:
        """The TMA load of `block` from x [T, H, columns], with columns from `first_column` on."""
        row, head = cute.assume(x.stride[0], divby=64), x.stride[1]
        tiles = block.columns // block.width
        by_columns = cute.make_tensor(
            x.iterator + first_column,
            cute.make_layout((x.shape[0], block.width, tiles, x.shape[1]), stride=(row, 1, block.width, head)),
        )
        shape = (block.rows, block.width, tiles)
        layout = cute.tile_to_shape(block.layout_atom(self.traits.dtype), shape, (0, 1, 2))
        return TmaCopy(*cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), by_columns, layout, shape))

    @cute.jit
    def copy_tiles(self, copies: Copies, sums: Sums, shared: Shared, schedule: Schedule, heads: Int32):
        """Copy one tile of keys after another: first K and V, then Q and dO of every step. A copy starts when its
        buffer's readers have released it."""
        position, slot, running = Int32(0), Int32(TILE_SLOTS - 1), Int32(1)
        keys_phase = Int32(1)
        index, phase = Int32(0), Int32(1)
        while running == 1:
            position, slot = self.planner.claim_next(position, shared.tiles, slot, schedule, heads)
            head = shared.tiles[Tile.HEAD, slot]
            if head == NO_HEAD:
                running = Int32(0)
            else:
                first_key = shared.tiles[Tile.FIRST_KEY, slot]
                row, terms = shared.tiles[Tile.FIRST_ROW, slot], shared.tiles[Tile.FIRST_TERMS, slot]
                steps = shared.tiles[Tile.STEPS, slot]
                keys = Stage(Int32(0), self.keys_phase(slot, keys_phase))
                self.copy_keys(copies, shared, keys, first_key, head)
                self.copy_block(copies.v, shared.v, self.traits.v, keys, first_key, head)
                for step in cutlass.range(steps, unroll=1):
                    stage = Stage(index, phase)
                    tile = self.traits.query_tile(step, steps)
                    self.copy_queries(copies, sums, shared, stage, row + tile * Q_ROWS, terms + tile, head)
                    index, phase = advance(index, phase, STAGES)
                keys_phase ^= 1
        cute.arch.mbarrier_wait(shared.k.empty, self.keys_phase(slot, keys_phase))
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(shared.k.full)

    def keys_phase(self, slot: Int32, keys_phase: Int32) -> Int32:
        """The parity of the barriers of K and V for the tile in `slot`: `keys_phase`. If the config is wide, the slot
        says it, because the warp has no register there that lives from tile to tile."""
        return (slot & 1) ^ 1 if self.traits.wide else keys_phase

    @cute.jit
    def copy_keys(self, copies: Copies, shared: Shared, keys: Stage, first_key: Int32, head: Int32) -> None:
        """Copy K of a tile, once its buffer is free. Shared rope columns need a separate copy."""
        traits = self.traits
        cute.arch.mbarrier_wait(shared.k.empty, keys.phase)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(shared.k.full, traits.bytes_of(traits.k))
        self.copy_rows(copies.k, shared.k, traits.nope, keys, first_key, head)
        if const_expr(traits.rope_columns > 0):
            rope = shared.k._replace(memory=shared.k.memory + traits.nope_columns * traits.key_rows)
            self.copy_rows(copies.rope, rope, traits.rope, keys, first_key, Int32(0))

    @cute.jit
    def copy_queries(
        self, copies: Copies, sums: Sums, shared: Shared, stage: Stage, row: Int32, terms: Int32, head: Int32
    ):
        """Copy one step's queries: Q with the rows' terms, then dO."""
        cute.arch.mbarrier_wait(shared.q.empty + stage.index, stage.phase)
        with cute.arch.elect_one():
            full = shared.q.full + stage.index
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.traits.bytes_of(self.traits.q) + TERMS_BYTES)
            line = Int64(head) * sums.row_terms.shape[1] + terms
            source = sums.row_terms.iterator.toint() + line * TERMS_BYTES
            self.copy_bulk(shared.row_terms.iterator.toint() + stage.index * TERMS_BYTES, source, full)
        self.copy_rows(copies.q, shared.q, self.traits.q, stage, row, head)
        if const_expr(self.traits.wide):
            self.copy_block(copies.dout, shared.dout, self.traits.dout, stage, row, head)
        else:
            # dO has one buffer, so its barriers' parity changes with every step, as the index of Q's two stages does.
            self.copy_block(copies.dout, shared.dout, self.traits.dout, Stage(Int32(0), stage.index ^ 1), row, head)

    @cute.jit
    def copy_block(self, copy: TmaCopy, buffers: Buffers, block: Block, stage: Stage, row: Int32, head: Int32):
        """Copy a block of rows that begins at `row`, once its buffer is free."""
        cute.arch.mbarrier_wait(buffers.empty + stage.index, stage.phase)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(buffers.full + stage.index, self.traits.bytes_of(block))
        self.copy_rows(copy, buffers, block, stage, row, head)

    @cute.jit
    def copy_rows(self, copy: TmaCopy, buffers: Buffers, block: Block, stage: Stage, row: Int32, head: Int32):
        """Copy a block of rows that begins at `row` into a buffer that is free."""
        tiles = block.columns // block.width
        swizzle = block.layout_atom(self.traits.dtype).inner
        strides = ((block.width, 8 * block.width), 1, block.width * block.pitch, block.rows * block.columns)
        layout = cute.make_layout(((8, block.rows // 8), block.width, tiles, 2), stride=strides)
        memory = cute.make_tensor(cute.recast_ptr(buffers.memory, swizzle, dtype=self.traits.dtype), layout)
        shape = (block.rows, block.width, tiles)
        source = cute.local_tile(cute.domain_offset((row, 0, 0, 0), copy.tensor), shape, (0, 0, 0, None))
        tma_target, tma_source = cpasync.tma_partition(
            copy.atom, 0, cute.make_layout(1), cute.group_modes(memory, 0, 3), cute.group_modes(source, 0, 3)
        )
        policy = EVICT_LAST if block.rows == Q_ROWS else EVICT_FIRST
        cute.copy(
            copy.atom,
            tma_source[None, head],
            tma_target[None, stage.index],
            tma_bar_ptr=buffers.full + stage.index,
            cache_policy=Int64(policy),
        )

    def copy_bulk(self, target: Int32, source: Int64, full: cute.Pointer):
        """Copy a step's terms: TERMS_BYTES contiguous bytes."""
        cute.arch.inline_ptx(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], "
            f"{TERMS_BYTES}, [{{$r2}}];",
            read_only_args=[target, source, full.toint()],
        )

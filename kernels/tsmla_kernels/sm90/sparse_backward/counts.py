"""The deterministic mode's kernel between `prepare` and the main one: for each key, how often something is added to it,
and a bound of its size (bounds.py)."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from tsmla_kernels.sm90.sparse_backward.bounds import greatest
from tsmla_kernels.sm90.sparse_backward.config import TILE_HEADS
from tsmla_kernels.sm90.sparse_backward.gather import Gatherer
from tsmla_kernels.sm90.sparse_backward.memory import Item, Keys, Sums, Traits, Weight

COUNT_THREADS = 256
COUNT_WARPS = COUNT_THREADS // 32


class Counter:
    """Device code of this kernel, in which a warp has a token."""

    def __init__(self, traits: Traits, gatherer: Gatherer) -> None:
        self.traits, self.gatherer = traits, gatherer

    @cute.jit
    def run(self, keys: Keys, sums: Sums, tokens: Int32, heads: Int32):
        """Run a warp: raise the bounds of the keys that its token selects, and add to their counts how many tiles of
        heads there are. If tokens of a group select a key, something is added to it once, and counted for each."""
        lane = cute.arch.lane_idx()
        token = cute.arch.block_idx()[0] * COUNT_WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if token < tokens:
            columns = Int32(keys.indices.shape[1])
            length = columns
            if const_expr(self.traits.config.lengths):
                length = cutlass.min(cutlass.max(keys.lengths[token], 0), columns)
            item = Item(token, heads, Int32(0), token, Int32(0))
            selected = Int32(0)
            for part in cutlass.range((length + 31) // 32, unroll=8):
                selected += Int32(self.row_at(keys, item, part * 32 + lane, length) >= 0)
            selected = cute.arch.warp_redux_sync(selected, "add")
            alone, by_length, tiles = Float32(0.0), Float32(0.0), Int32(0)
            for first in cutlass.range(0, heads, TILE_HEADS, unroll=1):
                alone = greatest(alone, self.tile_weight(sums, item, first, Weight.ALONE))
                by_length = greatest(by_length, self.tile_weight(sums, item, first, Weight.BY_LENGTH))
                tiles += 1
            share = 1.0 / Float32(cutlass.max(selected, 1))  # of P that each key would have
            alone, by_length = alone * share, by_length * share
            for part in cutlass.range((length + 31) // 32, unroll=4):
                row = self.row_at(keys, item, part * 32 + lane, length)
                if row >= 0:
                    bound = alone + by_length * sums.key_lengths[row]
                    cute.arch.inline_ptx(
                        "red.relaxed.gpu.global.max.s32 [{$r0}], {$r1};",
                        read_only_args=[sums.key_bounds.iterator.toint() + Int64(row) * 4, bound.bitcast(Int32)],
                    )
                    cute.arch.inline_ptx(
                        "red.relaxed.gpu.global.add.u32 [{$r0}], {$r1};",
                        read_only_args=[sums.key_counts.iterator.toint() + Int64(row) * 4, tiles],
                    )

    @cute.jit
    def row_at(self, keys: Keys, item: Item, column: Int32, length: Int32):
        """The row in kv_sum of the slot in a column of the token's indices; -1 if there is none."""
        return self.gatherer.row_of(self.gatherer.slot_at(keys, item, column, length, False), column, keys, False)

    @cute.jit
    def tile_weight(self, sums: Sums, item: Item, first: Int32, weight: cutlass.Constexpr[Weight]):
        """The sum of one of the weights of the token's heads from `first` on that are in one tile."""
        lane, total = cute.arch.lane_idx(), Float32(0.0)
        for i in cutlass.range_constexpr(TILE_HEADS // 32):
            head = first + 32 * i + lane
            if head < item.heads:
                total += sums.row_weights[Int32(weight), Int64(item.token) * item.heads + head]
        for offset in (16, 8, 4, 2, 1):
            total += cute.arch.shuffle_sync_bfly(total, offset=offset)
        return total

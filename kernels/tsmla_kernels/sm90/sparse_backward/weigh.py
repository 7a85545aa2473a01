"""The deterministic mode's first pass over the keys: bounds on what each tile of heads adds to them (bounds.py)."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.nvgpu.warpgroup import Field

from tsmla_kernels.sm90.constants import LOG2_E
from tsmla_kernels.sm90.operands import Block
from tsmla_kernels.sm90.sparse_backward.bounds import magnitude
from tsmla_kernels.sm90.sparse_backward.config import TILE_HEADS
from tsmla_kernels.sm90.sparse_backward.gather import Gatherer
from tsmla_kernels.sm90.sparse_backward.memory import (
    COLUMN_TILE,
    SLOTS_KEPT,
    Barrier,
    Item,
    Mma,
    Shared,
    Sums,
    Term,
    ThreadIndex,
    Traits,
    Weight,
)
from tsmla_kernels.sm90.sparse_backward.products import Columns, Products
from tsmla_kernels.sm90.storage import storage_of_fields
from tsmla_kernels.sm90.warp import release

WEIGH_BLOCK = 64  # keys of one step
WEIGH_STAGES = 2  # buffers of keys, one for each compute warpgroup
WEIGH_WARPS = 4  # warps of a compute warpgroup
WEIGH_GATHER_WARP = WEIGH_STAGES * WEIGH_WARPS
WEIGH_GATHER_WARPS = 4
WEIGH_THREADS = 32 * (WEIGH_GATHER_WARP + WEIGH_GATHER_WARPS)
GROUP_LANES = (16, 8, 4)  # distances of the lanes that have a key's other heads


def weigh_storage(traits: Traits, keys: Block) -> Any:
    """The struct of the shared memory of the deterministic mode's first pass, with the names of `make_storage`."""
    fields: dict[str, Any] = {
        "queries_full": cute.struct.MemRange[Int64, 1],
        "keys_full": cute.struct.MemRange[Int64, WEIGH_STAGES],
        "keys_empty": cute.struct.MemRange[Int64, WEIGH_STAGES],
        "rows": cute.struct.Align[cute.struct.MemRange[Int32, SLOTS_KEPT * WEIGH_BLOCK], 16],
        "valid": cute.struct.Align[
            cute.struct.MemRange[Int32, SLOTS_KEPT * WEIGH_GATHER_WARPS * traits.config.tokens], 16
        ],
        "factors": cute.struct.Align[cute.struct.MemRange[Float32, SLOTS_KEPT * WEIGH_BLOCK], 16],
        "partial": cute.struct.Align[cute.struct.MemRange[Float32, 2 * WEIGH_STAGES * WEIGH_WARPS * WEIGH_BLOCK], 16],
        "q": traits.memory_of(traits.q),
        "keys": traits.memory_of(keys._replace(rows=WEIGH_STAGES * WEIGH_BLOCK)),
    }
    return storage_of_fields(fields, traits.config)


class Weigher:
    """Device code of the first pass. Two warpgroups take blocks in turn. Each computes P and, for each key, the sum
    over heads of P times the row's weights."""

    def __init__(self, traits: Traits, products: Products) -> None:
        self.traits, self.products = traits, products
        self.keys = Block(WEIGH_BLOCK, traits.head_dim, COLUMN_TILE, WEIGH_BLOCK)
        self.gatherer = Gatherer(traits, self.keys, WEIGH_STAGES, weighs=True)
        self.storage = weigh_storage(traits, self.keys)

    def shared_memory(self, storage: cute.struct) -> tuple[Shared, cute.Tensor]:
        """Views of the allocated `storage`, and the partial sums [key, warp, warpgroup, parity of its blocks]. The
        other fields of Shared, which this pass does not use, are any of these arrays."""
        shapes = {
            "rows": (WEIGH_BLOCK, SLOTS_KEPT),
            "valid": (WEIGH_GATHER_WARPS, self.traits.config.tokens, SLOTS_KEPT),
            "factors": (WEIGH_BLOCK, SLOTS_KEPT),
        }
        tensors = {name: getattr(storage, name).get_tensor(cute.make_layout(of)) for name, of in shapes.items()}
        names = ("queries_full", "keys_full", "keys_empty", "q", "keys")
        pointers = {name: getattr(storage, name).data_ptr() for name in names}
        others = {name: pointers["q"] for name in Shared._fields if name not in (*tensors, *pointers, "terms")}
        shape = (WEIGH_BLOCK, WEIGH_WARPS, WEIGH_STAGES, 2)
        tensors["terms"] = tensors["factors"]
        return Shared(**tensors, **pointers, **others), storage.partial.get_tensor(cute.make_layout(shape))

    def init_mbarriers(self, shared: Shared) -> None:
        """Initialise the mbarriers, in one thread."""
        cute.arch.mbarrier_init(shared.queries_full, 1)
        for stage in range(WEIGH_STAGES):
            cute.arch.mbarrier_init(shared.keys_full + stage, 32 * WEIGH_GATHER_WARPS)
            cute.arch.mbarrier_init(shared.keys_empty + stage, WEIGH_WARPS)

    @cute.jit
    def run(
        self,
        sums: Sums,
        scale: Float32,
        shared: Shared,
        partial: cute.Tensor,
        mma: Mma,
        item: Item,
        group: Int32,
        groups: cutlass.Constexpr[bool],
    ):
        """Run compute warpgroup `group`, which has every second block. `groups`: whether the tile has a group of
        tokens."""
        thread = cute.arch.thread_idx()[0] % 128
        lane, warp = thread % 32, thread // 32
        t = ThreadIndex(group, thread, lane, warp * 16 + lane // 4)
        mma.scores_first.set(Field.ACCUMULATE, False)
        mma.scores.set(Field.ACCUMULATE, True)
        heads = self.weights(sums, item, t)
        keys = shared.keys + group * self.keys.elements
        cute.arch.mbarrier_wait(shared.queries_full, 0)
        for step in cutlass.range((item.blocks - group + 1) // WEIGH_STAGES, unroll=1):
            place = (step * WEIGH_STAGES + group) % SLOTS_KEPT
            cute.arch.mbarrier_wait(shared.keys_full + group, step & 1)
            products = (mma.scores_first, mma.scores)
            shape = mma.scores.get_slice(thread).partition_shape_C((TILE_HEADS, WEIGH_BLOCK))
            acc = cute.make_rmem_tensor(shape, Float32)
            warpgroup.fence()
            columns = Columns(0, self.traits.head_dim)
            self.products.issue(products, acc, shared.q, self.traits.q, keys, self.keys, columns, t)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            bounds = self.bounds(acc, heads, scale, shared, place, groups, t)
            row = shared.rows[thread % WEIGH_BLOCK, place]
            cute.arch.sync_warp()
            release(shared.keys_empty + group)
            for e in cutlass.range_constexpr(2):
                partial[lane // 4 * 8 + lane % 4 * 2 + e, warp, group, step & 1] = bounds[e]
            cute.arch.barrier(barrier_id=Barrier.BOUNDED + group, number_of_threads=32 * WEIGH_WARPS)
            if thread < WEIGH_BLOCK:
                bound = Float32(0.0)
                for part in cutlass.range_constexpr(WEIGH_WARPS):
                    bound += partial[thread, part, group, step & 1]
                self.put_bound(sums, row, bound)

    @cute.jit
    def bounds(
        self,
        acc: cute.Tensor,
        heads: cute.Tensor,
        scale: Float32,
        shared: Shared,
        place: Int32,
        groups: cutlass.Constexpr[bool],
        t: ThreadIndex,
    ):
        """This warp's sums over its heads, for two keys: of the 8 keys with index lane / 4, the keys 2 (lane % 4) and 2
        (lane % 4) + 1. The sum of a row that does not exist is meaningless."""
        lane, values = t.lane, []
        for i in cutlass.range_constexpr(WEIGH_BLOCK // 8):
            for e in cutlass.range_constexpr(2):
                length = shared.factors[8 * i + lane % 4 * 2 + e, place]
                value = Float32(0.0)
                for half in cutlass.range_constexpr(2):
                    power = acc[4 * i + 2 * half + e] * (scale * LOG2_E) + heads[0, half]
                    weight = cute.math.exp2(power, fastmath=True)
                    if const_expr(groups):
                        token = (t.row + 8 * half) // (TILE_HEADS // self.traits.config.tokens)
                        bits = shared.valid[i // 2, token, place] >> (8 * (i % 2) + e + lane % 4 * 2)
                        if bits & 1 == 0:
                            weight = Float32(0.0)
                    value += weight * (heads[1, half] + heads[2, half] * length)
                values.append(value)
        # In each step a lane keeps one half of its groups of keys and gets the sums of the lane that keeps the other.
        for distance in GROUP_LANES:
            values = self.exchanged(values, distance, lane)
        return values

    def exchanged(self, values: list[Float32], distance: int, lane: Int32) -> list[Float32]:
        """Half of the values, each plus that of the lane `distance` away, which keeps the other half."""
        upper, half, kept = lane // distance % 2 == 1, len(values) // 2, []
        for low, high in zip(values[:half], values[half:], strict=True):
            sent, mine = cutlass.select_(upper, low, high), cutlass.select_(upper, high, low)
            kept.append(mine + cute.arch.shuffle_sync_bfly(sent, offset=distance))
        return kept

    @cute.jit
    def weights(self, sums: Sums, item: Item, t: ThreadIndex):
        """-lse in base 2 and the two weights of this thread's two heads, [3, 2]; for rows past the token's last head
        -inf and 0."""
        heads = cute.make_rmem_tensor((1 + len(Weight), 2), Float32)
        heads.fill(0.0)
        for i in cutlass.range_constexpr(2):
            heads[0, i] = -Float32.inf
            head = item.first_head + t.row + 8 * i
            if head < item.heads:
                row = Int64(item.token) * item.heads + head
                heads[0, i] = sums.row_terms[Int32(Term.LSE), row]
                for weight in cutlass.range_constexpr(len(Weight)):
                    heads[1 + weight, i] = sums.row_weights[Int32(weight), row]
        return heads

    @cute.jit
    def put_bound(self, sums: Sums, row: Int32, bound: Float32):
        """Raise the row's key_bounds to this tile's bound if that is greater, and add 1 to its key_counts."""
        if row >= 0:
            bounds = sums.key_bounds.iterator.toint() + Int64(row) * 4
            counts = sums.key_counts.iterator.toint() + Int64(row) * 4
            cute.arch.inline_ptx(
                "red.relaxed.gpu.global.max.s32 [{$r0}], {$r1};",
                read_only_args=[bounds, magnitude(bound).bitcast(Int32)],
            )
            cute.arch.inline_ptx("red.relaxed.gpu.global.add.u32 [{$r0}], 1;", read_only_args=[counts])

"""The deterministic mode's first pass over the keys: bounds on what each token adds to them (bounds.py)."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.nvgpu.warpgroup import Field

from tsmla_kernels.sm90.constants import LOG2_E
from tsmla_kernels.sm90.operands import Block
from tsmla_kernels.sm90.sparse_backward.bounds import magnitude
from tsmla_kernels.sm90.sparse_backward.config import TILE_HEADS
from tsmla_kernels.sm90.sparse_backward.gather import Gatherer
from tsmla_kernels.sm90.sparse_backward.memory import (
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
    leave,
)
from tsmla_kernels.sm90.sparse_backward.products import Consumer
from tsmla_kernels.sm90.storage import storage_of_fields

WEIGH_BLOCK = 32  # keys of one step
WEIGH_WARPS = 4  # warps that compute
WEIGH_GATHER_WARPS = 2
WEIGH_GATHER_WARP = WEIGH_WARPS
WEIGH_THREADS = 256
GROUP_LANES = (4, 8, 16)  # distances of the lanes that have a key's other heads


def weigh_storage(traits: Traits, keys: Block) -> Any:
    """The struct of the shared memory of the deterministic mode's first pass, with the names of `make_storage`."""
    fields: dict[str, Any] = {
        "queries_full": cute.struct.MemRange[Int64, 1],
        "keys_full": cute.struct.MemRange[Int64, 1],
        "keys_empty": cute.struct.MemRange[Int64, 1],
        "rows": cute.struct.Align[cute.struct.MemRange[Int32, SLOTS_KEPT * WEIGH_BLOCK], 16],
        "valid": cute.struct.Align[cute.struct.MemRange[Int32, SLOTS_KEPT * WEIGH_GATHER_WARPS], 16],
        "factors": cute.struct.Align[cute.struct.MemRange[Float32, SLOTS_KEPT * WEIGH_BLOCK], 16],
        "partial": cute.struct.Align[cute.struct.MemRange[Float32, 2 * 4 * len(Weight) * WEIGH_BLOCK], 16],
        "q": traits.memory_of(traits.q),
        "keys": traits.memory_of(keys),
    }
    return storage_of_fields(fields, traits.config)


class Weigher:
    """Device code of the first pass: one warpgroup computes P and the sums over heads of P times the rows' weights."""

    def __init__(self, traits: Traits, consumer: Consumer) -> None:
        self.traits, self.consumer = traits, consumer
        self.keys = Block(WEIGH_BLOCK, traits.head_dim, 32, WEIGH_BLOCK)
        self.gatherer = Gatherer(traits, self.keys)
        self.storage = weigh_storage(traits, self.keys)

    def shared_memory(self, storage: cute.struct) -> tuple[Shared, cute.Tensor]:
        """Views of the allocated `storage`, and the partial sums [key, weight, warp, parity of the block]. In place
        of a buffer that this pass does not have stands `q`, which nothing reads as that buffer."""
        strides = {"rows": WEIGH_BLOCK, "valid": WEIGH_GATHER_WARPS, "factors": WEIGH_BLOCK}
        tensors = {
            name: getattr(storage, name).get_tensor(cute.make_layout((size, SLOTS_KEPT), stride=(1, size)))
            for name, size in strides.items()
        }
        names = ("queries_full", "keys_full", "keys_empty", "q", "keys")
        pointers = {name: getattr(storage, name).data_ptr() for name in names}
        others = {name: pointers["q"] for name in Shared._fields if name not in (*tensors, *pointers)}
        shape = (WEIGH_BLOCK, len(Weight), WEIGH_WARPS, 2)
        return Shared(**tensors, **pointers, **others), storage.partial.get_tensor(cute.make_layout(shape))

    def init_mbarriers(self, shared: Shared) -> None:
        """Initialise the mbarriers, in one thread."""
        cute.arch.mbarrier_init(shared.queries_full, 1)
        cute.arch.mbarrier_init(shared.keys_full, 32 * WEIGH_GATHER_WARPS)
        cute.arch.mbarrier_init(shared.keys_empty, WEIGH_WARPS)

    @cute.jit
    def run(
        self,
        sums: Sums,
        scale: Float32,
        count: Int32,
        shared: Shared,
        partial: cute.Tensor,
        mma: Mma,
        item: Item,
    ):
        """Run the compute warpgroup. `count`: how many heads a token has."""
        thread = cute.arch.thread_idx()[0]
        lane, warp = thread % 32, thread // 32
        t = ThreadIndex(Int32(0), thread, lane, warp * 16 + lane // 4)
        mma.scores_first.set(Field.ACCUMULATE, False)
        mma.scores.set(Field.ACCUMULATE, True)
        heads = self.weights(sums, count, item, t)
        cute.arch.mbarrier_wait(shared.queries_full, 0)
        for block in cutlass.range(item.blocks, unroll=1):
            cute.arch.mbarrier_wait(shared.keys_full, block & 1)
            shape = mma.scores.get_slice(thread).partition_shape_C((TILE_HEADS, WEIGH_BLOCK))
            acc = cute.make_rmem_tensor(shape, Float32)
            warpgroup.fence()
            self.consumer.issue_scores(acc, mma, shared.q, self.traits.q, shared.keys, Int32(0), self.keys, t)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            leave(shared.keys_empty)
            place = block % SLOTS_KEPT
            for i in cutlass.range_constexpr(WEIGH_BLOCK // 8):
                for e in cutlass.range_constexpr(2):
                    alone, by_length = Float32(0.0), Float32(0.0)
                    for half in cutlass.range_constexpr(2):
                        power = acc[4 * i + 2 * half + e] * (scale * LOG2_E) + heads[0, half]
                        weight = cute.math.exp2(power, fastmath=True)
                        alone += weight * heads[1, half]
                        by_length += weight * heads[2, half]
                    for offset in GROUP_LANES:
                        alone += cute.arch.shuffle_sync_bfly(alone, offset=offset)
                        by_length += cute.arch.shuffle_sync_bfly(by_length, offset=offset)
                    if lane < 4:
                        key = 8 * i + lane * 2 + e
                        partial[key, Weight.ALONE, warp, block & 1] = alone
                        partial[key, Weight.BY_LENGTH, warp, block & 1] = by_length
            cute.arch.barrier(barrier_id=Barrier.BOUNDED, number_of_threads=32 * WEIGH_WARPS)
            if warp == 0:
                self.put_bounds(sums, partial, shared.rows[lane, place], block & 1)

    @cute.jit
    def weights(self, sums: Sums, count: Int32, item: Item, t: ThreadIndex):
        """-lse in base 2 and the two weights of this thread's two heads, [3, 2]; for rows past the token's last head
        -inf and 0."""
        heads = cute.make_rmem_tensor((1 + len(Weight), 2), Float32)
        heads.fill(0.0)
        for i in cutlass.range_constexpr(2):
            heads[0, i] = -Float32.inf
            head = item.first_head + t.row + 8 * i
            if head < count:
                row = Int64(item.token) * count + head
                heads[0, i] = sums.row_terms[Int32(Term.LSE), row]
                for weight in cutlass.range_constexpr(len(Weight)):
                    heads[1 + weight, i] = sums.row_weights[Int32(weight), row]
        return heads

    @cute.jit
    def put_bounds(self, sums: Sums, partial: cute.Tensor, row: Int32, parity: Int32):
        """For this lane's key, raise key_bounds to this tile's bound if that is greater, and add 1 to key_counts."""
        lane = cute.arch.lane_idx()
        if row >= 0:
            alone, by_length = Float32(0.0), Float32(0.0)
            for warp in cutlass.range_constexpr(WEIGH_WARPS):
                alone += partial[lane, Weight.ALONE, warp, parity]
                by_length += partial[lane, Weight.BY_LENGTH, warp, parity]
            bound = magnitude(alone + by_length * sums.key_norms[row])
            bounds = sums.key_bounds.iterator.toint() + Int64(row) * 4
            counts = sums.key_counts.iterator.toint() + Int64(row) * 4
            cute.arch.inline_ptx(
                "red.relaxed.gpu.global.max.s32 [{$r0}], {$r1};", read_only_args=[bounds, bound.bitcast(Int32)]
            )
            cute.arch.inline_ptx("red.relaxed.gpu.global.add.u32 [{$r0}], 1;", read_only_args=[counts])

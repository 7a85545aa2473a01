"""The CTAs that share a row: how they meet, and how they read each other's shared memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from tsmla_kernels.topk.memory import Place, Shared, Total


class Cluster:
    """Device functions of a CTA in a cluster of `size`."""

    def __init__(self, size: int) -> None:
        self.size = size

    @cute.jit
    def meet(self):
        """Wait for all threads of the cluster. Their earlier writes into shared memory are then visible to all."""
        if const_expr(self.size > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    def remote(self, tensor: cute.Tensor, index: Int32, rank: Int32, count: int = 1):
        """Read `count` neighbouring words of CTA `rank`, from element `index` of its `tensor` on. An element has one or
        two words."""
        address = tensor.iterator.toint() + index * (tensor.element_type.width // 8)
        if const_expr(self.size == 1):
            pointer = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=4 * count)
            values = cute.make_rmem_tensor((count,), Int32)
            cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(count)), values)
            return [values[i] for i in range(count)]
        names = ", ".join(f"{{$w{i}}}" for i in range(count))
        vector, target = (f".v{count}", f"{{ {names} }}") if count > 1 else ("", names)
        words = cute.arch.inline_ptx(
            "{ .reg .b32 a; mapa.shared::cluster.u32 a, {$r0}, {$r1};"
            f" ld.shared::cluster{vector}.u32 {target}, [a]; }}",
            write_only_types=[Int32] * count,
            read_only_args=[address, rank],
        )
        return list(words) if count > 1 else [words]

    @cute.jit
    def totals(self, shared: Shared, place: Place, word: cutlass.Constexpr[Total]):
        """Read one word of every CTA's totals. Lane i gets CTA i's word; lanes past the last CTA get the last CTA's."""
        return self.remote(shared.totals, Int32(word), cutlass.min(place.lane, self.size - 1))[0]

    @cute.jit
    def bounds(self, shared: Shared, place: Place):
        """The least and the greatest key that the cluster has in the deciding bin."""
        least = Uint32(self.totals(shared, place, Total.LEAST))
        greatest = Uint32(self.totals(shared, place, Total.GREATEST))
        return cute.arch.warp_redux_sync(least, "umin"), cute.arch.warp_redux_sync(greatest, "umax")

"""A bitonic sort of 64-bit entries by the threads of a CTA. A thread has neighbouring entries in its registers. Two
threads exchange entries by shuffles if both are in one warp, and through shared memory otherwise."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, Uint64, const_expr

WARP = 32


class EntrySort:
    """Sorts `count` entries in shared memory with `threads` threads. `count` is a power of two, and at least 64."""

    def __init__(self, count: int, threads: int) -> None:
        self.count = count
        self.each = max(1, count // threads)
        self.active = count // self.each
        self.steps = self.each.bit_length() - 1

    @cute.jit
    def descending(self, entries: cute.Tensor, thread: Int32):
        """Sort in descending order. All threads of the CTA call this function after a barrier behind the last write of
        an entry. It ends with a barrier."""
        own = (thread & (self.active - 1)) * self.each
        values = cute.make_rmem_tensor((self.each,), Uint64)
        others = cute.make_rmem_tensor((self.each,), Uint64)
        for i in cutlass.range_constexpr(self.each):
            values[i] = entries[own + i]
        size = Int32(2)
        while size <= self.count:
            stride = size >> 1
            while stride > 0:
                if stride < self.each:
                    self.exchange_own(values, own, size, stride)
                else:
                    if stride < WARP * self.each:
                        for i in cutlass.range_constexpr(self.each):
                            others[i] = shuffled(values[i], stride >> self.steps)
                    else:
                        cute.arch.sync_threads()  # all have read the entries before they are overwritten
                        self.put(entries, values, own, thread)
                        cute.arch.sync_threads()
                        for i in cutlass.range_constexpr(self.each):
                            others[i] = entries[(own ^ stride) + i]
                    keeps_greater = ((own & stride) == 0) == ((own & size) == 0)
                    for i in cutlass.range_constexpr(self.each):
                        if (others[i] > values[i]) == keeps_greater:
                            values[i] = others[i]
                stride = stride >> 1
            size = size << 1
        cute.arch.sync_threads()
        self.put(entries, values, own, thread)
        cute.arch.sync_threads()

    @cute.jit
    def put(self, entries: cute.Tensor, values: cute.Tensor, own: Int32, thread: Int32):
        """Write a thread's entries into shared memory, from index `own` on."""
        if thread < self.active:
            for i in cutlass.range_constexpr(self.each):
                entries[own + i] = values[i]

    @cute.jit
    def exchange_own(self, values: cute.Tensor, own: Int32, size: Int32, stride: Int32):
        """Do one step among a thread's entries, whose first has the index `own`."""
        for step in cutlass.range_constexpr(self.steps):
            if stride == 1 << step:
                for i in cutlass.range_constexpr(self.each):
                    if const_expr(i & (1 << step) == 0):
                        one, other = values[i], values[i + (1 << step)]
                        if (one < other) == (((own + i) & size) == 0):
                            values[i] = other
                            values[i + (1 << step)] = one


def shuffled(value: Uint64, distance: Int32) -> Uint64:
    """The value of the lane whose index differs from this lane's in the bit with the value `distance`."""
    low, high = (
        cute.arch.shuffle_sync_bfly(Uint32(half), offset=distance)
        for half in (value & Uint64(0xFFFFFFFF), value >> Uint64(32))
    )
    return (Uint64(high) << Uint64(32)) | Uint64(low)

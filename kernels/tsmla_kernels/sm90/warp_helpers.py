"""What the Hopper kernels' warps do alike: a base class of the kernels."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr


class WarpHelpers:
    """Device functions of decode and prefill. `stages` is how many stages a kernel's ring has."""

    stages: int

    @cute.jit
    def uniform(self, value: Int32):
        """A value that all lanes hold, in a uniform register: what depends on it alone is computed once a warp."""
        return cute.arch.warp_redux_sync(value, "max")

    @cute.jit
    def advance(self, index: Int32, phase: Int32):
        """The stage after `index`, and the parity of its barriers."""
        index += 1
        if index == self.stages:
            index = Int32(0)
            phase ^= 1
        return index, phase

    @cute.jit
    def transpose_quad(self, words: cute.Tensor, quad: Int32):
        """4 x 4 transpose among the four lanes of a row: word j of lane q becomes word q of lane j."""
        for step in cutlass.range_constexpr(2):
            offset = 2 >> step
            upper = (quad // offset) % 2
            for j in cutlass.range_constexpr(4):
                if const_expr((j // offset) % 2 == 0):
                    a, b = words[j], words[j + offset]
                    sent = b
                    if upper == 1:
                        sent = a
                    received = cute.arch.shuffle_sync_bfly(sent, offset=offset)
                    if upper == 1:
                        a = received
                    else:
                        b = received
                    words[j], words[j + offset] = a, b

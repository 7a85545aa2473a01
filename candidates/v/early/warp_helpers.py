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
    def kept(self, value: Int32):
        """A value that stays in its register: what comes of a thread's index the compiler would find again, by a dozen
        instructions, wherever it is used."""
        return cute.arch.shuffle_sync_bfly(value, offset=0)

    @cute.jit
    def store_matrices(self, address: Int32, words: cute.Tensor):
        """Four 8 x 8 matrices of 16 bits, as accumulators lie in registers, to the rows that the lanes' addresses are."""
        cute.arch.inline_ptx(
            "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
            read_only_args=[address, words[0], words[1], words[2], words[3]],
        )

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

"""The greatest P of each query row of the sparse kernel, read back from shared memory.

A block's P is read while the next block's is computed: the softmax warps have met since all of it was stored, and it
stays in its stage until they store that stage's next P. So a lane has one word for a part of one row. It would need
eight for its keys of all rows, and these would take the registers of K's conversions.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32

from tsmla_kernels.sm90.latent.key_softmax import Exchange, KeyScores, KeySoftmax
from tsmla_kernels.sm90.latent.memory import SOFTMAX_THREADS, Shared
from tsmla_kernels.sm90.latent.query import two_halves
from tsmla_kernels.sm90.latent.ring import Ring
from tsmla_kernels.sm90.latent.softmax import any_of_warps
from tsmla_kernels.sm90.latent.words import greatest, times
from tsmla_kernels.sm90.warp import kept

NO_BLOCK = -1  # the greatest P before a piece's first block: two NaN
CHUNKS = 8  # of 16 bytes, in a row of P


def tops_of(exchanged: Exchange, p_rows: int) -> cute.Tensor:
    """Scratch for the rows' greatest P behind a piece's last block: `changes`, which no one reads any more."""
    return cute.make_tensor(exchanged.changes.iterator, cute.make_layout(p_rows))


class GreatestP:
    """Takes the greatest P from blocks whose P lies in shared memory. A lane's word has two f16: the greatest P of even
    and of odd keys.

    Attributes:
      lanes: how many lanes of the softmax warpgroup share a row. chunks: how many chunks of the row each of them reads.
      shift: t >> shift is thread t's row. A division would take more instructions, those for negative numbers.
    """

    def __init__(self, ring: Ring) -> None:
        self.ring, self.lanes = ring, SOFTMAX_THREADS // ring.p_rows
        self.chunks, self.shift = CHUNKS // self.lanes, self.lanes.bit_length() - 1

    def factor_of(self, changes: cute.Tensor, t: Int32) -> Float32:
        """The factor with which the maximum of thread t's row has changed."""
        return cute.make_tensor(changes.iterator + ((t >> self.shift) * 2 + 1), cute.make_layout(1))[0]

    @cute.jit
    def read_before(self, index: Int32, t: Int32, shared: Shared) -> cute.Tensor:
        """Thread t's part of its row of the P in the stage before `index`."""
        return self.read(Int32(cutlass.select_(index == 0, Int32(self.ring.stages - 1), index - 1)), t, shared)

    @cute.jit
    def take(self, words: cute.Tensor, factor: Float32, highest: cute.Tensor):
        """Take words of the block before into `highest`, and multiply it by the factor with which the row's maximum has
        changed. In a piece's first block the words are of another piece, or of none, and `highest` becomes 0."""
        within = -Int32(highest[0] != NO_BLOCK)
        highest[0] = times(self.greatest_of(words, highest[0]) & within, two_halves(factor, factor))

    @cute.jit
    def finish(self, index: Int32, t: Int32, highest: cute.Tensor, tops: cute.Tensor, shared: Shared):
        """Take the P of a piece's last block, which is in stage `index`, and write the rows' greatest P to `tops`."""
        top = self.greatest_of(self.read(index, t, shared), highest[0])
        for step in cutlass.range_constexpr(self.shift):
            other = cute.arch.shuffle_sync_bfly(top, offset=1 << step)
            top = greatest(top, other, other)
        other = Int32(cute.arch.prmt(top, top, 0x1032))  # the halves in the other order
        halves = cute.make_rmem_tensor((2,), Float16)
        cute.recast_tensor(halves, Int32)[0] = greatest(top, other, other)
        if (t & (self.lanes - 1)) == 0:
            tops[t >> self.shift] = halves[0].to(Float32)

    @cute.jit
    def read(self, index: Int32, t: Int32, shared: Shared) -> cute.Tensor:
        """Thread t's part of its row of the P in stage `index`."""
        row = t >> self.shift
        chunk = ((t & (self.lanes - 1)) * self.chunks) ^ (row & 7)  # P's swizzle
        stage = shared.keys.iterator.toint() + index * (self.ring.stage_elements * self.ring.itemsize)
        address = stage + (self.ring.p_offset + row * self.ring.p_row_bytes + (chunk << 4))
        words = cute.make_rmem_tensor((4, self.chunks), Int32)
        for i in cutlass.range_constexpr(self.chunks):
            there = cute.make_ptr(Int32, address ^ (i << 4), cute.AddressSpace.smem, assumed_align=16)
            cute.autovec_copy(cute.make_tensor(there, cute.make_layout(4)), words[None, i])
        return words

    @cute.jit
    def greatest_of(self, pairs: cute.Tensor, highest: Int32) -> Int32:
        """The greatest of `highest` and of these pairs of P, for even and for odd keys."""
        for i in cutlass.range_constexpr(0, 4 * self.chunks, 2):
            highest = greatest(highest, pairs[i], pairs[i + 1])
        return highest


class ReadBackSoftmax:
    """The softmax of a block's S^T that also takes the greatest P of the block before, among the exponentials."""

    def __init__(self, steps: KeySoftmax, greatest_p: GreatestP) -> None:
        self.steps, self.greatest_p = steps, greatest_p

    @cute.jit
    def softmax_of_keys(
        self, s: cute.Tensor, first: Int32, scale: Float32, held: KeyScores, shared: Shared, index: Int32
    ):  # fmt: skip
        """Turn S into P as KeySoftmax does, and take the greatest P of the block before into `held.running.highest`."""
        # `kept`, so that addresses made from the thread's index take no registers during the products.
        here, changed = kept(held.place.thread), Float32(1.0)
        lags = any_of_warps(first | self.steps.make_relative(s, scale, held.running))
        if lags != 0:
            self.steps.update_maxima(s, first, held, None, shared, index)
            changed = self.greatest_p.factor_of(held.exchanged.changes, here)
        if held.place.lane == 0:
            shared.moved[held.place.thread // 32, index] = lags
        words = self.greatest_p.read_before(index, here, shared)
        self.steps.exponentials(s, held, None)
        self.greatest_p.take(words, changed, held.running.highest)

"""BitWriter: the words of a row's selection. Bits are collected in shared memory, in the place of the first histogram,
and then stored, 16 bytes by each thread."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from tsmla_kernels.sm90.warp import quotient, remainder
from tsmla_kernels.topk.config import TopkConfig
from tsmla_kernels.topk.memory import Output, Place, Shared

WORD = 32
"""Columns of a word."""
NIBBLES = 0x0F0F0F0F


class BitWriter:
    """Device functions that write the words of one row, which one CTA has."""

    def __init__(self, config: TopkConfig) -> None:
        self.config = config

    @cute.jit
    def clear(self, shared: Shared, place: Place, output: Output):
        """Clear the words in shared memory. A barrier comes before the call, and another one before the first `add`."""
        zeros = cute.make_rmem_tensor((4,), Int32)
        zeros.fill(0)
        for i in cutlass.range(place.thread, quotient(output.indices.shape[1], 4), self.config.threads, unroll=1):
            cute.autovec_copy(zeros, self.four(shared.sample.bins.iterator, i))

    @cute.jit
    def add(self, shared: Shared, position: Int32, mask: Int32):
        """Set the bits of up to 16 neighbouring columns: bit i of `mask` stands for the column at `position` + i. If
        `position` is negative, no column before 0 has its bit set in `mask`."""
        before = cutlass.max(-position, 0)
        mask, position = mask >> before, position + before
        shift, words = remainder(position, WORD), shared.sample.bins.iterator + quotient(position, WORD)
        low, high = mask << shift, (mask >> 1) >> (WORD - 1 - shift)
        if low != 0:
            cute.arch.atomic_or(words, low, sem="relaxed", scope="cta")
        if high != 0:
            cute.arch.atomic_or(words + 1, high, sem="relaxed", scope="cta")

    @cute.jit
    def put(self, shared: Shared, place: Place, output: Output):
        """Store the words. A barrier must lie between the last `add` and this call."""
        width = output.indices.shape[1]
        row = output.indices.iterator + Int64(place.row) * Int64(width)
        for i in cutlass.range(place.thread, quotient(width, 4), self.config.threads, unroll=1):
            cute.autovec_copy(self.four(shared.sample.bins.iterator, i), self.four(row, i))

    @cute.jit
    def put_all(self, length: Int32, place: Place, output: Output):
        """Store the words of a row whose `length` columns are all selected."""
        width = output.indices.shape[1]
        row = output.indices.iterator + Int64(place.row) * Int64(width)
        words = cute.make_tensor(row, cute.make_layout(1 << 30))
        for i in cutlass.range(place.thread, width, self.config.threads, unroll=1):
            count = cutlass.min(cutlass.max(length - i * WORD, 0), WORD)
            word = Int32(-1)
            if count < WORD:
                word = (Int32(1) << count) - 1
            words[i] = word

    def four(self, words: cute.Pointer, index: Int32) -> cute.Tensor:
        """Words 4 * `index` to 4 * `index` + 3."""
        return cute.make_tensor((words + index * 4).align(16), cute.make_layout(4))


def joined_nibbles(word: Int32) -> Int32:
    """The lower four bits of each byte, side by side: 16 bits."""
    pairs = word & NIBBLES
    pairs = (pairs | (pairs >> 4)) & 0x00FF00FF
    return (pairs | (pairs >> 8)) & 0xFFFF

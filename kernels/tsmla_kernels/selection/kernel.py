"""selection_bits in one launch: a CTA has one token. Its threads set the bits of the token's positions in shared
memory, span by span of words, and then store the words. DESIGN.md in this folder gives the reasons.
"""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
from cutlass import Int32, const_expr

from tsmla_kernels.selection.config import SPAN_WORDS, THREADS, SelectionBitsConfig

WORD_BITS = 32


class Operands(NamedTuple):
    """The arrays of a launch, all int32: positions [T, k], selection [T, W], lengths [T] if config.lengths, and starts
    [T] if config.starts."""

    positions: cute.Tensor
    selection: cute.Tensor
    lengths: cute.Tensor | None = None
    starts: cute.Tensor | None = None


class SelectionBits:
    """One compiled selection_bits: `config` is static, all sizes are dynamic."""

    def __init__(self, config: SelectionBitsConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(self, stream: cuda.CUstream, *arrays: cute.Tensor) -> None:
        """Launch the kernel on `stream`. `arrays` are those of `selection_bits_operands`, in order."""
        each = [name for name in ("lengths", "starts") if getattr(self.config, name)]
        operands = Operands(arrays[0], arrays[-1], **dict(zip(each, arrays[1:-1], strict=True)))
        self.mark(operands).launch(grid=[operands.positions.shape[0], 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def mark(self, operands: Operands):
        """Write the words of one token."""
        tidx, token = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]

        @cute.struct
        class Storage:
            words: cute.struct.Align[cute.struct.MemRange[Int32, SPAN_WORDS], 16]

        words = utils.SmemAllocator().allocate(Storage).words.get_tensor(cute.make_layout(SPAN_WORDS))
        positions, selection = operands.positions[token, None], operands.selection[token, None]
        count, start = Int32(positions.shape[0]), Int32(0)
        if const_expr(self.config.lengths):
            count = cutlass.min(operands.lengths[token], count)
        if const_expr(self.config.starts):
            start = cutlass.max(operands.starts[token], 0)
        width = Int32(selection.shape[0])
        for first in cutlass.range(0, width, SPAN_WORDS, unroll=1):
            span = cutlass.min(width - first, SPAN_WORDS)
            for i in cutlass.range(tidx, span, THREADS, unroll=1):
                words[i] = Int32(0)
            cute.arch.sync_threads()
            for i in cutlass.range(tidx, count, THREADS, unroll=4):
                # A position before the start is no key of these words; comparing first keeps the difference in int32.
                position = positions[i]
                if position >= start:
                    bit = position - start - first * WORD_BITS
                    if (bit >= 0) & (bit < span * WORD_BITS):
                        self.set_bit(words.iterator + bit // WORD_BITS, bit % WORD_BITS)
            cute.arch.sync_threads()
            for i in cutlass.range(tidx, span, THREADS, unroll=1):
                selection[first + i] = words[i]
            cute.arch.sync_threads()

    @cute.jit
    def set_bit(self, word: cute.Pointer, bit: Int32) -> None:
        """Set a bit of a word in shared memory; other threads may set bits of the same word."""
        cute.arch.atomic_or(word, Int32(1) << bit, sem="relaxed", scope="cta")

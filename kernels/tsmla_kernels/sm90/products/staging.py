"""A warp's part of shared memory, through which it moves results to other lanes before it stores them."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32


def chunk_place(row: Int32, chunk: Int32, chunks: int) -> Int32:
    """The byte offset of a row's chunk of 16 bytes. In eight rows that follow one another, the chunks `chunk` lie in
    different banks."""
    return (row * chunks + (chunk ^ (row // (8 // chunks) % chunks))) * 16


def take(address: Int32) -> cute.Tensor:
    """Load four words of shared memory."""
    four = cute.make_rmem_tensor((4,), Int32)
    pointer = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=16)
    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(4)), four)
    return four


def stage_pair(address: Int32, pair: Int32) -> None:
    """Store the low two bytes of `pair` in shared memory."""
    cute.arch.inline_ptx(
        "{ .reg .b16 h; cvt.u16.u32 h, {$r1}; st.shared.b16 [{$r0}], h; }", read_only_args=[address, pair]
    )

"""Which request a CTA of compress_write_kv_cache works for."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from tsmla_kernels.sparse_cache.compress_config import SEARCHED_AT_ONCE, CompressWriteConfig
from tsmla_kernels.sparse_cache.compress_memory import CompressArrays, Request


class RequestSearch:
    """Device functions that find the request of a CTA. `config` is the kernel's."""

    config: CompressWriteConfig

    @cute.jit
    def owner(self, arrays: CompressArrays, block: Int32, lane: Int32):
        """(Request, number) of the CTA: each request has a CTA, and one more for every `ratio` tokens. All lanes."""
        config, num_requests = self.config, arrays.seq_lens.shape[0]
        # Where no request has `ratio` tokens, and where there is one request alone, it is this one: its facts are under
        # way while the search finds that out.
        guess = cutlass.min(block, num_requests - 1)
        tokens = cute.make_rmem_tensor((SEARCHED_AT_ONCE,), Int32)
        self.ask_starts(arrays, lane, tokens)
        token, after, length, state = self.facts(arrays, guess)
        count, step = Int32(0), 32 * SEARCHED_AT_ONCE
        for first in cutlass.range(0, num_requests, step, unroll=1):
            for u in cutlass.range_constexpr(SEARCHED_AT_ONCE):
                request = first + lane + 32 * u
                begins = tokens[u] // config.ratio + request <= block
                if begins and request < num_requests:
                    count += 1
            if first + step < num_requests:
                self.ask_starts(arrays, first + step + lane, tokens)
        index = cute.arch.warp_redux_sync(count, "add") - 1
        if index != guess:
            token, after, length, state = self.facts(arrays, index)
        number = block - (token // config.ratio + index)
        return Request(index, token, length - (after - token), length, state), number

    def ask_starts(self, arrays: CompressArrays, first: Int32, tokens: cute.Tensor) -> None:
        """Load the first tokens of every 32nd request from `first` on; the last request's for one behind it."""
        last = arrays.seq_lens.shape[0] - 1
        for u in range(SEARCHED_AT_ONCE):
            tokens[u] = ask_word(arrays.cu_seqlens_q, cutlass.min(first + 32 * u, last))

    def facts(self, arrays: CompressArrays, index: Int32):
        """Of a request: its first token, the one behind its last, its length, its state."""
        return tuple(
            ask_word(array, at)
            for array, at in (
                (arrays.cu_seqlens_q, index),
                (arrays.cu_seqlens_q, index + 1),
                (arrays.seq_lens, index),
                (arrays.state_slots, index),
            )
        )


def ask_word(array: cute.Tensor, index: Int32) -> Int32:
    """A word of an array, loaded here: the compiler moves a plain load to its first use, behind other waits."""
    return cute.arch.inline_ptx(
        "ld.volatile.global.b32 {$w0}, [{$r0}];",
        write_only_types=[Int32],
        read_only_args=[array.iterator.toint() + Int64(index) * 4],
    )

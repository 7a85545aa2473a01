"""merge_attention_states in one launch: it merges partial attention results over disjoint keys into one result, which
may overwrite one of them.

As in the cache kernels, every row is moved once. A thread owns 16 bytes of columns of one or two rows, and loads them
from all partial results before it uses any. DESIGN.md in this folder gives the reasons.
"""

from __future__ import annotations

import math

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32

from tsmla_kernels.cache_ops.kernels import DTYPES, load, row_address, store
from tsmla_kernels.merge.config import MergeConfig

LOG2_E = math.log2(math.e)


class MergeAttentionStates:
    """merge_attention_states: `config` is static, the number of rows is dynamic.

    Operands of the launcher, for N partial results: N outs [rows, L], or wider rows that begin with these columns, each
    row at a multiple of 16 bytes; N lses [rows] f32, natural log; the merged out [rows, L] and lse [rows], which may be
    the memory of one partial result.
    """

    def __init__(self, config: MergeConfig) -> None:
        self.config = config
        self.tiling = config.tiling
        self.dtype = DTYPES[config.dtype]

    @cute.jit
    def __call__(self, stream: cuda.CUstream, *arrays: cute.Tensor):
        parts, step = self.config.parts, self.tiling.rows * self.config.unroll
        self.merge(arrays[:parts], arrays[parts : 2 * parts], *arrays[2 * parts :]).launch(
            grid=[cute.ceil_div(arrays[-1].shape[0], step), 1, 1],
            block=[self.tiling.threads, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def merge(self, outs: tuple[cute.Tensor, ...], lses: tuple[cute.Tensor, ...], out: cute.Tensor, lse: cute.Tensor):
        tiling, unroll = self.tiling, self.config.unroll
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        chunk, local_row = tidx % tiling.chunks, tidx // tiling.chunks
        first_row = block * (tiling.rows * unroll) + local_row
        num_rows = lse.shape[0]
        column = chunk * (tiling.vector * self.dtype.width // 8)

        rows, values, partial_lses = [], [], []
        for u in cutlass.range_constexpr(unroll):
            row = cutlass.min(first_row + u * tiling.rows, num_rows - 1)
            rows.append(first_row + u * tiling.rows)
            values.append([load(self.dtype, row_address(partial, row, column), tiling.vector) for partial in outs])
            partial_lses.append([partial[row] for partial in lses])
        # In place, one thread of a row overwrites the lse that all threads of the row must read first.
        cute.arch.sync_threads()
        for u in cutlass.range_constexpr(unroll):
            weights, merged_lse = self.weights(partial_lses[u])
            merged = cute.make_rmem_tensor((tiling.vector,), Float32)
            for i in cutlass.range_constexpr(tiling.vector):
                terms = [value[i].to(Float32) * weight for value, weight in zip(values[u], weights, strict=True)]
                # A value whose weight is 0 may be NaN, and 0 * NaN is NaN.
                terms = [
                    cutlass.select_(weight == 0.0, Float32(0.0), term)
                    for term, weight in zip(terms, weights, strict=True)
                ]
                merged[i] = sum(terms[1:], terms[0])
            if rows[u] < num_rows:
                store(self.dtype, row_address(out, rows[u], column), merged)
                if chunk == 0:
                    lse[rows[u]] = merged_lse

    def weights(self, lses):
        """The weight of each partial result in a row, and the merged lse. They are 0 and -inf if no partial result saw
        a key; the merged lse is NaN if an lse is NaN. An lse of +inf means the same as -inf (no key was seen), because
        FlashAttention and FlashMLA write +inf."""
        lses = [cutlass.select_(lse == Float32.inf, -Float32.inf, lse) for lse in lses]
        maximum = lses[0]
        for lse in lses[1:]:
            maximum = cute.arch.fmax(maximum, lse)
        no_keys = maximum == -Float32.inf
        maximum = cutlass.select_(no_keys, Float32(0.0), maximum)  # avoids inf - inf
        # exp(lse - merged) is not used: rounding the merged lse would cost 1e-4 of a weight at an lse of 3000.
        terms = [cute.math.exp2((lse - maximum) * LOG2_E, fastmath=True) for lse in lses]
        total = cutlass.select_(no_keys, Float32(1.0), sum(terms[1:], terms[0]))
        inverse = Float32(1.0) / total
        # fmax ignores NaN, so an lse may be NaN if no_keys. The sum of the lses is then NaN, otherwise -inf.
        merged = cutlass.select_(no_keys, sum(lses[1:], lses[0]), maximum + cute.math.log(total))
        return [term * inverse for term in terms], merged

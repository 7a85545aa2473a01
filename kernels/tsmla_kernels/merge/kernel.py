"""merge_attention_states in one launch: partial attention results over disjoint keys to one, in place if wished.

As the cache kernels beside this, it moves rows once: a thread keeps 16 bytes of columns and walks down rows, a few of
them in flight at once, with those of all parts. cache_ops/DESIGN.md says what it costs.
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

    Operands of the launcher, for N parts: N outs [rows, L] (or rows of which these are the first columns, every row at
    a multiple of 16 bytes), N lses [rows] f32, natural log, the merged out [rows, L] and lse [rows], which may be the
    memory of one of the parts.
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
        chunk, local = tidx % tiling.chunks, tidx // tiling.chunks
        first = block * (tiling.rows * unroll) + local
        total = lse.shape[0]
        column = chunk * (tiling.vector * self.dtype.width // 8)

        rows, values, logs = [], [], []
        for u in cutlass.range_constexpr(unroll):
            row = cutlass.min(first + u * tiling.rows, total - 1)
            rows.append(first + u * tiling.rows)
            values.append([load(self.dtype, row_address(part, row, column), tiling.vector) for part in outs])
            logs.append([part[row] for part in lses])
        # In place one of a row's threads writes what all of them have read.
        cute.arch.sync_threads()
        for u in cutlass.range_constexpr(unroll):
            shares, merged_log = self.shares(logs[u])
            merged = cute.make_rmem_tensor((tiling.vector,), Float32)
            for i in cutlass.range_constexpr(tiling.vector):
                terms = [value[i].to(Float32) * share for value, share in zip(values[u], shares, strict=True)]
                # What has no share may be NaN.
                seen = [
                    cutlass.select_(share == 0.0, Float32(0.0), term) for term, share in zip(terms, shares, strict=True)
                ]
                merged[i] = sum(seen[1:], seen[0])
            if rows[u] < total:
                store(self.dtype, row_address(out, rows[u], column), merged)
                if chunk == 0:
                    lse[rows[u]] = merged_log

    def shares(self, logs):
        """Each part's share of a row, and the logarithm of their sum; 0 and -inf where no part saw a key."""
        high = logs[0]
        for log in logs[1:]:
            high = cute.arch.fmax(high, log)
        nothing = high == -Float32.inf
        high = cutlass.select_(nothing, Float32(0.0), high)  # avoids inf - inf
        # Shares of the sum, not exp(log - merged): rounding that would cost 1e-4 of a share at 3000.
        terms = [cute.math.exp2((log - high) * LOG2_E, fastmath=True) for log in logs]
        total = cutlass.select_(nothing, Float32(1.0), sum(terms[1:], terms[0]))
        inverse = Float32(1.0) / total
        merged = cutlass.select_(nothing, -Float32.inf, high + cute.math.log(total))
        return [term * inverse for term in terms], merged

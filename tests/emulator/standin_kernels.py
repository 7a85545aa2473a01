"""The launchers of standin.py. Imports cutlass: only compiling imports this."""

import os

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from tests.emulator.standin import ScaleConfig, count_builds

THREADS = 32


class Scale:
    def __init__(self, config: ScaleConfig) -> None:
        count_builds(config)
        if config.fault == "end":
            os._exit(9)
        if config.fault == "trace":
            raise ValueError("this config is made not to compile")
        self.config = config

    @cute.jit
    def __call__(self, stream: cuda.CUstream, x: cute.Tensor, factor: cute.Tensor, out: cute.Tensor):
        self.scale(x, factor, out).launch(grid=[x.shape[0], 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def scale(self, x: cute.Tensor, factor: cute.Tensor, out: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        for i in cutlass.range_constexpr(self.config.width // THREADS):
            value = x[row, thread + THREADS * i] * factor[0]
            if const_expr(self.config.fault == "local_memory"):
                values = cute.make_rmem_tensor((64,), Float32)
                values.fill(value)
                for j in cutlass.range(x.shape[0], unroll=1):
                    values[Int32(x[j, thread])] = value  # an index that is only known at run time
                value = values[Int32(value)]
            out[row, thread + THREADS * i] = value


class Decode:
    def __init__(self, config: object) -> None:
        count_builds(config)

    @cute.jit
    def __call__(
        self,
        stream: cuda.CUstream,
        q: cute.Tensor,
        kv_cache: cute.Tensor,
        block_tables: cute.Tensor,
        seq_lens: cute.Tensor,
        cu_seqlens_q: cute.Tensor,
        scales: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        partial_out: cute.Tensor,
        partial_lse: cute.Tensor,
        split_info: cute.Tensor,
    ):
        self.fill(scales, out, lse).launch(grid=[q.shape[0], 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def fill(self, scales: cute.Tensor, out: cute.Tensor, lse: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        if thread == 0:
            out[row, 0] = scales[1].to(out.element_type)
            lse[row] = scales[0]

"""Expanded MLA prefill over ragged batches, bf16, f16 and fp8, for Hopper.

DESIGN.md in this folder gives the reasons. Two kernels run one after the other:

  make_plan   one CTA turns the requests' lengths into tiles, the longest requests first (plan.py)
  attend      each CTA claims tiles of 64 query rows per compute warpgroup until no tile is left:
                compute warpgroups 0 .. groups - 1   S = Q K^T, softmax, O += P V, each for its own rows (attention.py)
                the last warpgroup                   the producer warp copies Q, K and V (copies.py); with fp8 two
                                                     warps transpose V (transpose.py)
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync
from cutlass.cute.nvgpu.warpgroup import OperandSource

from tsmla_kernels.sm90.operands import TmaCopy
from tsmla_kernels.sm90.prefill.attention import Attention
from tsmla_kernels.sm90.prefill.config import GROUP_ROWS, PrefillConfig
from tsmla_kernels.sm90.prefill.copies import Producer
from tsmla_kernels.sm90.prefill.memory import (
    TRANSPOSE_WARPS,
    WARPGROUP_THREADS,
    Copies,
    KernelTraits,
    Mma,
    Operands,
    Optional,
    Results,
    Schedule,
    init_mbarriers,
    make_storage,
    prefill_operands,
    shared_memory,
)
from tsmla_kernels.sm90.prefill.plan import PLAN_THREADS, Planner
from tsmla_kernels.sm90.prefill.transpose import ValueTransposer


class MlaPrefill:
    """One compiled prefill. `config` is static; the numbers of heads, requests and tokens are dynamic."""

    def __init__(self, config: PrefillConfig) -> None:
        self.traits = KernelTraits(config)
        self.storage = make_storage(self.traits)
        self.planner = Planner(self.traits)
        self.producer = Producer(self.traits)
        self.transposer = ValueTransposer(self.traits)
        self.attention = Attention(self.traits)

    @cute.jit
    def __call__(self, stream: cuda.CUstream, *tensors: cute.Tensor) -> None:
        """Launch both kernels on `stream`. `tensors` are those of `mla_prefill_operands`, in order."""
        operands = prefill_operands(tensors, self.traits.config)
        copies = self.make_copies(operands)
        mma = self.make_mma()
        heads, total_q, total_kv = Int32(operands.q.shape[1]), Int32(operands.q.shape[0]), Int32(operands.k.shape[0])
        schedule = Schedule(operands.plan, operands.progress)
        self.planner.make_plan(
            operands.cu_seqlens_q, operands.cu_seqlens_kv, schedule, heads, total_q, total_kv
        ).launch(grid=[1, 1, 1], block=[PLAN_THREADS, 1, 1], stream=stream)
        self.attend(
            copies, operands.scales, operands.out, operands.lse, schedule, mma, heads,
            Optional(operands.selection, operands.sinks, operands.max_logits),
        ).launch(
            grid=[operands.progress.shape[0], 1, 1], block=[self.traits.threads, 1, 1], stream=stream,
            min_blocks_per_mp=1, use_pdl=True,
        )  # fmt: skip

    @cute.jit
    def make_copies(self, operands: Operands) -> Copies:
        """The TMA loads of Q, K and V."""
        traits = self.traits
        q = self.make_copy(operands.q, GROUP_ROWS, traits.k_column_tiles)
        k = self.make_copy(operands.k, traits.block, traits.nope_column_tiles)
        if const_expr(traits.rope_column_tiles > 0):
            k_rope = operands.v
            rope_heads = cute.make_tensor(
                k_rope.iterator,
                cute.make_layout((k_rope.shape[0], 1, k_rope.shape[1]), stride=(k_rope.stride[0], 0, 1)),
            )
            rope = self.make_copy(rope_heads, traits.block, traits.rope_column_tiles)
            v = self.make_copy(operands.k, traits.block, traits.v_column_tiles, 64 * traits.nope_column_tiles)
        else:
            rope = k
            v = self.make_copy(operands.v, traits.block, traits.v_column_tiles)
        return Copies(q, k, rope, v)

    @cute.jit
    def make_copy(
        self,
        x: cute.Tensor,
        rows: cutlass.Constexpr[int],
        column_tiles: cutlass.Constexpr[int],
        first_column: cutlass.Constexpr[int] = 0,
    ) -> TmaCopy:
        """The TMA load of a box of x [T, H, any]: `rows` rows, 64 * `column_tiles` columns from `first_column` on."""
        row, head = cute.assume(x.stride[0], divby=64), x.stride[1]
        if const_expr(not isinstance(head, int)):
            head = cute.assume(head, divby=64)
        view = cute.make_tensor(
            x.iterator + first_column,
            cute.make_layout((x.shape[0], 64, column_tiles, x.shape[1]), stride=(row, 1, 64, head)),
        )
        box = (rows, 64, column_tiles)
        smem_layout = cute.tile_to_shape(self.traits.layout_atom(), box, (0, 1, 2))
        atom, tensor = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), view, smem_layout, box)
        return TmaCopy(atom, tensor)

    def make_mma(self) -> Mma:
        """The tiled MMAs. The first step of S has an MMA of its own, `first`, which does not accumulate."""
        traits = self.traits
        dtype, k_major, mn_major = traits.dtype, OperandMajorMode.K, OperandMajorMode.MN
        first, qk = (
            sm90.make_trivial_tiled_mma(dtype, dtype, k_major, k_major, Float32, (1, 1, 1), (GROUP_ROWS, traits.block))
            for _ in range(2)
        )
        v_major = k_major if traits.fp8 else mn_major
        p_source = OperandSource.SMEM if traits.fp8 else OperandSource.RMEM
        pv = sm90.make_trivial_tiled_mma(
            dtype, dtype, k_major, v_major, Float32, (1, 1, 1), (GROUP_ROWS, traits.v_head_dim), p_source
        )
        return Mma(first, qk, pv)

    @cute.kernel
    def attend(
        self, copies: Copies, scales: cute.Tensor, out: cute.Tensor, lse: cute.Tensor, schedule: Schedule, mma: Mma,
        heads: Int32, optional: Optional,
    ):  # fmt: skip
        """Run one CTA of the attention kernel: set up the mbarriers, then give each warpgroup its role."""
        traits = self.traits
        tidx = cute.arch.thread_idx()[0]
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(tidx // WARPGROUP_THREADS)
        smem = utils.SmemAllocator()
        shared = shared_memory(traits, smem.allocate(self.storage))

        if warp_idx == traits.producer_warp:
            for copy in copies:
                cpasync.prefetch_descriptor(copy.atom)
        if warp_idx == 0:
            with cute.arch.elect_one():
                init_mbarriers(traits, shared)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        if group == traits.groups:
            cute.arch.setmaxregister_decrease(traits.producer_registers)
            if warp_idx == traits.producer_warp:
                self.producer.copy_tiles(copies, schedule, shared, heads)
            if const_expr(traits.fp8):
                if warp_idx > traits.producer_warp and warp_idx <= traits.producer_warp + TRANSPOSE_WARPS:
                    self.transposer.transpose_blocks(shared, warp_idx - traits.producer_warp - 1)
        else:
            cute.arch.setmaxregister_increase(traits.compute_registers)
            results = Results(out, lse, heads, optional.max_logits, optional.sinks)
            self.attention.run(shared, mma, scales, results, optional.selection, group)

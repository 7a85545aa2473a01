"""The gradient of expanded MLA prefill over ragged batches, bf16 and f16, for Hopper.

There are three launches. The first makes the plan and the terms of query rows, and zeroes the sums. The second computes
dk, dv and the float32 sums of dq (and of dk_rope), the third dq (and dk_rope) from these sums. If keys and values have
256 columns, WIDE.md says how the second divides its work. Otherwise a CTA of it takes tiles of 128 keys of one head,
and for each tile the queries that see it, 64 at a time:

  warpgroups 0 and 1   each has half of a tile's keys, with their dK and dV in registers (products.py)
  the last warpgroup   one warp claims tiles, and copies K, V, Q and dO (copies.py); two warps add dQ and
                       the shared rope columns of dK to the sums in global memory (sums.py)
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass.cute as cute
import cutlass.utils as utils
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from tsmla_kernels.sm90.prefill.backward.config import BackwardConfig
from tsmla_kernels.sm90.prefill.backward.copies import Producer
from tsmla_kernels.sm90.prefill.backward.memory import (
    DQ_GROUP,
    GROUPS,
    Copies,
    KeyGradients,
    Mma,
    Saved,
    SinkGradient,
    Sums,
    Traits,
    backward_operands,
    init_mbarriers,
    make_storage,
    shared_memory,
)
from tsmla_kernels.sm90.prefill.backward.plan import BackwardPlanner
from tsmla_kernels.sm90.prefill.backward.products import Consumer
from tsmla_kernels.sm90.prefill.backward.rows import CTA_HEADS, ROW_THREADS, RowKernels, factors
from tsmla_kernels.sm90.prefill.backward.sums import Reducer
from tsmla_kernels.sm90.prefill.backward.wide import WideConsumer
from tsmla_kernels.sm90.prefill.backward.wide_dq import QueryConsumer
from tsmla_kernels.sm90.prefill.memory import Scale, Schedule, Selection
from tsmla_kernels.sm90.prefill.plan import Requests


class MlaPrefillBackward:
    """One compiled gradient: `config` is static; the numbers of heads, requests and tokens are dynamic."""

    def __init__(self, config: BackwardConfig) -> None:
        self.traits = Traits(config)
        self.storage = make_storage(self.traits)
        self.planner = BackwardPlanner(self.traits)
        self.rows = RowKernels(self.traits)
        self.producer = Producer(self.traits, self.planner)
        self.consumer = Consumer(self.traits)
        self.wide_consumer = WideConsumer(self.traits)
        self.query_consumer = QueryConsumer(self.traits)
        self.reducer = Reducer(self.traits)

    @cute.jit
    def __call__(self, stream: cuda.CUstream, *tensors: cute.Tensor) -> None:
        """Launch the kernels on `stream`. `tensors` are those of `mla_prefill_backward_operands`, in order."""
        traits = self.traits
        operands = backward_operands(tensors, traits.config)
        sums = Sums(operands.dq_sum, operands.row_terms, operands.turns, operands.dq_sum, operands.turns)
        gradients = KeyGradients(operands.dk, operands.dv)
        if const_expr(traits.rope_columns > 0):
            sums = sums._replace(rope_sum=operands.rope_sum, rope_turns=operands.rope_turns)
            gradients = KeyGradients(operands.dk, operands.dk)
        schedule = Schedule(operands.plan, operands.progress)
        heads, total_q = Int32(operands.q.shape[1]), Int32(operands.q.shape[0])
        requests = Requests(
            operands.cu_seqlens_q, operands.cu_seqlens_kv, total_q, Int32(operands.k.shape[0]),
            Int32(operands.cu_seqlens_q.shape[0] - 1),
        )  # fmt: skip
        saved = Saved(operands.out, operands.lse, operands.dout, operands.dlse)
        tiles, sections = Int32(operands.row_terms.shape[1]), (heads + CTA_HEADS - 1) // CTA_HEADS
        # The grid has one index more than there are tiles: the first CTA of this last index makes the plan.
        self.prepare(requests, saved, sums, schedule, operands.sinks).launch(
            grid=[tiles + 1, sections, 1], block=[ROW_THREADS, 1, 1], stream=stream
        )
        copies, mmas = self.producer.make_copies(operands), self.consumer.parts.make_mmas()
        self.differentiate(
            copies, sums, schedule, gradients, operands.scales, mmas, heads, operands.selection
        ).launch(
            grid=[operands.progress.shape[0], 1, 1], block=[traits.threads, 1, 1], stream=stream, min_blocks_per_mp=1,
            use_pdl=True,
        )  # fmt: skip
        # The grid has one index more than there are tiles: the CTAs of this last index zero dq of rows of no request,
        # and add up the sinks' gradient.
        self.finish(requests, sums, operands.scales, operands.dq, operands.dv, operands.sinks).launch(
            grid=[tiles + 1, sections, 1], block=[ROW_THREADS, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def prepare(
        self, requests: Requests, saved: Saved, sums: Sums, schedule: Schedule, sinks: SinkGradient | None
    ):  # fmt: skip
        """Run before the main kernel: write the plan and the rows' terms, and zero the sums and counters."""
        cute.arch.griddepcontrol_launch_dependents()
        tile, section, _ = cute.arch.block_idx()
        tiles, sections, _ = cute.arch.grid_dim()
        if tile == tiles - 1:
            if section == 0:
                self.planner.make_plan(requests, schedule, Int32(saved.lse.shape[1]))
        else:
            self.rows.prepare_rows(requests, saved, sums, sinks, tile, section * CTA_HEADS)
            self.rows.zero_sums(sums, tile * sections + section, (tiles - 1) * sections)

    @cute.kernel
    def differentiate(
        self,
        copies: Copies,
        sums: Sums,
        schedule: Schedule,
        gradients: KeyGradients,
        scales: cute.Tensor,
        mma: Mma,
        heads: Int32,
        selection: Selection | None,
    ):
        """Run one CTA: set up the barriers, then give each warpgroup its role."""
        tidx = cute.arch.thread_idx()[0]
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(tidx // 128)
        traits = self.traits
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
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        self.consumer.parts.set_flags(mma)
        if group == traits.groups:
            cute.arch.setmaxregister_decrease(traits.registers[-1])
            if warp_idx == traits.producer_warp:
                self.producer.copy_tiles(copies, sums, shared, schedule, heads)
            if const_expr(not traits.wide):
                reduced = warp_idx - traits.producer_warp - 1  # the compute warpgroup whose dQ this reducer warp adds
                if reduced >= 0 and reduced < GROUPS:
                    if cute.arch.lane_idx() == 0:
                        self.reducer.reduce_tiles(sums, shared, reduced)
        elif const_expr(not traits.wide):
            cute.arch.setmaxregister_increase(traits.registers[0])
            self.consumer.compute(gradients, factors(scales), shared, mma, selection, group)
        elif group == DQ_GROUP:
            cute.arch.setmaxregister_decrease(traits.registers[DQ_GROUP])
            self.query_consumer.compute(sums, shared, mma)
        else:
            self.wide_consumer.compute(gradients, sums, factors(scales), shared, mma, selection, group)

    @cute.kernel
    def finish(
        self,
        requests: Requests,
        sums: Sums,
        scales: cute.Tensor,
        dq: cute.Tensor,
        dk_rope: cute.Tensor,
        sinks: SinkGradient | None,
    ):
        """Run after the main kernel: write dq, and the gradients of shared rope columns and of sinks."""
        tile, section, _ = cute.arch.block_idx()
        tiles, sections, _ = cute.arch.grid_dim()
        cute.arch.griddepcontrol_wait()
        if const_expr(self.traits.rope_columns > 0):
            cta, ctas = tile * sections + section, tiles * sections
            self.rows.store_rope(sums, scales[Scale.LOGITS], dk_rope, cta, ctas)
        if tile == tiles - 1:
            self.rows.zero_dq(requests, dq, section, sections)
            if const_expr(sinks is not None):
                self.rows.store_sinks(sinks, section * CTA_HEADS)
        else:
            self.rows.store_dq(requests, sums, scales[Scale.LOGITS], dq, tile, section * CTA_HEADS)

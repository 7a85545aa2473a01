"""The two GEMMs of a compute warpgroup: S = Q K^T and O += P V, on the tensor cores."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.nvgpu.warpgroup import Field, SmemLayoutAtomKind

from tsmla_kernels.sm90.prefill.config import GROUP_ROWS
from tsmla_kernels.sm90.prefill.memory import (
    TURN_THREADS,
    Barrier,
    KernelTraits,
    Mma,
    Products,
    Shared,
    Stage,
    ThreadIndex,
)
from tsmla_kernels.sm90.prefill.softmax import p_address
from tsmla_kernels.sm90.warp import uniform


class Gemms:
    """Device code that sets up and issues the products."""

    def __init__(self, traits: KernelTraits) -> None:
        self.traits = traits

    @cute.jit
    def operands(self, shared: Shared, mma: Mma, thread: ThreadIndex) -> Products:
        """Make the warpgroup's fragments and accumulators. O starts as 0."""
        traits = self.traits
        thr_qk, thr_pv = mma.qk.get_slice(thread.thread), mma.pv.get_slice(thread.thread)
        q_buffer = self.buffer(shared.q.memory, thread.group, (GROUP_ROWS, traits.qk_head_dim), traits.swizzle_kind)
        q = mma.qk.make_fragment_A(thr_qk.partition_A(q_buffer))
        acc_s = cute.make_rmem_tensor(thr_qk.partition_shape_C((GROUP_ROWS, traits.block)), Float32)
        acc_o = cute.make_rmem_tensor(thr_pv.partition_shape_C((GROUP_ROWS, traits.v_head_dim)), Float32)
        if const_expr(traits.fp8):
            p_shape = (GROUP_ROWS, traits.transposed_keys)
            p_buffer = self.buffer(shared.p, thread.group, p_shape, SmemLayoutAtomKind.K_SW128)
            p = mma.pv.make_fragment_A(thr_pv.partition_A(p_buffer))
            p_target = p_address(thread.thread, thread.lane, shared.p.toint() + thread.group * traits.p_elements)
        else:
            p = cute.make_rmem_tensor(thr_pv.partition_shape_A((GROUP_ROWS, traits.block)), traits.dtype)
            p_target = p
        acc_o.fill(0.0)
        # Set these flags once, here: a change while products run would serialise the products.
        mma.first.set(Field.ACCUMULATE, False)
        mma.qk.set(Field.ACCUMULATE, True)
        mma.pv.set(Field.ACCUMULATE, True)
        return Products(mma=mma, thr_qk=thr_qk, thr_pv=thr_pv, q=q, p=p, p_target=p_target, acc_s=acc_s, acc_o=acc_o)

    @cute.jit
    def issue(self, shared: Shared, products: Products, k_stage: Stage, v_stage: Stage, group: Int32) -> None:
        """Issue S of a block, and O += P V of the block before, in this warpgroup's turn if `KernelTraits.turns`.
        Returns when S is done."""
        self.wait(shared.k.full + k_stage.index, k_stage.phase)
        self.take_turn(group)
        self.scores(products, shared.k.memory, k_stage.index)
        self.wait(shared.v.full + v_stage.index, v_stage.phase)
        self.values(products, shared.v.memory, v_stage.index)
        self.pass_turn(group)
        warpgroup.wait_group(1)

    @cute.jit
    def scores(self, products: Products, k: cute.Pointer, index: Int32) -> None:
        """Issue S = Q K^T."""
        traits, mma, q, acc_s = self.traits, products.mma, products.q, products.acc_s
        k_buffer = self.buffer(k, index, (traits.block, traits.qk_head_dim), traits.swizzle_kind)
        fragment_k = mma.qk.make_fragment_B(products.thr_qk.partition_B(k_buffer))
        warpgroup.fence()
        cute.gemm(mma.first, acc_s, q[None, None, 0], fragment_k[None, None, 0], acc_s)
        for step in cutlass.range_constexpr(1, traits.qk_head_dim // traits.mma_k):
            cute.gemm(mma.qk, acc_s, q[None, None, step], fragment_k[None, None, step], acc_s)
        warpgroup.commit_group()

    @cute.jit
    def values(self, products: Products, v: cute.Pointer, index: Int32) -> None:
        """Issue O += P V."""
        traits, mma, p, acc_o = self.traits, products.mma, products.p, products.acc_o
        if const_expr(traits.fp8):
            shape = (traits.v_head_dim, traits.transposed_keys)
            transposed = self.buffer(v, index, shape, SmemLayoutAtomKind.K_SW128)
        else:
            v_buffer = self.buffer(v, index, (traits.block, traits.v_head_dim), traits.swizzle_kind)
            transposed = cute.make_tensor(v_buffer.iterator, cute.select(v_buffer.layout, mode=[1, 0]))
        fragment_v = mma.pv.make_fragment_B(products.thr_pv.partition_B(transposed))
        warpgroup.fence()
        for step in cutlass.range_constexpr(traits.block // traits.mma_k):
            cute.gemm(mma.pv, acc_o, p[None, None, step], fragment_v[None, None, step], acc_o)
        warpgroup.commit_group()

    def buffer(
        self, memory: cute.Pointer, index: Int32, shape: tuple[int, int], kind: SmemLayoutAtomKind
    ) -> cute.Tensor:
        """Buffer `index` as a WGMMA operand [rows, columns]. With 16 bits `uniform` puts the address into a uniform
        register, from which WGMMA takes its descriptors."""
        traits = self.traits
        address = memory.toint() + index * (shape[0] * shape[1] * traits.element_bytes)
        if not traits.fp8:
            address = uniform(address)
        layout = cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, traits.dtype), shape, (0, 1))
        pointer = cute.make_ptr(traits.dtype, address, cute.AddressSpace.smem, assumed_align=1024)
        return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=traits.dtype), layout.outer)

    @cute.jit
    def start_turns(self, group: Int32) -> None:
        """In the last warpgroup, give the first warpgroup its first turn."""
        if const_expr(self.traits.turns):
            if group == self.traits.groups - 1:
                cute.arch.barrier_arrive(barrier_id=Barrier.TURN, number_of_threads=TURN_THREADS)

    @cute.jit
    def take_turn(self, group: Int32) -> None:
        """If there are turns, wait until the other warpgroup has issued its products. fp8 has none, because a
        warpgroup may skip a block that the others compute."""
        if const_expr(self.traits.turns):
            cute.arch.barrier(barrier_id=Barrier.TURN + group, number_of_threads=TURN_THREADS)

    @cute.jit
    def pass_turn(self, group: Int32) -> None:
        """Let the next warpgroup issue its products."""
        if const_expr(self.traits.turns):
            next_group = group + 1
            if next_group == self.traits.groups:
                next_group = Int32(0)
            cute.arch.barrier_arrive(barrier_id=Barrier.TURN + next_group, number_of_threads=TURN_THREADS)

    @cute.jit
    def wait(self, barrier: cute.Pointer, phase: Int32) -> None:
        """Wait for a phase of an mbarrier. With fp8, whose blocks take less time, the loop tries again at once;
        mbarrier_wait, which 16 bits use, pauses between two tries."""
        if const_expr(self.traits.fp8):
            cute.arch.inline_ptx(
                "{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [{$r0}], {$r1}; @p bra DONE;"
                " bra AGAIN; DONE: }",
                read_only_args=[barrier.toint(), phase],
            )
        else:
            cute.arch.mbarrier_wait(barrier, phase)

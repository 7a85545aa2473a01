"""What the compute warpgroups of prefill's gradient have in common: their tiled MMAs, products, masks, the zeros past a
request's end, and the stores of dS, dK and dV."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.nvgpu.warpgroup import Field, OperandSource
from cutlass.utils import hopper_helpers as sm90

from tsmla_kernels.sm90.operands import Block, operand, transposed
from tsmla_kernels.sm90.prefill.backward.config import Q_ROWS
from tsmla_kernels.sm90.prefill.backward.memory import (
    GROUP_KEYS,
    Mma,
    Operand,
    Shared,
    Term,
    Tile,
    Traits,
)
from tsmla_kernels.sm90.prefill.memory import Buffers, Stage, ThreadIndex
from tsmla_kernels.sm90.warp import release, store_matrices, transpose_quad

FAR = 2**31 - 1
ZERO_BARRIER = 1  # ids 1 to 3, one per warpgroup: its 128 threads have zeroed the rows past a request's end


class Parts:
    """Device code of a compute warpgroup. A warpgroup whose `ThreadIndex.group` is g has the keys from 64 g on, if both
    have half of a tile's keys; otherwise group 0 stands for all keys."""

    def __init__(self, traits: Traits) -> None:
        self.traits = traits

    def make_mmas(self) -> Mma:
        dtype, k_major, mn_major = self.traits.dtype, OperandMajorMode.K, OperandMajorMode.MN

        def mma(a_major, b_major, shape, source=OperandSource.SMEM):
            return sm90.make_trivial_tiled_mma(dtype, dtype, a_major, b_major, Float32, (1, 1, 1), shape, source)

        scores, dq = (GROUP_KEYS, Q_ROWS), (Q_ROWS, self.traits.dq_part)
        # The assembler refuses an instruction that needs more registers than a thread has at launch, which are 128 if
        # there are four warpgroups. One with 256 columns would need 158.
        widest = 128 if self.traits.wide else 256
        dk, dv = (min(width, widest) for width in (self.traits.qk_head_dim, self.traits.v_head_dim))
        return Mma(
            mma(k_major, k_major, scores),
            mma(k_major, k_major, scores),
            mma(k_major, mn_major, (GROUP_KEYS, dk), OperandSource.RMEM),
            mma(k_major, mn_major, (GROUP_KEYS, dv), OperandSource.RMEM),
            mma(mn_major, mn_major, dq),
            mma(mn_major, mn_major, dq),
        )

    def set_flags(self, mma: Mma) -> None:
        """Set which products add to their accumulator, once: a change while products run would serialise them."""
        for products, adds in zip(mma, (False, True, True, True, False, True), strict=True):
            products.set(Field.ACCUMULATE, adds)

    def thread_index(self, group: Int32) -> ThreadIndex:
        """The calling thread's index, in a warpgroup that counts as `group`."""
        thread = cute.arch.thread_idx()[0] % 128
        lane = thread % 32
        return ThreadIndex(group, thread, lane, (thread // 32) * 16 + lane // 4)

    def stage(self, count: Int32) -> Stage:
        """The stage of step `count`, and the stage's parity. Steps are counted from 0 over all tiles.

        Steps take the two stages in turn. A wait for step -1 returns at once."""
        return Stage(count & 1, (count >> 1) & 1)

    def rows_of(self, accumulator: cute.Tensor, columns: int) -> cute.Tensor:
        """A lane's part of an accumulator as [2 rows, a quarter of the columns]: 2 of every 8 columns."""
        layout = cute.make_layout((2, (2, columns // 8)), stride=(2, (1, 4)))
        return cute.make_tensor(accumulator.iterator, layout)

    @cute.jit
    def multiply_scores(
        self,
        acc: cute.Tensor,
        mma: Mma,
        keys: Operand,
        queries: Operand,
        stage: Stage,
        t: ThreadIndex,
    ):
        """Issue S = K Q^T or dP = V dO^T."""
        key_block, query_block = keys.block, queries.block
        half = Block(GROUP_KEYS, key_block.columns, key_block.width, key_block.pitch)
        key_offset = t.group * (GROUP_KEYS * key_block.width * self.traits.element_bytes)
        thr = mma.scores.get_slice(t.thread)
        a = mma.scores.make_fragment_A(
            thr.partition_A(operand(self.traits.dtype, keys.buffers.memory, key_offset, half))
        )
        query_offset = stage.index * self.traits.bytes_of(query_block)
        b = mma.scores.make_fragment_B(
            thr.partition_B(operand(self.traits.dtype, queries.buffers.memory, query_offset, query_block))
        )  # fmt: skip
        warpgroup.fence()
        cute.gemm(mma.scores_first, acc, a[None, None, 0], b[None, None, 0], acc)
        for k in cutlass.range_constexpr(1, key_block.columns // 16):
            cute.gemm(mma.scores, acc, a[None, None, k], b[None, None, k], acc)
        warpgroup.commit_group()

    @cute.jit
    def multiply_keys(
        self,
        acc: cute.Tensor,
        mma: cute.TiledMma,
        scores: cute.Tensor,
        buffers: Buffers,
        block: Block,
        stage: Stage,
        t: ThreadIndex,
    ):
        """Issue acc += `scores` times the block in `stage` (P dO or dS Q)."""
        queries = operand(self.traits.dtype, buffers.memory, stage.index * self.traits.bytes_of(block), block)
        b = mma.make_fragment_B(mma.get_slice(t.thread).partition_B(transposed(queries)))
        warpgroup.fence()
        for k in cutlass.range_constexpr(Q_ROWS // 16):
            cute.gemm(mma, acc, scores[None, None, k], b[None, None, k], acc)
        warpgroup.commit_group()

    @cute.jit
    def terms(self, shared: Shared, stage: Stage, term: Term, g: cutlass.Constexpr[int], t: ThreadIndex):
        """Load `term` of the two queries that this lane has in group `g` of 8 queries."""
        address = shared.row_terms.iterator.toint()
        address += ((stage.index * len(Term) + term) * Q_ROWS + g * 8 + (t.lane % 4) * 2) * 4
        pointer = cute.make_ptr(Float32, address, cute.AddressSpace.smem, assumed_align=8)
        pair = cute.make_rmem_tensor((2,), Float32)
        cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(2)), pair)
        return pair

    @cute.jit
    def mask(self, s: cute.Tensor, diagonal: Int32, keys: Int32, t: ThreadIndex):
        """Set a score to -inf if its query does not see its key, or if the key is past the request's end."""
        for i in cutlass.range_constexpr(2):
            key = t.group * GROUP_KEYS + t.row + 8 * i
            first_seeing = key + diagonal - (t.lane % 4) * 2
            if key >= keys:
                first_seeing = Int32(FAR)
            for c in cutlass.range_constexpr(Q_ROWS // 4):
                s[i, c] = cutlass.select_((c // 2) * 8 + c % 2 >= first_seeing, s[i, c], -Float32.inf)

    @cute.jit
    def zero_rows(self, memory: cute.Pointer, offset: Int32, block: Block, first: Int32, t: ThreadIndex):
        """Zero the rows of a block from `first` on."""
        chunks = block.width // 8  # chunks of 16 bytes in a row of a column tile
        address = memory.toint() + offset
        for row in cutlass.range(first + t.thread // chunks, block.rows, 128 // chunks, unroll=1):
            for tile in cutlass.range_constexpr(block.columns // block.width):
                at = address + (tile * block.pitch + row) * (2 * block.width) + (t.thread % chunks) * 16
                cute.arch.inline_ptx("st.shared.v4.b32 [{$r0}], {0, 0, 0, 0};", read_only_args=[at])

    @cute.jit
    def zeroed(self, t: ThreadIndex):
        """Make this warpgroup's zeros visible to WGMMA."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=ZERO_BARRIER + t.group, number_of_threads=128)

    @cute.jit
    def store(
        self,
        target: cute.Tensor,
        columns: cutlass.Constexpr[range],
        acc: cute.Tensor,
        factor: Float32,
        tiles: cute.Tensor,
        slot: Int32,
        t: ThreadIndex,
    ):
        """Store dK or dV of this warpgroup's keys, times `factor`: the first columns of `acc` go to `columns` of
        `target`."""
        head, first = tiles[Tile.HEAD, slot], tiles[Tile.FIRST_KEY, slot]
        keys = tiles[Tile.KEYS, slot]
        heads, width = target.shape[1], target.shape[2]
        groups, quad = len(columns) // 8, t.lane % 4
        values = self.rows_of(acc, len(columns))
        for i in cutlass.range_constexpr(2):
            key = t.group * GROUP_KEYS + t.row + 8 * i
            at_row = Int64(first + key) * heads + head
            # A lane has 2 columns of each group of 8. The four lanes of a row exchange columns, so that of every four
            # groups each lane has one whole (8 columns, 16 bytes), and a row's stores fill whole sectors.
            line = cute.make_tensor(
                (target.iterator + (at_row * width + columns.start + quad * 8)).align(16),
                cute.make_layout((8, groups // 4), stride=(1, 32)),
            )
            pairs = cute.make_rmem_tensor((8,), self.traits.dtype)
            words = cute.recast_tensor(pairs, Int32)
            for g in cutlass.range_constexpr(groups // 4):
                for j in cutlass.range_constexpr(4):
                    pairs[2 * j] = (values[i, 8 * g + 2 * j] * factor).to(self.traits.dtype)
                    pairs[2 * j + 1] = (values[i, 8 * g + 2 * j + 1] * factor).to(self.traits.dtype)
                transpose_quad(words, quad)
                if key < keys:
                    cute.autovec_copy(pairs, line[None, g])

    def ds_address(self, shared: Shared, stage: Stage, t: ThreadIndex) -> Int32:
        """The address of the row of dS that a thread passes to stmatrix for the first 16 queries."""
        address = shared.ds.memory.toint() + stage.index * self.traits.bytes_of(self.traits.ds)
        key = t.group * GROUP_KEYS + (t.thread // 32) * 16 + t.lane % 16
        address += key * (Q_ROWS * self.traits.element_bytes) + ((t.lane // 16) ^ (t.lane % 8)) * 16
        return address

    @cute.jit
    def store_ds(self, shared: Shared, ds: cute.Tensor, stage: Stage, t: ThreadIndex):
        """Store dS to shared memory, and arrive at its barrier."""
        packed = cute.recast_tensor(ds, Int32)
        target = self.ds_address(shared, stage, t)
        for k in cutlass.range_constexpr(Q_ROWS // 16):
            store_matrices(target ^ (32 * k), *(packed[4 * k + w] for w in range(4)))
        self.stored_ds(shared, stage)

    @cute.jit
    def stored_ds(self, shared: Shared, stage: Stage):
        """Arrive at dS's barrier: the warp has stored its part."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        release(shared.ds.full + stage.index)

    @cute.jit
    def multiply_dq(self, shared: Shared, mma: Mma, stage: Stage, t: ThreadIndex) -> cute.Tensor:
        """Compute this warpgroup's half of dQ's columns for a step, and release dS. Returns the accumulator."""
        acc = self.issue_dq(shared, mma, stage, t)
        warpgroup.wait_group(0)
        release(shared.ds.empty + stage.index)
        return acc

    @cute.jit
    def issue_dq(self, shared: Shared, mma: Mma, stage: Stage, t: ThreadIndex) -> cute.Tensor:
        """Issue part `t.group` of dQ's columns for a step, and return the accumulator."""
        block = self.traits.k
        part = Block(block.rows, self.traits.dq_part, block.width, block.pitch)
        offset = t.group * (self.traits.dq_part * block.pitch * self.traits.element_bytes)
        keys = transposed(operand(self.traits.dtype, shared.k.memory, offset, part))
        ds_offset = stage.index * self.traits.bytes_of(self.traits.ds)
        ds = transposed(operand(self.traits.dtype, shared.ds.memory, ds_offset, self.traits.ds))
        thr = mma.dq.get_slice(t.thread)
        a, b = mma.dq.make_fragment_A(thr.partition_A(ds)), mma.dq.make_fragment_B(thr.partition_B(keys))
        acc = cute.make_rmem_tensor(thr.partition_shape_C((Q_ROWS, self.traits.dq_part)), Float32)
        warpgroup.fence()
        cute.gemm(mma.dq_first, acc, a[None, None, 0], b[None, None, 0], acc)
        for k in cutlass.range_constexpr(1, self.traits.key_rows // 16):
            cute.gemm(mma.dq, acc, a[None, None, k], b[None, None, k], acc)
        warpgroup.commit_group()
        return acc

"""Expanded MLA prefill (keys wider than values) over ragged batches, bf16, f16 and fp8, for Hopper.

DESIGN.md beside this says why it is so. A CTA walks tiles of 64 query rows a warpgroup without a break:

  warpgroups 0 .. groups - 1   S = Q K^T, softmax, O += P V, each for its own 64 rows, taking turns at the tensor cores
  the last warpgroup           one warp: claims tiles, and copies Q, K and V; with fp8 two more: transpose V

A small kernel before it turns the lengths into a plan: which tiles there are, the longest first.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.nvgpu.warpgroup import Field, OperandSource, SmemLayoutAtomKind

from tsmla_kernels.sm90.decode.config import FP8, SMEM_BYTES
from tsmla_kernels.sm90.prefill.config import GROUP_ROWS, PrefillConfig
from tsmla_kernels.sm90.warp import DTYPES, LN_2, LOG2_E, LOWEST, WarpHelpers

# fp8: P is scaled by 2^5, so that what is above 2^-11 of the greatest when the maximum last moved keeps all its bits. A
# whole power of two, so that this greatest itself is exact. The maximum moves when a sum of four of P passes e4m3's
# greatest, 3.8 bits later at most.
P_BITS = 5
P_GREATEST = 448.0
SLOTS = 8  # ring of tile descriptors: the copies are at most three tiles ahead of an epilogue
SLOT_WORDS = 8
PLAN_THREADS = 256
CLASSES = 128  # of key lengths, for the plan's order: four to each power of two
SHORTEST_CLASS = 508  # of length 0: bits 21 and up of the float 1.0
L2_BYTES = 32 << 20  # of keys and values that tiles at work at the same time should share
TURNING_WARPS = 2  # fp8: those that transpose V, 64 columns each
TOGETHER = 16  # heads at most whose tiles are taken together: with more, those that remain at the end are uneven
FAR = 2**31 - 1
EVICT_FIRST, EVICT_LAST = 0x12F0000000000000, 0x14F0000000000000  # of the L2 cache: Q is read once, K and V often


def turning_addresses(lane, warp, landing, turned, block):
    """fp8: where this warp's half of a landing begins, the row of V there that lane `lane` names to ldmatrix first, and
    the row of V transposed that it names to stmatrix first. Later ones follow by an exclusive or of 16-byte groups and
    a sum of rows."""
    tile = landing + warp * (64 * block)
    source = tile + lane * 64 + ((lane // 2) % 4) * 16
    # Lane l says where row l % 8 of matrix l / 8 goes. Of two matrices from the same registers one has the even
    # columns, the other the odd ones, and the other way in their lower halves: a matrix's rows then lie in eight
    # different groups of banks.
    odd = ((lane // 4) % 2) ^ ((lane // 8) % 2)
    column = warp * 64 + (lane % 8) * 2 + odd
    return tile, source, turned + column * 128 + ((lane // 16) ^ (column % 8)) * 16


def p_address(t, lane, begin):
    """fp8: the row of a warpgroup's P that thread t, lane `lane`, names to stmatrix first."""
    row = (t // 32) * 16 + lane % 16
    return begin + row * 128 + ((lane // 16) ^ (lane % 8)) * 16


EVEN_COLUMNS, ODD_COLUMNS = 0x6420, 0x7531  # bytes of two registers of transposed pairs, for prmt
P_WORDS = (0, 2, 8, 10)  # of 32 keys: where in the accumulator, 16 values a lane, the values of a word begin
P_IN_WORD = (0, 1, 4, 5)  # and where from there they are


class MlaPrefill(WarpHelpers):
    """One compiled prefill: `config` is static; numbers of heads, requests and tokens are dynamic.

    Operands of the launcher: q [Tq, H, K], k [Tk, H, K], v [Tk, H, V], cu_seqlens_q and cu_seqlens_kv [B + 1] i32,
    scales [2] f32 (logits' scale, output's scale), out [Tq, H, V], lse [Tq, H] f32 (natural log), and the workspaces
    of `choose_prefill.prefill_workspaces`. With a `rope_dim` R > 0 the second and third are kv [Tk, H, K - R + V], a
    row's keys without their rope columns and its values, and k_rope [Tk, R], which all heads share.
    """

    def __init__(self, config: PrefillConfig) -> None:
        self.config = config
        self.fp8 = config.dtype == FP8
        self.dtype = DTYPES[config.dtype]
        self.out_dtype = cutlass.BFloat16 if self.fp8 else self.dtype
        self.bytes = self.dtype.width // 8
        self.k_step = 32 // self.bytes  # of one WGMMA
        # Of 64 columns, whose copies and tiles are the same whatever they are in bytes.
        self.swizzled = SmemLayoutAtomKind.K_SW64 if self.fp8 else SmemLayoutAtomKind.K_SW128
        self.depth, self.width = config.qk_head_dim, config.v_head_dim
        self.causal, self.groups = config.causal, config.groups
        self.block, self.stages, self.tile_rows = config.block, config.stages, config.tile_rows
        self.k_tiles, self.v_tiles, self.rope_tiles = self.depth // 64, self.width // 64, config.rope_dim // 64
        self.k_elements, self.v_elements = self.block * self.depth, self.block * self.width
        # fp8: V transposed, its keys in whole tiles of 128.
        self.turned_keys = (self.block + 127) // 128 * 128
        self.turned_elements = self.turned_keys * self.width
        self.p_elements = GROUP_ROWS * self.turned_keys
        self.q_elements = GROUP_ROWS * self.depth
        self.threads = 128 * (self.groups + 1)
        self.registers = {2: (232, 40), 3: (160, 32)}[self.groups]  # a computing warpgroup's, the copying one's

    @cute.jit
    def __call__(
        self,
        stream: cuda.CUstream,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        cu_seqlens_q: cute.Tensor,
        cu_seqlens_kv: cute.Tensor,
        scales: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        plan: cute.Tensor,
        progress: cute.Tensor,
    ):
        dtype = self.dtype
        atom = warpgroup.make_smem_layout_atom(self.swizzled, dtype)
        load = cpasync.CopyBulkTensorTileG2SOp()
        tma_q, tma_q_tensor = cpasync.make_tiled_tma_atom(
            load,
            self.by_columns(q, self.depth),
            cute.tile_to_shape(atom, (GROUP_ROWS, 64, self.k_tiles), (0, 1, 2)),
            (GROUP_ROWS, 64, self.k_tiles),
        )
        own_tiles, v_column = self.k_tiles - self.rope_tiles, 0
        tma_k, tma_k_tensor = cpasync.make_tiled_tma_atom(
            load,
            self.by_columns(k, 64 * own_tiles),
            cute.tile_to_shape(atom, (self.block, 64, own_tiles), (0, 1, 2)),
            (self.block, 64, own_tiles),
        )
        tma_r, tma_r_tensor = tma_k, tma_k_tensor  # of the rope columns
        if const_expr(self.rope_tiles > 0):
            rope = cute.make_tensor(
                v.iterator, cute.make_layout((v.shape[0], 1, v.shape[1]), stride=(v.stride[0], 0, 1))
            )
            tma_r, tma_r_tensor = cpasync.make_tiled_tma_atom(
                load,
                self.by_columns(rope, 64 * self.rope_tiles),
                cute.tile_to_shape(atom, (self.block, 64, self.rope_tiles), (0, 1, 2)),
                (self.block, 64, self.rope_tiles),
            )
            v, v_column = k, 64 * own_tiles
        tma_v, tma_v_tensor = cpasync.make_tiled_tma_atom(
            load,
            self.by_columns(v, self.width, v_column),
            cute.tile_to_shape(atom, (self.block, 64, self.v_tiles), (0, 1, 2)),
            (self.block, 64, self.v_tiles),
        )
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
        mma_first, mma_qk = (
            sm90.make_trivial_tiled_mma(dtype, dtype, k_major, k_major, Float32, (1, 1, 1), (GROUP_ROWS, self.block))
            for _ in range(2)
        )
        v_major = k_major if self.fp8 else mn_major
        p_source = OperandSource.SMEM if self.fp8 else OperandSource.RMEM
        mma_pv = sm90.make_trivial_tiled_mma(
            dtype, dtype, k_major, v_major, Float32, (1, 1, 1), (GROUP_ROWS, self.width), p_source
        )
        self.storage = self.make_storage()

        heads = Int32(q.shape[1])
        self.make_plan(cu_seqlens_q, cu_seqlens_kv, plan, progress, heads, Int32(q.shape[0]), Int32(k.shape[0])).launch(
            grid=[1, 1, 1], block=[PLAN_THREADS, 1, 1], stream=stream
        )
        self.attend(
            tma_q, tma_q_tensor, tma_k, tma_k_tensor, tma_r, tma_r_tensor, tma_v, tma_v_tensor, scales, out, lse, plan,
            progress, mma_first, mma_qk, mma_pv, heads,
        ).launch(
            grid=[progress.shape[0], 1, 1], block=[self.threads, 1, 1], stream=stream, min_blocks_per_mp=1, use_pdl=True
        )  # fmt: skip

    def make_storage(self):
        """The shared memory of the attention kernel."""

        def barriers(count: int):
            return cute.struct.MemRange[Int64, count]

        def buffers(count: int, elements: int):
            return cute.struct.Align[cute.struct.MemRange[self.dtype, count * elements], 1024]

        fields = {"q_full": barriers(self.groups), "q_empty": barriers(self.groups)}
        fields |= {name: barriers(self.stages) for name in ("k_full", "k_empty", "v_full", "v_empty")}
        if self.fp8:
            fields |= {name: barriers(self.stages) for name in ("landed", "left")}
        fields["slots"] = cute.struct.MemRange[Int32, SLOTS * SLOT_WORDS]
        fields["q"] = buffers(self.groups, self.q_elements)
        fields["k"] = buffers(self.stages, self.k_elements)
        fields["v"] = buffers(self.stages, self.turned_elements if self.fp8 else self.v_elements)
        if self.fp8:
            fields["landing"] = buffers(self.stages, self.v_elements)  # V as it comes
            fields["p"] = buffers(self.groups, self.p_elements)
        storage = cute.struct(type("Storage", (), {"__annotations__": fields}))
        if storage.size_in_bytes() > SMEM_BYTES:
            raise ValueError(f"{self.config} takes {storage.size_in_bytes()} bytes of shared memory of {SMEM_BYTES}")
        return storage

    @cute.jit
    def by_columns(self, x: cute.Tensor, width: cutlass.Constexpr[int], first: cutlass.Constexpr[int] = 0):
        """`width` columns of [T, H, any], from `first` on, as (row, 64 columns, column tile, head): one copy brings all
        of them for some rows."""
        row, head = cute.assume(x.stride[0], divby=64), x.stride[1]
        return cute.make_tensor(
            x.iterator + first,
            cute.make_layout((x.shape[0], 64, width // 64, x.shape[1]), stride=(row, 1, 64, head)),
        )

    # ------------------------------------------------------------------ the plan

    @cute.jit
    def entry(
        self,
        e: Int32,
        batch: Int32,
        cu_seqlens_q: cute.Tensor,
        cu_seqlens_kv: cute.Tensor,
        total_q: Int32,
        total_kv: Int32,
    ):
        """(first row, rows, first key, keys) of request e; e = batch and batch + 1 are the rows before the first
        request and after the last, which have no keys. Clamped to the arrays: wrong offsets must not lead outside."""
        q_begin, q_end, kv_begin, kv_end = Int32(0), total_q, Int32(0), Int32(0)
        if e < batch:
            q_begin, q_end, kv_begin, kv_end = (
                cu_seqlens_q[e],
                cu_seqlens_q[e + 1],
                cu_seqlens_kv[e],
                cu_seqlens_kv[e + 1],
            )
        elif e == batch:
            q_end = cu_seqlens_q[0]
        else:
            q_begin = cu_seqlens_q[batch]
        q_begin = cutlass.min(cutlass.max(q_begin, 0), total_q)
        kv_begin = cutlass.min(cutlass.max(kv_begin, 0), total_kv)
        q_len = cutlass.max(cutlass.min(q_end, total_q) - q_begin, 0)
        kv_len = cutlass.max(cutlass.min(kv_end, total_kv) - kv_begin, 0)
        return q_begin, q_len, kv_begin, kv_len

    @cute.jit
    def class_of(self, kv_len: Int32):
        """A class of lengths, the longest first."""
        as_float = cute.make_rmem_tensor((1,), Float32)
        as_float[0] = Float32(kv_len + 1)
        bits = cute.recast_tensor(as_float, Int32)[0]
        return cutlass.max(CLASSES - 1 - ((bits >> 21) - SHORTEST_CLASS), 0)

    @cute.kernel
    def make_plan(
        self,
        cu_seqlens_q: cute.Tensor,
        cu_seqlens_kv: cute.Tensor,
        plan: cute.Tensor,
        progress: cute.Tensor,
        heads: Int32,
        total_q: Int32,
        total_kv: Int32,
    ):
        """One CTA: requests by class of key length, the longest first, and how many tiles they are up to each.

        Row i of the plan: tiles up to and with the i-th request, its first row, rows, first key, keys, tiles of one
        head, heads whose tiles are taken together. `progress`, of one word a CTA: the next tile to claim, tiles in all.
        """
        tidx, _, _ = cute.arch.thread_idx()
        lane, warp_idx = tidx % 32, tidx // 32
        cute.arch.griddepcontrol_launch_dependents()

        @cute.struct
        class Storage:
            place: cute.struct.MemRange[Int32, CLASSES]
            of_warp: cute.struct.MemRange[Int32, PLAN_THREADS // 32]

        smem = utils.SmemAllocator()
        storage = smem.allocate(Storage)
        place = storage.place.get_tensor(cute.make_layout(CLASSES))
        of_warp = storage.of_warp.get_tensor(cute.make_layout(PLAN_THREADS // 32))
        entries = plan.shape[0]
        batch = entries - 2

        if tidx < CLASSES:
            place[tidx] = Int32(0)
        cute.arch.sync_threads()
        for e in cutlass.range(tidx, entries, PLAN_THREADS, unroll=1):
            _, _, _, kv_len = self.entry(e, batch, cu_seqlens_q, cu_seqlens_kv, total_q, total_kv)
            cute.arch.atomic_add(place.iterator + self.class_of(kv_len), Int32(1), sem="relaxed", scope="cta")
        cute.arch.sync_threads()
        if warp_idx == 0:
            counts = cute.make_rmem_tensor((CLASSES // 32,), Int32)
            mine = Int32(0)
            for i in cutlass.range_constexpr(CLASSES // 32):
                counts[i] = place[lane * (CLASSES // 32) + i]
                mine += counts[i]
            before = self.scan(mine, lane) - mine
            for i in cutlass.range_constexpr(CLASSES // 32):
                place[lane * (CLASSES // 32) + i] = before
                before += counts[i]
        cute.arch.sync_threads()
        for e in cutlass.range(tidx, entries, PLAN_THREADS, unroll=1):
            q_begin, q_len, kv_begin, kv_len = self.entry(e, batch, cu_seqlens_q, cu_seqlens_kv, total_q, total_kv)
            at = cute.arch.atomic_add(place.iterator + self.class_of(kv_len), Int32(1), sem="relaxed", scope="cta")
            head_bytes = cutlass.max(kv_len, 1) * (self.bytes * (self.depth + self.width))
            together = cutlass.min(cutlass.min(cutlass.max(L2_BYTES // head_bytes, 1), TOGETHER), heads)
            if const_expr(self.fp8):
                while heads % together != 0:  # sections of as many heads each
                    together -= 1
            words = (
                0, q_begin, q_len, kv_begin, kv_len, (q_len + self.tile_rows - 1) // self.tile_rows, together,
            )  # fmt: skip
            for i in cutlass.range_constexpr(1, 7):
                plan[at, i] = words[i]
        cute.arch.sync_threads()
        carried = Int32(0)
        for first in cutlass.range(0, entries, PLAN_THREADS, unroll=1):
            e = first + tidx
            tiles = Int32(0)
            if e < entries:
                tiles = plan[e, 5] * heads
            upto = self.scan(tiles, lane)
            if lane == 31:
                of_warp[warp_idx] = upto
            cute.arch.sync_threads()
            for w in cutlass.range_constexpr(PLAN_THREADS // 32):
                count = of_warp[w]
                if w < warp_idx:
                    upto += count
            if e < entries:
                plan[e, 0] = carried + upto
            for w in cutlass.range_constexpr(PLAN_THREADS // 32):
                carried += of_warp[w]
            cute.arch.sync_threads()
        if tidx == 0:
            progress[0] = Int32(progress.shape[0])  # each CTA's first tile is the one of its own number
            progress[1] = carried

    @cute.jit
    def scan(self, value: Int32, lane: Int32):
        """Inclusive prefix sum over a warp's lanes."""
        for step in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(value, offset=1 << step, mask_and_clamp=0)
            if lane >= (1 << step):
                value += other
        return value

    # ------------------------------------------------------------------ the attention kernel

    @cute.kernel
    def attend(
        self,
        tma_q: cute.CopyAtom,
        tma_q_tensor: cute.Tensor,
        tma_k: cute.CopyAtom,
        tma_k_tensor: cute.Tensor,
        tma_r: cute.CopyAtom,
        tma_r_tensor: cute.Tensor,
        tma_v: cute.CopyAtom,
        tma_v_tensor: cute.Tensor,
        scales: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        plan: cute.Tensor,
        progress: cute.Tensor,
        mma_first: cute.TiledMma,
        mma_qk: cute.TiledMma,
        mma_pv: cute.TiledMma,
        heads: Int32,
    ):
        """One CTA: set up the barriers, then each warpgroup its role."""
        tidx, _, _ = cute.arch.thread_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(tidx // 128)

        smem = utils.SmemAllocator()
        storage = smem.allocate(self.storage)
        barriers = (
            storage.q_full.data_ptr(), storage.q_empty.data_ptr(), storage.k_full.data_ptr(),
            storage.k_empty.data_ptr(), storage.v_full.data_ptr(), storage.v_empty.data_ptr(),
        )  # fmt: skip
        slots = storage.slots.get_tensor(cute.make_layout((SLOT_WORDS, SLOTS), stride=(1, SLOT_WORDS)))
        s_q, s_k, s_v = storage.q.data_ptr(), storage.k.data_ptr(), storage.v.data_ptr()
        # Where V is copied to, and the barriers of that.
        s_p, landing, landed, left = s_v, s_v, storage.v_full.data_ptr(), storage.v_empty.data_ptr()
        if const_expr(self.fp8):
            landing, landed, left = storage.landing.data_ptr(), storage.landed.data_ptr(), storage.left.data_ptr()
            s_p = storage.p.data_ptr()

        if warp_idx == 4 * self.groups:
            for tma in (tma_q, tma_k, tma_r, tma_v):
                cpasync.prefetch_descriptor(tma)
        if warp_idx == 0:
            q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(self.groups):
                    cute.arch.mbarrier_init(q_full + i, 1)
                    cute.arch.mbarrier_init(q_empty + i, 4)
                for i in cutlass.range_constexpr(self.stages):
                    cute.arch.mbarrier_init(k_full + i, 1)
                    cute.arch.mbarrier_init(v_full + i, TURNING_WARPS if const_expr(self.fp8) else 1)
                    cute.arch.mbarrier_init(k_empty + i, 4 * self.groups)
                    cute.arch.mbarrier_init(v_empty + i, 4 * self.groups)
                    if const_expr(self.fp8):
                        cute.arch.mbarrier_init(landed + i, 1)
                        cute.arch.mbarrier_init(left + i, TURNING_WARPS)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        if group == self.groups:
            cute.arch.setmaxregister_decrease(self.registers[1])
            if warp_idx == 4 * self.groups:
                self.copy_tiles(
                    tma_q, tma_q_tensor, tma_k, tma_k_tensor, tma_r, tma_r_tensor, tma_v, tma_v_tensor, plan, progress,
                    slots, s_q, s_k, landing, (*barriers[:4], landed, left), heads,
                )  # fmt: skip
            if const_expr(self.fp8):
                if warp_idx > 4 * self.groups and warp_idx <= 4 * self.groups + TURNING_WARPS:
                    self.turn_values(slots, landing, s_v, landed, left, barriers, warp_idx - 4 * self.groups - 1)
        else:
            cute.arch.setmaxregister_increase(self.registers[0])
            self.compute(scales, out, lse, slots, s_q, s_k, s_v, s_p, barriers, mma_first, mma_qk, mma_pv, group, heads)

    # ---- tiles and copies (one warp)

    @cute.jit
    def claim(
        self,
        tile: Int32,
        base: Int32,
        slot: Int32,
        plan: cute.Tensor,
        progress: cute.Tensor,
        slots: cute.Tensor,
        heads: Int32,
    ):
        """Describe tile number `tile` of the plan in a slot; returns where in the plan it was found.

        A slot: key blocks (0: there are no more tiles), keys, keys that the tile's first row sees, first row, rows,
        head, first key.
        """
        lane = cute.arch.lane_idx()
        entries = plan.shape[0]
        words = cute.make_rmem_tensor((SLOT_WORDS,), Int32)
        words.fill(0)
        if tile < progress[1]:
            # Tiles are claimed in order, so the search goes on where the last one ended.
            searching = Int32(1)
            while searching == 1:
                end = Int32(FAR)
                if base + lane < entries:
                    end = plan[base + lane, 0]
                passed = cute.arch.popc(cute.arch.vote_ballot_sync(end <= tile))
                base += passed
                if passed < 32:
                    searching = Int32(0)
            index = tile
            if base > 0:
                index = tile - plan[base - 1, 0]
            q_begin, q_len, kv_begin = plan[base, 1], plan[base, 2], plan[base, 3]
            kv_len, m_tiles, together = plan[base, 4], plan[base, 5], plan[base, 6]
            section = index // (together * m_tiles)
            index -= section * together * m_tiles
            heads_here = cutlass.min(together, heads - section * together)
            m = m_tiles - 1 - index // heads_here  # the tiles with most keys first
            row = m * self.tile_rows
            rows = cutlass.min(q_len - row, self.tile_rows)
            if const_expr(self.tile_rows != self.block):
                # The masks' edges lie within blocks anyway, so the tile that is not full is the one with fewest keys.
                first = q_len - (m_tiles - m) * self.tile_rows
                row = cutlass.max(first, 0)
                rows = first + self.tile_rows - row
            seen = kv_len
            if const_expr(self.causal):
                seen = cutlass.max(cutlass.min(kv_len, kv_len - q_len + row + rows), 0)
            words[0] = cutlass.max((seen + self.block - 1) // self.block, 1)
            words[1] = kv_len
            words[2] = kv_len - q_len + row + 1
            words[3] = q_begin + row
            words[4] = rows
            words[5] = section * together + index % heads_here
            words[6] = kv_begin
        if lane == 0:
            for i in cutlass.range_constexpr(7):
                slots[i, slot] = words[i]
        cute.arch.sync_warp()
        return base

    @cute.jit
    def copy_tiles(
        self,
        tma_q: cute.CopyAtom,
        tma_q_tensor: cute.Tensor,
        tma_k: cute.CopyAtom,
        tma_k_tensor: cute.Tensor,
        tma_r: cute.CopyAtom,
        tma_r_tensor: cute.Tensor,
        tma_v: cute.CopyAtom,
        tma_v_tensor: cute.Tensor,
        plan: cute.Tensor,
        progress: cute.Tensor,
        slots: cute.Tensor,
        s_q: cute.Pointer,
        s_k: cute.Pointer,
        s_v: cute.Pointer,
        barriers: cutlass.Constexpr,
        heads: Int32,
    ):
        """The copying warp: K of a block, then V of the block before (in fp8 its own), and Q once the tile before has
        left it."""
        q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
        lane = cute.arch.lane_idx()
        tile, _, _ = cute.arch.block_idx()
        cute.arch.griddepcontrol_wait()
        base = self.claim(tile, Int32(0), Int32(0), plan, progress, slots, heads)

        index, phase = Int32(0), Int32(1)  # of K; V is one block behind
        v_index, v_phase, v_row, v_head = Int32(-1), Int32(1), Int32(0), Int32(0)
        q_phase = Int32(1)
        slot = Int32(0)
        running = Int32(1)
        while running == 1:
            blocks, kv_begin, head = slots[0, slot], slots[6, slot], slots[5, slot]
            row = slots[3, slot]
            if blocks == 0:
                running = Int32(0)
            for b in cutlass.range(blocks, unroll=1):
                kv_row = kv_begin + (blocks - 1 - b) * self.block
                cute.arch.mbarrier_wait(k_empty + index, phase)
                self.expect(k_full + index, self.k_elements)
                own_tiles = self.k_tiles - self.rope_tiles
                self.copy_rows(
                    tma_k, tma_k_tensor, s_k, k_full, index, kv_row, head, self.block, own_tiles, self.k_tiles
                )
                if const_expr(self.rope_tiles > 0):
                    rope = s_k + own_tiles * 64 * self.block
                    self.copy_rows(
                        tma_r,
                        tma_r_tensor,
                        rope,
                        k_full,
                        index,
                        kv_row,
                        Int32(0),
                        self.block,
                        self.rope_tiles,
                        self.k_tiles,
                    )
                if const_expr(self.fp8):
                    # Transposed long ago, what lay there is free before K's place is.
                    cute.arch.mbarrier_wait(v_empty + index, phase)
                    self.copy_values(tma_v, tma_v_tensor, s_v, v_full, index, kv_row, head)
                else:
                    if v_index >= 0:
                        cute.arch.mbarrier_wait(v_empty + v_index, v_phase)
                        self.copy_values(tma_v, tma_v_tensor, s_v, v_full, v_index, v_row, v_head)
                    v_index, v_phase, v_row, v_head = index, phase, kv_row, head
                index, phase = self.advance(index, phase)
                if b == 0:
                    for g in cutlass.range(self.groups, unroll=1):
                        cute.arch.mbarrier_wait(q_empty + g, q_phase)
                        self.expect(q_full + g, self.q_elements)
                        q_row = row + g * GROUP_ROWS
                        self.copy_rows(
                            tma_q, tma_q_tensor, s_q, q_full, g, q_row, head, GROUP_ROWS, self.k_tiles, self.k_tiles
                        )
                    q_phase ^= 1
                    # The next tile is looked up while this one's blocks are awaited.
                    claimed = Int32(0)
                    if lane == 0:
                        claimed = cute.arch.atomic_add(progress.iterator, Int32(1), sem="relaxed", scope="gpu")
                    tile = cute.arch.shuffle_sync(claimed, offset=0)
                    base = self.claim(tile, base, (slot + 1) % SLOTS, plan, progress, slots, heads)
            slot = (slot + 1) % SLOTS
        if v_index >= 0:
            cute.arch.mbarrier_wait(v_empty + v_index, v_phase)
            self.copy_values(tma_v, tma_v_tensor, s_v, v_full, v_index, v_row, v_head)
        if const_expr(self.fp8):
            # Who transposes looks at the last slot, and stops.
            cute.arch.mbarrier_wait(v_empty + index, phase)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(v_full + index)
        for g in cutlass.range(self.groups, unroll=1):
            cute.arch.mbarrier_wait(q_empty + g, q_phase)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(q_full + g)

    @cute.jit
    def expect(self, full: cute.Pointer, elements: cutlass.Constexpr[int]):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, elements * self.bytes)

    @cute.jit
    def copy_rows(
        self,
        tma: cute.CopyAtom,
        tensor: cute.Tensor,
        smem: cute.Pointer,
        full: cute.Pointer,
        index: Int32,
        row: Int32,
        head: Int32,
        rows: cutlass.Constexpr[int],
        tiles: cutlass.Constexpr[int],
        pitch: cutlass.Constexpr[int],
    ):
        """`rows` rows of one head into the first `tiles` column tiles of buffer `index`, which has `pitch` of them."""
        buffers = cute.make_tensor(
            cute.recast_ptr(smem, self.swizzle(), dtype=self.dtype),
            cute.make_layout(
                ((8, rows // 8), 64, tiles, 8), stride=((64, 512), 1, 64 * rows, 64 * rows * pitch)
            ),
        )  # fmt: skip
        source = cute.local_tile(cute.domain_offset((row, 0, 0, 0), tensor), (rows, 64, tiles), (0, 0, 0, None))
        to, of = cpasync.tma_partition(
            tma, 0, cute.make_layout(1), cute.group_modes(buffers, 0, 3), cute.group_modes(source, 0, 3)
        )
        policy = EVICT_FIRST if const_expr(rows == GROUP_ROWS) else EVICT_LAST
        cute.copy(tma, of[None, head], to[None, index], tma_bar_ptr=full + index, cache_policy=Int64(policy))

    @cute.jit
    def copy_values(
        self,
        tma: cute.CopyAtom,
        tensor: cute.Tensor,
        smem: cute.Pointer,
        full: cute.Pointer,
        index: Int32,
        row: Int32,
        head: Int32,
    ):
        """V of a block."""
        self.expect(full + index, self.v_elements)
        self.copy_rows(tma, tensor, smem, full, index, row, head, self.block, self.v_tiles, self.v_tiles)

    # ---- V transposed (fp8, two warps)

    @cute.jit
    def turn_values(
        self,
        slots: cute.Tensor,
        landing: cute.Pointer,
        s_v: cute.Pointer,
        landed: cute.Pointer,
        left: cute.Pointer,
        barriers: cutlass.Constexpr,
        warp_here: Int32,
    ):
        """One warp: 64 columns of V of every block, as rows of keys for WGMMA, which takes fp8 only so.

        ldmatrix transposes pairs of columns; bytes of two registers then make four keys of a column. Of 16 keys lane q
        of a row so has 2q, 2q + 1, 2q + 8 and 2q + 9, and the keys stay in this order: a lane's scores are those of
        the same keys, so that its P is WGMMA's operand as it is."""
        _, _, _, _, v_full, v_empty = barriers
        lane = cute.arch.lane_idx()
        tile, source, target = turning_addresses(lane, warp_here, landing.toint(), s_v.toint(), self.block)
        even_columns, odd_columns = Int32(EVEN_COLUMNS), Int32(ODD_COLUMNS)
        if lane >= 16:
            even_columns, odd_columns = odd_columns, even_columns

        index, phase = Int32(0), Int32(0)
        slot = Int32(0)
        cute.arch.mbarrier_wait(landed, 0)
        blocks = slots[0, slot]
        while blocks > 0:
            keys = slots[1, slot] - (blocks - 1) * self.block  # of the first block: only it may reach past the end
            for _ in cutlass.range(blocks, unroll=1):
                cute.arch.mbarrier_wait(landed + index, phase)
                if keys < self.block:
                    # What lies there may be NaN, and 0 * NaN must not reach O.
                    for row in cutlass.range(cutlass.max(keys, 0) + lane // 4, self.block, 8, unroll=1):
                        self.store_zeros(tile + index * self.v_elements + row * 64 + (lane % 4) * 16)
                    cute.arch.sync_warp()
                cute.arch.mbarrier_wait(v_empty + index, phase ^ 1)
                of, to = source + index * self.v_elements, target + index * self.turned_elements
                for u in cutlass.range_constexpr(self.block // 32):
                    at = (to ^ ((u % 4) * 32)) + (u // 4) * 128 * self.width
                    for c in cutlass.range_constexpr(4):
                        words = self.load_transposed((of ^ (c * 16)) + u * 2048)
                        a, b = (cute.arch.prmt(*words[:2], columns) for columns in (even_columns, odd_columns))
                        d, e = (cute.arch.prmt(*words[2:], columns) for columns in (even_columns, odd_columns))
                        self.store_matrices(at + c * 2048, a, b, d, e)
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(left + index)
                    cute.arch.mbarrier_arrive(v_full + index)
                keys = Int32(self.block)
                index, phase = self.advance(index, phase)
            slot = (slot + 1) % SLOTS
            cute.arch.mbarrier_wait(landed + index, phase)
            blocks = slots[0, slot]

    def store_zeros(self, address: Int32):
        """16 bytes of zeros."""
        cute.arch.inline_ptx("st.shared.v4.b32 [{$r0}], {0, 0, 0, 0};", read_only_args=[address])

    def swizzle(self):
        return warpgroup.make_smem_layout_atom(self.swizzled, self.dtype).inner

    # ---- the computing warpgroups

    @cute.jit
    def buffer(self, smem: cute.Pointer, index: Int32, rows: cutlass.Constexpr[int], columns: cutlass.Constexpr[int]):
        """Buffer `index` for WGMMA, its address through an instruction whose result is uniform: WGMMA takes its
        descriptors from uniform registers."""
        return self.tiles_at(smem, index, rows, columns, self.swizzled)

    @cute.jit
    def tiles_at(
        self,
        smem: cute.Pointer,
        index: Int32,
        rows: cutlass.Constexpr[int],
        columns: cutlass.Constexpr[int],
        swizzled: cutlass.Constexpr,
    ):
        address = smem.toint() + index * (rows * columns * self.bytes)
        if const_expr(not self.fp8):
            address = self.uniform(address)
        atom = warpgroup.make_smem_layout_atom(swizzled, self.dtype)
        layout = cute.tile_to_shape(atom, (rows, columns), (0, 1))
        pointer = cute.make_ptr(self.dtype, address, cute.AddressSpace.smem, assumed_align=1024)
        return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=self.dtype), layout.outer)

    @cute.jit
    def leave(self, barrier: cute.Pointer):
        """One warp is done with a buffer."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def compute(
        self,
        scales: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        slots: cute.Tensor,
        s_q: cute.Pointer,
        s_k: cute.Pointer,
        s_v: cute.Pointer,
        s_p: cute.Pointer,
        barriers: cutlass.Constexpr,
        mma_first: cute.TiledMma,
        mma_qk: cute.TiledMma,
        mma_pv: cute.TiledMma,
        group: Int32,
        heads: Int32,
    ):
        """One warpgroup: its 64 rows of every tile, as one sequence of key blocks that tiles do not interrupt."""
        q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
        tidx, _, _ = cute.arch.thread_idx()
        t = tidx % 128
        lane = t % 32
        row_low = (t // 32) * 16 + lane // 4
        scale = scales[0] * LOG2_E
        out_scale = scales[1]

        thr_qk, thr_pv = mma_qk.get_slice(t), mma_pv.get_slice(t)
        t_q = mma_qk.make_fragment_A(thr_qk.partition_A(self.buffer(s_q, group, GROUP_ROWS, self.depth)))
        acc_s = cute.make_rmem_tensor(thr_qk.partition_shape_C((GROUP_ROWS, self.block)), Float32)
        s = cute.make_tensor(acc_s.iterator, cute.make_layout((2, (2, self.block // 8)), stride=(2, (1, 4))))
        acc_o = cute.make_rmem_tensor(thr_pv.partition_shape_C((GROUP_ROWS, self.width)), Float32)
        o = cute.make_tensor(acc_o.iterator, cute.make_layout((2, (2, self.width // 8)), stride=(2, (1, 4))))
        if const_expr(self.fp8):
            of_group = self.tiles_at(s_p, group, GROUP_ROWS, self.turned_keys, SmemLayoutAtomKind.K_SW128)
            operand_p = mma_pv.make_fragment_A(thr_pv.partition_A(of_group))
            to_p = p_address(t, lane, s_p.toint() + group * self.p_elements)
        else:
            operand_p = cute.make_rmem_tensor(thr_pv.partition_shape_A((GROUP_ROWS, self.block)), self.dtype)
            to_p = operand_p
        # Of this thread's two rows: running maximum and sum, of the next tile too, and the keys they see.
        m = cute.make_rmem_tensor((2,), Float32)
        l = cute.make_rmem_tensor((2,), Float32)
        m_next = cute.make_rmem_tensor((2,), Float32)
        l_next = cute.make_rmem_tensor((2,), Float32)
        limit = cute.make_rmem_tensor((2,), Int32)
        m.fill(LOWEST)
        l.fill(0.0)
        acc_o.fill(0.0)
        # Set here once: setting them between products that are in flight serialises these.
        mma_first.set(Field.ACCUMULATE, False)
        mma_qk.set(Field.ACCUMULATE, True)
        mma_pv.set(Field.ACCUMULATE, True)
        products = (mma_first, mma_qk, thr_qk, acc_s, t_q, s_k, mma_pv, thr_pv, acc_o, operand_p, to_p, s_v)

        tile, q_phase = Int32(0), Int32(0)
        cute.arch.mbarrier_wait(q_full + group, q_phase)
        blocks = self.uniform(slots[0, 0])
        if blocks > 0:
            # The first block of the first tile alone.
            if const_expr(not self.fp8):
                if group == self.groups - 1:
                    cute.arch.barrier_arrive(barrier_id=1, number_of_threads=256)
            keys, unmasked = self.limits(slots, tile, group, row_low, limit)
            cute.arch.mbarrier_wait(k_full, 0)
            self.scores(mma_first, mma_qk, thr_qk, acc_s, t_q, s_k, Int32(0))
            warpgroup.wait_group(0)
            self.leave(k_empty)
            n = blocks - 1
            if (n + 1) * self.block > unmasked:
                self.mask(s, limit, n, lane)
            self.maxima(s, m, l, scale)
            for i in cutlass.range_constexpr(2):
                self.powers(s, i, m, l, scale)
            self.narrow(acc_s, to_p)
            v_keys = keys - n * self.block  # of V's block: the rows from here on are of no key of the request
            v_index, v_phase = Int32(0), Int32(0)
            index, phase = self.advance(Int32(0), Int32(0))

            while blocks > 0:
                # P of the tile's last block of keys is there; the others follow, at first those that need a mask.
                masked = self.masked_blocks(blocks, unmasked, v_keys)
                for b in cutlass.range(masked, unroll=1):
                    n = blocks - 2 - b
                    self.zero_rows(s_v, v_full, v_index, v_phase, v_keys, t, group)
                    self.issue(products, barriers, index, phase, v_index, v_phase, group)
                    self.leave(k_empty + index)
                    self.leave_q(q_empty + group, n)
                    self.mask(s, limit, n, lane)
                    self.finish(products, barriers, s, o, m, l, scale, v_index, v_phase)
                    v_keys = keys - n * self.block
                    v_index, v_phase = index, phase
                    index, phase = self.advance(index, phase)
                for b in cutlass.range(masked, blocks - 1, unroll=1):
                    self.issue(products, barriers, index, phase, v_index, v_phase, group)
                    self.leave(k_empty + index)
                    self.leave_q(q_empty + group, blocks - 2 - b)
                    if const_expr(self.fp8):
                        self.finish_lagging(products, barriers, s, o, m, l, scale, v_index)
                    else:
                        self.finish(products, barriers, s, o, m, l, scale, v_index, v_phase)
                    v_index, v_phase = index, phase
                    index, phase = self.advance(index, phase)
                if blocks > 1:
                    v_keys = keys
                # P of the tile's first keys is there. Its scores are all done, so Q may be replaced.
                if const_expr(not self.fp8) or blocks == 1:
                    self.leave(q_empty + group)
                q_phase ^= 1
                cute.arch.mbarrier_wait(q_full + group, q_phase)
                blocks = self.uniform(slots[0, (tile + 1) % SLOTS])
                self.zero_rows(s_v, v_full, v_index, v_phase, v_keys, t, group)
                if blocks > 0:
                    # The next tile's first scores beside this tile's last values.
                    keys, unmasked = self.limits(slots, (tile + 1) % SLOTS, group, row_low, limit)
                    unseen = Int32(0)
                    passed, passed_phase = index, phase
                    if const_expr(self.fp8 and self.causal):
                        # Of a tile of more rows than a block has keys, the upper ones see nothing of the last block.
                        if blocks > 1 and unmasked + GROUP_ROWS - 1 <= (blocks - 1) * self.block:
                            unseen = Int32(1)
                            blocks -= 1
                            self.wait(k_full + index, phase)
                            self.leave(k_empty + index)
                            index, phase = self.advance(index, phase)
                    n = blocks - 1
                    self.issue(products, barriers, index, phase, v_index, v_phase, group)
                    self.leave(k_empty + index)
                    if const_expr(self.fp8 and self.causal):
                        if unseen == 1:
                            self.wait(v_full + passed, passed_phase)
                            self.leave(v_empty + passed)
                    if (n + 1) * self.block > unmasked:
                        self.mask(s, limit, n, lane)
                    m_next.fill(LOWEST)
                    l_next.fill(0.0)
                    self.maxima(s, m_next, l_next, scale)
                    for i in cutlass.range_constexpr(2):
                        self.powers(s, i, m_next, l_next, scale)
                    cute.arch.mbarrier_wait(v_full + v_index, v_phase)  # as in `finish`
                    warpgroup.wait_group(0)
                    self.leave(v_empty + v_index)
                    self.narrow(acc_s, to_p)
                    self.store(out, lse, o, m, l, out_scale, slots, tile % SLOTS, group, row_low, lane, heads)
                    acc_o.fill(0.0)
                    for i in cutlass.range_constexpr(2):
                        m[i], l[i] = m_next[i], l_next[i]
                    v_keys = keys - n * self.block
                    v_index, v_phase = index, phase
                    index, phase = self.advance(index, phase)
                    tile += 1
            cute.arch.mbarrier_wait(v_full + v_index, v_phase)
            self.take_turn(group)
            self.values(mma_pv, thr_pv, acc_o, operand_p, s_v, v_index)
            if group < self.groups - 1:
                self.pass_turn(group)
            warpgroup.wait_group(0)
            self.store(out, lse, o, m, l, out_scale, slots, tile % SLOTS, group, row_low, lane, heads)

    @cute.jit
    def issue(
        self,
        products: cutlass.Constexpr,
        barriers: cutlass.Constexpr,
        index: Int32,
        phase: Int32,
        v_index: Int32,
        v_phase: Int32,
        group: Int32,
    ):
        """When it is this warpgroup's turn: S of a block, and O += P V of the one before. Returns when S is there."""
        _, _, k_full, _, v_full, _ = barriers
        mma_first, mma_qk, thr_qk, acc_s, t_q, s_k, mma_pv, thr_pv, acc_o, operand_p, _, s_v = products
        self.wait(k_full + index, phase)
        self.take_turn(group)
        self.scores(mma_first, mma_qk, thr_qk, acc_s, t_q, s_k, index)
        self.wait(v_full + v_index, v_phase)
        self.values(mma_pv, thr_pv, acc_o, operand_p, s_v, v_index)
        self.pass_turn(group)
        warpgroup.wait_group(1)

    @cute.jit
    def wait(self, barrier: cute.Pointer, phase: Int32):
        """Wait for a barrier's phase; in fp8, where a block takes less time, without what mbarrier_wait does between
        two looks at it."""
        if const_expr(self.fp8):
            cute.arch.inline_ptx(
                "{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [{$r0}], {$r1}; @p bra DONE;"
                " bra AGAIN; DONE: }",
                read_only_args=[barrier.toint(), phase],
            )
        else:
            cute.arch.mbarrier_wait(barrier, phase)

    @cute.jit
    def leave_q(self, barrier: cute.Pointer, n: Int32):
        """fp8: after the scores of a tile's last block Q may be replaced; without turns the next tile's scores would
        wait for it."""
        if const_expr(self.fp8):
            if n == 0:
                self.leave(barrier)

    @cute.jit
    def finish(
        self,
        products: cutlass.Constexpr,
        barriers: cutlass.Constexpr,
        s: cute.Tensor,
        o: cute.Tensor,
        m: cute.Tensor,
        l: cute.Tensor,
        scale: Float32,
        v_index: Int32,
        v_phase: Int32,
    ):
        """S to P, and O to the new maximum."""
        _, _, _, _, v_full, v_empty = barriers
        _, _, _, acc_s, _, _, _, _, _, _, to_p, _ = products
        factor = self.maxima(s, m, l, scale)
        moved = cute.arch.vote_any_sync(factor[0] != 1.0 or factor[1] != 1.0)
        self.powers(s, 0, m, l, scale)
        if const_expr(not self.fp8):
            # V has long been there, but this ends a basic block: the assembler moves the wait for O up to the start of
            # its block. Here O is done, and the rest of the softmax hides what it takes to use it.
            cute.arch.mbarrier_wait(v_full + v_index, v_phase)
            warpgroup.wait_group(0)
            self.leave(v_empty + v_index)
        if moved:
            if const_expr(self.fp8):
                warpgroup.wait_group(0)
            for c in cutlass.range_constexpr(self.width // 4):
                o[0, c] = o[0, c] * factor[0]
                o[1, c] = o[1, c] * factor[1]
        self.powers(s, 1, m, l, scale)
        if const_expr(self.fp8):
            # The branch above ends the block, and the wait goes to where it ends. P's memory is free then too.
            warpgroup.wait_group(0)
            self.leave(v_empty + v_index)
        self.narrow(acc_s, to_p)

    @cute.jit
    def finish_lagging(
        self,
        products: cutlass.Constexpr,
        barriers: cutlass.Constexpr,
        s: cute.Tensor,
        o: cute.Tensor,
        m: cute.Tensor,
        l: cute.Tensor,
        scale: Float32,
        v_index: Int32,
    ):
        """fp8, no mask: `finish` without a search for the maximum. P is made with that of the blocks before, and its
        sums, which are needed anyway, tell whether it fits into e4m3; where it doesn't, the warp catches up and makes
        it again. S stays as it is until then, half of the block at a time: for all of it there are no registers."""
        v_empty = barriers[5]
        acc_s, to_p = products[3], products[10]
        steps = self.block // 32
        words = cute.make_rmem_tensor((4 * steps,), Int32)
        sums = cute.make_rmem_tensor((2,), Float32)
        for first, end in ((0, steps // 2), (steps // 2, steps)):
            most = self.powers_to_words(acc_s, words, sums, first, end, m, scale)
            fits = cute.arch.vote_all_sync(most <= P_GREATEST)  # not so where one of them is NaN
            if not fits:
                warpgroup.wait_group(0)
                self.catch_up(s, words, o, m, l, scale, first)
                self.powers_to_words(acc_s, words, sums, first, end, m, scale)
            for i in cutlass.range_constexpr(2):
                l[i] += sums[i]
        # The branch above ends the block, and the wait goes to where it ends. P's memory is free then too.
        warpgroup.wait_group(0)
        self.leave(v_empty + v_index)
        self.put_p(words, to_p)

    def powers_to_words(self, acc_s, words, sums, first: int, end: int, m, scale):
        """S to P for the steps of 32 keys from `first` to `end`: its words, its rows' sums, and, returned, the greatest
        sum of four."""
        totals, most = [Float32(0.0), Float32(0.0)], Float32(0.0)
        for k in range(first, end):
            fours = []
            for w, at in enumerate(P_WORDS):
                row = w % 2
                p = [cute.math.exp2(acc_s[16 * k + at + i] * scale - m[row], fastmath=True) for i in P_IN_WORD]
                words[4 * k + w] = self.narrow_four(*p)
                fours.append((p[0] + p[1]) + (p[2] + p[3]))
                totals[row] += fours[-1]
            for pair in (fours[:2], fours[2:]):
                most = self.max_of_three(most, *pair)
        for row in range(2):
            sums[row] = totals[row]
        return most

    def max_of_three(self, a: Float32, b: Float32, c: Float32):
        """Of values that aren't negative: for their bits there is one instruction that takes three, for floats not."""
        return cute.arch.inline_ptx(
            "{ .reg .b32 x, y; mov.b32 x, {$r0}; mov.b32 y, {$r1}; max.s32 x, x, y; mov.b32 y, {$r2};"
            " max.s32 x, x, y; mov.b32 {$w0}, x; }",
            write_only_types=[Float32],
            read_only_args=[a, b, c],
        )

    @cute.jit
    def catch_up(
        self,
        s: cute.Tensor,
        words: cute.Tensor,
        o: cute.Tensor,
        m: cute.Tensor,
        l: cute.Tensor,
        scale: Float32,
        first: cutlass.Constexpr[int],
    ):
        """The rows' maximum with that of S from step `first` on; O, the sums, and P's words before brought to it."""
        for i in cutlass.range_constexpr(2):
            high = s[i, 8 * first]
            for c in cutlass.range_constexpr(8 * first + 1, self.block // 4):
                high = cute.arch.fmax(high, s[i, c])
            high = cute.arch.fmax(high, cute.arch.shuffle_sync_bfly(high, offset=1))
            high = cute.arch.fmax(high, cute.arch.shuffle_sync_bfly(high, offset=2))
            new = cute.arch.fmax(m[i], high * scale - P_BITS)
            factor = cute.math.exp2(m[i] - new, fastmath=True)
            m[i] = new
            l[i] = l[i] * factor
            for c in cutlass.range_constexpr(self.width // 4):
                o[i, c] = o[i, c] * factor
            for w in cutlass.range_constexpr(i, 4 * first, 2):
                words[w] = self.scale_four(words[w], factor)

    def scale_four(self, word: Int32, factor: Float32):
        """Four values in e4m3 times `factor`."""
        return cute.arch.inline_ptx(
            "{ .reg .b16 low, high; .reg .b32 a, b, f; cvt.rn.f16x2.f32 f, {$r1}, {$r1}; mov.b32 {low, high}, {$r0};"
            " cvt.rn.f16x2.e4m3x2 a, low; cvt.rn.f16x2.e4m3x2 b, high; mul.rn.f16x2 a, a, f; mul.rn.f16x2 b, b, f;"
            " cvt.rn.satfinite.e4m3x2.f16x2 low, a; cvt.rn.satfinite.e4m3x2.f16x2 high, b;"
            " mov.b32 {$w0}, {low, high}; }",
            write_only_types=[Int32],
            read_only_args=[word, factor],
        )

    @cute.jit
    def scores(
        self,
        mma_first: cute.TiledMma,
        mma_qk: cute.TiledMma,
        thr_qk: cute.core.ThrMma,
        acc_s: cute.Tensor,
        t_q: cute.Tensor,
        s_k: cute.Pointer,
        index: Int32,
    ):
        """S = Q K^T, issued."""
        t_k = mma_qk.make_fragment_B(thr_qk.partition_B(self.buffer(s_k, index, self.block, self.depth)))
        warpgroup.fence()
        cute.gemm(mma_first, acc_s, t_q[None, None, 0], t_k[None, None, 0], acc_s)
        for k in cutlass.range_constexpr(1, self.depth // self.k_step):
            cute.gemm(mma_qk, acc_s, t_q[None, None, k], t_k[None, None, k], acc_s)
        warpgroup.commit_group()

    @cute.jit
    def values(
        self,
        mma_pv: cute.TiledMma,
        thr_pv: cute.core.ThrMma,
        acc_o: cute.Tensor,
        operand_p: cute.Tensor,
        s_v: cute.Pointer,
        index: Int32,
    ):
        """O += P V, issued."""
        if const_expr(self.fp8):
            turned = self.tiles_at(s_v, index, self.width, self.turned_keys, SmemLayoutAtomKind.K_SW128)
        else:
            stage = self.buffer(s_v, index, self.block, self.width)
            turned = cute.make_tensor(stage.iterator, cute.select(stage.layout, mode=[1, 0]))
        t_v = mma_pv.make_fragment_B(thr_pv.partition_B(turned))
        warpgroup.fence()
        for k in cutlass.range_constexpr(self.block // self.k_step):
            cute.gemm(mma_pv, acc_o, operand_p[None, None, k], t_v[None, None, k], acc_o)
        warpgroup.commit_group()

    @cute.jit
    def masked_blocks(self, blocks: Int32, unmasked: Int32, v_keys: Int32):
        """Blocks of a tile after its first that need a mask, or whose predecessor's V needs zeros; in fp8 also those
        that find rows without a maximum, which saw nothing of the first block."""
        masked = blocks - 1 - cutlass.max(unmasked, 0) // self.block
        if const_expr(self.fp8) or v_keys < self.block:
            masked = cutlass.max(masked, 1)
        return cutlass.min(cutlass.max(masked, 0), blocks - 1)

    @cute.jit
    def take_turn(self, group: Int32):
        """Wait until the warpgroup before has issued its products. In fp8 whoever is ready issues: of three warpgroups
        some pass over blocks."""
        if const_expr(not self.fp8):
            cute.arch.barrier(barrier_id=1 + group, number_of_threads=256)

    @cute.jit
    def pass_turn(self, group: Int32):
        """The next warpgroup may issue its products."""
        if const_expr(not self.fp8):
            following = group + 1
            if following == self.groups:
                following = Int32(0)
            cute.arch.barrier_arrive(barrier_id=1 + following, number_of_threads=256)

    @cute.jit
    def narrow(self, acc_s: cute.Tensor, to_p: cutlass.Constexpr):
        """P in the operands' dtype, as WGMMA takes it: from registers in the accumulator's own order, or in fp8 from
        shared memory, in the order in which V's keys were put. `to_p` says where: those registers, or the address for
        this lane's row of the first 32 keys."""
        if const_expr(self.fp8):
            words = []
            for k in cutlass.range_constexpr(self.block // 32):
                # Of both of the thread's rows the keys 0 to 15, then of both the keys 16 to 31.
                words += [self.narrow_four(*(acc_s[16 * k + at + i] for i in P_IN_WORD)) for at in P_WORDS]
            self.put_p(words, to_p)
        else:
            cute.make_tensor(to_p.iterator, acc_s.layout).store(acc_s.load().to(self.dtype))

    def put_p(self, words, to_p: Int32):
        """fp8: P's words, four for every 32 keys, to where WGMMA reads them."""
        for k in range(self.block // 32):
            to = (to_p ^ ((k % 4) * 32)) + (k // 4) * (GROUP_ROWS * 128)
            self.store_matrices(to, *(words[4 * k + w] for w in range(4)))
        # Each warp's tensor core reads only the warp's own rows.
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()

    def narrow_four(self, a: Float32, b: Float32, c: Float32, d: Float32):
        """Four values in e4m3, the first in the lowest byte."""
        return cute.arch.inline_ptx(
            "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0};"
            " cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2}; mov.b32 {$w0}, {low, high}; }",
            write_only_types=[Int32],
            read_only_args=[a, b, c, d],
        )

    @cute.jit
    def limits(self, slots: cute.Tensor, at: Int32, group: Int32, row_low: Int32, limit: cute.Tensor):
        """(keys of the request, keys that all rows of this warpgroup see); `limit` gets those of this thread's rows."""
        keys = self.uniform(slots[1, at])
        unmasked = keys
        if const_expr(self.causal):
            first = self.uniform(slots[2, at]) + group * GROUP_ROWS
            unmasked = cutlass.min(keys, first)
            for i in cutlass.range_constexpr(2):
                limit[i] = cutlass.min(keys, first + row_low + 8 * i)
        else:
            for i in cutlass.range_constexpr(2):
                limit[i] = keys
        return keys, unmasked

    @cute.jit
    def mask(self, s: cute.Tensor, limit: cute.Tensor, n: Int32, lane: Int32):
        """Scores of the keys that a row does not see."""
        for i in cutlass.range_constexpr(2):
            seen = limit[i] - n * self.block - (lane % 4) * 2
            for c in cutlass.range_constexpr(self.block // 4):
                s[i, c] = cutlass.select_((c // 2) * 8 + c % 2 < seen, s[i, c], -Float32.inf)

    @cute.jit
    def maxima(self, s: cute.Tensor, m: cute.Tensor, l: cute.Tensor, scale: Float32):
        """The rows' running maximum m (base 2, scaled) with those of S; their sums l by what it changes. Returns what
        the rows of O are to be multiplied by."""
        factor = cute.make_rmem_tensor((2,), Float32)
        for i in cutlass.range_constexpr(2):
            # Four chains, for their latency.
            highs = [s[i, c] for c in range(4)]
            for c in cutlass.range_constexpr(4, self.block // 4):
                highs[c % 4] = cute.arch.fmax(highs[c % 4], s[i, c])
            high = cute.arch.fmax(cute.arch.fmax(highs[0], highs[1]), cute.arch.fmax(highs[2], highs[3]))
            high = cute.arch.fmax(high, cute.arch.shuffle_sync_bfly(high, offset=1))
            high = cute.arch.fmax(high, cute.arch.shuffle_sync_bfly(high, offset=2))
            new = cute.arch.fmax(m[i], high * scale - P_BITS if const_expr(self.fp8) else high * scale)
            factor[i] = cute.math.exp2(m[i] - new, fastmath=True)
            m[i] = new
            l[i] = l[i] * factor[i]
        return factor

    @cute.jit
    def powers(self, s: cute.Tensor, i: cutlass.Constexpr[int], m: cute.Tensor, l: cute.Tensor, scale: Float32):
        """One row of S to P in place; its sum to l."""
        sums = [l[i], Float32(0.0)]
        for c in cutlass.range_constexpr(self.block // 4):
            p = cute.math.exp2(s[i, c] * scale - m[i], fastmath=True)
            s[i, c] = p
            sums[c % 2] += p
        l[i] = sums[0] + sums[1]

    @cute.jit
    def zero_rows(
        self, s_v: cute.Pointer, v_full: cute.Pointer, index: Int32, phase: Int32, keys: Int32, t: Int32, group: Int32
    ):
        """P is 0 past a request's keys, but what lies there may be NaN: 0 * NaN must not reach O. Each warpgroup
        writes the same zeros. In fp8 `turn_values` has done it."""
        if const_expr(not self.fp8):
            if keys < self.block:
                words = cute.make_tensor(
                    cute.recast_ptr(s_v, cute.make_swizzle(0, 4, 3), dtype=Float32),
                    cute.make_layout(
                        (32, self.block, self.v_tiles, self.stages),
                        stride=(1, 32, 32 * self.block, self.v_elements // 2),
                    ),
                )
                cute.arch.mbarrier_wait(v_full + index, phase)
                for row in cutlass.range(cutlass.max(keys, 0) + t // 32, self.block, 4, unroll=1):
                    for c in cutlass.range_constexpr(self.v_tiles):
                        words[t % 32, row, c, index] = Float32(0.0)
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.barrier(barrier_id=1 + self.groups + group, number_of_threads=128)

    @cute.jit
    def store(
        self,
        out: cute.Tensor,
        lse: cute.Tensor,
        o: cute.Tensor,
        m: cute.Tensor,
        l: cute.Tensor,
        out_scale: Float32,
        slots: cute.Tensor,
        at: Int32,
        group: Int32,
        row_low: Int32,
        lane: Int32,
        heads: Int32,
    ):
        """O / row sum to `out`, and the rows' log-sum-exp."""
        first, rows, head = slots[3, at] + group * GROUP_ROWS, slots[4, at] - group * GROUP_ROWS, slots[5, at]
        quad = lane % 4
        groups = self.width // 8
        for i in cutlass.range_constexpr(2):
            row = row_low + 8 * i
            total = l[i]
            total += cute.arch.shuffle_sync_bfly(total, offset=1)
            total += cute.arch.shuffle_sync_bfly(total, offset=2)
            factor, value = Float32(0.0), -Float32.inf
            if total > 0.0 or total != total:
                factor = out_scale / total
                value = (m[i] + cute.math.log2(total, fastmath=True)) * LN_2
            at_row = Int64(first + row) * heads + head
            # A lane holds 2 columns of each group of 8. The four lanes of a row swap so that each has the 8 columns
            # of one group in four, 16 bytes, and a row's stores fill whole sectors.
            line = cute.make_tensor(
                (out.iterator + (at_row * self.width + quad * 8)).align(16),
                cute.make_layout((8, groups // 4), stride=(1, 32)),
            )
            pairs = cute.make_rmem_tensor((8,), self.out_dtype)
            words = cute.recast_tensor(pairs, Int32)
            for g in cutlass.range_constexpr(groups // 4):
                for j in cutlass.range_constexpr(4):
                    pairs[2 * j] = (o[i, 8 * g + 2 * j] * factor).to(self.out_dtype)
                    pairs[2 * j + 1] = (o[i, 8 * g + 2 * j + 1] * factor).to(self.out_dtype)
                self.transpose_quad(words, quad)
                if row < rows:
                    cute.autovec_copy(pairs, line[None, g])
            if row < rows and quad == 0:
                lse[first + row, head] = value

"""What the decode kernels have in common beside their arithmetic: operands, shared memory, launch and set-up."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.nvgpu.warpgroup import SmemLayoutAtomKind

from tsmla_kernels.sm90.decode.combine import COMBINE_THREADS, DecodeCombine
from tsmla_kernels.sm90.decode.config import ROWS, SMEM_BYTES, DecodeConfig
from tsmla_kernels.sm90.decode.memory import Ahead, Described, Piece, Ring, Tma
from tsmla_kernels.sm90.decode.ring import DecodeRing
from tsmla_kernels.sm90.decode.scores import ScoresFrame
from tsmla_kernels.sm90.decode.softmax import DecodeSoftmax
from tsmla_kernels.sm90.warp import DTYPES, remainder


class DecodeKernel(ScoresFrame, DecodeRing, DecodeSoftmax, DecodeCombine):
    """A base of the decode kernels, which set these.

    Attributes:
      threads: of a CTA.
      dtype, p_dtype: of what the ring holds, and of P, in shared memory.
      keys_swizzle, q_swizzle, p_swizzle: how rows of keys, of Q and of P are exchanged there.
      p_rows: rows of P that the values read.
      p_offset: bytes from the beginning of a stage to its P.
    """

    threads: int
    dtype: type[cutlass.Numeric]
    p_dtype: type[cutlass.Numeric]
    keys_swizzle: SmemLayoutAtomKind
    q_swizzle: SmemLayoutAtomKind
    p_swizzle: SmemLayoutAtomKind
    p_rows: int
    p_offset: int

    def __init__(self, config: DecodeConfig, dtype: type[cutlass.Numeric], p_dtype: type[cutlass.Numeric]) -> None:
        self.config, self.dtype, self.p_dtype = config, dtype, p_dtype
        self.itemsize = dtype.width // 8
        self.heads, self.max_q_len = config.num_heads, config.max_q_len
        self.latent, self.depth = config.latent_dim, config.head_dim
        self.page_size, self.ragged, self.causal = config.page_size, config.ragged, config.causal
        self.batch_invariant, self.cluster = config.batch_invariant, config.cluster
        self.partial_dtype = DTYPES[config.partial_dtype]
        self.partial_needs_scale = self.partial_dtype == cutlass.Float16 and config.cache_dtype == "bfloat16"
        self.stages, self.tile_rows, self.max_tiles = config.stages, config.tile_rows, config.max_tiles
        self.stage_elements = config.stage_bytes // self.itemsize
        self.block, self.q_rows, self.p_rows = config.block, config.q_rows, config.p_rows
        self.out_dtype = DTYPES[config.out_dtype]
        self.min_share = 1 if config.few_rows else 2
        self.few_rows = config.few_rows
        self.column_tiles = self.depth // 64
        self.box = min(self.block, self.page_size)  # keys of one TMA copy: a page may be shorter than a stage
        self.half = self.latent // 2
        if self.stages < 3:
            raise ValueError(f"{config} leaves {self.stages} stages of shared memory; 3 are needed")

    def tensor_maps(self, q: cute.Tensor, kv_cache: cute.Tensor) -> Tma:
        """TMA atoms and tensors of q and of the cache.

        One copy brings a block's keys with all their columns: (key, 64 columns, column tile, page) as four modes. Where
        pages are shorter than a block, a copy is one column tile, for a block is not one box.
        """
        atom = warpgroup.make_smem_layout_atom(self.keys_swizzle, self.dtype)
        tiles = self.column_tiles if self.box == self.block else 1
        box_layout = cute.tile_to_shape(atom, (self.box, 64, tiles), (0, 1, 2))
        q_atom = warpgroup.make_smem_layout_atom(self.q_swizzle, q.element_type)
        q_layout = cute.tile_to_shape(q_atom, (self.q_rows, 64, self.column_tiles), (0, 1, 2))
        row, page = kv_cache.stride[1], kv_cache.stride[0]
        keys = cute.make_tensor(
            kv_cache.iterator,
            cute.make_layout((self.page_size, 64, self.column_tiles, kv_cache.shape[0]), stride=(row, 1, 64, page)),
        )
        queries = cute.make_tensor(
            q.iterator, cute.make_layout((q.shape[0], 64, self.column_tiles), stride=(q.stride[0], 1, 64))
        )
        load = cpasync.CopyBulkTensorTileG2SOp()
        load_keys = cpasync.CopyBulkTensorTileG2SMulticastOp() if self.cluster > 1 else load
        return Tma(
            *cpasync.make_tiled_tma_atom(load, queries, q_layout, (self.q_rows, 64, self.column_tiles)),
            *cpasync.make_tiled_tma_atom(load_keys, keys, box_layout, (self.box, 64, tiles)),
        )

    def check_storage(self, storage: Any) -> None:
        """Keep the struct of shared memory; ValueError if a CTA may not have so much."""
        self.storage = storage
        if storage.size_in_bytes() > SMEM_BYTES:
            raise ValueError(f"{self.config} takes {storage.size_in_bytes()} bytes of shared memory of {SMEM_BYTES}")

    def num_clusters(self, seq_lens: cute.Tensor, split_info: cute.Tensor) -> Int32:
        """How many clusters share the work: as many as split_info has entries for."""
        if const_expr(self.batch_invariant):
            return Int32(split_info.shape[0] - seq_lens.shape[0] * self.max_tiles)
        return Int32(split_info.shape[0] // 2)

    def launch(self, attend: Any, num_clusters: Int32, stream: cuda.CUstream, *merged: cute.Tensor) -> None:
        """Both kernels: `attend`, called with its arguments, and behind it `combine` of `merged`."""
        grid = [num_clusters * self.cluster, 1, 1]
        attend.launch(
            grid=grid, block=[self.threads, 1, 1], cluster=[self.cluster, 1, 1], stream=stream, min_blocks_per_mp=1
        )
        self.combine(*merged, num_clusters).launch(
            grid=grid, block=[COMBINE_THREADS, 1, 1], stream=stream, use_pdl=True, min_blocks_per_mp=1
        )

    # ---- in the attention kernel

    @cute.jit
    def ring_of(self, storage: cutlass.Constexpr):
        """The ring in shared memory, a Ring."""
        full, empty, ready = storage.full.data_ptr(), storage.empty.data_ptr(), storage.ready.data_ptr()
        pieces = storage.pieces.get_tensor(
            cute.make_layout((len(Piece), self.pieces_kept), stride=(1, len(Piece)))
        )
        rescale = storage.rescale.get_tensor(cute.make_layout((ROWS, self.stages), stride=(1, ROWS)))
        moved = storage.moved.get_tensor(cute.make_layout((4, self.stages), stride=(1, 4)))
        inverse = storage.inverse.get_tensor(cute.make_layout((ROWS, self.inverses_kept), stride=(1, ROWS)))
        keys, p = self.ring_tensors(storage.ring.data_ptr())
        return Ring(keys, p, full, empty, ready, rescale, moved, inverse, pieces)

    @cute.jit
    def ring_tensors(self, ring: cute.Pointer):
        """The keys and the P of all stages."""
        tile = cute.tile_to_shape(
            warpgroup.make_smem_layout_atom(self.keys_swizzle, self.dtype), (self.block, self.depth), (0, 1)
        )
        key_layout = cute.make_layout(
            (*tile.outer.shape, self.stages), stride=(*tile.outer.stride, self.stage_elements)
        )
        p_tile = cute.tile_to_shape(
            warpgroup.make_smem_layout_atom(self.p_swizzle, self.p_dtype), (self.p_rows, self.block), (0, 1)
        )
        p_layout = cute.make_layout(
            (*p_tile.outer.shape, self.stages),
            stride=(*p_tile.outer.stride, self.stage_elements * self.dtype.width // self.p_dtype.width),
        )
        p_begin = ring + self.p_offset // self.itemsize
        return (
            cute.make_tensor(cute.recast_ptr(ring, tile.inner, dtype=self.dtype), key_layout),
            cute.make_tensor(cute.recast_ptr(p_begin, p_tile.inner, dtype=self.p_dtype), p_layout),
        )

    @cute.jit
    def prefetch_operands(self, q: cute.Tensor, block_tables: cute.Tensor, warp: Int32):
        """Into the L2 cache beside the schedule's first loads, which these would otherwise follow: by three warps."""
        block_idx, _, _ = cute.arch.block_idx()
        line = (block_idx * 3 + warp) * 32 + cute.arch.lane_idx()
        self.prefetch(block_tables, line * 32)
        self.prefetch(q, line * (128 // self.itemsize))

    @cute.jit
    def init_barriers(self, ring: cutlass.Constexpr):
        """The ring's barriers."""
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(self.stages):
                cute.arch.mbarrier_init(ring.full + i, 1)
                cute.arch.mbarrier_init(ring.empty + i, 8 * self.releasing_lanes * self.cluster)
                cute.arch.mbarrier_init(ring.ready + i, 4 * 8)  # DecodeRing.signal of four warps

    @cute.jit
    def sync_barriers(self):
        """No barrier is used before every CTA that uses it sees it."""
        cute.arch.mbarrier_init_fence()
        if const_expr(self.cluster > 1):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    @cute.jit
    def end(self):
        """Leave, when the peers have done with this CTA's shared memory."""
        if const_expr(self.cluster > 1):
            # A CTA whose shared memory is still written or signalled by its peer must not leave.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def described(self, number: Int32, pieces: cute.Tensor):
        """(piece `number`, its first key block, the one after its last): the same two, if there is none."""
        piece = Described(pieces, remainder(number, self.pieces_kept))
        return piece, self.uniform(piece[Piece.BLOCK_BEGIN]), self.uniform(piece[Piece.BLOCK_END])

    @cute.jit
    def address(self, s_k: cute.Tensor, index: Int32):
        """Where stage `index` begins.

        WGMMA takes its descriptors from uniform registers, and the compiler does not see that a stage's index is
        uniform: it moved every descriptor there one by one, which took a fifth of the scores' time. So the address
        goes through an instruction whose result is uniform.
        """
        return self.uniform(s_k.iterator.toint() + index * (self.stage_elements * self.itemsize))

    @cute.jit
    def store_p(self, address: Int32, p_words: cute.Tensor):
        """A warp's P into shared memory, where the lane's first row of it is at `address`."""
        for i in cutlass.range_constexpr(self.block // 16):
            four = [p_words[4 * i + j] for j in range(4)]
            self.store_matrices(address ^ (i << 5), *four)
        cute.arch.sync_warp()

    @cute.jit
    def look_ahead(self, index: Int32, phase: Int32, ring: cutlass.Constexpr):
        """Poll the next stage: (has it arrived, its address, the stage after it, that stage's parity), an Ahead.

        Call after the last Q K^T step: polling is slow, and among the steps it stalls WGMMA.
        """
        arrived = Int32(cute.arch.mbarrier_test_wait(ring.full + index, phase))
        address = self.address(ring.keys, index)
        following, phase_following = self.advance(index, phase)
        return Ahead(arrived, address, following, phase_following)

    @cute.jit
    def stage_tensors(self, ring: cutlass.Constexpr, address: Int32):
        """The keys and the P of the stage at `address`, for WGMMA."""
        keys_ptr = cute.make_ptr(self.dtype, address, cute.AddressSpace.smem, assumed_align=1024)
        p_ptr = cute.make_ptr(self.p_dtype, address + self.p_offset, cute.AddressSpace.smem, assumed_align=1024)
        keys_swizzle = warpgroup.make_smem_layout_atom(self.keys_swizzle, self.dtype).inner
        p_swizzle = warpgroup.make_smem_layout_atom(self.p_swizzle, self.p_dtype).inner
        keys = cute.make_tensor(
            cute.recast_ptr(keys_ptr, keys_swizzle, dtype=self.dtype), cute.slice_(ring.keys.layout, (None, None, 0))
        )
        p = cute.make_tensor(
            cute.recast_ptr(p_ptr, p_swizzle, dtype=self.p_dtype), cute.slice_(ring.p.layout, (None, None, 0))
        )
        return keys, p

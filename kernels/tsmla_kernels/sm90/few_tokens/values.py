"""few_token_values: the pieces of one token's attention merged, and the product of each head with W_UV, in one launch.

It takes the place of mla_decode's second kernel. The pieces are those of one row tile, whose first piece the first
cluster makes: so they lie in its odd slot, and in the even slots of the clusters behind it.
"""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
from cutlass import BFloat16, Float32, Int32, Int64

from tsmla_kernels.cache_ops.kernels import load
from tsmla_kernels.sm90.constants import LOWEST
from tsmla_kernels.sm90.few_tokens.config import WARPS
from tsmla_kernels.sm90.few_tokens.ring import pair_of
from tsmla_kernels.sm90.few_tokens.tile import LINE, THREADS, start, warp_sum
from tsmla_kernels.sm90.few_tokens.values_config import LATENT, ValuesConfig
from tsmla_kernels.sm90.latent.memory import Busy, SplitEntry
from tsmla_kernels.sm90.warp import DTYPES

OCTET = 8
"""Columns that a thread merges."""
OCTETS = LATENT // OCTET
GROUPS = THREADS // OCTETS
"""Groups of threads that share the pieces."""
ENTRY = 1
"""The entry of split_info that describes the row tile."""
LANE_COLUMNS = LATENT // 32


class Arrays(NamedTuple):
    """The arrays of a launch, for H heads and S slots.

    Attributes:
      latents: [H, L] bf16, the result of a row tile that was not cut.
      partial_out, partial_lse, split_info: the workspaces of mla_decode.
      w_uv: [H, V, L] bf16. out: [1, H V] bf16.
    """

    latents: cute.Tensor
    partial_out: cute.Tensor
    partial_lse: cute.Tensor
    split_info: cute.Tensor
    w_uv: cute.Tensor
    out: cute.Tensor


class Sums(NamedTuple):
    """Shared memory: the groups' sums [GROUPS, L], their greatest log weights and sums of weights [GROUPS], and the
    merged latent [L]; f32."""

    latents: cute.Tensor
    highest: cute.Tensor
    weights: cute.Tensor
    merged: cute.Tensor


class FewTokenValues:
    """few_token_values: `config` is static, all other sizes are dynamic. A CTA has config.rows rows of a head's W_UV;
    it merges that head's pieces for itself."""

    def __init__(self, config: ValuesConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(self, stream: cuda.CUstream, *operands: cute.Tensor):
        arrays = Arrays(*operands)

        @cute.struct
        class Storage:
            latents: cute.struct.Align[cute.struct.MemRange[Float32, GROUPS * LATENT], 16]
            merged: cute.struct.Align[cute.struct.MemRange[Float32, LATENT], 16]
            highest: cute.struct.MemRange[Float32, GROUPS]
            weights: cute.struct.MemRange[Float32, GROUPS]

        self.storage = Storage
        start(self.project(arrays), stream, arrays.out.shape[1] // self.config.rows)

    @cute.kernel
    def project(self, arrays: Arrays):
        """Merge a head's pieces, and compute the CTA's columns."""
        rows, thread = self.config.rows, cute.arch.thread_idx()[0]
        storage = utils.SmemAllocator().allocate(self.storage)
        sums = Sums(
            storage.latents.get_tensor(cute.make_layout((GROUPS, LATENT), stride=(LATENT, 1))),
            storage.highest.get_tensor(cute.make_layout(GROUPS)),
            storage.weights.get_tensor(cute.make_layout(GROUPS)),
            storage.merged.get_tensor(cute.make_layout(LATENT)),
        )
        begin = cute.arch.block_idx()[0] * rows
        head = begin // Int32(arrays.w_uv.shape[1])
        weight = arrays.w_uv.iterator.toint() + Int64(begin) * (2 * LATENT)
        cute.arch.griddepcontrol_launch_dependents()
        for line in cutlass.range(thread, rows * (2 * LATENT) // LINE, THREADS, unroll=1):
            cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[weight + line * LINE])
        cute.arch.griddepcontrol_wait()
        entry = load(Int32, arrays.split_info.iterator.toint() + ENTRY * len(SplitEntry) * 4, len(SplitEntry))
        count = entry[SplitEntry.PIECES] & (Busy.FIRST - 1)
        if count > 0:
            self.merge(arrays, sums, head, count)
        elif thread < OCTETS:
            found = load(BFloat16, arrays.latents.iterator.toint() + (head * LATENT + thread * OCTET) * 2, OCTET)
            for i in cutlass.range_constexpr(OCTET):
                sums.merged[thread * OCTET + i] = found[i].to(Float32)
        cute.arch.sync_threads()
        self.multiply(arrays, sums, begin, weight)

    @cute.jit
    def merge(self, arrays: Arrays, sums: Sums, head: Int32, count: Int32) -> None:
        """The mean of the pieces' results, weighted by exp2(their lse), rounded to bf16."""
        thread = cute.arch.thread_idx()[0]
        octet, group = thread % OCTETS, cute.arch.make_warp_uniform(thread // OCTETS)
        tile_rows = Int32(arrays.partial_out.shape[1])
        dtype = DTYPES[self.config.partial_dtype]
        acc = cute.make_rmem_tensor((OCTET,), Float32)
        acc.fill(0.0)
        highest, total = Float32(LOWEST), Float32(0.0)
        for piece in cutlass.range(group, count, GROUPS, unroll=2):
            slot = 2 * piece
            if piece == 0:
                slot = Int32(ENTRY)
            numbers = arrays.partial_lse.iterator.toint() + Int64(slot * 3 * tile_rows + head) * 4
            lse = load(Float32, numbers, 1)[0]
            scale = load(Float32, numbers + (1 + octet // (OCTETS // 2)) * tile_rows * 4, 1)[0]
            place = Int64(slot * tile_rows + head) * LATENT + octet * OCTET
            line = load(dtype, arrays.partial_out.iterator.toint() + place * (dtype.width // 8), OCTET)
            top = cute.arch.fmax(highest, lse)
            before, weight = cute.math.exp2(highest - top, fastmath=True), cute.math.exp2(lse - top, fastmath=True)
            highest, total = top, total * before + weight
            for i in cutlass.range_constexpr(OCTET):
                acc[i] = acc[i] * before + weight * scale * line[i].to(Float32)
        for i in cutlass.range_constexpr(OCTET):
            sums.latents[group, self.column(octet, i)] = acc[i]
        if octet == 0:
            sums.highest[group], sums.weights[group] = highest, total
        cute.arch.sync_threads()
        top, total = sums.highest[0], Float32(0.0)
        for other in cutlass.range_constexpr(1, GROUPS):
            top = cute.arch.fmax(top, sums.highest[other])
        shares = cute.make_rmem_tensor((GROUPS,), Float32)
        for other in cutlass.range_constexpr(GROUPS):
            shares[other] = cute.math.exp2(sums.highest[other] - top, fastmath=True)
            total = total + shares[other] * sums.weights[other]
        inverse = Float32(0.0)
        if (total > 0.0) | (total != total):
            inverse = cute.arch.rcp_approx(total)
        for i in cutlass.range_constexpr(LATENT // THREADS):
            column, value = thread + i * THREADS, Float32(0.0)
            for other in cutlass.range_constexpr(GROUPS):
                value = value + shares[other] * sums.latents[other, column]
            sums.merged[column] = (value * inverse).to(BFloat16).to(Float32)

    def column(self, octet: Int32, index: int) -> Int32:
        """The column of a piece's result that is stored as number `index` of an octet."""
        if not self.config.lane_order:
            return octet * OCTET + index
        # The four octets of 32 columns have two from each group of eight.
        return octet // 4 * 32 + index // 2 * OCTET + octet % 4 * 2 + index % 2

    @cute.jit
    def multiply(self, arrays: Arrays, sums: Sums, begin: Int32, weight: Int64) -> None:
        """Compute the products of the merged latent: a warp has every WARPS-th row, a lane LANE_COLUMNS columns."""
        warp, lane = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 32), cute.arch.lane_idx()
        x = cute.make_rmem_tensor((LANE_COLUMNS,), Float32)
        for part in cutlass.range_constexpr(LANE_COLUMNS // OCTET):
            for i in cutlass.range_constexpr(OCTET):
                x[part * OCTET + i] = sums.merged[(part * 32 + lane) * OCTET + i]
        for row in cutlass.range(warp, self.config.rows, WARPS, unroll=2):
            total = Float32(0.0)
            for part in cutlass.range_constexpr(LANE_COLUMNS // OCTET):
                address = weight + Int64(row) * (2 * LATENT) + (part * 32 + lane) * (2 * OCTET)
                words = load(Int32, address, OCTET // 2)
                for i in cutlass.range_constexpr(OCTET // 2):
                    low, high = pair_of(words[i])
                    total = total + low * x[part * OCTET + 2 * i] + high * x[part * OCTET + 2 * i + 1]
            total = warp_sum(total)
            if lane == 0:
                arrays.out[0, begin + row] = total.to(BFloat16)

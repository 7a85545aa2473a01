"""few_token_outputs: the inverse rope of one token's attention in V4, and its grouped product, in one launch."""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
from cutlass import BFloat16, Float32, Int32, Int64

from tsmla_kernels.cache_ops.kernels import load
from tsmla_kernels.sm90.few_tokens.config import HALVES, TOKEN_TILE, WARPS
from tsmla_kernels.sm90.few_tokens.latent_config import OutputsConfig
from tsmla_kernels.sm90.few_tokens.ring import (
    COMPUTE_THREADS,
    PAIRS,
    PREFETCHED,
    THREADS,
    VECTOR,
    Ring,
    Scales,
    Shared,
    TileScales,
    Weights,
    pair_of,
)
from tsmla_kernels.sm90.few_tokens.tile import CTAS, Lane, lane, start
from tsmla_kernels.sm90.storage import storage_of_fields


class Arrays(NamedTuple):
    """The arrays of a launch.

    Attributes:
      heads: [1, G K] bf16, the heads' columns side by side. weight: [G, N, K] bf16.
      cos, sin: [1, R / 2] f32, of the token's position. out: [1, G N] bf16.
    """

    heads: cute.Tensor
    weight: cute.Tensor
    cos: cute.Tensor
    sin: cute.Tensor
    out: cute.Tensor


class FewTokenOutputs:
    """few_token_outputs: `config` is static, all other sizes are dynamic. Weights come through a ring; a tile has eight
    rows, whose halves are multiplied at once. A CTA has config.tiles tiles of one group, so that it needs the terms of
    that group alone. Pairs (2i, 2i + 1) of a head's last columns are rotated back on their way to shared memory."""

    def __init__(self, config: OutputsConfig) -> None:
        self.config = config
        self.ring = Ring(HALVES, config.loads, narrow=False)

    @cute.jit
    def __call__(self, stream: cuda.CUstream, *operands: cute.Tensor):
        arrays = Arrays(*operands)
        self.storage = storage_of_fields(self.ring.fields, self.config)
        ctas = Int32(arrays.out.shape[1]) // (TOKEN_TILE * self.config.tiles)
        start(self.multiply(arrays), stream, ctas, ctas=CTAS, threads=THREADS)

    @cute.kernel
    def multiply(self, arrays: Arrays):
        """Compute the columns of a CTA's tiles."""
        tiles, warp = self.config.tiles, cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 32)
        shared = self.ring.shared(utils.SmemAllocator().allocate(self.storage))
        first = cute.arch.block_idx()[0] * tiles
        cute.arch.griddepcontrol_launch_dependents()
        if warp < WARPS:
            ahead = cutlass.max(PREFETCHED // Int32(arrays.weight.shape[2]), 1)  # a row's half has so many bytes
            for tile in cutlass.range(first, first + cutlass.min(ahead, tiles), unroll=1):
                self.ring.prefetch(self.rows(arrays, tile))
        self.ring.open(shared)
        cute.arch.griddepcontrol_wait()
        count, none = Int32(0), Scales(Int64(0), Int64(0))
        if warp >= WARPS:
            for tile in cutlass.range(first, first + tiles, unroll=1):
                count = self.ring.fill(shared, self.rows(arrays, tile), none, count, warp)
        else:
            factor, turn = self.put_terms(arrays, shared, first), Int32(0)
            place, unscaled = lane(), TileScales(none, None, None)
            for tile in cutlass.range(first, first + tiles, unroll=1):
                totals = cute.make_rmem_tensor((4,), Float32)
                totals.fill(0.0)
                rows = self.rows(arrays, tile)
                count = self.ring.multiply(shared, place, rows, unscaled, shared.terms, count, factor, totals)
                self.store(arrays, shared, place, totals, tile, turn)
                turn += 1

    def rows(self, arrays: Arrays, tile: Int32) -> Weights:
        """A tile's weights."""
        pitch = Int32(arrays.weight.shape[2]) * 2
        first = arrays.weight.iterator.toint() + Int64(tile * TOKEN_TILE) * Int64(pitch)
        return Weights(first, first + pitch // 2, Int64(pitch), pitch // 2)

    @cute.jit
    def put_terms(self, arrays: Arrays, shared: Shared, tile: Int32):
        """Bring the terms of a tile's group to shared memory, rotated back. Returns the factor of the sums."""
        config, terms = self.config, Int32(arrays.weight.shape[2])
        group = tile * TOKEN_TILE // Int32(arrays.weight.shape[1])
        pairs = self.ring.held()
        self.ring.load_terms(arrays.heads.iterator.toint() + Int64(group) * Int64(terms) * 2, terms, pairs)
        for i in cutlass.range_constexpr(config.loads):
            index = (cute.arch.thread_idx()[0] + i * COMPUTE_THREADS) * VECTOR
            column = index % config.head_dim - (config.head_dim - config.rope_dim)
            if column >= 0:
                angles = [load(Float32, part.iterator.toint() + column * 2, PAIRS) for part in (arrays.cos, arrays.sin)]
                for j in cutlass.range_constexpr(PAIRS):
                    (even, odd), cos, sin = pair_of(pairs[i * PAIRS + j]), angles[0][j], angles[1][j]
                    turned = cute.make_rmem_tensor((2,), BFloat16)
                    turned[0] = (even * cos + odd * sin).to(BFloat16)
                    turned[1] = (odd * cos - even * sin).to(BFloat16)
                    pairs[i * PAIRS + j] = cute.recast_tensor(turned, Int32)[0]
        return self.ring.put_terms(shared, pairs, terms, Int64(0), None)

    @cute.jit
    def store(self, arrays: Arrays, shared: Shared, place: Lane, totals: cute.Tensor, tile: Int32, turn: Int32) -> None:
        """Store a tile's columns."""
        result = self.ring.total(shared, place, totals, turn)
        index = cute.arch.lane_idx()
        if (place.warp == turn % WARPS) & (index < TOKEN_TILE):
            arrays.out[0, tile * TOKEN_TILE + index] = result.to(BFloat16)

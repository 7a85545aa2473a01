"""few_token_choose_up: one token's choice of experts, its norm, and the gated first products of its experts, whose
weights come through a ring, in one launch."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
from cutlass import BFloat16, Float32, Int32, Int64, const_expr

from tsmla_kernels.sm90.few_tokens.choice import Choice
from tsmla_kernels.sm90.few_tokens.choose_up import Chosen
from tsmla_kernels.sm90.few_tokens.config import MOST_TOKENS, SIXTEEN, TOKEN_TILE, UNIT, WARPS, ChoiceConfig
from tsmla_kernels.sm90.few_tokens.experts_up import Arrays
from tsmla_kernels.sm90.few_tokens.ring import (
    COPYING,
    NO_SCALES,
    READY,
    THREADS,
    Ring,
    Scales,
    Shared,
    TileScales,
    Weights,
    launch,
)
from tsmla_kernels.sm90.few_tokens.tile import LINE, Lane, lane, matrix_of, silu_product
from tsmla_kernels.sm90.storage import storage_of_fields
from tsmla_kernels.sm90.warp import divide

AHEAD_BYTES = 1 << 16
"""Bytes of the second products' weights that come to L2 for each CTA."""


class OneTokenChooseUp:
    """few_token_choose_up by a ring: `config` is static, all other sizes are dynamic. A tile has eight columns of an
    expert. Tiles of the shared experts come first, since they are known before the choice: they are on their way while
    both warps that copy make it."""

    def __init__(self, config: ChoiceConfig) -> None:
        self.config, self.choice = config, Choice(config)
        self.normed = config.eps is not None
        self.ring = Ring(SIXTEEN, config.loads, narrow=config.narrow)

    @cute.jit
    def __call__(self, stream: cuda.CUstream, *operands: cute.Tensor):
        config = self.config
        names = ["x", "weight", *["scales"] * config.narrow, *["norm"] * self.normed]
        names += ["logits", *["bias"] * config.biased, *["down"] * bool(config.ahead), "out", "experts", "weights"]
        given = dict(zip(names, operands, strict=True))
        chosen = Chosen(**{name: given.pop(name) for name in Chosen._fields if name in given})
        arrays = Arrays(experts=chosen.experts, **given)

        fields = self.ring.fields | {"experts": cute.struct.MemRange[Int32, MOST_TOKENS]}
        self.storage = storage_of_fields(fields, config)
        launch(
            self.multiply(arrays, chosen), stream, cute.ceil_div(arrays.out.shape[1], TOKEN_TILE) * arrays.out.shape[0]
        )

    @cute.kernel
    def multiply(self, arrays: Arrays, chosen: Chosen):
        """Choose, and compute the columns of a CTA's tiles."""
        config = self.config
        thread = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(thread // 32)
        storage = utils.SmemAllocator().allocate(self.storage)
        shared = self.ring.shared(storage)
        experts = storage.experts.get_tensor(cute.make_layout(MOST_TOKENS))
        first, step = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        columns = Int32(arrays.out.shape[1]) // TOKEN_TILE
        tiles = columns * config.choices
        cute.arch.griddepcontrol_launch_dependents()
        if const_expr(config.num_shared):
            if (warp < WARPS) & (first < columns * config.num_shared):
                place, tile = self.place_of(first, columns)
                self.ring.prefetch(self.rows(arrays, place + (config.num_experts - config.top_k), tile))
        self.ring.open(shared)
        cute.arch.griddepcontrol_wait()
        count, of_shared = Int32(0), columns * config.num_shared
        if warp >= WARPS:
            for index in cutlass.range(first, of_shared, step, unroll=1):
                place, tile = self.place_of(index, columns)
                expert = place + (config.num_experts - config.top_k)
                if expert < self.count(arrays):
                    rows, scales = self.rows(arrays, expert, tile), self.scales(arrays, expert, tile)
                    count = self.ring.fill(shared, rows, scales, count, warp)
            mine, weight = self.choice.choose(chosen.logits, chosen.bias)
            index = cute.arch.lane_idx()
            if (index < config.choices) & (warp == WARPS):
                experts[index] = mine
                if first == 0:
                    chosen.experts[0, index] = mine
                    chosen.weights[0, index] = weight
            cute.arch.barrier_arrive(barrier_id=READY, number_of_threads=THREADS)
            begin = first
            if first < of_shared:
                begin += cute.ceil_div(of_shared - first, step) * step
            for index in cutlass.range(begin, tiles, step, unroll=1):
                place, tile = self.place_of(index, columns)
                expert = cute.arch.shuffle_sync(mine, place)
                if expert < self.count(arrays):
                    rows, scales = self.rows(arrays, expert, tile), self.scales(arrays, expert, tile)
                    count = self.ring.fill(shared, rows, scales, count, warp)
            if const_expr(config.ahead):
                self.prefetch_down(arrays, chosen, mine, warp)
        else:
            factor, turn, ready = self.put_terms(arrays, shared), Int32(0), Int32(0)
            here, held = lane(), self.ring.held_scales()
            for index in cutlass.range(first, tiles, step, unroll=1):
                place, tile = self.place_of(index, columns)
                expert = place + (config.num_experts - config.top_k)
                if place < config.top_k:
                    if ready == 0:
                        cute.arch.barrier(barrier_id=READY, number_of_threads=THREADS)
                        ready = Int32(1)
                    expert = experts[place]
                if expert < self.count(arrays):
                    totals = cute.make_rmem_tensor((4,), Float32)
                    totals.fill(0.0)
                    rows, scales = self.rows(arrays, expert, tile), self.scales(arrays, expert, tile)
                    following = None
                    if const_expr(self.config.narrow):
                        following = self.following(arrays, experts, index + step, columns, ready)
                    given = TileScales(scales, following, held)
                    count = self.ring.multiply(shared, here, rows, given, shared.terms, count, Float32(1.0), totals)
                    self.store(arrays, shared, here, totals, place, tile, turn, factor)
                    turn += 1
            if ready == 0:
                cute.arch.barrier(barrier_id=READY, number_of_threads=THREADS)

    @cute.jit
    def prefetch_down(self, arrays: Arrays, chosen: Chosen, mine: Int32, warp: Int32) -> None:
        """Bring the weights to L2 that this CTA multiplies first in few_token_experts_down, while the last stages of
        the ring are multiplied. mine: the expert of the choice with this lane's index."""
        rows, begin = self.config.ahead, cute.arch.block_idx()[0]
        size = Int32(chosen.down.shape[2]) * (rows * chosen.down.element_type.width // 8)
        if begin < Int32(chosen.down.shape[1]) // rows:
            for place in cutlass.range(cutlass.min(AHEAD_BYTES // size, self.config.choices), unroll=1):
                expert = cute.arch.shuffle_sync(mine, place)
                if expert < self.count(arrays):
                    first = matrix_of(chosen.down, expert) + Int64(begin) * Int64(size)
                    index = (warp - WARPS) * 32 + cute.arch.lane_idx()
                    for line in cutlass.range(index, size // LINE, 32 * COPYING, unroll=1):
                        cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[first + line * LINE])

    def count(self, arrays: Arrays) -> Int32:
        """How many experts there are. A stack of e4m3 matrices may have unused ones at its end, so its scales are
        counted."""
        return Int32((arrays.scales if self.config.narrow else arrays.weight).shape[0])

    def place_of(self, index: Int32, columns: Int32) -> tuple[Int32, Int32]:
        """The choice, and the tile of the choice's expert, of the tile with this index; the last choices come first.
        columns: the tiles of an expert."""
        turn = divide(index, columns)
        return self.config.choices - 1 - turn, index - turn * columns

    def rows(self, arrays: Arrays, expert: Int32, tile: Int32) -> Weights:
        """A tile's weights."""
        pitch = Int32(arrays.weight.shape[2]) * (arrays.weight.element_type.width // 8)
        first = matrix_of(arrays.weight, expert) + Int64(tile * TOKEN_TILE) * Int64(pitch)
        return Weights(first, first + Int64(arrays.out.shape[1]) * Int64(pitch), Int64(pitch), pitch)

    def scales(self, arrays: Arrays, expert: Int32, tile: Int32) -> Scales:
        """Where a tile's scales begin."""
        if const_expr(not self.config.narrow):
            return Scales(Int64(0), Int64(0))
        blocks, begin = matrix_of(arrays.scales, expert), tile * TOKEN_TILE
        of_row = Int64(arrays.scales.shape[2]) * 4
        second = begin + Int32(arrays.out.shape[1])
        return Scales(blocks + Int64(begin // UNIT) * of_row, blocks + Int64(second // UNIT) * of_row)

    @cute.jit
    def following(self, arrays: Arrays, experts: cute.Tensor, index: Int32, columns: Int32, ready: Int32):
        """The scales of the tile with this index; none if there is no such tile, or if its expert is not chosen yet.
        ready: whether `experts` holds the choice."""
        place, tile = self.place_of(cutlass.min(index, columns * self.config.choices - 1), columns)
        expert = place + (self.config.num_experts - self.config.top_k)
        if place < self.config.top_k:
            expert = self.count(arrays)
            if ready == 1:
                expert = experts[place]
        first, second = Int64(NO_SCALES), Int64(NO_SCALES)
        if expert < self.count(arrays):
            scales = self.scales(arrays, expert, tile)
            first, second = scales.first, scales.second
        return Scales(first, second)

    @cute.jit
    def put_terms(self, arrays: Arrays, shared: Shared):
        """Bring the token's terms to shared memory. Returns the factor of the sums."""
        norm = arrays.norm.iterator.toint() if const_expr(self.normed) else Int64(0)
        return self.ring.put_row(
            shared, arrays.x.iterator.toint(), norm, Int32(arrays.weight.shape[2]), self.config.eps
        )

    @cute.jit
    def store(
        self,
        arrays: Arrays,
        shared: Shared,
        here: Lane,
        totals: cute.Tensor,
        place: Int32,
        tile: Int32,
        turn: Int32,
        factor: Float32,
    ) -> None:
        """Store a tile's columns of the choice `place`."""
        gate = self.ring.total(shared, here, totals, turn) * factor
        index = cute.arch.lane_idx()
        if here.warp == turn % WARPS:
            up = cute.arch.shuffle_sync_bfly(gate, offset=TOKEN_TILE)
            result = silu_product(gate, up, self.config.limit)
            if index < TOKEN_TILE:
                arrays.out[place, tile * TOKEN_TILE + index] = result.to(BFloat16)

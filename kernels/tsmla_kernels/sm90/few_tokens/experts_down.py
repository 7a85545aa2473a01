"""few_token_experts_down: the second products of the experts of up to 16 tokens, and their weighted sum with the
residual, in one launch."""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
from cutlass import BFloat16, Float32, Int32, Int64, const_expr

from tsmla_kernels.sm90.few_tokens.config import MOST_TOKENS, TILE_ROWS, TOKEN_TILE, UNIT, WARPS, ExpertsConfig
from tsmla_kernels.sm90.few_tokens.tile import (
    LOAD_BYTES,
    Exchange,
    Operands,
    Rows,
    Shared,
    TileProduct,
    lane,
    matrix_of,
    row_of,
    start,
)
from tsmla_kernels.sm90.storage import storage_of_fields
from tsmla_kernels.sm90.warp import divide

PREFETCHED = 4
"""Units that a warp has on their way to L2 beyond the one that it multiplies."""


class Arrays(NamedTuple):
    """The arrays of a launch, for T tokens with P experts each.

    Attributes:
      x: [T P, I] bf16, a row for each pair of a token and an expert. weight: [E, C, I]. experts: [T, P] i32; an index
        outside of [0, E) stands for no expert. weights: [T, P] f32, the pairs' weights in the sum.
      out: [T, C] bf16.
      scales: [E, C / 128 rounded up, I / 128] f32, if weights are block-scaled; then its first size, not weight's, is
        E.
      residual: [T, C] bf16, if config.residual.
    """

    x: cute.Tensor
    weight: cute.Tensor
    experts: cute.Tensor
    weights: cute.Tensor
    out: cute.Tensor
    scales: cute.Tensor | None = None
    residual: cute.Tensor | None = None


class Tables(NamedTuple):
    """Tables of all pairs in shared memory, i32: their experts; the first pair of each expert in use, in order; and how
    many such pairs each warp found."""

    experts: cute.Tensor
    leaders: cute.Tensor
    counts: cute.Tensor


class Item(NamedTuple):
    """A unit of an expert's rows: the expert, the unit, and the expert's first pair."""

    expert: Int32
    unit: Int32
    leader: Int32


class FewTokenExpertsDown:
    """few_token_experts_down: `config` is static, all other sizes are dynamic. A CTA has TILE_ROWS columns of the
    result. Its warps share the units of all experts in use, in the order of the experts' first pairs."""

    def __init__(self, config: ExpertsConfig) -> None:
        self.config = config
        self.product = TileProduct(narrow=config.narrow, token_tiles=config.token_tiles, normed=False)
        self.exchange = Exchange(config.token_tiles, False)
        self.pairs = MOST_TOKENS * config.choices

    @cute.jit
    def __call__(self, stream: cuda.CUstream, *operands: cute.Tensor):
        names = ["x", "weight", *["scales"] * self.config.narrow, "experts", "weights"]
        names += [*["residual"] * self.config.residual, "out"]
        arrays = Arrays(**dict(zip(names, operands, strict=True)))

        tables = {"experts": self.pairs, "leaders": self.pairs, "counts": WARPS}
        words = {name: cute.struct.MemRange[Int32, count] for name, count in tables.items()}
        self.storage = storage_of_fields(self.exchange.fields | words, self.config)
        start(self.multiply(arrays), stream, cute.ceil_div(arrays.out.shape[1], TILE_ROWS))

    @cute.kernel
    def multiply(self, arrays: Arrays):
        """Compute a CTA's columns of the result for all tokens."""
        place = lane()
        storage = utils.SmemAllocator().allocate(self.storage)
        shared = self.exchange.shared(storage)
        pairs = cute.make_layout(self.pairs)
        tables = Tables(
            storage.experts.get_tensor(pairs),
            storage.leaders.get_tensor(pairs),
            storage.counts.get_tensor(cute.make_layout(WARPS)),
        )
        begin = cute.arch.block_idx()[0] * TILE_ROWS
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        used = self.list_experts(arrays, tables)
        sums = self.product.sums()
        items = used * (Int32(arrays.weight.shape[2]) // UNIT)
        for i in cutlass.range_constexpr(PREFETCHED):
            self.prefetch(arrays, tables, begin, place.warp + i * WARPS, items)
        for item in cutlass.range(place.warp, items, WARPS, unroll=1):
            self.prefetch(arrays, tables, begin, item + PREFETCHED * WARPS, items)
            self.add_item(arrays, tables, begin, self.item(arrays, tables, item), sums.products)
        self.exchange.publish(shared, sums, place)
        self.store(arrays, shared, begin)

    @cute.jit
    def list_experts(self, arrays: Arrays, tables: Tables) -> Int32:
        """Fill the tables. Returns how many experts are in use."""
        choices, thread = self.config.choices, cute.arch.thread_idx()[0]
        pairs = Int32(arrays.experts.shape[0]) * choices
        count = Int32(arrays.weight.shape[0])
        if const_expr(self.config.narrow):
            count = Int32(arrays.scales.shape[0])
        expert = Int32(-1)
        if thread < pairs:
            expert = arrays.experts[thread // choices, thread % choices]
            tables.experts[thread] = expert
        cute.arch.sync_threads()
        leads = (thread < pairs) & (expert >= 0) & (expert < count)
        for earlier in cutlass.range(0, thread // choices * choices, unroll=4):
            if earlier < pairs:
                if tables.experts[earlier] == expert:
                    leads = cutlass.Boolean(False)
        found = cute.arch.vote_ballot_sync(leads)
        warp = thread // 32
        if thread % 32 == 0:
            tables.counts[warp] = cute.arch.popc(found)
        cute.arch.sync_threads()
        place, total = cute.arch.popc(found & ((Int32(1) << (thread % 32)) - 1)), Int32(0)
        for i in cutlass.range_constexpr(WARPS):
            if i < warp:
                place += tables.counts[i]
            total += tables.counts[i]
        if leads:
            tables.leaders[place] = thread
        cute.arch.sync_threads()
        return total

    @cute.jit
    def item(self, arrays: Arrays, tables: Tables, index: Int32) -> Item:
        """The unit with this index among those of all experts in use."""
        units = Int32(arrays.weight.shape[2]) // UNIT
        order = divide(index, units)
        leader = tables.leaders[order]
        return Item(tables.experts[leader], index - order * units, leader)

    @cute.jit
    def prefetch(self, arrays: Arrays, tables: Tables, begin: Int32, index: Int32, items: Int32) -> None:
        """Bring the unit with this index, if there is one, to L2."""
        if index < items:
            expert, unit, _ = self.item(arrays, tables, index)
            rows = self.rows(arrays, expert, begin)
            self.product.prefetch(rows, unit, unit + 1)

    def rows(self, arrays: Arrays, expert: Int32, begin: Int32) -> Rows:
        """The CTA's rows of an expert."""
        pitch = Int64(arrays.weight.shape[2]) * (arrays.weight.element_type.width // 8)
        top = matrix_of(arrays.weight, expert) + Int64(begin) * pitch
        return Rows(top, top + TOKEN_TILE * pitch, pitch)

    @cute.jit
    def add_item(self, arrays: Arrays, tables: Tables, begin: Int32, item: Item, totals: cute.Tensor) -> None:
        """Add the product of a unit, times the weights of the expert's tokens."""
        place = lane()
        rows = self.rows(arrays, item.expert, begin)
        tokens, factors = [], []
        for i in cutlass.range_constexpr(self.config.token_tiles):
            token = place.row + i * TOKEN_TILE
            pair, factor = self.pair_of(arrays, tables, token, item.expert)
            # A column whose token has not chosen the expert repeats the leader's terms.
            row = pair if pair >= 0 else item.leader
            tokens.append(row_of(arrays.x, row) + place.quad * self.product.quad_bytes)
            for side in cutlass.range_constexpr(2):
                from_lane = (place.quad * 2 + side) * 4
                held = cute.arch.shuffle_sync(pair, from_lane)
                factors.append((held >= 0, cute.arch.shuffle_sync(factor, from_lane)))
        scales = Int64(0)
        if const_expr(self.config.narrow):
            scales = matrix_of(arrays.scales, item.expert)
            scales += Int64(begin // UNIT) * Int64(arrays.scales.shape[2]) * 4
        offset = Int64(place.row) * rows.pitch + place.quad * LOAD_BYTES
        operands = Operands(
            first=rows.first + offset,
            second=rows.second + offset,
            tokens=tokens,
            norm=Int64(0),
            first_scales=scales,
            second_scales=scales,
        )
        sums = self.product.sums()
        self.product.add(operands, item.unit, item.unit + 1, sums)
        for i in cutlass.range_constexpr(4 * self.config.token_tiles):
            is_member, factor = factors[i // 4 * 2 + i % 2]
            # The sums of other columns are of the leader's terms, which may be NaN.
            if is_member:
                totals[i] = totals[i] + sums.products[i] * factor

    @cute.jit
    def pair_of(self, arrays: Arrays, tables: Tables, token: Int32, expert: Int32):
        """The index of the pair of a token and the expert, and its weight; -1 and 0 if there is no such pair."""
        found, factor = Int32(-1), Float32(0.0)
        choices = self.config.choices
        if token < arrays.experts.shape[0]:
            for choice in cutlass.range_constexpr(choices):
                if tables.experts[token * choices + choice] == expert:
                    found = token * choices + choice
            if found >= 0:
                factor = arrays.weights[token, found - token * choices]
        return found, factor

    @cute.jit
    def store(self, arrays: Arrays, shared: Shared, begin: Int32) -> None:
        """Store the CTA's columns: each thread one column of one token."""
        thread = cute.arch.thread_idx()[0]
        value, lane_index = thread // 32, thread % 32
        if value < 4 * self.config.token_tiles:
            token = value // 4 * TOKEN_TILE + lane_index % 4 * 2 + value % 2
            column = begin + lane_index // 4 + value % 4 // 2 * TOKEN_TILE
            if (token < arrays.out.shape[0]) & (column < arrays.out.shape[1]):
                total = self.exchange.total(shared, value, lane_index)
                if const_expr(self.config.residual):
                    total = total + arrays.residual[token, column].to(Float32)
                arrays.out[token, column] = total.to(BFloat16)

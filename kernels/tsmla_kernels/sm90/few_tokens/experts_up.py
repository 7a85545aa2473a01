"""few_token_experts_up: the norm of up to 16 tokens and the gated first products of their experts, in one launch."""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
from cutlass import BFloat16, Float32, Int32, Int64, const_expr

from tsmla_kernels.sm90.few_tokens.config import TOKEN_TILE, UNIT, ExpertsConfig
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
    silu_product,
    start,
)
from tsmla_kernels.sm90.storage import storage_of_fields


class Arrays(NamedTuple):
    """The arrays of a launch, for T tokens with P experts each.

    Attributes:
      x: [T, C] bf16, or wider rows that begin with these columns. weight: [E, 2 I, C]. experts: [T, P] i32; an index
        outside of [0, E) stands for no expert.
      out: [T P, I] bf16; the rows of pairs without an expert are not written.
      scales: [E, 2 I / 128, C / 128] f32, if weights are block-scaled; then its first size, not weight's, is E.
      norm: [C] bf16, if there is a norm.
    """

    x: cute.Tensor
    weight: cute.Tensor
    experts: cute.Tensor
    out: cute.Tensor
    scales: cute.Tensor | None = None
    norm: cute.Tensor | None = None


class ExpertColumns:
    """Device functions that compute eight columns of an expert for all of its tokens."""

    def __init__(self, config: ExpertsConfig) -> None:
        self.config = config
        self.normed = config.eps is not None
        self.product = TileProduct(narrow=config.narrow, token_tiles=config.token_tiles, normed=self.normed)
        self.exchange = Exchange(config.token_tiles, self.normed)

    def count(self, arrays: Arrays) -> Int32:
        """How many experts there are. A stack of e4m3 matrices may have unused ones at its end, so its scales are
        counted."""
        return Int32((arrays.scales if self.config.narrow else arrays.weight).shape[0])

    @cute.jit
    def multiply(self, arrays: Arrays, shared: Shared, expert: Int32, owner: Int32, mine: Int32) -> None:
        """Compute the CTA's columns for all tokens of the expert, of which `owner` is one. mine: in lane t, the index
        of the pair of token t and the expert; -1 if there is no such pair."""
        config = self.config
        place = lane()
        width, terms = Int32(arrays.weight.shape[1]) // 2, Int32(arrays.weight.shape[2])
        begin, units = cute.arch.block_idx()[0] * TOKEN_TILE, terms // UNIT
        pitch = Int64(terms) * (arrays.weight.element_type.width // 8)
        top = matrix_of(arrays.weight, expert) + Int64(begin) * pitch
        below = top + Int64(width) * pitch
        self.product.prefetch(Rows(top, below, pitch), place.warp, units)
        tokens = []
        for i in cutlass.range_constexpr(config.token_tiles):
            # A column whose token has not chosen the expert repeats the owner's terms.
            token = place.row + i * TOKEN_TILE
            held = cute.arch.shuffle_sync(mine, token)
            tokens.append(row_of(arrays.x, token if held >= 0 else owner) + place.quad * self.product.quad_bytes)
        first_scales, second_scales = Int64(0), Int64(0)
        if const_expr(config.narrow):
            blocks = matrix_of(arrays.scales, expert)
            of_row = Int64(arrays.scales.shape[2]) * 4
            first_scales = blocks + Int64(begin // UNIT) * of_row
            second_scales = blocks + Int64((begin + width) // UNIT) * of_row
        operands = Operands(
            first=top + Int64(place.row) * pitch + place.quad * LOAD_BYTES,
            second=below + Int64(place.row) * pitch + place.quad * LOAD_BYTES,
            tokens=tokens,
            norm=arrays.norm.iterator.toint() + place.quad * self.product.quad_bytes
            if const_expr(self.normed)
            else Int64(0),
            first_scales=first_scales,
            second_scales=second_scales,
        )
        sums = self.product.sums()
        self.product.add(operands, place.warp, units, sums)
        self.exchange.publish(shared, sums, place)
        self.store(arrays, shared, mine, begin)

    @cute.jit
    def store(self, arrays: Arrays, shared: Shared, mine: Int32, begin: Int32) -> None:
        """Store the CTA's columns: each thread one column of one token."""
        config = self.config
        thread = cute.arch.thread_idx()[0]
        value, lane_index = thread // 32, thread % 32
        token = value // 2 * TOKEN_TILE + lane_index % 4 * 2 + value % 2
        pair = cute.arch.shuffle_sync(mine, token % 32)
        if value < 2 * config.token_tiles:
            if pair >= 0:
                factor = Float32(1.0)
                if const_expr(self.normed):
                    terms = Int32(arrays.weight.shape[2])
                    factor = self.exchange.inverse_norm(shared, token, terms, config.eps)
                gate = value // 2 * 4 + value % 2
                parts = [self.exchange.total(shared, gate + 2 * i, lane_index) * factor for i in range(2)]
                result = silu_product(parts[0], parts[1], config.limit)
                arrays.out[pair, begin + lane_index // 4] = result.to(BFloat16)


class FewTokenExpertsUp:
    """few_token_experts_up: `config` is static, all other sizes are dynamic. A CTA has eight columns of one pair of a
    token and an expert. The CTAs of an expert's first pair compute the columns for all its tokens; those of its other
    pairs end at once."""

    def __init__(self, config: ExpertsConfig) -> None:
        self.config, self.columns = config, ExpertColumns(config)

    @cute.jit
    def __call__(self, stream: cuda.CUstream, *operands: cute.Tensor):
        names = ["x", "weight", *["scales"] * self.config.narrow, *["norm"] * self.columns.normed, "experts", "out"]
        arrays = Arrays(**dict(zip(names, operands, strict=True)))

        self.storage = storage_of_fields(self.columns.exchange.fields, self.config)
        start(self.multiply(arrays), stream, cute.ceil_div(arrays.out.shape[1], TOKEN_TILE), arrays.out.shape[0])

    @cute.kernel
    def multiply(self, arrays: Arrays):
        """Compute a CTA's columns for all tokens of its expert, if its pair is the first of them."""
        choices = self.config.choices
        pair = cute.arch.block_idx()[1]
        storage = utils.SmemAllocator().allocate(self.storage)
        shared = self.columns.exchange.shared(storage)
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        expert = arrays.experts[pair // choices, pair % choices]
        if (expert >= 0) & (expert < self.columns.count(arrays)):
            mine = self.pair_of(arrays, cute.arch.lane_idx(), expert)
            members = cute.arch.vote_ballot_sync(mine >= 0)
            owner = pair // choices
            if members & ((Int32(1) << owner) - 1) == 0:
                self.columns.multiply(arrays, shared, expert, owner, mine)

    @cute.jit
    def pair_of(self, arrays: Arrays, token: Int32, expert: Int32) -> Int32:
        """The index of the pair of a token and the expert; -1 if there is no such pair."""
        found = Int32(-1)
        if token < arrays.experts.shape[0]:
            for choice in cutlass.range_constexpr(self.config.choices):
                if arrays.experts[token, choice] == expert:
                    found = token * self.config.choices + choice
        return found

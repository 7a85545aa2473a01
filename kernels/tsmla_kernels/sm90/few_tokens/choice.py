"""The choice of a token's experts by one warp, from its logits: as `tsmla_jax.generate.moe.choose_experts` makes it."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from tsmla_kernels.sm90.constants import LN_2
from tsmla_kernels.sm90.few_tokens.config import ChoiceConfig
from tsmla_kernels.sm90.few_tokens.tile import power, warp_sum

NEVER = -(2**31)
"""Below the order of every number."""
NAN = 0x7FC00000
NOBODY = 2**30


class Choice:
    """Device functions of the choice. A lane has `held` consecutive experts, and the lanes of a group of experts are
    consecutive."""

    def __init__(self, config: ChoiceConfig) -> None:
        self.config = config
        self.held = -(-config.num_experts // 32)
        self.group_lanes = max(1, config.num_experts // config.n_group // self.held)

    @cute.jit
    def choose(self, logits: cute.Tensor, bias: cute.Tensor | None):
        """The (expert, weight) of the choice with index `lane`, for the token with these logits [1, E]; the shared
        experts come last, with weight 1. bias [E]: added to the scores that select, if the routing is noaux_tc."""
        config, lane = self.config, cute.arch.lane_idx()
        first = lane * self.held
        scores = cute.make_rmem_tensor((self.held,), Float32)
        for i in cutlass.range_constexpr(self.held):
            scores[i] = Float32(-float("inf"))
            if first + i < config.num_experts:
                scores[i] = logits[0, first + i]
        self.score(scores)
        order = cute.make_rmem_tensor((self.held,), Int32)
        for i in cutlass.range_constexpr(self.held):
            order[i] = Int32(NEVER)
            if first + i < config.num_experts:
                choice = scores[i]
                if const_expr(bias is not None):
                    choice = choice + bias[first + i]
                order[i] = ordered(choice)
        if const_expr(config.limits_groups):
            self.limit_to_groups(order)
        expert, weight = Int32(config.num_experts - config.top_k) + lane, Float32(0.0)
        for place in cutlass.range_constexpr(config.top_k):
            best = order[0]
            for i in cutlass.range_constexpr(1, self.held):
                best = cutlass.max(best, order[i])
            best = cute.arch.warp_redux_sync(best, "max")
            found, score = Int32(NOBODY), Float32(0.0)
            for i in cutlass.range_constexpr(self.held):
                index = self.held - 1 - i
                if order[index] == best:
                    found, score = first + index, scores[index]
            taken = cute.arch.warp_redux_sync(found, "min")
            score = cute.arch.shuffle_sync(score, taken // self.held)
            for i in cutlass.range_constexpr(self.held):
                if first + i == taken:
                    order[i] = Int32(NEVER)
            if lane == place:
                expert, weight = taken, score
        if const_expr(config.norm_topk_prob):
            weight = weight / (warp_sum(weight) + Float32(1e-20))
        weight = weight * Float32(config.routed_scaling_factor)
        if lane >= config.top_k:
            weight = Float32(1.0)
        return expert, weight

    @cute.jit
    def score(self, scores: cute.Tensor) -> None:
        """Replace logits by scores. Entries past the last expert are -inf; their scores are not used."""
        if const_expr(self.config.scoring == "softmax"):
            greatest = scores[0]
            for i in cutlass.range_constexpr(1, self.held):
                greatest = cute.arch.fmax(greatest, scores[i])
            for step in cutlass.range_constexpr(5):
                greatest = cute.arch.fmax(greatest, cute.arch.shuffle_sync_bfly(greatest, offset=1 << step))
            total = Float32(0.0)
            for i in cutlass.range_constexpr(self.held):
                scores[i] = power(scores[i] - greatest)
                total = total + scores[i]
            total = warp_sum(total)
            for i in cutlass.range_constexpr(self.held):
                scores[i] = scores[i] / total
        else:
            for i in cutlass.range_constexpr(self.held):
                if const_expr(self.config.scoring == "sigmoid"):
                    scores[i] = Float32(1.0) / (Float32(1.0) + power(-scores[i]))
                else:
                    scores[i] = cute.math.sqrt(softplus(scores[i]))

    @cute.jit
    def limit_to_groups(self, order: cute.Tensor) -> None:
        """Give experts outside of the best groups the order of -inf. A group's score is that of its best expert or, if
        the routing is noaux_tc, the sum of its two best; NaN counts as infinity."""
        config, lane = self.config, cute.arch.lane_idx()
        first, second = Int32(NEVER), Int32(NEVER)
        for i in cutlass.range_constexpr(self.held):
            second = cutlass.max(second, cutlass.min(first, order[i]))
            first = cutlass.max(first, order[i])
        for step in cutlass.range_constexpr(self.group_lanes.bit_length() - 1):
            other = cute.arch.shuffle_sync_bfly(first, offset=1 << step)
            other_second = cute.arch.shuffle_sync_bfly(second, offset=1 << step)
            second = cutlass.max(cutlass.min(first, other), cutlass.max(second, other_second))
            first = cutlass.max(first, other)
        value = number(first)
        if const_expr(config.routing == "noaux_tc"):
            value = value + number(second)
        counted = cutlass.min(ordered(value), Int32(0x7F800000))
        group, better = lane // self.group_lanes, Int32(0)
        for other_group in cutlass.range_constexpr(config.n_group):
            other = cute.arch.shuffle_sync(counted, other_group * self.group_lanes)
            if (other > counted) | ((other == counted) & (other_group < group)):
                better += 1
        if better >= config.topk_group:
            for i in cutlass.range_constexpr(self.held):
                if order[i] != NEVER:
                    order[i] = ordered(Float32(-float("inf")))


@cute.jit
def ordered(value: Float32) -> Int32:
    """The integer that is ordered as the float is, but -0 below 0; that of NaN is the greatest, so that NaN shows in
    the result."""
    bits = value.bitcast(Int32)
    if bits < 0:
        bits = bits ^ 0x7FFFFFFF
    if value != value:
        bits = Int32(NAN)
    return bits


@cute.jit
def number(order: Int32) -> Float32:
    """The float of an order."""
    bits = order
    if bits < 0:
        bits = bits ^ 0x7FFFFFFF
    return bits.bitcast(Float32)


@cute.jit
def softplus(value: Float32) -> Float32:
    """log(1 + e^value)."""
    magnitude = cute.arch.fmax(value, -value)
    tail = cute.math.log2(Float32(1.0) + power(-magnitude), fastmath=True) * Float32(LN_2)
    return cute.arch.fmax(value, Float32(0.0)) + tail

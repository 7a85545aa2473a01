"""few_token_choose_up: one token's choice of experts, its norm, and the gated first products of its experts, in one
launch."""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass.cute as cute
import cutlass.utils as utils
from cutlass import Int32

from tsmla_kernels.sm90.few_tokens.choice import Choice
from tsmla_kernels.sm90.few_tokens.config import TOKEN_TILE, ChoiceConfig
from tsmla_kernels.sm90.few_tokens.experts_up import Arrays, ExpertColumns
from tsmla_kernels.sm90.few_tokens.tile import start
from tsmla_kernels.sm90.storage import storage_of_fields


class Chosen(NamedTuple):
    """The arrays of the choice: logits [1, E] f32, and the results, experts [1, P] i32 and weights [1, P] f32; bias [E]
    f32, if the routing is noaux_tc; and the weights of the second products, [E, C, I], if config.ahead."""

    logits: cute.Tensor
    experts: cute.Tensor
    weights: cute.Tensor
    bias: cute.Tensor | None = None
    down: cute.Tensor | None = None


class FewTokenChooseUp:
    """few_token_choose_up: `config` is static, all other sizes are dynamic. Every CTA makes the choice for itself; the
    first one stores it."""

    def __init__(self, config: ChoiceConfig) -> None:
        self.config, self.choice = config, Choice(config)
        self.columns = ExpertColumns(config.experts)

    @cute.jit
    def __call__(self, stream: cuda.CUstream, *operands: cute.Tensor):
        config = self.config
        names = ["x", "weight", *["scales"] * config.narrow, *["norm"] * self.columns.normed]
        names += ["logits", *["bias"] * config.biased, "out", "experts", "weights"]
        given = dict(zip(names, operands, strict=True))
        chosen = Chosen(**{name: given.pop(name) for name in Chosen._fields if name in given})
        arrays = Arrays(experts=chosen.experts, **given)

        self.storage = storage_of_fields(self.columns.exchange.fields, self.config)
        start(
            self.multiply(arrays, chosen), stream, cute.ceil_div(arrays.out.shape[1], TOKEN_TILE), arrays.out.shape[0]
        )

    @cute.kernel
    def multiply(self, arrays: Arrays, chosen: Chosen):
        """Choose, and compute a CTA's columns of its expert."""
        place = cute.arch.block_idx()[1]
        storage = utils.SmemAllocator().allocate(self.storage)
        shared = self.columns.exchange.shared(storage)
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        mine, weight = self.choice.choose(chosen.logits, chosen.bias)
        thread = cute.arch.thread_idx()[0]
        if (cute.arch.block_idx()[0] == 0) & (place == 0) & (thread < self.config.choices):
            chosen.experts[0, thread] = mine
            chosen.weights[0, thread] = weight
        expert = cute.arch.shuffle_sync(mine, place)
        if expert < self.columns.count(arrays):
            pair = Int32(-1)
            if cute.arch.lane_idx() == 0:
                pair = place
            self.columns.multiply(arrays, shared, expert, Int32(0), pair)

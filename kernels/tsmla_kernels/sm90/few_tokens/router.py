"""few_token_router: the RMS norm of up to 16 tokens and the logits of their experts, in float32, in one launch."""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
from cutlass import BFloat16, Float32, Int32, const_expr

from tsmla_kernels.cache_ops.kernels import load, widened
from tsmla_kernels.sm90.few_tokens.config import UNIT, WARPS, RouterConfig
from tsmla_kernels.sm90.few_tokens.tile import CTAS, LINE, THREADS, row_of, start, warp_sum

EXPERTS = 2
"""Experts of a CTA: few, so that many multiprocessors share the router."""
VALUES = UNIT // 32
"""Terms of a lane in a unit."""


class Arrays(NamedTuple):
    """The arrays of a launch: x [T, C] bf16, or wider rows that begin with these columns; router [E, C] f32; norm [C]
    bf16, if there is a norm; logits [T, E] f32."""

    x: cute.Tensor
    router: cute.Tensor
    logits: cute.Tensor
    norm: cute.Tensor | None = None


class FewTokenRouter:
    """few_token_router: `config` is static, all sizes are dynamic. The warps of a CTA share the terms of EXPERTS
    experts. Products are computed in float32."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self.normed = config.eps is not None
        self.sums = config.tokens * (EXPERTS + self.normed)

    @cute.jit
    def __call__(self, stream: cuda.CUstream, *operands: cute.Tensor):
        arrays = Arrays(**dict(zip(["x", "router", *["norm"] * self.normed, "logits"], operands, strict=True)))

        @cute.struct
        class Storage:
            sums: cute.struct.MemRange[Float32, WARPS * self.sums]

        self.storage = Storage
        ctas = CTAS if self.config.tokens <= 8 else 1  # the sums of more tokens take more registers
        start(self.multiply(arrays), stream, cute.ceil_div(arrays.router.shape[0], EXPERTS), ctas=ctas)

    @cute.kernel
    def multiply(self, arrays: Arrays):
        """Compute a CTA's logits of all tokens."""
        config, thread = self.config, cute.arch.thread_idx()[0]
        warp, lane = cute.arch.make_warp_uniform(thread // 32), thread % 32
        storage = utils.SmemAllocator().allocate(self.storage)
        shared = storage.sums.get_tensor(cute.make_layout((self.sums, WARPS), stride=(1, self.sums)))
        terms, experts = Int32(arrays.router.shape[1]), Int32(arrays.router.shape[0])
        begin = cute.arch.block_idx()[0] * EXPERTS
        routers = [row_of(arrays.router, cutlass.min(begin + i, experts - 1)) for i in range(EXPERTS)]
        cute.arch.griddepcontrol_launch_dependents()
        for i in cutlass.range_constexpr(EXPERTS):
            for line in cutlass.range(thread, terms * 4 // LINE, THREADS, unroll=1):
                cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[routers[i] + line * LINE])
        count = Int32(arrays.logits.shape[0])
        tokens = [row_of(arrays.x, cutlass.min(Int32(i), count - 1)) for i in range(config.tokens)]
        sums = cute.make_rmem_tensor((self.sums,), Float32)
        sums.fill(0.0)
        cute.arch.griddepcontrol_wait()
        for unit in cutlass.range(warp, terms // UNIT, WARPS, unroll=1):
            column = unit * UNIT + lane * VALUES
            weights = [load(Float32, row + column * 4, VALUES) for row in routers]
            scale = (
                load(BFloat16, arrays.norm.iterator.toint() + column * 2, VALUES) if const_expr(self.normed) else None
            )
            for token in cutlass.range_constexpr(config.tokens):
                x = widened(load(BFloat16, tokens[token] + column * 2, VALUES), Float32(1.0))
                for i in cutlass.range_constexpr(VALUES):
                    value = x[i]
                    if const_expr(scale is not None):
                        square = EXPERTS * config.tokens + token
                        sums[square] = sums[square] + value * value
                        value = value * scale[i].to(Float32)
                    for expert in cutlass.range_constexpr(EXPERTS):
                        at = expert * config.tokens + token
                        sums[at] = sums[at] + value * weights[expert][i]
        for i in cutlass.range_constexpr(self.sums):
            total = warp_sum(sums[i])
            if lane == i % 32:
                shared[i, warp] = total
        cute.arch.sync_threads()
        self.store(arrays, shared, begin, terms)

    @cute.jit
    def store(self, arrays: Arrays, shared: cute.Tensor, begin: Int32, terms: Int32) -> None:
        """Store the CTA's logits: each thread one logit of one token."""
        config, thread = self.config, cute.arch.thread_idx()[0]
        expert, token = thread // config.tokens, thread % config.tokens
        if (thread < EXPERTS * config.tokens) & (token < arrays.logits.shape[0]):
            if begin + expert < arrays.logits.shape[1]:
                total = self.total(shared, thread)
                if const_expr(self.normed):
                    square = self.total(shared, EXPERTS * config.tokens + token)
                    total = total * cute.math.rsqrt(square / Float32(terms) + Float32(config.eps))
                arrays.logits[token, begin + expert] = total

    def total(self, shared: cute.Tensor, value: Int32) -> Float32:
        """The sum over the warps of a value."""
        found = shared[value, 0]
        for warp in range(1, WARPS):
            found = found + shared[value, warp]
        return found

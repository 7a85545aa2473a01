"""Times by the GPU's own clock of what jax and torch launch while the GPU is still busy with something else, so that
the host's time for a launch is not in them: an engine that reads a step behind hides it in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

BUSY_SIZE, BUSY_PRODUCTS = 8192, 4  # some 6 ms


def _read_clock(after: Any, clock: Any) -> None:
    """Low 32 bits of the nanoseconds, behind what makes `after`. Inline assembly needs an operand: zeros are it."""
    del after
    word = jax.ShapeDtypeStruct(clock.shape, jnp.int32)
    zeros = jnp.zeros(clock.shape, jnp.int32)
    code = "mov.u32 $0, $1; mov.u32 $0, %globaltimer_lo;"
    (clock[...],) = plgpu.elementwise_inline_asm(
        code, args=[zeros], constraints="=r,r", pack=1, result_shape_dtypes=[word]
    )


@jax.jit
def _clock(after: jax.Array) -> jax.Array:
    """[32] equal nanoseconds, modulo 2^32, at which `after` [32] has been made."""
    shape = jax.ShapeDtypeStruct((32,), jnp.int32)
    return pl.pallas_call(_read_clock, out_shape=shape, compiler_params=plgpu.CompilerParams(num_warps=1))(after)


@jax.jit
def _busy(matrix: jax.Array) -> jax.Array:
    product = matrix
    for _ in range(BUSY_PRODUCTS):
        product = product @ matrix
    return product[0, :32].astype(jnp.float32)


class JaxClock:
    """Microseconds of the GPU from one call's start to its end."""

    def __init__(self) -> None:
        self.matrix = jnp.full((BUSY_SIZE, BUSY_SIZE), 1 / BUSY_SIZE, jnp.bfloat16)

    def microseconds(self, run: Callable[[], Any]) -> float:
        """Of what `run` starts; it returns arrays and waits for nothing."""
        begin = _clock(_busy(self.matrix))
        results = run()
        end = _clock(jnp.zeros(32))
        jax.block_until_ready((results, begin, end))
        return ((int(end[0]) - int(begin[0])) % 2**32) / 1e3


class TorchClock:
    """The same of what runs on torch's current stream."""

    def __init__(self) -> None:
        import torch

        self.matrix = torch.full((BUSY_SIZE, BUSY_SIZE), 1 / BUSY_SIZE, dtype=torch.bfloat16, device="cuda")

    def microseconds(self, run: Callable[[], Any]) -> float:
        """Of what `run` starts; it waits for nothing."""
        import torch

        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(BUSY_PRODUCTS):
            self.matrix @ self.matrix
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) * 1e3

"""Registers of the warpgroups of a latent attention kernel."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute


class Registers(NamedTuple):
    """How many registers a thread has: at launch, and then in the softmax, the value and the copying warpgroups."""

    start: int
    scores: int
    values: int
    copies: int

    def set(self, count: int) -> None:
        """Give each thread of the calling warpgroup `count` registers."""
        if count > self.start:
            cute.arch.setmaxregister_increase(count)
        else:
            cute.arch.setmaxregister_decrease(count)

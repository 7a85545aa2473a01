"""Decode context parallelism: the keys of a request are dealt to ranks, some at a time."""

from __future__ import annotations

import torch


def held_keys(count: torch.Tensor, world: int, rank: int, interleave: int) -> torch.Tensor:
    """How many of the first `count` keys of a request the rank holds, if `world` ranks take turns of `interleave`."""
    count = count.clamp(min=0)
    rounds = count.div(world * interleave, rounding_mode="floor")
    rest = count - rounds * (world * interleave)
    return rounds * interleave + (rest - rank * interleave).clamp(0, interleave)

"""Decode context parallelism: the keys of a request are dealt to ranks, some at a time."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Deal(NamedTuple):
    """How keys are dealt out: `world` ranks take turns of `interleave` keys.

    rank: the index of this rank.
    """

    world: int
    rank: int
    interleave: int


def visible_keys(
    starts: torch.Tensor, all_lens: torch.Tensor, local_lens: torch.Tensor, num_tokens: int, deal: Deal
) -> torch.Tensor:
    """How many of the rank's keys each query token sees under the causal rule, [T] int32. Computed on the device; no
    value is read on the host.

    Args:
      starts: [B + 1] int32, the first token of each request, and the end. Tokens past the end are padding, which sees
        nothing.
      all_lens: [B] int32, the keys of each request, new ones included.
      local_lens: [B] int32, how many of them the rank holds.
      num_tokens: T.
      deal: how keys are dealt out.
    """
    token = torch.arange(num_tokens, dtype=torch.int32, device=starts.device)
    request = torch.searchsorted(starts[1:], token, right=True)
    is_padding = request >= len(local_lens)
    request = request.clamp(max=len(local_lens) - 1)
    behind = starts[1:][request] - 1 - token  # query tokens of the request that follow this one
    visible = held_keys(all_lens[request] - behind, *deal)
    return torch.minimum(visible, local_lens[request]).masked_fill(is_padding, 0).to(torch.int32)


def visible_keys_of_last(all_lens: torch.Tensor, q_len: int, deal: Deal) -> torch.Tensor:
    """How many of the rank's keys each of a request's last q_len tokens sees, [B, q_len] int32. The last column counts
    all keys of the request that the rank holds.

    Args:
      all_lens: [B] int, the keys of each request, new ones included.
      q_len: how many tokens each request has.
      deal: how keys are dealt out.
    """
    behind = torch.arange(q_len - 1, -1, -1, dtype=torch.int32, device=all_lens.device)
    return held_keys(all_lens[:, None] - behind, *deal).to(torch.int32)


def held_keys(count: torch.Tensor, world: int, rank: int, interleave: int) -> torch.Tensor:
    """How many of the first `count` keys of a request the rank holds, if `world` ranks take turns of `interleave`."""
    count = count.clamp(min=0)
    rounds = count.div(world * interleave, rounding_mode="floor")
    rest = count - rounds * (world * interleave)
    return rounds * interleave + (rest - rank * interleave).clamp(0, interleave)

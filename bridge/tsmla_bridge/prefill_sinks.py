"""Sinks of prefill on torch tensors: a logit a head that takes weight from the keys and has no value.

A row with sinks is the row without them times the keys' share of the weight, 1 / (1 + exp(sink - lse)), where lse is
that of the keys alone. So q, k and v have the gradients of a call without sinks if out's cotangent is multiplied by the
share; out and lse stay as they are.
"""

from __future__ import annotations

import torch


def share(lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """The keys' part of each row's weight [T, H]; any number in rows that see no key."""
    return torch.sigmoid(lse.masked_fill(lse == -torch.inf, 0) - sinks.to(lse.dtype))


def d_sinks(lse: torch.Tensor, out: torch.Tensor, dout: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """The gradient of the sinks [H], in their dtype, from lse [T, H], and out and its cotangent [T, H, V]."""
    unseen = lse == -torch.inf
    weights = torch.sigmoid(sinks.to(lse.dtype) - lse.masked_fill(unseen, 0))
    return -(weights * (dout * out).sum(-1)).masked_fill(unseen, 0).sum(0).to(sinks.dtype)

"""Sinks of prefill on torch tensors: a logit a head that takes weight from the keys and has no value.

With a head's sink s and a row's lse, the row's weights are exp(score - whole) where exp(whole) = exp(lse) + exp(s). So
q, k and v have the gradients of a call without sinks if `whole` stands in the place of lse, and if lse's cotangent is
scaled by exp(whole - lse).
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Absorbed(NamedTuple):
    """The substitutes of lse and its cotangent [T, H] in the gradient of a call with sinks."""

    lse: torch.Tensor
    dlse: torch.Tensor

    @classmethod
    def of(cls, lse: torch.Tensor, dlse: torch.Tensor, sinks: torch.Tensor) -> Absorbed:
        """The substitutes for lse and dlse of a call whose lse is without the sinks."""
        unseen = lse == -torch.inf
        whole = torch.logaddexp(lse, sinks.to(lse.dtype)).masked_fill(unseen, -torch.inf)
        # exp(whole - lse) is infinite where the sink has nearly all weight; a cotangent of 0 stays 0.
        scaled = (dlse * torch.exp(whole - lse)).masked_fill(unseen | (dlse == 0), 0)
        return cls(whole, scaled)

    def weights(self, sinks: torch.Tensor) -> torch.Tensor:
        """The sinks' part of each row's weight [T, H]; 0 in rows that see no key."""
        return torch.exp(sinks.to(self.lse.dtype) - self.lse).masked_fill(self.lse == -torch.inf, 0)

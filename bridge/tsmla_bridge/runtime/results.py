"""Memory of attention's results: the caller's tensors, after a check, or new ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tsmla_bridge.runtime import tensors
from tsmla_bridge.runtime.tensors import DTYPES
from tsmla_kernels import contract

Results = tuple[torch.Tensor, torch.Tensor | None]
"""out, and lse or, if the call did not ask for it, None."""

Computed = tuple[torch.Tensor, torch.Tensor]
"""out and lse."""


@dataclass(frozen=True)
class ResultLayout:
    """Shapes, strides, dtypes and device of a call's results: out is [*rows, width], lse [*rows]."""

    rows: tuple[int, ...]
    row_strides: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    lse_dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, q: torch.Tensor, width: int, out_dtype: str, lse_dtype: str) -> ResultLayout:
        """The layout of the results for queries [*rows, D]; the dtypes are the contract's names."""
        rows = tuple(q.shape[:-1])
        shape = (*rows, width)
        dtypes = DTYPES[out_dtype], DTYPES[lse_dtype]
        return cls(rows, _row_major(rows), shape, _row_major(shape), *dtypes, q.device)

    def take(
        self, return_lse: bool, out: torch.Tensor | None, lse: torch.Tensor | None, read: Mapping[str, Any]
    ) -> Results:
        """The tensors to write to; None for an lse that is not asked for. ValueError / TypeError if return_lse is no
        bool or is False beside an lse, or if one of the caller's tensors can't take its result.

        read: the call's tensors, by argument.
        """
        tensors.check_lse_asked_for(return_lse, lse)
        given = [tensor for tensor in (out, lse) if tensor is not None]
        if out is None:
            out = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
        else:
            tensors.check_output("out", out, self.shape, self.dtype, self.device)
            tensors.check_apart("out", out, read)
        if lse is not None:
            tensors.check_output("lse", lse, self.rows, self.lse_dtype, self.device)
            tensors.check_apart("lse", lse, {"out": out, **read})
        elif return_lse:
            lse = torch.empty_strided(self.rows, self.row_strides, dtype=self.lse_dtype, device=self.device)
        if given:
            tensors.mark_written(*given)
        return out, lse

    def hand_over(
        self,
        computed: Computed,
        return_lse: bool,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        read: Mapping[str, Any],
    ) -> Results:
        """Computed results, copied to where the caller wants them; None for an lse that is not asked for. Without the
        caller's out and lse they are returned as they are, so they keep their derivatives. Raises as `take` does.

        read: as in `take`.
        """
        if out is None and lse is None:
            return computed[0], computed[1] if contract.static_bool("return_lse", return_lse) else None
        out, lse = self.take(return_lse, out, lse, read)
        return out.copy_(computed[0]), None if lse is None else lse.copy_(computed[1])

    def without_keys(self) -> Computed:
        """The results of a call whose queries see no key."""
        out = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        return out, torch.full(self.rows, -math.inf, dtype=self.lse_dtype, device=self.device)


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a dense tensor of this shape."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))

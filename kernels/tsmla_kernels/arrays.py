"""Rules on arrays that both front ends compute, each on its own: they use only what jax.numpy and torch have under the
same name. Imports neither."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

Array = Any
"""An array of jax, or a tensor of torch."""


class Library(NamedTuple):
    """The library of a call's arrays.

    Attributes:
      xp: jax.numpy or torch.
      arange: the function of n that gives 0 to n - 1, int32, on the device of the call's arrays.
      take: the function of an array and of indices on its first axis that gives what they name.
    """

    xp: Any
    arange: Callable[[Any], Array]
    take: Callable[[Array, Array], Array]


class RowOwner(NamedTuple):
    """The request of each packed row, the row's position in it, and whether any request owns the row. Request and
    position of other rows are in bounds and meaningless."""

    request: Array
    position: Array
    owned: Array


def row_owner(library: Library, cu_seqlens: Array, num_rows: Any) -> RowOwner:
    """The owners of num_rows packed rows. Rows before cu_seqlens[0] or from cu_seqlens[B] on belong to no request."""
    xp, rows = library.xp, library.arange(num_rows)
    # The last request that starts at or before the row, which steps over requests of length 0. A search would refuse
    # symbolic sizes of jax.
    request = (cu_seqlens <= rows[:, None]).sum(-1, dtype=xp.int32) - 1
    owned = (rows >= cu_seqlens[0]) & (rows < cu_seqlens[-1])
    request = xp.clip(request, 0, cu_seqlens.shape[0] - 2)
    return RowOwner(request, xp.clip(rows - cu_seqlens[request], 0), owned)

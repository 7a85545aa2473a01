"""A planned call of sparse_mla's kernels, which the forward and the backward pass share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tsmla_jax.ops import transforms
from tsmla_kernels.contract.sparse import SparseMLASpec

Results = tuple[jax.Array, ...]
"""out and lse, and max_logits if the spec has them."""


class Planned(NamedTuple):
    """A call's spec without sizes, and the GPU that it is planned for. lengths, sinks: whether the call has these
    operands. has_gradient: whether the call has a derivative (`sparse_gradient_reasons`). static_scales: the factors of
    the logits and of the caches, if a kernel takes them by value.
    """

    spec: SparseMLASpec
    lengths: bool
    sinks: bool
    has_gradient: bool
    arch: str
    num_sms: int
    static_scales: tuple[float, ...] | None = None

    @property
    def num_rows(self) -> int:
        """How many results have one value for each token and head: lse, and max_logits if the call returns it."""
        return 1 + self.spec.max_logits

    def split(self, arrays: Sequence[Any]) -> Operands:
        """The operands by name."""
        q, *rest = arrays
        count = len(self.spec.caches)
        caches, (indices, *others) = tuple(rest[:count]), rest[count:]
        lengths = others[0] if self.lengths else None
        return Operands(q, caches, indices, lengths, others[-2] if self.sinks else None, others[-1])


class Operands(NamedTuple):
    """The arrays of a call, in the order of the kernel's operands."""

    q: Any
    caches: tuple[Any, ...]
    indices: Any
    lengths: Any
    sinks: Any
    scales: Any

    @property
    def given(self) -> tuple[Any, ...]:
        """The arrays that the call has."""
        every = (self.q, *self.caches, self.indices, self.lengths, self.sinks, self.scales)
        return tuple(array for array in every if array is not None)

    def tokens(self, first: int, stop: int) -> Operands:
        """The operands of tokens first to stop - 1."""
        mine = slice(first, stop)
        lengths = None if self.lengths is None else self.lengths[mine]
        return self._replace(q=self.q[mine], indices=self.indices[mine], lengths=lengths)


def fold_caches(
    call: Planned, axis_size: int, caches: tuple[jax.Array, ...], indices: jax.Array
) -> tuple[tuple[jax.Array, ...], jax.Array] | None:
    """vmap's axis V, which leads in `indices` and in the caches that are batched, becomes more pages, and `indices`
    slots in these. Returns None if there are more slots than int32 can count.
    """
    columns = indices.shape[-1]
    bounds = (0, columns) if call.spec.compressed is None else (0, call.spec.window, columns)
    folded, slots = [], []
    for i, (layout, cache) in enumerate(zip(call.spec.caches, caches, strict=True)):
        section = indices[..., bounds[i] : bounds[i + 1]]
        if cache.ndim > layout.rank:
            each = cache.shape[1] * layout.span
            if not isinstance(each, int) or axis_size * each > transforms.MAX_SLOTS:
                return None
            first = jnp.arange(axis_size, dtype=jnp.int32)[:, None, None] * each
            section = jnp.where((section >= 0) & (section < each), section + first, -1)
            cache = transforms.fold_rows(cache)
        folded.append(cache)
        slots.append(section)
    return tuple(folded), transforms.fold_rows(jnp.concatenate(slots, -1))

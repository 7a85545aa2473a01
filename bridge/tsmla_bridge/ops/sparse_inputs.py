"""The tensors of a sparse_mla call, and its caches as the arrays that kernels read."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tsmla_bridge.runtime import tensors
from tsmla_kernels.contract.layouts import CacheSpec

CACHES = ("kv_cache", "compressed_kv_cache")


class SparseInputs(NamedTuple):
    """The tensors of a call, in the order of the kernel's operands."""

    q: torch.Tensor
    kv_cache: torch.Tensor
    compressed_kv_cache: torch.Tensor | None
    indices: torch.Tensor
    lengths: torch.Tensor | None
    sinks: torch.Tensor | None

    @property
    def caches(self) -> list[torch.Tensor]:
        return [cache for cache in (self.kv_cache, self.compressed_kv_cache) if cache is not None]


class PairInputs(NamedTuple):
    """The tensors of a call whose q is the pair of its latent and its rope columns, in the order of the kernel's
    operands."""

    q: torch.Tensor
    q_rope: torch.Tensor
    kv_cache: torch.Tensor
    compressed_kv_cache: torch.Tensor | None
    indices: torch.Tensor
    lengths: torch.Tensor | None
    sinks: torch.Tensor | None

    def with_q(self, q: torch.Tensor) -> SparseInputs:
        """The same with this q, which has all columns."""
        return SparseInputs(q, *self[2:])


class Pages(NamedTuple):
    """How the kernel reads a cache: as an array of this shape, in which every `step`-th page is the cache's."""

    shape: tuple[int, ...]
    step: int
    spec: CacheSpec

    @classmethod
    def of(cls, name: str, cache: torch.Tensor, spec: CacheSpec) -> Pages:
        """The pages of a cache. ValueError if the kernel can't address it."""
        num_pages, *page = cache.shape
        step = tensors.page_step(cache if cache.dim() == 3 else cache.unsqueeze(1), name)
        if num_pages * step * spec.span >= 2**31:
            raise ValueError(
                f"{name}: got strides {list(cache.stride())} of {num_pages} pages; counted in slots its extent must"
                " stay below 2^31"
            )
        return cls(((num_pages - 1) * step + 1, *page), step, spec)

    def slots(self, slots: torch.Tensor) -> torch.Tensor:
        """Slots of the cache as slots of the array that the kernel reads; invalid ones stay so."""
        if self.step == 1:
            return slots
        valid = (slots >= 0) & (slots < self.spec.num_slots)
        page = slots.div(self.spec.span, rounding_mode="floor")
        return torch.where(valid, slots + page * ((self.step - 1) * self.spec.span), -1)

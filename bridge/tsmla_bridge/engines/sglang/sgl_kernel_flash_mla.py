"""`sgl_kernel.flash_mla` on these kernels: FlashMLA as SGLang imports it up to 0.5.22, from sgl-kernel.

Its functions give the results of package flash_mla, except that schedules are tensors where lengths are given. The
parameters have sgl-kernel's order.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

import torch

from tsmla_bridge.engines.flash_mla import flash_mla_interface
from tsmla_bridge.engines.flash_mla.flash_mla_interface import FlashMLASchedMeta, flash_mla_sparse_fwd

__all__ = ["FlashMLASchedMeta", "flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata"]

NAME = "sgl_kernel.flash_mla"


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds this module under sgl-kernel's name. Python then makes it an attribute of the package sgl_kernel, too, and
    the package need not be imported before."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> Any:
        """The specification of this module, or None for other names."""
        return importlib.machinery.ModuleSpec(fullname, self) if fullname == NAME else None

    def exec_module(self, module: ModuleType) -> None:
        """Put this module in the place of the new one."""
        sys.modules[NAME] = sys.modules[__name__]


_FINDER = _Finder()


def install() -> None:
    """Make `import sgl_kernel.flash_mla` give this module in this process; RuntimeError if sgl-kernel's own was
    imported already."""
    refuse_imported()
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def refuse_imported() -> None:
    """RuntimeError if sgl-kernel's own module of that name was imported already."""
    if sys.modules.get(NAME, sys.modules[__name__]) is not sys.modules[__name__]:
        raise RuntimeError(f"{NAME} was imported already")


def get_mla_metadata(
    cache_seqlens: torch.Tensor | None = None,
    num_q_tokens_per_head_k: int | None = None,
    num_heads_k: int | None = None,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
) -> tuple[FlashMLASchedMeta | torch.Tensor, torch.Tensor | None]:
    """The schedule that flash_mla_with_kvcache takes and ignores: tensors, which SGLang slices and copies, if
    cache_seqlens [B] is given, else a FlashMLASchedMeta and None. The other arguments are ignored."""
    if cache_seqlens is None:
        return FlashMLASchedMeta(), None
    return flash_mla_interface.get_mla_decoding_metadata(cache_seqlens, 1, 1)


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: Any,
    num_splits: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    descale_q: torch.Tensor | None = None,
    descale_k: torch.Tensor | None = None,
    is_fp8_kvcache: bool = False,
    **selecting: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """flash_mla's function of that name, with sgl-kernel's order of parameters.

    is_fp8_kvcache: may be False for an fp8 cache, too.
    selecting: indices, and the arguments that go with them.
    """
    return flash_mla_interface.flash_mla_with_kvcache(
        q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits, softmax_scale, causal,
        is_fp8_kvcache or None, descale_q=descale_q, descale_k=descale_k, **selecting,
    )  # fmt: skip

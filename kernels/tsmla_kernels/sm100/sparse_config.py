"""How the Blackwell kernel of nvidia-cudnn-frontend serves a call of sparse_mla: its static configuration. Imports
neither cutlass nor the package."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tsmla_kernels.contract.sparse import SparseMLASpec

ARCHS = ("sm_100a", "sm_103a")
HEADS = 64  # query heads of one row of q, as the kernel takes it
INDEX_BLOCK = 64  # indices are padded to whole blocks
LATENT_DIM = 512
HEAD_DIMS = (512, 576)
DTYPES = ("bfloat16", "float16")
COMPILER_OPTIONS = "--opt-level 2"  # the package's own
_FP8 = "float8_e4m3fn"

NOTICE = (
    "the kernel of nvidia-cudnn-frontend, compiled for SM100 and SM103 without a GPU of that kind; no result of it was"
    " compared, and it was not run by us"
)
WIDENS = "rows of 8 bits, and those of two caches, are gathered as rows of q's dtype first"


@dataclasses.dataclass(frozen=True)
class SparseConfig:
    """The static facts that an object is compiled for. All else is dynamic.

    Attributes:
      dtype: the dtype of q, of the keys' rows as the kernel reads them, and of out. head_dim: D.
    """

    dtype: str
    head_dim: int


def sparse_reasons(spec: SparseMLASpec) -> list[str]:
    """Why the package's kernel cannot run this call; empty if it can."""
    kernel, reasons = "cuDNN's kernel", []
    if spec.q_dtype not in DTYPES:
        reasons.append(f"q.dtype is {spec.q_dtype}; {kernel} takes {' or '.join(DTYPES)}")
    if spec.head_dim not in HEAD_DIMS or spec.latent_dim != LATENT_DIM:
        reasons.append(
            f"head_dim and latent_dim are {spec.head_dim} and {spec.latent_dim}; {kernel} takes 512 or 576, and 512"
        )
    for name, cache in zip(("kv_cache", "compressed_kv_cache"), spec.caches, strict=False):
        if cache.layout == "plain" and cache.dtype not in (spec.q_dtype, _FP8):
            legal = f"packed rows, {_FP8} or q's dtype, {spec.q_dtype}"
            reasons.append(f"{name}.dtype is {cache.dtype}; {kernel} takes {legal}")
    if spec.max_logits:
        reasons.append(f"return_max_logits is True; {kernel} returns none")
    if spec.batch_invariant:
        reasons.append(f"batch_invariant is True; nobody has checked that of {kernel}")
    if spec.form == "union":
        reasons.append(f"form is 'union'; {kernel} has the direct form alone")
    return reasons


def widens(spec: SparseMLASpec) -> bool:
    """Whether the rows that the kernel reads are made for the call: they are not one plain cache of q's dtype."""
    return spec.compressed is not None or spec.cache.layout != "plain" or spec.cache.dtype != spec.q_dtype


def scale_reasons(spec: SparseMLASpec, factors: Sequence[float] | None) -> list[str]:
    """Why the kernel cannot take a call's scales; empty if it can. `factors` are those of the logits, of kv_cache and
    of compressed_kv_cache; None if one of them is an array."""
    if factors is None:
        return ["softmax_scale, q_scale or a cache's scale is an array; cuDNN's kernel takes numbers"]
    if spec.compressed is not None and factors[1] != factors[2]:
        return [
            f"kv_scale is {factors[1]:g} and compressed_kv_scale {factors[2]:g}; cuDNN's kernel takes one factor for"
            " the rows of both caches"
        ]
    return []


def sparse_config(spec: SparseMLASpec) -> SparseConfig:
    """The configuration that serves `spec`."""
    return SparseConfig(spec.q_dtype, spec.head_dim)

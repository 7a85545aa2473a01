"""How the Blackwell kernel of nvidia-cudnn-frontend serves a call of sparse_mla: its static configuration. Imports
neither cutlass nor the package."""

from __future__ import annotations

import dataclasses
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

NOTICE = (
    "the kernel of nvidia-cudnn-frontend, compiled for SM100 and SM103 without a GPU of that kind; no result of it was"
    " compared, and it was not run by us"
)
WIDENS = "packed rows are widened to q's dtype by XLA first"


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
    if spec.compressed is not None:
        reasons.append(f"compressed_kv_cache is given; {kernel} takes one cache")
    if spec.cache.layout == "plain" and spec.cache.dtype != spec.q_dtype:
        reasons.append(f"kv_cache.dtype is {spec.cache.dtype}; {kernel} takes q's dtype, {spec.q_dtype}")
    if spec.max_logits:
        reasons.append(f"return_max_logits is True; {kernel} returns none")
    if spec.batch_invariant:
        reasons.append(f"batch_invariant is True; nobody has checked that of {kernel}")
    if spec.form == "union":
        reasons.append(f"form is 'union'; {kernel} has the direct form alone")
    return reasons


def sparse_config(spec: SparseMLASpec) -> SparseConfig:
    """The configuration that serves `spec`."""
    return SparseConfig(spec.q_dtype, spec.head_dim)

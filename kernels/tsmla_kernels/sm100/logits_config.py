"""How flashinfer-python's Blackwell kernel serves a call of indexer_logits: its static configuration. Imports neither
cutlass nor the package."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tsmla_kernels.contract import Dim
    from tsmla_kernels.contract.sparse import IndexerLogitsSpec

ARCHS = ("sm_100a", "sm_103a")
HEAD_DIM, ROW_BYTES = 128, 132
KEY_BLOCK = 128  # keys of one matrix product
SPLIT_KEYS = 256  # keys that a CTA takes at once: two products
PAGE_SIZES = (32, 64, 128)
MAX_HEADS = 256
MAX_ELEMENTS = 1 << 31  # the logits must have fewer elements, because the kernel indexes them in 32 bits

NOTICE = (
    "FlashInfer's kernel, compiled for SM100 and SM103 without a GPU of that kind; no result of it was compared, and it"
    " was not run by us"
)


@dataclasses.dataclass(frozen=True)
class LogitsConfig:
    """The static facts that an object is compiled for. All else is dynamic.

    Attributes:
      num_heads: Hi. page_size: Z.
      num_ctas: CTAs that share the work: the number of multiprocessors.
    """

    num_heads: int
    page_size: int = 64
    num_ctas: int = 148


def logits_reasons(spec: IndexerLogitsSpec) -> list[str]:
    """Why FlashInfer's kernel cannot run this call; empty if it can."""
    kernel, cache, reasons = "FlashInfer's kernel", spec.cache, []
    if spec.q_dtype != "float8_e4m3fn":
        reasons.append(f"q's dtype is {spec.q_dtype}; {kernel} takes float8_e4m3fn")
    if not cache.packed:
        reasons.append(f"k_cache's dtype is {spec.cache_dtype}; {kernel} takes packed keys, uint8 [P, Z, 132]")
    if spec.weights_dtype != "float32":
        reasons.append(f"weights' dtype is {spec.weights_dtype}; {kernel} takes float32")
    if spec.head_dim != HEAD_DIM:
        reasons.append(f"head_dim (Di) is {spec.head_dim}; {kernel} takes {HEAD_DIM}")
    if spec.num_heads % 8 or not 8 <= spec.num_heads <= MAX_HEADS:
        reasons.append(f"num_heads (Hi) is {spec.num_heads}; {kernel} takes a multiple of 8 up to {MAX_HEADS}")
    if cache.page_size not in PAGE_SIZES:
        reasons.append(f"page_size (Z) is {cache.page_size}; {kernel} takes 32, 64 or 128")
    columns = padded_columns(spec)
    if not isinstance(spec.num_tokens * columns, int):
        reasons.append(f"the logits have {spec.num_tokens} x {columns} elements; {kernel} takes a number of them")
    elif spec.num_tokens * columns >= MAX_ELEMENTS:
        reasons.append(f"the logits have {spec.num_tokens} x {columns} elements; {kernel} takes less than 2^31")
    return reasons


def padded_columns(spec: IndexerLogitsSpec) -> Dim:
    """How many columns the kernel's logits have: those of the block table, in whole splits."""
    return -(-spec.max_pages * spec.cache.page_size // SPLIT_KEYS) * SPLIT_KEYS


def logits_config(spec: IndexerLogitsSpec, num_sms: int = 148) -> LogitsConfig:
    """The configuration that serves `spec` on a GPU with `num_sms` multiprocessors."""
    return LogitsConfig(spec.num_heads, spec.cache.page_size, num_sms)

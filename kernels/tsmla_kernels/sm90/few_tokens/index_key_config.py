"""The calls that few_token_index_key serves. Imports no cutlass."""

from __future__ import annotations

from dataclasses import dataclass

from tsmla_kernels.contract.layouts import INDEXER
from tsmla_kernels.sm90.few_tokens.config import NORMS, token_reasons


@dataclass(frozen=True)
class IndexKeySpec:
    """A call of few_token_index_key: how many tokens it has; the other fields as in IndexKeyConfig."""

    tokens: int
    norm_dtype: str = "float32"
    rope_dim: int = 64
    rope_layout: str = "interleaved"
    eps: float = 1e-6


@dataclass(frozen=True)
class IndexKeyConfig:
    """The static facts that an object of few_token_index_key is compiled for.

    Attributes:
      norm_dtype: the dtype of the layer norm's weight and bias.
      rope_dim, rope_layout: as in IndexerWriteConfig; the first rope_dim columns of a key are rotated.
      eps: of the layer norm.
    """

    norm_dtype: str = "float32"
    rope_dim: int = 64
    rope_layout: str = "interleaved"
    eps: float = 1e-6


def index_key_reasons(spec: IndexKeySpec) -> list[str]:
    """Why few_token_index_key can't run this call; empty if it can."""
    reasons = token_reasons(spec.tokens)
    if spec.rope_dim % 16 or not 0 < spec.rope_dim <= INDEXER.head_dim:
        legal = f"multiples of 16 to {INDEXER.head_dim}"
        reasons.append(f"{spec.rope_dim} columns have rope; few_token_index_key takes {legal}")
    if spec.norm_dtype not in NORMS:
        reasons.append(f"norm.weight.dtype is {spec.norm_dtype}; few_token_index_key takes {', '.join(NORMS)}")
    return reasons


def index_key_config(spec: IndexKeySpec) -> IndexKeyConfig:
    """The configuration that serves `spec`."""
    return IndexKeyConfig(spec.norm_dtype, spec.rope_dim, spec.rope_layout, spec.eps)

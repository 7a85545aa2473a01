"""Which calls Hopper's kernel of sparse_mla's gradient serves, its configuration and workspaces. Imports no cutlass.

The numbers of tokens, heads, columns of the indices and pages, and all lengths, are dynamic.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from tsmla_kernels.sm90.sparse.union_config import MOST_COLUMNS, PARTS

if TYPE_CHECKING:
    from tsmla_kernels.contract.layouts import CacheSpec
    from tsmla_kernels.contract.rules import Dim
    from tsmla_kernels.contract.sparse import SparseMLASpec

LATENT_DIM = 512
HEAD_DIMS = (512, 576)
DTYPES = ("bfloat16", "float16")
TILE_HEADS = 64  # query rows of a tile: heads of one token, or of a group of tokens
BLOCK = 64  # keys of one step of the main kernel
NUM_SCALES = 3  # size of the operand `scales`, as for sparse_mla's kernel; only the first may differ from 1
MAX_SLOTS = 1 << 31  # rows of both caches together must stay below this
UNION_HEADS = (8, 16, 32)  # multiples of 8, so that eight rows of P are of one token; at most 8 tokens make 64 heads
WORTH = {2: 60, 4: 60, 8: 48}
"""By a group's number of tokens: how many PARTS-ths of the slots that these tokens select a union may have. A key of a
union takes as long as a key of one token; eight tokens' union has to leave room in the hash table that makes it."""


@dataclasses.dataclass(frozen=True)
class SparseBackwardConfig:
    """The static choices of a compiled gradient. Everything else is dynamic.

    Attributes:
      dtype: the dtype of q, the caches, out, out's cotangent and the gradients: "bfloat16" or "float16".
      head_dim: D, the width of a key. Values are its first 512 columns.
      page_size, page_span: rows of a page that are in use, and rows from one page to the next; (0, 0) if all are used.
      window: how many leading columns of the indices select from the first cache; None if there is only one cache.
      compressed_page_size, compressed_page_span: the same for the second cache.
      lengths: whether tokens have lengths; otherwise all columns of the indices are active.
      sinks: whether heads have sinks.
      deterministic: whether the caches' gradients are summed as integers, so that repeated calls give equal bits.
      tokens: how many neighbouring tokens, with TILE_HEADS heads together, may share a tile, over the union of their
        slots; 1 if each token is alone.
    """

    dtype: str
    head_dim: int = 576
    page_size: int = 0
    page_span: int = 0
    window: int | None = None
    compressed_page_size: int = 0
    compressed_page_span: int = 0
    lengths: bool = False
    sinks: bool = False
    deterministic: bool = False
    tokens: int = 1

    @property
    def two_caches(self) -> bool:
        return self.window is not None


def sparse_backward_reasons(spec: SparseMLASpec) -> list[str]:
    """Why the Hopper kernel cannot compute the gradient of this call; empty if it can."""
    reasons = []
    if spec.q_dtype not in DTYPES:
        reasons.append(f"q.dtype is {spec.q_dtype}; the sm_90 sparse gradient takes {' or '.join(DTYPES)}")
    if spec.head_dim not in HEAD_DIMS:
        reasons.append(f"q's D is {spec.head_dim}; the sm_90 sparse gradient takes {' or '.join(map(str, HEAD_DIMS))}")
    if spec.latent_dim != LATENT_DIM:
        reasons.append(f"latent_dim is {spec.latent_dim}; the sm_90 sparse gradient takes {LATENT_DIM}")
    for name, cache in zip(("kv_cache", "compressed_kv_cache"), spec.caches, strict=False):
        if cache.layout != "plain" or cache.dtype != spec.q_dtype:
            reasons.append(
                f"{name} has {cache.layout} rows of {cache.dtype}; the sm_90 sparse gradient takes plain rows of q's"
                f" dtype, {spec.q_dtype}"
            )
    slots = [cache.num_slots for cache in spec.caches]
    if all(isinstance(count, int) for count in slots) and sum(slots) >= MAX_SLOTS:
        reasons.append(f"the caches have {sum(slots)} slots; the sm_90 sparse gradient counts them below 2^31")
    return reasons


def sparse_backward_config(spec: SparseMLASpec, *, lengths: bool = False, sinks: bool = False) -> SparseBackwardConfig:
    """The configuration that serves the gradient of `spec`; `lengths` and `sinks` say whether the call has these
    operands."""
    page_size, page_span = _pages(spec.cache)
    compressed_page_size, compressed_page_span = (0, 0) if spec.compressed is None else _pages(spec.compressed)
    return SparseBackwardConfig(
        dtype=spec.q_dtype,
        head_dim=spec.head_dim,
        page_size=page_size,
        page_span=page_span,
        window=None if spec.compressed is None else spec.window,
        compressed_page_size=compressed_page_size,
        compressed_page_span=compressed_page_span,
        lengths=lengths,
        sinks=sinks,
        deterministic=spec.deterministic,
        tokens=_group_tokens(spec),
    )


def _group_tokens(spec: SparseMLASpec) -> int:
    """How many tokens may share a tile. The device decides for each group of them whether they do."""
    known = isinstance(spec.num_tokens, int) and isinstance(spec.num_selected, int)
    alone = spec.batch_invariant or spec.form == "direct" or spec.num_heads not in UNION_HEADS
    if alone or not known or spec.num_tokens < 2 or spec.num_selected > MOST_COLUMNS:
        return 1
    return TILE_HEADS // spec.num_heads


def _pages(cache: CacheSpec) -> tuple[int, int]:
    """page_size and page_span for `cache`, as the config has them."""
    return (0, 0) if cache.page_size == cache.span else (cache.page_size, cache.span)


def backward_workspaces(
    config: SparseBackwardConfig, num_tokens: Dim, num_heads: Dim, num_selected: Dim, num_slots: Dim
) -> dict[str, tuple[tuple[Dim, ...], str]]:
    """Shapes and dtypes of the kernel's workspaces, in the order of its operands. `num_slots` counts the rows of both
    caches.

    kv_sum: sums of the caches' gradients, a row for each row of the caches: int32 if deterministic, otherwise float32.
    row_terms: for each query row (token * H + head): -lse in base 2; the weight share that the sink leaves; lse's
      cotangent minus share * rowsum(d_out * out).
    kv_carry (if deterministic): int32 sums, in kv_sum's places, of what is too large for kv_sum.
    row_weights (if deterministic): for each query row, two bounds on what a weight of 1 adds to a number of a key's
      gradient: one part for any key, and one for each unit of length of the key's value.
    key_lengths, key_bounds, key_counts (if deterministic): for each row of the caches, the length of its value; the
      bits of the greatest bound on what a tile of heads would add to a number of its gradient if all keys of the token
      had the same weight; how often something is added.
    union_slots, union_bits, union_lengths, token_lengths (if config.tokens > 1): see UnionArrays.
    """
    shapes: dict[str, tuple[tuple[Dim, ...], str]] = {
        "kv_sum": ((num_slots, config.head_dim), "int32" if config.deterministic else "float32"),
        "row_terms": ((3, num_tokens * num_heads), "float32"),
    }
    if config.deterministic:
        shapes["kv_carry"] = ((num_slots, config.head_dim), "int32")
        shapes["row_weights"] = ((2, num_tokens * num_heads), "float32")
        shapes["key_lengths"] = ((num_slots,), "float32")
        shapes |= {name: ((num_slots,), "int32") for name in ("key_bounds", "key_counts")}
    if config.tokens > 1:
        groups = -(-num_tokens // config.tokens)
        columns = -(-(config.tokens * num_selected * WORTH[config.tokens] // PARTS) // BLOCK) * BLOCK
        shapes["union_slots"], shapes["union_bits"] = ((groups, columns), "int32"), ((groups, columns), "uint8")
        shapes["union_lengths"], shapes["token_lengths"] = ((groups,), "int32"), ((num_tokens,), "int32")
    return shapes

"""Which kernel of the packed caches serves a call: static configurations. Imports no cutlass.

A compiled object serves every number of tokens and pages, and every page size. Only the choice of indexer_quantize's
configuration depends on the number of tokens, because few rows are faster with larger CTAs.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from tsmla_kernels.contract.layouts import INDEXER

if TYPE_CHECKING:
    from tsmla_kernels.contract.packed import IndexerQuantizeSpec, IndexerWriteSpec, PackedWriteSpec, Rotation

INPUTS = ("bfloat16", "float16", "float32")
WARPS = 4
LANE_VALUES = 8
"""How many values of an indexer row a lane has; half a warp has all 128."""
FEW_ROWS = 1 << 14
"""Up to this many rows of queries, the time of a launch hardly depends on how many there are."""
FEW_ROWS_WARPS = 16
"""Warps of a CTA for at most FEW_ROWS rows: fewer, larger CTAs take less time to start."""
ROW_LANES = INDEXER.head_dim // LANE_VALUES


@dataclasses.dataclass(frozen=True)
class PackedWriteConfig:
    """The static facts that an object of write_packed_kv_cache is compiled for.

    Attributes:
      in_dtype: the dtype of latent and k_rope.
      rotates: whether k_rope is rotated before it is written.
      rope_interleave: whether the members of a rotated pair are neighbours in k_rope, instead of being in different
        halves.
      rope_layout: "interleaved" or "halves": the same for the rotated values.
      slot_dtype: the dtype of slot_mapping, "int32" or "int64".
    """

    in_dtype: str
    rotates: bool = False
    rope_interleave: bool = True
    rope_layout: str = "interleaved"
    slot_dtype: str = "int32"


@dataclasses.dataclass(frozen=True)
class IndexerWriteConfig:
    """The static facts that an object of write_indexer_cache is compiled for.

    Attributes:
      in_dtype: the dtype of the keys.
      rope_dim: how many columns of a key are rotated; may be 0. rope_offset: the first of these columns.
      rope_layout: "interleaved" or "halves": where the members of a pair are, before and after the rotation.
      slot_dtype: the dtype of slot_mapping, "int32" or "int64".
    """

    in_dtype: str
    rope_dim: int = 0
    rope_offset: int = 0
    rope_layout: str = "halves"
    slot_dtype: str = "int32"


@dataclasses.dataclass(frozen=True)
class IndexerQuantizeConfig:
    """The static facts that an object of indexer_quantize is compiled for.

    Attributes:
      in_dtype: the dtype of q. weights_dtype: the dtype of the head weights.
      num_heads: Hi.
      rope_dim, rope_offset, rope_layout: as in IndexerWriteConfig.
      unroll: rows that half a warp has in flight at once. warps: warps of a CTA.
    """

    in_dtype: str
    weights_dtype: str
    num_heads: int
    rope_dim: int = 0
    rope_offset: int = 0
    rope_layout: str = "halves"
    unroll: int = 4
    warps: int = WARPS

    @property
    def warp_rows(self) -> int:
        """How many neighbouring rows of q a warp has: `unroll` per half."""
        return 2 * self.unroll

    @property
    def constant(self) -> float:
        """The constant factor of the indexer's logits, which is folded into the weights."""
        return float(INDEXER.head_dim**-0.5 * self.num_heads**-0.5)


def packed_write_reasons(spec: PackedWriteSpec) -> list[str]:
    """Why the kernel of write_packed_kv_cache cannot run this call; empty if it can."""
    reasons = _dtype_reasons("latent", spec.in_dtype)
    if spec.rope_dtype != spec.in_dtype:
        reasons.append(f"k_rope.dtype is {spec.rope_dtype}; the kernel takes latent's, {spec.in_dtype}")
    return reasons


def packed_write_config(spec: PackedWriteSpec) -> PackedWriteConfig:
    """The configuration that serves `spec`."""
    if not spec.rotates:
        return PackedWriteConfig(spec.in_dtype, slot_dtype=spec.slot_dtype)
    return PackedWriteConfig(spec.in_dtype, True, spec.rope_interleave, spec.rope_layout, spec.slot_dtype)


def indexer_write_reasons(spec: IndexerWriteSpec) -> list[str]:
    """Why the kernel of write_indexer_cache cannot run this call; empty if it can."""
    if not spec.cache.packed:
        return ["k_cache holds floats; the kernel writes the packed layout of uint8"]
    reasons = _dtype_reasons("k", spec.in_dtype) + _width_reasons(spec.cache.head_dim, spec.rotation)
    if not isinstance(spec.cache.page_size, int) or spec.cache.page_size % 2:
        # A page of Z * 132 bytes must begin at a multiple of 8, because a lane stores 8 bytes at once.
        reasons.append(f"page_size (Z) is {spec.cache.page_size}; the kernel takes even page sizes")
    return reasons


def indexer_write_config(spec: IndexerWriteSpec) -> IndexerWriteConfig:
    """The configuration that serves `spec`."""
    return IndexerWriteConfig(spec.in_dtype, *_rotation(spec.rotation), slot_dtype=spec.slot_dtype)


def indexer_quantize_reasons(spec: IndexerQuantizeSpec) -> list[str]:
    """Why the kernel of indexer_quantize cannot run this call; empty if it can."""
    reasons = _dtype_reasons("q", spec.in_dtype) + _dtype_reasons("weights", spec.weights_dtype)
    return reasons + _width_reasons(spec.head_dim, spec.rotation)


def indexer_quantize_config(spec: IndexerQuantizeSpec) -> IndexerQuantizeConfig:
    """The configuration that serves `spec`."""
    few = isinstance(spec.num_tokens, int) and spec.num_tokens * spec.num_heads <= FEW_ROWS
    unroll, warps = (1, FEW_ROWS_WARPS) if few else (4, WARPS)
    rotation = _rotation(spec.rotation)
    return IndexerQuantizeConfig(spec.in_dtype, spec.weights_dtype, spec.num_heads, *rotation, unroll, warps)


def _rotation(rotation: Rotation | None) -> tuple[int, int, str]:
    return (0, 0, "halves") if rotation is None else (rotation.dim, rotation.offset, rotation.layout)


def _dtype_reasons(name: str, dtype: str) -> list[str]:
    return [] if dtype in INPUTS else [f"{name}.dtype is {dtype}; the kernel takes {', '.join(INPUTS)}"]


def _width_reasons(head_dim: int, rotation: Rotation | None) -> list[str]:
    if head_dim != INDEXER.head_dim:
        return [f"head_dim (Di) is {head_dim}; the kernel takes {INDEXER.head_dim}"]
    if rotation is None:
        return []
    step = 2 * LANE_VALUES if rotation.layout == "halves" else LANE_VALUES
    reasons = []
    if rotation.dim % step:
        reasons.append(
            f"rope_dim (R) is {rotation.dim}; the kernel takes multiples of {step} where rope_layout is"
            f" '{rotation.layout}'"
        )
    if rotation.offset % LANE_VALUES:
        reasons.append(f"rope_offset is {rotation.offset}; the kernel takes multiples of {LANE_VALUES}")
    return reasons

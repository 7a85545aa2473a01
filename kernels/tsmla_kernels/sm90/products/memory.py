"""Records of the kernel of block-scaled products, and its shared memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Int64, Uint8
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.nvgpu.warpgroup import SmemLayoutAtomKind

from tsmla_kernels.sm90.operands import TmaCopy
from tsmla_kernels.sm90.products.config import ProductConfig
from tsmla_kernels.sm90.storage import storage_of_fields
from tsmla_kernels.sm90.warp import DTYPES

TILE_SLOTS, TILE_WORDS = 4, 8
"""How many tiles the copying warp hands to the math warps ahead, and how many words each of them takes."""


class Arrays(NamedTuple):
    """The arrays of a launch, in the order of its operands.

    Attributes:
      x: [R, K], or [T, K] if there are `rows`. weight: [N, K] or [E, N, K] of e4m3, or, if plain, of x's dtype; if
        packed, [N, K / 2] or [E, N, K / 2] bytes.
      x_scales: [R, K / 128], or [T, K / 128] if there are `rows`, rounded up, float32; None if x has 16 bits.
      weight_scales: [N / 128, K / 128] or [E, N / 128, K / 128], rounded up, float32; if packed, the exponents
        [N, K / 32] or [E, N, K / 32], one byte each; None if plain.
      cu_rows: [E + 1] int32; None without groups.
      rows: [R] int32; None if x's rows come in order.
      out: [R, N], if gated [R, N / 2].
      out_scales: [R, N / 256] float32; None unless out is e4m3.
    """

    x: cute.Tensor
    weight: cute.Tensor
    x_scales: cute.Tensor | None
    weight_scales: cute.Tensor | None
    cu_rows: cute.Tensor | None
    rows: cute.Tensor | None
    out: cute.Tensor
    out_scales: cute.Tensor | None


class Tma(NamedTuple):
    """The TMA loads of the weights and of x."""

    weight: TmaCopy
    x: TmaCopy


class Mma(NamedTuple):
    """The tiled MMAs of a block's product: for its first step, and for the steps that add to it."""

    first: cute.TiledMma
    more: cute.TiledMma


class Shared(NamedTuple):
    """A CTA's shared memory: stages of weights, x and their scales with a `full` and an `empty` barrier each, the
    results that the warps are about to store, the greatest magnitudes, or None if config.amax_words is 0, and the tiles
    that the copying warp hands to the math warps, with a `tile_full` and a `tile_empty` barrier each; None unless
    config.handed."""

    weight: cute.Pointer
    x: cute.Pointer
    scales: cute.Pointer
    full: cute.Pointer
    empty: cute.Pointer
    staging: cute.Pointer
    amax: cute.Pointer | None
    tiles: cute.Pointer | None
    tile_full: cute.Pointer | None
    tile_empty: cute.Pointer | None


class Place(NamedTuple):
    """A CTA's place: its cluster's index, its rank in the cluster, and how many clusters there are."""

    cluster: Int32
    rank: Int32
    clusters: Int32


class Tile(NamedTuple):
    """A tile of the result.

    Attributes:
      group: the group whose rows of x and weight the tile multiplies. -1: there are no more tiles.
      row: the tile's first row of the result. rows: how many rows the group has from that row on.
      column: the tile's index along the weight's rows.
      begin, end: blocks of terms that this CTA sums.
    """

    group: Int32
    row: Int32
    rows: Int32
    column: Int32
    begin: Int32
    end: Int32


class Lane(NamedTuple):
    """A thread's place: its math warpgroup, its warp in that warpgroup, and its lane in that warp."""

    group: Int32
    warp: Int32
    lane: Int32


class Walk(NamedTuple):
    """How far a warp has searched the groups, 32 at a time: the first group of the current 32, and how many tiles the
    groups before that group have."""

    group: Int32
    tiles: Int32


def layout_atom(dtype: type[cutlass.Numeric]) -> cute.ComposedLayout:
    """The swizzled layout of weights and x in shared memory: rows of 128 bytes, or of 64 bytes of packed weights."""
    packed = dtype is Uint8
    return warpgroup.make_smem_layout_atom(SmemLayoutAtomKind.K_SW64 if packed else SmemLayoutAtomKind.K_SW128, dtype)


def make_storage(config: ProductConfig) -> Any:
    """The struct of a CTA's shared memory: the parts of Shared.

    Raises:
      ValueError: the struct is larger than a CTA's shared memory.
    """
    stages, arrays = config.stages, cute.struct.MemRange
    fields: dict[str, Any] = {
        "full": arrays[Int64, stages],
        "empty": arrays[Int64, stages],
        "scales": cute.struct.Align[arrays[Float32, stages * config.scale_words], 128],
        "staging": cute.struct.Align[arrays[Int32, config.threads // 32 * config.staging_bytes // 4], 128],
    }
    if config.handed:
        fields["tiles"] = cute.struct.Align[arrays[Int32, TILE_SLOTS * TILE_WORDS], 128]
        fields["tile_full"] = arrays[Int64, TILE_SLOTS]
        fields["tile_empty"] = arrays[Int64, TILE_SLOTS]
    if config.amax_words:
        fields["amax"] = cute.struct.Align[arrays[Float32, config.amax_words], 128]
    # The stages lie together, because the parts of a split sum take their place.
    fields["weight"] = cute.struct.Align[arrays[Float8E4M3FN, stages * config.rows * config.weight_bytes], 1024]
    of_x = stages * config.tokens * config.block_terms
    fields["x"] = cute.struct.Align[arrays[DTYPES[config.x_dtype], of_x], 1024]
    return storage_of_fields(fields, config)


def shared_memory(storage: cute.struct) -> Shared:
    """Views of the allocated `storage`."""
    parts = {name: getattr(storage, name, None) for name in Shared._fields}
    return Shared(**{name: None if part is None else part.data_ptr() for name, part in parts.items()})


def wait_busily(barrier: cute.Pointer, phase: Int32) -> None:
    """Wait for a phase of an mbarrier without the pauses between two tries that mbarrier_wait makes."""
    cute.arch.inline_ptx(
        "{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [{$r0}], {$r1}; @p bra DONE;"
        " bra AGAIN; DONE: }",
        read_only_args=[barrier.toint(), phase],
    )

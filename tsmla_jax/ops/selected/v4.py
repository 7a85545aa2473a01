"""Steps around V4's attention: norm and rope before a row is stored, the mixed index rows, and the inverse rope.

Source: DeepSeek-V4, section 2.3; the index rows are those of the engines' sparse MLA kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from tsmla_jax.ops.exporting import exportable
from tsmla_jax.ops.inputs import describe, describe_ints
from tsmla_jax.ops.selected import checks, numerics
from tsmla_jax.ops.selected.metadata import positions_to_slots, remap_slots
from tsmla_kernels import contract
from tsmla_kernels.contract import FLOATS, layouts, rules
from tsmla_kernels.contract.sparse import INDEX_ROW_ALIGNMENT

if TYPE_CHECKING:
    from tsmla_jax.array_types import Array, Float, Int32


@exportable
@partial(jax.tree_util.register_dataclass, data_fields=["indices", "lengths"], meta_fields=["window"])
@dataclass(frozen=True)
class MixedIndices:
    """Index rows for sparse_mla with two caches, or with the window cache alone.

    Attributes:
      indices: [T, K] int32: `window` columns of window slots (-1 after the last), then compressed slots, then -1; K % 4
        == 0.
      lengths: [T] int32: how many columns are active: window + the row's compressed slots; its window slots, if the
        call has no compressed slots.
      window: static: how many leading columns are window slots.
    """

    indices: jax.Array
    lengths: jax.Array
    window: int


def rope_table(inv_freq: Float[Array, " half"], num_positions: int, *, scale: float = 1.0) -> Float[Array, "N R"]:
    """cos and sin of position * inv_freq, side by side: [num_positions, 2 * half] float32, angles in float32.

    Angles come from a table and are not computed at each use, so that every use of a position has bitwise the same
    ones.

    Args:
      inv_freq: [half] floats.
      num_positions: N, at least 1.
      scale: multiplies both (yarn's attention factor).

    Raises:
      TypeError, ValueError: num_positions is no int, or less than 1; inv_freq or scale is not legal.
    """
    num_positions = contract.static_int("num_positions", num_positions, minimum=1)
    rules.check_array("inv_freq", describe("inv_freq", inv_freq), "half", FLOATS)
    scale = _number("scale", scale)
    angles = jnp.arange(num_positions, dtype=jnp.float32)[:, None] * jnp.asarray(inv_freq, jnp.float32)
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1) * jnp.float32(scale)


def _number(name: str, value: float) -> float:
    """`value` as a float; TypeError unless it is a number, ValueError unless it is finite."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(f"{name}: got {type(value).__name__}; legal: a static float")
    if not np.isfinite(value):
        raise ValueError(f"{name}: got {value}; legal: a finite number")
    return float(value)


def apply_rope(
    x: Float[Array, "T *heads D"],
    positions: Int32[Array, " T"],
    cos_sin: Float[Array, "N R"],
    *,
    inverse: bool = False,
) -> Float[Array, "T *heads D"]:
    """Rotate the pairs (2i, 2i + 1) of the last R channels by the angle of each row's position; the other channels
    stay.

    Args:
      x: [T, D], or with axes between these two, as in [T, H, D]; floats. The rotation is done in float32 and rounded
        back to x's dtype.
      positions: [T] int32; a negative one (padding) counts as 0, one past the table as its last.
      cos_sin: [N, R] float32 of rope_table.
      inverse: rotate back, which outputs of attention with K = V need, each by its query's position.

    Raises:
      TypeError, ValueError: shapes or dtypes that are not legal, or inverse is no bool; under TSMLA_CHECK=1 also a
        position past the table.
    """
    array, table = describe("x", x), describe("cos_sin", cos_sin)
    rules.check_dtype("x", array, FLOATS)
    rules.check_array("cos_sin", table, "N R", ("float32",))
    rules.check_at_least_one("cos_sin", table.shape, 0, "N")
    inverse = contract.static_bool("inverse", inverse)
    if len(array.shape) < 2:
        raise ValueError(f"x: got shape {list(array.shape)}; legal: [T, D], or with axes between these two")
    describe_ints("positions", positions, "T", (array.shape[0], "T, x's rows"))
    rope_dim = table.shape[1]
    if rope_dim % 2 or rope_dim > array.shape[-1]:
        raise ValueError(f"cos_sin: got width R = {rope_dim}; legal: even, at most x's D = {array.shape[-1]}")
    x, cos_sin = jnp.asarray(x), jnp.asarray(cos_sin)
    cos, sin = (row.reshape(x.shape[0], *[1] * (x.ndim - 2), rope_dim // 2) for row in angles(positions, cos_sin))
    nope, rope = x[..., : x.shape[-1] - rope_dim], x[..., x.shape[-1] - rope_dim :]
    rotated = numerics.rotate_pairs(rope, cos, sin, inverse=inverse)
    return jnp.concatenate([nope, rotated.astype(x.dtype)], axis=-1)


def angles(
    positions: Int32[Array, " T"], cos_sin: Float[Array, "N R"]
) -> tuple[Float[Array, "T R/2"], Float[Array, "T R/2"]]:
    """cos and sin of each row's position; a negative one (padding) counts as 0, one past the table as its last.
    Under TSMLA_CHECK=1 a position past the table raises a ValueError."""
    num_positions, rope_dim = cos_sin.shape
    positions = checks.rope_positions(jnp.asarray(positions), num_positions)
    cos, sin = jnp.split(cos_sin[jnp.clip(positions, 0, num_positions - 1)], [rope_dim // 2], axis=-1)
    return cos, sin


def norm_rope(
    kv: Float[Array, "T D"],
    norm_weight: Float[Array, " D"] | None,
    positions: Int32[Array, " T"],
    cos_sin: Float[Array, "N R"],
    *,
    eps: float,
) -> Float[Array, "T D"]:
    """RMS norm over all channels, then rope on the last R, in float32, in a fixed order of operations: [T, D] float32.

    The result is stored for a token (at its own position) or for a compressed entry (at position entry * ratio, the
    first of the last `ratio` tokens that it pools); write it with write_v4_cache or write_indexer_cache. A row is
    bitwise the same whatever other rows come with it.

    Args:
      kv: [T, D] floats.
      norm_weight: [D] floats; None multiplies by no weight.
      positions: [T] int32; a negative one (padding) counts as 0, one past the table as its last.
      cos_sin: [N, R] float32 of rope_table.
      eps: the norm's epsilon, at least 0.

    Raises:
      TypeError, ValueError: shapes, dtypes or an eps that are not legal; under TSMLA_CHECK=1 also a position past the
        table.
    """
    described = describe("kv", kv)
    rules.check_array("kv", described, "T D", FLOATS)
    if (eps := _number("eps", eps)) < 0:
        raise ValueError(f"eps: got {eps}; legal: at least 0")
    if norm_weight is not None:
        described_weight = describe("norm_weight", norm_weight)
        rules.check_array("norm_weight", described_weight, "D", FLOATS, (described.shape[1], "D, kv's width"))
        norm_weight = jnp.asarray(norm_weight)
    return apply_rope(numerics.rms_norm(jnp.asarray(kv), norm_weight, eps), positions, cos_sin)


def window_slots(
    positions: Int32[Array, " T"],
    block_tables: Int32[Array, "T M"],
    *,
    page_size: int,
    window: int = 128,
    page_span: int | None = None,
) -> Int32[Array, "T window"]:
    """Slots of the last `window` tokens up to each query's own, oldest first, then -1; a negative position has no
    slots.

    Args:
      positions: [T] int32.
      block_tables: [T, M] int32, one row a token (see expand_decode_metadata).
      page_size: Z.
      window: static, columns of the result.
      page_span: the slots between two pages, if not page_size.

    Raises:
      TypeError, ValueError: as positions_to_slots, or window < 1.
    """
    window = contract.static_int("window", window, minimum=1)
    describe_ints("positions", positions, "T")
    positions = jnp.asarray(positions)[:, None]
    at = jnp.maximum(positions - (window - 1), 0) + jnp.arange(window, dtype=jnp.int32)
    return positions_to_slots(jnp.where(at <= positions, at, -1), block_tables, page_size, page_span=page_span)


def compressed_slots(
    positions: Int32[Array, " T"],
    block_tables: Int32[Array, "T M"],
    *,
    ratio: int,
    page_size: int,
    max_entries: int | None = None,
    page_span: int | None = None,
) -> tuple[Int32[Array, "T E"], Int32[Array, " T"]]:
    """Slots of all compressed entries that each query sees, and their count, (position + 1) // ratio, or the number of
    columns if that is less.

    Layers of ratio 128 need these rows, the same for each of them, so build the rows once a step. Layers that choose
    entries turn the chosen ones into slots with positions_to_slots.

    Args:
      positions: [T] int32; a negative one sees no entry.
      block_tables: [T, M] int32, pages of the compressed cache, one row a token.
      ratio: tokens an entry.
      page_size: entries a page.
      max_entries: static number of columns; by default all entries that the block table holds.
      page_span: the slots between two pages, if not page_size.

    Raises:
      TypeError, ValueError: as positions_to_slots, or ratio < 1; under TSMLA_CHECK=1 also a query that sees more
        entries than there are columns.
    """
    ratio = contract.static_int("ratio", ratio, minimum=1)
    describe_ints("positions", positions, "T")
    max_pages = describe_ints("block_tables", block_tables, "T M").shape[1]
    capacity = max_pages * contract.static_int("page_size", page_size, minimum=1)
    columns = capacity if max_entries is None else contract.static_int("max_entries", max_entries)
    visible = jnp.maximum(jnp.asarray(positions) + 1, 0) // ratio
    visible = jnp.minimum(checks.counts("positions (entries seen)", visible, columns), columns)
    entry = jnp.arange(columns, dtype=jnp.int32)
    chosen = jnp.where(entry < visible[:, None], entry, -1)
    return positions_to_slots(chosen, block_tables, page_size, page_span=page_span), visible


def build_mixed_sparse_indices(
    window_slots: Int32[Array, "T W"],
    compressed_slots: Int32[Array, "T E"] | None = None,
    compressed_lens: Int32[Array, " T"] | None = None,
    *,
    window_page: tuple[int, int] | None = None,
    compressed_page: tuple[int, int] | None = None,
) -> MixedIndices:
    """Rows of [window slots | compressed slots] for sparse_mla, padded to a multiple of 4 columns (16 bytes).

    Rows of decode steps (whose slots an engine may have ready) and rows of prefill (whose slots window_slots and
    compressed_slots make from block tables) have the same form and can be concatenated. A layer of ratio 0 has no
    compressed slots.

    Args:
      window_slots: [T, W] int32, -1 after each row's last.
      compressed_slots: [T, E] int32, or None; the first compressed_lens[t] of a row are used.
      compressed_lens: [T] int32; None counts the slots that aren't negative, which must come first.
      window_page, compressed_page: (page size, span) of a cache whose pages are strided wider than their rows: its
        slots page * size + offset become page * span + offset. Forgetting a stride reads other tokens' rows, silently.

    Returns:
      MixedIndices; pass its fields to sparse_mla as indices, lengths and window (no window without compressed slots).

    Raises:
      TypeError, ValueError: shapes or dtypes that are not legal, a span narrower than its page.
        Under TSMLA_CHECK=1 also a compressed length below 0 or above E, and a -1 before the end of a row's slots.
    """
    num_tokens, window = describe_ints("window_slots", window_slots, "T W").shape
    slots = checks.rows_of_slots("window_slots", jnp.asarray(window_slots))
    if window_page is not None:
        slots = remap_slots(slots, *_page("window_page", window_page))
    if compressed_slots is None:
        if compressed_lens is not None or compressed_page is not None:
            raise ValueError("compressed_slots: got None, with compressed_lens or compressed_page given; legal: [T, E]")
        rows, lengths = slots, (slots >= 0).sum(axis=1, dtype=jnp.int32)
    else:
        tokens = (num_tokens, "T, as in window_slots")
        columns = describe_ints("compressed_slots", compressed_slots, "T E", tokens).shape[1]
        chosen = jnp.asarray(compressed_slots)
        if compressed_lens is None:
            chosen = checks.rows_of_slots("compressed_slots", chosen)
            lens = (chosen >= 0).sum(axis=1, dtype=jnp.int32)
        else:
            describe_ints("compressed_lens", compressed_lens, "T", tokens)
            lens = jnp.clip(checks.counts("compressed_lens", jnp.asarray(compressed_lens), columns), 0, columns)
            chosen = checks.rows_of_slots("compressed_slots", chosen, lens)
        if compressed_page is not None:
            chosen = remap_slots(chosen, *_page("compressed_page", compressed_page))
        chosen = jnp.where(jnp.arange(columns, dtype=jnp.int32) < lens[:, None], chosen, -1)
        rows, lengths = jnp.concatenate([slots, chosen], axis=1), window + lens
    padding = -rows.shape[1] % INDEX_ROW_ALIGNMENT
    return MixedIndices(jnp.pad(rows, ((0, 0), (0, padding)), constant_values=-1), lengths, window)


def _page(name: str, page: tuple[int, int]) -> tuple[int, int]:
    """A (page size, span) argument, whose numbers `remap_slots` checks."""
    if not isinstance(page, tuple | list) or len(page) != 2:
        raise TypeError(f"{name}: got {page!r:.60}; legal: (page size, span), a tuple of two ints")
    size = contract.static_int(f"{name}[0]", page[0], minimum=1)
    return size, layouts.check_page_span(f"{name}[1]", page[1], size)


def resolve_cache_dtype(layout: str, cache_dtype: str) -> jnp.dtype:
    """The storage dtype of a V4 cache: uint8 for "packed", which takes only the names of e4m3; the dtype of that name
    for "plain".

    Args:
      layout: "packed" or "plain".
      cache_dtype: a name, as engines have it: "fp8", "fp8_e4m3", "fp8_ds_mla" and "float8_e4m3fn" are e4m3; "auto" is
        bfloat16; "bfloat16", "float16", "float32".

    Raises:
      ValueError: another layout, or a name that the layout doesn't take.
    """
    return jnp.dtype(layouts.resolve_cache_dtype(layout, cache_dtype))


def init_v4_cache(num_pages: int, *, layout: str, cache_dtype: str, page_size: int = 64, head_dim: int = 512) -> Array:
    """An empty cache for write_v4_cache: [P, Z, D], or uint8 [P, page_bytes] for the packed layout (D 512 only).

    Args:
      num_pages: P.
      layout: "packed" or "plain".
      cache_dtype: as in resolve_cache_dtype.
      page_size: Z.
      head_dim: D.

    Raises:
      TypeError, ValueError: a size, layout or dtype that is not legal.
    """
    dtype = resolve_cache_dtype(layout, cache_dtype)
    num_pages = contract.static_int("num_pages", num_pages, minimum=1)
    page_size = contract.static_int("page_size", page_size, minimum=1)
    head_dim = contract.static_int("head_dim", head_dim, minimum=1)
    if layout == "plain":
        return jnp.zeros((num_pages, page_size, head_dim), dtype)
    if head_dim != layouts.V4_PACKED.head_dim:
        raise ValueError(f"head_dim: got {head_dim}; the packed layout has {layouts.V4_PACKED.head_dim}")
    return jnp.zeros((num_pages, layouts.V4_PACKED.page_bytes(page_size)), dtype)

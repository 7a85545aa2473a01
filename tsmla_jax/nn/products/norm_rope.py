"""V4's RMS norm and rope for rows of 16 bits, as one kernel on a GPU, where XLA needs three to seven.

A token's rows are the same whatever other tokens come with it: their width and number fix the order of
summation. The kernel is written in Pallas for GPUs (Triton); where it does not run, XLA computes the norm and
`tsmla_jax.sparse.apply_rope` the rope.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tsmla_jax.nn.norms import Norm
from tsmla_jax.nn.products import triton
from tsmla_jax.nn.products.triton import plgpu
from tsmla_jax.ops.selected import numerics
from tsmla_jax.ops.selected import v4 as sparse_v4

_WARP_COLUMNS = 512  # columns of a program's rows for each warp: fewer in small rows, more if eight warps don't suffice


class Rope(NamedTuple):
    """The rotation of a row's last R columns, in pairs (2i, 2i + 1), as `tsmla_jax.sparse.apply_rope` rotates them.

    positions  [T] i32
    cos_sin    f32 [N, R], the result of `rope_table`
    inverse    static: whether rows are rotated back
    """

    positions: jax.Array
    cos_sin: jax.Array
    inverse: bool = False


class Columns(NamedTuple):
    """Where a token's H rows lie side by side among the columns of x; all static.

    start  the first column
    heads  number of rows H
    width  D, the width of a row
    """

    start: int
    heads: int
    width: int


def norm_rope(
    x: jax.Array,
    columns: Columns,
    norm: Norm | float | None = None,
    rope: Rope | None = None,
    *,
    dtype: Any = None,
    by_kernel: bool = False,
) -> jax.Array:
    """Rows of x normed, then rotated; each is calculated in f32 and rounded to `dtype`.

    Args:
      x: [T, W] floats.
      columns: which columns of x hold the rows.
      norm: the norm: a weight [D] and an eps, or an eps alone if there is no weight; None means no norm.
      rope: the rotation; None means no rotation.
      dtype: dtype of the result; None is x's dtype.
      by_kernel: whether to use the kernel if it can run. A program with it is not partitioned automatically over
        devices, is exported only with `tsmla_jax.export_disabled_checks()`, has no derivative, and runs under
        `jax.shard_map` with check_vma=False. The kernel takes the same positions and tables as `apply_rope`, but does
        not check their shapes and dtypes.

    Returns:
      [T, H, D] in `dtype`.
    """
    dtype = jnp.dtype(x.dtype if dtype is None else dtype)
    if by_kernel and x.shape[0] and not why_not(x.dtype, columns.width):
        return norm_rope_by_kernel(x, columns, norm, rope, dtype)
    rows = x[:, columns.start : columns.start + columns.heads * columns.width]
    rows = rows.reshape(x.shape[0], columns.heads, columns.width)
    if norm is not None:
        rows = numerics.rms_norm(rows, *_weight_and_eps(norm))
    rows = rows.astype(dtype)
    return rows if rope is None else sparse_v4.apply_rope(rows, rope.positions, rope.cos_sin, inverse=rope.inverse)


def _weight_and_eps(norm: Norm | float) -> tuple[jax.Array | None, float]:
    return norm if isinstance(norm, Norm) else (None, norm)


def why_not(dtype: Any, width: int) -> list[str]:
    """Why `norm_rope_by_kernel` can't serve rows of this dtype and width on jax's default device; empty if it can."""
    name = jnp.dtype(dtype).name
    return triton.why_not(
        (name not in ("bfloat16", "float16"), f"dtype is {name}; legal: bfloat16, float16"),
        (width > 8192, f"rows are {width} wide; the kernel holds at most 8192 columns in registers"),
    )


@dataclass(frozen=True)
class _Kind:
    """The static part of a kernel: a token's rows, how many of them a program has (`rows`), and what is done to
    them.
    """

    columns: Columns
    rows: int
    eps: float | None
    weighted: bool
    rope_width: int
    inverse: bool


def norm_rope_by_kernel(
    x: jax.Array, columns: Columns, norm: Norm | float | None, rope: Rope | None, dtype: Any
) -> jax.Array:
    """`norm_rope` by the kernel."""
    rows = min(pl.next_power_of_2(columns.heads), 4)
    warps = max(1, min(8, rows * pl.next_power_of_2(columns.width) // _WARP_COLUMNS))
    weight, eps = (None, None) if norm is None else _weight_and_eps(norm)
    operands = [x] if weight is None else [x, weight.astype(jnp.float32)]
    if rope is not None:
        operands += sparse_v4.angles(rope.positions, rope.cos_sin)
    kind = _Kind(
        columns=columns,
        rows=rows,
        eps=eps,
        weighted=weight is not None,
        rope_width=0 if rope is None else rope.cos_sin.shape[1],
        inverse=rope is not None and rope.inverse,
    )
    out: jax.Array = pl.pallas_call(
        functools.partial(_kernel, kind),
        grid=(x.shape[0], pl.cdiv(columns.heads, rows)),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], columns.heads, columns.width), dtype),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        interpret=jax.default_backend() == "cpu",
        name="norm_rope",
    )(*operands)
    return out


def _kernel(kind: _Kind, x_ref: Any, *others: Any) -> None:
    """Compute some rows of a token.

    others: the norm's weight (if any), cos and sin (if any), and the result.
    """
    *inputs, out_ref = others
    token, (start, heads, width) = pl.program_id(0), kind.columns
    head = (pl.program_id(1) * kind.rows + jnp.arange(kind.rows, dtype=jnp.int32))[:, None]
    lanes = jnp.arange(pl.next_power_of_2(width), dtype=jnp.int32)[None, :]
    exists = (head < heads) & (lanes < width)

    def load(column: jax.Array, mask: jax.Array) -> jax.Array:
        return plgpu.load(x_ref.at[token, start + head * width + column], mask=mask, other=0.0).astype(jnp.float32)

    def weigh(rows: jax.Array, column: jax.Array, mask: jax.Array) -> jax.Array:
        if not kind.weighted:
            return rows
        return rows * plgpu.load(inputs[0].at[column], mask=mask, other=0.0)

    rows = load(lanes, exists)
    factor: Any = 1.0
    if kind.eps is not None:
        factor = jax.lax.rsqrt((rows * rows).sum(axis=1) / width + kind.eps)[:, None]
    plain = width - kind.rope_width
    done = weigh(rows * factor, lanes, lanes < width).astype(out_ref.dtype)
    plgpu.store(out_ref.at[token, head, lanes], done, mask=exists & (lanes < plain))
    if not kind.rope_width:
        return
    pairs = jnp.arange(pl.next_power_of_2(kind.rope_width // 2), dtype=jnp.int32)[None, :]
    turned = pairs < kind.rope_width // 2
    cos, sin = (plgpu.load(ref.at[token, pairs], mask=turned, other=0.0) for ref in inputs[-2:])
    sin = -sin if kind.inverse else sin
    even, odd = plain + 2 * pairs, plain + 2 * pairs + 1
    mask = (head < heads) & turned
    a, b = (
        weigh(load(column, mask) * factor, column, turned).astype(out_ref.dtype).astype(jnp.float32)
        for column in (even, odd)
    )
    plgpu.store(out_ref.at[token, head, even], (a * cos - b * sin).astype(out_ref.dtype), mask=mask)
    plgpu.store(out_ref.at[token, head, odd], (b * cos + a * sin).astype(out_ref.dtype), mask=mask)

"""Rows sorted by group and cut into blocks of one group each: what `grouped_matmul` works through.

By XLA it is a handful of small kernels, which a step of few tokens mostly waits for; by a kernel it is one.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from tsmla_jax.nn.tiles import BLOCKS_BY_KERNEL
from tsmla_jax.nn.triton import plgpu, why_no_triton

_CHUNK = 64  # pairs of a program of the kernel


class Blocks(NamedTuple):
    """Which rows make a block, and of which group.

    rows    [NB * block] i32, the row of x at each place; any number at places without one
    groups  [NB] i32, the group of each block; `num_groups` for a block without rows
    places  [T, K] i32, where each of a row's K groups has its place; past the last one for a row without groups
    num_groups  static
    """

    rows: jax.Array
    groups: jax.Array
    places: jax.Array
    num_groups: int


def _most_blocks(pairs: int, num_groups: int, block: int) -> int:
    """As many blocks as pairs may need: every group in use has at most one that is not full."""
    return min(pairs, pairs // block + min(num_groups, pairs))


def make_blocks(groups: jax.Array, num_groups: int, block: int) -> Blocks:
    """Sorts the pairs (row, group) of groups [T, K] i32 by group, each group's made whole blocks of `block` places.

    A pair whose group is num_groups has no place."""
    num_rows, most = groups.shape
    pairs = num_rows * most
    if num_rows == 1:
        # No two pairs of one row share a group.
        places = jnp.arange(most, dtype=jnp.int32)[None] * block
        return Blocks(jnp.zeros(pairs * block, jnp.int32), groups[0], places, num_groups)
    if pairs <= BLOCKS_BY_KERNEL and not why_no_triton():
        return blocks_by_kernel(groups, num_groups, block)
    count, flat = _most_blocks(pairs, num_groups, block), groups.reshape(pairs)
    order = jnp.arange(pairs, dtype=jnp.int32)
    if pairs <= 2048:
        # Comparing every pair with every other is one small kernel; a sort is many.
        rank = ((flat[:, None] == flat) & (order[:, None] > order)).sum(axis=1, dtype=jnp.int32)
        sizes = (flat[:, None] == jnp.arange(num_groups)).sum(axis=0, dtype=jnp.int32)
    else:
        sizes = jnp.zeros(num_groups + 1, jnp.int32).at[flat].add(1)
        sorted_pairs = jnp.argsort(flat, stable=True)
        begins = jnp.cumsum(sizes) - sizes
        rank = jnp.zeros(pairs, jnp.int32).at[sorted_pairs].set(order - begins[flat[sorted_pairs]])
        sizes = sizes[:num_groups]
    blocks = (sizes + block - 1) // block
    earlier = jnp.arange(num_groups)[:, None] > jnp.arange(num_groups)
    begins = (earlier * blocks).sum(axis=1, dtype=jnp.int32)
    places = jnp.where(flat < num_groups, begins[jnp.minimum(flat, num_groups - 1)] * block + rank, count * block)
    block_groups = (begins + blocks <= jnp.arange(count)[:, None]).sum(axis=1, dtype=jnp.int32)
    rows = jnp.zeros(count * block, jnp.int32).at[places].set(order // most, mode="drop")
    return Blocks(rows, block_groups, places.reshape(num_rows, most), num_groups)


def blocks_by_kernel(groups: jax.Array, num_groups: int, block: int) -> Blocks:
    """`make_blocks` as one kernel. Each of its programs counts the pairs of every group, and places some of them: so it
    is for few pairs. Arguments as there."""
    num_rows, most = groups.shape
    pairs = num_rows * most
    count, programs = _most_blocks(pairs, num_groups, block), pl.cdiv(pairs, _CHUNK)
    rows, block_groups, places = pl.pallas_call(
        functools.partial(_place, num_groups, block, most),
        grid=(programs,),
        out_shape=[jax.ShapeDtypeStruct((size,), jnp.int32) for size in (count * block, count, pairs)],
        compiler_params=plgpu.CompilerParams(num_warps=8 if num_groups <= 128 else 16, num_stages=1),
        interpret=jax.default_backend() == "cpu",
        name="make_blocks",
    )(groups.reshape(pairs))
    return Blocks(rows, block_groups, places.reshape(num_rows, most), num_groups)


def _place(
    num_groups: int, block: int, most: int, groups_ref: Any, rows_ref: Any, block_groups_ref: Any, places_ref: Any
) -> None:
    """The places of a chunk of pairs, and the groups of some blocks."""
    pairs, count = groups_ref.shape[0], block_groups_ref.shape[0]
    lanes = jnp.arange(pl.next_power_of_2(num_groups), dtype=jnp.int32)

    def chunk(index: Any) -> tuple[jax.Array, jax.Array]:
        at = index * _CHUNK + jnp.arange(_CHUNK, dtype=jnp.int32)
        return at, plgpu.load(groups_ref.at[at], mask=at < pairs, other=-1)

    own, group = chunk(pl.program_id(0))

    def count_pairs(index: Any, counts: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        sizes, earlier = counts
        at, others = chunk(index)
        same = (others[None, :] == group[:, None]) & (at[None, :] < own[:, None])
        members = others[:, None] == lanes[None, :]
        return sizes + members.astype(jnp.int32), earlier + same.astype(jnp.int32)

    zeros = jnp.zeros((_CHUNK, lanes.shape[0]), jnp.int32), jnp.zeros((_CHUNK, _CHUNK), jnp.int32)
    sizes, earlier = lax.fori_loop(0, pl.cdiv(pairs, _CHUNK), count_pairs, zeros)
    blocks = jnp.where(lanes < num_groups, (sizes.sum(axis=0) + block - 1) // block, 0)
    ends = jnp.cumsum(blocks)

    begin = jnp.where(group[:, None] == lanes[None, :], (ends - blocks)[None, :], 0).sum(axis=1)
    present = (own < pairs) & (group < num_groups)
    place = jnp.where(present, begin * block + earlier.sum(axis=1), count * block)
    plgpu.store(places_ref.at[own], place, mask=own < pairs)
    plgpu.store(rows_ref.at[place], own // most, mask=present)

    share = pl.cdiv(count, pl.cdiv(pairs, _CHUNK))
    part = jnp.arange(pl.next_power_of_2(share), dtype=jnp.int32)
    at = pl.program_id(0) * share + part
    ended = (ends[None, :] <= at[:, None]).astype(jnp.int32).sum(axis=1)
    plgpu.store(block_groups_ref.at[at], jnp.minimum(ended, num_groups), mask=(part < share) & (at < count))

"""Rows sorted by group and cut into blocks of one group each: what `grouped_matmul` works through.

For few pairs one or two kernels in Pallas do it, where XLA would run a handful of small ones.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from tsmla_jax.nn.products import triton
from tsmla_jax.nn.products.tiles import BLOCKS_BY_KERNEL
from tsmla_jax.nn.products.triton import plgpu

_AT_ONCE = 128  # pairs that one program places, and that are counted together
_OWN, _OTHERS = 64, 256  # pairs of one of several programs, and those that it compares them with at once


class Blocks(NamedTuple):
    """Blocks of rows, each of one group.

    rows    [NB * block] i32, the row of x at each place; any number at places without one
    groups  [NB] i32, the group of each block; `num_groups` for a block without rows
    places  [T, K] i32, the place of each of a row's K pairs; without meaning for a pair whose group is num_groups
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
    """Sorts the pairs (row, group) of groups [T, K] i32 by group; pads each group to whole blocks of `block` places.
    The pairs of a single row keep their order, because each has its own block. A pair whose group is num_groups belongs
    to no group: its place is past the last block, or in a block whose group is num_groups, which is not computed."""
    num_rows, most = groups.shape
    pairs = num_rows * most
    if not pairs:
        return _no_blocks(groups, num_groups)
    if num_rows == 1:
        # No two pairs of one row share a group.
        places = jnp.arange(most, dtype=jnp.int32)[None] * block
        return Blocks(jnp.zeros(pairs * block, jnp.int32), groups[0], places, num_groups)
    if pairs <= BLOCKS_BY_KERNEL and not triton.why_not():
        return blocks_by_kernel(groups, num_groups, block)
    count, flat = _most_blocks(pairs, num_groups, block), groups.reshape(pairs)
    order = jnp.arange(pairs, dtype=jnp.int32)
    if pairs <= BLOCKS_BY_KERNEL:
        # Comparing every pair with every other is one small kernel; counting by chunks is several.
        rank = ((flat[:, None] == flat) & (order[:, None] > order)).sum(axis=1, dtype=jnp.int32)
        sizes = (flat[:, None] == jnp.arange(num_groups)).sum(axis=0, dtype=jnp.int32)
    else:
        sorted_places, cu_rows = _places_by_chunks(flat, jnp.arange(num_groups + 1, dtype=jnp.int32))
        rank, sizes = sorted_places - cu_rows[flat], cu_rows[1:] - cu_rows[:-1]
    blocks = (sizes + block - 1) // block
    earlier = jnp.arange(num_groups)[:, None] > jnp.arange(num_groups)
    begins = (earlier * blocks).sum(axis=1, dtype=jnp.int32)
    places = jnp.where(flat < num_groups, begins[jnp.minimum(flat, num_groups - 1)] * block + rank, count * block)
    block_groups = (begins + blocks <= jnp.arange(count)[:, None]).sum(axis=1, dtype=jnp.int32)
    rows = jnp.zeros(count * block, jnp.int32).at[places].set(order // most, mode="drop")
    return Blocks(rows, block_groups, _computed_once(places.reshape(num_rows, most)), num_groups)


def _no_blocks(groups: jax.Array, num_groups: int) -> Blocks:
    """The blocks of no pairs."""
    none = jnp.zeros(0, jnp.int32)
    return Blocks(none, none, jnp.zeros(groups.shape, jnp.int32), num_groups)


class SortedRows(NamedTuple):
    """Rows sorted by group, a row once for each of its groups.

    rows     [T * K] i32, the row of x at each place
    cu_rows  [groups + 1] i32, where each group's places begin, and their end
    places   [T, K] i32, the place of each of a row's K pairs; from cu_rows[groups] on for a pair without a group
    """

    rows: jax.Array
    cu_rows: jax.Array
    places: jax.Array


def sort_rows(groups: jax.Array, num_groups: int) -> SortedRows:
    """Sorts the pairs (row, group) of groups [T, K] i32 by group. A pair whose group is num_groups belongs to no group.

    A pair's place is the number of pairs before it: counting takes fewer kernels than XLA's sort."""
    num_rows, most = groups.shape
    pairs, flat = num_rows * most, groups.reshape(num_rows * most)
    order, group = jnp.arange(pairs, dtype=jnp.int32), jnp.arange(num_groups + 1, dtype=jnp.int32)
    row = order // most
    if pairs <= BLOCKS_BY_KERNEL:
        before = (flat < flat[:, None]) | ((flat == flat[:, None]) & (order < order[:, None]))
        places = before.sum(axis=1, dtype=jnp.int32)
        cu_rows = (flat < group[:, None]).sum(axis=1, dtype=jnp.int32)
        # One kernel; a scatter would be two.
        rows = jnp.where(places == order[:, None], row, 0).sum(axis=1, dtype=jnp.int32)
    else:
        places, cu_rows = _places_by_chunks(flat, group)
        rows = jnp.zeros(pairs, jnp.int32).at[places].set(row, unique_indices=True)
    return SortedRows(rows, cu_rows, _computed_once(places.reshape(num_rows, most)))


def picked_rows(x: jax.Array, rows: jax.Array) -> jax.Array:
    """x[rows], for x [T, C] and rows [R] i32. XLA copies element by element, so narrow ones are copied as words of four
    bytes, if a row has whole words."""
    count = 4 // x.dtype.itemsize
    if count < 2 or x.shape[1] % count:
        return x[rows]
    words = lax.bitcast_convert_type(x.reshape(x.shape[0], -1, count), jnp.int32)[rows]
    return lax.bitcast_convert_type(words, x.dtype).reshape(-1, x.shape[1])


def _computed_once(places: jax.Array) -> jax.Array:
    """The places, behind a barrier: without it XLA may compute them again for every element that the caller gathers by
    them."""
    return cast(jax.Array, lax.optimization_barrier(places))


def _places_by_chunks(flat: jax.Array, group: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The place of each pair, and cu_rows, from the pairs' groups flat [pairs] and all groups. Each chunk of _AT_ONCE
    pairs counts its pairs of each group, and for each pair the earlier pairs of its group."""
    pairs, count = flat.shape[0], -(-flat.shape[0] // _AT_ONCE)
    chunks = jnp.pad(flat, (0, count * _AT_ONCE - pairs), constant_values=group.shape[0] - 1).reshape(count, _AT_ONCE)
    one, chunk = jnp.arange(_AT_ONCE), jnp.arange(count)
    same = (chunks[:, :, None] == chunks[:, None, :]) & (one[None, :] < one[:, None])
    rank = same.sum(axis=2, dtype=jnp.int32)
    # float32 counts exactly up to 2^24, and a product of matrices is one kernel.
    sizes = (chunks[:, :, None] == group).sum(axis=1, dtype=jnp.int32).astype(jnp.float32)
    earlier = jnp.matmul((chunk < chunk[:, None]).astype(jnp.float32), sizes, precision="highest").astype(jnp.int32)
    total = sizes.sum(axis=0).astype(jnp.int32)
    begins = ((group < group[:, None]) * total).sum(axis=1, dtype=jnp.int32)
    places = jnp.take_along_axis(begins + earlier, chunks, axis=1) + rank
    return places.reshape(-1)[:pairs], begins


def blocks_by_kernel(groups: jax.Array, num_groups: int, block: int) -> Blocks:
    """`make_blocks` as one kernel, or two if there are more than _AT_ONCE pairs. They compare every pair with every
    other, so their time does not depend on the number of groups, and they are for few pairs. The arguments are those of
    `make_blocks`."""
    num_rows, most = groups.shape
    pairs = num_rows * most
    if not pairs:
        return _no_blocks(groups, num_groups)
    flat, count, at_once = groups.reshape(pairs), _most_blocks(pairs, num_groups, block), pairs <= _AT_ONCE
    own = max(16, pl.next_power_of_2(pairs)) if at_once else _OWN
    call = functools.partial(
        pl.pallas_call,
        grid=(pl.cdiv(pairs, own),),
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=1),
        interpret=jax.default_backend() == "cpu",
    )
    operands = [flat]
    if not at_once:
        operands += [call(_rank, out_shape=jax.ShapeDtypeStruct((pairs,), jnp.int32), name="rank_pairs")(flat)]
    rows, block_groups, places = call(
        functools.partial(_place, _Sizes(num_groups, block, most, own)),
        out_shape=[jax.ShapeDtypeStruct((size,), jnp.int32) for size in (count * block, count, pairs)],
        name="make_blocks",
    )(*operands)
    return Blocks(rows, block_groups, places.reshape(num_rows, most), num_groups)


class _Sizes(NamedTuple):
    """Static sizes of the placement kernel: groups, rows a block, pairs a row, pairs a program."""

    num_groups: int
    block: int
    most: int
    own: int


def _load(ref: Any, begin: Any, size: int) -> tuple[jax.Array, jax.Array]:
    """The indices of `size` pairs from `begin` on, and the values of `ref` [pairs] there; -1 for pairs that don't
    exist."""
    at = begin + jnp.arange(size, dtype=jnp.int32)
    return at, plgpu.load(ref.at[at], mask=at < ref.shape[0], other=-1)


def _earlier(own: jax.Array, group: jax.Array, others: jax.Array, other_groups: jax.Array) -> jax.Array:
    """[own, others]: 1 where the other pair comes before the own pair and has the same group, else 0."""
    return ((other_groups[None, :] == group[:, None]) & (others[None, :] < own[:, None])).astype(jnp.int32)


def _rank(groups_ref: Any, ranks_ref: Any) -> None:
    """Compute the ranks of some pairs: how many earlier ones have the same group."""
    own, group = _load(groups_ref, pl.program_id(0) * _OWN, _OWN)

    earlier = jnp.zeros((_OWN, _OTHERS), jnp.int32)
    for begin in range(0, groups_ref.shape[0], _OTHERS):
        earlier = earlier + _earlier(own, group, *_load(groups_ref, begin, _OTHERS))
    plgpu.store(ranks_ref.at[own], earlier.sum(axis=1), mask=own < groups_ref.shape[0])


def _place(sizes: _Sizes, groups_ref: Any, *refs: Any) -> None:
    """Write the rows and places of this program's pairs, the groups of the blocks that these pairs begin, and its share
    of the blocks without rows.

    refs: the ranks of all pairs, if there are several programs, and then the results: rows, blocks' groups and places.
    """
    *ranks_ref, rows_ref, block_groups_ref, places_ref = refs
    num_groups, block, most, size = sizes
    pairs, count = groups_ref.shape[0], block_groups_ref.shape[0]
    own, group = _load(groups_ref, pl.program_id(0) * size, size)

    def begun(others: jax.Array, ranks: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Which of the other pairs begin a block, as 1 and 0: [own, others] for blocks of a group before the own pair's
        group, and [others] for blocks of any group."""
        first = (others >= 0) & (others < num_groups) & (ranks % block == 0)
        return (first[None, :] & (others[None, :] < group[:, None])).astype(jnp.int32), first.astype(jnp.int32)

    if ranks_ref:
        rank = _load(ranks_ref[0], pl.program_id(0) * size, size)[1]
        before, first = jnp.zeros((size, _OTHERS), jnp.int32), jnp.zeros((_OTHERS,), jnp.int32)
        for begin in range(0, pairs, _OTHERS):
            more = begun(*(_load(ref, begin, _OTHERS)[1] for ref in (groups_ref, ranks_ref[0])))
            before, first = before + more[0], first + more[1]
    else:
        rank = _earlier(own, group, own, group).sum(axis=1)
        before, first = begun(group, rank)

    total = first.sum()
    present = (own < pairs) & (group < num_groups)
    index = before.sum(axis=1) + rank // block
    place = jnp.where(present, index * block + rank % block, count * block)
    plgpu.store(places_ref.at[own], place, mask=own < pairs)
    plgpu.store(rows_ref.at[place], own // most, mask=present)
    begins = present & (rank % block == 0)
    plgpu.store(block_groups_ref.at[jnp.where(begins, index, count)], group, mask=begins)

    share = pl.cdiv(count, pl.cdiv(pairs, size))
    part = jnp.arange(pl.next_power_of_2(share), dtype=jnp.int32)
    at = pl.program_id(0) * share + part
    unused = (part < share) & (at < count) & (at >= total)
    plgpu.store(block_groups_ref.at[at], jnp.full_like(at, num_groups), mask=unused)

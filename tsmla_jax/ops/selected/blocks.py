"""Small workspaces: loops over blocks of query tokens, and reads and writes of rows that copy no
cache, if the one to write is donated."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from tsmla_jax.ops.loops import carry


def over_token_blocks(
    body: Callable[..., tuple[jax.Array, ...]],
    operands: tuple[jax.Array, ...],
    outs: tuple[jax.ShapeDtypeStruct, ...],
    *,
    block: int,
    varying_with: tuple[jax.Array, ...] = (),
    num_used: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """The results of `body` on blocks of `block` rows of every operand, put together again.

    The last block ends at the last row and recomputes the rows that it shares with the block before: no operand is
    padded or copied as a whole.

    Args:
      outs: the shapes of the whole results, rows first.
      varying_with: further arrays that the body reads, for shard_map's types.
      num_used: traced, how many rows matter. Blocks after these rows are not visited; their results are 0. (If
        jax.export leaves the number of rows symbolic, all rows are one block.)
    """
    num_rows = outs[0].shape[0]
    if not isinstance(num_rows, int):
        return body(*operands)
    block = min(block, num_rows)
    if block == num_rows and num_used is None:
        return body(*operands)

    def step(i: jax.Array, results: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        start = jnp.minimum(i * block, num_rows - block)
        rows = (fetch(x, start, lambda x, at: lax.dynamic_slice_in_dim(x, at, block, axis=0)) for x in operands)
        parts = body(*rows)
        return tuple(
            lax.dynamic_update_slice_in_dim(x, part, start, axis=0) for x, part in zip(results, parts, strict=True)
        )

    start = tuple(carry(jnp.zeros(out.shape, out.dtype), *operands, *varying_with) for out in outs)
    blocks = -(-num_rows // block) if num_used is None else (num_used + (block - 1)) // block
    return lax.fori_loop(0, blocks, step, start)


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def fetch(x: jax.Array, where: jax.Array, take: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
    """take(x, where), a slice or a gather of few elements; if x is a float of 8 or 16 bits, its bits are moved as
    integers. The derivative is that of `take`: integers have none.

    A backend without arithmetic in such a type widens before it gathers, and moves the widening out of the surrounding
    loop: it would make a float32 copy of the whole cache to fetch a few rows. The barrier ties x to an index that
    changes with each iteration, so that nothing before the gather can be moved out of the loop.
    """
    if not _is_narrow(x):
        return take(x, where)
    x, where = lax.optimization_barrier((x, where))
    bits = lax.bitcast_convert_type(x, jnp.uint8 if x.dtype.itemsize == 1 else jnp.uint16)
    return lax.bitcast_convert_type(take(bits, where), x.dtype)


@fetch.defjvp
def _fetch_jvp(
    take: Callable[[jax.Array, jax.Array], jax.Array], primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    x, where = primals
    return fetch(x, where, take), take(tangents[0], where)


def put_rows(cache: jax.Array, rows: jax.Array, slots: jax.Array) -> jax.Array:
    """cache [P, Z, D] with rows [T, D] of its dtype in slots [T]; slots from P * Z on are dropped. In place if donated.

    The rows are scattered, except on CPUs for floats of 8 or 16 bits: there XLA would widen the whole cache around a
    scatter, but not around a loop of slice updates.
    """
    if not rows.shape[0]:
        return cache
    flat = cache.reshape(-1, cache.shape[-1])
    if not _is_narrow(cache):
        return _scatter_rows(flat, rows, slots).reshape(cache.shape)
    return _place_rows(carry(flat, rows, slots), rows, slots).reshape(cache.shape)


@jax.custom_jvp
def _place_rows(flat: jax.Array, rows: jax.Array, slots: jax.Array) -> jax.Array:
    """`flat` with rows in slots. The derivative is that of a scatter: the loop has none in reverse mode."""
    return lax.platform_dependent(flat, rows, slots, cpu=_update_rows, default=_scatter_rows)


@_place_rows.defjvp
def _place_rows_jvp(primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    return _place_rows(*primals), jax.jvp(_scatter_rows, primals, tangents)[1]


def _scatter_rows(flat: jax.Array, rows: jax.Array, slots: jax.Array) -> jax.Array:
    return flat.at[slots].set(rows, mode="drop")


def _update_rows(flat: jax.Array, rows: jax.Array, slots: jax.Array) -> jax.Array:
    # The rows to write come first, and the loop ends after them: to skip a row inside the loop would read the cache.
    dropped = slots >= flat.shape[0]
    order = jnp.argsort(dropped, stable=True)

    def write(i: jax.Array, flat: jax.Array) -> jax.Array:
        row = order[i]
        where = (slots[row], jnp.zeros((), slots.dtype))  # of one dtype, under jax_enable_x64 too
        return lax.dynamic_update_slice(flat, rows[row][None], where)

    return lax.fori_loop(0, (~dropped).sum(dtype=jnp.int32), write, flat)


def _is_narrow(x: jax.Array) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating)) and x.dtype.itemsize <= 2

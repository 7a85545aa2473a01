"""mla_decode on Blackwell: the operands of TokenSpeed's kernels for a call on one device, made safe for any input.

The kernels read whole tiles of 128 keys. So block tables are widened to whole tiles, and entries that a request doesn't
use get the number after the last page, which the copy engine reads as zeros: entries past a request's end can hold
anything. Each query token's visible keys are counted here, also for lengths outside the table. Ragged queries become
[B, max_q_len, H, D], with each request's tokens at the end of its row. The kernels' lse has base 2.

One case stays unsafe: a slot beyond a request's length in the last page that it uses must hold a finite number, since
the matrix product multiplies it by a weight of 0. Caches that start as zeros and get finite tokens satisfy this; for
others TSMLA_CHECK=1 names the request that is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tsmla_jax.ops import checks
from tsmla_jax.ops.kernel_call import kernel_call
from tsmla_jax.ops.ragged import row_owner
from tsmla_kernels import contract
from tsmla_kernels.catalog import MLA_DECODE_SM100
from tsmla_kernels.contract import DecodeSpec, Dim
from tsmla_kernels.sm100 import config as sm100

LN_2 = math.log(2.0)


def behind_check(spec: DecodeSpec, kv_cache: jax.Array, block_tables: jax.Array, seq_lens: jax.Array) -> jax.Array:
    """seq_lens, under TSMLA_CHECK=1 behind the check that unused slots of last pages are finite."""
    if not checks.enabled():
        return seq_lens
    last = jnp.clip(seq_lens, 1, spec.max_pages * spec.page_size) - 1
    pages = jnp.take_along_axis(block_tables, last[:, None] // spec.page_size, axis=1)[:, 0]
    values = kv_cache[jnp.clip(pages, 0, spec.num_pages - 1), :, : spec.latent_dim].astype(jnp.float32)
    unused = jnp.arange(spec.page_size) > last[:, None] % spec.page_size
    bad = (seq_lens > 0) & (unused & ~jnp.isfinite(values).all(-1)).any(-1)
    return checks.behind(_check_finite, seq_lens, bad)


def _check_finite(seq_lens: np.ndarray, bad: np.ndarray) -> None:
    if bad.any():
        raise ValueError(
            f"kv_cache: request {int(np.flatnonzero(bad)[0])} leaves a slot of its last page unused that is not finite;"
            f" legal on Blackwell: {sm100.FINITE}"
        )


def on_one_device(
    q: jax.Array,
    kv_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    cu_seqlens_q: jax.Array | None,
    visible_lens: jax.Array | None,
    scales: jax.Array,
    *,
    spec: DecodeSpec,
    static_scales: tuple[float, float] | None,
    arch: str,
    num_sms: int,
) -> tuple[jax.Array, jax.Array]:
    """out and lse of a call whose arrays lie on one device; spec describes those.

    Args:
      scales: [2] float32, the factors of the logits and of the outputs. static_scales: the same as numbers if they are
        known, so that the launch can pass them by value.

    Raises NotImplementedError where vmap made the call larger than the kernels can index.
    """
    if reasons := MLA_DECODE_SM100.reasons(spec):
        raise contract.not_runnable("mla_decode", "cute", reasons)
    config = sm100.decode_config(spec, traced_scales=static_scales is None)
    tokens, num_keys = config.max_q_len, spec.max_pages * spec.page_size
    seq_lens = jnp.clip(seq_lens, 0, num_keys)
    lengths = None
    if cu_seqlens_q is not None:
        lengths = cu_seqlens_q[1:] - cu_seqlens_q[:-1]
        q_lens = jnp.clip(lengths, 0, tokens)
        rows = (cu_seqlens_q[:-1] - (tokens - q_lens))[:, None] + jnp.arange(tokens, dtype=jnp.int32)
        rows = jnp.clip(rows, 0, spec.total_q_len - 1)
        q = q[rows]
        visible_lens = None if visible_lens is None else visible_lens[rows]
    if visible_lens is None:
        visible_lens = visible_keys(seq_lens, lengths, tokens=tokens, causal=spec.causal)
    else:
        visible_lens = jnp.clip(visible_lens, 0, seq_lens[:, None])

    bounds = _bounds(spec.batch, spec.max_pages)
    splits = 1 if spec.batch_invariant else sm100.split_count(config, arch, spec.batch, num_sms, num_keys, **bounds)
    outputs = (
        (spec.batch, tokens, config.num_heads, sm100.LATENT_DIM),
        (spec.batch, tokens, config.num_heads),
        sm100.workspace_shape(config, arch, spec.batch, splits, **bounds),
    )
    pieces = spec.page_size // config.page_size  # of a page, each a page to the kernel
    kv_cache = kv_cache.reshape(spec.num_pages * pieces, config.page_size, spec.head_dim)
    block_tables = block_tables[:, :, None] * pieces + jnp.arange(pieces, dtype=jnp.int32)
    block_tables = block_tables.reshape(spec.batch, spec.max_pages * pieces)
    table = whole_tiles(block_tables, seq_lens, config.page_size, spec.num_pages * pieces)
    inputs = (q, kv_cache, table, seq_lens, visible_lens)
    out, lse, *_ = kernel_call(
        MLA_DECODE_SM100,
        config,
        inputs if static_scales else (*inputs, scales),
        outputs if static_scales is None else (*outputs, *((size,) for size in sm100.scale_sizes(*static_scales))),
        arch=arch,
    )
    seen = (visible_lens > 0)[:, :, None]
    if cu_seqlens_q is not None:
        request, position, owned = row_owner(cu_seqlens_q, spec.total_q_len)
        slot = jnp.clip(position + (tokens - q_lens)[request], 0, tokens - 1)
        out, lse = out[request, slot], lse[request, slot]
        seen = (owned & (position < tokens))[:, None] & seen[request, slot]
    return jnp.where(seen[..., None], out, jnp.zeros((), out.dtype)), jnp.where(seen, lse * LN_2, -jnp.inf)


def visible_keys(seq_lens: Any, q_lens: Any, *, tokens: int, causal: bool) -> Any:
    """How many keys each query token sees, [B, tokens] int32, as jax's arrays or numpy's.

    Args:
      seq_lens: [B] int32, at least 0. q_lens: [B] int32, the queries of each ragged request, which end at the row's
        end; None for `tokens` each.
    """
    slots = (jnp if isinstance(seq_lens, jax.Array) else np).arange(tokens, dtype=np.int32)
    if not causal:
        return seq_lens[:, None] + 0 * slots
    # A request with more tokens than a row has only its first `tokens` computed.
    ends = seq_lens if q_lens is None else seq_lens - (q_lens - tokens).clip(0)
    return (ends[:, None] - (tokens - 1) + slots).clip(0)


def whole_tiles(block_tables: jax.Array, seq_lens: jax.Array, page_size: int, num_pages: Dim) -> jax.Array:
    """The table [B, M] widened to whole key tiles; unused entries name a page that doesn't exist."""
    batch, max_pages = block_tables.shape
    pages_a_tile = sm100.KEY_TILE // page_size
    width = -(-max_pages // pages_a_tile) * pages_a_tile
    table = jnp.concatenate([block_tables, jnp.zeros((batch, width - max_pages), jnp.int32)], axis=1)
    used = jnp.arange(width, dtype=jnp.int32) * page_size < seq_lens[:, None]
    return jnp.where(used, table, jnp.asarray(num_pages, jnp.int32))


def _bounds(*sizes: Any) -> dict[str, Callable[[Any, Any], Any]]:
    """min and max for plain ints; jax's own for symbolic sizes, which can't be compared."""
    if all(isinstance(size, int) for size in sizes):
        return {}
    return {"minimum": jax.core.min_dim, "maximum": jax.core.max_dim}

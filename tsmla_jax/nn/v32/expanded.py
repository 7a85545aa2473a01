"""V3.2's attention with the selection as a mask: the keys and values of new tokens and of context are expanded from the
cache.

New tokens see each other in one causal call. Cached context is taken in chunks: each is gathered, expanded, attended to
with the chunk's bits, and merged by lse. So the size of a chunk bounds the memory of the context's keys and values, and
of its bits, unless the indexer has given them for all keys. All keys are read from the cache, so that a quantised cache
means the same as in the direct form.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import tsmla_jax
from tsmla_jax.nn.checkpoints.weights import Params
from tsmla_jax.nn.mla import functional
from tsmla_jax.nn.step import Step, needed_when_ragged, slots_of
from tsmla_jax.nn.v32.config import V32Config
from tsmla_jax.ops.inputs import describe
from tsmla_jax.ops.loops import carry
from tsmla_jax.ops.operation import Preference
from tsmla_jax.ops.ragged import row_owner
from tsmla_jax.ops.selected.layouts import gather_rows
from tsmla_jax.ops.transforms import without_derivative
from tsmla_kernels.contract.layouts import cache_spec, valid_slots
from tsmla_kernels.contract.selection import WORD_KEYS, selection_words

State = tuple[jax.Array, jax.Array]
"""out and lse."""

CHUNK_ROWS = 8192
"""Cached tokens, of all requests together, that are expanded at once; each request's chunk is at least 128, and a
multiple of that."""


class Selected(NamedTuple):
    """The new tokens' queries, and the keys that each token selects.

    Attributes:
        q: [T, H, K], the new tokens' queries.
        request, position: [T], the request and the position of each token.
        keys: [T, k], the positions that each token selects; or, if are_bits, [T, W], these positions as words of bits.
        are_bits: whether `keys` are words of bits.
        all_below: tokens at positions below this one select all keys up to their own; 0 promises this of no token.
    """

    q: jax.Array
    request: jax.Array
    position: jax.Array
    keys: jax.Array
    are_bits: bool
    all_below: int


def attend_by_mask(
    params: Params,
    config: V32Config,
    new: Selected,
    kv: jax.Array,
    step: Step,
    *,
    kv_scale: float | jax.Array | None,
    implementation: Preference,
) -> jax.Array:
    """The heads' outputs [T, H, V] for new tokens whose rows are already in the cache `kv`."""
    mla, spec = config.mla, cache_spec("kv_cache", describe("kv_cache", kv))
    cu_seqlens_q = needed_when_ragged(step.cu_seqlens_q)
    max_q_len = min(needed_when_ragged(step.max_q_len), new.q.shape[0])
    context_lens = step.context_lens
    # A token that selects all keys needs no bits.
    tokens = jnp.arange(new.q.shape[0], dtype=jnp.int32)
    rows = jnp.where(new.position < new.all_below, -1, tokens)

    def bits_from(starts: jax.Array, most: int) -> jax.Array:
        if new.are_bits:
            return words_from(new.keys, starts, most)
        counted = jnp.where(rows < 0, 0, new.keys.shape[1]).astype(jnp.int32)
        options: dict[str, Any] = {"lengths": counted, "starts": starts, "implementation": implementation}
        return tsmla_jax.selection_bits(new.keys, most, **options)

    def attend(slots: jax.Array, cu_seqlens_kv: jax.Array, most: int, starts: jax.Array, *, causal: bool) -> State:
        usable = valid_slots(slots, spec)
        held = gather_rows(kv, jnp.where(usable, slots, 0), spec, jnp.dtype(jnp.float32))
        held = jnp.where(usable[:, None], held * (1.0 if kv_scale is None else kv_scale), 0).astype(new.q.dtype)
        latent, k_rope = jnp.split(held, [mla.kv_lora_rank], axis=-1)
        found = tsmla_jax.mla_prefill_kv(
            new.q,
            functional.expand_joint_kv(params, latent),
            k_rope,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_kv=cu_seqlens_kv,
            max_q_len=max_q_len,
            max_kv_len=most,
            softmax_scale=mla.softmax_scale,
            causal=causal,
            return_lse=True,
            selection=bits_from(starts, most),
            selection_rows=rows,
            implementation=implementation,
        )
        return found

    out, lse = attend(step.slot_mapping, cu_seqlens_q, max_q_len, context_lens[new.request], causal=True)
    requests = context_lens.shape[0]
    chunk = max(CHUNK_ROWS // max(requests, 1) // 128, 1) * 128
    needed = (jnp.max(context_lens, initial=0) + chunk - 1) // chunk

    def add_chunk(index: jax.Array, state: State) -> State:
        starts = jnp.minimum(index * chunk, context_lens)
        lens = jnp.minimum(context_lens - starts, chunk)
        cu_seqlens_kv = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(lens, dtype=jnp.int32)])
        request, local, owned = row_owner(cu_seqlens_kv, requests * chunk)
        at = jnp.where(owned, starts[request] + local, -1)
        slots = slots_of(step.block_tables, request, at, page_size=spec.page_size)
        first = jnp.full(new.position.shape, index * chunk, jnp.int32)
        part, part_lse = attend(slots, cu_seqlens_kv, chunk, first, causal=False)
        return tsmla_jax.merge_attention_states([state[0], part.astype(state[0].dtype)], [state[1], part_lse])

    def with_context(out: jax.Array, lse: jax.Array) -> jax.Array:
        # Results are merged once a chunk, at least in float32, so that rounding does not grow with the context.
        where = (out, kv, step.block_tables, context_lens)
        wide = carry(out.astype(jnp.promote_types(out.dtype, jnp.float32)), *where), carry(lse, *where)
        return jax.lax.fori_loop(0, needed, add_chunk, wide)[0].astype(out.dtype)

    out = jax.lax.cond(needed > 0, with_context, lambda out, lse: carry(out, kv, context_lens), out, lse)
    instead = "pass form='direct', or train with v32.prefill"
    return without_derivative(out, needed, "v32.attend in the form mask", instead)


def words_from(words: jax.Array, starts: jax.Array, num_keys: int) -> jax.Array:
    """Each token's words for num_keys keys, from key starts[t] on, cut out of the words [T, W] of all its keys. Bits
    past the end of `words` count as 0.
    """
    first, shift = starts // WORD_KEYS, (starts % WORD_KEYS).astype(jnp.uint32)[:, None]
    at = first[:, None] + jnp.arange(selection_words(num_keys) + 1, dtype=jnp.int32)
    width = words.shape[1]
    found = jnp.take_along_axis(words, jnp.minimum(at, width - 1), axis=1)
    found = lax.bitcast_convert_type(jnp.where(at < width, found, 0), jnp.uint32)
    low, high = found[:, :-1] >> shift, (found[:, 1:] << 1) << (WORD_KEYS - 1 - shift)
    return lax.bitcast_convert_type(low | high, jnp.int32)

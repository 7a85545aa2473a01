"""DeepSeek-V4's attention: a sliding window and compressed entries of all that came before, in one softmax with a sink.

A layer compresses 4 tokens an entry and lets an indexer choose entries ("csa"), or 128 and sees all of them ("hca"), or
has the window alone ("sliding"). `attend` is prefill, chunked prefill and decode in one; what does not depend on the
layer, the window's slots and the rows of hca layers among it, is made once a step by `make_step`. Axes: T new tokens in
all, B requests, E hidden width, H heads, D head width (K = V = the shared latent), R rope width, G output groups.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import tsmla_jax
from tsmla_jax.nn import functional
from tsmla_jax.nn.config import MLAConfig
from tsmla_jax.nn.deepseek_v4_config import (
    Kind,
    V4Config,
    compressors,
    load_hf_v4_attention,
    v4_hf_shapes,
    v4_param_shapes,
    v4_param_specs,
    v4_params_from_hf,
)
from tsmla_jax.nn.params import Params
from tsmla_jax.nn.rope import inverse_frequencies
from tsmla_jax.sparse import checks, numerics
from tsmla_jax.sparse.indexer import fold_weights

__all__ = [
    "Kind",
    "V4Cache",
    "V4Config",
    "V4Step",
    "attend",
    "init_v4_layer_cache",
    "load_hf_v4_attention",
    "make_step",
    "v4_hf_shapes",
    "v4_param_shapes",
    "v4_param_specs",
    "v4_params_from_hf",
    "v4_rope_table",
]


def v4_rope_table(config: V4Config, num_positions: int) -> jax.Array:
    """cos and sin for positions 0 to num_positions - 1, f32 [N, R]; one table for all layers of one rope."""
    rope = MLAConfig(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        qk_rope_head_dim=config.rope_dim,
        rope_theta=config.rope_theta,
        yarn=config.yarn,
    )
    return tsmla_jax.rope_table(jnp.asarray(inverse_frequencies(rope)), num_positions, scale=rope.rope_magnitude)


class V4Cache(NamedTuple):
    """One layer's caches and compressor states; None where its kind has none.

    window       [P, Z, D] floats or float8_e4m3fn, or uint8 [P, page_bytes]: every token's latent
    compressed   the same of compressed entries
    indexer      [P, Z, Di] floats, or uint8 [P, Z, Di + 4]: the indexer's compressed keys
    compressor, indexer_compressor   CompressorState
    """

    window: jax.Array
    compressed: jax.Array | None
    indexer: jax.Array | None
    compressor: tsmla_jax.CompressorState | None
    indexer_compressor: tsmla_jax.CompressorState | None


def init_v4_layer_cache(
    config: V4Config,
    *,
    window_pages: int,
    compressed_pages: int,
    num_states: int,
    page_size: int,
    compressed_page_size: int | None = None,
    dtype: DTypeLike = jnp.bfloat16,
    indexer_dtype: DTypeLike = jnp.uint8,
    spare: int = 0,
) -> V4Cache:
    """Empty caches; dtype uint8 is the packed layout (head_dim 512), indexer_dtype uint8 fp8 keys with scales.

    num_states: how many requests can be under way; spare: how many tokens a request may take back; page_size and
    compressed_page_size: rows a page of the window and of the compressed caches, equal unless the latter is given.
    """
    entries = page_size if compressed_page_size is None else compressed_page_size

    def cache(pages: int, rows: int) -> jax.Array:
        if jnp.dtype(dtype) == jnp.uint8:
            return tsmla_jax.init_v4_cache(
                pages, layout="packed", cache_dtype="fp8", page_size=rows, head_dim=config.head_dim
            )
        return jnp.zeros((pages, rows, config.head_dim), dtype)

    states: list[tsmla_jax.CompressorState | None] = [
        tsmla_jax.init_compressor_state(
            num_states, ratio=config.ratio, channels=channels, overlap=config.overlap, spare=spare
        )
        for _, channels in compressors(config)
    ]
    states += [None] * (2 - len(states))
    extra = 4 if jnp.dtype(indexer_dtype) == jnp.uint8 else 0
    return V4Cache(
        window=cache(window_pages, page_size),
        compressed=None if config.kind == "sliding" else cache(compressed_pages, entries),
        indexer=(
            jnp.zeros((compressed_pages, entries, config.index_head_dim + extra), indexer_dtype)
            if config.kind == "csa"
            else None
        ),
        compressor=states[0],
        indexer_compressor=states[1],
    )


class V4Step(NamedTuple):
    """What the layers of one kind share in one step (see `make_step`)."""

    positions: jax.Array
    seq_lens: jax.Array
    cu_seqlens_q: jax.Array
    state_slots: jax.Array
    window_write: jax.Array
    window_slots: jax.Array
    compressed_tables: jax.Array
    token_tables: jax.Array
    rows: tsmla_jax.MixedIndices | None


def make_step(
    config: V4Config,
    *,
    seq_lens: jax.Array,
    cu_seqlens_q: jax.Array,
    total_tokens: int,
    state_slots: jax.Array,
    window_tables: jax.Array,
    compressed_tables: jax.Array,
    page_size: int,
    compressed_page_size: int | None = None,
) -> V4Step:
    """The index rows of one step, for all layers of the config's kind, ratio and window.

    Args:
        config: of any such layer.
        seq_lens: [B] i32, the new tokens included.
        cu_seqlens_q: [B + 1] i32, where each request's new tokens start.
        total_tokens: T, static; tokens from cu_seqlens_q[B] on are padding.
        state_slots: [B] i32, each request's compressor states.
        window_tables: [B, M] i32, pages of the window cache; entries of pages wholly before the window are not read.
        compressed_tables: [B, Mc] i32, pages of the compressed caches (not read for sliding layers).
        page_size: Z of the window cache, static.
        compressed_page_size: of the compressed caches; None is the same.

    Raises what the index rows' operations raise (`tsmla_jax.window_slots`, `compressed_slots`); under TSMLA_CHECK=1
    also ValueError for cu_seqlens_q that are not in order.
    """
    entries = page_size if compressed_page_size is None else compressed_page_size
    cu_seqlens_q = checks.cu_seqlens(jnp.asarray(cu_seqlens_q), total_tokens)
    requests, positions = functional.ragged_positions(cu_seqlens_q, seq_lens - jnp.diff(cu_seqlens_q), total_tokens)
    window = tsmla_jax.window_slots(
        positions, window_tables[requests], page_size=page_size, window=config.sliding_window
    )
    token_tables = compressed_tables[requests]
    rows = None
    if config.kind == "sliding":
        rows = tsmla_jax.build_mixed_sparse_indices(window)
    elif config.kind == "hca":
        chosen, lens = tsmla_jax.compressed_slots(positions, token_tables, ratio=config.ratio, page_size=entries)
        rows = tsmla_jax.build_mixed_sparse_indices(window, chosen, lens)
    return V4Step(
        positions=positions,
        seq_lens=seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        state_slots=state_slots,
        window_write=functional.slots_of(window_tables, requests, positions, page_size=page_size),
        window_slots=window,
        compressed_tables=compressed_tables,
        token_tables=token_tables,
        rows=rows,
    )


def attend(
    params: Params,
    config: V4Config,
    x: jax.Array,
    cache: V4Cache,
    step: V4Step,
    *,
    cos_sin: jax.Array,
    page_size: int,
    compressed_page_size: int | None = None,
    kv_scale: float | jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, V4Cache]:
    """Attention of new tokens over their window and their requests' compressed entries.

    Args:
        params: see `v4_param_shapes`.
        x: [T, E], requests packed one after the other.
        cache: holds the tokens before the new ones.
        step: of `make_step`, for this layer's kind.
        cos_sin: of `v4_rope_table`.
        page_size: Z of the window cache, static.
        compressed_page_size: of the compressed caches; None is the same.
        kv_scale: of float8_e4m3fn window and compressed caches.
        implementation: of `tsmla_jax.sparse_mla`, `tsmla_jax.compress_kv` and `tsmla_jax.indexer_logits`.

    Returns:
        y [T, E] and the caches with the new tokens written (in place if donated). Rows of padding mean nothing.
    """
    eps = config.rms_norm_eps
    entries_page = page_size if compressed_page_size is None else compressed_page_size
    low = numerics.rms_norm(x @ params["q_a_proj"], params["q_a_norm"], eps).astype(x.dtype)
    q = jnp.einsum("tr,rhd->thd", low, params["q_b_proj"])
    wide = q.astype(jnp.float32)
    q = (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + eps)).astype(q.dtype)
    q = tsmla_jax.apply_rope(q, step.positions, cos_sin)

    kv = tsmla_jax.norm_rope(x @ params["kv_proj"], params["kv_norm"], step.positions, cos_sin, eps=eps)
    page = page_size if cache.window.dtype == jnp.uint8 else None
    window = tsmla_jax.write_v4_cache(cache.window, kv, step.window_write, kv_scale=kv_scale, page_size=page)
    cache = cache._replace(window=window)
    rows = step.rows
    if cache.compressed is not None and cache.compressor is not None:
        entries, state = _compress(params, config, "compressor", x, cache.compressor, step, cos_sin, implementation)
        slots = _entry_slots(entries, step, entries_page)
        compressed = tsmla_jax.write_v4_cache(
            cache.compressed, entries.kv, slots, kv_scale=kv_scale, page_size=None if page is None else entries_page
        )
        cache = cache._replace(compressed=compressed, compressor=state)
    if config.kind == "csa":
        rows, cache = _choose(params, config, x, low, cache, step, cos_sin, entries_page, implementation)
    if rows is None:
        raise ValueError(f"step: got one made for another kind of layer; this layer is {config.kind!r}")
    out = tsmla_jax.sparse_mla(
        q,
        cache.window,
        rows.indices,
        rows.lengths,
        softmax_scale=config.head_dim**-0.5,
        latent_dim=config.head_dim,
        sinks=params["sinks"],
        compressed_kv_cache=cache.compressed,
        window=None if cache.compressed is None else rows.window,
        page_size=page,
        compressed_page_size=None if page is None or cache.compressed is None else entries_page,
        kv_scale=kv_scale,
        compressed_kv_scale=None if cache.compressed is None else kv_scale,
        implementation=implementation,
    )
    # Values carry their own positions' rope; turned back by the query's, what is left is the distance.
    out = tsmla_jax.apply_rope(cast(jax.Array, out), step.positions, cos_sin, inverse=True)
    grouped = out.astype(x.dtype).reshape(x.shape[0], params["o_a_proj"].shape[0], -1)
    mixed = jnp.einsum("tgi,gir->tgr", grouped, params["o_a_proj"])
    return mixed.reshape(x.shape[0], -1) @ params["o_b_proj"], cache


def _compress(
    params: Params,
    config: V4Config,
    name: str,
    x: jax.Array,
    state: tsmla_jax.CompressorState,
    step: V4Step,
    cos_sin: jax.Array,
    implementation: str | None,
) -> tuple[tsmla_jax.CompressedEntries, tsmla_jax.CompressorState]:
    """The entries that the new tokens complete, normed and rotated, of one of the layer's compressors."""
    wide = x.astype(jnp.float32)
    projections = jnp.stack([params[f"{name}_kv_proj"], params[f"{name}_gate_proj"]], axis=1).astype(jnp.float32)
    kv_score = jnp.einsum("te,esw->tsw", wide, projections, precision="highest")
    entries, state = tsmla_jax.compress_kv(
        kv_score,
        params[f"{name}_position_bias"].astype(jnp.float32),
        state,
        state_slots=step.state_slots,
        seq_lens=step.seq_lens,
        cu_seqlens_q=step.cu_seqlens_q,
        ratio=config.ratio,
        overlap=config.overlap,
        implementation=implementation,
    )
    rows = tsmla_jax.norm_rope(
        entries.kv, params[f"{name}_kv_norm"], entries.positions * config.ratio, cos_sin, eps=config.rms_norm_eps
    )
    return entries._replace(kv=rows), state


def _entry_slots(entries: tsmla_jax.CompressedEntries, step: V4Step, page_size: int) -> jax.Array:
    """Where completed entries go, -1 for padding."""
    tables = step.compressed_tables[jnp.maximum(entries.requests, 0)]
    return tsmla_jax.positions_to_slots(entries.positions[:, None], tables, page_size)[:, 0]


def _choose(
    params: Params,
    config: V4Config,
    x: jax.Array,
    low: jax.Array,
    cache: V4Cache,
    step: V4Step,
    cos_sin: jax.Array,
    page_size: int,
    implementation: str | None,
) -> tuple[tsmla_jax.MixedIndices, V4Cache]:
    """The index rows of a csa layer: its indexer's compressed keys, their scores, the best of them."""
    if cache.indexer is None or cache.indexer_compressor is None:
        raise ValueError("cache: got none for the indexer; a csa layer needs one (see init_v4_layer_cache)")
    entries, state = _compress(params, config, "indexer", x, cache.indexer_compressor, step, cos_sin, implementation)
    slots = _entry_slots(entries, step, page_size)
    keys = tsmla_jax.write_indexer_cache(cache.indexer, entries.kv, slots)
    q = jnp.einsum("tr,rhd->thd", low, params["indexer_q_b_proj"]).astype(jnp.float32)
    q = tsmla_jax.apply_rope(q, step.positions, cos_sin)
    weights = x @ params["indexer_weights_proj"]
    if keys.dtype == jnp.uint8:
        q, weights = tsmla_jax.indexer_quantize(q, weights)
    else:
        weights = fold_weights(weights, config.index_head_dim)
    visible = jnp.maximum(step.positions + 1, 0) // config.ratio
    logits = tsmla_jax.indexer_logits(q, weights, keys, step.token_tables, visible, implementation=implementation)
    chosen = tsmla_jax.select_topk(logits, visible, min(config.index_topk, logits.shape[1]))
    chosen = tsmla_jax.positions_to_slots(chosen, step.token_tables, page_size)
    rows = tsmla_jax.build_mixed_sparse_indices(step.window_slots, chosen)
    return rows, cache._replace(indexer=keys, indexer_compressor=state)

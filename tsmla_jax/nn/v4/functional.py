"""DeepSeek-V4's attention: one softmax with a sink over a sliding window and compressed entries of all earlier tokens.

A layer compresses 4 tokens to an entry and lets an indexer choose entries ("csa"), or compresses 128 tokens to an entry
and sees all entries ("hca"), or has the window alone ("sliding"). `attend` serves prefill, chunked prefill and decode;
`make_step` makes once a step the arrays that do not depend on the layer. Axes: T new tokens in all, B requests, E
hidden width, H heads, D head width (K = V = the shared latent), R rope width, G output groups, P pages, Z page size, Di
indexer width.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

import tsmla_jax
from tsmla_jax import sparse
from tsmla_jax.nn import context_parallel
from tsmla_jax.nn.checkpoints.weights import Params
from tsmla_jax.nn.few_tokens import Rope as KernelRope
from tsmla_jax.nn.inputs import check_config, check_new_caches, check_params, check_tokens
from tsmla_jax.nn.norms import Norm
from tsmla_jax.nn.products.linear import joined_rows, linear, product, rows_of
from tsmla_jax.nn.products.norm_rope import Columns, Rope, norm_rope
from tsmla_jax.nn.step import check_axis, check_pages, check_step
from tsmla_jax.nn.v4 import few_tokens
from tsmla_jax.nn.v4.config import V4Config
from tsmla_jax.nn.v4.step import V4Step
from tsmla_jax.ops.exporting import exportable
from tsmla_jax.ops.operation import Preference
from tsmla_jax.ops.quantize import quantize_q
from tsmla_jax.ops.selected import indexer, layouts
from tsmla_jax.ops.selected import v4 as sparse_v4
from tsmla_jax.ops.selected.compressor import CompressorState, init_compressor_state
from tsmla_jax.ops.selected.v4 import MixedIndices


@exportable
class V4Cache(NamedTuple):
    """One layer's caches and compressor states; those that a layer of its kind lacks are None.

    Attributes:
        window: [P, Z, D] floats or float8_e4m3fn, or uint8 [P, page_bytes]: the tokens' latents.
        compressed: the compressed entries, in the same layouts.
        indexer: [P, Z, Di] floats or float8_e4m3fn, or uint8 [P, Z, Di + 4]: the indexer's compressed keys.
        compressor: the state of the entries' compressor.
        indexer_compressor: the state of the indexer's compressor.
    """

    window: jax.Array
    compressed: jax.Array | None
    indexer: jax.Array | None
    compressor: CompressorState | None
    indexer_compressor: CompressorState | None


def init_cache(
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
    """Empty caches.

    Args:
        config: the layer's shape.
        window_pages: pages of the window cache.
        compressed_pages: pages of the compressed caches.
        num_states: how many requests can be active at once.
        page_size: rows a page of the window cache.
        compressed_page_size: rows a page of the compressed caches; None takes page_size.
        dtype: dtype of window and compressed caches; uint8 is the packed layout (head_dim 512).
        indexer_dtype: dtype of the indexer's keys; uint8 is fp8 keys with scales.
        spare: how many of its last tokens a request may take back, as it does with rejected drafts.

    Raises:
        TypeError, ValueError: the packed layout with another head_dim than 512, or a size or dtype that is not legal.
    """
    check_config(config, V4Config)
    entries = page_size if compressed_page_size is None else compressed_page_size
    sizes = {"window_pages": window_pages, "compressed_pages": compressed_pages, "num_states": num_states}
    sizes |= {"page_size": page_size, "compressed_page_size": entries, "spare": spare}
    check_new_caches(sizes, {"dtype": dtype, "indexer_dtype": indexer_dtype})

    def cache(pages: int, rows: int) -> jax.Array:
        if jnp.dtype(dtype) == jnp.uint8:
            return sparse_v4.init_v4_cache(
                pages, layout="packed", cache_dtype="fp8", page_size=rows, head_dim=config.head_dim
            )
        return jnp.zeros((pages, rows, config.head_dim), dtype)

    states: list[CompressorState | None] = [
        init_compressor_state(num_states, ratio=config.ratio, channels=channels, overlap=config.overlap, spare=spare)
        for _, channels in config.compressors
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


def fold(params: Params, config: V4Config) -> dict[str, jax.Array]:
    """The parameters of a layer as an engine's step reads them fastest. With them `attend` uses kernels for norms and
    ropes on a GPU: there it has no derivative, is not partitioned automatically, is exported only with
    `tsmla_jax.export_disabled_checks()`, and runs under `jax.shard_map` with check_vma=False. The last axis of every
    matrix is the one that a product sums over: o_a_proj is [G, o_rank, H D / G], the others are [N, K]. in_proj
    [rank + D + Hi, E] joins all matrices that multiply x, except the compressors' (Hi is 0 without an indexer); the two
    matrices of each compressor are joined in NAME_rows_proj [2 W, E].
    """
    folded = dict(params)
    folded["in_proj"] = cast(jax.Array, joined_rows([rows_of(folded.pop(name)) for name, _ in _inputs(config)]))
    folded |= {name: cast(jax.Array, rows_of(folded[name])) for name in _matrices(config)}
    for name, _ in config.compressors:
        parts = [rows_of(folded.pop(f"{name}_{part}_proj")) for part in _ROWS]
        folded[f"{name}_rows_proj"] = cast(jax.Array, joined_rows(parts))
    return folded | {"o_a_proj": params["o_a_proj"].swapaxes(1, 2)}


def unfold(params: Params, config: V4Config) -> dict[str, Any]:
    """The inverse of `fold`; exact to the bit if the matrices of in_proj had one dtype, and the two of each compressor
    had one."""
    unfolded: dict[str, Any] = dict(params)
    rest = unfolded.pop("in_proj")
    for name, width in _inputs(config):
        unfolded[name], rest = rest[:width].T, rest[width:]
    heads = {"q_b_proj": (-1, config.head_dim), "indexer_q_b_proj": (-1, config.index_head_dim)}
    for name in _matrices(config):
        columns, depth = params[name].shape
        unfolded[name] = params[name].T.reshape(depth, *heads.get(name, (columns,)))
    for name, _ in config.compressors:
        halves = jnp.split(unfolded.pop(f"{name}_rows_proj"), 2)
        unfolded |= {f"{name}_{part}_proj": half.T for part, half in zip(_ROWS, halves, strict=True)}
    return unfolded | {"o_a_proj": params["o_a_proj"].swapaxes(1, 2)}


def _inputs(config: V4Config) -> list[tuple[str, int]]:
    """The names of the matrices that in_proj joins, and how many columns each has."""
    names = [("q_a_proj", config.q_lora_rank), ("kv_proj", config.head_dim)]
    return [*names, ("indexer_weights_proj", config.index_n_heads)] if config.kind == "csa" else names


def _matrices(config: V4Config) -> list[str]:
    """The names of the other matrices, without o_a_proj and the compressors' matrices."""
    return ["q_b_proj", "o_b_proj", *(["indexer_q_b_proj"] if config.kind == "csa" else [])]


_ALWAYS = ("q_a_proj", "q_a_norm", "q_b_proj", "kv_proj", "kv_norm", "sinks", "o_a_proj", "o_b_proj")
_ROWS = ("kv", "gate")
"""The parts of a compressor's rows."""


def check_layer(params: Params, config: V4Config) -> None:
    """Raises a TypeError or ValueError unless the config is a V4Config, and params have the weights that layers of all
    kinds have, or are folded."""
    check_config(config, V4Config)
    check_params(params, _ALWAYS)


def _check_kind(cache: V4Cache, config: V4Config) -> None:
    """ValueError for the caches of a layer of another kind."""
    held = {"sliding": (), "hca": ("compressed", "compressor")}.get(config.kind, cache._fields[1:])
    for name in cache._fields[1:]:
        if (getattr(cache, name) is not None) != (name in held):
            got = "None" if name in held else "a cache"
            raise ValueError(f"cache.{name}: got {got}; legal: what v4.init_cache makes for a {config.kind!r} layer")


def project_in(params: Params, config: V4Config, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Products of x: [T, rank + D], by the query's first matrix and by kv_proj, side by side (in_proj may add columns
    after them); and the weights of the indexer's heads [T, Hi], where Hi is 0 without an indexer.
    """
    if "in_proj" in params:
        both = linear(x, params["in_proj"])
        return both, both[:, config.q_lora_rank + config.head_dim :]
    low, kv, *weights = (x @ params[name] for name, _ in _inputs(config))
    return jnp.concatenate([low, kv], axis=1), weights[0] if weights else x[:, :0]


def attend(
    params: Params,
    config: V4Config,
    x: jax.Array,
    cache: V4Cache,
    step: V4Step,
    *,
    kv_scale: float | jax.Array | None = None,
    q_scale: float | jax.Array | None = None,
    context_axis: str | None = None,
    implementation: Preference = None,
) -> tuple[jax.Array, V4Cache]:
    """Attention of new tokens over their window and their requests' compressed entries.

    Args:
        params: see `param_shapes`.
        config: the layer's shape.
        x: [T, E], requests packed one after the other.
        cache: holds the tokens before the new ones.
        step: what `make_step` made for this layer's kind.
        kv_scale: the scale of float8_e4m3fn window and compressed caches.
        q_scale: quantises the queries to float8_e4m3fn (q / q_scale); None leaves them in x's dtype.
        context_axis: a mesh axis whose devices share the compressed entries of every request (`nn.context_parallel`)
            and all have x, the window's cache and the compressors' states; the step is made with the same axis.
        implementation: passed to `tsmla_jax.sparse_mla`, `tsmla_jax.compress_write_kv_cache`, `tsmla_jax.indexer_topk`
            and, over a context_axis, `tsmla_jax.select_topk`.

    Returns:
        y [T, E] and the caches with the new tokens written (in place if donated). Padding rows have no meaning.

    Raises:
        TypeError, ValueError: an argument has an illegal type, shape or dtype, or the step was made for another kind of
            layer, or with another context_axis or other page sizes.
        NotImplementedError: the named implementation can't run this call.
    """
    check_layer(params, config)
    check_tokens(x, config.hidden_size, "T E")
    if not isinstance(cache, V4Cache):
        raise TypeError(f"cache: got {type(cache).__name__}; legal: V4Cache, which v4.init_cache makes")
    _check_kind(cache, config)
    check_step(step, V4Step, "v4.make_step")
    check_axis(context_axis, step.context_axis)
    if step.kind != config.kind:
        raise ValueError(f"step: got one made for a {step.kind!r} layer; legal: one made for a {config.kind!r} layer")
    check_pages("cache.window", cache.window, step.page_size, "page_size")
    for name, entries in (("cache.compressed", cache.compressed), ("cache.indexer", cache.indexer)):
        if entries is not None:
            check_pages(name, entries, step.compressed_page_size, "compressed_page_size")
    if few_tokens.why_not_inputs(params, config, x):
        projected, index_weights = project_in(params, config, x)
        pooled = {name: compressor_rows(params, name, x) for name, _ in config.compressors}
    else:
        projected, index_weights, pooled = few_tokens.inputs_by_kernel(params, config, x)
    # Only folded parameters take the kernel of norms and ropes: with it a program isn't partitioned automatically.
    rows = functools.partial(norm_rope, by_kernel="in_proj" in params)
    rope = Rope(step.positions, step.cos_sin)
    rank, width, eps = config.q_lora_rank, config.head_dim, config.rms_norm_eps
    # The shape of a packed cache does not say how many rows its pages have; the shape of other caches does.
    packed = cache.window.dtype == jnp.uint8
    page_size, entries_page_size = (step.page_size, step.compressed_page_size) if packed else (None, None)
    slots = step.window.slot_mapping
    low_norm, kv_norm = Norm(params["q_a_norm"], eps), Norm(params["kv_norm"], eps)
    as_packed: dict[str, Any] = {"low_norm": low_norm, "norm": kv_norm, "page_size": step.page_size}
    by_kernel = "in_proj" in params and kv_scale is None
    if by_kernel and not few_tokens.why_not_window(projected, cache.window, rope_dim=config.rope_dim, **as_packed):
        turn = _angles(step.positions, step.cos_sin)
        low, window = few_tokens.write_window_by_kernel(cache.window, projected, slots, rope=turn, **as_packed)
    else:
        low = rows(projected, Columns(0, 1, rank), low_norm)[:, 0]
        kv = rows(projected, Columns(rank, 1, width), kv_norm, rope, dtype=jnp.float32)[:, 0]
        window = layouts.write_v4_cache(cache.window, kv, slots, kv_scale=kv_scale, page_size=page_size)
    cache = cache._replace(window=window)
    q = lax.collapse(few_tokens.matrix(params, "q_b_proj", low), 1)
    q = quantize_q(rows(q, Columns(0, q.shape[1] // width, width), eps, rope), q_scale)
    selected = step.rows
    if cache.compressed is not None and cache.compressor is not None:
        options = {"kv_scale": kv_scale, "page_size": entries_page_size, "implementation": implementation}
        held = cache.compressed, cache.compressor
        compressed, state = _compress(params, config, "compressor", pooled, held, step, **options)
        cache = cache._replace(compressed=compressed, compressor=state)
    if config.kind == "csa":
        selected, cache = _choose(params, config, (pooled, low, index_weights), cache, step, implementation)
    assert selected is not None  # the step is one of this layer's kind
    attention: dict[str, Any] = {
        "softmax_scale": config.head_dim**-0.5,
        "latent_dim": config.head_dim,
        "page_size": page_size,
        "q_scale": q_scale,
        "kv_scale": kv_scale,
        "tokens_per_request": max(x.shape[0] // step.state_slots.shape[0], 1),  # on average, which is enough
        "implementation": implementation,
    }
    if cache.compressed is not None:
        attention |= {
            "compressed_kv_cache": cache.compressed,
            "window": selected.window,
            "compressed_page_size": entries_page_size,
            "compressed_kv_scale": kv_scale,
        }

    def project(out: jax.Array, positions: jax.Array) -> jax.Array:
        return project_out(params, config, out, Rope(positions, step.cos_sin, inverse=True), x.dtype)

    indices, sinks = (selected.indices, selected.lengths), params["sinks"]
    if context_axis is None or cache.compressed is None:  # a window alone is whole on every device
        out = tsmla_jax.sparse_mla(q, cache.window, *indices, sinks=sinks, **attention)
        return project(cast(jax.Array, out), step.positions), cache
    out, lse = tsmla_jax.sparse_mla(q, cache.window, *indices, return_lse=True, **attention)
    merged = context_parallel.project_merged(out, lse, context_axis, project, step.positions, sinks=sinks)
    return merged, cache


def _angles(positions: jax.Array, cos_sin: jax.Array) -> KernelRope:
    """The rope of positions as the kernels of few tokens take it."""
    return KernelRope(*sparse_v4.angles(positions, cos_sin), True, "interleaved")


def _compress(
    params: Params,
    config: V4Config,
    name: str,
    pooled: Mapping[str, jax.Array],
    held: tuple[jax.Array, CompressorState],
    step: V4Step,
    **options: Any,
) -> tuple[jax.Array, CompressorState]:
    """The cache of one compressor with the entries written that the new tokens complete, and the compressor's new
    state.

    pooled: the result of `compressor_rows` for each compressor.
    """
    cache, state = held
    return tsmla_jax.compress_write_kv_cache(
        cache,
        pooled[name],
        params[f"{name}_position_bias"].astype(jnp.float32),
        state,
        params[f"{name}_kv_norm"],
        step.cos_sin,
        step.compressed_tables,
        state_slots=step.state_slots,
        seq_lens=step.window.seq_lens,
        cu_seqlens_q=cast(jax.Array, step.window.cu_seqlens_q),
        ratio=config.ratio,
        overlap=config.overlap,
        eps=config.rms_norm_eps,
        **options,
    )


def compressor_rows(params: Params, name: str, x: jax.Array) -> jax.Array:
    """The rows that the compressor `name` pools: kv and score of each token, f32 [T, 2, W]."""
    axes = "te,we->tw" if "in_proj" in params else "te,ew->tw"

    def project(weight: jax.Array) -> jax.Array:
        # Products of 16-bit values are exact within f32's range, and tensor cores compute them several times as fast as
        # products of f32 values.
        if x.dtype != weight.dtype or x.dtype.itemsize != 2:
            weight, wide = weight.astype(jnp.float32), x.astype(jnp.float32)
            return jnp.einsum(axes, wide, weight, precision="highest")
        return jnp.einsum(axes, x, weight, preferred_element_type=jnp.float32)

    if "in_proj" in params:
        both = project(params[f"{name}_rows_proj"])
        return both.reshape(both.shape[0], 2, both.shape[1] // 2)
    # The products are put side by side, not the matrices, because a step would copy these.
    return jnp.stack([project(params[f"{name}_{part}_proj"]) for part in _ROWS], axis=1)


def project_out(params: Params, config: V4Config, out: jax.Array, back: Rope, dtype: jnp.dtype) -> jax.Array:
    """The grouped projection [T, E] of attention's out [T, H, D], which is first rotated back by the query's position:
    values carry the rope of their own positions, so only the distance of the two positions counts afterwards.
    """
    width = config.head_dim
    if (
        "in_proj" in params
        and dtype == out.dtype
        and not few_tokens.why_not_outputs(params["o_a_proj"], out, config.rope_dim)
    ):
        mixed = few_tokens.outputs_by_kernel(params["o_a_proj"], out, _angles(back.positions, back.cos_sin))
        return few_tokens.matrix(params, "o_b_proj", mixed)
    heads = Columns(0, out.shape[1], width)
    out = norm_rope(lax.collapse(out, 1), heads, rope=back, by_kernel="in_proj" in params)
    groups = params["o_a_proj"].shape[0]
    grouped = out.astype(dtype).reshape(out.shape[0], groups, out.shape[1] * width // groups)
    axes = "tgi,gri->tgr" if "in_proj" in params else "tgi,gir->tgr"
    mixed = jnp.einsum(axes, grouped, params["o_a_proj"])
    return product(params, "o_b_proj", lax.collapse(mixed, 1))


def _choose(
    params: Params,
    config: V4Config,
    projected: tuple[Mapping[str, jax.Array], jax.Array, jax.Array],
    cache: V4Cache,
    step: V4Step,
    implementation: Preference,
) -> tuple[MixedIndices, V4Cache]:
    """The index rows of a csa layer, which hold the window's slots and the entries that its indexer chooses; and the
    cache with the indexer's new keys.

    projected: the rows of each compressor, the normed low-rank query, and the weights of the indexer's heads."""
    pooled, low, weights = projected
    assert cache.indexer is not None and cache.indexer_compressor is not None  # the caches are of this layer's kind
    held = cache.indexer, cache.indexer_compressor
    keys, state = _compress(params, config, "indexer", pooled, held, step, implementation=implementation)
    q = few_tokens.matrix(params, "indexer_q_b_proj", low)
    q = q.reshape(low.shape[0], math.prod(q.shape[1:]) // config.index_head_dim, config.index_head_dim)
    if keys.dtype == jnp.uint8:
        cos, sin = sparse_v4.angles(step.positions, step.cos_sin)
        offset = config.index_head_dim - config.rope_dim
        q, weights = sparse.indexer_quantize(q, weights, cos, sin, rope_offset=offset, rope_layout="interleaved")
    else:
        q = sparse_v4.apply_rope(q.astype(jnp.float32), step.positions, step.cos_sin)
        weights = indexer.fold_weights(weights, config.index_head_dim)
    where = (q, weights, keys, step.token_tables, cast(jax.Array, step.compressed_lens))
    if step.context_axis is None:
        most = min(config.index_topk, step.token_tables.shape[1] * keys.shape[1])
        chosen, _ = tsmla_jax.indexer_topk(*where, most, return_slots=True, implementation=implementation)
        # The counts of the result, but from arrays of the step: a program computes them once for all layers.
        lens = jnp.minimum(cast(jax.Array, step.compressed_lens), most)
    else:
        chosen, lens = context_parallel.indexer_topk(
            *where, config.index_topk, context_axis=step.context_axis, implementation=implementation
        )
    rows = sparse_v4.build_mixed_sparse_indices(step.window_slots, chosen, lens)
    return rows, cache._replace(indexer=keys, indexer_compressor=state)

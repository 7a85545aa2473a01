"""DeepSeek-V4's attention over whole packed texts, without caches and with a gradient, for training.

The indexer of a csa layer is trained only by `indexer_loss`, over the entries that it chose: its input is detached.
Axes: T tokens, B texts, E hidden width, H heads, D head width, N compressed entries of all texts, K chosen entries of a
token.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import tsmla_jax
from tsmla_jax.nn import packed_texts
from tsmla_jax.nn.checkpoints.weights import Params
from tsmla_jax.nn.inputs import check_texts
from tsmla_jax.nn.norms import Norm
from tsmla_jax.nn.products.linear import product
from tsmla_jax.nn.products.norm_rope import Columns, Rope, norm_rope
from tsmla_jax.nn.step import ragged_positions
from tsmla_jax.nn.v4.config import V4Config
from tsmla_jax.nn.v4.functional import check_layer, compressor_rows, project_out
from tsmla_jax.nn.v4.step import check_angles
from tsmla_jax.ops.exporting import exportable
from tsmla_jax.ops.inputs import describe_ints
from tsmla_jax.ops.operation import Preference
from tsmla_jax.ops.selected import indexer
from tsmla_jax.ops.selected import v4 as sparse_v4
from tsmla_jax.ops.selected.compressor import init_compressor_state
from tsmla_kernels.contract.rules import static_bool

SELECTED, OUT, LSE = CHECKPOINT_NAMES = ("v4_selected", "v4_out", "v4_lse")
"""Names for jax.checkpoint's policies: of the chosen entries, and of the attention's out and lse."""


@exportable
class V4Prefill(NamedTuple):
    """The results of `prefill`.

    Attributes:
        y: [T, E] in x's dtype, if the parameters have it, too; else in the dtype to which jax promotes both.
        selected: [T, K] int32, the compressed entries of its own text that the indexer chose for each token of a csa
            layer, then -1; or the argument `selected`, if it was given. None in layers of another kind.
        index_loss: [T] float32, `tsmla_jax.indexer_loss` of each token over these entries; 0 in padding and for a token
            that sees no entry. None in layers of another kind, or if it was not asked for.
    """

    y: jax.Array
    selected: jax.Array | None
    index_loss: jax.Array | None


class _Texts(NamedTuple):
    """Packed texts.

    cu_seqlens: [B + 1].
    request, positions: [T], the text and the position of each token.
    max_len: static bound of a text's length.
    cos_sin: the rope's table.
    """

    cu_seqlens: jax.Array
    request: jax.Array
    positions: jax.Array
    max_len: int
    cos_sin: jax.Array

    @property
    def lens(self) -> jax.Array:
        """Tokens of each text."""
        return jnp.diff(self.cu_seqlens).astype(jnp.int32)


class _Entries(NamedTuple):
    """Compressed entries of packed texts.

    rows: [N, C].
    lens: [B], how many entries each text has.
    first: [B], the index of each text's first entry.
    owners: the text and the position of each entry.
    seen: [T], how many entries each token sees.
    most: static bound of a text's entries.
    """

    rows: jax.Array
    lens: jax.Array
    first: jax.Array
    owners: tuple[jax.Array, jax.Array]
    seen: jax.Array
    most: int

    def slots(self, texts: _Texts, chosen: jax.Array) -> jax.Array:
        """Row indices [T, K] of the chosen entries; -1 for a column without an entry, or with one that the token does
        not see.
        """
        legal = (chosen >= 0) & (chosen < self.seen[:, None])
        return jnp.where(legal, chosen + self.first[texts.request][:, None], -1)


def prefill(
    params: Params,
    config: V4Config,
    x: jax.Array,
    *,
    cu_seqlens_q: jax.Array,
    max_q_len: int,
    cos_sin: jax.Array,
    selected: jax.Array | None = None,
    index_loss: bool = True,
    head_axis: str | None = None,
    implementation: Preference = None,
) -> V4Prefill:
    """Attention of whole texts over windows and compressed entries, and a csa layer's indexer loss; differentiable.

    Gradients of y reach x and all parameters but the indexer's; gradients of index_loss reach only the indexer's
    parameters, its compressor included. If index_topk is at least the number of a text's entries, a csa layer sees all
    entries: the dense warm-up.

    Args:
        params: see `param_shapes`; plain weights, because folded ones have no gradient.
        config: the layer's shape.
        x: [T, E] of 16, 32 or 64 bits, texts packed one after the other. For rows of packed segments pass
            x.reshape(-1, E) with the cu_seqlens of `nn.Segments`.
        cu_seqlens_q: [B + 1] i32, where each text starts; tokens from cu_seqlens_q[B] on are padding.
        max_q_len: static bound of a text's length.
        cos_sin: the result of `rope_table` for at least min(max_q_len, T) positions.
        selected: [T, K] i32, only for csa layers: entries to attend to in place of the indexer's choice. -1 and
            entries that a token does not see select nothing.
        index_loss: whether a csa layer computes the indexer's loss. Without it, and with `selected`, no parameter of
            the indexer is read.
        head_axis: under shard_map with params split by `param_specs`, the mesh axis of the heads. y is then the partial
            sum of the local heads, for the caller to psum; selected and index_loss count all heads.
        implementation: passed to `tsmla_jax.sparse_mla`, `tsmla_jax.indexer_topk` and `tsmla_jax.indexer_loss`.

    Returns:
        V4Prefill. Padding rows of y and selected have no meaning.

    Raises:
        TypeError, ValueError: an argument or a parameter has an illegal type, shape or dtype, fp8 among them; the
            parameters are folded; or selected is given to a layer that chooses nothing.
        NotImplementedError: the named implementation can't run this call.
    """
    check_layer(params, config)
    packed_texts.check_trainable(params, x, config.hidden_size)
    check_texts(cu_seqlens_q, max_q_len)
    static_bool("index_loss", index_loss)
    check_angles(config, cos_sin, positions=min(max_q_len, x.shape[0]))
    if "in_proj" in params:
        raise ValueError("params: got folded ones, which have no gradient; legal: those of param_shapes")
    if selected is not None:
        if config.kind != "csa":
            raise ValueError(f"selected: got an array for a layer of kind {config.kind!r}; legal: None")
        describe_ints("selected", selected, "T K", (x.shape[0], "T, x's tokens"))
    cu_seqlens_q = jnp.asarray(cu_seqlens_q)
    starts = jnp.zeros(cu_seqlens_q.shape[0] - 1, jnp.int32)
    request, positions = ragged_positions(cu_seqlens_q, starts, x.shape[0])
    texts = _Texts(cu_seqlens_q, request, positions, max_q_len, cos_sin)
    rank, width, eps = config.q_lora_rank, config.head_dim, config.rms_norm_eps
    rope = Rope(positions, cos_sin)
    projected = jnp.concatenate([x @ params[name] for name in ("q_a_proj", "kv_proj")], axis=1)
    low = norm_rope(projected, Columns(0, 1, rank), Norm(params["q_a_norm"], eps))[:, 0]
    q = lax.collapse(product(params, "q_b_proj", low), 1)
    q = norm_rope(q, Columns(0, q.shape[1] // width, width), eps, rope)
    kv = norm_rope(projected, Columns(rank, 1, width), Norm(params["kv_norm"], eps), rope)

    window = _window(config, texts)
    attention: dict[str, Any] = {
        "softmax_scale": width**-0.5,
        "latent_dim": width,
        "sinks": params["sinks"],
        "return_lse": True,
        "implementation": implementation,
    }
    if config.kind == "sliding":
        rows = sparse_v4.build_mixed_sparse_indices(window)
        out, _ = tsmla_jax.sparse_mla(q, kv, rows.indices, rows.lengths, **attention)
        out = checkpoint_name(out, OUT)
        return V4Prefill(project_out(params, config, out, rope._replace(inverse=True), x.dtype), None, None)

    entries = _compress(params, config, "compressor", x, texts)
    index = None
    if config.kind == "csa":
        if index_loss or selected is None:
            index = _indexer(params, config, x, low, texts)
        if selected is None:
            assert index is not None  # made above, as selected is None
            selected = _choose(config, index, texts, implementation)
        selected = checkpoint_name(jnp.asarray(selected), SELECTED)
        chosen = entries.slots(texts, selected)
    else:
        every = jnp.arange(entries.most, dtype=jnp.int32)
        chosen = entries.slots(texts, jnp.broadcast_to(every, (x.shape[0], entries.most)))
    compressed = entries.rows.astype(x.dtype)[:, None]
    # A given choice may have gaps, so -1 may stand in any column.
    columns = jnp.concatenate([window, chosen], axis=1)
    columns = jnp.pad(columns, ((0, 0), (0, -columns.shape[1] % 4)), constant_values=-1)
    out, lse = tsmla_jax.sparse_mla(
        q, kv, columns, compressed_kv_cache=compressed, window=config.sliding_window, **attention
    )
    out, lse = checkpoint_name(out, OUT), checkpoint_name(lse, LSE)
    y = project_out(params, config, out, rope._replace(inverse=True), x.dtype)
    if index is None or not index_loss:
        return V4Prefill(y, selected, None)
    loss = tsmla_jax.indexer_loss(
        index.q,
        index.weights,
        index.keys.rows[:, None],
        lax.stop_gradient(q),
        lax.stop_gradient(compressed),
        lax.stop_gradient(lse),
        softmax_scale=width**-0.5,
        indices=chosen,
        sinks=lax.stop_gradient(params["sinks"]),
        head_axis=head_axis,
        implementation=implementation,
    )
    return V4Prefill(y, selected, loss)


def _window(config: V4Config, texts: _Texts) -> jax.Array:
    """The row indices [T, window] of the last tokens up to each token's own, oldest first, then -1."""
    positions = texts.positions[:, None]
    last = jnp.arange(config.sliding_window, dtype=jnp.int32)
    at = jnp.maximum(positions - (config.sliding_window - 1), 0) + last
    return jnp.where(at <= positions, at + texts.cu_seqlens[texts.request][:, None], -1)


def _compress(params: Params, config: V4Config, name: str, x: jax.Array, texts: _Texts) -> _Entries:
    """The entries of the compressor `name`, normed and rotated, float32."""
    channels = dict(config.compressors)[name]
    texts_count = texts.lens.shape[0]
    state = init_compressor_state(texts_count, ratio=config.ratio, channels=channels, overlap=config.overlap)
    found, _ = tsmla_jax.compress_kv(
        compressor_rows(params, name, x),
        params[f"{name}_position_bias"].astype(jnp.float32),
        state,
        state_slots=jnp.arange(texts_count, dtype=jnp.int32),
        seq_lens=texts.lens,
        cu_seqlens_q=texts.cu_seqlens,
        ratio=config.ratio,
        overlap=config.overlap,
        implementation="reference",  # "xla" has no gradient under jax.jit
    )
    first_positions = jnp.where(found.positions >= 0, found.positions * config.ratio, -1)
    rows = sparse_v4.norm_rope(
        found.kv, params[f"{name}_kv_norm"], first_positions, texts.cos_sin, eps=config.rms_norm_eps
    )
    lens = texts.lens // config.ratio
    return _Entries(
        rows=rows,
        lens=lens,
        first=jnp.cumsum(lens) - lens,
        owners=(jnp.maximum(found.requests, 0), found.positions),
        seen=jnp.maximum(texts.positions + 1, 0) // config.ratio,
        most=texts.max_len // config.ratio,
    )


class _Index(NamedTuple):
    """The indexer's queries [T, Hi, Di], weights [T, Hi] and compressed keys."""

    q: jax.Array
    weights: jax.Array
    keys: _Entries


def _indexer(params: Params, config: V4Config, x: jax.Array, low: jax.Array, texts: _Texts) -> _Index:
    """The indexer's products, from a detached x and low-rank query; q and keys are in x's dtype, as plain caches hold
    keys.
    """
    low = lax.stop_gradient(low)
    detached = lax.stop_gradient(x)
    weights = detached @ params["indexer_weights_proj"]
    q = product(params, "indexer_q_b_proj", low)
    q = q.reshape(x.shape[0], math.prod(q.shape[1:]) // config.index_head_dim, config.index_head_dim)
    q = sparse_v4.apply_rope(q.astype(jnp.float32), texts.positions, texts.cos_sin)
    keys = _compress(params, config, "indexer", detached, texts)
    keys = keys._replace(rows=keys.rows.astype(x.dtype))
    return _Index(q.astype(x.dtype), indexer.fold_weights(weights, config.index_head_dim), keys)


def _choose(config: V4Config, index: _Index, texts: _Texts, implementation: Preference) -> jax.Array:
    """The entries [T, K] with the greatest logits among those that each token sees, ascending, then -1."""
    q, weights, rows = lax.stop_gradient((index.q, index.weights, index.keys.rows))
    keys = index.keys
    pages = packed_texts.in_pages(rows, keys.lens, keys.owners, keys.most)
    return tsmla_jax.indexer_topk(
        q,
        weights,
        pages.rows,
        pages.tables[texts.request],
        keys.seen,
        min(config.index_topk, pages.capacity),
        implementation=implementation,
    )

"""The attention of DeepSeek-V3.2 and GLM-5 over whole packed texts, without caches and with a gradient: training.

The main model is trained by its own loss through the attention, and the indexer only by `indexer_loss`: its input is
detached, as in V3.2's report. Axes: T tokens, B texts, E hidden width, H heads, K selected keys of a token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import tsmla_jax
from tsmla_jax.nn import packed_texts
from tsmla_jax.nn.checkpoints.weights import Params
from tsmla_jax.nn.inputs import check_config, check_texts
from tsmla_jax.nn.mla import functional
from tsmla_jax.nn.mla.rope import rope_cos_sin
from tsmla_jax.nn.step import ragged_positions
from tsmla_jax.nn.v32.config import V32Config
from tsmla_jax.nn.v32.mask import head_dims, mask_reasons
from tsmla_jax.nn.v32.projections import Angles, index_rotation, indexer_keys, indexer_queries
from tsmla_jax.ops.exporting import exportable
from tsmla_jax.ops.inputs import describe_ints
from tsmla_jax.ops.operation import Preference
from tsmla_jax.ops.selected import indexer
from tsmla_kernels.contract.forms import Form, StepSizes, selected_form
from tsmla_kernels.contract.rules import static_bool

SELECTED, OUT, LSE = CHECKPOINT_NAMES = ("v32_selected", "v32_out", "v32_lse")
"""Names for jax.checkpoint's policies: of the chosen positions, and of the attention's out and lse. If these are saved,
the gradient's pass repeats neither the top-k nor the attention."""


@exportable
class V32Prefill(NamedTuple):
    """The results of `prefill`.

    Attributes:
        y: [T, E] in x's dtype, if the parameters have it, too; else in the dtype to which jax promotes both.
        selected: [T, K] int32, the positions in its own text that the indexer chose for each token, then -1; or the
            argument `selected`, if it was given. None in the dense warm-up, where a token attends to all tokens up to
            itself.
        index_loss: [T] float32, `tsmla_jax.indexer_loss` of each token, 0 in padding; None if it was not asked for.
    """

    y: jax.Array
    selected: jax.Array | None
    index_loss: jax.Array | None


def prefill(
    params: Params,
    config: V32Config,
    x: jax.Array,
    *,
    cu_seqlens_q: jax.Array,
    max_q_len: int,
    selected: jax.Array | None = None,
    dense: bool = False,
    index_loss: bool = True,
    head_axis: str | None = None,
    form: str | None = None,
    deterministic: bool = False,
    implementation: Preference = None,
) -> V32Prefill:
    """Attention of whole texts over the keys that the indexer chooses, and the indexer's loss; differentiable.

    Gradients of y reach x and MLA's parameters; those of index_loss reach the indexer's parameters and nothing else.

    Args:
        params: see `param_shapes`; plain weights, because weights in e4m3 have no gradient.
        config: the layer's shape.
        x: [T, E] of 16, 32 or 64 bits, texts packed one after the other. For rows of packed segments pass
            x.reshape(-1, E) with the cu_seqlens of `nn.Segments`.
        cu_seqlens_q: [B + 1] i32, where each text starts; tokens from cu_seqlens_q[B] on are padding.
        max_q_len: static bound of a text's length.
        selected: [T, K] i32 positions to attend to in place of the indexer's choice: those of a rollout (`attend` with
            return_selected), or those of the layer whose choice this one shares. -1 and positions after the token's own
            select nothing.
        dense: the warm-up: attention to all tokens up to the token's own, in the expanded form, and an index_loss over
            all of them.
        index_loss: whether to compute the indexer's loss; False for a layer without an indexer. Without it, and with
            `selected` or `dense`, no parameter of the indexer is read.
        head_axis: under shard_map with params split by `param_specs`, the mesh axis of the heads. y is then the partial
            sum of the local heads, for the caller to psum; selected and index_loss count all heads.
        form: "direct" (`sparse_mla` on the selected keys), "mask" (the expanded form with a bit for each pair of tokens
            of a text: a position that is given twice counts once), or None, which decides from sizes as `form_of` does:
            with 2,048 selected keys the mask pays off up to 10,000 to 37,000 tokens a text, depending on the heads'
            number and widths. Both forms attend to the same keys.
        deterministic, implementation: passed to `tsmla_jax.sparse_mla` or `tsmla_jax.mla_prefill_kv`; implementation
            also to `tsmla_jax.selection_bits`, `tsmla_jax.indexer_topk` and `tsmla_jax.indexer_loss`.

    Returns:
        V32Prefill. Padding rows of y and selected have no meaning.

    Raises:
        TypeError, ValueError: an argument or a parameter has an illegal type, shape or dtype, fp8 among them; selected
            or a form is given in the warm-up; `form` is unknown; or a layer without an indexer is asked for a
            choice or for the indexer's loss.
        NotImplementedError: the named implementation can't run this call.
    """
    check_config(config, V32Config)
    functional.check_layer(params, mla := config.mla)
    packed_texts.check_trainable(params, x, mla.hidden_size)
    check_texts(cu_seqlens_q, max_q_len)
    num_tokens = x.shape[0]
    _check_choice(num_tokens, selected, form, dense=dense, index_loss=index_loss)
    if not config.has_indexer:
        _check_sharing(selected is not None or dense, index_loss)
    cu_seqlens_q = jnp.asarray(cu_seqlens_q)
    starts = jnp.zeros(cu_seqlens_q.shape[0] - 1, jnp.int32)
    request, positions = ragged_positions(cu_seqlens_q, starts, num_tokens)
    cos, sin = rope_cos_sin(mla, positions)
    latent, k_rope = functional.project_latent(params, mla, x, cos, sin)
    q_nope, q_rope = functional.project_q(params, mla, x, cos, sin)

    index: tuple[jax.Array, jax.Array, jax.Array] | None = None
    if index_loss or not (dense or selected is not None):
        index = _indexer(params, config, x, cos, sin)
    if selected is None and not dense:
        assert index is not None  # made above, as selected is None
        selected = _choose(index, cu_seqlens_q, (request, positions), max_q_len, config.index_topk, implementation)
    slots = None
    if selected is not None:
        selected = checkpoint_name(jnp.asarray(selected), SELECTED)
        legal = (selected >= 0) & (selected <= positions[:, None])
        slots = jnp.where(legal, selected + cu_seqlens_q[request][:, None], -1)

    attended = None if dense else _form(params, config, x, max_q_len, selected, form).name
    # Each token is a page, because texts may start at any token.
    kv = jnp.concatenate([latent, k_rope], axis=-1)[:, None]
    absorbed = functional.absorb_q(params, q_nope, q_rope)
    options: dict[str, Any] = {
        "softmax_scale": mla.softmax_scale,
        "return_lse": True,
        "deterministic": deterministic,
        "implementation": implementation,
    }
    if attended == "direct":
        assert slots is not None
        out, lse = tsmla_jax.sparse_mla(absorbed, kv, slots, latent_dim=mla.kv_lora_rank, **options)
    else:
        if attended == "mask":
            assert selected is not None
            options["selection"] = tsmla_jax.selection_bits(selected, max_q_len, implementation=implementation)
        out, lse = tsmla_jax.mla_prefill_kv(
            jnp.concatenate([q_nope, q_rope], axis=-1),
            functional.expand_joint_kv(params, latent),
            k_rope,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_kv=cu_seqlens_q,
            max_q_len=max_q_len,
            max_kv_len=max_q_len,
            **options,
        )
    out, lse = checkpoint_name(out, OUT), checkpoint_name(lse, LSE)
    heads = jnp.einsum("thl,hvl->thv", out.astype(x.dtype), params["w_uv"]) if attended == "direct" else out
    y = functional.project_out(params, mla, heads)
    if not index_loss:
        return V32Prefill(y, selected, None)
    assert index is not None
    where = {"indices": slots} if slots is not None else packed_texts.all_keys(cu_seqlens_q, max_q_len, num_tokens)
    loss = tsmla_jax.indexer_loss(
        index[0],
        index[1],
        index[2][:, None],
        lax.stop_gradient(absorbed),
        lax.stop_gradient(kv),
        lax.stop_gradient(lse),
        softmax_scale=mla.softmax_scale,
        head_axis=head_axis,
        implementation=implementation,
        **where,
    )
    return V32Prefill(y, selected, loss)


def _check_choice(
    num_tokens: int, selected: jax.Array | None, form: str | None, *, dense: bool, index_loss: bool
) -> None:
    """Raises a ValueError or TypeError if the choice of keys, the form or a flag is not legal."""
    for name, flag in (("dense", dense), ("index_loss", index_loss)):
        static_bool(name, flag)
    if dense and (form is not None or selected is not None):
        got = "selected: got an array" if form is None else f"form: got {form!r}"
        raise ValueError(f"{got} with dense=True; legal: None, as all keys are attended to")
    if selected is not None:
        describe_ints("selected", selected, "T K", (num_tokens, "T, x's tokens"))


def _check_sharing(given: bool, index_loss: bool) -> None:
    """Raises a ValueError for what a layer without an indexer can't do.

    given: whether its keys are given, by `selected` or by the warm-up.
    """
    if not given:
        raise ValueError("selected: got None; legal: [T, K] positions, as the layer has no indexer")
    if index_loss:
        raise ValueError("index_loss: got True; legal: False, as the layer has no indexer")


def _form(
    params: Params, config: V32Config, x: jax.Array, max_q_len: int, selected: jax.Array | None, form: str | None
) -> Form:
    """The given form, else the best one for whole texts of these sizes, which have no context in a cache."""
    assert selected is not None
    longest = max(1, min(max_q_len, x.shape[0]))
    sizes = StepSizes(
        tokens=x.shape[0],
        requests=-(-x.shape[0] // longest),
        longest=longest,
        heads=params["w_uk"].shape[0],
        selected=selected.shape[1],
        columns=sum(head_dims(config.mla)),
    )
    return selected_form(sizes, forced=form, reasons=mask_reasons(config, x.dtype))


def _indexer(
    params: Params, config: V32Config, x: jax.Array, cos: jax.Array, sin: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The indexer's queries [T, Hi, Di] and keys [T, Di], rotated, and its weights [T, Hi], from a detached x. Queries
    and keys have x's dtype, in which a plain cache would hold the keys.
    """
    low = lax.stop_gradient(functional.project_low_rank_q(params, config.mla, x))
    x = lax.stop_gradient(x)
    q, weights = indexer_queries(params, config, x, low, Angles(cos, sin), quantise=False)
    keys = indexer.rotate_columns(indexer_keys(params, x), (cos, sin), index_rotation(config))
    return q.astype(x.dtype), weights, keys.astype(x.dtype)


def _choose(
    index: tuple[jax.Array, jax.Array, jax.Array],
    cu_seqlens: jax.Array,
    owners: tuple[jax.Array, jax.Array],
    max_len: int,
    topk: int,
    implementation: Preference,
) -> jax.Array:
    """The positions [T, K] of the greatest logits among each token's own key and the keys before it, ascending, then
    -1.

    Args:
        index: the indexer's queries, weights and keys of packed texts.
        cu_seqlens: [B + 1], where each text starts.
        owners: the text and the position of each token.
        max_len: bound of a text's length.
        topk: K at most.
        implementation: passed to `tsmla_jax.indexer_topk`.
    """
    q, weights, keys = lax.stop_gradient(index)
    lens = jnp.diff(cu_seqlens)
    pages = packed_texts.in_pages(keys, lens, owners, max_len)
    return tsmla_jax.indexer_topk(
        q,
        weights,
        pages.rows,
        pages.tables,
        lens.astype(jnp.int32),
        min(topk, pages.capacity),
        cu_seqlens_q=cu_seqlens,
        implementation=implementation,
    )

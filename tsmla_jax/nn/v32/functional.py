"""DeepSeek-V3.2's attention: MLA over the tokens that a lightning indexer chooses, as functions of a parameter pytree.

One function, `attend`, is prefill, chunked prefill, decode and speculative verify: new tokens of every request, packed;
their latents and indexer keys are written first, then each chooses its keys from the cache and attends to them in the
absorbed form. Axes: T new tokens in all, B requests, E hidden width, H heads, Hi indexer heads, Di indexer width,
P pages, Z page size, M pages a request at most.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, cast, overload

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import tsmla_jax
from tsmla_jax import sparse
from tsmla_jax.nn import context_parallel
from tsmla_jax.nn.linear import product, rows_of, weight_of
from tsmla_jax.nn.mla import functional
from tsmla_jax.nn.rope import apply_rope, rope_cos_sin
from tsmla_jax.nn.step import Step, check_step
from tsmla_jax.nn.v32.config import V32Config
from tsmla_jax.nn.v32.expanded import Selected, attend_by_mask
from tsmla_jax.nn.weights import Params
from tsmla_jax.ops.exporting import exportable
from tsmla_jax.ops.inputs import describe_ints
from tsmla_jax.ops.quantize import quantize_q
from tsmla_jax.ops.selected import indexer, metadata
from tsmla_kernels.contract.forms import Form, StepSizes, selected_form
from tsmla_kernels.contract.packed import Rotation

_NORM_EPS = 1e-6
_MATRICES = ("indexer_wq_b", "indexer_wk", "indexer_weights_proj")


@exportable
class V32Cache(NamedTuple):
    """One layer's caches; both are addressed by the same slots.

    Attributes:
        kv: [P, Z, L + R] of floats or float8_e4m3fn, or uint8 [P, Z, 656], the packed layout.
        indexer: uint8 [P, Z, Di + 4] (fp8 keys), or [P, Z, Di] of floats (keys as they are).
    """

    kv: jax.Array
    indexer: jax.Array


def init_cache(
    config: V32Config,
    num_pages: int,
    page_size: int,
    *,
    kv_dtype: DTypeLike = jnp.bfloat16,
    indexer_dtype: DTypeLike = jnp.uint8,
) -> V32Cache:
    """Empty caches.

    Args:
        config: the layer's shape.
        num_pages: P.
        page_size: Z.
        kv_dtype: uint8 is the packed layout of 656 bytes.
        indexer_dtype: uint8 is fp8 keys with scales.

    Raises:
        ValueError: the packed layout with other widths than latent 512 and rope 64.
    """
    packed_kv, packed_keys = jnp.dtype(kv_dtype) == jnp.uint8, jnp.dtype(indexer_dtype) == jnp.uint8
    if packed_kv and (config.mla.kv_lora_rank, config.mla.qk_rope_head_dim) != (512, 64):
        raise ValueError(
            f"kv_dtype: got uint8 with kv_lora_rank={config.mla.kv_lora_rank}, "
            f"qk_rope_head_dim={config.mla.qk_rope_head_dim}; the packed layout holds 512 and 64"
        )
    kv_width = 656 if packed_kv else config.mla.cache_dim
    key_width = config.index_head_dim + (4 if packed_keys else 0)
    return V32Cache(
        jnp.zeros((num_pages, page_size, kv_width), kv_dtype),
        jnp.zeros((num_pages, page_size, key_width), indexer_dtype),
    )


def fold(params: Params, config: V32Config) -> dict[str, jax.Array]:
    """The parameters of a layer as a step reads them fastest: MLA's as `functional.fold` leaves them, and the indexer's
    matrices with the axis that a product sums over last, indexer_wq_b [Hi Di, rank], indexer_wk [Di, E] and
    indexer_weights_proj [Hi, E]."""
    rows = {name: cast(jax.Array, rows_of(params[name])) for name in _MATRICES}
    return functional.fold(params, config.mla) | rows


def unfold(params: Params, config: V32Config) -> dict[str, Any]:
    """The inverse of `fold`, bit by bit, where all parameters had one dtype."""
    heads, width, hidden = config.index_n_heads, config.index_head_dim, config.mla.hidden_size
    shapes = (cast(int, config.mla.q_lora_rank), heads, width), (hidden, width), (hidden, heads)
    matrices = {name: weight_of(params[name], *shape) for name, shape in zip(_MATRICES, shapes, strict=True)}
    return functional.unfold(params, config.mla) | matrices


@overload
def attend(
    params: Params,
    config: V32Config,
    x: jax.Array,
    cache: V32Cache,
    step: Step,
    *,
    kv_scale: float | jax.Array | None = ...,
    q_scale: float | jax.Array | None = ...,
    context_axis: str | None = ...,
    selected: jax.Array | None = ...,
    return_selected: Literal[False] = ...,
    form: str | None = ...,
    implementation: str | None = ...,
) -> tuple[jax.Array, V32Cache]: ...


@overload
def attend(
    params: Params,
    config: V32Config,
    x: jax.Array,
    cache: V32Cache,
    step: Step,
    *,
    kv_scale: float | jax.Array | None = ...,
    q_scale: float | jax.Array | None = ...,
    context_axis: str | None = ...,
    selected: jax.Array | None = ...,
    return_selected: Literal[True],
    form: str | None = ...,
    implementation: str | None = ...,
) -> tuple[jax.Array, V32Cache, jax.Array]: ...


def attend(
    params: Params,
    config: V32Config,
    x: jax.Array,
    cache: V32Cache,
    step: Step,
    *,
    kv_scale: float | jax.Array | None = None,
    q_scale: float | jax.Array | None = None,
    context_axis: str | None = None,
    selected: jax.Array | None = None,
    return_selected: bool = False,
    form: str | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, V32Cache] | tuple[jax.Array, V32Cache, jax.Array]:
    """Attention of new tokens over the keys that the indexer chooses among their requests' tokens, new ones included.

    Args:
        params: see `param_shapes`.
        config: the layer's shape.
        x: [T, E], requests packed one after the other.
        cache: holds the tokens before the new ones.
        step: of ragged tokens.
        kv_scale: of a float8_e4m3fn kv cache.
        q_scale: quantises the absorbed queries to float8_e4m3fn (q / q_scale); None leaves them in x's dtype.
        context_axis: a mesh axis whose devices share the keys of every request (`nn.context_parallel`) and all have x;
            the step is made with the same axis. The chosen keys are the same as on one device.
        selected: [T, K] i32, the positions in its request that each token attends to in the place of the indexer's
            choice: another pass's, or another layer's. -1 and positions after the token's own select nothing.
        return_selected: whether to return the positions, too, for `prefill` to replay a rollout's choice.
        form: "direct", `sparse_mla` on the selected rows; "mask", the expanded form with the selection as bits, in
            chunks of the context; or None, which `form_of` decides from the step's sizes. Both compute the attention
            over the selected keys; they differ by rounding alone.
        implementation: of the operations that the form calls, and of `tsmla_jax.indexer_topk`.

    Returns:
        y [T, E] and the caches with the new tokens written (in place if donated); with return_selected also the
        positions [T, K], ascending, -1 behind the last. Rows of padding mean nothing.

    Raises:
        ValueError: the caches have different pages, or the step is not of ragged tokens or of another context_axis or
            page size; `form` is none, or "mask" with a q_scale or a context_axis; or positions are given or asked for
            with a context_axis.
    """
    mla, num_tokens = config.mla, x.shape[0]
    check_step(step, Step, "Step.ragged")
    step.check_axis(context_axis)
    step = step.checked(num_tokens)
    if cache.kv.shape[:2] != cache.indexer.shape[:2]:
        raise ValueError(
            "cache.kv and cache.indexer must have the same pages, as one block table names them: got shapes"
            f" {cache.kv.shape} and {cache.indexer.shape}"
        )
    step.check_pages("cache.kv", cache.kv)
    _check_selected(selected, return_selected, context_axis, num_tokens)
    chosen_form = form_of(config, step, x, form=form, quantised=q_scale is not None, context_axis=context_axis)
    request, positions = step.ragged_tokens(num_tokens)
    cos, sin = rope_cos_sin(mla, positions)
    kv, keys = _written(params, config, x, cache, step, Angles(cos, sin), kv_scale)

    projected = functional.project_q(params, mla, x, cos, sin)
    most = min(config.index_topk, step.block_tables.shape[1] * keys.shape[1])
    topk: dict[str, Any] = {"cu_seqlens_q": step.cu_seqlens_q, "implementation": implementation}
    chosen, scored = None, None
    if selected is not None:
        chosen = jnp.where(selected <= positions[:, None], selected, -1)
    else:
        low = functional.project_low_rank_q(params, mla, x)
        scored = indexer_queries(params, config, x, low, Angles(cos, sin), quantise=keys.dtype == jnp.uint8)
        if return_selected or chosen_form.name == "mask":
            chosen = tsmla_jax.indexer_topk(*scored, keys, step.block_tables, step.seq_lens, most, **topk)
    if chosen_form.name == "mask":
        assert chosen is not None
        new = Selected(jnp.concatenate(projected, axis=-1), chosen, request, positions, by_indexer=selected is None)
        heads = attend_by_mask(params, config, new, kv, step, kv_scale=kv_scale, implementation=implementation)
        y = functional.project_out(params, mla, heads.astype(x.dtype))
        return (y, V32Cache(kv, keys), chosen) if return_selected else (y, V32Cache(kv, keys))
    queries = quantize_q(functional.absorb_q(params, *projected), q_scale)
    attention: dict[str, Any] = {
        "softmax_scale": mla.softmax_scale,
        "latent_dim": mla.kv_lora_rank,
        "q_scale": q_scale,
        "kv_scale": kv_scale,
        "implementation": implementation,
    }

    def project(out: jax.Array) -> jax.Array:
        heads = jnp.einsum("thl,hvl->thv", out.astype(x.dtype), params["w_uv"])
        return functional.project_out(params, mla, heads)

    if context_axis is not None:
        assert scored is not None
        rows = metadata.expand_decode_metadata(step.seq_lens, step.block_tables, step.new_lens, total_tokens=num_tokens)
        lens = context_parallel.local_lens(rows.seq_lens, context_axis, kv.shape[1])
        shared: dict[str, Any] = {"context_axis": context_axis, "implementation": implementation}
        own, count = context_parallel.indexer_topk(*scored, keys, rows.block_tables, lens, config.index_topk, **shared)
        out, lse = tsmla_jax.sparse_mla(queries, kv, own, count, return_lse=True, **attention)
        return context_parallel.project_merged(out, lse, context_axis, project), V32Cache(kv, keys)
    if chosen is not None:
        slots = metadata.positions_to_slots(chosen, step.block_tables[request], keys.shape[1])
    else:
        assert scored is not None
        slots, _ = tsmla_jax.indexer_topk(
            *scored, keys, step.block_tables, step.seq_lens, most, return_slots=True, **topk
        )
    per_request = max(num_tokens // step.seq_lens.shape[0], 1)  # on average, which is enough to choose a form
    y = project(tsmla_jax.sparse_mla(queries, kv, slots, tokens_per_request=per_request, **attention))
    if not return_selected:
        return y, V32Cache(kv, keys)
    assert chosen is not None
    return y, V32Cache(kv, keys), chosen


def _check_selected(
    selected: jax.Array | None, return_selected: bool, context_axis: str | None, num_tokens: int
) -> None:
    """ValueError / TypeError for positions that are not legal, or that devices that share keys can't give."""
    if context_axis is not None and (selected is not None or return_selected):
        name = "return_selected" if selected is None else "selected"
        raise ValueError(f"{name}: got one with {context_axis=}; legal: without, as each device chooses its own keys")
    if selected is not None:
        describe_ints("selected", selected, "T K", (num_tokens, "T, x's tokens"))


class Angles(NamedTuple):
    """The cosines and sines of the new tokens' positions."""

    cos: jax.Array
    sin: jax.Array


def _written(
    params: Params,
    config: V32Config,
    x: jax.Array,
    cache: V32Cache,
    step: Step,
    angles: Angles,
    kv_scale: float | jax.Array | None,
) -> V32Cache:
    """The caches with the new tokens' latents and indexer keys."""
    mla, (cos, sin) = config.mla, angles
    latent, k_rope = functional.project_latent_unrotated(params, mla, x)
    if cache.kv.dtype == jnp.uint8:
        kv = sparse.write_packed_kv_cache(
            cache.kv,
            latent,
            k_rope,
            step.slot_mapping,
            cos,
            sin,
            rope_interleave=mla.rope_interleave,
            rope_layout=mla.rope_layout,
        )
    else:
        k_rope = apply_rope(mla, k_rope, cos, sin)
        kv = tsmla_jax.write_kv_cache(cache.kv, latent, k_rope, step.slot_mapping, kv_scale=kv_scale)
    keys = sparse.write_indexer_cache(cache.indexer, indexer_keys(params, x), step.slot_mapping, cos, sin)
    return V32Cache(kv, keys)


def form_of(
    config: V32Config,
    step: Step,
    x: jax.Array | jax.ShapeDtypeStruct,
    *,
    form: str | None = None,
    quantised: bool = False,
    context_axis: str | None = None,
) -> Form:
    """The form in which `attend` computes a step, and why; decided from sizes that the host knows.

    Args:
        config: the layer's shape.
        step: of ragged tokens. A bound on its requests' tokens, max_seq_len, makes the decision sharper than the length
            of the block tables does.
        x: [T, E], of which the shape and the dtype count.
        form: the caller's choice, "direct" or "mask", or None.
        quantised: whether `attend` is given a q_scale.
        context_axis: of `attend`.

    Returns:
        Form: name and why.

    Raises:
        ValueError: `form` is none, or "mask" where the mask can't serve the step.
    """
    unable = mask_refusals(quantised=quantised, shared_keys=context_axis is not None)
    if form == "mask" and unable:
        raise ValueError(f"form: got 'mask'; legal: None or 'direct', as {'; '.join(unable)}")
    unable += mask_reasons(config, x.dtype)
    requests, pages = step.block_tables.shape
    bounds = [bound for bound in (step.max_seq_len, pages * step.page_size if step.page_size else None) if bound]
    if not bounds and form is None:
        unable.append("the step has neither max_seq_len nor page_size")
    if not all(isinstance(size, int) for size in (*x.shape, requests, pages)):
        unable.append("the step's sizes are symbolic")
    if unable or form is not None:
        return selected_form(StepSizes(0, 0, 0, 0, 0), forced=form, reasons=unable)
    heads = config.mla.num_attention_heads
    return selected_form(StepSizes(x.shape[0], requests, min(bounds), heads, config.index_topk))


def mask_refusals(*, quantised: bool, shared_keys: bool) -> list[str]:
    """Why the mask can't serve a step; empty if it can. quantised: whether absorbed queries are quantised. shared_keys:
    whether the devices of a mesh axis share the keys."""
    refused = ["q_scale quantises absorbed queries, and the mask has none"] if quantised else []
    return refused + ["the keys are shared by the devices of a mesh axis"] * shared_keys


def mask_reasons(config: V32Config, dtype: DTypeLike) -> list[str]:
    """Why the mask would have no kernel with activations of `dtype`; empty if it has one."""
    mla, name, reasons = config.mla, jnp.dtype(dtype).name, []
    widths = mla.qk_nope_head_dim + mla.qk_rope_head_dim, mla.v_head_dim
    if widths != (192, 128):
        reasons.append(f"the head dims are {widths[0]} and {widths[1]}; the mask's kernel takes 192 and 128")
    if name not in ("bfloat16", "float16"):
        reasons.append(f"x's dtype is {name}; the mask's kernel takes bfloat16 and float16")
    return reasons


def indexer_keys(params: Params, x: jax.Array) -> jax.Array:
    """Layer-normed keys [T, Di], not rotated yet."""
    k = product(params, "indexer_wk", x).astype(jnp.float32)
    k = k - k.mean(-1, keepdims=True)
    k = k * jax.lax.rsqrt((k * k).mean(-1, keepdims=True) + _NORM_EPS)
    return k * params["indexer_k_norm"] + params["indexer_k_norm_bias"]


def indexer_queries(
    params: Params, config: V32Config, x: jax.Array, low: jax.Array, angles: Angles, *, quantise: bool
) -> tuple[jax.Array, jax.Array]:
    """Queries [T, Hi, Di] and the head weights with every constant folded in [T, Hi], of x and its normed low-rank
    query."""
    cos, sin = angles
    q = product(params, "indexer_wq_b", low)
    q = q.reshape(x.shape[0], math.prod(q.shape[1:]) // config.index_head_dim, config.index_head_dim)
    weights = product(params, "indexer_weights_proj", x)
    if quantise:
        return sparse.indexer_quantize(q, weights, cos, sin)
    rotation = Rotation(config.mla.qk_rope_head_dim, 0, "halves")
    q = indexer.rotate_columns(q, (cos[:, None], sin[:, None]), rotation)
    return q, indexer.fold_weights(weights, config.index_head_dim)

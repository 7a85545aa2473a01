"""DeepSeek-V3.2's and GLM-5's attention: MLA over the tokens that a lightning indexer chooses, as functions of a
parameter pytree.

One function, `attend`, serves prefill, chunked prefill, decode and speculative verify. It takes the new tokens of every
request, packed, and writes their latents and indexer keys; then each token chooses its keys from the cache and attends
to them. It can return the choice, for layers that have no indexer of their own. Axes: T new tokens in all, B requests,
E hidden width, H heads, Hi indexer heads, Di indexer width, P pages, Z page size, M pages a request at most.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast, overload

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import tsmla_jax
from tsmla_jax import sparse
from tsmla_jax.nn import context_parallel
from tsmla_jax.nn.checkpoints.weights import Params
from tsmla_jax.nn.inputs import check_config, check_new_caches, check_tokens
from tsmla_jax.nn.mla import functional
from tsmla_jax.nn.mla.rope import apply_rope, rope_cos_sin
from tsmla_jax.nn.products.linear import rows_of, weight_of
from tsmla_jax.nn.step import Step, check_step
from tsmla_jax.nn.v32.config import V32Config
from tsmla_jax.nn.v32.expanded import Selected, attend_by_mask
from tsmla_jax.nn.v32.mask import mask_reasons, mask_refusals, step_sizes
from tsmla_jax.nn.v32.projections import Angles, Projected, project
from tsmla_jax.ops.exporting import exportable
from tsmla_jax.ops.inputs import describe_ints
from tsmla_jax.ops.operation import Preference
from tsmla_jax.ops.quantize import quantize_q
from tsmla_jax.ops.selected import metadata
from tsmla_kernels.contract.forms import Form, StepSizes, selected_form
from tsmla_kernels.contract.rules import static_bool
from tsmla_kernels.contract.selection import selection_words

_MATRICES = ("indexer_wq_b", "indexer_wk", "indexer_weights_proj")


@exportable
class V32Cache(NamedTuple):
    """One layer's caches; both are addressed by the same slots.

    Attributes:
        kv: [P, Z, L + R] of floats or float8_e4m3fn, or uint8 [P, Z, 656], the packed layout.
        indexer: uint8 [P, Z, Di + 4] (fp8 keys with scales), or [P, Z, Di] of floats or float8_e4m3fn (keys without
            scales); None in a layer without an indexer.
    """

    kv: jax.Array
    indexer: jax.Array | None


def init_cache(
    config: V32Config,
    num_pages: int,
    page_size: int,
    *,
    kv_dtype: DTypeLike = jnp.bfloat16,
    indexer_dtype: DTypeLike = jnp.uint8,
) -> V32Cache:
    """Empty caches; a layer without an indexer has no cache of indexer keys.

    Args:
        config: the layer's shape.
        num_pages: P.
        page_size: Z.
        kv_dtype: dtype of the kv cache; uint8 is the packed layout of 656 bytes.
        indexer_dtype: dtype of the cache of indexer keys; uint8 is fp8 keys with scales.

    Raises:
        TypeError, ValueError: a size or dtype is not legal, or kv_dtype is uint8 and the config's widths are not
            latent 512 and rope 64.
    """
    check_config(config, V32Config)
    check_new_caches(
        {"num_pages": num_pages, "page_size": page_size}, {"kv_dtype": kv_dtype, "indexer_dtype": indexer_dtype}
    )
    packed_kv, packed_keys = jnp.dtype(kv_dtype) == jnp.uint8, jnp.dtype(indexer_dtype) == jnp.uint8
    if packed_kv and (config.mla.kv_lora_rank, config.mla.qk_rope_head_dim) != (512, 64):
        raise ValueError(
            f"kv_dtype: got uint8 with kv_lora_rank={config.mla.kv_lora_rank}, "
            f"qk_rope_head_dim={config.mla.qk_rope_head_dim}; legal: 512 and 64, as the packed layout has them"
        )
    kv_width = 656 if packed_kv else config.mla.cache_dim
    key_width = config.index_head_dim + (4 if packed_keys else 0)
    kv = jnp.zeros((num_pages, page_size, kv_width), kv_dtype)
    keys = jnp.zeros((num_pages, page_size, key_width), indexer_dtype) if config.has_indexer else None
    return V32Cache(kv, keys)


def fold(params: Params, config: V32Config) -> dict[str, jax.Array]:
    """The parameters of a layer as a step reads them fastest: MLA's parameters by `tsmla_jax.nn.functional.fold`, and
    the indexer's matrices as indexer_wq_b [Hi Di, rank], indexer_wk [Di, E] and indexer_weights_proj [Hi, E], whose
    last axis is the one that a product sums over.
    """
    rows = {name: cast(jax.Array, rows_of(params[name])) for name in _MATRICES if config.has_indexer}
    return functional.fold(params, config.mla) | rows


def unfold(params: Params, config: V32Config) -> dict[str, Any]:
    """The inverse of `fold`; exact to the bit if all parameters had one dtype."""
    heads, width, hidden = config.index_n_heads, config.index_head_dim, config.mla.hidden_size
    shapes = (cast(int, config.mla.q_lora_rank), heads, width), (hidden, width), (hidden, heads)
    names = zip(_MATRICES, shapes, strict=True) if config.has_indexer else ()
    return functional.unfold(params, config.mla) | {name: weight_of(params[name], *shape) for name, shape in names}


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
    implementation: Preference = ...,
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
    implementation: Preference = ...,
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
    implementation: Preference = None,
) -> tuple[jax.Array, V32Cache] | tuple[jax.Array, V32Cache, jax.Array]:
    """Attention of new tokens over the keys that the indexer chooses among their requests' tokens, new ones included.

    Args:
        params: see `param_shapes`.
        config: the layer's shape.
        x: [T, E], requests packed one after the other.
        cache: holds the tokens before the new ones.
        step: a step of ragged tokens.
        kv_scale: the scale of a float8_e4m3fn kv cache.
        q_scale: quantises the absorbed queries to float8_e4m3fn (q / q_scale); None leaves them in x's dtype.
        context_axis: a mesh axis whose devices share the keys of every request (`nn.context_parallel`) and all have x;
            the step is made with the same axis. The chosen keys are the same as on one device.
        selected: [T, K] i32, the positions in its request that each token attends to, in place of the indexer's choice:
            the choice of another pass, or of the layer whose choice this one shares. -1 and positions after the token's
            own select nothing. Required in a layer without an indexer; a layer with one writes its indexer keys in any
            case.
        return_selected: whether to return the positions, too, for layers that share the choice, or for `prefill` to
            replay a rollout's choice.
        form: "direct" (`sparse_mla` on the selected rows), "mask" (the expanded form with the selection as bits, in
            chunks of the context), or None: `form_of` then decides from the step's sizes. Both forms compute the
            attention over the selected keys and differ only by rounding, unless `selected` has a position twice: "mask"
            counts it once, "direct" twice.
        implementation: passed to the operations that choose keys, make bits of them and attend.

    Returns:
        y [T, E] and the caches with the new tokens written (in place if donated); with return_selected also the
        positions [T, K], ascending, -1 after the last (given ones in their order, -1 for those that select nothing),
        the same on all devices of a context_axis. Padding rows have no meaning.

    Raises:
        TypeError, ValueError: an argument has an illegal type, shape or dtype; the caches have different pages, or the
            step is dense, or has another context_axis or page size; `form` is unknown, or "mask" with a q_scale or a
            context_axis; selected is None for a layer without an indexer; or there is a cache of indexer keys and no
            indexer, or the reverse.
        NotImplementedError: the named implementation can't run this call; or a derivative of a step in the form mask is
            asked for under jax.jit, where the chunks of context that are needed are not known.
    """
    options = Options(kv_scale, q_scale, context_axis, form, implementation)
    found = attend_projected(
        params, config, x, cache, step, selected=selected, keep=return_selected, options=options, project=project
    )
    return (found.y, found.cache, cast(jax.Array, found.selected)) if return_selected else (found.y, found.cache)


class Options(NamedTuple):
    """Options of `attend`."""

    kv_scale: float | jax.Array | None
    q_scale: float | jax.Array | None
    context_axis: str | None
    form: str | None
    implementation: Preference


class Attended(NamedTuple):
    """The results of `attend_projected`; `selected`, the positions, may be None if `keep` is False."""

    y: jax.Array
    cache: V32Cache
    selected: jax.Array | None


def attend_projected(
    params: Params,
    config: V32Config,
    x: jax.Array,
    cache: V32Cache,
    step: Step,
    *,
    selected: jax.Array | None,
    keep: bool,
    options: Options,
    project: Callable[[Params, V32Config, jax.Array, Angles, bool | None], Projected],
) -> Attended:
    """`attend`, given the products of `project`.

    keep: whether the caller wants positions, even where attention itself needs only slots.
    """
    kv_scale, q_scale, context_axis, form, implementation = options
    check_config(config, V32Config)
    functional.check_layer(params, config.mla)
    static_bool("return_selected", keep)
    mla = config.mla
    check_tokens(x, mla.hidden_size, "T E")
    num_tokens = x.shape[0]
    check_step(step, Step, "Step.ragged")
    step.check_axis(context_axis)
    step = step.checked(num_tokens)
    _check_cache(config, cache)
    step.check_pages("cache.kv", cache.kv)
    chosen_form = form_of(config, step, x, form=form, quantised=q_scale is not None, context_axis=context_axis)
    request, positions = step.ragged_tokens(num_tokens)
    chooses = selected is None
    selected = _given(config, selected, positions)
    cos, sin = rope_cos_sin(mla, positions)
    quantise = cache.indexer is not None and cache.indexer.dtype == jnp.uint8
    made = project(params, config, x, Angles(cos, sin), quantise if chooses else None)
    kv, keys = cache = _written(config, made, cache, step, Angles(cos, sin), kv_scale)
    index: tuple[Any, Any] = (None, None) if made.asked is None else made.asked
    most = min(config.index_topk, step.block_tables.shape[1] * kv.shape[1])

    def topk(**more: Any) -> Any:
        assert keys is not None
        run: Any = tsmla_jax.indexer_topk  # Any, because the overloads want the options one by one
        where = keys, known_pages(step, keys.shape[1]), step.seq_lens, most
        return run(*index, *where, cu_seqlens_q=step.cu_seqlens_q, implementation=implementation, **more)

    if chosen_form.name == "mask":
        as_bits = chooses and not keep and bits_are_shorter(step, kv.shape[1], most)
        chosen = cast(jax.Array, topk(return_bits=as_bits)) if selected is None else selected
        assert made.q_nope is not None and made.q_rope is not None
        new = Selected(
            jnp.concatenate([made.q_nope, made.q_rope], axis=-1),
            request=request,
            position=positions,
            keys=chosen,
            are_bits=as_bits,
            all_below=most if chooses else 0,
        )
        heads = attend_by_mask(params, config, new, kv, step, kv_scale=kv_scale, implementation=implementation)
        return Attended(made.out(heads.astype(x.dtype)), cache, None if as_bits else chosen)
    queries = made.absorbed
    if queries is None:
        assert made.q_nope is not None and made.q_rope is not None
        queries = quantize_q(functional.absorb_q(params, made.q_nope, made.q_rope), q_scale)
    attention: dict[str, Any] = {
        "softmax_scale": mla.softmax_scale, "latent_dim": mla.kv_lora_rank, "q_scale": q_scale, "kv_scale": kv_scale,
        "implementation": implementation,
    }  # fmt: skip

    def values(out: jax.Array) -> jax.Array:
        return jnp.einsum("thl,hvl->thv", out.astype(x.dtype), params["w_uv"])

    if context_axis is not None:
        own = _choose_own(config, index, cache, step, num_tokens, selected=selected, keep=keep, options=options)
        out, lse = tsmla_jax.sparse_mla(queries, kv, own.slots, own.lens, return_lse=True, **attention)
        y = context_parallel.project_merged(out, lse, context_axis, made.out, heads=values)
        return Attended(y, cache, own.selected)
    if selected is None and keep:
        selected = cast(jax.Array, topk())
    if selected is None:
        slots, _ = topk(return_slots=True)  # the kernel of the top-k makes the slots itself
    else:
        slots = metadata.positions_to_slots(selected, step.block_tables[request], kv.shape[1])
    per_request = max(num_tokens // step.seq_lens.shape[0], 1)  # the average is enough to choose a form
    attended = tsmla_jax.sparse_mla(queries, kv, slots, tokens_per_request=per_request, **attention)
    return Attended(made.out(values(cast(jax.Array, attended))), cache, selected)


class _Own(NamedTuple):
    """The slots of this device's keys that each token attends to (-1 after the last), how many these are, and the
    positions of the chosen keys of all devices, if they were asked for.
    """

    slots: jax.Array
    lens: jax.Array
    selected: jax.Array | None


def _choose_own(
    config: V32Config,
    index: tuple[Any, Any],
    cache: V32Cache,
    step: Step,
    num_tokens: int,
    *,
    selected: jax.Array | None,
    keep: bool,
    options: Options,
) -> _Own:
    """This device's part of the selected keys. If none are given, the indexers of all devices choose them.

    index: the indexer's queries and head weights.
    keep: as in `attend_projected`.
    """
    assert options.context_axis is not None
    axis, page_size = options.context_axis, cache.kv.shape[1]
    rows = metadata.expand_decode_metadata(step.seq_lens, step.block_tables, step.new_lens, total_tokens=num_tokens)
    if selected is None:
        assert cache.indexer is not None
        lens = context_parallel.local_lens(rows.seq_lens, axis, page_size)
        where = (*index, cache.indexer, rows.block_tables, lens, config.index_topk)
        common: dict[str, Any] = {"context_axis": axis, "implementation": options.implementation}
        if not keep:
            return _Own(*context_parallel.indexer_topk(*where, **common), None)
        selected = _ascending(context_parallel.indexer_positions(*where, **common))
    own = context_parallel.own_positions(selected, context_axis=axis, page_size=page_size)
    slots = metadata.positions_to_slots(own, rows.block_tables, page_size)
    return _Own(slots, (own >= 0).sum(axis=1, dtype=jnp.int32), selected)


def known_pages(step: Step, page_size: int) -> jax.Array:
    """The step's block tables, without columns for tokens from max_seq_len on, which no request has."""
    if step.max_seq_len is None:
        return step.block_tables
    return step.block_tables[:, : -(-step.max_seq_len // page_size)]


def bits_are_shorter(step: Step, page_size: int, selected: int) -> bool:
    """Whether the bits of all keys take no more bytes than the positions of `selected` keys."""
    return selection_words(known_pages(step, page_size).shape[1] * page_size) <= selected


def _given(config: V32Config, selected: jax.Array | None, positions: jax.Array) -> jax.Array | None:
    """The given positions [T, K], with -1 for positions after the token's own. If none are given, None; but
    ValueError if the layer has no indexer."""
    if selected is not None:
        describe_ints("selected", selected, "T K", (positions.shape[0], "T, x's tokens"))
        selected = jnp.asarray(selected)
        return jnp.where((selected >= 0) & (selected <= positions[:, None]), selected, -1)
    if not config.has_indexer:
        raise ValueError(
            "selected: got None; legal: [T, K] positions, as the layer has no indexer (has_indexer=False) and shares"
            " the choice of another one"
        )
    return None


def _ascending(positions: jax.Array) -> jax.Array:
    """Rows of positions in ascending order, then -1."""
    last = jnp.iinfo(jnp.int32).max
    ordered = jnp.sort(jnp.where(positions < 0, last, positions), axis=1)
    return jnp.where(ordered == last, -1, ordered)


def _check_cache(config: V32Config, cache: V32Cache) -> None:
    """Raises a TypeError unless `cache` is a V32Cache, and a ValueError unless its caches have the same pages, and
    there is a cache of indexer keys if, and only if, there is an indexer.
    """
    if not isinstance(cache, V32Cache):
        raise TypeError(f"cache: got {type(cache).__name__}; legal: V32Cache, which v32.init_cache makes")
    if (cache.indexer is None) == config.has_indexer:
        got = "None" if cache.indexer is None else f"an array of shape {cache.indexer.shape}"
        legal = "indexer keys" if config.has_indexer else "None"
        raise ValueError(f"cache.indexer: got {got}; legal: {legal}, as has_indexer={config.has_indexer}")
    if cache.indexer is not None and cache.kv.shape[:2] != cache.indexer.shape[:2]:
        raise ValueError(
            "cache.kv and cache.indexer must have the same pages, as one block table names them: got shapes"
            f" {cache.kv.shape} and {cache.indexer.shape}"
        )


def _written(
    config: V32Config,
    made: Projected,
    cache: V32Cache,
    step: Step,
    angles: Angles,
    kv_scale: float | jax.Array | None,
) -> V32Cache:
    """The caches with the new tokens' latents written, and their indexer keys if the layer has an indexer."""
    mla, (cos, sin), latent, k_rope = config.mla, angles, made.latent, made.k_rope
    if made.kv_cache is not None:
        kv = made.kv_cache
    elif cache.kv.dtype == jnp.uint8:
        assert latent is not None and k_rope is not None
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
        assert latent is not None and k_rope is not None
        k_rope = apply_rope(mla, k_rope, cos, sin)
        kv = tsmla_jax.write_kv_cache(cache.kv, latent, k_rope, step.slot_mapping, kv_scale=kv_scale)
    if cache.indexer is None or made.index_cache is not None:
        return V32Cache(kv, made.index_cache)
    layout, new = config.index_rope_layout, made.keys
    assert new is not None
    keys = sparse.write_indexer_cache(cache.indexer, new, step.slot_mapping, cos, sin, rope_layout=layout)
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
        step: a step of ragged tokens. The decision depends on the longest request: max_seq_len can bound it more
            tightly than the length of the block tables.
        x: [T, E]; only the shape and the dtype count.
        form: the caller's choice, "direct" or "mask", or None.
        quantised: whether `attend` is given a q_scale.
        context_axis: as `attend` is given it.

    Returns:
        The Form, with its name and the reason.

    Raises:
        ValueError: `form` is unknown, or "mask" for a step that the mask can't serve.
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
    return selected_form(step_sizes(config, tokens=x.shape[0], requests=requests, longest=min(bounds)))

"""The implementations that a step runs, and the reasons. `tsmla_jax.explain` on the step's shapes says how attention,
the choice of keys and V4's compression run; the experts' weights decide how their products run."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import tsmla_jax
from tsmla_jax.generate.caches import WINDOW_PAGE, CacheLayout, entries_per_page, init_cache
from tsmla_jax.generate.config import ModelConfig
from tsmla_jax.generate.mesh import EXPERT_PARTS
from tsmla_jax.generate.model import Params
from tsmla_jax.generate.moe import why_not_grouped, why_not_plain
from tsmla_jax.nn import MLAConfig
from tsmla_jax.nn.products.block_scaled import BlockScaled, products_of, why_not_by_kernel
from tsmla_jax.nn.products.mxfp4 import MXFP4, why_not_mxfp4
from tsmla_jax.nn.products.tiles import PLAIN_PAIRS
from tsmla_jax.nn.v4 import V4Cache, V4Config
from tsmla_jax.nn.v32 import V32Cache, V32Config
from tsmla_jax.nn.v32.mask import mask_reasons, mask_refusals, step_sizes
from tsmla_jax.ops.operation import Explanation
from tsmla_kernels import contract
from tsmla_kernels.contract.forms import Form, selected_form
from tsmla_kernels.contract.selection import selection_words
from tsmla_kernels.contract.sparse import INDEX_ROW_ALIGNMENT

Add = Callable[..., None]


@dataclass(frozen=True)
class Choice:
    """The implementation of one operation.

    Attributes:
      op: the operation's name.
      implementation: the one that runs it.
      why: why this one, such as "as asked for", "the best there is", or why each implementation that is tried before it
        can't run.
    """

    op: str
    implementation: str
    why: str


FORM = "attention over selected keys"
"""The name of the choice between the forms of V3.2's attention."""


@dataclass(frozen=True)
class _Sizes:
    """Sizes of a step: new tokens in all and of one request at most, requests, width of the block tables; the dtype of
    the absorbed queries; how many devices share the keys of a request; and whether the step may begin its texts."""

    tokens: int
    max_q_len: int
    requests: int
    max_pages: int
    q_dtype: Any
    context: int
    begins: bool


def explain_step(
    config: ModelConfig,
    *,
    dtype: Any,
    q_dtype: Any,
    layout: CacheLayout,
    batch: int,
    max_pages: int,
    chunk: int,
    max_q_len: int,
    context: int,
    implementation: str | None,
) -> list[Choice]:
    """The choices of attention for prefill (chunk tokens) and decode (max_q_len tokens a request).

    Args:
      config: the model.
      dtype, q_dtype: dtypes of the activations and of the absorbed queries.
      layout: the layout of the caches.
      batch, max_pages: requests of the decode step, and the width of its block tables.
      chunk, max_q_len: tokens of a prefill step, tokens of one request in a decode step.
      context: devices that share the keys of a request (`nn.context_parallel`). If there are several, each new token
        decodes as a request of its own, and the indexers of the devices compare their scores.
      implementation: the one that the step asks for; None is the best that can run.

    Returns:
      One choice an operation; where prefill and decode (or V4's kinds of layers) differ, one for each, the operation's
      name followed by which.

    Raises:
      ValueError: no implementation has that name.
      NotImplementedError: that implementation can't run this; the message has every reason.
    """
    found: dict[str, dict[str, Choice]] = {}

    def add(where: str, op: str, *arguments: Any, with_notes: bool = False, **named: Any) -> None:
        explanation = tsmla_jax.explain(op, *arguments, implementation=implementation, **named)
        choice = _choice(op, explanation, implementation)
        if with_notes and (notes := explanation.notes.get(choice.implementation)):
            choice = replace(choice, why="; ".join((choice.why, *notes)))
        found.setdefault(op, {})[where] = choice

    def add_form(where: str, form: Form) -> None:
        found.setdefault(FORM, {})[where] = Choice(FORM, form.name, form.why)

    tokens = batch * max_q_len
    each, requests = (1, tokens) if context > 1 else (max_q_len, batch)
    common: dict[str, Any] = {"max_pages": max_pages, "q_dtype": q_dtype, "context": context}
    steps = {
        "prefill": _Sizes(chunk, max_q_len=chunk, requests=1, begins=True, **common),
        "decode": _Sizes(tokens, max_q_len=each, requests=requests, begins=False, **common),
    }
    for attention in dict.fromkeys(config.layer(index).attention for index in range(config.num_layers)):
        cache = jax.eval_shape(partial(init_cache, attention, layout))
        for phase, sizes in steps.items():
            if isinstance(attention, MLAConfig):
                if phase == "prefill":
                    _explain_prefill(partial(add, phase), attention, dtype, sizes.tokens)
                else:
                    _explain_decode(partial(add, phase), attention, cache, sizes)
            elif isinstance(attention, V32Config):
                _explain_v32(partial(add, phase), partial(add_form, phase), attention, cache, sizes)
            else:
                entries = entries_per_page(attention, layout.page_size)
                _explain_v4(partial(add, f"{phase}, {attention.kind}"), attention, dtype, cache, sizes, entries)
    choices = []
    for op, by_place in found.items():
        same = len({(choice.implementation, choice.why) for choice in by_place.values()}) == 1
        choices += [
            choice if same else replace(choice, op=f"{op} ({place})")
            for place, choice in list(by_place.items())[: 1 if same else None]
        ]
    return choices


def explain_experts(params: Params, dtype: Any) -> list[Choice]:
    """The choice for the experts' products of a step.

    Args:
      params: the model's parameters, as `load_model` returns them or as `fold` leaves them: the experts of a layer may
        be block-scaled or in MXFP4, whose products take fewer dtypes and sizes.
      dtype: the dtype of the activations.

    Returns:
      One choice for each kind of weights that layers have, or a single one if all kinds have the same; none for a model
      without experts.
    """
    found: dict[str, Choice] = {}
    parts = (layer.get(name, {}) for layer in params["layers"] for name in EXPERT_PARTS)
    for mlp in (part for part in parts if "router" in part):
        narrow = {BlockScaled: "fp8", MXFP4: "MXFP4"}.get(type(mlp["down"]))
        found[narrow or jnp.dtype(dtype).name] = _of_experts(mlp["down"], dtype)
    if len(set(found.values())) <= 1:
        return list(found.values())[:1]
    return [replace(choice, op=f"experts ({weights} weights)") for weights, choice in found.items()]


def _of_experts(down: jax.Array | BlockScaled, dtype: Any) -> Choice:
    """The choice for the products of a layer's experts, whose second stack of weights is `down`."""
    (_, hidden, width), refused = down.shape, ""
    if isinstance(down, MXFP4):
        if not (others := why_not_mxfp4(dtype, hidden, width)):
            why = "exact products of MXFP4 weights, the best there is"
            return Choice("experts", "grouped_block_scaled_matmul", why)
        return Choice("experts", "widened", f"not grouped_block_scaled_matmul: {'; '.join(others)}")
    if isinstance(down, BlockScaled):
        if products := products_of(down, dtype):
            why = "the best there is" if down.products is None else "as asked for"
            return Choice("experts", "grouped_block_scaled_matmul", f"{products} products of fp8 weights, {why}")
        reasons = (why_not_by_kernel(dtype, hidden, width), why_not_by_kernel(dtype, 2 * width, hidden))
        refused = f"not grouped_block_scaled_matmul: {'; '.join(dict.fromkeys(itertools.chain(*reasons)))}"
    if not (others := why_not_grouped(dtype, hidden, width, isinstance(down, BlockScaled))):
        others = why_not_plain(dtype, down, down)
        many = "" if others else f"; grouped_block_scaled_matmul from {PLAIN_PAIRS} rows of an expert on"
        return Choice("experts", "grouped", f"{refused or 'the best there is'}{many}")
    if not why_not_plain(dtype, down, down):
        return Choice("experts", "grouped_block_scaled_matmul", f"not grouped: {'; '.join(others)}")
    form = "one by one" if jax.default_backend() == "cpu" else "lax.ragged_dot"
    return Choice("experts", form, "; ".join(filter(None, (refused, f"not grouped: {'; '.join(others)}"))))


def _array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


_integers = partial(_array, jnp.int32)
_floats = partial(_array, jnp.float32)


def _scale(array: Any) -> Any:
    return _floats() if array.dtype == jnp.float8_e4m3fn else None


def _explain_prefill(add: Add, config: MLAConfig, dtype: Any, tokens: int) -> None:
    heads = config.num_attention_heads
    add(
        "mla_prefill",
        _array(dtype, tokens, heads, config.qk_head_dim),
        _array(dtype, tokens, heads, config.qk_head_dim),
        _array(dtype, tokens, heads, config.v_head_dim),
        cu_seqlens_q=_integers(2),
        cu_seqlens_kv=_integers(2),
        max_q_len=tokens,
        max_kv_len=tokens,
        softmax_scale=config.softmax_scale,
        return_lse=True,
    )


def _explain_decode(add: Add, config: MLAConfig, cache: Any, sizes: _Sizes) -> None:
    q = _array(sizes.q_dtype, sizes.tokens, config.num_attention_heads, config.cache_dim)
    add(
        "mla_decode",
        q,
        cache,
        _integers(sizes.requests, sizes.max_pages),
        _integers(sizes.requests),
        softmax_scale=config.softmax_scale,
        latent_dim=config.kv_lora_rank,
        cu_seqlens_q=_integers(sizes.requests + 1),
        max_q_len=sizes.max_q_len,
        q_scale=_scale(q),
        kv_scale=_scale(cache),
    )


def _explain_indexer(
    add: Add, config: V32Config | V4Config, keys: Any, sizes: _Sizes, returns: str = "return_slots"
) -> int:
    """Adds the choice for the indexer's selection. Returns how many keys a token chooses at most, on all devices.

    returns: the argument of `indexer_topk` that asks for the form in which a step on one device takes the selection.
    """
    heads, width, tokens, max_pages = config.index_n_heads, config.index_head_dim, sizes.tokens, sizes.max_pages
    query = jnp.float8_e4m3fn if keys.dtype == jnp.uint8 else jnp.float32
    here = max_pages * keys.shape[1]
    # In V4 and on one of several devices the number of keys that a token sees does not grow by one from token to token,
    # so each token is a request of its own.
    by_token = isinstance(config, V4Config) or sizes.context > 1
    rows = tokens if by_token else sizes.requests
    add(
        "indexer_topk",
        _array(query, tokens, heads, width),
        _floats(tokens, heads),
        keys,
        _integers(rows, max_pages),
        _integers(rows),
        min(config.index_topk, here),
        with_notes=True,  # the notes say which part of the operation a kernel runs
        cu_seqlens_q=None if by_token else _integers(sizes.requests + 1),
        **{returns if sizes.context == 1 else "return_scores": True},
    )
    return min(config.index_topk, here * sizes.context)


def _explain_v32(add: Add, add_form: Callable[[Form], None], config: V32Config, cache: V32Cache, sizes: _Sizes) -> None:
    page_size, mla = cache.kv.shape[1], config.mla
    quantised = jnp.dtype(sizes.q_dtype) == jnp.float8_e4m3fn
    reasons = mask_refusals(quantised=quantised, shared_keys=sizes.context > 1)
    reasons += [] if quantised else mask_reasons(config, sizes.q_dtype)

    def form_of(longest: int) -> Form:
        of_step = step_sizes(config, tokens=sizes.tokens, requests=sizes.requests, longest=longest)
        return selected_form(of_step, reasons=reasons)

    # A prompt's first chunk has no context, and each later chunk has more than the one before.
    whole = sizes.max_pages * page_size
    longest = min(sizes.tokens, whole) if sizes.begins else whole
    form, of_longest = form_of(longest), form_of(whole)
    if form.name != of_longest.name:
        form = form._replace(why=f"{form.why}; {of_longest.name} after a context of up to {whole} tokens")
    add_form(form)
    if form.name == "mask":
        sizes = replace(sizes, max_pages=-(-longest // page_size))
    if cache.indexer is None:
        chosen = min(config.index_topk, longest * sizes.context)
    else:
        fits = form.name == "mask" and selection_words(sizes.max_pages * page_size) <= config.index_topk
        chosen = _explain_indexer(add, config, cache.indexer, sizes, "return_bits" if fits else "return_slots")
    if form.name == "mask":
        keys = _floats(longest, mla.num_attention_heads, mla.qk_nope_head_dim + mla.v_head_dim)
        offsets = {"cu_seqlens_q": _integers(sizes.requests + 1), "cu_seqlens_kv": _integers(sizes.requests + 1)}
        if cache.indexer is None or selection_words(sizes.max_pages * page_size) > config.index_topk:
            add("selection_bits", _integers(sizes.tokens, chosen), longest)
        add(
            "mla_prefill_kv",
            _array(sizes.q_dtype, sizes.tokens, mla.num_attention_heads, mla.qk_nope_head_dim + mla.qk_rope_head_dim),
            jax.ShapeDtypeStruct(keys.shape, sizes.q_dtype),
            _array(sizes.q_dtype, longest, mla.qk_rope_head_dim),
            **offsets,
            max_q_len=sizes.max_q_len,
            max_kv_len=longest,
            softmax_scale=mla.softmax_scale,
            return_lse=True,
            selection=_integers(sizes.tokens, selection_words(longest)),
        )
        return
    q = _array(sizes.q_dtype, sizes.tokens, config.mla.num_attention_heads, config.mla.cache_dim)
    add(
        "sparse_mla",
        q,
        cache.kv,
        _integers(sizes.tokens, chosen),
        softmax_scale=config.mla.softmax_scale,
        latent_dim=config.mla.kv_lora_rank,
        q_scale=_scale(q),
        kv_scale=_scale(cache.kv),
        return_lse=sizes.context > 1,
    )


def _explain_v4(add: Add, config: V4Config, dtype: Any, cache: V4Cache, sizes: _Sizes, entries: int) -> None:
    """Adds the choices of a V4 layer.

    entries: how many compressed entries a page has.
    """
    tokens, requests = sizes.tokens, sizes.requests
    for written, state in ((cache.compressed, cache.compressor), (cache.indexer, cache.indexer_compressor)):
        if written is not None and state is not None:
            width = state.kv_score.shape[-1]
            is_entries = written is cache.compressed
            add(
                "compress_write_kv_cache",
                written,
                _floats(tokens, 2, width),
                _floats(config.ratio, width),
                state,
                _array(dtype, config.head_dim if is_entries else config.index_head_dim),
                _floats(1, config.rope_dim),
                _integers(requests, sizes.max_pages * sizes.context),
                eps=config.rms_norm_eps,
                kv_scale=_scale(written) if is_entries else None,
                page_size=entries if is_entries and written.dtype == jnp.uint8 else None,
                state_slots=_integers(requests),
                seq_lens=_integers(requests),
                cu_seqlens_q=_integers(requests + 1),
                ratio=config.ratio,
                overlap=config.overlap,
            )
    chosen = sizes.max_pages * entries if config.kind == "hca" else 0
    if cache.indexer is not None:
        chosen = _explain_indexer(add, config, cache.indexer, sizes)
    compressed = cache.compressed is not None
    shared = compressed and sizes.context > 1
    window = -(-config.sliding_window // (sizes.context if shared else 1))
    columns = window + chosen
    packed = cache.window.dtype == jnp.uint8
    q = _array(sizes.q_dtype, tokens, config.num_attention_heads, config.head_dim)
    add(
        "sparse_mla",
        q,
        cache.window,
        _integers(tokens, columns + -columns % INDEX_ROW_ALIGNMENT),
        _integers(tokens),
        softmax_scale=config.head_dim**-0.5,
        latent_dim=config.head_dim,
        # if devices share the keys, the merge of their results adds the sinks
        sinks=None if shared else _floats(config.num_attention_heads),
        return_lse=shared,
        compressed_kv_cache=cache.compressed,
        window=window if compressed else None,
        page_size=WINDOW_PAGE if packed else None,
        compressed_page_size=entries if packed and compressed else None,
        q_scale=_scale(q),
        kv_scale=_scale(cache.window),
        compressed_kv_scale=_scale(cache.compressed) if compressed else None,
    )


def _choice(op: str, explanation: Explanation, implementation: str | None) -> Choice:
    if explanation.chosen is None:
        reasons: list[str] = [f"{name}: {'; '.join(why)}" for name, why in explanation.reasons.items()]
        if implementation is not None:
            reasons = [*explanation.reasons[implementation]]
        raise contract.not_runnable(op, str(implementation), reasons)
    if implementation is not None:
        return Choice(op, explanation.chosen, "as asked for")
    refused = []
    for name, why in explanation.reasons.items():
        if name == explanation.chosen:
            break
        refused.append(f"not {name}: {'; '.join(why)}")
    return Choice(op, explanation.chosen, "; ".join(refused) or "the best there is")

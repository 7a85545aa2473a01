"""A decoder, DeepSeek's or one like it, as pure functions over a pytree of parameters.

Attention is that of `tsmla_jax.nn`, over paged caches. V2 and V3 attend in the expanded form in chunks of prompts, and
in the absorbed form in decode; in V3.2, GLM-5 and V4 one function of the sparse layers serves both. Every function
works under `jax.jit`. Layers of one kind are traced once, and compiled once unless `run_layers` is part of a larger
program.

Axes: T tokens of a step (ragged, requests packed one after the other), B requests, M pages a request at most, N rows
whose logits are wanted, V vocabulary, C hidden width, P pages, Z page size, D width of a cached token, S streams (V4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp

import tsmla_jax
from tsmla_jax.generate import few_tokens
from tsmla_jax.generate.caches import WINDOW_PAGE, entries_per_page
from tsmla_jax.generate.config import LayerConfig, ModelConfig
from tsmla_jax.generate.expert_parallel import mixture_of_split_experts
from tsmla_jax.generate.mesh import CONTEXT, ONE_DEVICE, MeshShape
from tsmla_jax.generate.moe import gated_mlp, mixture_of_experts
from tsmla_jax.generate.pages import pages_for
from tsmla_jax.generate.streams import after_layer, close_normed, mix_streams, open_streams
from tsmla_jax.nn import MLAConfig, functional, v4, v32
from tsmla_jax.nn.few_token_streams import Unwritten
from tsmla_jax.nn.mla import few_tokens as mla_few_tokens
from tsmla_jax.nn.norms import Norm, rms_norm
from tsmla_jax.nn.step import Step, needed_when_ragged
from tsmla_jax.nn.v4 import V4Config, V4Step
from tsmla_jax.nn.v32 import V32Config
from tsmla_jax.nn.v32 import few_tokens as v32_few_tokens

Phase = Literal["fresh", "prefill", "decode"]

# {"embed": [V, C], "layers": [layer, ...], "norm": [C], "lm_head": [V, C] unless tied}; a layer is
# {"attention_norm": [C], "attention": ..., "mlp_norm": [C], "mlp": ...}; "attention" is as in `param_shapes` of
# tsmla_jax.nn, nn.v32 or nn.v4, or as `fold` leaves it; "mlp" is {"gate_up": [2 I, C], "down": [C, I]} in a dense
# layer, else as moe.mixture_of_experts takes it. Matrices may be `BlockScaled`, experts `MXFP4`. In V4 a layer also has
# "attention_streams" and "mlp_streams" (streams.read_streams), and the model "streams" (streams.close_streams). In
# LongCat-Flash every other layer has "shortcut": experts whose result the next layer adds at its end.
Params = Mapping[str, Any]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """The tokens of one step and where they belong; all i32.

    Attributes:
      tokens: [T] ids; tokens that the step does not own (`Step.owned_tokens`) are padding.
      step: pages, lengths and slots of the requests, slot -1 for padding. Tokens are ragged, but dense with one token a
        request in decode of V2 and V3 without drafts.
      state_slots: [B], the slot of each request's compressor states and window pages in V4; -1 for padding. Other
        models don't read it.
      expert_tokens: the ids that `expert_parallel.gather_tokens` returns, if experts are split over devices, else None.
    """

    tokens: jax.Array
    step: Step
    state_slots: jax.Array | None = None
    expert_tokens: jax.Array | None = None


class LayerResult(NamedTuple):
    """Results of a layer: x, in V4 perhaps as `Unwritten`; the layer's cache; the positions [T, K] that its attention
    read (None unless later layers share them); and the result [T, C] of its "shortcut", which the next layer adds.
    """

    x: Any
    cache: Any
    selected: jax.Array | None
    shortcut: jax.Array | None = None


class Scales(NamedTuple):
    """Scales of all layers' attention, f32 [] each: kv_scale for fp8 caches, q_scale for fp8 queries; else None. Packed
    caches have scales of their own, and no kv_scale. In V2 and V3 the queries of prompts, which attend in the expanded
    form, are never fp8.
    """

    kv_scale: jax.Array | None = None
    q_scale: jax.Array | None = None


@dataclass(frozen=True)
class StepOptions:
    """The static options of a step.

    Attributes:
      phase: V2 and V3 attend in the expanded form in "fresh" and "prefill", and in the absorbed form in "decode". In
        "fresh" no text has tokens in the cache; V2 and V3 then have no kernels for cached tokens.
      context_chunk, context_passes: only for "prefill" of V2 and V3: how many cached tokens of each request one pass
        expands, and the number of passes; None counts the passes on the device.
      implementation: the implementation of the attention operations; None takes the best that can run.
      page_size: tokens a page, as in `CacheLayout`.
      window_rows: only in V4, as in `CacheLayout`.
      mesh: sizes of the mesh's axes. More than one device is legal only inside `jax.shard_map` over these axes.
      most_cached: only for "prefill" of V3.2: the most cached tokens of a text; None is what the block tables hold.
    """

    phase: Phase
    context_chunk: int = 512
    context_passes: int | None = None
    implementation: str | None = None
    page_size: int = 64
    window_rows: int = 0
    mesh: MeshShape = ONE_DEVICE
    most_cached: int | None = None

    @property
    def context_axis(self) -> str | None:
        """The mesh axis whose devices share the keys of every text; None if no axis does."""
        return CONTEXT if self.mesh.context > 1 else None

    @property
    def span(self) -> int:
        """How many tokens an entry of a block table stands for, as in `Plan.span`."""
        return self.page_size * self.mesh.context


def fold(params: Params, config: ModelConfig) -> Params:
    """The parameters as steps read them fastest: attention is folded (`functional.fold` of MLA, V3.2 and V4), and a
    dense MLP whose width every step would pad is padded with zeros once.
    """
    layers = []
    for index, layer in enumerate(params["layers"]):
        attention = config.layer(index).attention
        if "in_proj" not in layer["attention"]:
            layer = {**layer, "attention": _FOLD[type(attention)](layer["attention"], attention)}
        mlp = layer["mlp"]
        if "router" not in mlp and isinstance(mlp["down"], jax.Array):
            width = mlp["down"].shape[1]
            layer = {**layer, "mlp": mlp if folded_width(width) == width else _pad_width(mlp)}
        layers.append(layer)
    return {**params, "layers": layers}


_FOLD: dict[type, Any] = {
    MLAConfig: jax.jit(functional.fold, static_argnames="config"),
    V32Config: jax.jit(v32.functional.fold, static_argnames="config"),
    V4Config: jax.jit(v4.functional.fold, static_argnames="config"),
}
_LONG_SUM, _WIDTH_MULTIPLE = 4096, 256
"""XLA cuts the long sums of a product of few rows into 16 or 32 parts, and pads both matrices in every step unless each
part has a multiple of 8 terms. The first number is well below the width of any model that XLA cuts so."""


def folded_width(width: int) -> int:
    """The width that `fold` gives to a dense MLP of this width."""
    return width + -width % _WIDTH_MULTIPLE if width > _LONG_SUM else width


@jax.jit
def _pad_width(mlp: Params) -> Params:
    """A dense MLP padded with zeros to its `folded_width`, which leaves its results the same."""
    hidden, width = mlp["down"].shape
    more = folded_width(width) - width
    gate_up = jnp.pad(mlp["gate_up"].reshape(2, width, hidden), ((0, 0), (0, more), (0, 0)))
    return {"gate_up": gate_up.reshape(-1, hidden), "down": jnp.pad(mlp["down"], ((0, 0), (0, more)))}


def embed(params: Params, config: ModelConfig, tokens: jax.Array) -> jax.Array:
    """Embeddings of tokens [T]: [T, C], or [T, S, C] in V4."""
    x = params["embed"][tokens]
    return x if config.streams is None else open_streams(x, config.streams)


def rope_tables(config: ModelConfig, num_positions: int) -> dict[str, jax.Array]:
    """The rope table of every kind of layer in V4, for texts of up to num_positions tokens; empty for other models."""
    layers = config.attention if isinstance(config.attention, tuple) else ()
    ropes = {layer.kind: (layer.rope_theta, layer.yarn) for layer in layers}
    # Kinds with the same rope share one table, which is as long as the longest text.
    tables = {ropes[layer.kind]: v4.rope_table(layer, num_positions) for layer in dict.fromkeys(layers)}
    return {kind: tables[rope] for kind, rope in ropes.items()}


def shared_steps(
    config: ModelConfig, batch: Batch, ropes: Mapping[str, jax.Array], options: StepOptions
) -> dict[str, V4Step]:
    """The step of V4's layers of each kind ("sliding", "csa" or "hca"); empty for other models.

    All layers of a kind share it, so it is made once a step.

    ropes: the result of `rope_tables`.

    Raises ValueError for V4 without state slots, or with window_rows that no window cache has.
    """
    if not isinstance(config.attention, tuple):
        return {}
    if batch.state_slots is None:
        raise ValueError("batch.state_slots = None; legal for DeepSeek-V4: an array [B]")
    if options.window_rows <= 0 or options.window_rows % WINDOW_PAGE:
        legal = f"the CacheLayout's, a positive multiple of {WINDOW_PAGE}"
        raise ValueError(f"options.window_rows = {options.window_rows}; legal for DeepSeek-V4: {legal}")
    # The window is a ring: its block table repeats the pages of the state slot.
    ring_pages = options.window_rows // WINDOW_PAGE
    columns = pages_for(batch.step.block_tables.shape[1] * options.span, WINDOW_PAGE)
    ring = jnp.arange(columns, dtype=jnp.int32) % ring_pages
    window = Step.ragged(
        jnp.maximum(batch.state_slots, 0)[:, None] * ring_pages + ring,
        batch.step.seq_lens,
        needed_when_ragged(batch.step.cu_seqlens_q),
        total_tokens=batch.tokens.shape[0],
        page_size=WINDOW_PAGE,
    )
    return {
        layer.kind: v4.make_step(
            layer,
            window,
            state_slots=batch.state_slots,
            compressed_tables=batch.step.block_tables,
            cos_sin=ropes[layer.kind],
            page_size=WINDOW_PAGE,
            compressed_page_size=entries_per_page(layer, options.page_size),
            context_axis=options.context_axis,
        )
        for layer in dict.fromkeys(config.attention)
    }


@partial(jax.jit, static_argnames=("config", "options"), donate_argnames=("x", "cache"))
def decoder_layer(
    layer: Params,
    config: LayerConfig,
    x: Any,
    cache: Any,
    batch: Batch,
    scales: Scales,
    options: StepOptions,
    shared: V4Step | None,
    selected: jax.Array | None = None,
    shortcut: jax.Array | None = None,
) -> LayerResult:
    """One layer: attention, then the MLP or the experts; each follows a norm and is added to the residual.

    Args:
      layer: the layer's parameters; those of the MLP say whether the layer has experts.
      config, options: static.
      x: [T, C]; in V4 [T, S, C], or the `LayerResult.x` of the layer before.
      cache: this layer's cache (`caches.init_cache`).
      batch: the step.
      scales: the scales of an fp8 cache and of fp8 queries.
      shared: only in V4: what `shared_steps` made for this layer's kind.
      selected: only in GLM-5: `LayerResult.selected` of the layer whose choice this one shares.
      shortcut: only in LongCat-Flash: `LayerResult.shortcut` of the layer before this one, if that layer has one.

    Returns:
      LayerResult; the cache has the new tokens written (in place if it is donated).
    """
    # Padding rows are undefined after attention: a NaN in them must not reach the experts' blocks.
    valid = batch.step.owned_tokens(batch.tokens.shape[0])
    # In V4 a kernel writes the streams, and the mask would be one kernel more. A step of one token does without: there
    # is no other token to harm.
    alone = config.streams is not None and batch.tokens.shape[0] == 1 and batch.expert_tokens is None

    def attention(x: jax.Array) -> jax.Array:
        nonlocal cache, selected
        found = _attend(layer["attention"], config, x, cache, batch, scales, options, shared, selected)
        cache, selected = found.cache, found.selected
        return found.x if alone else jnp.where(valid[:, None], found.x, 0)

    def mlp(x: jax.Array) -> jax.Array:
        params = layer["mlp"]
        return experts(params, x) if "router" in params else gated_mlp(x, params["gate_up"], params["down"])

    def experts(params: Params, x: jax.Array) -> jax.Array:
        assert config.moe is not None
        if batch.expert_tokens is not None:
            return mixture_of_split_experts(params, x, batch.expert_tokens, config.moe, options.mesh)
        return mixture_of_experts(params, x, valid, config.moe, batch.tokens)

    given = scales, options, selected
    read_often = {"attention": isinstance(config.attention, V32Config), "mlp": "router" in layer["mlp"]}
    begun = None
    for name, block in (("attention", attention), ("mlp", mlp)):
        norm = Norm(layer[f"{name}_norm"], config.rms_norm_eps)
        if name == "mlp" and "shortcut" in layer:
            begun = experts(layer["shortcut"], rms_norm(x, *norm))
        if config.streams is not None:
            read, write, mix, streams = mix_streams(layer[f"{name}_streams"], x, norm, config.streams)
            if name == "attention" or _why_not_few_tokens(layer["mlp"], config, read, None, batch):
                made = block(read)
            else:
                params = layer["mlp"], config.moe
                made = few_tokens.mlp(*params, read, None, valid, batch.tokens, residual=False)
            x = Unwritten(made, write, mix, streams)
        elif name == "attention" and (few := _attend_few_tokens(layer[name], config, x, norm, cache, batch, *given)):
            x, cache, selected = few.x, few.cache, few.selected
        elif name == "mlp" and not _why_not_few_tokens(layer["mlp"], config, x, norm, batch):
            x = few_tokens.mlp(layer["mlp"], config.moe, x, norm, valid, batch.tokens)
        else:
            normed = rms_norm(x, *norm)
            if read_often[name]:
                # Without the barrier the compiler multiplies by the norm's weight once for each reader, in a separate
                # kernel.
                normed = jax.lax.optimization_barrier(normed)
            x = x + block(normed)
    x = after_layer(x) if isinstance(x, Unwritten) else x
    return LayerResult(x if shortcut is None else x + shortcut, cache, selected, begun)


def _attend_few_tokens(
    params: Params,
    config: LayerConfig,
    x: jax.Array,
    norm: Norm,
    cache: Any,
    batch: Batch,
    scales: Scales,
    options: StepOptions,
    selected: jax.Array | None,
) -> LayerResult | None:
    """A LayerResult by the kernels for few tokens, whose x is x plus the attention of norm(x); None if these kernels
    can't run, in V4, and in MLA's steps of prompts."""
    attention, named = config.attention, options.implementation
    if isinstance(attention, V32Config):
        asked = v32.functional.Options(scales.kv_scale, scales.q_scale, options.context_axis, None, named)
        if v32_few_tokens.why_not(params, attention, x, norm, asked):
            return None
        given = None if attention.has_indexer else selected
        keep = config.shared_behind and attention.has_indexer
        found = v32_few_tokens.attend(params, attention, x, norm, cache, batch.step, asked, selected=given, keep=keep)
        return LayerResult(found.y, found.cache, found.selected if config.shared_behind else None)
    if not isinstance(attention, MLAConfig) or options.phase != "decode":
        return None
    quantises, common = scales.q_scale is not None, {"context_axis": options.context_axis, "implementation": named}
    if mla_few_tokens.why_not(params, attention, x, norm, cache, quantises=quantises, **common):
        return None
    y, cache = mla_few_tokens.decode(
        params, attention, x, norm, cache, batch.step, **scales._asdict(), implementation=named
    )
    return LayerResult(y, cache, None)


def _why_not_few_tokens(
    params: Params, config: LayerConfig, x: jax.Array, norm: Norm | None, batch: Batch
) -> list[str]:
    """Why the MLP of a step can't run by `generate.few_tokens`; empty if it can."""
    if batch.expert_tokens is not None:
        return ["experts are split over devices"]
    return few_tokens.why_not(params, config.moe, x, norm)


def _attend(
    params: Params,
    config: LayerConfig,
    x: jax.Array,
    cache: Any,
    batch: Batch,
    scales: Scales,
    options: StepOptions,
    shared: V4Step | None,
    selected: jax.Array | None,
) -> LayerResult:
    """The attention of one layer of any model. In the LayerResult, x is the attention's result [T, C]."""
    attention = config.attention
    common: dict[str, Any] = {"implementation": options.implementation, "context_axis": options.context_axis}
    if isinstance(attention, V4Config):
        assert shared is not None
        return LayerResult(*v4.attend(params, attention, x, cache, shared, **scales._asdict(), **common), None)
    if isinstance(attention, V32Config):
        sparse: dict[str, Any] = {**scales._asdict(), **common}
        if config.shared_behind and attention.has_indexer:
            return LayerResult(*v32.attend(params, attention, x, cache, batch.step, return_selected=True, **sparse))
        given = None if attention.has_indexer else selected
        y, cache = v32.attend(params, attention, x, cache, batch.step, selected=given, **sparse)
        return LayerResult(y, cache, given if config.shared_behind else None)
    if options.phase == "decode":
        dense = batch.step.cu_seqlens_q is None
        x = x[:, None] if dense else x
        y, cache = functional.decode(params, attention, x, cache, batch.step, **scales._asdict(), **common)
        return LayerResult(y[:, 0] if dense else y, cache, None)
    common["kv_scale"] = scales.kv_scale
    if options.phase == "fresh":
        return LayerResult(*_attend_fresh(params, attention, x, cache, batch.step, **common), None)
    y, cache = functional.prefill_with_context(
        params,
        attention,
        x,
        cache,
        batch.step,
        context_chunk=options.context_chunk,
        context_passes=options.context_passes,
        **common,
    )
    return LayerResult(y, cache, None)


def _attend_fresh(
    params: Params,
    config: MLAConfig,
    x: jax.Array,
    cache: jax.Array,
    step: Step,
    *,
    kv_scale: jax.Array | None,
    context_axis: str | None,
    implementation: str | None,
) -> tuple[jax.Array, jax.Array]:
    """The attention of texts that begin with this step: y [T, C] and the cache."""
    y, latent, k_rope = functional.prefill(
        params,
        config,
        x,
        cu_seqlens_q=needed_when_ragged(step.cu_seqlens_q),
        max_q_len=needed_when_ragged(step.max_q_len),
        context_axis=context_axis,
        implementation=implementation,
    )
    return y, tsmla_jax.write_kv_cache(cache, latent, k_rope, step.slot_mapping, kv_scale=kv_scale)


def last_norm(params: Params, config: ModelConfig, x: jax.Array | Unwritten, rows: jax.Array) -> jax.Array:
    """The rows [N, C] that the output projection takes: x[rows] after the last norm. x is [T, C], or what `run_layers`
    returns of V4's streams, and rows is [N] i32.
    """
    norm = Norm(params["norm"], config.rms_norm_eps)
    if config.streams is None:
        return rms_norm(cast(jax.Array, x)[rows], *norm)
    if isinstance(x, Unwritten):  # a step of one token
        return jnp.repeat(close_normed(params["streams"], x, norm, config.streams), rows.shape[0], axis=0)
    return close_normed(params["streams"], x[rows], norm, config.streams)


def output_projection(params: Params, config: ModelConfig) -> jax.Array:
    """The matrix [V, C] that makes logits, or the device's part of it."""
    output: jax.Array = params["embed"] if config.tie_word_embeddings else params["lm_head"]
    return output


def run_layers(
    params: Params,
    config: ModelConfig,
    x: jax.Array,
    caches: Sequence[Any],
    batch: Batch,
    scales: Scales,
    options: StepOptions,
    shared: Mapping[str, V4Step],
) -> tuple[Any, list[Any]]:
    """All layers, one after the other.

    Args:
      x: the result of `embed`.
      caches: one a layer.
      shared: the result of `shared_steps`.
      others: as in `decoder_layer`.

    Returns:
      x, in V4 the `LayerResult.x` of the last layer, and the caches, with the new tokens written.
    """
    caches_after: list[Any] = []
    selected: jax.Array | None = None
    shortcut: jax.Array | None = None
    for index, (layer, cache) in enumerate(zip(params["layers"], caches, strict=True)):
        own = config.layer(index)
        step = shared.get(own.kind)
        found = decoder_layer(layer, own, x, cache, batch, scales, options, step, selected, shortcut)
        x, cache, selected, shortcut = found
        caches_after.append(cache)
    return x, caches_after


def forward(
    params: Params,
    config: ModelConfig,
    caches: Sequence[Any],
    batch: Batch,
    rows: jax.Array,
    scales: Scales,
    options: StepOptions,
) -> tuple[jax.Array, list[Any]]:
    """A whole step: the logits [N, V] after the tokens at `rows`, and the caches with the new tokens written.

    Args:
      caches: one a layer.
      rows: [N] i32, indices into the step's tokens.
      others: as in `decoder_layer`.
    """
    ropes = rope_tables(config, batch.step.block_tables.shape[1] * options.span)
    shared = shared_steps(config, batch, ropes, options)
    x = embed(params, config, batch.tokens)
    x, written = run_layers(params, config, x, caches, batch, scales, options, shared)
    normed, output = last_norm(params, config, x, rows), output_projection(params, config)
    return jnp.einsum("nc,vc->nv", normed, output, preferred_element_type=jnp.float32), written

"""Which implementation runs each operation of a step, and why no better one: `tsmla_jax.explain` on its shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import tsmla_jax
from tsmla_jax.generate.caches import WINDOW_PAGE, CacheLayout, entries_per_page, init_cache
from tsmla_jax.generate.config import ModelConfig
from tsmla_jax.nn import MLAConfig, V4Config, V32Config
from tsmla_jax.nn.deepseek_v4 import V4Cache
from tsmla_jax.nn.deepseek_v32 import V32Cache
from tsmla_jax.ops.dispatch import Explanation
from tsmla_jax.sparse.v4 import INDEX_ROW_ALIGNMENT
from tsmla_kernels import contract

Add = Callable[..., None]


@dataclass(frozen=True)
class Choice:
    """The implementation of one operation.

    Attributes:
      op: the operation's name.
      implementation: what runs it.
      why: what was asked for, or why each implementation that is tried before it can't run.
    """

    op: str
    implementation: str
    why: str


def explain_step(
    config: ModelConfig,
    *,
    dtype: Any,
    layout: CacheLayout,
    batch: int,
    max_pages: int,
    chunk: int,
    max_q_len: int,
    implementation: str | None,
) -> list[Choice]:
    """The choices for prefill (chunk tokens) and decode (max_q_len tokens a request).

    Args:
      config: the model.
      dtype: of the activations.
      layout: of the caches.
      batch, max_pages: of the decode step.
      chunk, max_q_len: tokens of a prefill step, tokens of one request in a decode step.
      implementation: what the step asks for.

    Returns:
      One choice an operation; where prefill and decode (or layers) differ, one for each, the operation's name followed
      by which.

    Raises:
      ValueError: no implementation has that name.
      NotImplementedError: it can't run this, with every reason.
    """
    layers = dict.fromkeys(config.layer(index).attention for index in range(config.num_layers))
    found: dict[str, dict[str, Choice]] = {}

    def add(where: str, op: str, *arguments: Any, implementation: str | None = implementation, **named: Any) -> None:
        explanation = tsmla_jax.explain(op, *arguments, implementation=implementation, **named)
        found.setdefault(op, {})[where] = _choice(op, explanation, implementation)

    for attention in layers:
        cache = jax.eval_shape(partial(init_cache, attention, layout))
        if isinstance(attention, MLAConfig):
            _explain_mla(add, attention, dtype, cache, batch, max_pages, chunk, max_q_len)
            continue
        for phase, tokens, requests in (("prefill", chunk, 1), ("decode", batch * max_q_len, batch)):
            if isinstance(attention, V32Config):
                _explain_v32(partial(add, phase), attention, dtype, cache, tokens, max_pages)
            else:
                where = f"{phase}, {attention.kind}"
                _explain_v4(partial(add, where), attention, dtype, cache, layout, tokens, requests, max_pages)
    choices = []
    for op, by_place in found.items():
        same = len({(choice.implementation, choice.why) for choice in by_place.values()}) == 1
        choices += [
            choice if same else replace(choice, op=f"{op} ({place})")
            for place, choice in list(by_place.items())[: 1 if same else None]
        ]
    return choices


def _array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


_integers = partial(_array, jnp.int32)
_floats = partial(_array, jnp.float32)


def _scale(cache: Any) -> Any:
    return _floats() if cache.dtype == jnp.float8_e4m3fn else None


def _explain_mla(
    add: Add, config: MLAConfig, dtype: Any, cache: Any, batch: int, max_pages: int, chunk: int, max_q_len: int
) -> None:
    heads = config.num_attention_heads
    add(
        "prefill",
        "mla_prefill",
        _array(dtype, chunk, heads, config.qk_head_dim),
        _array(dtype, chunk, heads, config.qk_head_dim),
        _array(dtype, chunk, heads, config.v_head_dim),
        cu_seqlens_q=_integers(2),
        cu_seqlens_kv=_integers(2),
        max_q_len=chunk,
        max_kv_len=chunk,
        softmax_scale=config.softmax_scale,
        return_lse=True,
    )
    add(
        "decode",
        "mla_decode",
        _array(dtype, batch * max_q_len, heads, config.cache_dim),
        cache,
        _integers(batch, max_pages),
        _integers(batch),
        softmax_scale=config.softmax_scale,
        latent_dim=config.kv_lora_rank,
        cu_seqlens_q=_integers(batch + 1),
        max_q_len=max_q_len,
        kv_scale=_scale(cache),
    )


def _explain_indexer(add: Add, keys: Any, heads: int, width: int, topk: int, tokens: int, max_pages: int) -> int:
    """The indexer's two operations; returns how many keys a token chooses."""
    query = jnp.float8_e4m3fn if keys.dtype == jnp.uint8 else jnp.float32
    columns = max_pages * keys.shape[1]
    chosen = min(topk, columns)
    add(
        "indexer_logits",
        _array(query, tokens, heads, width),
        _floats(tokens, heads),
        keys,
        _integers(tokens, max_pages),
        _integers(tokens),
    )
    # The layers leave this choice alone: it has no implementation that anyone would name.
    add("select_topk", _floats(tokens, columns), _integers(tokens), chosen, implementation=None)
    return chosen


def _explain_v32(add: Add, config: V32Config, dtype: Any, cache: V32Cache, tokens: int, max_pages: int) -> None:
    heads, width = config.index_n_heads, config.index_head_dim
    chosen = _explain_indexer(add, cache.indexer, heads, width, config.index_topk, tokens, max_pages)
    add(
        "sparse_mla",
        _array(dtype, tokens, config.mla.num_attention_heads, config.mla.cache_dim),
        cache.kv,
        _integers(tokens, chosen),
        softmax_scale=config.mla.softmax_scale,
        latent_dim=config.mla.kv_lora_rank,
        kv_scale=_scale(cache.kv),
    )


def _explain_v4(
    add: Add,
    config: V4Config,
    dtype: Any,
    cache: V4Cache,
    layout: CacheLayout,
    tokens: int,
    requests: int,
    max_pages: int,
) -> None:
    entries = entries_per_page(config, layout.page_size)
    for state in (cache.compressor, cache.indexer_compressor):
        if state is not None:
            width = state.kv_score.shape[-1]
            add(
                "compress_kv",
                _floats(tokens, 2, width),
                _floats(config.ratio, width),
                state,
                state_slots=_integers(requests),
                seq_lens=_integers(requests),
                cu_seqlens_q=_integers(requests + 1),
                ratio=config.ratio,
                overlap=config.overlap,
            )
    chosen = max_pages * entries if config.kind == "hca" else 0
    if cache.indexer is not None:
        heads, width = config.index_n_heads, config.index_head_dim
        chosen = _explain_indexer(add, cache.indexer, heads, width, config.index_topk, tokens, max_pages)
    columns = config.sliding_window + chosen
    compressed = cache.compressed is not None
    packed = cache.window.dtype == jnp.uint8
    add(
        "sparse_mla",
        _array(dtype, tokens, config.num_attention_heads, config.head_dim),
        cache.window,
        _integers(tokens, columns + -columns % INDEX_ROW_ALIGNMENT),
        _integers(tokens),
        softmax_scale=config.head_dim**-0.5,
        latent_dim=config.head_dim,
        sinks=_floats(config.num_attention_heads),
        compressed_kv_cache=cache.compressed,
        window=config.sliding_window if compressed else None,
        page_size=WINDOW_PAGE if packed else None,
        compressed_page_size=entries if packed and compressed else None,
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

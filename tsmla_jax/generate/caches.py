"""What a model keeps of the texts it is working on, and how many bytes that takes.

A page holds page_size tokens of one text in every layer: their latents (V2, V3), latents and indexer keys (V3.2), or
the entries that V4 compresses them to, page_size / ratio of them. V4 also keeps, whatever a text's length, the latents
of its last tokens and the states of its compressors: each of the texts that decode together has a lane of these.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from tsmla_jax.generate.config import LayerAttention, ModelConfig
from tsmla_jax.generate.pages import pages_for
from tsmla_jax.nn import deepseek_v4, deepseek_v32
from tsmla_jax.nn.config import MLAConfig
from tsmla_jax.nn.deepseek_v4_config import V4Config
from tsmla_jax.nn.deepseek_v32 import V32Config

WINDOW_PAGE = 64
"""Rows a page of V4's window caches, which an engine's user has no reason to choose."""

PACKED = "packed"
"""The cache dtype that stands for the model's own fp8 layout with scales: 656 bytes a token in V3.2, 584 in V4."""


@dataclass(frozen=True)
class CacheLayout:
    """The sizes of all caches of one run.

    Attributes:
      num_pages, page_size: pages in all, tokens a page.
      lanes: texts under way at once.
      window_rows: latents of its last tokens that V4 keeps of a text, a multiple of WINDOW_PAGE; 0 for other models.
      spare: tokens of a text that may be taken back: rejected drafts.
      dtype: a numpy name, or PACKED.
    """

    num_pages: int
    page_size: int
    lanes: int
    window_rows: int
    spare: int
    dtype: str


def page_multiple(config: ModelConfig) -> int:
    """What page_size must be a multiple of: in V4 a page holds whole entries of every ratio."""
    if not isinstance(config.attention, tuple):
        return 1
    return math.lcm(*(layer.ratio for layer in config.attention if layer.ratio))


def default_page_size(config: ModelConfig) -> int:
    """64 tokens; 256 in V4, where that is 64 entries of ratio 4, unless its ratios need more."""
    if not isinstance(config.attention, tuple):
        return 64
    multiple = page_multiple(config)
    return multiple * pages_for(256, multiple)


def window_rows(config: ModelConfig, step_tokens: int, text_tokens: int) -> int:
    """Rows of a text's window in V4, a ring: a step writes its tokens before the first of them looks back.

    Args:
      step_tokens: most tokens of one text in one step.
      text_tokens: of the longest text.
    """
    if not isinstance(config.attention, tuple):
        return 0
    window = max(layer.sliding_window for layer in config.attention)
    return WINDOW_PAGE * pages_for(min(window - 1 + step_tokens, text_tokens), WINDOW_PAGE)


def init_cache(attention: LayerAttention, layout: CacheLayout) -> Any:
    """One layer's empty caches: an array [P, Z, D], a `V32Cache` or a `V4Cache`.

    Indexer keys are stored in fp8 with scales, as the models were made for, beside fp8 and packed caches; else in the
    cache's dtype.
    """
    packed = layout.dtype == PACKED
    dtype = jnp.dtype("uint8" if packed else layout.dtype)
    indexer_dtype = jnp.dtype("uint8") if packed or dtype == jnp.float8_e4m3fn else dtype
    if isinstance(attention, MLAConfig):
        return jnp.zeros((layout.num_pages, layout.page_size, attention.cache_dim), dtype)
    if isinstance(attention, V32Config):
        return deepseek_v32.init_v32_cache(
            attention, layout.num_pages, layout.page_size, kv_dtype=dtype, indexer_dtype=indexer_dtype
        )
    return deepseek_v4.init_v4_layer_cache(
        attention,
        window_pages=layout.lanes * (layout.window_rows // WINDOW_PAGE),
        compressed_pages=layout.num_pages,
        num_states=layout.lanes,
        page_size=WINDOW_PAGE,
        compressed_page_size=entries_per_page(attention, layout.page_size),
        dtype=dtype,
        indexer_dtype=indexer_dtype,
        spare=layout.spare,
    )


def entries_per_page(attention: V4Config, page_size: int) -> int:
    """Compressed entries that a page of page_size tokens holds; sliding layers have none and the number no meaning."""
    return page_size // max(attention.ratio, 1)


def packed_reasons(config: ModelConfig) -> list[str]:
    """Why the model's caches have no packed layout; empty when they have."""
    layers = config.attention if isinstance(config.attention, tuple) else (config.attention,)
    for layer in layers:
        if isinstance(layer, MLAConfig):
            return ["only DeepSeek-V3.2 and V4 have one"]
        if isinstance(layer, V32Config):
            latent, rope = layer.mla.kv_lora_rank, layer.mla.qk_rope_head_dim
        else:
            latent, rope = layer.head_dim, layer.rope_dim
        if (latent, rope) != (512, 64):
            return [f"it holds a latent of 512 and a rope of 64, the model has {latent} and {rope}"]
    return []


@dataclass(frozen=True)
class CacheBytes:
    """Bytes of all layers' caches: in all, of one token (in whole pages), and of one text whatever its length."""

    total: int
    per_token: float
    per_text: int


def cache_bytes(config: ModelConfig, layout: CacheLayout) -> CacheBytes:
    """What the caches of a run take."""

    def total(layout: CacheLayout) -> int:
        sizes: dict[LayerAttention, int] = {}
        for index in range(config.num_layers):
            attention = config.layer(index).attention
            if attention not in sizes:
                leaves = jax.tree.leaves(jax.eval_shape(partial(init_cache, attention, layout)))
                sizes[attention] = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
        return sum(sizes[config.layer(index).attention] for index in range(config.num_layers))

    page = total(replace(layout, num_pages=layout.num_pages + 1)) - total(layout)
    lane = total(replace(layout, lanes=layout.lanes + 1)) - total(layout)
    whole, rest = divmod(page, layout.page_size)
    return CacheBytes(total(layout), page / layout.page_size if rest else whole, lane)

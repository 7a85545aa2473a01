"""The caches of a model: their sizes, their layout and their bytes.

A page holds page_size tokens of one text in every layer: their latents (V2, V3), latents and the keys of an indexer
(V3.2), or the page_size / ratio entries that V4's layers with compression make of them. V4 also keeps the latents of a
text's last tokens and the states of its compressors, as much for a short text as for a long one: each text under way
has a state slot for them.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from tsmla_jax.generate.config import LayerAttention, ModelConfig
from tsmla_jax.generate.pages import pages_for
from tsmla_jax.nn import MLAConfig, v4, v32
from tsmla_jax.nn.v4 import V4Config
from tsmla_jax.nn.v32 import V32Config

WINDOW_PAGE = 64
"""Rows a page of V4's window caches. It is no option: nothing depends on it but the rounding of their size."""

PACKED = "packed"
"""The cache dtype that means the model's own fp8 layout with scales: 656 bytes a row in V3.2, 584 in V4."""


@dataclass(frozen=True)
class CacheLayout:
    """The sizes of a device's caches in one run.

    Attributes:
      num_pages, page_size: pages of each layer's cache (in V4 of its compressed caches), tokens a page.
      state_slots: the most unfinished texts at once, each of which has a slot.
      window_rows: how many latents of a text's last tokens V4 keeps, a multiple of WINDOW_PAGE; 0 for other models.
      spare: tokens of a text that may be taken back: rejected drafts.
      dtype: the name of a dtype, or PACKED.
    """

    num_pages: int
    page_size: int
    state_slots: int
    window_rows: int
    spare: int
    dtype: str


def page_multiple(config: ModelConfig) -> int:
    """The number that page_size must be a multiple of: 1, or in V4 the least common multiple of the layers' ratios."""
    if not isinstance(config.attention, tuple):
        return 1
    return math.lcm(*(layer.ratio for layer in config.attention if layer.ratio))


def default_page_size(config: ModelConfig) -> int:
    """The default page size in tokens: 64, or in V4 256 (64 entries of ratio 4), rounded up to a multiple of
    `page_multiple`."""
    if not isinstance(config.attention, tuple):
        return 64
    multiple = page_multiple(config)
    return multiple * pages_for(256, multiple)


def window_rows(config: ModelConfig, step_tokens: int, text_tokens: int) -> int:
    """How many rows a text's window has in V4, 0 for other models. The window is a ring, and a step writes
    all its tokens before its first token looks back.

    Args:
      config: the model.
      step_tokens: most tokens of one text in one step.
      text_tokens: how many tokens the longest text has.
    """
    if not isinstance(config.attention, tuple):
        return 0
    window = max(layer.sliding_window for layer in config.attention)
    return WINDOW_PAGE * pages_for(min(window - 1 + step_tokens, text_tokens), WINDOW_PAGE)


def init_cache(attention: LayerAttention, layout: CacheLayout) -> Any:
    """One layer's empty caches: an array [P, Z, D], a `V32Cache` or a `V4Cache`.

    Beside fp8 and packed caches an indexer's keys are stored in fp8 with scales, else in the cache's dtype.
    """
    packed = layout.dtype == PACKED
    dtype = jnp.dtype("uint8" if packed else layout.dtype)
    indexer_dtype = jnp.dtype("uint8") if packed or dtype == jnp.float8_e4m3fn else dtype
    if isinstance(attention, MLAConfig):
        return jnp.zeros((layout.num_pages, layout.page_size, attention.cache_dim), dtype)
    if isinstance(attention, V32Config):
        return v32.init_cache(
            attention, layout.num_pages, layout.page_size, kv_dtype=dtype, indexer_dtype=indexer_dtype
        )
    return v4.init_cache(
        attention,
        window_pages=layout.state_slots * (layout.window_rows // WINDOW_PAGE),
        compressed_pages=layout.num_pages,
        num_states=layout.state_slots,
        page_size=WINDOW_PAGE,
        compressed_page_size=entries_per_page(attention, layout.page_size),
        dtype=dtype,
        indexer_dtype=indexer_dtype,
        spare=layout.spare,
    )


def entries_per_page(attention: V4Config, page_size: int) -> int:
    """How many compressed entries a page of page_size tokens holds. For sliding layers, which have no entries, the
    number means nothing."""
    return page_size // max(attention.ratio, 1)


def packed_reasons(config: ModelConfig) -> list[str]:
    """Why the model's caches have no packed layout; empty if they have one."""
    layers = config.attention if isinstance(config.attention, tuple) else (config.attention,)
    for layer in layers:
        if isinstance(layer, MLAConfig):
            return ["only DeepSeek-V3.2, GLM-5 and V4 have this layout"]
        if isinstance(layer, V32Config):
            latent, rope = layer.mla.kv_lora_rank, layer.mla.qk_rope_head_dim
        else:
            latent, rope = layer.head_dim, layer.rope_dim
        if (latent, rope) != (512, 64):
            return [f"it holds a latent of 512 and a rope of 64, the model has {latent} and {rope}"]
    return []


def default_cache_dtype(config: ModelConfig, dtype: str) -> str:
    """The caches' default dtype: PACKED if the model has that layout (V3.2, GLM-5, V4) and parameters of 16 bits, else
    the parameters' dtype. Engines serve V3.2 and V4 with this layout, and Hopper's kernel of the indexer reads no
    keys but fp8 ones. Parameters of f32 are for exact results.

    Args:
      config: the model.
      dtype: the name of the parameters' dtype.
    """
    return PACKED if dtype in ("bfloat16", "float16") and not packed_reasons(config) else dtype


@dataclass(frozen=True)
class CacheBytes:
    """Bytes of all layers' caches on one device: in total, per token (a page's bytes over its tokens), and per text,
    whatever its length."""

    total: int
    per_token: float
    per_text: int


@functools.cache
def cache_bytes(config: ModelConfig, layout: CacheLayout) -> CacheBytes:
    """The bytes that caches of this layout take on one device."""

    def total(layout: CacheLayout) -> int:
        sizes: dict[LayerAttention, int] = {}
        for index in range(config.num_layers):
            attention = config.layer(index).attention
            if attention not in sizes:
                leaves = jax.tree.leaves(jax.eval_shape(partial(init_cache, attention, layout)))
                sizes[attention] = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
        return sum(sizes[config.layer(index).attention] for index in range(config.num_layers))

    page = total(replace(layout, num_pages=layout.num_pages + 1)) - total(layout)
    state_slot = total(replace(layout, state_slots=layout.state_slots + 1)) - total(layout)
    whole, rest = divmod(page, layout.page_size)
    return CacheBytes(total(layout), page / layout.page_size if rest else whole, state_slot)

"""Arguments that sparse_mla refuses, and what it says."""

from __future__ import annotations

import jax.numpy as jnp

from tests.jax.ops.programs import ints

V4_CACHE = jnp.zeros((2, 37440), jnp.uint8)
ARGUMENTS = {
    "q": jnp.zeros((2, 1, 576)),
    "kv_cache": jnp.zeros((3, 4, 576)),
    "indices": ints([[0, 1, 2, 3]] * 2),
    "softmax_scale": 1.0,
}

TWO = {"compressed_kv_cache": jnp.zeros((3, 4, 576)), "window": 2}

REFUSED = [
    ({"q": jnp.zeros((2, 576))}, "q: got shape"),
    ({"q": jnp.zeros((2, 1, 576), jnp.int32)}, "q: got dtype int32"),
    ({"q": jnp.zeros((2, 1, 500))}, "latent_dim: got 512; it must be at most q's last axis D = 500"),
    ({"indices": ints([[0]])}, "indices: got shape.*T, q's tokens"),
    ({"indices": jnp.zeros((2, 4))}, "indices: got dtype float32; legal: int32"),
    ({"lengths": ints([1])}, "lengths: got shape"),
    ({"sinks": jnp.zeros(2)}, "sinks: got shape.*H, q's heads"),
    ({"kv_cache": jnp.zeros((3, 4, 500), jnp.uint8)}, r"kv_cache: got shape.*\[P, Z, 656\].*\[P, page_bytes\]"),
    ({"kv_cache": V4_CACHE}, "kv_cache: got keys of width 512 .v4.; q's D is 576"),
    ({"kv_cache": V4_CACHE, "page_size": 65}, "stride is narrower than the page"),
    ({"page_size": 5}, "page_size: got 5; legal: at most kv_cache's axis 1, 4"),
    ({"page_span": 6}, "page_span: got 6; legal: kv_cache's axis 1, 4"),
    ({"window": 2}, "window: got 2 without compressed_kv_cache"),
    ({"compressed_kv_cache": jnp.zeros((3, 4, 576))}, "window: got None; compressed_kv_cache is given"),
    ({"compressed_kv_cache": jnp.zeros((3, 4, 576)), "window": 5}, "window: got 5; it must be at most K = 4"),
    ({**TWO, "compressed_page_size": 0}, "^compressed_page_size: got 0; legal: an int >= 1"),
    (
        {**TWO, "compressed_page_size": 5},
        "^compressed_page_size: got 5; legal: at most compressed_kv_cache's axis 1, 4",
    ),
    ({**TWO, "compressed_page_span": 3}, "^compressed_page_span: got 3; legal: at least the page size 4"),
    (
        {"compressed_kv_cache": jnp.zeros((3, 4, 576)), "window": 2, "indices": ints([[0, 1, 2]] * 2)},
        "indices: got K = 3 with compressed_kv_cache; legal: a multiple of 4",
    ),
    ({"compressed_kv_cache": V4_CACHE, "window": 2}, "compressed_kv_cache: got keys of width 512"),
    ({"kv_cache": jnp.zeros((3, 4, 656), jnp.uint8), "kv_scale": 2.0}, "kv_scale: got a scale for packed rows"),
    ({"compressed_kv_scale": 2.0}, "compressed_kv_scale: got a scale for no cache"),
    ({"softmax_scale": jnp.ones(2)}, "softmax_scale: got an array"),
]
"""What is changed in ARGUMENTS, and what the ValueError says."""

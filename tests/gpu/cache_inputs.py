"""Inputs of the caches' kernels, and what packed keys hold."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

SPECIAL = (
    *(0.0, -0.0, np.inf, -np.inf, np.nan, 448, 449, 463.9, 464, 465, 480, -500, 3e4, -3e38),
    *(2.0**-9, 1.5 * 2.0**-10, 2.0**-10, -(2.0**-11), 6e-8, 3e-8, 1e-39, 9.2e-41, -1e-45, 17, 19, 0.0703125),
)


def values(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> jax.Array:
    """Normal values over many magnitudes, and everything that is special somewhere among them."""
    rng = np.random.default_rng(seed)
    drawn = rng.normal(size=shape) * 2.0 ** rng.integers(-12, 10, size=shape)
    flat = drawn.reshape(-1)
    at = rng.choice(flat.size, min(flat.size, 8 * len(SPECIAL)), replace=False)
    flat[at] = np.resize(SPECIAL, at.size)
    with np.errstate(over="ignore", invalid="ignore"):
        return jnp.asarray(drawn.astype(np.float32).astype(dtype))


def slots_of(tokens: int, num_slots: int, seed: int = 0) -> jax.Array:
    """Different slots, the last one always, with some to skip and some out of range."""
    rng = np.random.default_rng(seed)
    slots = rng.permutation(num_slots)[:tokens].astype(np.int32)
    if tokens > 3 and num_slots - 1 not in slots:
        slots[3] = num_slots - 1
    slots[5::7] = -1
    slots[6::29] = num_slots
    slots[8::31] = np.int32(-(2**31))
    slots[10::37] = np.int32(2**31 - 1)
    return jnp.asarray(slots)


def unpacked_keys(cache: Any) -> tuple[np.ndarray, np.ndarray]:
    """Keys [P * Z, 128] in float32, their scale multiplied in, and the scales."""
    raw = np.asarray(cache).reshape(cache.shape[0], -1)
    page = cache.shape[1]
    keys = np.asarray(jax.lax.bitcast_convert_type(jnp.asarray(raw[:, : page * 128]), jnp.float8_e4m3fn), np.float32)
    scales = raw[:, page * 128 :].copy().view(np.float32).reshape(-1, 1)
    with np.errstate(over="ignore", invalid="ignore"):
        return keys.reshape(-1, 128) * scales, scales

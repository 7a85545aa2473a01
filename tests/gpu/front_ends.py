"""mla_decode of numpy arrays through each front end, for tests that both must pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import tsmla_bridge
import tsmla_jax

Arrays = tuple[np.ndarray, ...]


def tensor(array: np.ndarray) -> torch.Tensor:
    """A numpy array, of ml_dtypes too, on the GPU."""
    bits = torch.from_numpy(np.ascontiguousarray(array).view(f"i{array.itemsize}"))
    return bits.view(getattr(torch, array.dtype.name)).cuda()


def through_jax(*arrays: np.ndarray, **options: Any) -> Arrays:
    given = {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    static = {name: given.pop(name) for name in list(given) if not isinstance(given[name], jax.Array)}
    run = functools.partial(tsmla_jax.mla_decode, return_lse=True, implementation="cute", **static)
    out, lse = jax.jit(run)(*map(jnp.asarray, arrays), **given)
    return np.asarray(out), np.asarray(lse)


def through_torch(*arrays: np.ndarray, **options: Any) -> Arrays:
    given = {name: tensor(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    results = tsmla_bridge.mla_decode(*map(tensor, arrays), return_lse=True, **given)
    assert isinstance(results, tuple)
    out, lse = (tsmla_bridge.to_jax(x) for x in results)
    return np.asarray(out), np.asarray(lse)


FRONT_ENDS: dict[str, Callable[..., Arrays]] = {"jax": through_jax, "torch": through_torch}

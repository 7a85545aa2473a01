"""Arguments at the front door: describing them to the contract, and turning them into jax arrays afterwards."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tsmla_kernels import contract

Scale = float | jax.Array
"""A Python float, or a float32 scalar array, traced or not."""


def describe(name: str, value: Any) -> contract.Array:
    """Shape and dtype of an array argument (or a ShapeDtypeStruct), before any conversion, so that an int64 table is
    refused and not quietly narrowed. TypeError if it has no shape or dtype."""
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        raise contract.not_an_array(name, value)
    return contract.Array(tuple(value.shape), jnp.dtype(value.dtype).name)


def describe_optional(name: str, value: Any) -> contract.Array | None:
    """`describe`, with None for None."""
    return None if value is None else describe(name, value)


def describe_scale(name: str, value: Any) -> Any:
    """A scale for the contract: arrays by shape and dtype; the rest as it is, for the contract to judge."""
    return describe(name, value) if hasattr(value, "shape") and hasattr(value, "dtype") else value


def as_scale(value: Scale | None, dtype: Any) -> jax.Array:
    """A scale as an operand of `dtype`; None means 1. It is an operand even when it is a Python float, so that no
    implementation can keep its value."""
    return jnp.asarray(1.0 if value is None else value, dtype)


def accumulation_dtype(dtype: str) -> jnp.dtype:
    """float32, or float64 for float64 inputs."""
    return jnp.dtype("float64" if dtype == "float64" else "float32")

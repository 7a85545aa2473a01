"""Arguments at the front door: describing them to the contract, and turning them into jax arrays afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from tsmla_kernels import contract
from tsmla_kernels.contract import rules

Spec = TypeVar("Spec")
Scale = float | jax.Array
"""A Python float, or a float32 scalar array, traced or not."""


def describe(name: str, value: Any) -> contract.Array:
    """Shape and dtype of an array argument (or a ShapeDtypeStruct), before any conversion, so that an int64 table is
    refused and not quietly narrowed. The dtype of numpy floats is the one that jax gives them: float64 needs
    jax_enable_x64. Raises a TypeError if the value has no shape, or no dtype of numbers of numpy or jax.
    """
    if not _is_array(value):
        raise contract.not_an_array(name, value)
    try:
        dtype = jnp.dtype(value.dtype)
    except TypeError:  # torch's, or that of jax's random keys
        raise contract.not_an_array(name, value, "an array of numbers of numpy or jax") from None
    if isinstance(value, np.ndarray) and dtype.kind == "f":
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return contract.Array(tuple(value.shape), dtype.name)


def describe_as(
    name: str, value: Any, axes: str, dtypes: Sequence[str], *sizes: tuple[contract.Dim, str]
) -> contract.Array:
    """`describe`, followed by the check of the axes, the dtype and the sizes of the first axes
    (contract.rules.check_array).
    """
    array = describe(name, value)
    rules.check_array(name, array, axes, dtypes, *sizes)
    return array


def describe_ints(name: str, value: Any, axes: str, *sizes: tuple[contract.Dim, str]) -> contract.Array:
    """`describe_as` for int32: indices into a cache are never converted quietly."""
    return describe_as(name, value, axes, ("int32",), *sizes)


def describe_call(make: Callable[..., Spec], **arguments: Any) -> Spec:
    """The contract's spec of a call: make(**arguments), where every array becomes its contract.Array.

    Raises a TypeError if an argument must be an array and isn't one, and everything that `make` raises.
    """
    return rules.spec_of(make, arguments, describe, describe_scale)


def describe_scale(name: str, value: Any) -> Any:
    """A scale as the contract takes it: a number or None as it is, an array as its contract.Array. The value of a numpy
    scalar is known, so it is checked here.
    """
    if isinstance(value, np.floating | np.ndarray) and value.dtype.kind == "f" and value.ndim == 0:
        rules.check_scale(name, float(value))
    return describe(name, value) if _is_array(value) else value


def check_mesh_axis(name: str, axis: Any) -> None:
    """TypeError / ValueError unless the axis is None, or a mesh axis of a jax.shard_map around the call."""
    if axis is not None and not isinstance(axis, str):
        raise TypeError(f"{name}: got {type(axis).__name__}; legal: the name of a mesh axis, or None")
    try:
        if axis is not None:
            jax.lax.axis_size(axis)
    except NameError:
        legal = "a mesh axis of a jax.shard_map around the call, or None"
        raise ValueError(f"{name}: got {axis!r}; legal: {legal}") from None


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def dtype_name(name: str, dtype: Any) -> str | None:
    """The name of the dtype argument `name`, as the contract takes it; None if the argument is None. TypeError if it is
    no dtype."""
    if dtype is None:
        return None
    try:
        return jnp.dtype(dtype).name
    except TypeError:
        raise TypeError(f"{name}: got {dtype!r:.60}; legal: a dtype, as jax.numpy.bfloat16 or its name") from None


def result_dtype_name(name: str, dtype: Any) -> str | None:
    """`dtype_name` of the dtype of a result that may be float64: ValueError if it is, without jax_enable_x64, because
    jax would narrow it."""
    found = dtype_name(name, dtype)
    if found == "float64" and jax.dtypes.canonicalize_dtype(np.float64) != np.float64:
        raise ValueError(f"{name}: got float64; legal: float64 with jax_enable_x64, or a dtype of fewer bits")
    return found


def as_scale(value: Scale | None, dtype: Any) -> jax.Array:
    """A scale as an array of `dtype`; None means 1. It is an array even when it is a Python float, so that no
    implementation can keep its value."""
    return jnp.asarray(1.0 if value is None else value, dtype)


def scale_operand(scale: Scale | None) -> jax.Array | np.ndarray:
    """A scale as the cache kernels take it, float32 [1]. A Python number is a constant and costs no computation."""
    if scale is None or isinstance(scale, float | int):
        return np.array([1.0 if scale is None else scale], np.float32)
    return as_scale(scale, jnp.float32).reshape(1)


class Scales(NamedTuple):
    """The scales of an attention call: the factor of the logits, and the divisors of q, k and v (None is 1)."""

    softmax: Scale
    q: Scale | None = None
    k: Scale | None = None
    v: Scale | None = None

    def logits(self, dtype: Any) -> jax.Array:
        """The factor of q . k."""
        return as_scale(self.softmax, dtype) * as_scale(self.q, dtype) * as_scale(self.k, dtype)

    def operand(self) -> jax.Array | np.ndarray:
        """The attention kernels' operand, float32 [2]: the factors of the logits and of the outputs. Python numbers are
        multiplied here, so that they reach the device as a constant and cost no computation there."""
        softmax, q, k, v = (1.0 if scale is None else scale for scale in self)
        if all(isinstance(scale, float | int) for scale in (softmax, q, k, v)):
            return np.array([softmax * q * k, v], np.float32)
        return jnp.stack([self.logits(jnp.float32), as_scale(v, jnp.float32)])


def attention_of_no_keys(q: jax.Array, width: int, spec: Any) -> tuple[jax.Array, jax.Array]:
    """The out (0, `width` columns) and the lse (-inf) of queries that see no key, in the dtypes of the call's spec."""
    return jnp.zeros((*q.shape[:-1], width), spec.out_dtype), jnp.full(q.shape[:-1], -jnp.inf, spec.lse_dtype)


def accumulation_dtype(dtype: str) -> jnp.dtype:
    """float32, or float64 for float64 inputs."""
    return jnp.dtype("float64" if dtype == "float64" else "float32")

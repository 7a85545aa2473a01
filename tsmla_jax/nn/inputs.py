"""Checks of the arguments that the functions of all layers share, before anything is computed from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tsmla_jax.ops.inputs import describe
from tsmla_kernels.contract import FLOATS
from tsmla_kernels.contract.rules import check_dtype, named_axes, show


def check_layer(params: object, config: object, kind: type) -> None:
    """Raises a TypeError unless params are a dict, or another mapping, and the config is a `kind`."""
    if not isinstance(config, kind):
        raise TypeError(f"config: got {type(config).__name__}; legal: {kind.__name__}")
    if not isinstance(params, Mapping):
        raise TypeError(f"params: got {type(params).__name__}; legal: a dict of the weights of param_shapes(config)")


def check_tokens(x: Any, hidden_size: int, *legends: str) -> None:
    """Raises a TypeError or ValueError unless x is an array of floating point with the axes of a legend ("T E" or
    "B S E") and E = hidden_size, the config's.
    """
    array, axes = describe("x", x), [named_axes(legend) for legend in legends]
    if len(array.shape) not in map(len, axes) or array.shape[-1] != hidden_size:
        legal = " or ".join(f"[{', '.join(each)}]" for each in axes)
        raise ValueError(f"x: got shape {show(array.shape)}; legal: {legal} with E = {hidden_size}, the config's")
    check_dtype("x", array, FLOATS)

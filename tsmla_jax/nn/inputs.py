"""Checks of the arguments that the functions of all layers share, before anything is computed from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jax.typing import DTypeLike

from tsmla_jax.ops.inputs import describe, describe_ints, dtype_name
from tsmla_kernels.contract import FLOATS, VALUES
from tsmla_kernels.contract.rules import check_at_least_one, check_dtype, named_axes, show, static_dim, static_int


def check_config(config: object, kind: type) -> None:
    """Raises a TypeError unless the config is a `kind`."""
    if not isinstance(config, kind):
        raise TypeError(f"config: got {type(config).__name__}; legal: {kind.__name__}")


def check_params(params: object, names: Iterable[str]) -> None:
    """Raises a TypeError unless params are a dict, or another mapping, and a ValueError for the first weight of
    `names` that they lack. Folded parameters are not looked through, because `fold` has joined some weights.
    """
    if not isinstance(params, Mapping):
        raise TypeError(f"params: got {type(params).__name__}; legal: a dict of the weights of param_shapes(config)")
    for name in names:
        if name not in params and "in_proj" not in params:
            raise ValueError(f"params: got no {name!r}; legal: the weights of param_shapes(config), or fold of them")


def check_tokens(x: Any, hidden_size: int, *legends: str) -> None:
    """Raises a TypeError or ValueError unless x is an array of a dtype in FLOATS with the axes of a legend ("T E" or
    "B S E") and E = hidden_size, the config's.
    """
    array, axes = describe("x", x), [named_axes(legend) for legend in legends]
    if len(array.shape) not in map(len, axes) or array.shape[-1] != hidden_size:
        legal = " or ".join(f"[{', '.join(each)}]" for each in axes)
        raise ValueError(f"x: got shape {show(array.shape)}; legal: {legal} with E = {hidden_size}, the config's")
    check_dtype("x", array, FLOATS)


def check_texts(cu_seqlens_q: Any, max_q_len: object) -> None:
    """Raises a TypeError or ValueError unless these are offsets [B + 1] i32 and a static bound of a text's length."""
    array = describe_ints("cu_seqlens_q", cu_seqlens_q, "B + 1")
    check_at_least_one("cu_seqlens_q", array.shape, 0, "B + 1")
    static_dim("max_q_len", max_q_len)


def check_new_caches(sizes: Mapping[str, object], dtypes: Mapping[str, DTypeLike]) -> None:
    """Raises a TypeError or ValueError unless the sizes of new caches are static ints (page sizes at least 1, others at
    least 0), and their dtypes are uint8 or in VALUES.
    """
    for name, size in sizes.items():
        static_int(name, size, minimum=int(name.endswith("page_size")))
    for name, dtype in dtypes.items():
        if (found := dtype_name(name, dtype)) not in ("uint8", *VALUES):
            raise ValueError(f"{name}: got {found}; legal: uint8, {', '.join(VALUES)}")

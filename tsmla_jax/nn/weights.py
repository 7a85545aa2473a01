"""The parameters of an attention layer of any model: drawn, checked, split over heads, and read from a checkpoint.

Each model's folder says names and shapes (`param_shapes`, and `hf_attention_shapes` under Hugging Face's names); what
is done with them is here.
"""

import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from tsmla_jax.nn.checkpoint import Checkpoint

Params = Mapping[str, jax.Array]
Shapes = Mapping[str, tuple[int, ...]]

LAYER_PREFIX = "model.layers.{layer}.self_attn."

# The axis of heads (or of groups of heads) of each parameter that has one; the others are replicated, as the caches
# are: latents, compressors and indexers belong to all heads.
_HEAD_AXIS = {"q_proj": 1, "q_b_proj": 1, "w_uk": 0, "w_uv": 0, "o_proj": 0, "sinks": 0, "o_a_proj": 0, "o_b_proj": 0}


def specs_over_heads(shapes: Shapes, heads_axis: str | None) -> dict[str, PartitionSpec]:
    """How to split parameters of these shapes over their heads; `heads_axis` names the mesh axis."""
    specs = {}
    for name, shape in shapes.items():
        axes: list[str | None] = [None] * len(shape)
        if name in _HEAD_AXIS:
            axes[_HEAD_AXIS[name]] = heads_axis
        specs[name] = PartitionSpec(*axes) if name in _HEAD_AXIS else PartitionSpec()
    return specs


def random_params(key: jax.Array, shapes: Shapes, dtype: DTypeLike) -> dict[str, jax.Array]:
    """Normal with variance 1 / fan-in; norms are 1, sinks and biases 0."""
    return _random_params(key, tuple(shapes.items()), dtype)


@functools.partial(jax.jit, static_argnames=("shapes", "dtype"))
def _random_params(
    key: jax.Array, shapes: tuple[tuple[str, tuple[int, ...]], ...], dtype: DTypeLike
) -> dict[str, jax.Array]:
    sizes = [math.prod(shape) for _, shape in shapes]
    # One draw cut into pieces: a generator for each shape takes seconds to compile.
    values = jax.random.normal(key, (sum(sizes),), jnp.float32)
    params: dict[str, jax.Array] = {}
    begin = 0
    for (name, shape), size in zip(shapes, sizes, strict=True):
        piece = values[begin : begin + size].reshape(shape)
        begin += size
        if name.endswith("norm"):
            params[name] = jnp.ones(shape, dtype)
        elif name == "sinks" or name.endswith("_bias"):
            params[name] = jnp.zeros(shape, dtype)
        else:
            params[name] = (piece * _fan_in(name, shape) ** -0.5).astype(dtype)
    return params


def _fan_in(name: str, shape: tuple[int, ...]) -> int:
    """How many inputs each output of a projection sums over."""
    if name in ("w_uk", "w_uv"):
        return shape[-1]
    if name == "o_proj":
        return shape[0] * shape[1]
    return shape[1] if name == "o_a_proj" else shape[0]


def check_params(params: Params, shapes: Shapes) -> None:
    """ValueError naming the parameter, if one is missing, unknown or of another shape."""
    for name, shape in shapes.items():
        if name not in params:
            raise ValueError(f"params: {name!r} is missing; legal: {', '.join(shapes)}")
        if params[name].shape != shape:
            raise ValueError(f"params: {name!r} must have shape {shape}, got {params[name].shape}")
    for name in params:
        if name not in shapes:
            raise ValueError(f"params: {name!r} is unknown; legal: {', '.join(shapes)}")


def hf_shapes(shapes: Shapes, hf_name: Callable[[str], str]) -> dict[str, tuple[int, ...]]:
    """Hugging Face's names and shapes of the tensors behind parameters of these shapes; projections are [out, in]."""
    stored = {}
    for name, shape in shapes.items():
        if _is_stored_as_it_is(name, shape):
            stored[hf_name(name)] = shape
        elif name == "kv_b_proj":
            stored[hf_name(name)] = (shape[0] * shape[1], shape[2])
        elif name == "o_a_proj":
            stored[hf_name(name)] = (shape[0] * shape[2], shape[1])
        elif name == "o_proj":
            stored[hf_name(name)] = (shape[2], shape[0] * shape[1])
        else:
            stored[hf_name(name)] = (math.prod(shape[1:]), shape[0])
    return stored


def arrays_from_hf(
    shapes: Shapes, hf_name: Callable[[str], str], tensors: Mapping[str, Any]
) -> dict[str, np.ndarray[Any, Any]]:
    """Parameters of these shapes from the tensors that `hf_shapes` describes.

    Raises ValueError naming a tensor that is missing or of another shape.
    """
    arrays = {}
    for (name, shape), (stored_name, stored_shape) in zip(
        shapes.items(), hf_shapes(shapes, hf_name).items(), strict=True
    ):
        if stored_name not in tensors:
            raise ValueError(f"tensor {stored_name!r} is missing")
        array = np.asarray(tensors[stored_name])
        if array.shape != stored_shape:
            raise ValueError(f"tensor {stored_name!r} must have shape {stored_shape}, got {array.shape}")
        if name == "o_a_proj":
            groups, inner, rank = shape
            array = array.reshape(groups, rank, inner).transpose(0, 2, 1)
        elif name == "kv_b_proj":
            array = array.reshape(shape)
        elif not _is_stored_as_it_is(name, shape):
            array = array.T.reshape(shape)
        arrays[name] = array
    return arrays


def _is_stored_as_it_is(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 1 or name.endswith("position_bias")


def open_checkpoint(checkpoint_dir: str | Path | Checkpoint, layer: int = 0) -> Checkpoint:
    """The checkpoint, opened unless it is already; ValueError for a negative layer."""
    if layer < 0:
        raise ValueError(f"{layer=} must be >= 0")
    return checkpoint_dir if isinstance(checkpoint_dir, Checkpoint) else Checkpoint(checkpoint_dir)


def read_tensors(
    checkpoint: Checkpoint,
    prefix: str,
    shapes: Shapes,
    dtype: DTypeLike | None,
    stored: Mapping[str, str] | None = None,
) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors of these names below `prefix`; `stored` says under which other names the checkpoint has them."""
    stored = stored or {}
    return {
        name: checkpoint.read(stored.get(prefix + name, prefix + name), shape=shape, dtype=dtype)
        for name, shape in shapes.items()
    }

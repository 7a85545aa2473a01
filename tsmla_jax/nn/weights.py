"""The parameters of an attention layer of any model: drawn, checked, split over heads, read from a checkpoint."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from tsmla_jax.nn.block_scaled import BlockScaled
from tsmla_jax.nn.checkpoint import Checkpoint

Params = Mapping[str, Any]
Shapes = Mapping[str, tuple[int, ...]]
_Config = TypeVar("_Config")

# The axis of heads (or of groups of heads) of each parameter that has one; the others are replicated, as the caches
# are: latents, compressors and indexers belong to all heads.
_HEAD_AXIS = {"q_proj": 1, "q_b_proj": 1, "w_uk": 0, "w_uv": 0, "o_proj": 0, "sinks": 0, "o_a_proj": 0, "o_b_proj": 0}


@dataclass(frozen=True)
class LayerWeights(Generic[_Config]):
    """The parameters of one layer of a model, and the tensors of a Hugging Face checkpoint behind them.

    Attributes:
        read_config: the layer's config from a checkpoint's folder and the index of the layer.
        param_shapes: name and shape of every parameter.
        hf_name: the tensor behind a parameter, below `self_attn.`.
        stored_names: the names in a checkpoint whose spelling is another one, by the names of transformers' modules.
    """

    read_config: Callable[[Path, int], _Config]
    param_shapes: Callable[[_Config], dict[str, tuple[int, ...]]]
    hf_name: Callable[[str], str]
    stored_names: Callable[[Checkpoint], Mapping[str, str]] | None = None

    def init_params(self, key: jax.Array, config: _Config, dtype: DTypeLike = jnp.float32) -> dict[str, jax.Array]:
        """Random parameters, for training from scratch and tests: normal with variance 1 / fan-in; norms are 1, sinks
        and biases 0.

        Args:
            key: of jax.random.
            config: the layer's shape.
            dtype: of the parameters.
        """
        return _random_params(key, tuple(self.param_shapes(config).items()), dtype)

    def param_specs(self, config: _Config, heads_axis: str | None) -> dict[str, PartitionSpec]:
        """How to split the parameters over the heads (tensor parallelism).

        What has no heads is replicated, as the caches are; V4's groups of heads are split, so the axis divides their
        number. Under `shard_map` a layer returns the partial sum over the local heads, for the caller to psum.

        Args:
            config: the layer's shape.
            heads_axis: the mesh axis; None replicates all.
        """
        specs = {}
        for name, shape in self.param_shapes(config).items():
            axes = [heads_axis if axis == _HEAD_AXIS.get(name) else None for axis in range(len(shape))]
            specs[name] = PartitionSpec(*axes) if name in _HEAD_AXIS else PartitionSpec()
        return specs

    def hf_attention_shapes(self, config: _Config) -> dict[str, tuple[int, ...]]:
        """Names below `self_attn.` and shapes ([out, in]) of one layer in a Hugging Face checkpoint.

        Args:
            config: the layer's shape.
        """
        stored = _stored_shapes(self.param_shapes(config))
        return {self.hf_name(name): _hf_shape(name, shape) for name, shape in stored.items()}

    def params_from_hf(
        self, config: _Config, tensors: Mapping[str, Any], dtype: DTypeLike | None = None
    ) -> dict[str, Any]:
        """Parameters from the arrays of one attention layer.

        Args:
            config: the layer's shape.
            tensors: arrays by their name below `self_attn.`, shaped as `hf_attention_shapes` says. Of MLA's projections
                all but kv_b_proj may be `BlockScaled`, and stay so, with the shape of the tensor.
            dtype: of the parameters; None keeps each array's own.

        Returns:
            the pytree described at `param_shapes`.

        Raises:
            ValueError: a tensor is missing or has another shape; names it.
        """
        shapes = self.param_shapes(config)
        arrays: dict[str, np.ndarray[Any, Any]] = {}
        narrow: dict[str, BlockScaled] = {}
        for name, shape in _stored_shapes(shapes).items():
            hf_name, legal = self.hf_name(name), _hf_shape(name, shape)
            if hf_name not in tensors:
                raise ValueError(f"tensor {hf_name!r} is missing")
            tensor = tensors[hf_name]
            if isinstance(tensor, BlockScaled):
                narrow[name] = jax.tree.map(jnp.asarray, tensor)
                continue
            array = np.asarray(tensor)
            if array.shape != legal:
                raise ValueError(f"tensor {hf_name!r} must have shape {legal}, got {array.shape}")
            arrays[name] = _from_hf(name, shape, array)
        if "kv_b_proj" in arrays:
            parts = np.split(arrays.pop("kv_b_proj"), [shapes["w_uk"][1]], axis=1)
            arrays.update(zip(("w_uk", "w_uv"), parts, strict=True))
        return {**{name: jnp.asarray(array, dtype=dtype) for name, array in arrays.items()}, **narrow}

    def load_hf_attention(
        self,
        checkpoint_dir: str | Path | Checkpoint,
        layer: int,
        *,
        config: _Config | None = None,
        dtype: DTypeLike | None = None,
        prefix: str = "model.layers.{layer}.self_attn.",
    ) -> dict[str, jax.Array]:
        """The parameters of one attention layer, from safetensors under the Hugging Face names.

        Args:
            checkpoint_dir: the checkpoint's folder, or a `Checkpoint` already open (its headers are then read once for
                all layers).
            layer: index of the layer.
            config: the layer's shape; None reads `config.json` of the folder.
            dtype: of the parameters; None keeps the stored dtype, bfloat16 for block-scaled fp8 weights.
            prefix: what comes before `q_proj.weight` and the others; `{layer}` stands for the index.

        Returns:
            the pytree described at `param_shapes`.

        Raises:
            ValueError: the config or a tensor is missing or misshapen, a file is truncated, or layer is negative; the
                text names the file and the tensor.
            ImportError: the package safetensors is not installed (`pip install 'tsmla-jax[hf]'`).
        """
        if layer < 0:
            raise ValueError(f"{layer=} must be >= 0")
        checkpoint = open_checkpoint(checkpoint_dir)
        config = self.read_config(checkpoint.directory, layer) if config is None else config
        stored = self.stored_names(checkpoint) if self.stored_names else {}
        tensors = {}
        for name, shape in self.hf_attention_shapes(config).items():
            whole = prefix.format(layer=layer) + name
            tensor = checkpoint.read(stored.get(whole, whole), shape=shape, dtype=dtype)
            if not jnp.issubdtype(tensor.dtype, jnp.floating):
                raise checkpoint.unlike(stored.get(whole, whole), "a weight")
            tensors[name] = tensor
        return self.params_from_hf(config, tensors)


def open_checkpoint(checkpoint_dir: str | Path | Checkpoint) -> Checkpoint:
    """The checkpoint, opened unless it is open."""
    return checkpoint_dir if isinstance(checkpoint_dir, Checkpoint) else Checkpoint(checkpoint_dir)


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


@functools.partial(jax.jit, static_argnames=("shapes", "dtype"))
def _random_params(
    key: jax.Array, shapes: tuple[tuple[str, tuple[int, ...]], ...], dtype: DTypeLike
) -> dict[str, jax.Array]:
    sizes = [math.prod(shape) for _, shape in shapes]
    # One draw cut into pieces: a generator for each shape takes seconds to compile.
    pieces = jnp.split(jax.random.normal(key, (sum(sizes),), jnp.float32), np.cumsum(sizes)[:-1])
    params: dict[str, jax.Array] = {}
    for (name, shape), piece in zip(shapes, pieces, strict=True):
        if name.endswith("norm"):
            params[name] = jnp.ones(shape, dtype)
        elif name == "sinks" or name.endswith("_bias"):
            params[name] = jnp.zeros(shape, dtype)
        else:
            inputs = {"w_uk": shape[-1], "w_uv": shape[-1], "o_proj": math.prod(shape[:-1]), "o_a_proj": shape[-2]}
            params[name] = (piece.reshape(shape) * inputs.get(name, shape[0]) ** -0.5).astype(dtype)
    return params


def _stored_shapes(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """The parameters as a checkpoint divides them: w_uk and w_uv are the rows of kv_b_proj."""
    stored: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        if name == "w_uk":
            stored["kv_b_proj"] = (shape[0], shape[1] + shapes["w_uv"][1], shape[2])
        elif name != "w_uv":
            stored[name] = shape
    return stored


def _is_no_projection(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 1 or name.endswith("position_bias")


def _hf_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the tensor behind a parameter; projections are [out, in]."""
    if _is_no_projection(name, shape):
        return shape
    if name == "kv_b_proj":
        return shape[0] * shape[1], shape[2]
    if name == "o_a_proj":
        return shape[0] * shape[2], shape[1]
    return (shape[2], shape[0] * shape[1]) if name == "o_proj" else (math.prod(shape[1:]), shape[0])


def _from_hf(name: str, shape: tuple[int, ...], array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if _is_no_projection(name, shape) or name == "kv_b_proj":
        return array.reshape(shape)
    if name == "o_a_proj":
        groups, inner, rank = shape
        return array.reshape(groups, rank, inner).transpose(0, 2, 1)
    return array.T.reshape(shape)

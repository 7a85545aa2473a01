"""The parameters of an attention layer of any model: drawn, checked, split over heads, read from a checkpoint and
written to one."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from tsmla_jax.nn.checkpoints.checkpoint import Checkpoint
from tsmla_jax.nn.checkpoints.checkpoint_writer import MAX_SHARD_BYTES, save_checkpoint
from tsmla_jax.nn.checkpoints.quantised import is_activation_scale, refuse_tensors
from tsmla_jax.nn.products.block_scaled import BlockScaled
from tsmla_kernels.contract.rules import static_int

Params = Mapping[str, Any]
Shapes = Mapping[str, tuple[int, ...]]
_Config = TypeVar("_Config")

# The axis of heads (or of groups of heads) of each parameter that has one; the others are replicated, as the caches
# are: latents, compressors and indexers belong to all heads.
_HEAD_AXIS = {
    "q_proj": 1, "q_b_proj": 1, "g_proj": 1, "w_uk": 0, "w_uv": 0, "o_proj": 0, "sinks": 0, "o_a_proj": 0,
    "o_b_proj": 0,
}  # fmt: skip


@dataclass(frozen=True)
class LayerWeights(Generic[_Config]):
    """The parameters of one layer of a model, and the tensors of a Hugging Face checkpoint behind them.

    Attributes:
        read_config: the layer's config from a checkpoint's folder and the index of the layer.
        param_shapes: name and shape of every parameter.
        hf_name: from a parameter's name to its tensor's, below `self_attn.`; w_uk and w_uv are one tensor, whose name
            it makes from kv_b_proj.
        stored_names: the spelling of a checkpoint, as a mapping: from a whole name, a prefix and then what `hf_name`
            gives, to the name of the tensor in the checkpoint. None where both are equal.
        stored_name: from such a whole name to the tensor's name in a new checkpoint. None where both are equal.
        unfold: from folded parameters to those that `param_shapes` describes; None if there is no `fold`.
    """

    read_config: Callable[[Path, int], _Config]
    param_shapes: Callable[[_Config], dict[str, tuple[int, ...]]]
    hf_name: Callable[[str], str]
    stored_names: Callable[[Checkpoint], Mapping[str, str]] | None = None
    stored_name: Callable[[str], str] | None = None
    unfold: Callable[[Params, _Config], Params] | None = None

    def init_params(self, key: jax.Array, config: _Config, dtype: DTypeLike = jnp.float32) -> dict[str, jax.Array]:
        """Random parameters, for training from scratch and tests: normal with variance 1 / fan-in; norms are 1, sinks
        and biases 0.

        Args:
            key: a key of jax.random.
            config: the layer's shape.
            dtype: the dtype of the parameters.

        Raises:
            TypeError: key is no array, or config is not a config of this model.
        """
        if not hasattr(key, "dtype"):
            raise TypeError(f"key: got {type(key).__name__}; legal: a key of jax.random, jax.random.key(0)")
        if not dataclasses.is_dataclass(config):
            raise TypeError(f"config: got {type(config).__name__}; legal: a layer's config, after the key")
        return _random_params(key, tuple(self.param_shapes(config).items()), dtype)

    def param_specs(self, config: _Config, heads_axis: str | None) -> dict[str, PartitionSpec]:
        """How to split the parameters over the heads (tensor parallelism).

        Parameters without heads are replicated, as the caches are; V4's groups of heads are split, so the axis's size
        must divide their number. Under `shard_map` a layer returns the partial sum over the local heads, for the caller
        to psum.

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
        """Names below `self_attn.` and shapes of one layer in a Hugging Face checkpoint; projections are [out, in].

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
            tensors: arrays by their name below `self_attn.`, shaped as `hf_attention_shapes` says. MLA's
                projections, except kv_b_proj, may be `BlockScaled`: such a parameter is the tensor as it is, [out, in].
            dtype: the dtype of the parameters that are not `BlockScaled`; None keeps each array's own (float64 needs
                jax_enable_x64).

        Returns:
            the pytree described at `param_shapes`.

        Raises:
            ValueError: a tensor is missing or has another shape, or kv_b_proj is `BlockScaled`; names it.
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
                if name == "kv_b_proj":
                    raise ValueError(f"tensor {hf_name!r}: got BlockScaled; legal: an array, which is split")
                if tensor.shape != legal:
                    raise ValueError(f"tensor {hf_name!r} must have shape {legal}, got {tensor.shape}")
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

    def params_to_hf(self, config: _Config, params: Params, dtype: DTypeLike | None = None) -> dict[str, Any]:
        """The inverse of `params_from_hf`: the arrays of one attention layer under Hugging Face's names.

        Args:
            config: the layer's shape.
            params: the pytree described at `param_shapes`, or `functional.fold` of it; on this process's devices.
            dtype: the dtype of the arrays, float32, bfloat16 or float16; None keeps each parameter's own.

        Returns:
            numpy arrays by their name below `self_attn.`, shaped as `hf_attention_shapes` says; `BlockScaled` where the
            parameter is, whatever dtype says.

        Raises:
            ValueError: a parameter is missing, unknown or of another shape, w_uk and w_uv have two dtypes, or dtype is
                none of the three.
        """
        check_dtype(dtype)
        params = self.unfold(params, config) if self.unfold and "in_proj" in params else params
        shapes = self.param_shapes(config)
        stored = _stored_shapes(shapes)
        narrow = {name for name, value in params.items() if isinstance(value, BlockScaled) and name in stored}
        check_params(params, {**shapes, **{name: _hf_shape(name, stored[name]) for name in narrow}})
        tensors: dict[str, Any] = {}
        for name, shape in stored.items():
            if name in narrow:
                tensors[self.hf_name(name)] = jax.tree.map(np.asarray, params[name])
                continue
            array = _joined(params) if name == "kv_b_proj" else np.asarray(params[name])
            tensors[self.hf_name(name)] = _to_hf(name, shape, array if dtype is None else array.astype(dtype))
        return tensors

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
            config: the layer's shape, which is not compared with the checkpoint's config; None reads that config.
            dtype: the dtype of the parameters; None keeps the stored dtype (float64 needs jax_enable_x64), and makes
                quantised weights bfloat16.
            prefix: what comes before `q_proj.weight` and the others; `{layer}` stands for the index.

        Returns:
            the pytree described at `param_shapes`.

        Raises:
            ValueError: the config or a tensor is missing or misshapen, or of another model or a quantised format that
                isn't read; the layer has a tensor that its config has no use for (a bias, an indexer); an indexer's
                tensor has NaN or infinite values; values don't fit float16; a file is truncated; or layer is
                negative.
            TypeError: layer is no int.
            ImportError: the package safetensors is not installed (`pip install 'tsmla-jax[hf]'`).
        """
        layer = static_int("layer", layer)
        checkpoint = open_checkpoint(checkpoint_dir)
        config = self.read_config(checkpoint.directory, layer) if config is None else config
        spelled, start = self._spelled(checkpoint), prefix.format(layer=layer)
        others = {stored for name, stored in spelled.items() if name.startswith(start)}
        others = {stored for stored in others if not is_activation_scale(stored)}
        refuse_tensors(checkpoint, others)
        tensors = {}
        for name, shape in self.hf_attention_shapes(config).items():
            stored = spelled.get(start + name, start + name)
            tensor = checkpoint.read(stored, shape=shape, dtype=dtype)
            if not jnp.issubdtype(tensor.dtype, jnp.floating):
                raise checkpoint.unlike(stored, "a weight")
            if is_chooser(name):
                checkpoint.check_finite(stored, tensor)
            tensors[name] = tensor
            others -= {stored, checkpoint.scale_name(stored) or stored}
        checkpoint.refuse_others(others)
        return self.params_from_hf(config, tensors)

    def save_hf_attention(
        self,
        checkpoint_dir: str | Path,
        layers: Mapping[int, Params],
        *,
        config: _Config | Mapping[int, _Config] | None = None,
        base: str | Path | Checkpoint | None = None,
        dtype: DTypeLike | None = None,
        prefix: str = "model.layers.{layer}.self_attn.",
        max_shard_bytes: int = MAX_SHARD_BYTES,
    ) -> None:
        """The inverse of `load_hf_attention`, for several layers at once: safetensors under the Hugging Face names.

        Args:
            checkpoint_dir: the folder to write to, made if it is not there; it must not hold safetensors yet.
            layers: the parameters of each layer by its index, as `params_to_hf` takes them.
            config: the layers' shape, or each layer's by its index; None reads the config of base.
            base: a checkpoint whose other tensors are copied as they are stored, and its config and tokenizer: the
                folder is then a whole model with these layers in the place of its own. None writes only the layers.
            dtype: as in `params_to_hf`.
            prefix: what comes before `q_proj.weight` and the others; `{layer}` stands for the index.
            max_shard_bytes: the most bytes of the tensors in one file, unless it holds a single tensor; several files
                get an index.

        Raises:
            ValueError: as `params_to_hf`; layers is empty or has a negative index; config lacks a layer, or neither
                config nor base is given; the folder holds safetensors; max_shard_bytes is below 1; base lacks a tensor,
                has it in another shape, or has it block-scaled where the parameter is not, or the other way round; or
                a parameter's scales don't fit the dtype in which base stores them.
            ImportError: the package safetensors is not installed (`pip install 'tsmla-jax[hf]'`).
        """
        given = None if base is None else open_checkpoint(base)
        spelled = self._spelled(given) if given else {}

        def config_of(layer: int) -> _Config:
            if isinstance(config, Mapping):
                if layer not in config:
                    raise ValueError(f"config: layer {layer} is missing; legal: a config for each index in layers")
                return cast(_Config, config[layer])
            if config is None and given is None:
                raise ValueError("config: got None without a base; legal: the layers' config, or a base that has one")
            return self.read_config(cast(Checkpoint, given).directory, layer) if config is None else config

        def tensors() -> Iterator[tuple[str, Any]]:
            for layer, params in layers.items():
                for name, value in self.params_to_hf(config_of(layer), params, dtype).items():
                    whole = prefix.format(layer=layer) + name
                    new = self.stored_name(whole) if self.stored_name else whole
                    yield spelled.get(whole, whole if given else new), value

        if not layers or min(layers) < 0:
            raise ValueError(f"layers: got indices {sorted(layers)}; legal: at least one, and none below 0")
        save_checkpoint(checkpoint_dir, tensors(), base=given, max_shard_bytes=max_shard_bytes)

    def _spelled(self, checkpoint: Checkpoint) -> Mapping[str, str]:
        """The names of a checkpoint's tensors by their whole names: a prefix, then what `hf_name` gives."""
        return self.stored_names(checkpoint) if self.stored_names else {name: name for name in checkpoint.names()}


def is_chooser(name: str) -> bool:
    """Whether a tensor (by its name below `self_attn.`) belongs to an indexer, which only chooses keys."""
    return "indexer." in name


def open_checkpoint(checkpoint_dir: str | Path | Checkpoint) -> Checkpoint:
    """The checkpoint, opened unless it is open."""
    return checkpoint_dir if isinstance(checkpoint_dir, Checkpoint) else Checkpoint(checkpoint_dir)


def check_dtype(dtype: DTypeLike | None) -> None:
    """ValueError for a dtype other than float32, bfloat16 and float16; None is legal, too."""
    legal = ("float32", "bfloat16", "float16")
    if dtype is not None and jnp.dtype(dtype).name not in legal:
        raise ValueError(f"dtype: got {jnp.dtype(dtype).name}; legal: {', '.join(legal)}, None")


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
    """The parameters' shapes, with kv_b_proj [H, N + V, L] in the place of w_uk and w_uv, as a checkpoint has it."""
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


def _to_hf(name: str, shape: tuple[int, ...], array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The inverse of `_from_hf`."""
    legal = _hf_shape(name, shape)
    if _is_no_projection(name, shape) or name == "kv_b_proj":
        return array.reshape(legal)
    if name == "o_a_proj":
        return array.transpose(0, 2, 1).reshape(legal)
    return array.reshape(legal[::-1]).T


def _joined(params: Params) -> np.ndarray[Any, Any]:
    """kv_b_proj [H, N + V, L], whose rows for each head are those of w_uk and w_uv. ValueError if they have two
    dtypes."""
    w_uk, w_uv = np.asarray(params["w_uk"]), np.asarray(params["w_uv"])
    if w_uk.dtype != w_uv.dtype:
        raise ValueError(
            f"params: w_uk is {w_uk.dtype} and w_uv {w_uv.dtype}; legal: one dtype, for they are one tensor, kv_b_proj"
        )
    return np.concatenate([w_uk, w_uv], axis=1)

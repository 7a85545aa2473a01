"""The base class of the attention layers as Flax nnx modules. Parameters are `nnx.Param`: random, given, or read from a
checkpoint.

A layer calls its functional form. Caches are arguments and results, not state of a layer: an engine owns the caches of
all layers and requests, and donates them to its step.
"""

from pathlib import Path
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tsmla_jax.nn.checkpoints.checkpoint import Checkpoint
from tsmla_jax.nn.checkpoints.weights import LayerWeights, Params, check_params, open_checkpoint


class AttentionLayer(nnx.Module):
    """One attention layer; each model has a subclass.

    Args:
        config: the layer's shape.
        params: the pytree of the model's `param_shapes`, as its `load_hf_attention` returns it; None draws random ones.
        dtype: the dtype of random parameters.
        rngs: source of random parameters; not needed with params.

    Raises:
        TypeError: config is another model's, or no config.
        ValueError: params lacks a name, has one too many or a wrong shape; or neither params nor rngs is given.
    """

    _weights: ClassVar[LayerWeights[Any]]

    def __init__(
        self,
        config: Any,
        *,
        params: Params | None = None,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs | None = None,
    ) -> None:
        self.config = config
        if params is None:
            if rngs is None:
                raise ValueError(f"{type(self).__name__} needs params, or rngs to draw them")
            params = self._weights.init_params(rngs.params(), config, dtype)
        check_params(params, self._weights.param_shapes(config))
        for name, value in params.items():
            setattr(self, name, nnx.Param(value))

    @classmethod
    def from_hf(cls, checkpoint_dir: str | Path | Checkpoint, layer: int, *, dtype: DTypeLike | None = None) -> Self:
        """Layer `layer` of a Hugging Face checkpoint. These arguments and the errors are as in `load_hf_attention`."""
        checkpoint = open_checkpoint(checkpoint_dir)
        config = cls._weights.read_config(checkpoint.directory, layer)
        return cls(config, params=cls._weights.load_hf_attention(checkpoint, layer, config=config, dtype=dtype))

    @property
    def params(self) -> dict[str, jax.Array]:
        """The parameters as the plain pytree that the functional form takes."""
        return {name: getattr(self, name)[...] for name in self._weights.param_shapes(self.config)}

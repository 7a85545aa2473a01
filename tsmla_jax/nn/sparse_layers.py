"""The sparse attention layers of DeepSeek-V3.2 and V4 as Flax nnx modules over their functional forms.

As with `MLAttention`, caches are arguments and results: an engine owns them for all layers and donates them to its
step.
"""

from __future__ import annotations

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tsmla_jax.nn import deepseek_v4, deepseek_v32
from tsmla_jax.nn.checkpoint import Checkpoint
from tsmla_jax.nn.params import Params


def _init(key: jax.Array, shapes: dict[str, tuple[int, ...]], dtype: DTypeLike) -> dict[str, jax.Array]:
    """Normal with variance 1 / fan-in; norms 1; sinks and biases 0."""
    sizes = [math.prod(shape) for shape in shapes.values()]
    # One draw cut into pieces: a generator for each shape takes seconds to compile.
    values = np.split(np.asarray(jax.random.normal(key, (sum(sizes),))), np.cumsum(sizes)[:-1])
    params = {}
    for (name, shape), value in zip(shapes.items(), values, strict=True):
        if name.endswith(("_norm", "_layernorm")):
            value = np.ones(shape)
        elif name == "sinks" or name.endswith("_bias"):
            value = np.zeros(shape)
        else:
            fan_in = shape[-1] if name in ("w_uk", "w_uv") else shape[-2] if name.startswith("o_a") else shape[0]
            fan_in = shape[0] * shape[1] if name == "o_proj" else fan_in
            value = value.reshape(shape) * fan_in**-0.5
        params[name] = jnp.asarray(value, dtype)
    return params


def _store(
    module: nnx.Module,
    shapes: dict[str, tuple[int, ...]],
    params: Params | None,
    dtype: DTypeLike,
    rngs: nnx.Rngs | None,
) -> None:
    """Sets the parameters, given or drawn, as attributes; ValueError for a missing, unknown or misshapen one."""
    if params is None:
        if rngs is None:
            raise ValueError(f"{type(module).__name__} needs params, or rngs to draw them")
        params = _init(rngs.params(), shapes, dtype)
    for name in (*shapes, *params):
        if name not in params:
            raise ValueError(f"params: {name!r} is missing; legal: {', '.join(shapes)}")
        if name not in shapes:
            raise ValueError(f"params: {name!r} is unknown; legal: {', '.join(shapes)}")
        if params[name].shape != shapes[name]:
            raise ValueError(f"params: {name!r} must have shape {shapes[name]}, got {params[name].shape}")
    for name in shapes:
        setattr(module, name, nnx.Param(params[name]))


class V32Attention(nnx.Module):
    """One DeepSeek-V3.2 attention layer.

    Args:
        config: its shape.
        params: the pytree of `v32_param_shapes`, as `load_hf_v32_attention` returns it; None draws random ones.
        dtype, rngs: of random parameters.

    Raises:
        ValueError: params lacks a name, has one too many or a wrong shape; or neither params nor rngs is given.
    """

    def __init__(
        self,
        config: deepseek_v32.V32Config,
        *,
        params: Params | None = None,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs | None = None,
    ) -> None:
        self.config = config
        _store(self, deepseek_v32.v32_param_shapes(config), params, dtype, rngs)

    @classmethod
    def from_hf(
        cls, checkpoint_dir: str | Path | Checkpoint, layer: int, *, dtype: DTypeLike | None = None
    ) -> V32Attention:
        """The layer `layer` of a Hugging Face checkpoint; arguments and errors of `load_hf_attention`."""
        checkpoint = checkpoint_dir if isinstance(checkpoint_dir, Checkpoint) else Checkpoint(checkpoint_dir)
        config = deepseek_v32.V32Config.from_hf(checkpoint.directory)
        params = deepseek_v32.load_hf_v32_attention(checkpoint, layer, config=config, dtype=dtype)
        return cls(config, params=params)

    @property
    def params(self) -> dict[str, jax.Array]:
        """The parameters as the plain pytree that `deepseek_v32.attend` takes."""
        return {name: getattr(self, name)[...] for name in deepseek_v32.v32_param_shapes(self.config)}

    def __call__(
        self,
        x: jax.Array,
        cache: deepseek_v32.V32Cache,
        *,
        block_tables: jax.Array,
        seq_lens: jax.Array,
        cu_seqlens_q: jax.Array,
        slot_mapping: jax.Array,
        kv_scale: float | jax.Array | None = None,
        implementation: str | None = None,
    ) -> tuple[jax.Array, deepseek_v32.V32Cache]:
        """Prefill, chunks and decode alike; see `deepseek_v32.attend`. Returns y and the caches."""
        return deepseek_v32.attend(
            self.params,
            self.config,
            x,
            cache,
            block_tables=block_tables,
            seq_lens=seq_lens,
            cu_seqlens_q=cu_seqlens_q,
            slot_mapping=slot_mapping,
            kv_scale=kv_scale,
            implementation=implementation,
        )


class V4Attention(nnx.Module):
    """One DeepSeek-V4 attention layer; arguments and errors as those of `V32Attention`."""

    def __init__(
        self,
        config: deepseek_v4.V4Config,
        *,
        params: Params | None = None,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs | None = None,
    ) -> None:
        self.config = config
        _store(self, deepseek_v4.v4_param_shapes(config), params, dtype, rngs)

    @classmethod
    def from_hf(
        cls, checkpoint_dir: str | Path | Checkpoint, layer: int, *, dtype: DTypeLike | None = None
    ) -> V4Attention:
        """The layer `layer` of a Hugging Face checkpoint; arguments and errors of `load_hf_attention`."""
        checkpoint = checkpoint_dir if isinstance(checkpoint_dir, Checkpoint) else Checkpoint(checkpoint_dir)
        config = deepseek_v4.V4Config.from_hf(checkpoint.directory, layer)
        return cls(config, params=deepseek_v4.load_hf_v4_attention(checkpoint, layer, config=config, dtype=dtype))

    @property
    def params(self) -> dict[str, jax.Array]:
        """The parameters as the plain pytree that `deepseek_v4.attend` takes."""
        return {name: getattr(self, name)[...] for name in deepseek_v4.v4_param_shapes(self.config)}

    def __call__(
        self,
        x: jax.Array,
        cache: deepseek_v4.V4Cache,
        step: deepseek_v4.V4Step,
        *,
        cos_sin: jax.Array,
        page_size: int,
        compressed_page_size: int | None = None,
        kv_scale: float | jax.Array | None = None,
        implementation: str | None = None,
    ) -> tuple[jax.Array, deepseek_v4.V4Cache]:
        """Prefill, chunks and decode alike; see `deepseek_v4.attend`. Returns y and the caches."""
        return deepseek_v4.attend(
            self.params,
            self.config,
            x,
            cache,
            step,
            cos_sin=cos_sin,
            page_size=page_size,
            compressed_page_size=compressed_page_size,
            kv_scale=kv_scale,
            implementation=implementation,
        )

"""The parameters of one MLA layer as a plain pytree: names, shapes, how to split them over heads, random ones.

Each weight has an axis for heads of its own, so that tensor parallelism is a matter of one axis; kv_b_proj is kept as
the two parts that are used apart, W_UK and W_UV.
"""

import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from tsmla_jax.nn.config import MLAConfig

Params = Mapping[str, jax.Array]


def param_shapes(config: MLAConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter.

    q_proj [E, H, N + R], or q_a_proj [E, rank], q_a_layernorm [rank] and q_b_proj [rank, H, N + R];
    kv_a_proj_with_mqa [E, L + R] (latent first, rope last); kv_a_layernorm [L]; w_uk [H, N, L] and w_uv [H, V, L] (the
    two parts of Hugging Face's kv_b_proj); o_proj [H, V, E]; with attention_bias also q_a_proj_bias,
    kv_a_proj_with_mqa_bias and o_proj_bias.
    """
    heads, hidden, rank = config.num_attention_heads, config.hidden_size, config.q_lora_rank
    shapes: dict[str, tuple[int, ...]] = {}
    if rank is None:
        shapes["q_proj"] = (hidden, heads, config.qk_head_dim)
    else:
        shapes["q_a_proj"] = (hidden, rank)
        shapes["q_a_layernorm"] = (rank,)
        shapes["q_b_proj"] = (rank, heads, config.qk_head_dim)
    shapes["kv_a_proj_with_mqa"] = (hidden, config.cache_dim)
    shapes["kv_a_layernorm"] = (config.kv_lora_rank,)
    shapes["w_uk"] = (heads, config.qk_nope_head_dim, config.kv_lora_rank)
    shapes["w_uv"] = (heads, config.v_head_dim, config.kv_lora_rank)
    shapes["o_proj"] = (heads, config.v_head_dim, hidden)
    if config.attention_bias:
        if rank is not None:
            shapes["q_a_proj_bias"] = (rank,)
        shapes["kv_a_proj_with_mqa_bias"] = (config.cache_dim,)
        shapes["o_proj_bias"] = (hidden,)
    return shapes


def param_specs(config: MLAConfig, heads_axis: str | None) -> dict[str, PartitionSpec]:
    """How to split the parameters over the heads (tensor parallelism): `heads_axis` names the mesh axis.

    The projections to and from the latent have no heads and are replicated, as the latent cache is.
    """
    per_head = {
        "q_proj": PartitionSpec(None, heads_axis, None),
        "q_b_proj": PartitionSpec(None, heads_axis, None),
        "w_uk": PartitionSpec(heads_axis, None, None),
        "w_uv": PartitionSpec(heads_axis, None, None),
        "o_proj": PartitionSpec(heads_axis, None, None),
    }
    return {name: per_head.get(name, PartitionSpec()) for name in param_shapes(config)}


@functools.partial(jax.jit, static_argnames=("config", "dtype"))
def init_params(key: jax.Array, config: MLAConfig, dtype: DTypeLike = jnp.float32) -> dict[str, jax.Array]:
    """Random parameters: normal with variance 1 / fan-in, norms 1, biases 0. For training from scratch and tests."""
    shapes = param_shapes(config)
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    # One draw cut into pieces: a generator for each shape takes seconds to compile.
    values = jax.random.normal(key, (sum(sizes.values()),), jnp.float32)
    params: dict[str, jax.Array] = {}
    begin = 0
    for name, shape in shapes.items():
        piece = values[begin : begin + sizes[name]].reshape(shape)
        begin += sizes[name]
        if name.endswith("_layernorm"):
            params[name] = jnp.ones(shape, dtype)
        elif name.endswith("_bias"):
            params[name] = jnp.zeros(shape, dtype)
        else:
            fan_in = {"w_uk": shape[-1], "w_uv": shape[-1], "o_proj": shape[0] * shape[1]}.get(name, shape[0])
            params[name] = (piece * fan_in**-0.5).astype(dtype)
    return params


def check_params(params: Params, config: MLAConfig) -> None:
    """ValueError naming the parameter, if one is missing, unknown or not as `param_shapes` says."""
    shapes = param_shapes(config)
    for name, shape in shapes.items():
        if name not in params:
            raise ValueError(f"params: {name!r} is missing; legal: {', '.join(shapes)}")
        if params[name].shape != shape:
            raise ValueError(f"params: {name!r} must have shape {shape}, got {params[name].shape}")
    for name in params:
        if name not in shapes:
            raise ValueError(f"params: {name!r} is unknown; legal: {', '.join(shapes)}")

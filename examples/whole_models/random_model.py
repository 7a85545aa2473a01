"""Random parameters of a whole model and caches of noise, made on the devices where they stay: of the shapes and dtypes
that `load_model` and the engine have.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tsmla_jax.generate import ModelConfig
from tsmla_jax.generate.config import LayerAttention
from tsmla_jax.generate.loading import ATTENTION_WEIGHTS
from tsmla_jax.generate.mesh import CONTEXT, EXPERT, param_specs
from tsmla_jax.nn.products.block_scaled import BLOCK, BlockScaled, stack_size
from tsmla_jax.nn.v4 import V4Config


def shapes(config: ModelConfig, narrow: bool, shards: int = 1) -> dict[str, Any]:
    """The parameters' shapes and dtypes, as `load_model` would return them on a mesh of `shards` shards of experts.

    narrow: whether those matrices are in e4m3 that `load_model` leaves so in an fp8 checkpoint.
    """
    moe, hidden, streams = config.moe, config.hidden_size, config.streams
    assert moe is not None
    norm = jnp.bfloat16 if streams is None else jnp.float32

    def of_streams(rows: int, width: int, scales: int) -> dict[str, Any]:
        return {"fn": _wide(rows, width, dtype=jnp.float32), "base": _wide(rows, dtype=jnp.float32),
                "scale": _wide(scales, dtype=jnp.float32)}  # fmt: skip

    layers = []
    for index in range(config.num_layers):
        mlp: dict[str, Any] = {}
        if config.is_moe_layer(index):
            count, width = moe.num_experts + shards * moe.num_shared, moe.intermediate_size
            mlp = {"gate_up": _stack(narrow, shards, count, 2 * width, hidden),
                   "down": _stack(narrow, shards, count, hidden, width),
                   "router": _wide(moe.num_experts, hidden, dtype=jnp.float32)}  # fmt: skip
            if config.mlp_layers[index] == "hash_moe":
                mlp["expert_table"] = _wide(config.vocab_size, moe.top_k, dtype=jnp.int32)
            elif moe.routing == "noaux_tc":
                mlp["correction_bias"] = _wide(moe.num_experts, dtype=jnp.float32)
        else:
            width = config.intermediate_size
            # `load_model` widens gate and up if a block of scales would have rows of both.
            keep = narrow and width % BLOCK == 0
            mlp = {"gate_up": _matrix(keep, 2 * width, hidden), "down": _matrix(keep, hidden, width)}
        attention = _attention_shapes(config.layer(index).attention, narrow)
        layer = {"attention": attention, "mlp": mlp, "attention_norm": _wide(hidden, dtype=norm),
                 "mlp_norm": _wide(hidden, dtype=norm)}  # fmt: skip
        if streams is not None:
            rows, width = (2 + streams.count) * streams.count, streams.count * hidden
            layer |= {name: of_streams(rows, width, 3) for name in ("attention_streams", "mlp_streams")}
        layers.append(layer)
    vocabulary = _wide(config.vocab_size, hidden)
    params = {"embed": vocabulary, "lm_head": vocabulary, "norm": _wide(hidden, dtype=norm), "layers": layers}
    if streams is not None:
        params["streams"] = of_streams(streams.count, streams.count * hidden, 1)
    return params


def _attention_shapes(attention: LayerAttention, narrow: bool) -> dict[str, Any]:
    """The shapes and dtypes of one layer's attention; V4's are never narrow."""
    params: dict[str, Any] = {}
    for name, shape in ATTENTION_WEIGHTS[type(attention)].param_shapes(attention).items():
        if isinstance(attention, V4Config):
            exact = name.endswith(("norm", "sinks", "position_bias"))
            params[name] = _wide(*shape, dtype=jnp.float32 if exact else jnp.bfloat16)
        elif narrow and len(shape) > 1 and not name.startswith(("w_u", "indexer_")):
            inputs = 2 if name == "o_proj" else 1
            params[name] = _matrix(True, math.prod(shape[inputs:]), math.prod(shape[:inputs]))
        else:
            params[name] = _wide(*shape)
    return params


def _wide(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _matrix(narrow: bool, *shape: int) -> Any:
    return _stack(narrow, 1, *shape)


def _stack(narrow: bool, shards: int, *shape: int) -> Any:
    """A matrix, or a stack of them in `shards` equal parts."""
    if not narrow:
        return _wide(*shape)
    blocks = (-(-size // BLOCK) for size in shape[-2:])
    scales = _wide(*shape[:-2], *blocks, dtype=jnp.float32)
    stored = (shards * stack_size(shape[0] // shards, *shape[1:]), *shape[1:]) if len(shape) == 3 else shape
    return BlockScaled(_wide(*stored, dtype=jnp.float8_e4m3fn), scales)  # type: ignore[arg-type]


def random_params(config: ModelConfig, params: dict[str, Any], mesh: Mesh | None) -> dict[str, Any]:
    """Parameters of these shapes: norms and scales are 1 and other vectors 0, a table of experts names all experts in
    turn, and block scales give e4m3 weights the variance of the other matrices."""
    seeds: Iterator[int] = iter(range(1, 1 << 20))

    def make(path: Any, leaf: Any, spec: Any) -> Any:
        narrow, name = isinstance(leaf, BlockScaled), str(getattr(path[-1], "key", ""))
        sharding = None if mesh is None else NamedSharding(mesh, spec.values if narrow else spec)
        if narrow:
            values = noise(next(seeds), leaf.values.shape, leaf.values.dtype, sharding)
            scale = math.sqrt(3 / leaf.shape[-1]) / 400
            return BlockScaled(values, jnp.full(leaf.scales.shape, scale, jnp.float32, device=sharding))
        if leaf.dtype == jnp.int32:
            assert config.moe is not None
            return _experts(leaf.shape, config.moe.num_experts, sharding)()
        if len(leaf.shape) == 1:
            return jnp.full(leaf.shape, name.endswith(("norm", "scale")), leaf.dtype, device=sharding)
        return noise(next(seeds), leaf.shape, leaf.dtype, sharding)

    shards = 1 if mesh is None else mesh.shape[EXPERT] * mesh.shape[CONTEXT]
    specs = jax.tree.broadcast(param_specs(params, shards), params, is_leaf=lambda node: isinstance(node, P))
    return jax.tree_util.tree_map_with_path(make, params, specs, is_leaf=lambda node: isinstance(node, BlockScaled))


@functools.cache
def _experts(shape: tuple[int, ...], count: int, sharding: Any) -> Any:
    return jax.jit(lambda: (jnp.arange(math.prod(shape), dtype=jnp.int32) % count).reshape(shape),
                   out_shardings=sharding)  # fmt: skip


def noise(seed: int, shape: tuple[int, ...], dtype: Any, sharding: Any = None) -> jax.Array:
    """Uniform values of variance 1 / (last axis), made without temporaries. Those of e4m3 lie between -400 and 400:
    block scales give them that variance. Bytes, which packed caches are, lie between 0x30 and 0x3F: positive numbers in
    every format that is packed there."""
    values: jax.Array = _noise(shape, jnp.dtype(dtype), sharding)(jnp.uint32(seed))
    return values


@functools.cache
def _noise(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Any:
    @functools.partial(jax.jit, out_shardings=sharding)
    def make(bits: jax.Array) -> jax.Array:
        for axis in range(len(shape)):
            bits = (bits ^ jax.lax.broadcasted_iota(jnp.uint32, shape, axis)) * jnp.uint32(0x9E3779B1)
            bits ^= bits >> 15
        if dtype == jnp.uint8:
            return (0x30 | bits >> 28).astype(dtype)
        uniform = (bits >> 8).astype(jnp.float32) / 2**23 - 1
        if dtype == jnp.float8_e4m3fn:
            return (uniform * 400).astype(dtype)
        return (uniform * math.sqrt(3 / shape[-1])).astype(dtype)

    return make

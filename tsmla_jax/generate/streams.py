"""The residual streams of DeepSeek-V4: manifold-constrained hyper-connections, as pure functions.

A token's residual is N vectors. A block reads one mix of them. Its result is spread over all N, after these were mixed
by a matrix that is nearly doubly stochastic, so that they neither grow nor shrink from layer to layer. The weights of
the mixes are computed from the streams, in f32. Source: DeepSeek-V4, section 2.2, and Xie et al., mHC.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from tsmla_jax.generate.config import StreamsConfig
from tsmla_jax.nn import few_token_streams
from tsmla_jax.nn.few_token_streams import Mixed, Unwritten
from tsmla_jax.nn.norms import Norm, rms_norm_fixed_order
from tsmla_jax.nn.products import streams as kernels

Params = Mapping[str, jax.Array]


def open_streams(x: jax.Array, config: StreamsConfig) -> jax.Array:
    """Every stream starts as the embedding: [T, N, C] from x [T, C]."""
    return jnp.broadcast_to(x[:, None], (x.shape[0], config.count, x.shape[1]))


def read_streams(
    params: Params, streams: jax.Array, norm: Norm, config: StreamsConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A block's normed input, and the weights by which its result goes back to the streams.

    Args:
      params: "fn" [(2 + N) N, N C], "base" [(2 + N) N] and "scale" [3]: first the N weights of the reading, then the N
        of the writing, then the N x N of the mixing.
      streams: [T, N, C].
      norm: the norm of the block's input, with a weight [C].
      config: the streams' number and constants.

    Returns:
      the block's input [T, C] in the streams' dtype; the f32 weights of the writing [T, N] and the mixing [T, N, N].
    """
    if not kernels.why_not(streams):
        rounds, eps = config.sinkhorn_iterations, config.eps
        return kernels.read_by_kernel(params, streams, norm, rounds=rounds, eps=eps, norm_eps=config.norm_eps)
    count = config.count
    weights = _project(params["fn"], streams, config)
    base, scale = params["base"].astype(jnp.float32), params["scale"].astype(jnp.float32)
    read, write, mix = jnp.split(weights, [count, 2 * count], axis=-1)
    read_base, write_base, mix_base = jnp.split(base, [count, 2 * count])
    read = jax.nn.sigmoid(read * scale[0] + read_base) + config.eps
    write = 2 * jax.nn.sigmoid(write * scale[1] + write_base)
    mix = jax.nn.softmax((mix * scale[2] + mix_base).reshape(-1, count, count), axis=-1) + config.eps
    x = rms_norm_fixed_order(_collapse(read, streams), *norm)
    return x, write, _doubly_stochastic(mix, config)


def mix_streams(params: Params, given: jax.Array | Unwritten, norm: Norm, config: StreamsConfig) -> Mixed:
    """The results of `read_streams`, with the streams that it read. If `given` is `Unwritten`, a block's result is
    written to the streams first."""
    streams = given.streams if isinstance(given, Unwritten) else given
    if not few_token_streams.why_not(streams):
        rounds, eps = config.sinkhorn_iterations, config.eps
        return few_token_streams.mix_by_kernel(params, given, norm, rounds=rounds, eps=eps, norm_eps=config.norm_eps)
    streams = written(given)
    return Mixed(*read_streams(params, streams, norm, config), streams)


def after_layer(given: Unwritten) -> jax.Array | Unwritten:
    """A layer's streams: written, unless the kernel of the next mix writes them."""
    return written(given) if few_token_streams.why_not(given.streams) else given


def written(given: jax.Array | Unwritten) -> jax.Array:
    """The streams with a block's result written, if it isn't yet."""
    return write_streams(*given) if isinstance(given, Unwritten) else given


def write_streams(out: jax.Array, write: jax.Array, mix: jax.Array, streams: jax.Array) -> jax.Array:
    """The streams after a block: stream n is write[n] times the block's result `out` [T, C], plus the sum over m of
    mix[m, n] times stream m.
    """
    dtype, count = streams.dtype, streams.shape[1]
    mix, wide = mix.astype(dtype).astype(jnp.float32), streams.astype(jnp.float32)
    # Products and sums that are written out fuse with the operations after them; a matrix product would be one more
    # kernel.
    mixed = sum(mix[:, stream, :, None] * wide[:, stream, None] for stream in range(count))
    return write.astype(dtype)[..., None] * out[:, None] + jnp.asarray(mixed).astype(dtype)


def close_normed(params: Params, given: jax.Array | Unwritten, norm: Norm, config: StreamsConfig) -> jax.Array:
    """The norm of the result of `close_streams`. If `given` is `Unwritten`, a block's result is written to the streams
    first."""
    if isinstance(given, Unwritten) and not few_token_streams.why_not(given.streams):
        return few_token_streams.close_by_kernel(params, given, norm, eps=config.eps, norm_eps=config.norm_eps)
    return rms_norm_fixed_order(close_streams(params, written(given), config), *norm)


def close_streams(params: Params, streams: jax.Array, config: StreamsConfig) -> jax.Array:
    """The streams of the last layer as one vector: [T, C] from [T, N, C].

    params: "fn" [N, N C], "base" [N] and "scale" [1].
    """
    weights = _project(params["fn"], streams, config) * params["scale"].astype(jnp.float32)
    return _collapse(jax.nn.sigmoid(weights + params["base"].astype(jnp.float32)) + config.eps, streams)


def _project(fn: jax.Array, streams: jax.Array, config: StreamsConfig) -> jax.Array:
    """fn times all streams of a token, which are normed as one vector; f32."""
    flat = jax.lax.collapse(streams, 1).astype(jnp.float32)
    normed = flat * jax.lax.rsqrt((flat * flat).mean(axis=-1, keepdims=True) + config.norm_eps)
    return jnp.einsum("ti,oi->to", normed, fn.astype(jnp.float32), precision="highest")


def _collapse(weights: jax.Array, streams: jax.Array) -> jax.Array:
    return (weights[..., None] * streams.astype(jnp.float32)).sum(axis=1).astype(streams.dtype)


def _doubly_stochastic(mix: jax.Array, config: StreamsConfig) -> jax.Array:
    """Sinkhorn and Knopp's rounds on [T, N, N]: columns and rows are divided by their sums in turn, the columns first
    and last.
    """

    def columns(mix: jax.Array) -> jax.Array:
        return mix / (mix.sum(axis=-2, keepdims=True) + config.eps)

    def one_round(_: jax.Array, mix: jax.Array) -> jax.Array:
        return columns(mix / (mix.sum(axis=-1, keepdims=True) + config.eps))

    # A loop would keep a step out of CUDA graphs and launch five kernels a round; unrolled, a round is one or two.
    return jax.lax.fori_loop(0, config.sinkhorn_iterations - 1, one_round, columns(mix), unroll=True)

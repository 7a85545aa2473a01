"""Two kernels for a mix of V4's residual streams: one for the sums that the mix's weights come from, one for the rest.

In XLA a mix is some thirty kernels, twenty of which are Sinkhorn's rounds over 16 values a token, and a step of few
tokens mostly waits for launches. Written in Pallas for GPUs (Triton).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from tsmla_jax.nn.norms import Norm
from tsmla_jax.nn.products import triton
from tsmla_jax.nn.products.exact_dot import add_products
from tsmla_jax.nn.products.tiles import split_count
from tsmla_jax.nn.products.triton import plgpu

_DEPTH = 128  # terms of a sum that are loaded at once
_PROGRAMS = 512  # about four on each multiprocessor, which wait for memory most of the time


def why_not(streams: jax.Array) -> list[str]:
    """Why `read_by_kernel` can't serve streams [T, N, C] on jax's default device; empty if it can."""
    num_tokens, count, width = streams.shape
    legal = f"at most 8, of a multiple of {_DEPTH} up to 8192"
    return triton.why_not(
        (not num_tokens, "there are no tokens"),
        (streams.dtype != jnp.bfloat16, f"dtype is {streams.dtype.name}; legal: bfloat16"),
        (width % _DEPTH or width > 8192 or count > 8, f"there are {count} streams of {width}; legal: {legal}"),
    )


def read_by_kernel(
    params: Mapping[str, jax.Array], streams: jax.Array, norm: Norm, *, rounds: int, eps: float, norm_eps: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`tsmla_jax.generate.streams.read_streams` by the kernels; the numbers of its config are arguments.

    rounds: the number of Sinkhorn's rounds.
    eps: added to the weights of reading, to the softmax that the rounds begin with, and to the rounds' divisors.
    norm_eps: the epsilon of the streams' norm before the projection.
    """
    num_tokens, count, width = streams.shape
    sums = _project(params["fn"], streams)
    shapes = [
        jax.ShapeDtypeStruct((num_tokens, width), streams.dtype),
        jax.ShapeDtypeStruct((num_tokens, count), jnp.float32),
        jax.ShapeDtypeStruct((num_tokens, count, count), jnp.float32),
    ]
    vectors = (params["base"], params["scale"], norm.weight)
    read, write, mix = pl.pallas_call(
        functools.partial(_read, rounds, eps, norm_eps, norm.eps),
        grid=(num_tokens, 2),
        out_shape=shapes,
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=1),
        interpret=jax.default_backend() == "cpu",
        name="read_streams",
    )(sums, streams, *(vector.astype(jnp.float32) for vector in vectors))
    return read, write, mix


def _project(fn: jax.Array, streams: jax.Array) -> jax.Array:
    """Partial sums [S, T, O + 1 and more] of the products of streams [T, N, C] with fn [O, N C], and, at index O, of
    the streams' squares; f32. The values after index O are 0.
    """
    num_tokens, depth = streams.shape[0], fn.shape[1]
    outputs = max(16, pl.next_power_of_2(fn.shape[0] + 1))
    block = 16 if num_tokens <= 64 else 64
    steps, blocks = depth // _DEPTH, pl.cdiv(num_tokens, block)
    parts = split_count(blocks, steps, _PROGRAMS, least_steps=1)
    out: jax.Array = pl.pallas_call(
        functools.partial(_sum_products, block),
        grid=(blocks, parts),
        out_shape=jax.ShapeDtypeStruct((parts, num_tokens, outputs), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=jax.default_backend() == "cpu",
        name="project_streams",
    )(streams.reshape(num_tokens, depth), fn.astype(jnp.float32))
    return out


def _sum_products(block: int, streams_ref: Any, fn_ref: Any, sums_ref: Any) -> None:
    """Compute one of the S partial sums, for a block of tokens."""
    (num_tokens, depth), count = streams_ref.shape, fn_ref.shape[0]
    parts, _, outputs = sums_ref.shape
    tokens = (pl.program_id(0) * block + jnp.arange(block, dtype=jnp.int32))[:, None]
    rows = jnp.arange(outputs, dtype=jnp.int32)[:, None]
    present, weighed = (jnp.broadcast_to(mask, (mask.shape[0], _DEPTH)) for mask in (tokens < num_tokens, rows < count))

    def add(step: Any, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        products, squares = sums
        terms = (step * _DEPTH + jnp.arange(_DEPTH, dtype=jnp.int32))[None, :]
        x = plgpu.load(streams_ref.at[tokens, terms], mask=present, other=0.0)
        left = plgpu.load(fn_ref.at[rows, terms], mask=weighed, other=0.0)
        products = add_products(products, [(x, left)])
        wide = x.astype(jnp.float32)
        return products, squares + (wide * wide).sum(axis=1)

    share = depth // _DEPTH // parts
    first = pl.program_id(1) * share
    zeros = jnp.zeros((block, outputs), jnp.float32), jnp.zeros((block,), jnp.float32)
    products, squares = lax.fori_loop(first, first + share, add, zeros)
    columns = jnp.arange(outputs, dtype=jnp.int32)[None, :]
    sums = jnp.where(columns == count, squares[:, None], products)
    mask = jnp.broadcast_to(tokens < num_tokens, sums.shape)
    plgpu.store(sums_ref.at[pl.program_id(1), tokens, columns], sums, mask=mask)


def _read(
    rounds: int, eps: float, norm_eps: float, input_eps: float, sums_ref: Any, streams_ref: Any, *others: Any
) -> None:
    """Compute half of one token's mix: the token's first program reads the streams, its second makes the weights of the
    writing and of the mixing.

    others: the mix's base and scale, the norm's weight, and the three results, which are named below.
    """
    base_ref, scale_ref, norm_ref, read_ref, write_ref, mix_ref = others
    token, (_, count, width) = pl.program_id(0), streams_ref.shape
    parts = jnp.arange(pl.next_power_of_2(sums_ref.shape[0]), dtype=jnp.int32)
    lanes = jnp.arange(pl.next_power_of_2(count), dtype=jnp.int32)
    exists = parts < sums_ref.shape[0]

    squares = plgpu.load(sums_ref.at[parts, token, (2 + count) * count], mask=exists, other=0.0).sum()
    factor = lax.rsqrt(squares / (count * width) + norm_eps)

    def weights(rows: jax.Array, valid: jax.Array, scale: int) -> jax.Array:
        """The projected streams at these rows of `fn`, scaled, plus their base."""
        index = parts.reshape(-1, *[1] * rows.ndim)
        mask = (index < sums_ref.shape[0]) & valid[None]
        sums = plgpu.load(sums_ref.at[index, token, rows[None]], mask=mask, other=0.0).sum(axis=0)
        return sums * factor * scale_ref[scale] + plgpu.load(base_ref.at[rows], mask=valid, other=0.0)

    def sigmoid(x: jax.Array) -> jax.Array:
        return 1 / (1 + jnp.exp(-x))

    @pl.when(pl.program_id(1) == 0)
    def read() -> None:
        shares = sigmoid(weights(lanes, lanes < count, 0)) + eps
        columns = jnp.arange(pl.next_power_of_2(width), dtype=jnp.int32)
        inside = columns < width
        x = jnp.zeros(columns.shape, jnp.float32)
        for stream in range(count):
            share = jnp.where(lanes == stream, shares, 0.0).sum()
            one = plgpu.load(streams_ref.at[token, stream, columns], mask=inside, other=0.0)
            x = x + share * one.astype(jnp.float32)
        x = x.astype(read_ref.dtype).astype(jnp.float32)
        x = x * lax.rsqrt((x * x).sum() / width + input_eps) * plgpu.load(norm_ref.at[columns], mask=inside, other=0.0)
        plgpu.store(read_ref.at[token, columns], x.astype(read_ref.dtype), mask=inside)

    @pl.when(pl.program_id(1) == 1)
    def mix() -> None:
        write = 2 * sigmoid(weights(count + lanes, lanes < count, 1))
        plgpu.store(write_ref.at[token, lanes], write, mask=lanes < count)
        rows, columns = lanes[:, None], lanes[None, :]
        inside = (rows < count) & (columns < count)
        logits = weights((2 + rows) * count + columns, inside, 2)
        powers = jnp.where(columns < count, logits, -jnp.inf)
        powers = jnp.exp(powers - powers.max(axis=1, keepdims=True))
        mixing = jnp.where(inside, powers / powers.sum(axis=1, keepdims=True) + eps, 0.0)

        def divided(mixing: jax.Array, axis: int) -> jax.Array:
            # Values outside stay 0, even if eps is 0.
            return jnp.where(inside, mixing / (mixing.sum(axis=axis, keepdims=True) + eps), 0.0)

        def one_round(_: Any, mixing: jax.Array) -> jax.Array:
            return divided(divided(mixing, 1), 0)

        mixing = lax.fori_loop(0, rounds - 1, one_round, divided(mixing, 0))
        plgpu.store(mix_ref.at[token, rows, columns], mixing, mask=inside)

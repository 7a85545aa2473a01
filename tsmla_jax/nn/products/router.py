"""One kernel for a router's logits in f32, as models were trained, from activations of bf16.

On a GPU, XLA makes an f32 product in TF32, which keeps 11 bits of a weight, or without tensor cores. The kernel also
writes the activations as the experts' products take them, which would otherwise be a separate kernel. Written in Pallas
for GPUs (Triton).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from tsmla_jax.nn.products import triton
from tsmla_jax.nn.products.block_scaled import BLOCK
from tsmla_jax.nn.products.exact_dot import add_products
from tsmla_jax.nn.products.scaled_rows import ScaledRows, scaled
from tsmla_jax.nn.products.tiles import MULTIPROCESSORS, split_count
from tsmla_jax.nn.products.triton import plgpu

_HALF = BLOCK // 2
_LEAST_STEPS = 2  # the fewest steps of BLOCK terms that a program takes, if x has so many
_THREE_STAGES = 3 * 2**16  # bytes of three loads, each of BLOCK terms: 128 tokens' in bf16, 64 experts' in f32


def router_logits(x: jax.Array, router: jax.Array) -> jax.Array:
    """x [T, C] times the transpose of router [E, C]: f32 [T, E], as exact as f32 on every device, by XLA."""
    wide, router = x.astype(jnp.float32), router.astype(jnp.float32)
    return jnp.einsum("tc,ec->te", wide, router, precision="highest")


def project(x: jax.Array, router: jax.Array, *, with_rows: bool) -> tuple[jax.Array, ScaledRows | None]:
    """Partial sums of `router_logits`, f32 [S, T, E], each over some columns of x: their sum over S is the logits. Also
    x as `scaled_rows` makes it, if `with_rows` is set and this costs no further kernel, else None.
    """
    if why_not(x, router):
        return router_logits(x, router)[None], None
    return project_by_kernel(x, router, with_rows=with_rows)


def why_not(x: jax.Array, router: jax.Array) -> list[str]:
    """Why `project_by_kernel` can't serve x [T, C] and router [E, C] on jax's default device; empty if it can."""
    known = x.dtype == jnp.bfloat16 and router.dtype in (jnp.bfloat16, jnp.float32)
    return triton.why_not(
        (not x.shape[0], "there are no tokens"),
        (not known, f"x is {x.dtype} and the router {router.dtype}; legal: bfloat16, and bfloat16 or float32"),
        (x.shape[1] % BLOCK, f"x is {x.shape[1]} wide; legal: a multiple of {BLOCK}"),
    )


def project_by_kernel(x: jax.Array, router: jax.Array, *, with_rows: bool) -> tuple[jax.Array, ScaledRows | None]:
    """`project` by the kernel."""
    (tokens, depth), experts = x.shape, router.shape[0]
    block, columns, warps = _tile(tokens)
    grid = pl.cdiv(tokens, block), pl.cdiv(experts, columns)
    parts = split_count(grid[0] * grid[1], depth // BLOCK, MULTIPROCESSORS, least_steps=_LEAST_STEPS)
    shapes = [jax.ShapeDtypeStruct((parts, tokens, experts), jnp.float32)]
    if with_rows:
        shapes.append(jax.ShapeDtypeStruct((tokens, depth), jnp.float16))
        shapes.append(jax.ShapeDtypeStruct((tokens, depth // BLOCK), jnp.float32))
    logits, *rows = pl.pallas_call(
        functools.partial(_kernel, _Kind(block, columns, depth // BLOCK // parts)),
        grid=(*grid, parts),
        out_shape=shapes,
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=_stages(tokens)),
        interpret=jax.default_backend() == "cpu",
        name="router_logits",
    )(x, router)
    return logits, ScaledRows(*rows) if rows else None


def _tile(tokens: int) -> tuple[int, int, int]:
    """How many tokens and experts a program of the kernel has, and how many warps."""
    if tokens <= 64:
        return 16, 32, 4
    return (64, 64, 4) if tokens <= 1024 else (128, 64, 8)


def _stages(tokens: int) -> int:
    """The kernel's stages (loads run stages - 1 ahead): one more for many tokens, if the GPU has the shared memory."""
    return 3 if tokens > 1024 and triton.shared_memory() >= _THREE_STAGES else 2


@dataclass(frozen=True)
class _Kind:
    """The static part of the kernel: how many tokens and experts a program has, and how many steps of BLOCK terms it
    takes.
    """

    block: int
    columns: int
    steps: int


def _kernel(kind: _Kind, x_ref: Any, router_ref: Any, logits_ref: Any, *rows_refs: Any) -> None:
    """Compute sums over some columns of x, for the logits of some tokens and some experts.

    rows_refs: values and scales of `ScaledRows`, or nothing.
    """
    (num_tokens, _), num_experts = x_ref.shape, router_ref.shape[0]
    tokens = pl.program_id(0) * kind.block + jnp.arange(kind.block, dtype=jnp.int32)
    experts = pl.program_id(1) * kind.columns + jnp.arange(kind.columns, dtype=jnp.int32)
    first = pl.program_id(2) * kind.steps
    present = tokens < num_tokens

    def load(ref: Any, rows: jax.Array, begin: Any, width: int) -> jax.Array:
        columns = begin + jnp.arange(width, dtype=jnp.int32)
        mask = jnp.broadcast_to((rows < ref.shape[0])[:, None], (rows.shape[0], width))
        return plgpu.load(ref.at[rows[:, None], columns[None, :]], mask=mask, other=0.0)

    def add(step: Any, total: jax.Array) -> jax.Array:
        begins = step * BLOCK, step * BLOCK + _HALF
        return add_products(
            total, [(load(x_ref, tokens, at, _HALF), load(router_ref, experts, at, _HALF)) for at in begins]
        )

    total = jnp.zeros((kind.block, kind.columns), jnp.float32)
    total = lax.fori_loop(first, first + kind.steps, add, total)
    mask = present[:, None] & (experts < num_experts)[None, :]
    plgpu.store(logits_ref.at[pl.program_id(2), tokens[:, None], experts[None, :]], total, mask=mask)
    if not rows_refs:
        return
    values_ref, scales_ref = rows_refs

    @pl.when(pl.program_id(1) == 0)
    def scale_rows() -> None:
        def scale(step: Any, _: None) -> None:
            columns = step * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
            values, scales = scaled(load(x_ref, tokens, step * BLOCK, BLOCK))
            whole = jnp.broadcast_to(present[:, None], values.shape)
            plgpu.store(values_ref.at[tokens[:, None], columns[None, :]], values, mask=whole)
            plgpu.store(scales_ref.at[tokens, jnp.broadcast_to(step, tokens.shape)], scales, mask=present)

        lax.fori_loop(first, first + kind.steps, scale, None)

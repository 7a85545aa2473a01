"""The parts of V4's attention in a step of few tokens, each as one kernel on Hopper.

`tsmla_jax.nn.v4.functional` computes the same by other operations, and takes each kernel where it can run: with folded
parameters and activations in bf16, and for the window with a packed cache. Axes: T tokens, E hidden width, H heads, D
head width, R rope width, G output groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tsmla_jax.nn.few_tokens import Rope, matmul, run, why_not_matmul
from tsmla_jax.nn.norms import Norm
from tsmla_jax.nn.products.linear import product
from tsmla_jax.nn.v4.config import V4Config
from tsmla_jax.ops import device
from tsmla_kernels.contract.layouts import V4_PACKED
from tsmla_kernels.kernel import Kernel
from tsmla_kernels.sm90.few_tokens import record
from tsmla_kernels.sm90.few_tokens.config import WindowSpec
from tsmla_kernels.sm90.few_tokens.latent_config import InputsSpec, OutputsSpec


def _why_not_arrays(kernel: Kernel, *arrays: Any) -> list[str]:
    if reasons := device.why_not(kernel) + device.why_not_by_default():
        return reasons
    kinds = [str(getattr(array, "dtype", type(array).__name__)) for array in arrays]
    wrong = [kind for kind in kinds if kind != "bfloat16"]
    return [f"an array is {wrong[0]}; {kernel.name} takes bfloat16"] if wrong else []


# ---- the products of x


class Inputs(NamedTuple):
    """Results of `inputs_by_kernel`: low-rank queries and latents side by side, [T, rank + D]; the weights of the
    indexer's heads [T, Hi], where Hi is 0 without an indexer; and the rows of each compressor, f32 [T, 2, W] by the
    compressor's name."""

    projected: jax.Array
    index_weights: jax.Array
    pooled: dict[str, jax.Array]


def _inputs_spec(params: Mapping[str, Any], config: V4Config, x: Any) -> InputsSpec:
    rows = params["in_proj"].shape[0]
    pooled = tuple(params[f"{name}_rows_proj"].shape[0] for name, _ in config.compressors)
    return InputsSpec(x.shape[0], x.shape[1], rows, rows - config.q_lora_rank - config.head_dim, pooled)


def why_not_inputs(params: Mapping[str, Any], config: V4Config, x: Any) -> list[str]:
    """Why `inputs_by_kernel` can't run; empty if it can."""
    if "in_proj" not in params:
        return ["parameters are not folded"]
    kernel, names = record.FEW_TOKEN_INPUTS, [f"{name}_rows_proj" for name, _ in config.compressors]
    weights = (params[name] for name in ("in_proj", *names))
    return _why_not_arrays(kernel, x, *weights) or kernel.reasons(_inputs_spec(params, config, x))


def inputs_by_kernel(params: Mapping[str, Any], config: V4Config, x: jax.Array) -> Inputs:
    """All products of x [T, E] that a layer's attention begins with."""
    spec, tokens = _inputs_spec(params, config, x), x.shape[0]
    names = [name for name, _ in config.compressors]
    inputs = (x, params["in_proj"], *(params[f"{name}_rows_proj"] for name in names))
    widths = [spec.rows - spec.tail, *([spec.tail] if spec.tail else []), *spec.pooled]
    projected, *others = run(record.FEW_TOKEN_INPUTS, spec, inputs, *((tokens, width) for width in widths))
    weights = others.pop(0) if spec.tail else x[:, :0]
    return Inputs(
        projected, weights, {name: rows.reshape(tokens, 2, -1) for name, rows in zip(names, others, strict=True)}
    )


def matrix(params: Mapping[str, Any], name: str, x: jax.Array) -> jax.Array:
    """The result of `linear.product`; by one kernel, if it can run, for one token and folded parameters."""
    if "in_proj" not in params or x.shape[0] != 1 or why_not_matmul(x, params[name]):
        return product(params, name, x)
    return matmul(x, params[name])


# ---- the grouped product


def _outputs_spec(o_a_proj: Any, heads: Any, rope_dim: int) -> OutputsSpec:
    groups, rows, terms = o_a_proj.shape
    return OutputsSpec(heads.shape[0], groups, terms, rows, heads.shape[2], rope_dim)


def why_not_outputs(o_a_proj: Any, heads: Any, rope_dim: int) -> list[str]:
    """Why `outputs_by_kernel` can't run; empty if it can.

    rope_dim: R.
    """
    kernel = record.FEW_TOKEN_OUTPUTS
    return _why_not_arrays(kernel, o_a_proj, heads) or kernel.reasons(_outputs_spec(o_a_proj, heads, rope_dim))


def outputs_by_kernel(o_a_proj: jax.Array, heads: jax.Array, rope: Rope) -> jax.Array:
    """The grouped product [T, G N] of attention's heads [T, H, D], whose last columns are rotated back first.

    Args:
      o_a_proj: [G, N, H D / G].
      heads: in bf16.
      rope: the rotation at the tokens' positions; pairs lie side by side.
    """
    spec = _outputs_spec(o_a_proj, heads, 2 * rope.cos.shape[1])
    inputs = heads.reshape(heads.shape[0], -1), o_a_proj, rope.cos, rope.sin
    return run(record.FEW_TOKEN_OUTPUTS, spec, inputs, (heads.shape[0], spec.groups * spec.rows))[0]


# ---- the window


class LowAndWindow(NamedTuple):
    """Results of `write_window_by_kernel`: normed low-rank queries [T, rank], and the window's cache with the new
    tokens' latents written."""

    low: jax.Array
    cache: jax.Array


def _window_spec(joint: Any, low_norm: Norm, norm: Norm, page_size: int) -> WindowSpec:
    return WindowSpec(joint.shape[0], page_size, low_norm.weight.shape[0], low_norm.eps, norm.eps)


def why_not_window(
    joint: Any, kv_cache: Any, low_norm: Norm, norm: Norm, *, rope_dim: int, page_size: int
) -> list[str]:
    """Why `write_window_by_kernel` can't run; empty if it can.

    rope_dim: R.
    """
    if reasons := device.why_not(record.FEW_TOKEN_WINDOW) + device.why_not_by_default():
        return reasons
    if joint.dtype != jnp.bfloat16 or kv_cache.dtype != jnp.uint8:
        return [f"rows are {joint.dtype}, the cache {kv_cache.dtype}; few_token_window takes bfloat16 and uint8"]
    if rope_dim != V4_PACKED.rope_dim or kv_cache.shape[1] != V4_PACKED.page_bytes(page_size):
        legal = f"{V4_PACKED.rope_dim}, and pages without gaps"
        return [f"{rope_dim} columns have rope, or the cache's pages have gaps; few_token_window takes {legal}"]
    return record.FEW_TOKEN_WINDOW.reasons(_window_spec(joint, low_norm, norm, page_size))


def write_window_by_kernel(
    kv_cache: jax.Array,
    joint: jax.Array,
    slot_mapping: jax.Array,
    *,
    low_norm: Norm,
    norm: Norm,
    rope: Rope,
    page_size: int,
) -> LowAndWindow:
    """Write V4's new tokens into the packed cache of the window, and norm the low-rank queries.

    Args:
      kv_cache: uint8 [P, bytes of a page].
      joint: [T, W] in bf16; a row begins with the low-rank query and the latent, both before their norms.
      slot_mapping: [T] i32, as in `tsmla_jax.sparse.write_v4_cache`.
      low_norm: the norm of the query.
      norm: the norm of the latent, whose last R columns are rotated after it.
      rope: the rotation at the tokens' positions; pairs lie side by side, in the cache too.
      page_size: rows of a page.
    """
    spec, wide = _window_spec(joint, low_norm, norm, page_size), jnp.float32
    weights = low_norm.weight.astype(wide), norm.weight.astype(wide)
    inputs = (joint, *weights, rope.cos, rope.sin, slot_mapping, kv_cache)
    shapes = ((joint.shape[0], spec.rank), kv_cache.shape)
    return LowAndWindow(*run(record.FEW_TOKEN_WINDOW, spec, inputs, *shapes))

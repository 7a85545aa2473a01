"""What the sparse kernels compute, on a CPU: the kernels' own operands, as the wrapper passes them, through the
reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tsmla_jax.ops.inputs import Scales, describe_call
from tsmla_jax.ops.sparse_mla import reference
from tsmla_kernels.contract.sparse import sparse_mla_spec
from tsmla_kernels.kernel import Kernel
from tsmla_kernels.sm90.sparse.config import SparseConfig
from tsmla_kernels.sm90.sparse.union_config import UnionConfig
from tsmla_kernels.sm90.sparse_backward.config import SparseBackwardConfig


def call_of(config: SparseConfig | UnionConfig | SparseBackwardConfig, operands: dict[str, Any]) -> dict[str, Any]:
    """The arguments of sparse_mla that these operands of a kernel stand for, without the scales."""
    given = {name: operands.get(name) for name in ("q", "kv_cache", "indices", "lengths", "sinks")}
    if not isinstance(config, SparseBackwardConfig):
        given["q"] = operands["q"].reshape(-1, config.num_heads, config.head_dim)
    # (0, 0) where a slot's number is its row's number
    given |= {"page_size": config.page_size or None, "page_span": config.page_span or None}
    if config.two_caches:
        given |= {
            "compressed_kv_cache": operands["compressed_kv_cache"],
            "window": config.window,
            "compressed_page_size": config.compressed_page_size or None,
            "compressed_page_span": config.compressed_page_span or None,
        }
    return given


def emulate(
    *arrays: jax.Array,
    kernel: Kernel,
    config: SparseConfig | UnionConfig | SparseBackwardConfig,
    arch: str,
    result_shapes: tuple[tuple[int, ...], ...],
) -> list[jax.Array]:
    """What a kernel computes from its own operands, through the reference; its workspaces are left as garbage."""
    inputs, results = ([x for x in kernel.operands(config) if x.output == output] for output in (False, True))
    operands = {operand.name: array for operand, array in zip(inputs, arrays, strict=True)}
    given = call_of(config, operands)
    spec = describe_call(sparse_mla_spec, return_max_logits=getattr(config, "max_logits", False), **given)
    caches = [operands[name] for name in ("kv_cache", "compressed_kv_cache") if name in operands]
    softmax, *kv_scales = operands["scales"]
    if spec.cache.layout != "plain":
        kv_scales = [None, None]

    def attend(q: jax.Array, sinks: jax.Array | None, *caches: jax.Array) -> tuple[jax.Array, ...]:
        return reference.sparse_mla(
            q,
            caches,
            given["indices"],
            given["lengths"],
            sinks,
            Scales(softmax),
            tuple(kv_scales[: len(caches)]),
            spec=spec,
        )

    found: list[Any]
    if isinstance(config, SparseBackwardConfig):
        found = _gradients(attend, given, caches, operands)
    else:
        results_found = attend(given["q"], given["sinks"], *caches)
        found = [x.reshape(shape) for x, shape in zip(results_found, result_shapes, strict=False)]
    count = len(found)
    workspaces: list[Any] = [
        jnp.full(shape, 123, operand.dtype)
        for operand, shape in zip(results[count:], result_shapes[count:], strict=True)
    ]
    return [*found, *workspaces]


def _gradients(
    attend: Callable[..., tuple[jax.Array, ...]],
    given: dict[str, Any],
    caches: list[jax.Array],
    operands: dict[str, Any],
) -> list[jax.Array]:
    """The gradients of q and of the caches, and the tokens' shares of the sinks' one, by the reference. They are NaN if
    `out` and `lse` are not its results."""
    out, lse, d_out, d_lse = (operands[name] for name in ("out", "lse", "d_out", "d_lse"))
    seen = lse != -jnp.inf  # rows that see no key have no gradient, whatever the cotangents are there
    tokens, heads = lse.shape
    each = None if given["sinks"] is None else jnp.broadcast_to(given["sinks"], (tokens, heads))
    results, derivative = jax.vjp(attend, given["q"], each, *caches)
    differs = jnp.abs(jnp.where(seen, lse - results[1], 0)).max() > 1e-3
    differs |= jnp.abs((out - results[0]).astype(jnp.float32)).max() > 5e-2
    d_q, d_each, *d_caches = derivative((jnp.where(seen[..., None], d_out, 0), jnp.where(seen, d_lse, 0)))
    found = [d_q, *d_caches, *(() if d_each is None else (d_each,))]
    return [jnp.where(differs, jnp.nan, x).astype(x.dtype) for x in found]

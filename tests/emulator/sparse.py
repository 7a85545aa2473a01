"""What the sparse kernel computes, on a CPU: the kernel's own operands, as the wrapper passes them, through the
reference."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tsmla_jax.ops.inputs import Scales, describe_call
from tsmla_jax.ops.sparse_mla import reference
from tsmla_kernels.contract.sparse import sparse_mla_spec
from tsmla_kernels.kernel import Kernel
from tsmla_kernels.sm90.sparse.config import SparseConfig


def call_of(config: SparseConfig, operands: dict[str, Any]) -> dict[str, Any]:
    """The arguments of sparse_mla that these operands of the kernel stand for, without the scales."""
    given = {name: operands.get(name) for name in ("kv_cache", "indices", "lengths", "sinks")}
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
    *arrays: jax.Array, kernel: Kernel, config: SparseConfig, arch: str, result_shapes: tuple[tuple[int, ...], ...]
) -> list[jax.Array]:
    inputs, results = ([x for x in kernel.operands(config) if x.output == output] for output in (False, True))
    operands = {operand.name: array for operand, array in zip(inputs, arrays, strict=True)}
    given = call_of(config, operands)
    spec = describe_call(sparse_mla_spec, **given)
    caches = [operands[name] for name in ("kv_cache", "compressed_kv_cache") if name in operands]
    softmax, *kv_scales = operands["scales"]
    if spec.cache.layout != "plain":
        kv_scales = [None, None]
    out, lse = reference.sparse_mla(
        given["q"],
        tuple(caches),
        given["indices"],
        given["lengths"],
        given["sinks"],
        Scales(softmax),
        tuple(kv_scales[: len(caches)]),
        spec=spec,
    )
    workspaces: list[Any] = [
        jnp.full(shape, 123, operand.dtype) for operand, shape in zip(results[2:], result_shapes[2:], strict=True)
    ]
    return [out.reshape(result_shapes[0]), lse.reshape(result_shapes[1]), *workspaces]

"""indexer_logits by the CuTe DSL kernel: one custom call, one launch. Where each token has a row of the block table,
tokens are partitioned, and vmap's axis is folded into them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from tsmla_jax.ops import device, transforms
from tsmla_jax.ops.indexer_logits import reference
from tsmla_jax.ops.kernel_call import kernel_call
from tsmla_kernels.catalog import INDEXER_LOGITS
from tsmla_kernels.contract import Array
from tsmla_kernels.contract.sparse import IndexerLogitsSpec, indexer_logits_spec
from tsmla_kernels.sm90.logits.config import logits_config


def why_not(spec: IndexerLogitsSpec) -> list[str]:
    """The reasons why the kernel can't run this call; empty if it can."""
    return device.why_not(INDEXER_LOGITS) + INDEXER_LOGITS.reasons(spec)


def why_not_by_default() -> list[str]:
    """The reasons why implementation=None must not pick the kernel."""
    return device.why_not_by_default()


def indexer_logits(
    q: jax.Array,
    weights: jax.Array,
    k_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    cu_seqlens_q: jax.Array | None = None,
    *,
    spec: IndexerLogitsSpec,
) -> jax.Array:
    """logits [T, M * Z] as the public indexer_logits documents them."""
    columns = spec.max_pages * spec.cache.page_size
    if 0 in (spec.num_tokens, spec.num_requests, columns):
        return jnp.full((spec.num_tokens, columns), -jnp.inf, jnp.float32)
    arch = device.arch_for(INDEXER_LOGITS)
    offsets = () if cu_seqlens_q is None else (cu_seqlens_q,)
    run = _transformable(spec.ragged, arch, device.num_sms(arch))
    logits: jax.Array = run(q, weights, block_tables, seq_lens, *offsets, k_cache)
    return logits


@functools.cache
def _transformable(ragged: bool, arch: str, num_sms: int) -> Callable[..., Any]:
    """The call as a function of (q, weights, block_tables, seq_lens, cu_seqlens_q if ragged, k_cache)."""

    def on_device(q: jax.Array, weights: jax.Array, *others: jax.Array) -> jax.Array:
        *tables, k_cache = others
        spec = _spec(q, weights, *others)  # the rows of this device decide
        config = logits_config(spec, num_sms)
        shape = spec.num_tokens, spec.max_pages * spec.cache.page_size
        return kernel_call(INDEXER_LOGITS, config, (q, weights, k_cache, *tables), (shape,), arch=arch)[0]

    def derivative(q: jax.Array, weights: jax.Array, *others: jax.Array) -> jax.Array:
        """By the definition: "xla"'s loop has no derivative in reverse mode under jax.jit."""
        *tables, k_cache = others
        return reference.indexer_logits(q, weights, k_cache, *tables, spec=_spec(q, weights, *others))

    def fold(run: Callable[..., Any], axis_size: int, *arrays: jax.Array) -> Any:
        if ragged:
            return None
        *rows, k_cache = arrays
        logits: jax.Array = run(*map(transforms.fold_rows, rows), k_cache)
        return logits.reshape(axis_size, -1, logits.shape[-1])

    rule = "t h d, t h, b m, b, c, p z e -> t n" if ragged else "t h d, t h, t m, t, p z e -> t n"
    fixed = tuple("thdbmcpzen" if ragged else "hdmpzen")
    partition = functools.partial(_partition, ragged)
    return transforms.transformable(
        on_device, rule=rule, fixed=fixed, partition=partition, fold=fold, shared=1, derivative=derivative
    )


def _spec(q: jax.Array, weights: jax.Array, *others: jax.Array) -> IndexerLogitsSpec:
    """The contract's spec of the arrays as `_transformable` orders them."""
    described = [Array(tuple(x.shape), x.dtype.name) for x in (q, weights, *others)]
    names = ("q", "weights", "block_tables", "seq_lens", "cu_seqlens_q")[: len(described) - 1]
    return indexer_logits_spec(**dict(zip((*names, "k_cache"), described, strict=True)))


def _partition(ragged: bool, shapes: Sequence[Any]) -> transforms.Partition:
    """Tokens as those of q; nothing is split if requests have several."""
    rows = None if ragged else transforms.named_axes(shapes[0])[0]
    operands = (P(rows, None, None), P(rows, None), P(rows, None), P(rows))
    return (*operands, *((P(None),) if ragged else ()), P(None, None, None)), P(rows, None)

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
from tsmla_jax.ops.indexer_logits import blackwell, reference
from tsmla_jax.ops.kernel_call import kernel_call
from tsmla_kernels.catalog import INDEXER_LOGITS, INDEXER_LOGITS_SM100
from tsmla_kernels.contract import Array
from tsmla_kernels.contract.sparse import IndexerLogitsSpec, indexer_logits_spec
from tsmla_kernels.kernel import Kernel, written_for
from tsmla_kernels.sm90.logits.config import logits_config
from tsmla_kernels.sm100 import logits_config as sm100


def kernel() -> Kernel:
    """The kernel of the architecture for which calls are compiled here."""
    return written_for(device.target_arch(), INDEXER_LOGITS, INDEXER_LOGITS_SM100)


def why_not(spec: IndexerLogitsSpec) -> list[str]:
    """The reasons why no kernel can run this call; empty if one can."""
    found = device.why_not(kernel()) + kernel().reasons(spec)
    if kernel() is INDEXER_LOGITS_SM100 and not found:
        found += device.why_not_made(kernel(), sm100.logits_config(spec))
    return found


def notes(spec: IndexerLogitsSpec) -> list[str]:
    """Notes for users about this architecture's kernel."""
    return [sm100.NOTICE] if kernel() is INDEXER_LOGITS_SM100 else []


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
    arch = device.arch_for(kernel())
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
        if arch in INDEXER_LOGITS_SM100.archs:
            offsets = tables[2] if ragged else None
            return blackwell.on_one_device(
                q, weights, k_cache, tables[0], tables[1], offsets, spec=spec, arch=arch, num_sms=num_sms
            )
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

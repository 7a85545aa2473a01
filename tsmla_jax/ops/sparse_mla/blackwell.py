"""sparse_mla on Blackwell: the operands of cuDNN's kernel for a call on one device, made safe for any input.

The kernel takes 64 heads, plain rows of q's dtype, whole blocks of 64 indices, and one scale by value. So heads are
padded and cut into rows of 64. Packed rows are widened first: all of the cache, or only the selected ones if these are
fewer. Indices that name no row become -1. Sinks, the cache's scale and tokens without keys are dealt with behind the
kernel.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tsmla_jax.ops.kernel_call import kernel_call
from tsmla_jax.ops.selected.layouts import gather_rows, valid_slots
from tsmla_jax.ops.sparse_mla.call import Operands, Results
from tsmla_kernels import contract
from tsmla_kernels.catalog import SPARSE_MLA_SM100
from tsmla_kernels.contract.sparse import SparseMLASpec
from tsmla_kernels.sm100 import config as sm100
from tsmla_kernels.sm100 import sparse_config

TRACED = "softmax_scale, q_scale or kv_scale is traced; cuDNN's kernel takes numbers"


def on_one_device(
    operands: Operands, *, spec: SparseMLASpec, static_scales: tuple[float, ...] | None, arch: str
) -> Results:
    """out and lse of a call whose arrays lie on one device; spec describes those.

    static_scales: the factors of the logits and of the cache, as numbers.

    Raises NotImplementedError for a scale that is no number.
    """
    reasons = SPARSE_MLA_SM100.reasons(spec) + ([TRACED] if static_scales is None else [])
    if reasons or static_scales is None:
        raise contract.not_runnable("sparse_mla", "cute", reasons)
    logit_scale, kv_scale = static_scales
    groups = -(-spec.num_heads // sparse_config.HEADS)
    q = jnp.pad(operands.q, ((0, 0), (0, groups * sparse_config.HEADS - spec.num_heads), (0, 0)))
    q = q.reshape(spec.num_tokens * groups, sparse_config.HEADS, spec.head_dim)
    rows, indices = _rows(operands, spec)
    width = -(-spec.num_selected // sparse_config.INDEX_BLOCK) * sparse_config.INDEX_BLOCK
    indices = jnp.pad(indices, ((0, 0), (0, width - spec.num_selected)), constant_values=-1)
    lengths = jnp.full((spec.num_tokens,), spec.num_selected, jnp.int32)
    shape = (q.shape[0], sparse_config.HEADS)
    out, _, lse, *_ = kernel_call(
        SPARSE_MLA_SM100,
        sparse_config.sparse_config(spec),
        (q, rows, jnp.repeat(indices, groups, 0), jnp.repeat(lengths, groups, 0)),
        (
            (*shape, spec.latent_dim),
            shape,
            shape,
            *((size,) for size in sm100.scale_sizes(logit_scale * kv_scale, 1.0)),
        ),
        arch=arch,
    )
    heads = slice(0, spec.num_heads)
    out = out.reshape(spec.num_tokens, -1, spec.latent_dim)[:, heads]
    lse = lse.reshape(spec.num_tokens, -1)[:, heads]
    empty = (indices < 0).all(-1)[:, None]
    lse = jnp.where(empty, -jnp.inf, lse)
    factor = jnp.full((), kv_scale, jnp.float32)
    if operands.sinks is not None:
        factor = factor * jax.nn.sigmoid(jnp.where(empty, 0, lse) - operands.sinks)
    out = (out.astype(jnp.float32) * jnp.broadcast_to(factor, lse.shape)[..., None]).astype(out.dtype)
    return jnp.where(empty[..., None], jnp.zeros((), out.dtype), out), lse


def _rows(operands: Operands, spec: SparseMLASpec) -> tuple[jax.Array, jax.Array]:
    """Plain rows [N, D] of q's dtype, and for each token the indices of its rows among them; -1 for none."""
    (cache,), slots = operands.caches, operands.indices
    valid = valid_slots(slots, spec.cache)
    if operands.lengths is not None:
        valid &= jnp.arange(spec.num_selected) < operands.lengths[:, None]
    if spec.cache.layout == "plain":
        rows = cache.reshape(-1, spec.head_dim)
        return rows, jnp.where(valid, slots, -1)
    if slots.size < spec.cache.num_slots:
        rows = gather_rows(cache, jnp.where(valid, slots, 0).reshape(-1), spec.cache, operands.q.dtype)
        own = jnp.arange(slots.size, dtype=jnp.int32).reshape(slots.shape)
        return rows, jnp.where(valid, own, -1)
    every = jnp.arange(spec.cache.num_slots, dtype=jnp.int32)
    every = jnp.where(valid_slots(every, spec.cache), every, 0)
    return gather_rows(cache, every, spec.cache, operands.q.dtype), jnp.where(valid, slots, -1)

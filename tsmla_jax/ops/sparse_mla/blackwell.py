"""sparse_mla on Blackwell: the operands of cuDNN's kernel for a call on one device, made safe for any input.

The kernel takes 64 heads, plain rows of q's dtype in one array, whole blocks of 64 indices, and one scale by value. So
heads are padded and cut into rows of 64. Rows of 8 bits and those of two caches are gathered first: all of a cache, or
only the selected ones if these are fewer. Indices that name no row become -1. Sinks, the caches' scale and tokens
without keys are dealt with after the kernel.
"""

from __future__ import annotations

import jax

from tsmla_jax.ops.kernel_call import kernel_call
from tsmla_jax.ops.library import LIBRARY
from tsmla_jax.ops.selected.layouts import gather_rows
from tsmla_jax.ops.sparse_mla.call import Operands, Results
from tsmla_kernels import contract
from tsmla_kernels.catalog import SPARSE_MLA_SM100
from tsmla_kernels.contract.layouts import CacheSpec
from tsmla_kernels.contract.sparse import SparseMLASpec
from tsmla_kernels.sm100 import config as sm100
from tsmla_kernels.sm100 import sparse_arrays, sparse_config
from tsmla_kernels.sm100.dense_arrays import Attended


def on_one_device(
    operands: Operands, *, spec: SparseMLASpec, static_scales: tuple[float, ...] | None, arch: str
) -> Results:
    """out and lse of a call whose arrays lie on one device; spec describes those.

    static_scales: the factors of the logits and of the caches, as numbers.

    Raises a NotImplementedError if a scale is not a number.
    """
    reasons = SPARSE_MLA_SM100.reasons(spec) + sparse_config.scale_reasons(spec, static_scales)
    if reasons or static_scales is None:
        raise contract.not_runnable("sparse_mla", "cute", reasons)
    logit_scale, kv_scale, _ = static_scales

    def gather(cache: jax.Array, slots: jax.Array, layout: CacheSpec) -> jax.Array:
        return gather_rows(cache, slots, layout, operands.q.dtype)

    selected = sparse_arrays.selected_rows(LIBRARY, spec, operands.caches, operands.indices, operands.lengths, gather)
    made = sparse_arrays.sparse_operands(LIBRARY, spec, operands.q, selected)
    shape = made.q.shape[:2]
    sizes = ((size,) for size in sm100.scale_sizes(logit_scale * kv_scale, 1.0))
    out, _, lse, *_ = kernel_call(
        SPARSE_MLA_SM100,
        sparse_config.sparse_config(spec),
        made,
        ((*shape, spec.latent_dim), shape, shape, *sizes),
        arch=arch,
    )
    attended = Attended(out, lse)
    found = sparse_arrays.sparse_results(LIBRARY, spec, attended, selected.indices, operands.sinks, kv_scale)
    return found.out, found.lse

"""indexer_logits on Blackwell: the operands of FlashInfer's kernel for a call on one device, made safe for any input.

The kernel takes a row of the block table for each query token and the plan of the work, and writes whole splits of 256
keys. So a request's row is repeated for each of its tokens, entries after a token's last page become page 0, and the
columns that a token does not see get -inf afterwards.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tsmla_jax.ops.kernel_call import kernel_call
from tsmla_jax.ops.library import LIBRARY
from tsmla_jax.ops.ragged import row_owner
from tsmla_kernels import contract
from tsmla_kernels.catalog import INDEXER_LOGITS_SM100
from tsmla_kernels.contract.sparse import IndexerLogitsSpec
from tsmla_kernels.sm100 import logits_config as sm100
from tsmla_kernels.sm100 import sparse_arrays


def on_one_device(
    q: jax.Array,
    weights: jax.Array,
    k_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    cu_seqlens_q: jax.Array | None = None,
    *,
    spec: IndexerLogitsSpec,
    arch: str,
    num_sms: int,
) -> jax.Array:
    """logits [T, M * Z] of a call whose arrays lie on one device; spec describes those.

    Raises NotImplementedError where vmap made the call larger than the kernel can index.
    """
    if reasons := INDEXER_LOGITS_SM100.reasons(spec):
        raise contract.not_runnable("indexer_logits", "cute", reasons)
    keys = spec.max_pages * spec.cache.page_size
    seen = jnp.clip(seq_lens, 0, keys)
    if cu_seqlens_q is not None:
        request, position, owned = row_owner(cu_seqlens_q, spec.num_tokens)
        behind = (cu_seqlens_q[1:] - cu_seqlens_q[:-1])[request] - 1 - position
        seen = jnp.where(owned, jnp.clip(seen[request] - behind, 0, keys), 0)
        block_tables = block_tables[request]
    config = sm100.logits_config(spec, num_sms)
    made = sparse_arrays.logits_operands(LIBRARY, spec, block_tables, seen, config.num_ctas)
    (logits,) = kernel_call(
        INDEXER_LOGITS_SM100,
        config,
        (q, weights, k_cache, made.block_tables, seen, made.schedule),
        ((spec.num_tokens, sm100.padded_columns(spec)),),
        arch=arch,
    )
    visible: jax.Array = sparse_arrays.visible_logits(LIBRARY, logits, seen, keys)
    return visible

"""The table of all operations, and explain: which implementation runs a call, and why the others can't."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tsmla_jax.ops.block_scaled_matmul import api as block_scaled_matmul
from tsmla_jax.ops.compress_kv import api as compress_kv
from tsmla_jax.ops.compress_write_kv_cache import api as compress_write_kv_cache
from tsmla_jax.ops.gather_kv_cache import api as gather_kv_cache
from tsmla_jax.ops.grouped_block_scaled_matmul import api as grouped_block_scaled_matmul
from tsmla_jax.ops.indexer_logits import api as indexer_logits
from tsmla_jax.ops.indexer_loss import api as indexer_loss
from tsmla_jax.ops.indexer_quantize import api as indexer_quantize
from tsmla_jax.ops.indexer_selected_logits import api as indexer_selected_logits
from tsmla_jax.ops.indexer_topk import api as indexer_topk
from tsmla_jax.ops.merge_attention_states import api as merge_attention_states
from tsmla_jax.ops.mla_decode import api as mla_decode
from tsmla_jax.ops.mla_prefill import api as mla_prefill
from tsmla_jax.ops.mla_prefill_kv import api as mla_prefill_kv
from tsmla_jax.ops.operation import Explanation
from tsmla_jax.ops.quantize_blocks import api as quantize_blocks
from tsmla_jax.ops.rope_write_kv_cache import api as rope_write_kv_cache
from tsmla_jax.ops.select_topk import api as select_topk
from tsmla_jax.ops.selection_bits import api as selection_bits
from tsmla_jax.ops.sparse_mla import api as sparse_mla
from tsmla_jax.ops.write_indexer_cache import api as write_indexer_cache
from tsmla_jax.ops.write_kv_cache import api as write_kv_cache
from tsmla_jax.ops.write_packed_kv_cache import api as write_packed_kv_cache

OPERATIONS = {
    api.OPERATION.name: api.OPERATION
    for api in (
        mla_decode,
        mla_prefill,
        mla_prefill_kv,
        write_kv_cache,
        rope_write_kv_cache,
        gather_kv_cache,
        merge_attention_states,
        sparse_mla,
        compress_kv,
        compress_write_kv_cache,
        indexer_logits,
        select_topk,
        selection_bits,
        indexer_topk,
        indexer_selected_logits,
        indexer_loss,
        indexer_quantize,
        write_indexer_cache,
        write_packed_kv_cache,
        block_scaled_matmul,
        grouped_block_scaled_matmul,
        quantize_blocks,
    )
}


def explain(op: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Which implementations can run `op(*args, **kwargs)`, which one would, and why not the others. Runs nothing.

    Args:
      op: an operation's name, or the public function itself.
      *args, **kwargs: its arguments; arrays may be jax.ShapeDtypeStruct. With implementation=... the explanation is of
        that one (chosen is None if it can't run).

    Returns:
      Explanation: op, spec (of tsmla_kernels.contract), chosen, and reasons and notes by implementation; str() gives
      the text.

    Raises:
      TypeError, ValueError: an argument is not legal, as the operation itself says it; or no such operation.
    """
    operation = OPERATIONS.get(op if isinstance(op, str) else getattr(op, "__name__", ""))
    if operation is None:
        raise ValueError(f"op: got {op!r}; legal: {', '.join(OPERATIONS)}")
    return operation.explain(*args, **kwargs)

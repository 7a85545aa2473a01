"""explain: which implementation runs a call, and why the others can't."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from tsmla_jax.ops.dispatch import Explanation, explain_spec

OPERATIONS = (
    "mla_decode",
    "mla_prefill",
    "write_kv_cache",
    "rope_write_kv_cache",
    "gather_kv_cache",
    "merge_attention_states",
    "sparse_mla",
    "compress_kv",
    "indexer_logits",
    "select_topk",
)


def explain(op: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Which implementations can run `op(*args, **kwargs)`, which one would, and why the others can't. Runs nothing.

    Args:
      op: an operation's name, or the public function itself.
      *args, **kwargs: its arguments; arrays may be jax.ShapeDtypeStruct. With implementation=... the explanation is of
        that one (chosen is None if it can't run).

    Returns:
      Explanation: op, spec (of tsmla_kernels.contract), chosen, and reasons by implementation; str() gives the text.

    Raises:
      TypeError, ValueError: an argument is not legal, as the operation itself says it; or no such operation.
    """
    name = getattr(op, "__name__", op)
    if name not in OPERATIONS:
        raise ValueError(f"op: got {op!r}; legal: {', '.join(OPERATIONS)}")
    implementation = kwargs.pop("implementation", None)
    api = importlib.import_module(f"tsmla_jax.ops.{name}.api")
    return explain_spec(name, api.spec(*args, **kwargs), implementation)

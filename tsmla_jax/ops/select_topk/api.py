"""select_topk: the positions of the largest logits of each row, exact."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import jax.numpy as jnp

from tsmla_jax.ops.inputs import describe_call
from tsmla_jax.ops.operation import Implementation, Operation, row_specs
from tsmla_jax.sparse import checks
from tsmla_kernels.contract import sparse as sparse_contract

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32


def select_topk(
    logits: Float[Array, "T N"],
    seq_lens: Int32[Array, " T"],
    k: int,
    *,
    order: str = "value",
    implementation: str | None = None,
) -> Int32[Array, "T k"]:
    """The positions of the k largest of the first seq_lens[t] logits of each row, exact.

    Args:
      logits: [T, N]; columns from seq_lens[t] on are never looked at, whatever they hold.
      seq_lens: [T] int32, 0 to N.
      k: static, at least 1 (2048 in V3.2).
      order: of the positions in a row: "value", the largest logit first, or "position", ascending, which is faster on
        Hopper. Both orders hold the same positions.
      implementation: "cute", "xla", "reference", or None for the best that can run; see `explain`.

    Returns:
      [T, k] int32. Of equal logits (0.0 and -0.0 are equal) the one at the lower position is the larger, and NaN is
      below every number. -1 after the min(k, seq_lens[t]) positions of a row.

    Raises:
      TypeError, ValueError: an argument is not legal; under TSMLA_CHECK=1 also a length outside of 0 to N;
      NotImplementedError: the named implementation can't run this call.
    """
    spec = OPERATION.spec(logits=logits, seq_lens=seq_lens, k=k, order=order)
    chosen = OPERATION.select(spec, implementation)
    logits, seq_lens = jnp.asarray(logits), checks.topk_lens(jnp.asarray(seq_lens), spec.num_columns)
    positions: Array = chosen.call((logits, seq_lens), lambda: row_specs(logits)[0], spec=spec)
    return positions


def _implementations() -> Mapping[str, Implementation]:
    from tsmla_jax.ops.select_topk import cute, reference, xla

    return {
        "cute": Implementation(cute.select_topk, cute.why_not, cute.why_not_by_default),
        "xla": Implementation(xla.select_topk),
        "reference": Implementation(reference.select_topk),
    }


OPERATION = Operation(select_topk, partial(describe_call, sparse_contract.topk_spec), _implementations)

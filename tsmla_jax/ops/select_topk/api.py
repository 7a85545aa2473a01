"""select_topk: the positions of the largest logits of each row, exact."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import jax.numpy as jnp

from tsmla_jax.ops.inputs import describe_call
from tsmla_jax.ops.operation import Implementation, Operation
from tsmla_jax.sparse import checks
from tsmla_kernels.contract import sparse as sparse_contract

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32


def select_topk(
    logits: Float[Array, "T N"], seq_lens: Int32[Array, " T"], k: int, *, implementation: str | None = None
) -> Int32[Array, "T k"]:
    """The positions of the k largest of the first seq_lens[t] logits of each row, exact.

    Args:
      logits: [T, N]; columns from seq_lens[t] on are never looked at, whatever they hold.
      seq_lens: [T] int32, 0 to N.
      k: static, at least 1 (2048 in V3.2).
      implementation: "xla", "reference", or None for the best that can run.

    Returns:
      [T, k] int32: largest first, ties by the lower position (0.0 and -0.0 tie), a NaN below every number; -1 after the
      min(k, seq_lens[t]) positions there are.

    Raises:
      TypeError, ValueError: an argument is not legal; under TSMLA_CHECK=1 also a length outside of 0 to N.
    """
    spec = OPERATION.spec(logits=logits, seq_lens=seq_lens, k=k)
    chosen = OPERATION.select(spec, implementation)
    seq_lens = checks.topk_lens(jnp.asarray(seq_lens), spec.num_columns)
    return chosen.run(jnp.asarray(logits), seq_lens, k=spec.k)


def _implementations() -> Mapping[str, Implementation]:
    from tsmla_jax.ops.select_topk import reference, xla

    return {"xla": Implementation(xla.select_topk), "reference": Implementation(reference.select_topk)}


OPERATION = Operation(select_topk, partial(describe_call, sparse_contract.topk_spec), _implementations)

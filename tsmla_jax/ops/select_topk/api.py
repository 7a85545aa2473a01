"""select_topk: the positions of the largest logits of each row, exact."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from tsmla_jax.ops import dispatch
from tsmla_jax.ops.arrays import describe
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
    described = spec(logits, seq_lens, k)
    run = dispatch.select("select_topk", described, implementation)
    seq_lens = checks.topk_lens(jnp.asarray(seq_lens), described.num_columns)
    return run(jnp.asarray(logits), seq_lens, k=described.k)


def spec(logits: jax.Array, seq_lens: jax.Array, k: int) -> sparse_contract.TopKSpec:
    """The contract's spec of a call of select_topk (arrays or ShapeDtypeStructs); raises as select_topk does."""
    return sparse_contract.topk_spec(logits=describe("logits", logits), seq_lens=describe("seq_lens", seq_lens), k=k)

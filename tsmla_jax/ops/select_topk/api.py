"""select_topk: the positions or slots of the largest logits of each row, exact."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Literal, overload

import jax.numpy as jnp

from tsmla_jax.ops import device
from tsmla_jax.ops.inputs import describe_call
from tsmla_jax.ops.operation import Implementation, Operation, Preference, row_specs
from tsmla_jax.ops.selected import checks
from tsmla_kernels.contract import sparse as sparse_contract

if TYPE_CHECKING:
    from tsmla_jax.array_types import Array, Float, Int32


@overload
def select_topk(
    logits: Float[Array, "T N"],
    seq_lens: Int32[Array, " T"],
    k: int,
    *,
    order: str = ...,
    row_starts: Int32[Array, " T"] | None = ...,
    block_tables: None = ...,
    page_size: None = ...,
    return_bits: Literal[False] = ...,
    implementation: Preference = ...,
) -> Int32[Array, "T k"]: ...


@overload
def select_topk(
    logits: Float[Array, "T N"],
    seq_lens: Int32[Array, " T"],
    k: int,
    *,
    order: str = ...,
    row_starts: Int32[Array, " T"] | None = ...,
    block_tables: None = ...,
    page_size: None = ...,
    return_bits: Literal[True],
    implementation: Preference = ...,
) -> Int32[Array, "T W"]: ...


@overload
def select_topk(
    logits: Float[Array, "T N"],
    seq_lens: Int32[Array, " T"],
    k: int,
    *,
    order: str = ...,
    row_starts: Int32[Array, " T"] | None = ...,
    block_tables: Int32[Array, "T M"],
    page_size: int,
    return_bits: Literal[False] = ...,
    implementation: Preference = ...,
) -> tuple[Int32[Array, "T k"], Int32[Array, " T"]]: ...


def select_topk(
    logits: Float[Array, "T N"],
    seq_lens: Int32[Array, " T"],
    k: int,
    *,
    order: str = "value",
    row_starts: Int32[Array, " T"] | None = None,
    block_tables: Int32[Array, "T M"] | None = None,
    page_size: int | None = None,
    return_bits: bool = False,
    implementation: Preference = None,
) -> Array | tuple[Int32[Array, "T k"], Int32[Array, " T"]]:
    """The positions of the k largest of seq_lens[t] logits of each row, exact; or their slots, or their bits.

    Args:
      logits: [T, N] float16, bfloat16, float32 or float64; columns outside a row's part are never used, whatever they
        hold.
      seq_lens: [T] int32, 0 to N.
      k: static, at least 1 (2048 in V3.2).
      order: the order of a row's positions: "value" (largest logit first) or "position" (ascending), which is faster on
        Hopper. Both select the same positions.
      row_starts: [T] int32, the column where each row begins, for ragged prefill, whose logits are over the keys of all
        requests. Positions count from there. None is column 0 for all.
      block_tables: [T, M] int32, the pages of each row's keys: slots are returned in the place of positions.
      page_size: Z of the block tables, static: position p is slot block_tables[t, p // Z] * Z + p % Z.
      return_bits: static; return the selection as bits, which mla_prefill takes, in the place of positions; not legal
        with block_tables.
      implementation: "cute", "xla", "reference", several of these in order, or None for the best; see `explain`.

    Returns:
      [T, k] int32. Of equal logits (0.0 and -0.0 are equal) the one at the lower position is the larger, and NaN is
      below every number. -1 after the min(k, seq_lens[t]) positions of a row. With block_tables: the slots in the order
      of the positions, -1 for a position past the table; and [T] int32, min(k, seq_lens[t]). With return_bits: [T, W]
      int32 words, W = ceil(N / 128) * 4, the selection_bits of the positions; `order` has no meaning.

    Raises:
      TypeError, ValueError: an argument is not legal; under TSMLA_CHECK=1 also a length outside of 0 to N, or a row
        that ends past N.
      NotImplementedError: the named implementation can't run this call.
    """
    spec, chosen = OPERATION.choose(**locals())
    logits, seq_lens = jnp.asarray(logits), jnp.asarray(seq_lens)
    arrays = [logits]
    if row_starts is None:
        arrays.append(checks.topk_lens(seq_lens, spec.num_columns))
    else:
        row_starts = jnp.asarray(row_starts)
        arrays += [checks.topk_rows(seq_lens, row_starts, spec.num_columns), row_starts]
    if block_tables is not None:
        arrays.append(jnp.asarray(block_tables))
    whole, each = row_specs(logits)
    results: Array | tuple[Array, Array] = chosen.call(
        arrays, lambda: (whole, each) if spec.page_size else whole, spec=spec
    )
    return results


def _implementations() -> Mapping[str, Implementation]:
    from tsmla_jax.ops.select_topk import cute, reference, xla

    return {
        "cute": Implementation(cute.select_topk, cute.why_not, device.why_not_untested),
        "xla": Implementation(xla.select_topk),
        "reference": Implementation(reference.select_topk),
    }


OPERATION = Operation(select_topk, partial(describe_call, sparse_contract.topk_spec), _implementations)

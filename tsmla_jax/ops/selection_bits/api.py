"""selection_bits: words of bits, by which mla_prefill selects keys, from the positions that a top-k chose."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import jax.numpy as jnp

from tsmla_jax.ops import device
from tsmla_jax.ops.inputs import describe_call
from tsmla_jax.ops.operation import Implementation, Operation, Preference, row_specs
from tsmla_kernels.contract import selection

if TYPE_CHECKING:
    from tsmla_jax.array_types import Array, Int32


def selection_bits(
    positions: Int32[Array, "T k"],
    num_keys: int,
    *,
    lengths: Int32[Array, " T"] | None = None,
    starts: Int32[Array, " T"] | None = None,
    implementation: Preference = None,
) -> Int32[Array, "T W"]:
    """The selection of keys as `mla_prefill` and `mla_prefill_kv` take it: a bit for each key.

    Args:
      positions: [T, k] int32, the keys that each token selects, counted from the first key of its request; in any
        order, also several times. Positions outside of a row's keys, -1 among them, select nothing.
      num_keys: static, for how many keys a row must have bits, at least 1. W is 4 * ceil(num_keys / 128), and a row has
        bits for all 32 W keys.
      lengths: [T] int32, how many of a row's positions count; None is all.
      starts: [T] int32, at least 0, the key that a row's first bit stands for, if the words are for a chunk of context.
        None is 0.
      implementation: "cute", "xla", "reference", several of these in order, or None for the best; see `explain`.

    Returns:
      [T, W] int32: bit j of word w of row t is 1 iff the row selects key starts[t] + 32 w + j. A word is 32 bits; its
      sign has no meaning. The words take 4 T W bytes, so a long context is taken in chunks.

    Raises:
      TypeError, ValueError: an argument is not legal; the message names it, what it got and what is legal.
      NotImplementedError: the named implementation can't run this call, with every reason.
    """
    spec, chosen = OPERATION.choose(**locals())
    positions = jnp.asarray(positions)
    others = [jnp.asarray(x) for x in (lengths, starts) if x is not None]
    words: Array = chosen.call((positions, *others), lambda: row_specs(positions)[0], spec=spec)
    return words


def _implementations() -> Mapping[str, Implementation]:
    from tsmla_jax.ops.selection_bits import cute, reference, xla

    return {
        "cute": Implementation(cute.selection_bits, cute.why_not, device.why_not_untested),
        "xla": Implementation(xla.selection_bits),
        "reference": Implementation(reference.selection_bits),
    }


OPERATION = Operation(selection_bits, partial(describe_call, selection.selection_bits_spec), _implementations)

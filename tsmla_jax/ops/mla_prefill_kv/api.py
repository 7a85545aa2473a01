"""mla_prefill_kv: mla_prefill on keys and values as the layer makes them, without copies of them.

The projection kv_b gives each head's keys without their rope columns and its values side by side, and the rope columns
are the same for all heads. The Hopper kernel reads both arrays in place; otherwise k and v are made from them first.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Literal, overload

import jax.numpy as jnp

from tsmla_jax.ops import checks
from tsmla_jax.ops.inputs import Scale, Scales, describe_call
from tsmla_jax.ops.mla_prefill.results import asked_for, attend, results_of_no_keys
from tsmla_jax.ops.mla_prefill.selection import operands
from tsmla_jax.ops.operation import Implementation, Operation, Preference
from tsmla_kernels import contract

if TYPE_CHECKING:
    from tsmla_jax.array_types import Array, Float, Int32


@overload
def mla_prefill_kv(
    q: Float[Array, "Tq H K"],
    kv: Float[Array, "Tk H N+V"],
    k_rope: Float[Array, "Tk R"],
    *,
    cu_seqlens_q: Int32[Array, " B+1"],
    max_q_len: int,
    softmax_scale: Scale,
    cu_seqlens_kv: Int32[Array, " B+1"] | None = None,
    max_kv_len: int | None = None,
    causal: bool = True,
    return_lse: Literal[False] = False,
    deterministic: bool = False,
    selection: Int32[Array, "R W"] | None = None,
    selection_rows: Int32[Array, " Tq"] | None = None,
    sinks: Float[Array, " H"] | None = None,
    return_max_logits: Literal[False] = False,
    implementation: Preference = None,
) -> Float[Array, "Tq H V"]: ...


@overload
def mla_prefill_kv(
    q: Float[Array, "Tq H K"],
    kv: Float[Array, "Tk H N+V"],
    k_rope: Float[Array, "Tk R"],
    *,
    cu_seqlens_q: Int32[Array, " B+1"],
    max_q_len: int,
    softmax_scale: Scale,
    cu_seqlens_kv: Int32[Array, " B+1"] | None = None,
    max_kv_len: int | None = None,
    causal: bool = True,
    return_lse: Literal[True],
    deterministic: bool = False,
    selection: Int32[Array, "R W"] | None = None,
    selection_rows: Int32[Array, " Tq"] | None = None,
    sinks: Float[Array, " H"] | None = None,
    return_max_logits: Literal[False] = False,
    implementation: Preference = None,
) -> tuple[Float[Array, "Tq H V"], Float[Array, "Tq H"]]: ...


@overload
def mla_prefill_kv(
    q: Float[Array, "Tq H K"],
    kv: Float[Array, "Tk H N+V"],
    k_rope: Float[Array, "Tk R"],
    *,
    cu_seqlens_q: Int32[Array, " B+1"],
    max_q_len: int,
    softmax_scale: Scale,
    cu_seqlens_kv: Int32[Array, " B+1"] | None = None,
    max_kv_len: int | None = None,
    causal: bool = True,
    return_lse: Literal[False] = False,
    deterministic: bool = False,
    selection: Int32[Array, "R W"] | None = None,
    selection_rows: Int32[Array, " Tq"] | None = None,
    sinks: Float[Array, " H"] | None = None,
    return_max_logits: Literal[True],
    implementation: Preference = None,
) -> tuple[Float[Array, "Tq H V"], Float[Array, "Tq H"]]: ...


@overload
def mla_prefill_kv(
    q: Float[Array, "Tq H K"],
    kv: Float[Array, "Tk H N+V"],
    k_rope: Float[Array, "Tk R"],
    *,
    cu_seqlens_q: Int32[Array, " B+1"],
    max_q_len: int,
    softmax_scale: Scale,
    cu_seqlens_kv: Int32[Array, " B+1"] | None = None,
    max_kv_len: int | None = None,
    causal: bool = True,
    return_lse: Literal[True],
    deterministic: bool = False,
    selection: Int32[Array, "R W"] | None = None,
    selection_rows: Int32[Array, " Tq"] | None = None,
    sinks: Float[Array, " H"] | None = None,
    return_max_logits: Literal[True],
    implementation: Preference = None,
) -> tuple[Float[Array, "Tq H V"], Float[Array, "Tq H"], Float[Array, "Tq H"]]: ...


def mla_prefill_kv(
    q: Float[Array, "Tq H K"],
    kv: Float[Array, "Tk H N+V"],
    k_rope: Float[Array, "Tk R"],
    *,
    cu_seqlens_q: Int32[Array, " B+1"],
    max_q_len: int,
    softmax_scale: Scale,
    cu_seqlens_kv: Int32[Array, " B+1"] | None = None,
    max_kv_len: int | None = None,
    causal: bool = True,
    return_lse: bool = False,
    deterministic: bool = False,
    selection: Int32[Array, "R W"] | None = None,
    selection_rows: Int32[Array, " Tq"] | None = None,
    sinks: Float[Array, " H"] | None = None,
    return_max_logits: bool = False,
    implementation: Preference = None,
) -> Float[Array, "Tq H V"] | tuple[Array, ...]:
    """mla_prefill with k = [kv[..., :N] | k_rope for every head] and v = kv[..., N:], where N = K - R.

    Where Hopper's kernel reads kv and k_rope in place, neither the slices nor the broadcast are made: in DeepSeek's
    shapes (K 192, R 64, V 128) and 16 bits that saves reading and writing 640 bytes a token and head.

    Args:
      q: [Tq, H, K], rope columns last.
      kv: [Tk, H, N + V], as kv_b gives it: keys without their rope columns, then values. q's dtype.
      k_rope: [Tk, R] with rotation applied, shared by all heads; R may be 0, for keys without rope columns. q's dtype.
      cu_seqlens_q, cu_seqlens_kv, max_q_len, max_kv_len, softmax_scale, causal: as in `mla_prefill`.
      return_lse, deterministic, selection, selection_rows, sinks, return_max_logits, implementation: as in
        `mla_prefill`.

    Returns:
      The results of `mla_prefill`, which have derivatives in reverse mode, too.

    Raises:
      TypeError, ValueError: an argument is not legal; the message names it, what it got and what is legal.
      NotImplementedError: the named implementation can't run this call; the message gives every reason.
    """
    spec, chosen = OPERATION.choose(**locals())
    cu_seqlens_kv = cu_seqlens_q if cu_seqlens_kv is None else cu_seqlens_kv
    q, kv, k_rope, cu_seqlens_q, cu_seqlens_kv = map(jnp.asarray, (q, kv, k_rope, cu_seqlens_q, cu_seqlens_kv))
    cu_seqlens_q = checks.prefill(spec, cu_seqlens_q, cu_seqlens_kv)
    if 0 in (spec.batch, spec.total_q_len, spec.total_kv_len, spec.max_q_len, spec.max_kv_len):
        results = results_of_no_keys(spec, q)
    else:
        selected = operands(spec, selection, selection_rows)
        arrays = (q, kv, k_rope, cu_seqlens_q, cu_seqlens_kv, Scales(softmax_scale), *selected)
        results = attend(spec, chosen, arrays, sinks)
    return asked_for(results, return_lse)


def _implementations() -> Mapping[str, Implementation]:
    from tsmla_jax.ops import device
    from tsmla_jax.ops.mla_prefill import cute as prefill
    from tsmla_jax.ops.mla_prefill_kv import cute, reference, xla

    return {
        "cute": Implementation(cute.mla_prefill_kv, prefill.why_not, device.why_not_untested, prefill.notes),
        "xla": Implementation(xla.mla_prefill_kv),
        "reference": Implementation(reference.mla_prefill_kv),
    }


OPERATION = Operation(mla_prefill_kv, partial(describe_call, contract.prefill_kv_spec), _implementations)

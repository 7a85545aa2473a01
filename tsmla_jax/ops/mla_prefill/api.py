"""mla_prefill: expanded multi-head attention with unequal head dims over packed sequences."""

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
def mla_prefill(
    q: Float[Array, "Tq H K"],
    k: Float[Array, "Tk H K"],
    v: Float[Array, "Tk H V"],
    *,
    cu_seqlens_q: Int32[Array, " B+1"],
    max_q_len: int,
    softmax_scale: Scale,
    cu_seqlens_kv: Int32[Array, " B+1"] | None = None,
    max_kv_len: int | None = None,
    causal: bool = True,
    q_scale: Scale | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    return_lse: Literal[False] = False,
    deterministic: bool = False,
    selection: Int32[Array, "R W"] | None = None,
    selection_rows: Int32[Array, " Tq"] | None = None,
    sinks: Float[Array, " H"] | None = None,
    return_max_logits: Literal[False] = False,
    implementation: Preference = None,
) -> Float[Array, "Tq H V"]: ...


@overload
def mla_prefill(
    q: Float[Array, "Tq H K"],
    k: Float[Array, "Tk H K"],
    v: Float[Array, "Tk H V"],
    *,
    cu_seqlens_q: Int32[Array, " B+1"],
    max_q_len: int,
    softmax_scale: Scale,
    cu_seqlens_kv: Int32[Array, " B+1"] | None = None,
    max_kv_len: int | None = None,
    causal: bool = True,
    q_scale: Scale | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    return_lse: Literal[True],
    deterministic: bool = False,
    selection: Int32[Array, "R W"] | None = None,
    selection_rows: Int32[Array, " Tq"] | None = None,
    sinks: Float[Array, " H"] | None = None,
    return_max_logits: Literal[False] = False,
    implementation: Preference = None,
) -> tuple[Float[Array, "Tq H V"], Float[Array, "Tq H"]]: ...


@overload
def mla_prefill(
    q: Float[Array, "Tq H K"],
    k: Float[Array, "Tk H K"],
    v: Float[Array, "Tk H V"],
    *,
    cu_seqlens_q: Int32[Array, " B+1"],
    max_q_len: int,
    softmax_scale: Scale,
    cu_seqlens_kv: Int32[Array, " B+1"] | None = None,
    max_kv_len: int | None = None,
    causal: bool = True,
    q_scale: Scale | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    return_lse: Literal[False] = False,
    deterministic: bool = False,
    selection: Int32[Array, "R W"] | None = None,
    selection_rows: Int32[Array, " Tq"] | None = None,
    sinks: Float[Array, " H"] | None = None,
    return_max_logits: Literal[True],
    implementation: Preference = None,
) -> tuple[Float[Array, "Tq H V"], Float[Array, "Tq H"]]: ...


@overload
def mla_prefill(
    q: Float[Array, "Tq H K"],
    k: Float[Array, "Tk H K"],
    v: Float[Array, "Tk H V"],
    *,
    cu_seqlens_q: Int32[Array, " B+1"],
    max_q_len: int,
    softmax_scale: Scale,
    cu_seqlens_kv: Int32[Array, " B+1"] | None = None,
    max_kv_len: int | None = None,
    causal: bool = True,
    q_scale: Scale | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    return_lse: Literal[True],
    deterministic: bool = False,
    selection: Int32[Array, "R W"] | None = None,
    selection_rows: Int32[Array, " Tq"] | None = None,
    sinks: Float[Array, " H"] | None = None,
    return_max_logits: Literal[True],
    implementation: Preference = None,
) -> tuple[Float[Array, "Tq H V"], Float[Array, "Tq H"], Float[Array, "Tq H"]]: ...


def mla_prefill(
    q: Float[Array, "Tq H K"],
    k: Float[Array, "Tk H K"],
    v: Float[Array, "Tk H V"],
    *,
    cu_seqlens_q: Int32[Array, " B+1"],
    max_q_len: int,
    softmax_scale: Scale,
    cu_seqlens_kv: Int32[Array, " B+1"] | None = None,
    max_kv_len: int | None = None,
    causal: bool = True,
    q_scale: Scale | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    selection: Int32[Array, "R W"] | None = None,
    selection_rows: Int32[Array, " Tq"] | None = None,
    sinks: Float[Array, " H"] | None = None,
    return_max_logits: bool = False,
    implementation: Preference = None,
) -> Float[Array, "Tq H V"] | tuple[Array, ...]:
    """Attention of packed requests with their own packed keys (expanded MLA: 192 wide keys, 128 wide values).

    The varlen attention of DeepSeek-V2's prefill (arXiv:2405.04434), with the masks of FlashAttention.

    Axes: B requests, Tq / Tk query / key tokens over all requests, H heads, K and V head dims (192 and 128 in DeepSeek;
    any are legal).

    Args:
      q: [Tq, H, K]; float16, bfloat16, float8_e4m3fn, or float32 / float64 (not in the kernels).
      k, v: [Tk, H, K] and [Tk, H, V] in q's dtype.
      cu_seqlens_q, cu_seqlens_kv: [B + 1] int32, row where each request starts, and the end. Lengths of 0 are legal,
        and rows past the end are padding: their outputs are 0 with lse -inf. Without cu_seqlens_kv the keys have the
        queries' offsets and bound, as in self-attention.
      max_q_len, max_kv_len: static bounds on one request's tokens; max_kv_len goes with cu_seqlens_kv.
      softmax_scale: factor of the logits, float or float32 scalar array, may be traced; K^-0.5 times the square of
        yarn's mscale for DeepSeek.
      causal: bottom-right aligned: query i of n sees key j of m iff j <= i + m - n. Without causal a query sees all
        keys of its request.
      q_scale, k_scale, v_scale: the arrays hold values / scale (fp8 usually); None is 1. Float or float32 scalar array.
      return_lse: also return the logsumexp of the scaled logits, without the sink.
      deterministic: the gradients of two equal calls are equal bit by bit. Without it only "cute" adds in an order that
        may differ between calls; with it the backward kernel takes 1 to 8 % longer on an H200, and 40 to 43 % longer
        with K and V of 256.
      selection: [R, W] int32, words of bits that say which keys a query token selects, see `selection_bits`: bit j of
        word w stands for key 32 w + j of the token's request. W is a multiple of 4 with 32 W >= max_kv_len. Of the keys
        that `causal` and the lengths leave a token, it sees only those that it selects; a token that selects none of
        these gives out 0 and lse -inf. The values of keys that no token selects must be finite. None: all keys.
      selection_rows: [Tq] int32, the row of `selection` that has a token's words, or -1 for a token that selects all
        its keys and needs no words. None: token t has row t.
      sinks: [H] of floats, a logit a head that takes weight and has no value: out is multiplied by
        1 / (1 + exp(sink - lse)).
      return_max_logits: also return the greatest scaled logit of each row and head, as QK-clip wants it: its maximum
        over the tokens is the head's greatest logit. "cute" can't return it for fp8. It carries no derivative.
      implementation: "cute", "xla", "reference", several of these in order, or None for the best; see `explain`.

    Returns:
      out [Tq, H, V] in q's dtype, bfloat16 when q is fp8; with return_lse also lse [Tq, H], float32 (float64 for
      float64), natural logarithm; with return_max_logits then max_logits [Tq, H] in lse's dtype. A row that sees no key
      gives out 0, lse -inf and max_logits -inf; max_logits is NaN if lse is. Legal scales, and what unsound offsets do
      without TSMLA_CHECK, are as `mla_decode` says.

    Derivatives: reverse mode in q, k, v, the sinks and the scales, in memory linear in Tq + Tk (from the saved lse, as
    FlashAttention's backward). "cute" has a kernel for the gradient on Hopper, for float16 and bfloat16 with K 192 and
    V 128, or both 256; there a scale's gradient is NaN if the scale is 0. Otherwise its derivative is that of "xla".
    "reference" differentiates in every mode.

    Raises:
      TypeError, ValueError: an argument is not legal; the message names it, what it got and what is legal.
      NotImplementedError: the named implementation can't run this call; the message gives every reason.
    """
    spec, chosen = OPERATION.choose(**locals())
    cu_seqlens_kv = cu_seqlens_q if cu_seqlens_kv is None else cu_seqlens_kv
    q, k, v, cu_seqlens_q, cu_seqlens_kv = map(jnp.asarray, (q, k, v, cu_seqlens_q, cu_seqlens_kv))
    cu_seqlens_q = checks.prefill(spec, cu_seqlens_q, cu_seqlens_kv)
    if 0 in (spec.batch, spec.total_q_len, spec.total_kv_len, spec.max_q_len, spec.max_kv_len):
        results = results_of_no_keys(spec, q)
    else:
        scales = Scales(softmax_scale, q_scale, k_scale, v_scale)
        arrays = (q, k, v, cu_seqlens_q, cu_seqlens_kv, scales, *operands(spec, selection, selection_rows))
        results = attend(spec, chosen, arrays, sinks)
    return asked_for(results, return_lse)


def _implementations() -> Mapping[str, Implementation]:
    from tsmla_jax.ops import device
    from tsmla_jax.ops.mla_prefill import cute, reference, xla

    return {
        "cute": Implementation(cute.mla_prefill, cute.why_not, device.why_not_untested, cute.notes),
        "xla": Implementation(xla.mla_prefill),
        "reference": Implementation(reference.mla_prefill),
    }


OPERATION = Operation(mla_prefill, partial(describe_call, contract.prefill_spec), _implementations)

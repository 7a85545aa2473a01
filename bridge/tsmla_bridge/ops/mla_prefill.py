"""mla_prefill: expanded multi-head attention with unequal head dims over packed sequences, on torch tensors."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, overload

import torch

from tsmla_bridge import reference
from tsmla_bridge.ops import blackwell, prefill_launch, prefill_operators
from tsmla_bridge.ops.prefill_launch import Gradients, PrefillInputs, PrefillOptions, Saved
from tsmla_bridge.ops.prefill_operators import Asked, Form
from tsmla_bridge.runtime import loaded_kernels, tensors
from tsmla_bridge.runtime.results import Results
from tsmla_bridge.runtime.scales import Pair
from tsmla_bridge.runtime.tensors import Scale
from tsmla_kernels import contract
from tsmla_kernels.catalog import MLA_PREFILL
from tsmla_kernels.contract import PrefillSpec
from tsmla_kernels.sm90.prefill import config as sm90_prefill
from tsmla_kernels.sm100.dense_arrays import PrefillArrays


@overload
def mla_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    max_q_len: int,
    softmax_scale: Scale,
    cu_seqlens_kv: torch.Tensor | None = None,
    max_kv_len: int | None = None,
    causal: bool = True,
    q_scale: Scale | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    return_lse: Literal[False] = False,
    deterministic: bool = False,
    selection: torch.Tensor | None = None,
    selection_rows: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    return_max_logits: Literal[False] = False,
    implementation: str | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor: ...


@overload
def mla_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    max_q_len: int,
    softmax_scale: Scale,
    cu_seqlens_kv: torch.Tensor | None = None,
    max_kv_len: int | None = None,
    causal: bool = True,
    q_scale: Scale | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    return_lse: Literal[True],
    deterministic: bool = False,
    selection: torch.Tensor | None = None,
    selection_rows: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    return_max_logits: Literal[False] = False,
    implementation: str | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def mla_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    max_q_len: int,
    softmax_scale: Scale,
    cu_seqlens_kv: torch.Tensor | None = None,
    max_kv_len: int | None = None,
    causal: bool = True,
    q_scale: Scale | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    return_lse: Literal[False] = False,
    deterministic: bool = False,
    selection: torch.Tensor | None = None,
    selection_rows: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    return_max_logits: Literal[True],
    implementation: str | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def mla_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    max_q_len: int,
    softmax_scale: Scale,
    cu_seqlens_kv: torch.Tensor | None = None,
    max_kv_len: int | None = None,
    causal: bool = True,
    q_scale: Scale | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    return_lse: Literal[True],
    deterministic: bool = False,
    selection: torch.Tensor | None = None,
    selection_rows: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    return_max_logits: Literal[True],
    implementation: str | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


def mla_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    max_q_len: int,
    softmax_scale: Scale,
    cu_seqlens_kv: torch.Tensor | None = None,
    max_kv_len: int | None = None,
    causal: bool = True,
    q_scale: Scale | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    selection: torch.Tensor | None = None,
    selection_rows: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    return_max_logits: bool = False,
    implementation: str | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Attention of packed requests with their own packed keys (expanded MLA), as tsmla_jax.mla_prefill defines it.

    Axes: B requests, Tq / Tk query / key tokens over all requests, H heads, K and V head dims (192 and 128 in
    DeepSeek).

    Args:
      q: [Tq, H, K]; float16, bfloat16 or float8_e4m3fn; in torch operations also float32 and float64.
      k, v: [Tk, H, K] and [Tk, H, V] in q's dtype. The kernels want q, k and v contiguous, and raise for other views.
        On Hopper v may also be columns of a wider tensor [Tk, H, W] that begin at a multiple of 16 bytes, with W a
        multiple of 64, as kv[..., 128:] is, unless the call runs as an operator of torch: for a derivative, or under
        torch.compile or a dispatch mode.
      cu_seqlens_q, cu_seqlens_kv: [B + 1] int32, row where each request starts, and the end. Lengths of 0 are legal,
        and rows past the end are padding: their outputs are 0 with lse -inf. Without cu_seqlens_kv the keys have the
        queries' offsets and bound, as in self-attention.
      max_q_len, max_kv_len: bounds on one request's tokens; max_kv_len is given with cu_seqlens_kv and only then.
      softmax_scale: factor of the logits; a number, or a float32 or float64 scalar tensor on q's device.
      causal: bottom-right aligned: query i of n sees key j of m iff j <= i + m - n. Otherwise it sees all of its
        request.
      q_scale, k_scale, v_scale: the tensors hold values / scale; None is 1. Numbers, or float32 or float64 scalar
        tensors.
      return_lse, implementation, out, lse: as in mla_decode.
      deterministic: the gradients of two equal calls are equal bit by bit, as torch.use_deterministic_algorithms(True)
        asks for everywhere. With it the backward kernel takes 1 to 8 % longer on an H200, and 40 to 43 % longer with K
        and V of 256.
      selection: [R, W] int32, words of bits that say which keys a query token selects, see selection_bits: bit j of
        word w stands for key 32 w + j of the token's request. W is a multiple of 4 with 32 W >= max_kv_len. A token
        sees, of the keys that `causal` and the lengths leave it, only those that it selects; one that selects none of
        them gives out 0 and lse -inf. v must be finite, also for keys that no token selects. None: all keys.
      selection_rows: [Tq] int32, the row of `selection` that has a token's words, or -1 for a token that selects all
        its keys and needs no words. None: token t has row t.
      sinks: [H] float16, bfloat16, float32 or float64, a logit a head that takes weight and has no value: out is
        multiplied by 1 / (1 + exp(sink - lse)). lse is without it.
      return_max_logits: also return the greatest scaled logit of each row and head, as QK-clip wants it; the kernels
        can't return it for fp8. It carries no derivative.

    Returns:
      out [Tq, H, V] in q's dtype, bfloat16 when q is fp8; with return_lse also lse [Tq, H], float32 (float64 for
      float64), natural logarithm; with return_max_logits then max_logits [Tq, H] in lse's dtype. A row that sees no key
      gives out 0, lse -inf and max_logits -inf; max_logits is NaN where lse is. Legal scales, and what unsound
      offsets do without TSMLA_CHECK, are as mla_decode says.

    q, k, v and the sinks have gradients, computed from the saved inputs, out and lse: by a kernel on Hopper, in float16
    and bfloat16 with head dims 192 and 128, or both 256; else by torch operations, which make all scores of a request
    at once, or NotImplementedError if "cute" is named. Gradients of gradients, of scales, and of calls with out= or
    lse= raise NotImplementedError, and on a GPU forward mode does; implementation="reference" on plain tensors is
    ordinary torch operations and has them all.

    Addresses (those of k, v and selection, too), streams, threads, CUDA graphs and torch.compile are as mla_decode
    says.

    Raises:
      TypeError, ValueError, NotImplementedError, RuntimeError: as mla_decode says.
    """
    if cu_seqlens_kv is None and isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor):
        contract.check_self_attention("k", k, q)
    cu_seqlens_kv, max_kv_len = contract.keys_or_queries(cu_seqlens_q, max_q_len, cu_seqlens_kv, max_kv_len)
    inputs = PrefillInputs(
        q, k, v, cu_seqlens_q, cu_seqlens_kv, selection=selection, selection_rows=selection_rows, sinks=sinks
    )  # fmt: skip
    options = PrefillOptions(
        max_q_len=max_q_len, max_kv_len=max_kv_len, causal=causal, deterministic=deterministic,
        max_logits=return_max_logits, implementation=implementation,
    )  # fmt: skip
    given = {"softmax_scale": softmax_scale, "q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    return prefill_operators.call(FORM, inputs, options, given, Asked(return_lse, out, lse))


def _spec(inputs: PrefillInputs, options: PrefillOptions, given_scales: Mapping[str, Any]) -> PrefillSpec:
    return tensors.describe_call(
        contract.prefill_spec,
        **inputs._asdict(),
        **given_scales,
        max_q_len=options.max_q_len,
        max_kv_len=options.max_kv_len,
        causal=options.causal,
        deterministic=options.deterministic,
        return_max_logits=options.max_logits,
    )


def run(
    spec: PrefillSpec,
    inputs: PrefillInputs,
    pair: Pair,
    implementation: str | None,
    return_lse: bool,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    max_logits: torch.Tensor | None = None,
    *,
    wide_v: bool = False,
) -> Results:
    """out and lse of a checked call, in the caller's memory where it is given.

    max_logits: where the greatest logits go, if the spec has them.
    wide_v: whether v may be columns of a wider tensor.
    """
    device, read = inputs.q.device, inputs._asdict()
    layout = prefill_launch.result_layout(spec, inputs.q)
    by_definition = loaded_kernels.is_by_definition(implementation, device)
    if not by_definition:
        if reasons := why_not(spec, device):
            raise contract.not_runnable("mla_prefill", "cute", reasons)
        loaded_kernels.check_named("mla_prefill", implementation, device)
    prefill_launch.check_values(spec, inputs)
    if prefill_launch.sees_no_key(spec):
        if max_logits is not None:
            max_logits.fill_(-torch.inf)
        return layout.hand_over(layout.without_keys(), return_lse, out, lse, read)
    if by_definition:
        *results, greatest = reference.mla_prefill(
            spec, *inputs[:5], *pair, selection=inputs.selection, selection_rows=inputs.selection_rows,
            sinks=inputs.sinks,
        )  # fmt: skip
        if max_logits is not None:
            max_logits.copy_(greatest)
        return layout.hand_over((results[0], results[1]), return_lse, out, lse, read)
    if prefill_launch.is_blackwell(device):
        given = PrefillArrays(*inputs[:5])
        for name, tensor in given._asdict().items():
            tensors.check_dense(name, tensor)
        return layout.hand_over(blackwell.mla_prefill(spec, given, pair), return_lse, out, lse, read)
    out, lse = layout.take(return_lse, out, lse, read)
    wide = wide_v and not inputs.v.is_contiguous()
    prefill_launch.launch(spec, inputs, pair, out, lse, max_logits=max_logits, wide_v=wide)
    return out, lse


def why_not(spec: PrefillSpec, device: torch.device) -> list[str]:
    """Why no kernel can run this call; empty if one can."""
    return prefill_launch.reasons(spec, device)


def warm(spec: PrefillSpec, index: int, *, wide_v: bool = False) -> None:
    """Load the kernel that serves `spec` on device `index`, with wide_v for a v in a wider tensor."""
    loaded_kernels.launcher(MLA_PREFILL, sm90_prefill.prefill_config(spec, wide_v=wide_v), index)


def gradients(inputs: PrefillInputs, pair: Pair, options: PrefillOptions, saved: Saved) -> Gradients:
    """The gradients of q, k, v and the sinks: by the kernel if it can run and the reference isn't named, else by torch
    operations. NotImplementedError if the kernel is named and can't run."""
    options = options.of_gradient()
    spec = _spec(inputs, options, {"softmax_scale": 1.0})
    saved, device = saved.checked(spec, inputs.q), inputs.q.device
    if prefill_launch.sees_no_key(spec):
        found = prefill_launch.new_gradients(inputs)
        for gradient in found:
            if gradient is not None:
                gradient.zero_()
        return found
    if not loaded_kernels.is_by_definition(options.implementation, device):
        reasons = prefill_launch.backward_reasons(spec, device)
        if not reasons:
            return prefill_launch.launch_backward(spec, inputs, pair, saved)
        if options.implementation == "cute":
            raise contract.not_runnable("the gradient of mla_prefill", "cute", reasons)
    out, lse, dout, dlse = saved
    dlse = torch.zeros_like(lse) if dlse is None else dlse
    computed = reference.mla_prefill_backward(
        spec, out, lse, dout, dlse, *inputs[:5], *pair, selection=inputs.selection,
        selection_rows=inputs.selection_rows, sinks=inputs.sinks,
    )  # fmt: skip
    return Gradients(*computed)


def _value_width(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int:
    return v.shape[-1]


FORM = Form("mla_prefill", PrefillInputs, _spec, run, gradients, _value_width, run_eagerly=partial(run, wide_v=True))
OPERATORS = prefill_operators.register(FORM)

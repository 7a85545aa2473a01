"""mla_prefill_kv: mla_prefill on keys and values as the layer makes them, on torch tensors.

The Hopper kernels read kv and k_rope where they lie, in the dtypes and widths that they take so. In all other calls k
and v are made first and go to mla_prefill; the gradients of kv and k_rope are then put together from those of k and v.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, overload

import torch

from tsmla_bridge.ops import mla_prefill, prefill_launch, prefill_operators
from tsmla_bridge.ops.prefill_launch import Gradients, KvInputs, PrefillInputs, PrefillOptions, Saved
from tsmla_bridge.ops.prefill_operators import Asked, Form
from tsmla_bridge.runtime import loaded_kernels, tensors
from tsmla_bridge.runtime.results import Results
from tsmla_bridge.runtime.scales import Pair
from tsmla_bridge.runtime.tensors import Scale
from tsmla_kernels import contract
from tsmla_kernels.contract import PrefillSpec
from tsmla_kernels.sm90.prefill import config as sm90_prefill
from tsmla_kernels.sm90.prefill.record import SHARED_ROPE_DIM


@overload
def mla_prefill_kv(
    q: torch.Tensor,
    kv: torch.Tensor,
    k_rope: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    max_q_len: int,
    softmax_scale: Scale,
    cu_seqlens_kv: torch.Tensor | None = None,
    max_kv_len: int | None = None,
    causal: bool = True,
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
def mla_prefill_kv(
    q: torch.Tensor,
    kv: torch.Tensor,
    k_rope: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    max_q_len: int,
    softmax_scale: Scale,
    cu_seqlens_kv: torch.Tensor | None = None,
    max_kv_len: int | None = None,
    causal: bool = True,
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
def mla_prefill_kv(
    q: torch.Tensor,
    kv: torch.Tensor,
    k_rope: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    max_q_len: int,
    softmax_scale: Scale,
    cu_seqlens_kv: torch.Tensor | None = None,
    max_kv_len: int | None = None,
    causal: bool = True,
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
def mla_prefill_kv(
    q: torch.Tensor,
    kv: torch.Tensor,
    k_rope: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    max_q_len: int,
    softmax_scale: Scale,
    cu_seqlens_kv: torch.Tensor | None = None,
    max_kv_len: int | None = None,
    causal: bool = True,
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


def mla_prefill_kv(
    q: torch.Tensor,
    kv: torch.Tensor,
    k_rope: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    max_q_len: int,
    softmax_scale: Scale,
    cu_seqlens_kv: torch.Tensor | None = None,
    max_kv_len: int | None = None,
    causal: bool = True,
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
    """mla_prefill with k = [kv[..., :N] | k_rope for every head] and v = kv[..., N:], where N = K - R.

    Where Hopper's kernels read kv and k_rope in place, neither the slices nor the broadcast are made: in the forward
    pass in float16 and bfloat16 if R is a multiple of 64, in the gradient if R is 64.

    Args:
      q: [Tq, H, K], rope columns last.
      kv: [Tk, H, N + V], as kv_b gives it: keys without their rope columns, then values. q's dtype.
      k_rope: [Tk, R] with rotation applied, shared by all heads; R may be 0, for keys without rope columns. q's dtype.
        The kernels want q, kv and k_rope contiguous.
      cu_seqlens_q, cu_seqlens_kv, max_q_len, max_kv_len, softmax_scale, causal: as in mla_prefill.
      return_lse, deterministic, selection, selection_rows, sinks, return_max_logits, implementation, out, lse: as in
        mla_prefill.

    Returns:
      The results of `mla_prefill`. q, kv, k_rope (summed over the heads) and the sinks have gradients: by the kernel
      where mla_prefill's gradient is a kernel. Derivatives that mla_prefill refuses are refused here.

    Raises:
      TypeError, ValueError, NotImplementedError, RuntimeError: as mla_decode says.
    """
    if cu_seqlens_kv is None and isinstance(q, torch.Tensor) and isinstance(kv, torch.Tensor):
        contract.check_self_attention("kv", kv, q)
    cu_seqlens_kv, max_kv_len = contract.keys_or_queries(cu_seqlens_q, max_q_len, cu_seqlens_kv, max_kv_len)
    inputs = KvInputs(
        q, kv, k_rope, cu_seqlens_q, cu_seqlens_kv, selection=selection, selection_rows=selection_rows, sinks=sinks
    )  # fmt: skip
    options = PrefillOptions(
        max_q_len=max_q_len, max_kv_len=max_kv_len, causal=causal, deterministic=deterministic,
        max_logits=return_max_logits, implementation=implementation,
    )  # fmt: skip
    given = {"softmax_scale": softmax_scale}
    return prefill_operators.call(FORM, inputs, options, given, Asked(return_lse, out, lse))


def _spec(inputs: KvInputs, options: PrefillOptions, given_scales: Mapping[str, Any]) -> PrefillSpec:
    return tensors.describe_call(
        contract.prefill_kv_spec,
        **inputs._asdict(),
        **given_scales,
        max_q_len=options.max_q_len,
        max_kv_len=options.max_kv_len,
        causal=options.causal,
        deterministic=options.deterministic,
        return_max_logits=options.max_logits,
    )


def _value_width(q: torch.Tensor, kv: torch.Tensor, k_rope: torch.Tensor) -> int:
    return kv.shape[-1] - (q.shape[-1] - k_rope.shape[-1])


def _expanded(inputs: KvInputs) -> PrefillInputs:
    """This call as one of mla_prefill, on k and v."""
    q, kv, k_rope, cu_seqlens_q, cu_seqlens_kv, *selected = inputs
    nope = q.shape[-1] - k_rope.shape[-1]
    rope = k_rope[:, None].expand(-1, kv.shape[1], -1)
    # v is made dense, too: mla_prefill.run takes columns of a wider tensor only with wide_v.
    k, v = torch.cat((kv[..., :nope], rope), -1), kv[..., nope:].contiguous()
    return PrefillInputs(q, k, v, cu_seqlens_q, cu_seqlens_kv, *selected)


def _reads_in_place(spec: PrefillSpec, inputs: KvInputs, implementation: str | None) -> bool:
    """Whether the Hopper kernel reads kv and k_rope as they are. NotImplementedError if the call needs a kernel and
    none can run it."""
    if loaded_kernels.is_by_definition(implementation, inputs.q.device):
        return False
    if reasons := prefill_launch.reasons(spec, inputs.q.device):
        raise contract.not_runnable("mla_prefill_kv", "cute", reasons)
    loaded_kernels.check_named("mla_prefill_kv", implementation, inputs.q.device)
    on_hopper = not prefill_launch.is_blackwell(inputs.q.device)
    return on_hopper and not sm90_prefill.shared_rope_reasons(spec, inputs.k_rope.shape[1])


def _run(
    spec: PrefillSpec,
    inputs: KvInputs,
    pair: Pair,
    implementation: str | None,
    return_lse: bool,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    max_logits: torch.Tensor | None = None,
) -> Results:
    layout = prefill_launch.result_layout(spec, inputs.q)
    if not _reads_in_place(spec, inputs, implementation) or prefill_launch.sees_no_key(spec):
        # mla_prefill gets copies of kv and k_rope, so it could not see that out or lse lies in them: checked here.
        if not (out is None and lse is None):
            layout.take(return_lse, out, lse, inputs._asdict())
        return mla_prefill.run(spec, _expanded(inputs), pair, implementation, return_lse, out, lse, max_logits)
    prefill_launch.check_values(spec, inputs)
    out, lse = layout.take(return_lse, out, lse, inputs._asdict())
    prefill_launch.launch(spec, inputs, pair, out, lse, inputs.k_rope.shape[1], max_logits=max_logits)
    return out, lse


def _gradients(inputs: KvInputs, pair: Pair, options: PrefillOptions, saved: Saved) -> Gradients:
    """The gradients of q, kv, k_rope and the sinks."""
    spec = _spec(inputs, options.of_gradient(), {"softmax_scale": 1.0})
    in_place = _reads_in_place(spec, inputs, options.implementation) and inputs.k_rope.shape[1] == SHARED_ROPE_DIM
    if in_place and not (prefill_launch.sees_no_key(spec) or prefill_launch.backward_reasons(spec, inputs.q.device)):
        return prefill_launch.launch_backward(spec, inputs, pair, saved.checked(spec, inputs.q), SHARED_ROPE_DIM)
    dq, dk, dv, d_sinks = mla_prefill.gradients(_expanded(inputs), pair, options, saved)
    nope = dk.shape[-1] - inputs.k_rope.shape[-1]
    accumulated = tensors.accumulation_dtype(spec.q_dtype)
    d_rope = dk[..., nope:].to(accumulated).sum(1).to(dk.dtype)
    return Gradients(dq, torch.cat((dk[..., :nope], dv), -1), d_rope, d_sinks)


FORM = Form("mla_prefill_kv", KvInputs, _spec, _run, _gradients, _value_width)
OPERATORS = prefill_operators.register(FORM)

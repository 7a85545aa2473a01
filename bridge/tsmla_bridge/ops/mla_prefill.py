"""mla_prefill: expanded multi-head attention with unequal head dims over packed sequences, on torch tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tsmla_bridge import operators, reference
from tsmla_bridge.runtime import data_checks, devices, loaded_kernels, scales, tensors
from tsmla_bridge.runtime.results import Computed, ResultLayout, Results
from tsmla_bridge.runtime.scales import Pair
from tsmla_bridge.runtime.tensors import Scale
from tsmla_bridge.runtime.workspace import Layout
from tsmla_kernels import contract
from tsmla_kernels.catalog import MLA_PREFILL
from tsmla_kernels.contract import PrefillSpec, values
from tsmla_kernels.launch import ArrayView
from tsmla_kernels.sm90.prefill import config as sm90_prefill


def mla_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    max_q_len: int,
    max_kv_len: int,
    softmax_scale: Scale,
    causal: bool = True,
    q_scale: Scale | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of packed requests with their own packed keys (expanded MLA), as tsmla_jax.mla_prefill defines it.

    Axes: B requests, Tq / Tk query / key tokens over all requests, H heads, K and V head dims (192 and 128 in
    DeepSeek).

    Args:
      q: [Tq, H, K]; float16, bfloat16 or float8_e4m3fn; on a CPU also float32 and float64.
      k, v: [Tk, H, K] and [Tk, H, V] in q's dtype. All three without gaps on a GPU: a half of a wider tensor raises.
      cu_seqlens_q, cu_seqlens_kv: [B + 1] int32, row where each request starts, and the end. Lengths of 0 are legal,
        and rows past the end are padding: their outputs are 0 with lse -inf.
      max_q_len, max_kv_len: bounds on one request's tokens.
      softmax_scale: factor of the logits, float or float32 scalar tensor on q's device.
      causal: bottom-right aligned: query i of n sees key j of m iff j <= i + m - n. Otherwise it sees all of its
        request.
      q_scale, k_scale, v_scale: the tensors hold values / scale; None is 1. Float or float32 scalar tensor.
      return_lse, implementation, out, lse: as mla_decode's.

    Returns:
      out [Tq, H, V] in q's dtype, bfloat16 when q is fp8; with return_lse also lse [Tq, H], float32, natural logarithm.
      A row that sees no key gives out 0 and lse -inf.

    Streams, threads, CUDA graphs, torch.compile, derivatives and what it raises are as mla_decode says.
    """
    inputs = PrefillInputs(q, k, v, cu_seqlens_q, cu_seqlens_kv)
    options = PrefillOptions(max_q_len, max_kv_len, causal, implementation)
    if torch.compiler.is_compiling() or operators.is_traced(q, k, v):
        pair = scales.product(softmax_scale, q_scale, k_scale, v_scale)
        return operators.call_attention(
            torch.ops.tsmla.mla_prefill,
            torch.ops.tsmla.mla_prefill_into,
            (*inputs, *operators.pair_arguments(pair), *options),
            lambda: operators.new_results(q, v.shape[-1]),
            return_lse,
            out,
            lse,
        )
    given = {"softmax_scale": softmax_scale, "q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    spec = _spec(inputs, options, given)
    pair = scales.product(softmax_scale, q_scale, k_scale, v_scale)
    result, result_lse = _run(spec, inputs, pair, options.implementation, return_lse, out, lse)
    return result if result_lse is None else (result, result_lse)


class PrefillInputs(NamedTuple):
    """The tensors of a call, in the order of the kernel's operands."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_kv: torch.Tensor


class PrefillOptions(NamedTuple):
    """The static arguments of a call."""

    max_q_len: int
    max_kv_len: int
    causal: bool
    implementation: str | None


def _spec(inputs: PrefillInputs, options: PrefillOptions, given_scales: dict[str, Any]) -> PrefillSpec:
    return tensors.describe_call(
        contract.prefill_spec,
        inputs._asdict(),
        scales=given_scales,
        max_q_len=options.max_q_len,
        max_kv_len=options.max_kv_len,
        causal=options.causal,
    )


def _run(
    spec: PrefillSpec,
    inputs: PrefillInputs,
    pair: Pair,
    implementation: str | None,
    return_lse: bool,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> Results:
    device = inputs.q.device
    layout = ResultLayout.of(inputs.q, spec.v_head_dim, spec.out_dtype, spec.lse_dtype)
    by_definition = loaded_kernels.is_by_definition(implementation, device)
    if not by_definition and (reasons := why_not(spec, device)):
        raise contract.not_runnable("mla_prefill", "cute", reasons)
    data_checks.check(values.prefill, spec, inputs.cu_seqlens_q, inputs.cu_seqlens_kv)
    if 0 in (spec.batch, spec.total_q_len, spec.total_kv_len, spec.max_q_len, spec.max_kv_len):
        return layout.hand_over(layout.without_keys(), return_lse, out, lse)
    if by_definition:
        return layout.hand_over(reference.mla_prefill(spec, *inputs, *pair), return_lse, out, lse)
    out, lse = layout.take(return_lse, out, lse)
    _launch(spec, inputs, pair, out, lse)
    return out, lse


# ---- the kernel


def why_not(spec: PrefillSpec, device: torch.device) -> list[str]:
    """Why the kernel can't run this call; empty if it can."""
    return loaded_kernels.reasons(MLA_PREFILL, device) + sm90_prefill.prefill_reasons(spec)


def warm(spec: PrefillSpec, index: int) -> None:
    """Load the kernel that serves `spec` on device `index`."""
    loaded_kernels.launcher(MLA_PREFILL, sm90_prefill.prefill_config(spec), index)


def _launch(spec: PrefillSpec, inputs: PrefillInputs, pair: Pair, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    for name, tensor in inputs._asdict().items():
        tensors.check_dense(name, tensor)
    index = inputs.q.get_device()
    shapes = dict(sm90_prefill.prefill_workspaces(spec.batch, devices.num_sms(index)))
    rows = tuple(inputs.q.shape[:2])
    memory = Layout({**shapes, "lse": (rows, "float32")})
    with devices.made_current(index):
        stream = devices.current_stream(index)
        scratch = torch.empty(memory.size, dtype=torch.uint8, device=inputs.q.device)
        base = scratch.data_ptr()
        workspaces = {
            name: ArrayView(base + memory.offsets[name], shape, dtype) for name, (shape, dtype) in shapes.items()
        }
        no_lse = ArrayView(base + memory.offsets["lse"], rows, "float32")
        pair_on_device = scales.on_device(pair, index, stream)
        arrays = {
            **{name: loaded_kernels.view(tensor) for name, tensor in inputs._asdict().items()},
            "scales": loaded_kernels.view(pair_on_device),
            "out": loaded_kernels.view(out),
            "lse": no_lse if lse is None else loaded_kernels.view(lse),
            **workspaces,
        }
        loaded_kernels.run(MLA_PREFILL, sm90_prefill.prefill_config(spec), index, stream, arrays)


# ---- the operators


def _run_operator(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    pair_tensor: torch.Tensor | None,
    logit_scale: float,
    out_scale: float,
    *options: Any,
    return_lse: bool = True,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> Results:
    inputs, named = PrefillInputs(q, k, v, cu_seqlens_q, cu_seqlens_kv), PrefillOptions(*options)
    pair = (logit_scale, out_scale) if pair_tensor is None else pair_tensor
    spec = _spec(inputs, named, {"softmax_scale": 1.0})
    return _run(spec, inputs, pair, named.implementation, return_lse, out, lse)


def _run_operator_into(*arguments: Any) -> None:
    *given, out, lse = arguments
    _run_operator(*given, return_lse=lse is not None, out=out, lse=lse)


_PARAMETERS = (
    f"Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_kv, {operators.PAIR_SCHEMA},"
    " SymInt max_q_len, SymInt max_kv_len, bool causal, str? implementation"
)
prefill_operator = operators.register("mla_prefill", _run_operator, f"({_PARAMETERS}) -> (Tensor, Tensor)")
prefill_into_operator = operators.register(
    "mla_prefill_into",
    _run_operator_into,
    f"({_PARAMETERS}, Tensor(a!) out, Tensor(b!)? lse) -> ()",
    writes=("out", "lse"),
)
operators.refuse_backward(prefill_operator, "mla_prefill", "use implementation='reference' on plain tensors")


@prefill_operator.register_fake
def _(q: Any, k: Any, v: Any, *arguments: Any) -> Computed:
    return operators.new_results(q, v.shape[-1])

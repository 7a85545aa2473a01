"""mla_prefill: expanded multi-head attention with unequal head dims over packed sequences, on torch tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from tsmla_bridge import operators, reference
from tsmla_bridge.runtime import data_checks, devices, loaded_kernels, scales, tensors
from tsmla_bridge.runtime.results import Computed, ResultLayout, Results
from tsmla_bridge.runtime.scales import Pair
from tsmla_bridge.runtime.tensors import Scale
from tsmla_bridge.runtime.workspace import Layout
from tsmla_kernels import contract
from tsmla_kernels.catalog import MLA_PREFILL, MLA_PREFILL_BACKWARD
from tsmla_kernels.contract import PrefillSpec, values
from tsmla_kernels.kernel import Config, Kernel
from tsmla_kernels.launch import ArrayView
from tsmla_kernels.sm90.prefill import backward_config as sm90_backward
from tsmla_kernels.sm90.prefill import config as sm90_prefill

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Those of q, k and v."""

TensorOrShape = torch.Tensor | tuple[tuple[int, ...], str]
"""An operand, or shape and dtype of one that lives until the kernel has run."""


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
    deterministic: bool = False,
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
      deterministic: the gradients of two equal calls are equal bit by bit, as torch.use_deterministic_algorithms(True)
        asks for everywhere. With it the backward kernel takes 0 to 9 % longer on an H200.

    Returns:
      out [Tq, H, V] in q's dtype, bfloat16 when q is fp8; with return_lse also lse [Tq, H], float32, natural logarithm.
      A row that sees no key gives out 0 and lse -inf.

    q, k and v have gradients, computed from the saved inputs, out and lse: by a kernel on Hopper, in float16 and
    bfloat16 with head dims 192 and 128; else by torch operations, which make all scores of a request at once. Gradients
    of gradients, of scales, and of calls with out= or lse= raise NotImplementedError; implementation="reference" on
    plain tensors is ordinary torch operations and has them all.

    Streams, threads, CUDA graphs, torch.compile and what it raises are as mla_decode says.
    """
    inputs = PrefillInputs(q, k, v, cu_seqlens_q, cu_seqlens_kv)
    options = PrefillOptions(max_q_len, max_kv_len, causal, deterministic, implementation)
    given = {"softmax_scale": softmax_scale, "q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    traced = torch.compiler.is_compiling() or operators.is_traced(q, k, v, derivatives=False)
    spec = None if traced else _spec(inputs, options, given)
    derived = torch.is_grad_enabled() and _derivative_asked_for(q, k, v, *given.values())
    by_operator = spec is None or (derived and implementation != "reference")
    if by_operator and derived:
        _check_derivable(given, {"out": out, "lse": lse})
    pair = scales.product(softmax_scale, q_scale, k_scale, v_scale)
    if spec is not None and not by_operator:
        result, result_lse = _run(spec, inputs, pair, implementation, return_lse, out, lse)
        return result if result_lse is None else (result, result_lse)
    return operators.call_attention(
        torch.ops.tsmla.mla_prefill,
        torch.ops.tsmla.mla_prefill_into,
        (*inputs, *operators.pair_arguments(pair), *options),
        lambda: operators.new_results(q, v.shape[-1]),
        return_lse,
        out,
        lse,
    )


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
    deterministic: bool
    implementation: str | None


def _derivative_asked_for(*given: Any) -> bool:
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in given)


def _check_derivable(given_scales: Mapping[str, Any], memory: Mapping[str, torch.Tensor | None]) -> None:
    """Raise unless the operator can give the derivative of a call with these scales, into this memory."""
    for name, scale in given_scales.items():
        if _derivative_asked_for(scale):
            raise NotImplementedError(
                f"{name}: got a tensor that requires a derivative; legal: a number, or a tensor that requires none"
                f" ({name}.detach()). implementation='reference' on plain tensors has a derivative in {name}"
            )
    for name, tensor in memory.items():
        if tensor is not None:
            raise NotImplementedError(
                f"{name}: got a tensor; results that have a derivative go to new memory alone (torch.no_grad() gives"
                " results without one)"
            )


def _spec(inputs: PrefillInputs, options: PrefillOptions, given_scales: dict[str, Any]) -> PrefillSpec:
    return tensors.describe_call(
        contract.prefill_spec,
        inputs._asdict(),
        scales=given_scales,
        max_q_len=options.max_q_len,
        max_kv_len=options.max_kv_len,
        causal=options.causal,
        deterministic=options.deterministic,
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
    if _sees_no_key(spec):
        return layout.hand_over(layout.without_keys(), return_lse, out, lse)
    if by_definition:
        return layout.hand_over(reference.mla_prefill(spec, *inputs, *pair), return_lse, out, lse)
    out, lse = layout.take(return_lse, out, lse)
    _launch(spec, inputs, pair, out, lse)
    return out, lse


def _sees_no_key(spec: PrefillSpec) -> bool:
    """Whether the sizes alone say that no query sees a key."""
    return 0 in (spec.batch, spec.total_q_len, spec.total_kv_len, spec.max_q_len, spec.max_kv_len)


# ---- the kernel


def why_not(spec: PrefillSpec, device: torch.device) -> list[str]:
    """Why the kernel can't run this call; empty if it can."""
    return loaded_kernels.reasons(MLA_PREFILL, device) + sm90_prefill.prefill_reasons(spec)


def warm(spec: PrefillSpec, index: int) -> None:
    """Load the kernel that serves `spec` on device `index`."""
    loaded_kernels.launcher(MLA_PREFILL, sm90_prefill.prefill_config(spec), index)


def _launch(spec: PrefillSpec, inputs: PrefillInputs, pair: Pair, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    rows = tuple(inputs.q.shape[:2])
    workspaces = sm90_prefill.prefill_workspaces(spec.batch, devices.num_sms(inputs.q.get_device()))
    others = {"out": out, "lse": (rows, "float32") if lse is None else lse, **workspaces}
    _run_kernel(MLA_PREFILL, sm90_prefill.prefill_config(spec), inputs, pair, others)


def _run_kernel(
    kernel: Kernel,
    config: Config,
    inputs: PrefillInputs,
    pair: Pair,
    others: Mapping[str, TensorOrShape],
) -> None:
    """Launch a kernel whose operands are the inputs, the scales and the others, in this order."""
    for name, tensor in inputs._asdict().items():
        tensors.check_dense(name, tensor)
    index = inputs.q.get_device()
    memory = Layout({name: other for name, other in others.items() if isinstance(other, tuple)})
    with devices.made_current(index):
        stream = devices.current_stream(index)
        scratch = torch.empty(memory.size, dtype=torch.uint8, device=inputs.q.device)
        base = scratch.data_ptr()
        pair_on_device = scales.on_device(pair, index, stream)
        arrays = {name: loaded_kernels.view(tensor) for name, tensor in inputs._asdict().items()}
        arrays["scales"] = loaded_kernels.view(pair_on_device)
        for name, other in others.items():
            if isinstance(other, tuple):
                arrays[name] = ArrayView(base + memory.offsets[name], *other)
            else:
                arrays[name] = loaded_kernels.view(other)
        loaded_kernels.run(kernel, config, index, stream, arrays)


# ---- the derivative


def _run_backward(
    dout: torch.Tensor, dlse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, *arguments: Any
) -> Gradients:
    """The gradients, from the results' cotangents, the results and the arguments of the operator mla_prefill."""
    inputs, pair, options = _unpacked(*arguments)
    deterministic = options.deterministic or torch.are_deterministic_algorithms_enabled()
    spec = _spec(inputs, options._replace(deterministic=deterministic), {"softmax_scale": 1.0})
    layout = ResultLayout.of(inputs.q, spec.v_head_dim, spec.out_dtype, spec.lse_dtype)
    dout, dlse = dout.contiguous(), dlse.contiguous()
    given = {"out": out, "lse": lse, "dout": dout, "dlse": dlse}
    for name in ("out", "dout"):
        tensors.check_output(name, given[name], layout.shape, layout.dtype, layout.device)
    for name in ("lse", "dlse"):
        tensors.check_output(name, given[name], layout.rows, layout.lse_dtype, layout.device)
    if _sees_no_key(spec):
        dq, dk, dv = _new_gradients(inputs)
        return dq.zero_(), dk.zero_(), dv.zero_()
    if not loaded_kernels.is_by_definition(options.implementation, layout.device):
        reasons = loaded_kernels.reasons(MLA_PREFILL_BACKWARD, layout.device) + sm90_backward.backward_reasons(spec)
        if not reasons:
            return _launch_backward(spec, inputs, pair, given)
        if options.implementation == "cute":
            raise contract.not_runnable("the gradient of mla_prefill", "cute", reasons)
    return reference.mla_prefill_backward(spec, out, lse, dout, dlse, *inputs, *pair)


def _launch_backward(
    spec: PrefillSpec, inputs: PrefillInputs, pair: Pair, given: Mapping[str, torch.Tensor]
) -> Gradients:
    config, num_sms = sm90_backward.backward_config(spec), devices.num_sms(inputs.q.get_device())
    workspaces = sm90_backward.backward_workspaces(
        config, spec.batch, spec.total_q_len, spec.total_kv_len, spec.num_heads, num_sms
    )
    dq, dk, dv = _new_gradients(inputs)
    others: dict[str, TensorOrShape] = {**given, "dq": dq, "dk": dk, "dv": dv, **workspaces}
    _run_kernel(MLA_PREFILL_BACKWARD, config, inputs, pair, others)
    return dq, dk, dv


def _new_gradients(inputs: PrefillInputs) -> Gradients:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (inputs.q, inputs.k, inputs.v))
    return dq, dk, dv


# ---- the operators


def _unpacked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    pair_tensor: torch.Tensor | None,
    logit_scale: float,
    out_scale: float,
    *options: Any,
) -> tuple[PrefillInputs, Pair, PrefillOptions]:
    """The arguments of an operator as the functions above take them."""
    pair = (logit_scale, out_scale) if pair_tensor is None else pair_tensor
    return PrefillInputs(q, k, v, cu_seqlens_q, cu_seqlens_kv), pair, PrefillOptions(*options)


def _run_operator(
    *arguments: Any, return_lse: bool = True, out: torch.Tensor | None = None, lse: torch.Tensor | None = None
) -> Results:
    inputs, pair, options = _unpacked(*arguments)
    spec = _spec(inputs, options, {"softmax_scale": 1.0})
    return _run(spec, inputs, pair, options.implementation, return_lse, out, lse)


def _run_operator_into(*arguments: Any) -> None:
    *given, out, lse = arguments
    _run_operator(*given, return_lse=lse is not None, out=out, lse=lse)


_PARAMETERS = (
    f"Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_kv, {operators.PAIR_SCHEMA},"
    " SymInt max_q_len, SymInt max_kv_len, bool causal, bool deterministic, str? implementation"
)
prefill_operator = operators.register("mla_prefill", _run_operator, f"({_PARAMETERS}) -> (Tensor, Tensor)")
prefill_into_operator = operators.register(
    "mla_prefill_into",
    _run_operator_into,
    f"({_PARAMETERS}, Tensor(a!) out, Tensor(b!)? lse) -> ()",
    writes=("out", "lse"),
)
backward_operator = operators.register(
    "mla_prefill_backward",
    _run_backward,
    f"(Tensor dout, Tensor dlse, Tensor out, Tensor lse, {_PARAMETERS}) -> (Tensor, Tensor, Tensor)",
)
operators.refuse_backward(
    backward_operator, "the gradient of mla_prefill", "use implementation='reference' on plain tensors"
)


@prefill_operator.register_fake
def _(q: Any, k: Any, v: Any, *arguments: Any) -> Computed:
    return operators.new_results(q, v.shape[-1])


@backward_operator.register_fake
def _(dout: Any, dlse: Any, out: Any, lse: Any, *arguments: Any) -> Gradients:
    inputs, *_ = _unpacked(*arguments)
    return _new_gradients(inputs)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Computed) -> None:
    tensors_given = len(PrefillInputs._fields) + 1  # and the scales
    ctx.save_for_backward(*output, *inputs[:tensors_given])
    ctx.numbers = inputs[tensors_given:]


def _differentiate(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    gradients = torch.ops.tsmla.mla_prefill_backward(dout, dlse, *ctx.saved_tensors, *ctx.numbers)
    return *gradients, *(None for _ in ctx.needs_input_grad[len(gradients) :])


prefill_operator.register_autograd(_differentiate, setup_context=_save)

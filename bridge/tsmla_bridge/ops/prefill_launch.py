"""Common parts of mla_prefill and mla_prefill_kv on torch tensors: arguments, and the launches of kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from tsmla_bridge.runtime import data_checks, devices, loaded_kernels, scales, tensors
from tsmla_bridge.runtime.results import ResultLayout
from tsmla_bridge.runtime.scales import Pair
from tsmla_bridge.runtime.workspace import Layout
from tsmla_kernels.catalog import MLA_PREFILL, MLA_PREFILL_BACKWARD, MLA_PREFILL_SM100
from tsmla_kernels.contract import PrefillSpec, values
from tsmla_kernels.kernel import Config, Kernel
from tsmla_kernels.launch import ArrayView
from tsmla_kernels.sm90.prefill import config as sm90_prefill
from tsmla_kernels.sm90.prefill.backward import config as sm90_backward
from tsmla_kernels.sm100 import config as sm100


class Gradients(NamedTuple):
    """The gradients of q, k and v, or of q, kv and k_rope, and of the sinks if there are any."""

    first: torch.Tensor
    second: torch.Tensor
    third: torch.Tensor
    sinks: torch.Tensor | None = None


TensorOrShape = torch.Tensor | tuple[tuple[int, ...], str]
"""An operand, or the shape and dtype of a workspace that lives until the kernel has run."""


class PrefillInputs(NamedTuple):
    """The tensors of a call of mla_prefill; those of a selection and the sinks may be missing."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_kv: torch.Tensor
    selection: torch.Tensor | None = None
    selection_rows: torch.Tensor | None = None
    sinks: torch.Tensor | None = None


class KvInputs(NamedTuple):
    """The tensors of a call of mla_prefill_kv; those of a selection and the sinks may be missing."""

    q: torch.Tensor
    kv: torch.Tensor
    k_rope: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_kv: torch.Tensor
    selection: torch.Tensor | None = None
    selection_rows: torch.Tensor | None = None
    sinks: torch.Tensor | None = None


Inputs = PrefillInputs | KvInputs


class PrefillOptions(NamedTuple):
    """The static arguments of a call."""

    max_q_len: int
    max_kv_len: int
    causal: bool
    deterministic: bool
    max_logits: bool
    implementation: str | None

    def of_gradient(self) -> PrefillOptions:
        """The options of the call's gradient: deterministic also if torch asks for that everywhere."""
        return self._replace(deterministic=self.deterministic or torch.are_deterministic_algorithms_enabled())


OPTIONS_SCHEMA = (
    "SymInt max_q_len, SymInt max_kv_len, bool causal, bool deterministic, bool return_max_logits, str? implementation"
)
"""The parameters of an operator's schema that carry PrefillOptions."""


class Saved(NamedTuple):
    """The results of a call and their cotangents, in the order of the backward kernel's operands.

    dlse: None if nothing depends on lse.
    """

    out: torch.Tensor
    lse: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None

    def dense(self) -> Saved:
        """These tensors, with a dlse of zeros if there is none."""
        return self if self.dlse is not None else self._replace(dlse=torch.zeros_like(self.lse))

    def checked(self, spec: PrefillSpec, q: torch.Tensor) -> Saved:
        """These tensors, with dense cotangents. ValueError / TypeError unless all have the results' shapes, dtypes and
        device, and out and lse are dense."""
        layout = result_layout(spec, q)
        dlse = None if self.dlse is None else self.dlse.contiguous()
        saved = self._replace(dout=self.dout.contiguous(), dlse=dlse)
        for name, tensor in (("out", saved.out), ("dout", saved.dout)):
            tensors.check_output(name, tensor, layout.shape, layout.dtype, layout.device)
        for name in ("lse", "dlse"):
            if (tensor := getattr(saved, name)) is not None:
                tensors.check_output(name, tensor, layout.rows, layout.lse_dtype, layout.device)
        return saved


def result_layout(spec: PrefillSpec, q: torch.Tensor) -> ResultLayout:
    """Shapes and dtypes of the results of a call."""
    return ResultLayout.of(q, spec.v_head_dim, spec.out_dtype, spec.lse_dtype)


def check_values(spec: PrefillSpec, inputs: Inputs) -> None:
    """TSMLA_CHECK's checks of the offsets and of the selection's rows."""
    data_checks.check(values.prefill, spec, inputs.cu_seqlens_q, inputs.cu_seqlens_kv)
    if inputs.selection is not None and inputs.selection_rows is not None:
        data_checks.check(values.prefill_selection, len(inputs.selection), inputs.selection_rows)


def sees_no_key(spec: PrefillSpec) -> bool:
    """Whether the sizes alone say that no query sees a key."""
    return 0 in (spec.batch, spec.total_q_len, spec.total_kv_len, spec.max_q_len, spec.max_kv_len)


def derivative_asked_for(*given: Any) -> bool:
    """Whether one of these is a tensor that requires a derivative."""
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in given)


def check_derivable(given_scales: Mapping[str, Any], memory: Mapping[str, torch.Tensor | None]) -> None:
    """NotImplementedError unless the operator can give the derivative of a call with these scales, whose results go to
    this memory."""
    for name, scale in given_scales.items():
        if derivative_asked_for(scale):
            raise NotImplementedError(
                f"{name}: got a tensor that requires a derivative; legal: a number, or a tensor that requires none"
                f" ({name}.detach()). implementation='reference' on plain tensors has a derivative in {name}"
            )
    for name, tensor in memory.items():
        if tensor is not None:
            raise NotImplementedError(
                f"{name}: got a tensor; results that have a derivative go only to new memory (torch.no_grad() gives"
                " results without one)"
            )


def reasons(spec: PrefillSpec, device: torch.device) -> list[str]:
    """Why no kernel can run this call; empty if one can."""
    kernel = _kernel_for(device)
    found = loaded_kernels.reasons(kernel, device) + kernel.reasons(spec)
    if kernel is MLA_PREFILL_SM100 and not found:
        found = loaded_kernels.why_not_made(kernel, sm100.prefill_config(spec), device)
    return found


def is_blackwell(device: torch.device) -> bool:
    """Whether TokenSpeed's kernel is the one for the device."""
    return _kernel_for(device) is MLA_PREFILL_SM100


def _kernel_for(device: torch.device) -> Kernel:
    return loaded_kernels.kernel_for(device, MLA_PREFILL, MLA_PREFILL_SM100)


def backward_reasons(spec: PrefillSpec, device: torch.device) -> list[str]:
    """Why the kernel of the gradient can't run; empty if it can."""
    return loaded_kernels.reasons(MLA_PREFILL_BACKWARD, device) + MLA_PREFILL_BACKWARD.reasons(spec)


def launch(
    spec: PrefillSpec,
    inputs: Inputs,
    pair: Pair,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    rope_dim: int = 0,
    *,
    max_logits: torch.Tensor | None = None,
    wide_v: bool = False,
) -> None:
    """Write the results of a call.

    rope_dim: the field of PrefillConfig, 0 for the inputs of mla_prefill.
    max_logits: the memory for the greatest logits, if the spec has them.
    wide_v: whether v is columns of a wider tensor.
    """
    rows = tuple(inputs.q.shape[:2])
    workspaces = sm90_prefill.prefill_workspaces(spec.batch, devices.num_sms(inputs.q.get_device()))
    greatest = {} if max_logits is None else {"max_logits": max_logits}
    others = {"out": out, "lse": (rows, "float32") if lse is None else lse, **greatest, **workspaces}
    shapes = {"v": tensors.wide_shape("v", inputs[2])} if wide_v else {}
    config = sm90_prefill.prefill_config(spec, rope_dim, wide_v=wide_v)
    _run_kernel(MLA_PREFILL, config, inputs, pair, others, shapes)


def launch_backward(spec: PrefillSpec, inputs: Inputs, pair: Pair, saved: Saved, rope_dim: int = 0) -> Gradients:
    """The gradients of a call, by the kernel.

    rope_dim: the field of BackwardConfig, 0 for the inputs of mla_prefill.
    """
    gradients = new_gradients(inputs)
    config, num_sms = sm90_backward.backward_config(spec, rope_dim), devices.num_sms(inputs.q.get_device())
    workspaces = sm90_backward.backward_workspaces(
        config, spec.batch, spec.total_q_len, spec.total_kv_len, spec.num_heads, num_sms
    )
    named = {f"d{name}": gradient for name, gradient in zip(inputs._fields, gradients[:3], strict=False)}
    if inputs.sinks is not None:
        named["dsinks"] = torch.empty_like(inputs.sinks, dtype=torch.float32, memory_format=torch.contiguous_format)
    _run_kernel(MLA_PREFILL_BACKWARD, config, inputs, pair, {**saved.dense()._asdict(), **named, **workspaces})
    return gradients if inputs.sinks is None else gradients._replace(sinks=named["dsinks"].to(inputs.sinks.dtype))


def new_gradients(inputs: Inputs) -> Gradients:
    """New tensors for the gradients of the first three inputs and of the sinks."""
    first, second, third = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[:3])
    return Gradients(first, second, third, None if inputs.sinks is None else torch.empty_like(inputs.sinks))


def _run_kernel(
    kernel: Kernel,
    config: Config,
    inputs: Inputs,
    pair: Pair,
    others: Mapping[str, TensorOrShape],
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> None:
    """Launch a kernel whose operands are the inputs, the scales and the others. `shapes`: for inputs that are columns
    of a wider tensor, the shape of that tensor, which is passed for them."""
    shapes = shapes or {}
    given = {name: tensor for name, tensor in inputs._asdict().items() if tensor is not None}
    if inputs.sinks is not None:
        given["sinks"] = inputs.sinks.float().contiguous()
    for name, tensor in given.items():
        if name not in shapes:
            tensors.check_dense(name, tensor)
    if inputs.selection is not None and inputs.selection_rows is None:
        given["selection_rows"] = torch.arange(len(inputs.q), dtype=torch.int32, device=inputs.q.device)
    index = inputs.q.get_device()
    memory = Layout({name: other for name, other in others.items() if isinstance(other, tuple)})
    with devices.made_current(index):
        stream = devices.current_stream(index)
        scratch = torch.empty(memory.size, dtype=torch.uint8, device=inputs.q.device)
        base = scratch.data_ptr()
        pair_on_device = scales.on_device(pair, index, stream)
        arrays = {name: loaded_kernels.view(tensor, shapes.get(name)) for name, tensor in given.items()}
        arrays["scales"] = loaded_kernels.view(pair_on_device)
        for name, other in others.items():
            if isinstance(other, tuple):
                arrays[name] = ArrayView(base + memory.offsets[name], *other)
            else:
                arrays[name] = loaded_kernels.view(other)
        loaded_kernels.run(kernel, config, index, stream, arrays)

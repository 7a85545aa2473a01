"""mla_prefill: expanded multi-head attention with unequal head dims over packed sequences, on torch tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tsmla_bridge import checks, devices, kernels, ops, reference, scales, tensors
from tsmla_bridge.results import Places, Results
from tsmla_bridge.scales import Pair
from tsmla_bridge.tensors import Scale
from tsmla_bridge.workspace import Layout
from tsmla_kernels import contract
from tsmla_kernels.catalog import KERNELS
from tsmla_kernels.contract import PrefillSpec
from tsmla_kernels.contract import values as data_checks
from tsmla_kernels.launch import ArrayView


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
    """Attention of packed requests with their own packed keys (expanded MLA: 192 wide keys, 128 wide values).

    The varlen attention of DeepSeek-V2's prefill (arXiv:2405.04434), with the masks of FlashAttention.

    Axes: B requests, Tq / Tk query / key tokens over all requests, H heads, K and V head dims (192 and 128 in
    DeepSeek).

    Args:
      q: [Tq, H, K]; float16 or bfloat16 on a GPU, float8_e4m3fn, float32 and float64 too on a CPU.
      k, v: [Tk, H, K] and [Tk, H, V] in q's dtype. All three without gaps on a GPU: a half of a wider tensor raises.
      cu_seqlens_q, cu_seqlens_kv: [B + 1] int32, row where each request starts, and the end. Lengths of 0 are legal,
        and rows past the end are padding: their outputs are 0 with lse -inf.
      max_q_len, max_kv_len: bounds on one request's tokens.
      softmax_scale: factor of the logits, float or float32 scalar tensor on q's device; K^-0.5 times the square of
        yarn's mscale for DeepSeek.
      causal: bottom-right aligned: query i of n sees key j of m iff j <= i + m - n. Otherwise it sees all of its
        request.
      q_scale, k_scale, v_scale: the tensors hold values / scale (fp8 usually); None is 1. Float or float32 scalar
        tensor.
      return_lse: also return the logsumexp of the scaled logits.
      implementation: "cute" (the kernels), "reference" (the definition in torch operations), or None: the kernels for
        GPU tensors, the reference for CPU tensors.
      out, lse: where the results go, contiguous and of their shapes and dtypes; lse only with return_lse.

    Returns:
      out [Tq, H, V] in q's dtype, bfloat16 when q is fp8; with return_lse also lse [Tq, H], float32, natural logarithm.
      A row that sees no key gives out 0 and lse -inf.

    Streams, threads, CUDA graphs, torch.compile and derivatives are as mla_decode says.

    Raises:
      TypeError, ValueError: an argument is not legal; the message names it, what it got and what is legal.
      NotImplementedError: the implementation can't run this call, with every reason.
      RuntimeError: CUDA refused a launch, or a kernel would have to be loaded during a capture.
    """
    options = (max_q_len, max_kv_len, causal, implementation)
    if torch.compiler.is_compiling() or ops.is_traced(q, k, v):
        pair = scales.product(softmax_scale, q_scale, k_scale, v_scale)
        return ops.call_prefill(q, k, v, (cu_seqlens_q, cu_seqlens_kv), pair, options, return_lse, out, lse)
    given = {"softmax_scale": softmax_scale, "q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    inputs = Inputs(q, k, v, cu_seqlens_q, cu_seqlens_kv)
    spec = _spec(inputs, options, given)
    pair = scales.product(softmax_scale, q_scale, k_scale, v_scale)
    found, found_lse = _run(spec, inputs, pair, implementation, return_lse, out, lse)
    return found if found_lse is None else (found, found_lse)


class Inputs(NamedTuple):
    """The tensors of a call, in the order of the kernel's operands."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_kv: torch.Tensor


Options = tuple[int, int, bool, str | None]
"""max_q_len, max_kv_len, causal, implementation."""


def run(
    inputs: Inputs, pair: Pair, options: Options, return_lse: bool, out: torch.Tensor | None, lse: torch.Tensor | None
) -> Results:
    """An eager call of mla_prefill whose scales are multiplied already."""
    spec = _spec(inputs, options, {"softmax_scale": 1.0})
    return _run(spec, inputs, pair, options[3], return_lse, out, lse)


def _spec(inputs: Inputs, options: Options, given_scales: dict[str, Any]) -> PrefillSpec:
    max_q_len, max_kv_len, causal, implementation = options
    described: dict[str, Any] = {name: tensors.describe(name, tensor) for name, tensor in inputs._asdict().items()}
    spec = contract.prefill_spec(
        **described,
        max_q_len=max_q_len,
        max_kv_len=max_kv_len,
        causal=causal,
        **{name: tensors.describe_scale(name, scale) for name, scale in given_scales.items()},
    )
    tensors.same_device("q", inputs.q, {**inputs._asdict(), **given_scales})
    kernels.check_implementation(implementation)
    return spec


def _run(
    spec: PrefillSpec,
    inputs: Inputs,
    pair: Pair,
    implementation: str | None,
    return_lse: bool,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> Results:
    device = inputs.q.device
    places = Places.of(inputs.q, spec.v_head_dim, spec.out_dtype, spec.lse_dtype)
    by_definition = implementation == "reference" or (implementation is None and devices.kind(device) == "cpu")
    if not by_definition and (reasons := why_not(spec, device)):
        raise contract.not_runnable("mla_prefill", "cute", reasons)
    checks.values(data_checks.prefill, spec, inputs.cu_seqlens_q, inputs.cu_seqlens_kv)
    if 0 in (spec.batch, spec.total_q_len, spec.total_kv_len, spec.max_q_len, spec.max_kv_len):
        return places.nothing(return_lse, out, lse)
    if by_definition:
        return places.hand_over(reference.mla_prefill(spec, *inputs, *pair), return_lse, out, lse)
    out, lse = places.take(return_lse, out, lse)
    _launch(spec, inputs, pair, out, lse)
    return out, lse


# ---- the kernel


def why_not(spec: PrefillSpec, device: torch.device) -> list[str]:
    """Why no kernel can run this call; empty if one can."""
    kernel, choose = _kernel()
    if kernel is None:
        return [kernels.NO_KERNEL]
    return kernels.reasons(kernel, device) + choose.prefill_reasons(spec)


def warm(spec: PrefillSpec, index: int) -> None:
    """Load the kernel that serves `spec` on device `index`."""
    kernel, sm90_prefill = _kernel()
    kernels.launcher("mla_prefill", kernel, sm90_prefill.prefill_config(spec), index)


def _kernel() -> tuple[Any, Any]:
    """The catalog's kernel and the module that chooses its configuration; (None, None) without them."""
    if (kernel := KERNELS.get("mla_prefill")) is None:
        return None, None
    from tsmla_kernels.sm90.prefill import config as sm90_prefill

    return kernel, sm90_prefill


def _launch(spec: PrefillSpec, inputs: Inputs, pair: Pair, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    for name, tensor in inputs._asdict().items():
        tensors.check_dense(name, tensor)
    index = inputs.q.get_device()
    kernel, choose = _kernel()
    shapes = dict(choose.prefill_workspaces(spec.batch, devices.num_sms(index)))
    rows = tuple(inputs.q.shape[:2])
    layout = Layout({**shapes, "lse": (rows, "float32")})
    with devices.made_current(index):
        stream = devices.current_stream(index)
        scratch = torch.empty(layout.size, dtype=torch.uint8, device=inputs.q.device)
        base = scratch.data_ptr()
        arrays = {name: kernels.view(tensor) for name, tensor in inputs._asdict().items()}
        scales_there = scales.on_device(pair, index, stream)
        arrays["scales"] = kernels.view(scales_there)
        arrays["out"] = kernels.view(out)
        arrays["lse"] = ArrayView(base + layout.offsets["lse"], rows, "float32") if lse is None else kernels.view(lse)
        for name, (shape, dtype) in shapes.items():
            arrays[name] = ArrayView(base + layout.offsets[name], shape, dtype)
        kernels.run("mla_prefill", kernel, choose.prefill_config(spec), index, stream, arrays)

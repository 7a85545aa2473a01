"""The gradient of sparse_mla on torch tensors: by Hopper's kernel, or by torch operations on a CPU and where the
reference is named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from tsmla_bridge import operators, sparse_reference
from tsmla_bridge.ops import prefill_launch
from tsmla_bridge.ops.sparse_inputs import SparseInputs
from tsmla_bridge.ops.sparse_plans import SparseOptions, describe
from tsmla_bridge.runtime import devices, loaded_kernels, scales, tensors
from tsmla_bridge.runtime.results import ResultLayout
from tsmla_bridge.runtime.scales import Factors
from tsmla_bridge.runtime.workspace import Layout
from tsmla_kernels import contract
from tsmla_kernels.catalog import SPARSE_MLA_BACKWARD
from tsmla_kernels.contract.sparse import SparseMLASpec, check_sparse_gradient
from tsmla_kernels.launch import ArrayView
from tsmla_kernels.sm90.sparse_backward import config as sm90_backward


class Saved(NamedTuple):
    """The results of a call and their cotangents."""

    out: torch.Tensor
    lse: torch.Tensor
    d_out: torch.Tensor
    d_lse: torch.Tensor

    def checked(self, spec: SparseMLASpec, q: torch.Tensor) -> Saved:
        """These tensors, made dense. ValueError / TypeError unless all have the results' shapes, dtypes and device."""
        layout = ResultLayout.of(q, spec.latent_dim, spec.out_dtype, spec.lse_dtype)
        saved = Saved(*(tensor.contiguous() for tensor in self))
        for name, tensor in (("out", saved.out), ("d_out", saved.d_out)):
            tensors.check_output(name, tensor, layout.shape, layout.dtype, layout.device)
        for name, tensor in (("lse", saved.lse), ("d_lse", saved.d_lse)):
            tensors.check_output(name, tensor, layout.rows, layout.lse_dtype, layout.device)
        return saved


class Gradients(NamedTuple):
    """The gradients of a call's tensors; None for those that the call does not have."""

    q: torch.Tensor
    kv_cache: torch.Tensor
    compressed_kv_cache: torch.Tensor | None
    sinks: torch.Tensor | None


def new_gradients(inputs: SparseInputs) -> Gradients:
    """New dense tensors for the gradients."""
    given = (inputs.q, inputs.kv_cache, inputs.compressed_kv_cache, inputs.sinks)
    made = (None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in given)
    return Gradients(*made)  # type: ignore[arg-type]


def check_derivable(
    inputs: SparseInputs, options: SparseOptions, given_scales: Mapping[str, Any], memory: Mapping[str, Any]
) -> None:
    """NotImplementedError unless the operator can give the derivative of a call with these scales, whose results go to
    this memory. torch.compile can't trace the description of a call: under it `gradients` raises the errors about the
    call's tensors."""
    for name in ("kv_scale", "compressed_kv_scale"):
        if given_scales[name] is not None:
            raise contract.not_differentiable(
                "sparse_mla", f"{name}: got a scale; a gradient needs None; use implementation='reference'"
            )
    if not torch.compiler.is_compiling():
        operators.refuse_transformed("sparse_mla")
        check_sparse_gradient(describe(inputs, options))
    prefill_launch.check_derivable(given_scales, memory)


def gradients(inputs: SparseInputs, options: SparseOptions, factors: Factors, saved: Saved) -> Gradients:
    """The gradients of q, the caches and the sinks. The kernel's gradients are deterministic if the call or torch asks
    for that; the gradients of torch operations are if torch does. NotImplementedError if the call has no gradient, or
    if the device or the implementation asks for the kernel and it can't run."""
    deterministic = options.deterministic or torch.are_deterministic_algorithms_enabled()
    spec = describe(inputs, options._replace(deterministic=deterministic))
    check_sparse_gradient(spec)
    saved, device = saved.checked(spec, inputs.q), inputs.q.device
    if 0 in (spec.num_tokens, spec.num_selected):
        return Gradients(*(None if x is None else x.zero_() for x in new_gradients(inputs)))  # type: ignore[arg-type]
    if loaded_kernels.is_by_definition(options.implementation, device):
        return Gradients(*sparse_reference.sparse_mla_backward(spec, *saved, *inputs, factors))  # type: ignore[arg-type]
    if reasons := loaded_kernels.reasons(SPARSE_MLA_BACKWARD, device) + SPARSE_MLA_BACKWARD.reasons(spec):
        raise contract.not_runnable("the gradient of sparse_mla", "cute", reasons)
    return launch(spec, inputs, factors, saved)


def launch(spec: SparseMLASpec, inputs: SparseInputs, factors: Factors, saved: Saved) -> Gradients:
    """The gradients by the kernel, on torch's current stream."""
    found = new_gradients(inputs)
    sinks = None if inputs.sinks is None else inputs.sinks.float()
    inputs = inputs._replace(sinks=sinks)
    for name, tensor in inputs._asdict().items():
        if tensor is not None:
            tensors.check_dense(name, tensor)
    config = sm90_backward.sparse_backward_config(
        spec, lengths=inputs.lengths is not None, sinks=inputs.sinks is not None
    )
    slots = sum(cache.num_slots for cache in spec.caches)
    workspaces = sm90_backward.backward_workspaces(config, spec.num_tokens, spec.num_heads, spec.num_selected, slots)
    q = inputs.q
    sink_terms = None if sinks is None else torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    index, memory = q.get_device(), Layout(workspaces)
    with devices.made_current(index):
        stream = devices.current_stream(index)
        scratch = torch.empty(memory.size, dtype=torch.uint8, device=q.device)
        operands = {
            "q": q,
            **{name: getattr(inputs, name) for name in ("kv_cache", "compressed_kv_cache", "indices", "lengths")},
            "sinks": sinks,
            "scales": scales.on_device(factors, index, stream),
            **saved._asdict(),
            "d_q": found.q,
            "d_kv_cache": found.kv_cache,
            "d_compressed_kv_cache": found.compressed_kv_cache,
            "sink_terms": sink_terms,
        }
        arrays = {name: loaded_kernels.view(tensor) for name, tensor in operands.items() if tensor is not None}
        for name, (shape, dtype) in workspaces.items():
            arrays[name] = ArrayView(scratch.data_ptr() + memory.offsets[name], shape, dtype)
        loaded_kernels.run(SPARSE_MLA_BACKWARD, config, index, stream, arrays)
    if sink_terms is None or found.sinks is None:
        return found
    return found._replace(sinks=sink_terms.sum(0).to(found.sinks.dtype))

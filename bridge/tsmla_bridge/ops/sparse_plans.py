"""Plans of sparse_mla: which kernel runs a call and where its workspaces lie. plans.py keeps them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from tsmla_bridge import sparse_reference
from tsmla_bridge.ops import blackwell, plans
from tsmla_bridge.ops.sparse_inputs import CACHES, Pages, PairInputs, SparseInputs
from tsmla_bridge.runtime import data_checks, devices, loaded_kernels, scales, tensors
from tsmla_bridge.runtime.results import Results
from tsmla_bridge.runtime.scales import Factors
from tsmla_bridge.runtime.workspace import Workspace, sparse_layout
from tsmla_kernels import contract
from tsmla_kernels.catalog import SPARSE_MLA, SPARSE_MLA_SM100
from tsmla_kernels.contract import sparse as sparse_contract
from tsmla_kernels.contract import values
from tsmla_kernels.contract.sparse import SparseMLASpec
from tsmla_kernels.kernel import ITEMSIZE
from tsmla_kernels.sm90.sparse.config import NUM_SCALES, SparseConfig
from tsmla_kernels.sm90.sparse.record import Serving, serving, workspaces_of
from tsmla_kernels.sm100 import sparse_config


class SparseOptions(NamedTuple):
    """The arguments of a call that are part of its plan beside the tensors' shapes."""

    latent_dim: int
    window: int | None
    page_size: int | None
    page_span: int | None
    compressed_page_size: int | None
    compressed_page_span: int | None
    batch_invariant: bool
    form: str
    tokens_per_request: int | None
    deterministic: bool
    max_logits: bool
    implementation: str | None


def check_dense(inputs: SparseInputs) -> None:
    """ValueError unless all tensors but the caches are dense."""
    for name, tensor in inputs._asdict().items():
        if tensor is not None and name not in CACHES:
            tensors.check_dense(name, tensor)


def describe(inputs: SparseInputs, options: SparseOptions) -> SparseMLASpec:
    """The spec of a call. Raises the ValueError and TypeError of sparse_mla, but checks no scales and asks for no
    kernel."""
    static = options._asdict()
    del static["implementation"]
    static["return_max_logits"] = static.pop("max_logits")
    spec: SparseMLASpec = tensors.describe_call(
        sparse_contract.sparse_mla_spec,
        **inputs._asdict(),  # scales are no part of a plan; the caller checks them
        **static,
    )
    return spec


def make_plan(inputs: SparseInputs, options: SparseOptions) -> Plan:
    """The plan of a call. Raises as sparse_mla does, but looks at no scales."""
    spec = describe(inputs, options)
    device, implementation = inputs.q.device, options.implementation
    by_definition = loaded_kernels.is_by_definition(implementation, device)
    kernel = loaded_kernels.kernel_for(device, SPARSE_MLA, SPARSE_MLA_SM100)
    if not by_definition:
        reasons = loaded_kernels.reasons(kernel, device) + kernel.reasons(spec)
        if kernel is SPARSE_MLA_SM100 and not reasons:
            reasons = loaded_kernels.why_not_made(kernel, sparse_config.sparse_config(spec), device)
        if reasons:
            raise contract.not_runnable("sparse_mla", "cute", reasons)
        loaded_kernels.check_named("sparse_mla", implementation, device)
    if 0 in (spec.num_tokens, spec.num_selected):
        return EmptyPlan(spec, inputs)
    if by_definition:
        return ReferencePlan(spec, inputs)
    return KernelPlan(spec, inputs) if kernel is SPARSE_MLA else BlackwellPlan(spec, inputs)


def make_pair_plan(inputs: PairInputs, options: SparseOptions) -> Plan:
    """The plan of a call whose q is a pair of tensors. Raises as `describe` does; what else make_plan
    raises a JoiningPlan raises when it runs."""
    width = inputs.q.shape[-1] + inputs.q_rope.shape[-1]
    one = inputs.with_q(inputs.q[..., :1].expand(*inputs.q.shape[:-1], width))  # only the shape, without memory
    spec, device = describe(one, options), inputs.q.device
    by_kernel = (
        not loaded_kernels.is_by_definition(options.implementation, device)
        and loaded_kernels.kernel_for(device, SPARSE_MLA, SPARSE_MLA_SM100) is SPARSE_MLA
        and not loaded_kernels.reasons(SPARSE_MLA, device) + SPARSE_MLA.reasons(spec)
        and 0 not in (spec.num_tokens, spec.num_selected)
    )
    if by_kernel:
        loaded_kernels.check_named("sparse_mla", options.implementation, device)
        heads_first = not inputs.q.is_contiguous()
        found = serving_pair(
            spec, lengths=inputs.lengths is not None, sinks=inputs.sinks is not None, heads_first=heads_first
        )
        # In [H, T, L] the step from one head to the next is the number of all tokens. A launch that serves only some
        # tokens would step by their number, so calls with several launches take a copy of q as [T, H, L].
        if found is not None and not (heads_first and len(found.launches(spec.num_tokens, spec.num_selected)) > 1):
            return KernelPlan(spec, inputs, found)
    return JoiningPlan(spec, inputs, options)


def serving_pair(spec: SparseMLASpec, *, lengths: bool, sinks: bool, heads_first: bool) -> Serving | None:
    """The kernel that reads q as a pair, and its configuration; None if the one that serves the call takes one tensor.
    heads_first: whether the latent columns are [H, T, L]."""
    kernel, config = serving(spec, lengths=lengths, sinks=sinks)
    if not isinstance(config, SparseConfig) or not config.takes_split_q:
        return None
    return Serving(kernel, dataclasses.replace(config, split_q=True, heads_first=heads_first))


class Plan(plans.Plan[SparseMLASpec]):
    """A plan of sparse_mla."""

    def __init__(self, spec: SparseMLASpec, inputs: SparseInputs | PairInputs) -> None:
        super().__init__(spec, inputs.q)

    def check_scales(self, given: Mapping[str, Any]) -> None:
        """Raise the contract's ValueError / TypeError unless these scales, by argument, are legal in such a call."""
        described = {name: tensors.describe_scale(name, scale) for name, scale in given.items()}
        sparse_contract.check_sparse_scales(self.spec.cache, self.spec.compressed, **described)

    def run(
        self,
        inputs: tuple[torch.Tensor | None, ...],
        factors: Factors,
        return_lse: bool,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        workspace: Workspace | None,
        max_logits: torch.Tensor | None = None,
    ) -> Results:
        """out, and lse if it is asked for. `inputs` are SparseInputs or PairInputs, as when the plan was made, or a
        plain tuple of the same.

        max_logits: where the greatest logits go, if the spec has them.
        """
        result, result_lse, *greatest = self.attend(SparseInputs(*inputs), factors)  # type: ignore[arg-type]
        if max_logits is not None:
            max_logits.copy_(greatest[0])
        read = SparseInputs(*inputs)._asdict()  # type: ignore[arg-type]
        return self.layout.hand_over((result, result_lse), return_lse, out, lse, read)

    def attend(self, inputs: SparseInputs, factors: Factors) -> tuple[torch.Tensor, ...]:
        """out, lse and, if the spec has them, max_logits of a call, in new tensors."""
        raise NotImplementedError

    def check(self, inputs: SparseInputs | PairInputs) -> None:
        """Check the data of a call if TSMLA_CHECK asks for it."""
        data_checks.check(values.sparse_mla, self.spec, inputs.indices, inputs.lengths)


class JoiningPlan(Plan):
    """The plan of a call that joins the pair q by a copy."""

    def __init__(self, spec: SparseMLASpec, inputs: PairInputs, options: SparseOptions) -> None:
        super().__init__(spec, inputs)
        self.options = options

    def run(self, inputs: tuple[torch.Tensor | None, ...], *others: Any) -> Results:
        pair = PairInputs(*inputs)  # type: ignore[arg-type]
        one = pair.with_q(torch.cat((pair.q, pair.q_rope), -1))
        plan: Plan = plans.find(one, self.options, make_plan)
        return plan.run(one, *others)


class EmptyPlan(Plan):
    """The plan of a call without query tokens or without selected slots."""

    def attend(self, inputs: SparseInputs, factors: Factors) -> tuple[torch.Tensor, ...]:
        out, lse = self.layout.without_keys()
        return out, lse, *[lse] * self.spec.max_logits


class ReferencePlan(Plan):
    """The plan of a call that the definition runs, in torch operations."""

    def attend(self, inputs: SparseInputs, factors: Factors) -> tuple[torch.Tensor, ...]:
        self.check(inputs)
        return sparse_reference.sparse_mla(self.spec, *inputs, factors)


class BlackwellPlan(Plan):
    """The plan of a call that cuDNN's kernel runs, between torch operations."""

    def __init__(self, spec: SparseMLASpec, inputs: SparseInputs) -> None:
        super().__init__(spec, inputs)
        check_dense(inputs)

    def attend(self, inputs: SparseInputs, factors: Factors) -> tuple[torch.Tensor, ...]:
        self.check(inputs)
        known = factors if isinstance(factors, tuple) else None
        reasons = sparse_config.scale_reasons(self.spec, known)
        if reasons or known is None:
            raise contract.not_runnable("sparse_mla", "cute", reasons)
        return blackwell.sparse_mla(self.spec, inputs, known)


class KernelPlan(Plan):
    """The plan of a call that a compiled kernel runs, on torch's current stream."""

    def __init__(self, spec: SparseMLASpec, inputs: SparseInputs | PairInputs, found: Serving | None = None) -> None:
        """found: the kernel that serves the call; by default the one that takes q as one tensor."""
        super().__init__(spec, inputs)
        self.kind = type(inputs)
        rope: torch.Tensor | None = None
        if isinstance(inputs, PairInputs):  # query_of_pair has checked q
            rope, one = inputs.q_rope, inputs.with_q(inputs.q.new_empty(0))
        else:
            one = inputs
        check_dense(one)
        specs = [cache for cache in (spec.cache, spec.compressed) if cache is not None]
        self.pages = pages = [Pages.of(*cache) for cache in zip(CACHES, one.caches, specs, strict=False)]
        self.device = inputs.q.device
        self.index = index = inputs.q.get_device()
        lengths, sinks = inputs.lengths is not None, inputs.sinks is not None
        found = found or serving(spec, lengths=lengths, sinks=sinks)
        config, sms = found.config, devices.num_sms(index)
        heads_first = isinstance(config, SparseConfig) and config.heads_first
        q_dim, rope_step = (spec.head_dim, 0) if rope is None else (spec.latent_dim, tensors.row_step(rope))
        launcher = loaded_kernels.launcher(found.kernel, config, index)
        row_bytes = {  # the bytes of one token in each operand
            "q": spec.num_heads * q_dim * ITEMSIZE[spec.q_dtype],
            "q_rope": spec.num_heads * rope_step * ITEMSIZE[spec.q_dtype],
            "indices": spec.num_selected * ITEMSIZE["int32"],
            "lengths": ITEMSIZE["int32"],
            "out": spec.num_heads * spec.latent_dim * ITEMSIZE[spec.out_dtype],
            "lse": spec.num_heads * ITEMSIZE["float32"],
            "max_logits": spec.num_heads * ITEMSIZE["float32"],
        }
        parts = []
        for first, stop in found.launches(spec.num_tokens, spec.num_selected):
            count = stop - first
            shapes = workspaces_of(config, sms, count, spec.num_selected)
            operands = {
                "q": (spec.num_heads, count, q_dim) if heads_first else (count * spec.num_heads, q_dim),
                **({} if rope is None else {"q_rope": (count * spec.num_heads, rope_step)}),
                **{name: each.shape for name, each in zip(CACHES, pages, strict=False)},
                "indices": (count, spec.num_selected),
                **({"lengths": (count,)} if lengths else {}),
                **({"sinks": (spec.num_heads,)} if sinks else {}),
                "scales": (NUM_SCALES,),
                "out": (count * spec.num_heads, spec.latent_dim),
                "lse": (count * spec.num_heads,),
                **({"max_logits": (count * spec.num_heads,)} if spec.max_logits else {}),
                **{name: shape for name, (shape, _) in shapes.items()},
            }
            loaded_kernels.check_operands(launcher, tuple(operands))
            offsets = tuple(first * row_bytes.get(name, 0) for name in operands)
            parts.append(loaded_kernels.LaunchPart(launcher.bind(tuple(operands.values())), offsets))
        self.launch = loaded_kernels.all_of(parts)
        # TSMLA_CHECK as it is when the plan is made: no call spends host time on reading it.
        self.checked = values.enabled()
        memory = sparse_layout(found, sms, spec.num_tokens, spec.num_selected)
        self.size = memory.size
        *self.offsets, self.lse_offset = memory.offsets.values()
        layout = self.layout
        self.new_out = (layout.shape, layout.strides, layout.dtype)
        self.new_lse = (layout.rows, layout.row_strides, layout.lse_dtype)
        self.widens_sinks = inputs.sinks is not None and inputs.sinks.dtype != torch.float32
        self.has_fast_path = not (self.checked or self.widens_sinks or any(each.step > 1 for each in pages))

    def run(
        self,
        inputs: tuple[torch.Tensor | None, ...],
        factors: Factors,
        return_lse: bool,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        workspace: Workspace | None,
        max_logits: torch.Tensor | None = None,
    ) -> Results:
        if devices.current_device() != self.index:
            with torch.cuda.device(self.index):
                return self.run(inputs, factors, return_lse, out, lse, workspace, max_logits)
        if out is None and lse is None and (return_lse is False or return_lse is True):  # the usual, in one step
            out = devices.new_tensor(*self.new_out)
            if return_lse:
                lse = devices.new_tensor(*self.new_lse)
        else:
            read = self.kind(*inputs)._asdict()  # type: ignore[arg-type]
            out, lse = self.layout.take(return_lse, out, lse, read)
        stream = devices.current_stream(self.index)
        if not self.has_fast_path:
            inputs = self.prepare(self.kind(*inputs))  # type: ignore[arg-type]
        addresses = [tensor.data_ptr() for tensor in inputs if tensor is not None]
        on_device = scales.on_device(factors, self.index, stream)
        if workspace is None:
            base = devices.borrow(self.size, stream)
        else:
            base = workspace.take("sparse_mla", self.size, self.device, stream)
        addresses += on_device.data_ptr(), out.data_ptr(), base + self.lse_offset if lse is None else lse.data_ptr()
        if max_logits is not None:
            addresses.append(max_logits.data_ptr())
        try:
            self.launch(stream, addresses + [base + offset for offset in self.offsets])
        finally:
            if workspace is None:
                devices.give_back(base)
        return out, lse

    def prepare(self, inputs: SparseInputs | PairInputs) -> SparseInputs | PairInputs:
        """The steps that few calls need before their launch; returns the tensors as the kernel reads them."""
        self.check(inputs)
        if any(each.step > 1 for each in self.pages):
            cut = self.spec.window
            sections = (inputs.indices[:, :cut], inputs.indices[:, cut:])
            moved = [each.slots(slots) for each, slots in zip(self.pages, sections, strict=False)]
            inputs = inputs._replace(indices=torch.cat(moved, 1) if len(moved) > 1 else moved[0])
        if self.widens_sinks and inputs.sinks is not None:
            inputs = inputs._replace(sinks=inputs.sinks.float())
        return inputs

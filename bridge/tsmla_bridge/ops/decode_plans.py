"""Plans of mla_decode: which kernel runs a call and where its workspaces lie. plans.py keeps them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from tsmla_bridge import reference
from tsmla_bridge.ops import blackwell, plans
from tsmla_bridge.runtime import data_checks, devices, loaded_kernels, scales, tensors
from tsmla_bridge.runtime.results import Computed, Results
from tsmla_bridge.runtime.scales import Pair
from tsmla_bridge.runtime.workspace import ALIGN, Workspace, decode_layout
from tsmla_kernels import contract
from tsmla_kernels.catalog import MLA_DECODE, MLA_DECODE_SM100
from tsmla_kernels.contract import DecodeSpec, values
from tsmla_kernels.kernel import ITEMSIZE
from tsmla_kernels.sm90.decode import config as sm90_decode
from tsmla_kernels.sm100 import config as sm100
from tsmla_kernels.sm100.dense_arrays import DecodeArrays


class DecodeInputs(NamedTuple):
    """The tensors of a call, as mla_decode takes them. q has all columns of the queries or, if q_rope has the rope
    columns, only the latent columns."""

    q: torch.Tensor
    kv_cache: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor | None
    visible_lens: torch.Tensor | None = None
    q_rope: torch.Tensor | None = None

    def joined(self) -> DecodeInputs:
        """These tensors with q as one tensor, which is a copy if there is q_rope."""
        return self if self.q_rope is None else self._replace(q=torch.cat((self.q, self.q_rope), -1), q_rope=None)


class DecodeOptions(NamedTuple):
    """The arguments of a call that are part of its plan beside the tensors' shapes."""

    latent_dim: int
    max_q_len: int | None
    causal: bool = True
    batch_invariant: bool = False
    fp8_probabilities: bool = False
    implementation: str | None = None


def plan_of_latest(
    q: Any,
    kv_cache: Any,
    block_tables: Any,
    seq_lens: Any,
    cu_seqlens_q: Any,
    options: tuple[Any, ...],
    visible_lens: Any = None,
) -> Plan | None:
    """`plans.latest` for DecodeOptions. Calls that read q as two tensors, and those with visible_lens, are kept under
    (DecodeOptions, whether q is read as two, whether visible_lens is given). A pair that is read as the one tensor that
    it is part of is not found here.

    Takes the tensors one by one, and the options as any equal tuple: to make both NamedTuples would cost a tenth of an
    eager call on the host."""
    if forward_ad._current_level >= 0:  # a tangent does not show, as in plans.latest
        return None
    try:
        if type(q) is tuple or visible_lens is not None:
            parts = q if type(q) is tuple else (q,)
            plan = plans.latest_plans[options, type(q) is tuple, visible_lens is not None]
            given = [tensor for tensor in (cu_seqlens_q, visible_lens, *parts[1:]) if tensor is not None]
            return plan if plan.is_like(parts[0], kv_cache, block_tables, seq_lens, *given) else None
        plan = plans.latest_plans[options]
        if cu_seqlens_q is None:
            return plan if plan.is_like(q, kv_cache, block_tables, seq_lens) else None
        return plan if plan.is_like(q, kv_cache, block_tables, seq_lens, cu_seqlens_q) else None
    except (LookupError, TypeError, ValueError):
        # No such call, an option without a hash, no pair, or the latest had another number of tensors.
        return None


def plan_for(inputs: DecodeInputs, options: DecodeOptions) -> Plan:
    """The plan of a call; raises as mla_decode does, except for the scales."""
    split_q, visible_lens = inputs.q_rope is not None, inputs.visible_lens is not None
    key = (options, split_q, visible_lens) if split_q or visible_lens else None
    plan: Plan = plans.find(inputs, options, _make_plan, key)
    return plan


def _make_plan(inputs: DecodeInputs, options: DecodeOptions) -> Plan:
    inputs = inputs._replace(kv_cache=tensors.without_head_axis(inputs.kv_cache))
    described, statics = inputs._asdict(), options._asdict()
    implementation = statics.pop("implementation")
    if (rope := described.pop("q_rope")) is not None:
        width = inputs.q.shape[-1] + rope.shape[-1]
        described["q"] = inputs.q[..., :1].expand(*inputs.q.shape[:-1], width)  # only the shape, without memory
    spec = tensors.describe_call(
        contract.decode_spec,
        **described,
        softmax_scale=1.0,  # scales are no part of a plan; the caller checks them
        **statics,
    )
    device = inputs.q.device
    by_definition = loaded_kernels.is_by_definition(implementation, device)
    kernel = loaded_kernels.kernel_for(device, MLA_DECODE, MLA_DECODE_SM100)
    if not by_definition:
        reasons = loaded_kernels.reasons(kernel, device) + kernel.reasons(spec)
        if kernel is MLA_DECODE_SM100 and not reasons:
            reasons = loaded_kernels.why_not_made(kernel, sm100.decode_config(spec), device)
        if reasons:
            raise contract.not_runnable("mla_decode", "cute", reasons)
        loaded_kernels.check_named("mla_decode", implementation, device)
    if 0 in (spec.batch, spec.total_q_len, spec.max_pages, spec.num_pages):
        return EmptyPlan(spec, inputs)
    if by_definition:
        return ReferencePlan(spec, inputs)
    return KernelPlan(spec, inputs) if kernel is MLA_DECODE else BlackwellPlan(spec, inputs)


class Plan(plans.Plan[DecodeSpec]):
    """A plan of mla_decode."""

    def __init__(self, spec: DecodeSpec, inputs: DecodeInputs) -> None:
        super().__init__(spec, inputs.q)

    def run(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        cu_seqlens_q: torch.Tensor | None,
        *,
        pair: Pair,
        return_lse: bool,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        workspace: Workspace | int | None,
        q_rope: torch.Tensor | None = None,
        visible_lens: torch.Tensor | None = None,
    ) -> Results:
        """out, and lse if it is asked for. `workspace` may be an address that `address_in` returned.

        The parameters are separate: to make a bundle of them would take 0.4 us of each call."""
        kv_cache = tensors.without_head_axis(kv_cache)
        inputs = DecodeInputs(q, kv_cache, block_tables, seq_lens, cu_seqlens_q, visible_lens, q_rope)
        assert not isinstance(workspace, int)  # these plans' address_in returns none
        read = {"q": q, "q's rope columns": q_rope, "kv_cache": kv_cache}
        results = self.attend(inputs.joined(), pair, workspace)
        return self.layout.hand_over(results, return_lse, out, lse, read)

    def attend(self, inputs: DecodeInputs, pair: Pair, workspace: Workspace | None) -> Computed:
        """out and lse of a call, in new tensors."""
        raise NotImplementedError

    def check(self, inputs: DecodeInputs) -> None:
        """Check the data of a call if TSMLA_CHECK asks for it."""
        data_checks.check(
            values.decode, self.spec, inputs.seq_lens, inputs.block_tables, inputs.cu_seqlens_q, inputs.visible_lens
        )

    def address_in(self, buffer: torch.Tensor) -> int | None:
        """The address in this memory for a call's intermediate results; None if the memory doesn't fit them."""
        return None


class EmptyPlan(Plan):
    """The plan of a call without requests, without query tokens, or without pages."""

    def attend(self, inputs: DecodeInputs, pair: Pair, workspace: Workspace | None) -> Computed:
        return self.layout.without_keys()


class ReferencePlan(Plan):
    """The plan of a call that the definition runs, in torch operations."""

    def attend(self, inputs: DecodeInputs, pair: Pair, workspace: Workspace | None) -> Computed:
        self.check(inputs)
        return reference.mla_decode(self.spec, *inputs[:6], *pair)


class BlackwellPlan(Plan):
    """The plan of a call that TokenSpeed's kernels run, between torch operations. Torch's allocator gives all memory
    of a call: a workspace is not used."""

    def __init__(self, spec: DecodeSpec, inputs: DecodeInputs) -> None:
        super().__init__(spec, inputs)
        if inputs.q_rope is None:
            tensors.check_dense("q", inputs.q)
        tensors.table_width(inputs.block_tables)
        self.page_step = tensors.page_step(inputs.kv_cache)
        self.of_pages = replace(spec, num_pages=(spec.num_pages - 1) * self.page_step + 1)

    def attend(self, inputs: DecodeInputs, pair: Pair, workspace: Workspace | None) -> Computed:
        self.check(inputs)
        cache = tensors.whole_pages(inputs.kv_cache, self.page_step)
        tables = inputs.block_tables if self.page_step == 1 else inputs.block_tables * self.page_step
        given = DecodeArrays(*inputs[:6])._replace(kv_cache=cache, block_tables=tables)
        return blackwell.mla_decode(self.of_pages, given, pair)


class KernelPlan(Plan):
    """The plan of a call that a compiled kernel runs, on torch's current stream."""

    def __init__(self, spec: DecodeSpec, inputs: DecodeInputs) -> None:
        super().__init__(spec, inputs)
        q, block_tables = inputs.q, inputs.block_tables
        rope = inputs.q_rope
        heads_first = rope is not None and not q.is_contiguous()
        for name in ("seq_lens", "cu_seqlens_q", "visible_lens", "q"):
            tensor = getattr(inputs, name)
            if tensor is not None and not (heads_first and tensor is q):
                tensors.check_dense(name, tensor)
        self.device = q.device
        self.index = index = q.get_device()
        self.page_step = tensors.page_step(inputs.kv_cache)
        self.table_is_slice, width = False, spec.max_pages
        if self.page_step == 1:  # otherwise the table is written anew, and dense
            self.table_is_slice, width = not block_tables.is_contiguous(), tensors.table_width(block_tables)
            if spec.batch_invariant and width != spec.max_pages:
                # The table's width decides into which pieces a request's keys are split.
                tensors.check_dense("block_tables", block_tables)

        split_q = rope is not None
        config = sm90_decode.decode_config(spec, split_q=split_q, heads_first=heads_first)
        launches = sm90_decode.launches(config, spec.batch, width)
        # In [H, T, L] the step from one head to the next is the number of all requests' rows. A launch that serves only
        # some requests would step by the number of their rows, so several launches read a copy of q as [T, H, L].
        self.copies_q = heads_first and len(launches) > 1
        if self.copies_q:
            heads_first, config = False, sm90_decode.decode_config(spec, split_q=split_q)
        sms, rows = devices.num_sms(index), spec.total_q_len * spec.num_heads
        rope_step = 0 if rope is None else tensors.row_step(rope)
        launcher = loaded_kernels.launcher(MLA_DECODE, config, index)
        row_bytes = {  # bytes of a request's rows, by operand; a ragged call's rows lie where its offsets say
            "visible_lens": spec.max_q_len * ITEMSIZE["int32"],
            "q": spec.max_q_len * spec.num_heads * config.q_dim * ITEMSIZE[spec.q_dtype],
            "q_rope": spec.max_q_len * spec.num_heads * rope_step * ITEMSIZE[spec.q_dtype],
            "out": spec.max_q_len * spec.num_heads * spec.latent_dim * ITEMSIZE[spec.out_dtype],
            "lse": spec.max_q_len * spec.num_heads * ITEMSIZE["float32"],
        }
        parts: list[loaded_kernels.LaunchPart] = []
        for first, stop in launches:
            count = stop - first
            part_rows = rows if spec.ragged else count * spec.max_q_len * spec.num_heads
            shapes = sm90_decode.workspace_shapes(config, sms, count, width)
            operands = {
                "q": (spec.num_heads, spec.total_q_len, config.q_dim) if heads_first else (part_rows, config.q_dim),
                **({"q_rope": (part_rows, rope_step)} if split_q else {}),
                "kv_cache": ((spec.num_pages - 1) * self.page_step + 1, spec.page_size, spec.head_dim),
                "block_tables": (count, width),
                "seq_lens": (count,),
                "cu_seqlens_q": (count + spec.ragged,),
                **({"visible_lens": (part_rows // spec.num_heads,)} if spec.visible_lens else {}),
                "scales": (2,),
                "out": (part_rows, spec.latent_dim),
                "lse": (part_rows,),
                **{name: shape for name, (shape, _) in shapes.items()},
            }
            loaded_kernels.check_operands(launcher, tuple(operands))
            steps = {"block_tables": 4 * width, "seq_lens": 4, "cu_seqlens_q": 4, **({} if spec.ragged else row_bytes)}
            offsets = tuple(first * steps.get(name, 0) for name in operands)
            parts.append(loaded_kernels.LaunchPart(launcher.bind(tuple(operands.values())), offsets))
        self.launch = loaded_kernels.all_of(parts)
        # TSMLA_CHECK as it is when the plan is made: no call spends host time on reading it.
        self.checked = values.enabled()
        memory = decode_layout(config, sms, spec.batch, width, rows)
        self.size = memory.size
        *self.offsets, self.lse_offset = memory.offsets.values()
        layout = self.layout
        self.new_out = (layout.shape, layout.strides, layout.dtype)
        self.new_lse = (layout.rows, layout.row_strides, layout.lse_dtype)
        self.has_fast_path = not (self.checked or self.page_step > 1 or self.table_is_slice or spec.ragged)

    def address_in(self, buffer: torch.Tensor) -> int | None:
        address = buffer.data_ptr()
        fits = (
            buffer.numel() * buffer.element_size() >= self.size
            and buffer.is_contiguous()
            and buffer.get_device() == self.index
            and address % ALIGN == 0
        )
        return address if fits else None

    def run(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        cu_seqlens_q: torch.Tensor | None,
        *,
        pair: Pair,
        return_lse: bool,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        workspace: Workspace | int | None,
        q_rope: torch.Tensor | None = None,
        visible_lens: torch.Tensor | None = None,
    ) -> Results:
        if devices.current_device() != self.index:
            with torch.cuda.device(self.index):
                return self.run(
                    q, kv_cache, block_tables, seq_lens, cu_seqlens_q,
                    pair=pair, return_lse=return_lse, out=out, lse=lse, workspace=workspace, q_rope=q_rope,
                    visible_lens=visible_lens,
                )  # fmt: skip
        if out is None and lse is None and (return_lse is False or return_lse is True):  # the usual, in one step
            out = devices.new_tensor(*self.new_out)
            if return_lse:
                lse = devices.new_tensor(*self.new_lse)
        else:
            read = {"q": q, "q's rope columns": q_rope, "kv_cache": kv_cache}
            out, lse = self.layout.take(return_lse, out, lse, read)
        stream = devices.current_stream(self.index)
        if not self.has_fast_path:
            block_tables = self.prepare(block_tables, seq_lens, cu_seqlens_q, visible_lens, out, lse)
        lens_address = seq_lens.data_ptr()
        first, second, third = self.offsets
        pair_on_device = scales.on_device(pair, self.index, stream)
        queries: tuple[int, ...]
        if q_rope is None:
            queries = (q.data_ptr(),)
        else:
            if self.copies_q:
                q = q.contiguous()
            queries = q.data_ptr(), q_rope.data_ptr()
        if workspace is None:
            base = devices.borrow(self.size, stream)
        elif isinstance(workspace, int):
            base = workspace
        else:
            base = workspace.take("mla_decode", self.size, self.device, stream)
        try:
            self.launch(
                stream,
                (  # in the order of the operands that __init__ checks
                    *queries,
                    kv_cache.data_ptr(),
                    block_tables.data_ptr(),
                    lens_address,
                    lens_address if cu_seqlens_q is None else cu_seqlens_q.data_ptr(),  # not read without offsets
                    *(() if visible_lens is None else (visible_lens.data_ptr(),)),
                    pair_on_device.data_ptr(),
                    out.data_ptr(),
                    base + self.lse_offset if lse is None else lse.data_ptr(),
                    base + first,
                    base + second,
                    base + third,
                ),
            )
        finally:
            if workspace is None:
                devices.give_back(base)
        return out, lse

    def prepare(
        self,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        cu_seqlens_q: torch.Tensor | None,
        visible_lens: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> torch.Tensor:
        """The steps that few calls need before their launch; returns the table as the kernel reads it."""
        if self.checked:
            data_checks.check(values.decode, self.spec, seq_lens, block_tables, cu_seqlens_q, visible_lens)
        if self.page_step > 1:
            block_tables = (block_tables * self.page_step).contiguous()
        elif self.table_is_slice:
            tensors.table_width(block_tables)  # raises if the memory of this table ends too early
        if cu_seqlens_q is not None:
            out.zero_()  # the kernel walks requests: it does not write rows that belong to none
            if lse is not None:
                lse.fill_(-math.inf)
        return block_tables

"""mla_decode: absorbed multi-head latent attention over a paged cache, on torch tensors.

What a call's shapes, strides, dtypes and options decide is worked out once and kept as a plan: whether they are legal,
which kernel runs, where its workspaces lie. A call then finds its plan, allocates what it returns, and launches.
Scales, lengths, tables and addresses belong to the call and are never part of a plan.

A plan is found at two speeds. Calls mostly come in rows of like ones (the layers of a model), so first the tensors are
compared with those of the latest call that had the same options (`plan_of_latest`). If they differ, or the call is one
that torch.compile or a mode of torch's has to see, all is looked at one by one (`plan_for`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tsmla_bridge import blackwell, checks, devices, kernels, ops, reference, scales, tensors
from tsmla_bridge.results import Places, Results
from tsmla_bridge.scales import Pair
from tsmla_bridge.tensors import Scale
from tsmla_bridge.workspace import ALIGN, Workspace, decode_layout
from tsmla_kernels import contract
from tsmla_kernels.catalog import MLA_DECODE
from tsmla_kernels.contract import DecodeSpec
from tsmla_kernels.contract import values as data_checks
from tsmla_kernels.sm90.decode import config as sm90_decode

MAX_PLANS = 4096
"""Plans that are kept: one for each combination of shapes. Beyond that all are forgotten and made anew."""


def mla_decode(
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    softmax_scale: Scale,
    latent_dim: int = 512,
    cu_seqlens_q: torch.Tensor | None = None,
    max_q_len: int | None = None,
    causal: bool = True,
    q_scale: Scale | None = None,
    kv_scale: Scale | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    implementation: str | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: Workspace | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of the last query tokens of each request over its latent cache (absorbed MLA, one key head).

    out = softmax(softmax_scale * q . kv) latent, with q the absorbed query [q_nope W_UK | q_rope]; apply W_UV after it.
    The formulation is DeepSeek-V2's (arXiv:2405.04434); the masks are those of the decode step in vLLM and SGLang.

    Axes: B requests, S query tokens a request, T query tokens over all requests, H query heads, L latent width, R rope
    width, D = L + R, P pages, Z tokens a page, M pages a request at most.

    Args:
      q: [B, S, H, D], or ragged [T, H, D] with cu_seqlens_q and max_q_len; latent columns first, rope last. Also the
        pair (q[..., :L], q[..., L:]) of such a tensor. float16 or bfloat16 on a GPU; float8_e4m3fn, float32 and float64
        too on a CPU.
      kv_cache: [P, Z, D] or [P, 1, Z, D], latent first, rope last, in q's dtype or float8_e4m3fn (any dtype with a
        float32 q). Pages may lie a multiple of Z * D elements apart: one layer's slice of a pool.
      block_tables: [B, M] int32, the pages of each request in order; entries past its last page are never used. May be
        the first columns of a wider table.
      seq_lens: [B] int32, keys of each request, its new tokens included; 0 is legal.
      softmax_scale: factor of the logits, float or float32 scalar tensor on q's device; DeepSeek's is (128 + 64)^-0.5
        times the square of yarn's mscale, never D^-0.5.
      latent_dim: L; the first L columns of a cache row are also its value. R = 0 (L = D) is legal.
      cu_seqlens_q: [B + 1] int32, row where each request's query tokens start, and their end; with ragged q only.
      max_q_len: bound on the query tokens of one request; required with cu_seqlens_q. Rows past it give 0, -inf.
      causal: query i of S sees key j iff j < seq_len - (S - 1) + i; otherwise iff j < seq_len.
      q_scale, kv_scale: q holds query / q_scale and kv_cache holds kv / kv_scale (fp8 usually); None is 1. Float or
        float32 scalar tensor; a tensor is read on the device at every call, and at every replay of a CUDA graph.
      return_lse: also return the logsumexp of the scaled logits.
      batch_invariant: a request's rows are bitwise the same whatever else is in the batch.
      implementation: "cute" (the kernels), "reference" (the definition in torch operations), or None: the kernels for
        GPU tensors, the reference for CPU tensors.
      out, lse: where the results go, contiguous and of their shapes and dtypes; lse only with return_lse.
      workspace: memory for intermediate results; torch's allocator gives it otherwise.

    Returns:
      out [B, S, H, L] (or [T, H, L]) in q's dtype, bfloat16 when q is fp8; with return_lse also lse [B, S, H] (or [T,
      H]), float32, natural logarithm. A row that sees no key gives out 0 and lse -inf.

    The kernels run on torch's current stream: nothing is copied and nothing waits for the device, so calls can be
    captured into CUDA graphs once a call of the same static sizes has loaded its kernel. Calls from several threads and
    on several streams are independent. torch.compile takes them as one operator. The kernels have no derivative; the
    reference on a CPU can be differentiated.

    TSMLA_CHECK=1, in force when shapes are first seen, checks what only the data shows: lengths, pages and offsets.

    Raises:
      TypeError, ValueError: an argument is not legal; the message names it, what it got and what is legal.
      NotImplementedError: the implementation can't run this call, with every reason.
      RuntimeError: CUDA refused a launch, or a kernel would have to be loaded during a capture.
    """
    options = (latent_dim, max_q_len, causal, batch_invariant, implementation)
    compiling = torch.compiler.is_compiling()
    query: Any = q  # one tensor, once the plan is there
    pair: Pair
    plan = None if compiling else plan_of_latest(q, kv_cache, block_tables, seq_lens, cu_seqlens_q, options)
    if plan is None:
        if compiling or ops.is_traced(q, kv_cache):
            pair = scales.product(softmax_scale, q_scale, kv_scale, kv_scale)
            return ops.call_decode(
                q, kv_cache, block_tables, seq_lens, cu_seqlens_q, pair, options, return_lse, out, lse, workspace
            )
        query = q if isinstance(q, torch.Tensor) else tensors.joined(q)
        plan = plan_for(query, kv_cache, block_tables, seq_lens, cu_seqlens_q, options)
    if type(softmax_scale) is float and q_scale is None and type(kv_scale) in _NUMBER:
        pair = (softmax_scale, 1.0) if kv_scale is None else (softmax_scale * kv_scale, kv_scale)  # type: ignore[assignment]
    elif type(softmax_scale) is float and q_scale is None and scales.is_usual(kv_scale, query):
        pair = scales.product(softmax_scale, None, kv_scale, kv_scale)
    else:
        scales.check("softmax_scale", softmax_scale, optional=False)
        scales.check("q_scale", q_scale)
        scales.check("kv_scale", kv_scale)
        tensors.same_device("q", query, {"softmax_scale": softmax_scale, "q_scale": q_scale, "kv_scale": kv_scale})
        pair = scales.product(softmax_scale, q_scale, kv_scale, kv_scale)
    found, found_lse = plan.run(
        (query, kv_cache, block_tables, seq_lens, cu_seqlens_q, pair, return_lse, out, lse, workspace)
    )
    return found if found_lse is None else (found, found_lse)


Call = tuple[
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor | None,
    Pair,
    bool,
    torch.Tensor | None,
    torch.Tensor | None,
    Workspace | int | None,
]
"""What belongs to one call and not to its plan: q, kv_cache, block_tables, seq_lens, cu_seqlens_q, the pair of scales,
return_lse, out, lse and workspace (or the address that the plan's place_in gave). A plain tuple: one with names costs
ten times as much to make."""

_NUMBER = (float, type(None))

Options = tuple[int, int | None, bool, bool, str | None]
"""latent_dim, max_q_len, causal, batch_invariant, implementation."""

_plans: dict[Any, Plan] = {}
_latest: dict[Options, tuple[Callable[..., bool], Plan]] = {}


def plan_of_latest(
    q: Any, kv_cache: Any, block_tables: Any, seq_lens: Any, cu_seqlens_q: Any, options: Options
) -> Plan | None:
    """The plan of the latest call with these options, if the tensors are like that one's; else None."""
    try:
        is_like, plan = _latest[options]
        if cu_seqlens_q is None:
            return plan if is_like(q, kv_cache, block_tables, seq_lens) else None
        return plan if is_like(q, kv_cache, block_tables, seq_lens, cu_seqlens_q) else None
    except (KeyError, TypeError):  # not there, not hashable, or the other number of tensors
        return None


def plan_for(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    options: Options,
) -> Plan:
    """The plan of a call; raises as mla_decode does, but for the scales."""
    if (plan := plan_of_latest(q, kv_cache, block_tables, seq_lens, cu_seqlens_q, options)) is not None:
        return plan
    try:
        key = (
            q.shape,
            q.dtype,
            q.device,
            q.is_contiguous(),
            kv_cache.shape,
            kv_cache.dtype,
            kv_cache.device,
            kv_cache.is_contiguous() or kv_cache.stride(),
            block_tables.shape,
            block_tables.dtype,
            block_tables.device,
            block_tables.is_contiguous() or block_tables.stride(),
            seq_lens.shape,
            seq_lens.dtype,
            seq_lens.device,
            seq_lens.is_contiguous(),
            options,
            None
            if cu_seqlens_q is None
            else (cu_seqlens_q.shape, cu_seqlens_q.dtype, cu_seqlens_q.device, cu_seqlens_q.is_contiguous()),
        )
        plan = _plans.get(key)
    except (AttributeError, TypeError):  # an argument that is no tensor, or an option that has no hash
        plan, key = None, None
    if plan is None:
        plan = _make_plan(q, kv_cache, block_tables, seq_lens, cu_seqlens_q, options)
        if len(_plans) >= MAX_PLANS:
            _plans.clear()
            _latest.clear()
        _plans[key] = plan
    given = [q, kv_cache, block_tables, seq_lens]
    if cu_seqlens_q is not None:
        given.append(cu_seqlens_q)
    if not any(tensor.requires_grad for tensor in given):  # whether such a call is traced depends on more
        _latest[options] = (tensors.likeness(*given), plan)
    return plan


class Plan:
    """What is settled about calls of the same shapes, strides, dtypes and options."""

    def __init__(self, spec: DecodeSpec, q: torch.Tensor) -> None:
        self.spec, self.device = spec, q.device
        self.places = Places.of(q, spec.latent_dim, spec.out_dtype, spec.lse_dtype)

    def run(self, call: Call) -> Results:
        """out, and lse if it is asked for."""
        raise NotImplementedError

    def place_in(self, buffer: torch.Tensor) -> int | None:
        """The address where a call can have its intermediate results in this memory; None if it can't."""
        return None


class _EmptyPlan(Plan):
    """No request, no query token, or no key."""

    def run(self, call: Call) -> Results:
        *_, return_lse, out, lse, _ = call
        return self.places.nothing(return_lse, out, lse)


class _ReferencePlan(Plan):
    """The definition, in torch operations."""

    def run(self, call: Call) -> Results:
        q, kv_cache, block_tables, seq_lens, cu_seqlens_q, pair, return_lse, out, lse, _ = call
        checks.values(data_checks.decode, self.spec, seq_lens, block_tables, cu_seqlens_q)
        kv_cache = tensors.without_head_axis(kv_cache)
        found = reference.mla_decode(self.spec, q, kv_cache, block_tables, seq_lens, cu_seqlens_q, *pair)
        return self.places.hand_over(found, return_lse, out, lse)


class _BlackwellPlan(Plan):
    """The package tokenspeed_mla."""

    def run(self, call: Call) -> Results:
        q, kv_cache, block_tables, seq_lens, cu_seqlens_q, pair, return_lse, out, lse, workspace = call
        checks.values(data_checks.decode, self.spec, seq_lens, block_tables, cu_seqlens_q)
        kv_cache = tensors.without_head_axis(kv_cache)
        assert not isinstance(workspace, int)  # place_in gives this plan none
        found = blackwell.mla_decode(self.spec, q, kv_cache, block_tables, seq_lens, pair, workspace)
        return self.places.hand_over(found, return_lse, out, lse)


class _KernelPlan(Plan):
    """A compiled kernel, launched on torch's current stream. All that is done at every call is in `run`: it is what a
    call costs on the host."""

    def __init__(self, spec: DecodeSpec, q: torch.Tensor, kv_cache: torch.Tensor, block_tables: torch.Tensor) -> None:
        super().__init__(spec, q)
        self.index = index = q.get_device()
        tensors.check_dense("q", q)
        self.page_step = tensors.page_step(kv_cache)
        self.table_is_slice, width = False, spec.max_pages
        if self.page_step == 1:  # otherwise the table is written anew, and dense
            self.table_is_slice, width = not block_tables.is_contiguous(), tensors.table_width(block_tables)
            if spec.batch_invariant and width != spec.max_pages:
                # Where its pieces begin depends on the table's width.
                tensors.check_dense("block_tables", block_tables)

        config = sm90_decode.decode_config(spec)
        sms, rows = devices.num_sms(index), spec.total_q_len * spec.num_heads
        shapes = sm90_decode.workspace_shapes(config, sms, spec.batch, width)
        launcher = kernels.launcher("mla_decode", MLA_DECODE, config, index)
        names = ("q", "kv_cache", "block_tables", "seq_lens", "cu_seqlens_q", "scales", "out", "lse", *shapes)
        kernels.check_operands(launcher, names)
        self.launch = launcher.bind(
            (
                (rows, spec.head_dim),
                ((spec.num_pages - 1) * self.page_step + 1, spec.page_size, spec.head_dim),
                (spec.batch, width),
                (spec.batch,),
                (spec.batch + spec.ragged,),
                (2,),
                (rows, spec.latent_dim),
                (rows,),
                *(shape for shape, _ in shapes.values()),
            )
        )
        # Under TSMLA_CHECK as it is now: to read the environment would be a tenth of what a call costs on the host.
        self.checked = data_checks.enabled()
        layout = decode_layout(config, sms, spec.batch, width, rows)
        self.size = layout.size
        places = self.places
        self.new_out = (places.shape, places.strides, places.dtype)
        self.new_lse = (places.rows, places.row_strides, places.lse_dtype)
        *self.offsets, self.lse_offset = layout.offsets.values()
        self.simple = not (self.checked or self.page_step > 1 or self.table_is_slice or spec.ragged)

    def place_in(self, buffer: torch.Tensor) -> int | None:
        address = buffer.data_ptr()
        found = (
            buffer.numel() * buffer.element_size() >= self.size
            and buffer.is_contiguous()
            and buffer.get_device() == self.index
            and address % ALIGN == 0
        )
        return address if found else None

    def run(self, call: Call) -> Results:
        if devices.current_device() != self.index:
            with torch.cuda.device(self.index):
                return self.run(call)
        q, kv_cache, block_tables, seq_lens, cu_seqlens_q, pair, return_lse, out, lse, workspace = call
        if out is None and lse is None and (return_lse is False or return_lse is True):  # the usual, in one step
            out = devices.new_tensor(*self.new_out)
            if return_lse:
                lse = devices.new_tensor(*self.new_lse)
        else:
            out, lse = self.places.take(return_lse, out, lse)
        stream = devices.current_stream(self.index)
        if not self.simple:
            block_tables = self.prepare(block_tables, seq_lens, cu_seqlens_q, out, lse)
        lens_at = seq_lens.data_ptr()
        first, second, third = self.offsets
        scales_there = scales.on_device(pair, self.index, stream)
        if workspace is None:
            base = devices.borrow(self.size, stream)
        elif isinstance(workspace, int):
            base = workspace
        else:
            base = workspace.take("mla_decode", self.size, self.device, stream)
        try:
            self.launch(
                stream,
                (
                    q.data_ptr(),
                    kv_cache.data_ptr(),
                    block_tables.data_ptr(),
                    lens_at,
                    lens_at if cu_seqlens_q is None else cu_seqlens_q.data_ptr(),  # there in both cases
                    scales_there.data_ptr(),
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
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> torch.Tensor:
        """What few calls need before their launch; returns the table as the kernel reads it."""
        if self.checked:
            checks.values(data_checks.decode, self.spec, seq_lens, block_tables, cu_seqlens_q)
        if self.page_step > 1:
            block_tables = (block_tables * self.page_step).contiguous()
        elif self.table_is_slice:
            tensors.table_width(block_tables)  # this one may end where the plan's did not
        if cu_seqlens_q is not None:
            out.zero_()  # the kernel walks requests: it doesn't write rows of none
            if lse is not None:
                lse.fill_(-math.inf)
        return block_tables


def _make_plan(q: Any, kv_cache: Any, block_tables: Any, seq_lens: Any, cu_seqlens_q: Any, options: Options) -> Plan:
    latent_dim, max_q_len, causal, batch_invariant, implementation = options
    kv_cache = tensors.without_head_axis(kv_cache)
    spec = contract.decode_spec(
        q=tensors.describe("q", q),
        kv_cache=tensors.describe("kv_cache", kv_cache),
        block_tables=tensors.describe("block_tables", block_tables),
        seq_lens=tensors.describe("seq_lens", seq_lens),
        softmax_scale=1.0,  # scales are no part of a plan; the caller checks them
        latent_dim=latent_dim,
        cu_seqlens_q=tensors.describe_optional("cu_seqlens_q", cu_seqlens_q),
        max_q_len=max_q_len,
        causal=causal,
        return_lse=True,
        batch_invariant=batch_invariant,
    )
    others = {"kv_cache": kv_cache, "block_tables": block_tables, "seq_lens": seq_lens, "cu_seqlens_q": cu_seqlens_q}
    tensors.same_device("q", q, others)
    kernels.check_implementation(implementation)
    empty = 0 in (spec.batch, spec.total_q_len, spec.max_pages, spec.num_pages)
    if implementation == "reference" or (implementation is None and devices.kind(q.device) == "cpu"):
        return _EmptyPlan(spec, q) if empty else _ReferencePlan(spec, q)
    if blackwell.is_device(q.device):
        reasons = blackwell.decode_reasons(spec)
    else:
        reasons = kernels.reasons(MLA_DECODE, q.device) + sm90_decode.decode_reasons(spec)
    if reasons:
        raise contract.not_runnable("mla_decode", "cute", reasons)
    if empty:
        return _EmptyPlan(spec, q)
    if blackwell.is_device(q.device):
        return _BlackwellPlan(spec, q)
    for name, tensor in (("seq_lens", seq_lens), ("cu_seqlens_q", cu_seqlens_q)):
        if tensor is not None:
            tensors.check_dense(name, tensor)
    return _KernelPlan(spec, q, kv_cache, block_tables)

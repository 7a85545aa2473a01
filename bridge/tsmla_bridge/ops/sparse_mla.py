"""sparse_mla: absorbed attention over selected cache slots, for DeepSeek-V3.2 and V4, on torch tensors."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch

from tsmla_bridge import operators
from tsmla_bridge.ops import plans, prefill_launch, sparse_backward
from tsmla_bridge.ops.sparse_inputs import PairInputs, SparseInputs
from tsmla_bridge.ops.sparse_plans import Plan, SparseOptions, make_pair_plan, make_plan, serving_pair
from tsmla_bridge.runtime import loaded_kernels, scales, tensors
from tsmla_bridge.runtime.scales import Factors
from tsmla_bridge.runtime.tensors import Scale
from tsmla_bridge.runtime.workspace import Workspace, check_workspace
from tsmla_kernels.contract.rules import GREATEST_SCALE, LEAST_SCALE
from tsmla_kernels.contract.sparse import SparseMLASpec
from tsmla_kernels.sm90.sparse.record import serving


@overload
def sparse_mla(
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_cache: torch.Tensor,
    indices: torch.Tensor,
    lengths: torch.Tensor | None = None,
    *,
    softmax_scale: Scale,
    latent_dim: int = 512,
    sinks: torch.Tensor | None = None,
    compressed_kv_cache: torch.Tensor | None = None,
    window: int | None = None,
    page_size: int | None = None,
    page_span: int | None = None,
    compressed_page_size: int | None = None,
    compressed_page_span: int | None = None,
    q_scale: Scale | None = None,
    kv_scale: Scale | None = None,
    compressed_kv_scale: Scale | None = None,
    return_lse: Literal[False] = False,
    batch_invariant: bool = False,
    form: str = "auto",
    tokens_per_request: int | None = None,
    deterministic: bool = False,
    return_max_logits: Literal[False] = False,
    implementation: str | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: Workspace | None = None,
) -> torch.Tensor: ...


@overload
def sparse_mla(
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_cache: torch.Tensor,
    indices: torch.Tensor,
    lengths: torch.Tensor | None = None,
    *,
    softmax_scale: Scale,
    latent_dim: int = 512,
    sinks: torch.Tensor | None = None,
    compressed_kv_cache: torch.Tensor | None = None,
    window: int | None = None,
    page_size: int | None = None,
    page_span: int | None = None,
    compressed_page_size: int | None = None,
    compressed_page_span: int | None = None,
    q_scale: Scale | None = None,
    kv_scale: Scale | None = None,
    compressed_kv_scale: Scale | None = None,
    return_lse: Literal[True],
    batch_invariant: bool = False,
    form: str = "auto",
    tokens_per_request: int | None = None,
    deterministic: bool = False,
    return_max_logits: Literal[False] = False,
    implementation: str | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: Workspace | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def sparse_mla(
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_cache: torch.Tensor,
    indices: torch.Tensor,
    lengths: torch.Tensor | None = None,
    *,
    softmax_scale: Scale,
    latent_dim: int = 512,
    sinks: torch.Tensor | None = None,
    compressed_kv_cache: torch.Tensor | None = None,
    window: int | None = None,
    page_size: int | None = None,
    page_span: int | None = None,
    compressed_page_size: int | None = None,
    compressed_page_span: int | None = None,
    q_scale: Scale | None = None,
    kv_scale: Scale | None = None,
    compressed_kv_scale: Scale | None = None,
    return_lse: Literal[False] = False,
    batch_invariant: bool = False,
    form: str = "auto",
    tokens_per_request: int | None = None,
    deterministic: bool = False,
    return_max_logits: Literal[True],
    implementation: str | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: Workspace | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def sparse_mla(
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_cache: torch.Tensor,
    indices: torch.Tensor,
    lengths: torch.Tensor | None = None,
    *,
    softmax_scale: Scale,
    latent_dim: int = 512,
    sinks: torch.Tensor | None = None,
    compressed_kv_cache: torch.Tensor | None = None,
    window: int | None = None,
    page_size: int | None = None,
    page_span: int | None = None,
    compressed_page_size: int | None = None,
    compressed_page_span: int | None = None,
    q_scale: Scale | None = None,
    kv_scale: Scale | None = None,
    compressed_kv_scale: Scale | None = None,
    return_lse: Literal[True],
    batch_invariant: bool = False,
    form: str = "auto",
    tokens_per_request: int | None = None,
    deterministic: bool = False,
    return_max_logits: Literal[True],
    implementation: str | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: Workspace | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


def sparse_mla(
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_cache: torch.Tensor,
    indices: torch.Tensor,
    lengths: torch.Tensor | None = None,
    *,
    softmax_scale: Scale,
    latent_dim: int = 512,
    sinks: torch.Tensor | None = None,
    compressed_kv_cache: torch.Tensor | None = None,
    window: int | None = None,
    page_size: int | None = None,
    page_span: int | None = None,
    compressed_page_size: int | None = None,
    compressed_page_span: int | None = None,
    q_scale: Scale | None = None,
    kv_scale: Scale | None = None,
    compressed_kv_scale: Scale | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    form: str = "auto",
    tokens_per_request: int | None = None,
    deterministic: bool = False,
    return_max_logits: bool = False,
    implementation: str | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: Workspace | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Attention of each query token over the cache slots selected for it, as tsmla_jax.sparse_mla defines it.

    Axes: T query tokens, H query heads (any number), D key width, L latent width, K selected slots a token, P pages,
    Z tokens a page. DeepSeek-V3.2 has D = 576, L = 512 and softmax_scale 192^-0.5 (times yarn's); V4 has D = L = 512.

    Args:
      q: [T, H, D]; float16, bfloat16, or float8_e4m3fn over V3.2 and plain float8_e4m3fn rows. The reference also takes
        float32 and float64, and float8_e4m3fn over all rows. Also the pair (q[..., :L], q[..., L:]), as in mla_decode.
        Hopper's kernel reads a pair as it is over plain rows of q's own 16-bit dtype if there are more than 32 heads
        and more than four tokens (two with more than 64 heads, any number in batch_invariant calls), except a latent
        part [H, ..., L] where a batch_invariant call takes several launches. Other calls join a pair by a copy, unless
        its parts are columns of one tensor.
      kv_cache: uint8 [P, Z, 656], V3.2 packed rows; uint8 [P, page_bytes], V4 packed pages; or plain [P, Z, D] of
        float8_e4m3fn, bfloat16 or float16 (for the reference of any float). Pages may lie a multiple of their size
        apart: one layer's slice of a pool, whose slots cost some further small kernels a call.
      indices: [T, K] int32 slots, page * Z + offset. -1 selects nothing. A slot given twice counts twice. With two
        caches K is a multiple of 4.
      lengths: [T] int32, how many columns of each row are active; the columns after them are never used. None: all K.
      softmax_scale: factor of the logits; a number, or a float32 or float64 scalar tensor on q's device.
      latent_dim: L; the first L columns of a key are its value.
      sinks: [H] float16, bfloat16, float32 or float64, a logit a head that takes weight and has no value: out is
        multiplied by 1 / (1 + exp(sink - lse)). Other dtypes than float32 cost one more kernel a call.
      compressed_kv_cache: a second cache, with rows of the first one's kind (for the reference of any). The first
        `window` columns of indices then select from kv_cache and the others from this one.
      window: given with compressed_kv_cache and only then.
      page_size: rows used of a page: 64 unless given for V4 pages, Z for the others.
      page_span: slots between two pages, for packed V4 pages whose slots were remapped.
      compressed_page_size, compressed_page_span: the same for the second cache.
      q_scale, kv_scale, compressed_kv_scale: q holds query / q_scale and plain caches kv / scale; None is 1, and the
        only legal scale of packed rows. A tensor is read on the device at every call, and at every replay of a CUDA
        graph.
      return_lse: also return the logsumexp of the scaled logits, without the sink.
      batch_invariant: a token's rows are bitwise the same whatever other tokens are in the call.
      form: how the kernel gathers: "direct", each token for itself; or "union", in groups of neighbouring tokens. A
        group gathers the union of its slots once if the device finds that its tokens share enough of them. The heads
        of its tokens add up to 64, or to 32 over plain rows of 576 columns of 16 bits. "auto" chooses by the call's
        options and sizes.
      tokens_per_request: how many neighbouring tokens are of one request, which "auto" considers: 1 in a decoding step
        of one token a request, whose tokens share little. None: not known, or a prompt.
      deterministic: the kernel's gradients of two equal calls are equal bit by bit. It then adds the caches' gradients
        as integers, whose scales take one more pass over the selected keys. torch.use_deterministic_algorithms(True)
        asks for the same everywhere, also of torch operations, on which this argument has no effect.
      return_max_logits: also return the greatest scaled logit of each row and head, as `mla_prefill` does. The kernel
        returns it only with queries of 16 bits, and within 2**-11 (0.0005) of the logit.
      implementation, out, lse, workspace: as in mla_decode; sparse_workspace_size says how much memory a call needs.

    Returns:
      out [T, H, L] in q's dtype, bfloat16 when q is fp8; with return_lse also lse [T, H], float32 (float64 for
      float64), natural logarithm; with return_max_logits then max_logits [T, H] in lse's dtype, -inf in a row of
      no valid index, NaN where lse is, without a derivative. A row of no valid index gives out 0 and lse -inf. NaN in a
      slot that isn't selected never reaches a result.

    q, plain caches of 16 bits or more and sinks have gradients, computed from the saved inputs, out and lse: on a GPU
    by Hopper's kernel, which takes float16 and bfloat16 with D 512 or 576 and L 512, and caches without gaps; on a CPU
    by torch operations. Slots that no token selects have a gradient of 0. Memory is linear in T and in the caches'
    slots: beside the gradients it holds float32 sums [P * Z, D]. On a GPU these raise NotImplementedError: gradients of
    gradients, gradients of scales, gradients of a call over other caches, with kv_scale or compressed_kv_scale, or with
    out=, lse= or workspace=, and forward mode. A graph of torch.compile can't hold such gradients on any device. An
    eager call on a CPU, or with implementation="reference", is ordinary torch operations and has them all.

    Addresses, streams, threads, CUDA graphs (whose replays see new lengths, indices and scales) and torch.compile are
    as mla_decode says; TSMLA_CHECK=1 checks slots and lengths.

    Raises:
      TypeError, ValueError, NotImplementedError, RuntimeError: as mla_decode says.
    """
    # The latest plan's key: a plain tuple, equal to the SparseOptions, which would take time in every call to make.
    options = (
        latent_dim, window, page_size, page_span, compressed_page_size, compressed_page_span, batch_invariant,
        form, tokens_per_request, deterministic, return_max_logits, implementation,
    )  # fmt: skip
    others = (kv_cache, compressed_kv_cache, indices, lengths, sinks)
    is_pair = type(q) is tuple
    inputs: tuple[Any, ...] = (*q, *others) if is_pair else (q, *others)
    scales_given = (softmax_scale, q_scale, kv_scale, compressed_kv_scale)
    unscaled = q_scale is None and kv_scale is None and compressed_kv_scale is None
    compiling = torch.compiler.is_compiling()
    check_workspace(workspace)
    # True equals 1 and 8.0 equals 8, so a plan is looked up only by options of the legal types.
    bools = {type(batch_invariant), type(deterministic), type(return_max_logits)}
    usual = not compiling and type(latent_dim) is int and bools == {bool}
    plan = None
    if usual and not (unscaled and type(softmax_scale) is float) and operators.asks_for_derivative(*scales_given):
        usual = False  # the tensors by which a plan is looked up don't show that
    if usual and _LEGAL_TYPES.issuperset(map(type, (*options[1:6], tokens_per_request))):
        key = (options, is_pair) if is_pair else options
        plan = plans.latest(key, *[tensor for tensor in inputs if tensor is not None])
    if plan is None:
        described = SparseOptions(*options)
        derived = torch.is_grad_enabled() and prefill_launch.derivative_asked_for(*inputs, *scales_given)
        by_operator = derived and not loaded_kernels.is_by_definition(implementation, inputs[0].device)
        if (
            compiling
            or by_operator
            or operators.is_traced(q, kv_cache, compressed_kv_cache, sinks, derivatives=implementation != "reference")
        ):
            named = SparseInputs(tensors.joined(q, latent_dim) if isinstance(q, tuple) else q, *others)
            if derived:
                memory = {"out": out, "lse": lse, "workspace": workspace}
                sparse_backward.check_derivable(named, described, dict(zip(_SCALES, scales_given, strict=True)), memory)
            if isinstance(softmax_scale, scales.Premultiplied):
                factors = softmax_scale.factors
            else:
                for name, scale in zip(_SCALES, scales_given, strict=True):
                    scales.check(name, scale, optional=name != "softmax_scale")
                factors = scales.factors(*scales_given)
            return _call_operator(named, factors, described, return_lse, out, lse, workspace)
        plan, inputs = _plan_for(q, others, described)
        if not loaded_kernels.is_by_definition(implementation, inputs[0].device):
            operators.refuse_tangents("sparse_mla", scales_given)
    if unscaled and type(softmax_scale) is float and LEAST_SCALE <= softmax_scale <= GREATEST_SCALE:
        factors = (softmax_scale, 1.0, 1.0)
    elif isinstance(softmax_scale, scales.Premultiplied):
        factors = softmax_scale.factors
    else:
        given = dict(zip(_SCALES, scales_given, strict=True))
        plan.check_scales(given)
        tensors.same_device("q", inputs[0], given)
        factors = scales.factors(*scales_given)
    if return_max_logits:
        max_logits = operators.new_max_logits(inputs[0])
        results = plan.run(inputs, factors, return_lse, out, lse, workspace, max_logits)
        found: tuple[torch.Tensor, ...] = operators.those_asked_for(*results, max_logits)
        return found
    result, result_lse = plan.run(inputs, factors, return_lse, out, lse, workspace)
    return result if result_lse is None else (result, result_lse)


def _plan_for(
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor], others: tuple[Any, ...], options: SparseOptions
) -> tuple[Plan, tuple[Any, ...]]:
    """The plan of a call, and the tensors that it takes: those of a pair q and the others, unless both parts of q are
    columns of one tensor."""
    query, rope = tensors.query_of_pair(q, options.latent_dim) if isinstance(q, tuple) else (q, None)
    if rope is None:
        inputs = SparseInputs(query, *others)
        return plans.find(inputs, options, make_plan), inputs
    pair = PairInputs(query, rope, *others)
    return plans.find(pair, options, make_pair_plan, (options, True)), pair


WARM_TOKENS = (1, 32, 64, 80, 128, 160, 256, 320, 1 << 14)
"""Numbers of tokens, from few to many, for which engines load kernels ahead: the kernel that serves a call depends on
its number of tokens."""


def reads_pair(spec: SparseMLASpec) -> bool:
    """Whether the kernel that serves `spec` reads a query in two tensors without a copy."""
    return serving_pair(spec, lengths=True, sinks=False, heads_first=False) is not None


def warm(
    spec: SparseMLASpec,
    index: int,
    *,
    lengths: bool = False,
    sinks: bool = False,
    split_q: bool = False,
    heads_first: bool = False,
) -> None:
    """Load the kernel that serves `spec` on device `index`.

    lengths, sinks: whether calls have these arguments.
    split_q: whether queries come in two tensors. heads_first: whether the latent one is [H, T, L].
    """
    pair = serving_pair(spec, lengths=lengths, sinks=sinks, heads_first=heads_first) if split_q else None
    loaded_kernels.launcher(*(pair or serving(spec, lengths=lengths, sinks=sinks)), index)


# ---- the operators


def _run_operator(
    *arguments: Any,
    return_lse: bool = True,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    max_logits: torch.Tensor | None = None,
) -> Any:
    """Run a call with the arguments of _PARAMETERS."""
    inputs, (in_memory, numbers), options = arguments[:_INPUTS], arguments[_INPUTS:_OPTIONS], arguments[_OPTIONS:]
    plan = plans.find(SparseInputs(*inputs), SparseOptions(*options), make_plan)
    factors = tuple(numbers) if in_memory is None else in_memory
    max_logits = _greatest_of(*arguments) if max_logits is None else max_logits
    place = max_logits if plan.spec.max_logits else None
    return *plan.run(inputs, factors, return_lse, out, lse, workspace, place), max_logits


def _greatest_of(*arguments: Any) -> torch.Tensor:
    """A new tensor for the greatest logits; without elements if the call doesn't return them."""
    q, wanted = arguments[0], SparseOptions(*arguments[_OPTIONS:]).max_logits
    return operators.new_max_logits(q if wanted else q[:0])


_SCALES = ("softmax_scale", "q_scale", "kv_scale", "compressed_kv_scale")
_LEGAL_TYPES = frozenset((int, type(None)))  # the types of options that are numbers or None
_INPUTS = len(SparseInputs._fields)
_OPTIONS = _INPUTS + 2
_PARAMETERS = (
    "Tensor q, Tensor kv_cache, Tensor? compressed_kv_cache, Tensor indices, Tensor? lengths, Tensor? sinks,"
    " Tensor? scales, float[] numbers, int latent_dim, SymInt? window, SymInt? page_size, SymInt? page_span,"
    " SymInt? compressed_page_size, SymInt? compressed_page_span, bool batch_invariant,"
    " str form, SymInt? tokens_per_request, bool deterministic, bool return_max_logits, str? implementation"
)
sparse_operator = operators.register_attention(
    "sparse_mla",
    _run_operator,
    _PARAMETERS,
    lambda *arguments: SparseOptions(*arguments[_OPTIONS:]).latent_dim,
    memory=("out", "lse", "workspace", "max_logits"),
    third=_greatest_of,
)


def _run_backward(
    d_out: torch.Tensor, d_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, *arguments: Any
) -> tuple[torch.Tensor, ...]:
    """The gradients of a call's tensors; an empty tensor in the place of one that the call does not have."""
    inputs, (in_memory, numbers) = SparseInputs(*arguments[:_INPUTS]), arguments[_INPUTS:_OPTIONS]
    factors = tuple(numbers) if in_memory is None else in_memory
    saved = sparse_backward.Saved(out, lse, d_out, d_lse)
    found = sparse_backward.gradients(inputs, SparseOptions(*arguments[_OPTIONS:]), factors, saved)
    return tuple(inputs.q.new_empty(0) if x is None else x for x in found)


def _fake_backward(
    d_out: torch.Tensor, d_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, *arguments: Any
) -> tuple[torch.Tensor, ...]:
    inputs = SparseInputs(*arguments[:_INPUTS])
    return tuple(inputs.q.new_empty(0) if x is None else x for x in sparse_backward.new_gradients(inputs))


backward_operator = operators.register(
    "sparse_mla_backward",
    _run_backward,
    f"(Tensor d_out, Tensor d_lse, Tensor out, Tensor lse, {_PARAMETERS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
operators.register_fake(backward_operator, _fake_backward)
operators.refuse_backward(
    backward_operator, "the gradient of sparse_mla", "use implementation='reference' on plain tensors"
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    tensors_given = _INPUTS + 1  # the inputs, then the scales
    ctx.save_for_backward(*output[:2], *inputs[:tensors_given])
    ctx.numbers = inputs[tensors_given:]


def _differentiate(ctx: Any, d_out: torch.Tensor, d_lse: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
    results, inputs = ctx.saved_tensors[:2], ctx.saved_tensors[2:]
    found = backward_operator(d_out, d_lse, *results, *inputs, *ctx.numbers)
    given = dict(zip(SparseInputs._fields, inputs, strict=False))
    by_name = dict(zip(sparse_backward.Gradients._fields, found, strict=True))
    by_name = {name: gradient for name, gradient in by_name.items() if given[name] is not None}
    others = (None for _ in ctx.needs_input_grad[_INPUTS:])
    return *(by_name.get(name) for name in SparseInputs._fields), *others


sparse_operator.register_autograd(_differentiate, setup_context=_save)


def _call_operator(
    inputs: SparseInputs,
    factors: Factors,
    options: SparseOptions,
    return_lse: bool,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    workspace: Workspace | None,
) -> Any:
    """Call sparse_mla as an operator."""
    scales_given = (factors, ()) if isinstance(factors, torch.Tensor) else (None, factors)
    arguments = (*inputs, *scales_given, *options)
    return operators.call_attention(
        "sparse_mla", arguments, options.latent_dim, return_lse, out, lse, workspace, max_logits=options.max_logits
    )

"""mla_decode: absorbed multi-head latent attention over a paged cache, on torch tensors."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch

from tsmla_bridge import operators
from tsmla_bridge.ops.decode_plans import DecodeInputs, DecodeOptions, plan_for, plan_of_latest
from tsmla_bridge.runtime import loaded_kernels, scales, tensors
from tsmla_bridge.runtime.results import Computed, Results
from tsmla_bridge.runtime.scales import Pair
from tsmla_bridge.runtime.tensors import Scale
from tsmla_bridge.runtime.workspace import Workspace, check_workspace
from tsmla_kernels.catalog import MLA_DECODE
from tsmla_kernels.contract import DecodeSpec
from tsmla_kernels.contract.rules import GREATEST_SCALE, LEAST_SCALE
from tsmla_kernels.sm90.decode import config as sm90_decode


@overload
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
    visible_lens: torch.Tensor | None = None,
    q_scale: Scale | None = None,
    kv_scale: Scale | None = None,
    return_lse: Literal[False] = False,
    batch_invariant: bool = False,
    fp8_probabilities: bool = False,
    implementation: str | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: Workspace | None = None,
) -> torch.Tensor: ...


@overload
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
    visible_lens: torch.Tensor | None = None,
    q_scale: Scale | None = None,
    kv_scale: Scale | None = None,
    return_lse: Literal[True],
    batch_invariant: bool = False,
    fp8_probabilities: bool = False,
    implementation: str | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: Workspace | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...


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
    visible_lens: torch.Tensor | None = None,
    q_scale: Scale | None = None,
    kv_scale: Scale | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    fp8_probabilities: bool = False,
    implementation: str | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: Workspace | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of the last query tokens of each request over its latent cache (absorbed MLA, one key head), as
    tsmla_jax.mla_decode defines it: DeepSeek-V2's formulation (arXiv:2405.04434), the masks of vLLM and SGLang.

    Axes: B requests, S query tokens a request, T query tokens over all requests, H query heads, L latent width, R rope
    width, D = L + R, P pages, Z tokens a page, M pages a request at most.

    Args:
      q: [B, S, H, D], or ragged [T, H, D] with cu_seqlens_q and max_q_len; latent columns first, rope last. float16,
        bfloat16 or float8_e4m3fn; in torch operations also float32 and float64. Or a pair of latent and rope columns:
        q[..., :L] and q[..., L:] of one such tensor; or two tensors, the latent one dense, and the rope one in rows of
        one stride, a multiple of 16 bytes, as a slice of a wider tensor has them. The latent one may also be dense as
        [H, ..., L], if H is a power of 2 and L a multiple of 64. Hopper's kernels copy no query, except a latent part
        [H, ..., L] where a batch_invariant call takes several launches. Torch operations and calls on Blackwell join
        two tensors by a copy; a call that runs as an operator of torch (under torch.compile or a dispatch mode, or for
        a derivative) joins every pair so.
      kv_cache: [P, Z, D] or [P, 1, Z, D], latent first, rope last, in q's dtype or float8_e4m3fn (any of q's
        dtypes with a float32 or float64 q). Pages may lie a multiple of Z * D elements apart: one layer's slice of a
        pool.
      block_tables: [B, M] int32; entries past a request's last page are never used. May be the first columns of a wider
        table, except in a batch_invariant call of Hopper's kernels over a cache without gaps.
      seq_lens: [B] int32, keys of each request, its new tokens included; 0 is legal.
      softmax_scale: factor of the logits; a number, or a float32 or float64 scalar tensor on q's device.
      latent_dim: L, at least R; R = 0 (L = D) is legal.
      cu_seqlens_q, max_q_len: for ragged q: [B + 1] int32, the row where each request's query tokens start, and
        their end; and a bound on the number of a request's query tokens. Rows past the bound give 0, -inf.
      causal: query i of S sees key j iff j < seq_len - (S - 1) + i; otherwise iff j < seq_len.
      visible_lens: [B, S] or, with ragged q, [T] int32, in place of the causal rule: a token with the entry n sees the
        first min(n, seq_len) keys of its request, and none if n is negative. Legal with causal=True. For decode context
        parallelism, which deals a request's keys out to ranks: the causal rule does not say how many of a rank's keys a
        token sees.
      q_scale, kv_scale: q holds query / q_scale and kv_cache holds kv / kv_scale; None is 1. Numbers, or float32
        or float64 scalar tensors; a tensor is read on the device at every call, and at every replay of a CUDA graph.
        Scales are from 2^-126 to 2^126; that is checked of numbers, and a tensor with another value gives rows without
        meaning.
      return_lse: also return the logsumexp of the scaled logits.
      batch_invariant: a request's rows are bitwise the same whatever else is in the batch.
      fp8_probabilities: Hopper's kernel may round the softmax's terms to float8_e4m3fn before it multiplies them by
        values: faster with many rows (S * H), less exact. With q of float8_e4m3fn only.
      implementation: "cute" (the kernels), "reference" (the definition in torch operations), or None: the kernels for
        tensors on Hopper, the reference for CPU tensors. On Blackwell kernels must be named: no one has run them.
      out, lse: contiguous tensors for the results; lse only with return_lse.
      workspace: memory for intermediate results; torch's allocator gives it otherwise.

    Returns:
      out [B, S, H, L] (or [T, H, L]) in q's dtype, bfloat16 when q is fp8; with return_lse also lse [B, S, H] (or [T,
      H]), float32 (float64 for float64), natural logarithm. A row that sees no key gives out 0 and lse -inf.

    NaN in new tokens' keys and unsound lengths, pages and offsets do what tsmla_jax.mla_decode says; rows that have no
    meaning there may differ from jax's.

    Hopper's kernels take q, kv_cache and out at multiples of 16 bytes, where torch allocates tensors. The kernels run
    on torch's current stream and, except under TSMLA_CHECK=1, nothing waits for the device. In a capture no data is
    checked, so CUDA graphs can capture calls once a call of the same static sizes has loaded its kernel. Calls from
    several threads and on several streams are independent. torch.compile takes them as one operator. The kernels have
    no derivative; the reference has. TSMLA_CHECK=1 checks what only the data shows: lengths, pages, offsets and
    visible_lens. Calls of the kernels keep the variable's value from the first call of the same shapes.

    Raises:
      TypeError, ValueError: an argument is not legal; the message names it, what it got and what is legal.
      NotImplementedError: the implementation can't run this call, with every reason.
      RuntimeError: CUDA refused a launch, or a kernel would have to be loaded during a capture.
    """
    check_workspace(workspace)
    # The latest plan's key: a plain tuple, equal to the DecodeOptions, which would take 0.3 us of every call to make.
    options = (latent_dim, max_q_len, causal, batch_invariant, fp8_probabilities, implementation)
    compiling = torch.compiler.is_compiling()
    query: Any = q  # one tensor as soon as there is a plan: all columns of q, or with `rope` the latent ones
    rope: torch.Tensor | None = None
    pair: Pair
    # 8.0 and True are equal to 8 and 1: a plan is looked up only by options of the legal types.
    usual = (
        type(latent_dim) is int
        and (max_q_len is None or type(max_q_len) is int)
        and (causal is True or causal is False)
        and (batch_invariant is True or batch_invariant is False)
        and (fp8_probabilities is True or fp8_probabilities is False)
        and not compiling
    )
    plan = None
    numbers = type(softmax_scale) is float and q_scale is None and (kv_scale is None or type(kv_scale) is float)
    derived = not (numbers or compiling) and operators.asks_for_derivative(softmax_scale, q_scale, kv_scale)
    if usual and not derived:  # the tensors by which a plan is looked up don't show the scales' derivatives
        plan = plan_of_latest(q, kv_cache, block_tables, seq_lens, cu_seqlens_q, options, visible_lens)
    if plan is None:
        named, others = DecodeOptions(*options), (kv_cache, block_tables, seq_lens, cu_seqlens_q, visible_lens)
        by_operator = derived and not loaded_kernels.is_by_definition(implementation, kv_cache.device)
        if by_operator or compiling or operators.is_traced(q, kv_cache, derivatives=implementation != "reference"):
            inputs = DecodeInputs(_concatenated(q, latent_dim), *others)
            if isinstance(softmax_scale, scales.Premultiplied):
                pair = softmax_scale.factors
            else:
                _check_scales(softmax_scale, q_scale, kv_scale)
                pair = scales.product(softmax_scale, q_scale, kv_scale, kv_scale)
            return call_operator(inputs, pair, named, return_lse, out, lse, workspace)
        query, rope = (q, None) if isinstance(q, torch.Tensor) else tensors.query_of_pair(q, latent_dim)
        plan = plan_for(DecodeInputs(query, *others, rope), named)
    elif type(q) is tuple:
        query, rope = q
    if type(softmax_scale) is not float or not LEAST_SCALE <= softmax_scale <= GREATEST_SCALE or q_scale is not None:
        pair = _checked_pair(query, softmax_scale, q_scale, kv_scale)
    elif kv_scale is None:
        pair = (softmax_scale, 1.0)
    elif type(kv_scale) is float and LEAST_SCALE <= kv_scale <= GREATEST_SCALE:
        pair = (softmax_scale * kv_scale, kv_scale)
    elif scales.is_usual(kv_scale, query):
        pair = scales.product(softmax_scale, None, kv_scale, kv_scale)
    else:
        pair = _checked_pair(query, softmax_scale, None, kv_scale)
    result, result_lse = plan.run(
        query, kv_cache, block_tables, seq_lens, cu_seqlens_q,
        pair=pair, return_lse=return_lse, out=out, lse=lse, workspace=workspace, q_rope=rope, visible_lens=visible_lens,
    )  # fmt: skip
    return result if result_lse is None else (result, result_lse)


def _checked_pair(query: torch.Tensor, softmax_scale: Scale, q_scale: Scale | None, kv_scale: Scale | None) -> Pair:
    """What logits and outputs are multiplied by, from a call's scales; raises what mla_decode raises for illegal
    scales."""
    if isinstance(softmax_scale, scales.Premultiplied):
        return softmax_scale.factors
    _check_scales(softmax_scale, q_scale, kv_scale)
    tensors.same_device("q", query, {"softmax_scale": softmax_scale, "q_scale": q_scale, "kv_scale": kv_scale})
    return scales.product(softmax_scale, q_scale, kv_scale, kv_scale)


def _check_scales(softmax_scale: Scale, q_scale: Scale | None, kv_scale: Scale | None) -> None:
    scales.check("softmax_scale", softmax_scale, optional=False)
    scales.check("q_scale", q_scale)
    scales.check("kv_scale", kv_scale)


def warm(spec: DecodeSpec, index: int, *, split_q: bool = False, heads_first: bool = False) -> None:
    """Load the kernel that serves `spec` on device `index`.

    split_q: whether queries come in two tensors.
    heads_first: whether the latent one is [H, ..., L].
    """
    config = sm90_decode.decode_config(spec, split_q=split_q, heads_first=heads_first)
    loaded_kernels.launcher(MLA_DECODE, config, index)


# ---- the operators


def _run_operator(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    visible_lens: torch.Tensor | None,
    pair_tensor: torch.Tensor | None,
    logit_scale: float,
    out_scale: float,
    *options: Any,
    return_lse: bool = True,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: Workspace | None = None,
) -> Results:
    inputs = DecodeInputs(q, kv_cache, block_tables, seq_lens, cu_seqlens_q, visible_lens)
    pair = operators.pair_of(pair_tensor, logit_scale, out_scale)
    plan = plan_for(inputs, DecodeOptions(*options))
    return plan.run(
        *inputs[:5], pair=pair, return_lse=return_lse, out=out, lse=lse, workspace=workspace, visible_lens=visible_lens
    )


_PARAMETERS = (
    "Tensor q, Tensor kv_cache, Tensor block_tables, Tensor seq_lens, Tensor? cu_seqlens_q, Tensor? visible_lens,"
    f" {operators.PAIR_SCHEMA}, int latent_dim, SymInt? max_q_len, bool causal, bool batch_invariant,"
    " bool fp8_probabilities, str? implementation"
)
decode_operator = operators.register_attention(
    "mla_decode",
    _run_operator,
    _PARAMETERS,
    lambda *arguments: DecodeOptions(*arguments[-len(DecodeOptions._fields) :]).latent_dim,
    memory=("out", "lse", "workspace"),
)
operators.refuse_backward(
    decode_operator,
    "mla_decode",
    "train through expanded attention, or use implementation='reference' on plain tensors",
)


def call_operator(
    inputs: DecodeInputs,
    pair: Pair,
    options: DecodeOptions,
    return_lse: bool,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    workspace: Workspace | None,
) -> torch.Tensor | Computed:
    """Call mla_decode as an operator."""
    arguments = (*inputs[:6], *operators.pair_arguments(pair), *options)
    return operators.call_attention("mla_decode", arguments, options.latent_dim, return_lse, out, lse, workspace)


def _concatenated(q: Any, latent_dim: int) -> torch.Tensor:
    """The query as one tensor. A pair is copied: traced tensors have no addresses that would show that its parts lie
    side by side."""
    return tensors.joined(q, latent_dim) if isinstance(q, tuple) else q

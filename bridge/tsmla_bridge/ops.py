"""The operations as operators of torch.library, which is how torch.compile, torch.export and dispatch modes see them.

An eager call on plain tensors goes past them: the dispatcher and its Python bindings would cost more than all the rest
of a call. Scales arrive as the two numbers that the kernels multiply by, or as one tensor [2] of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch

from tsmla_bridge import scales, tensors
from tsmla_bridge.scales import Pair
from tsmla_bridge.workspace import Workspace
from tsmla_kernels import contract

_SCALES = "Tensor? scales, float logit_scale, float out_scale"
_DECODE = (
    "Tensor q, Tensor kv_cache, Tensor block_tables, Tensor seq_lens, Tensor? cu_seqlens_q,"
    f" {_SCALES}, int latent_dim, SymInt? max_q_len, bool causal, bool batch_invariant, str? implementation"
)
_PREFILL = (
    f"Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_kv, {_SCALES},"
    " SymInt max_q_len, SymInt max_kv_len, bool causal, str? implementation"
)
_INTO = "Tensor(a!) out, Tensor(b!)? lse, Tensor(c!)? workspace"
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_watching = torch._C._len_torch_dispatch_stack  # how many dispatch modes look on

Results = tuple[torch.Tensor, torch.Tensor]
T = TypeVar("T")


def is_traced(*values: Any) -> bool:
    """Whether a call on these must be seen as one operator: they are tensors of another class (fake ones, say), without
    memory, or on a GPU with a derivative asked for, or a dispatch mode looks on."""
    if _watching():
        return True
    for value in values:
        kind = type(value)
        if kind is tuple and value:
            value = value[0]
            kind = type(value)
        if kind in _PLAIN:
            if value.is_meta or (value.requires_grad and value.is_cuda and torch.is_grad_enabled()):
                return True
        elif isinstance(value, torch.Tensor):
            return True
    return False


def _without_keeping(function: Callable[..., T]) -> Callable[..., T]:
    """The function, whose calls leave no scales in memory that may be a graph's."""

    @functools.wraps(function)
    def run(*arguments: Any) -> T:
        with scales.none_kept():
            return function(*arguments)

    return run


# ---- mla_decode


@torch.library.custom_op("tsmla::mla_decode", mutates_args=(), schema=f"({_DECODE}) -> (Tensor, Tensor)")
@_without_keeping
def decode_op(
    q: Any,
    kv_cache: Any,
    block_tables: Any,
    seq_lens: Any,
    cu_seqlens_q: Any,
    scales: Any,
    logit_scale: float,
    out_scale: float,
    *options: Any,
) -> Results:
    """(out, lse) of mla_decode."""
    from tsmla_bridge import decode

    plan = decode.plan_for(q, kv_cache, block_tables, seq_lens, cu_seqlens_q, options)
    pair = _pair(scales, logit_scale, out_scale)
    out, lse = plan.run((q, kv_cache, block_tables, seq_lens, cu_seqlens_q, pair, True, None, None, None))
    assert lse is not None
    return out, lse


@decode_op.register_fake
def _(q: Any, kv_cache: Any, *arguments: Any) -> Results:
    latent_dim = arguments[6]
    return _fake_results(q, latent_dim)


@torch.library.custom_op(
    "tsmla::mla_decode_into", mutates_args=("out", "lse", "workspace"), schema=f"({_DECODE}, {_INTO}) -> ()"
)
@_without_keeping
def decode_into_op(
    q: Any,
    kv_cache: Any,
    block_tables: Any,
    seq_lens: Any,
    cu_seqlens_q: Any,
    scales: Any,
    logit_scale: float,
    out_scale: float,
    *rest: Any,
) -> None:
    """mla_decode, its results written to `out` and, if it is given, `lse`."""
    from tsmla_bridge import decode

    *options, out, lse, workspace = rest
    plan = decode.plan_for(q, kv_cache, block_tables, seq_lens, cu_seqlens_q, tuple(options))
    pair = _pair(scales, logit_scale, out_scale)
    lent = None if workspace is None else Workspace.of(workspace)
    plan.run((q, kv_cache, block_tables, seq_lens, cu_seqlens_q, pair, lse is not None, out, lse, lent))


@decode_into_op.register_fake
def _(*arguments: Any) -> None:
    return None


def call_decode(
    q: Any,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    pair: Pair,
    options: tuple[Any, ...],
    return_lse: bool,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    workspace: Workspace | None,
) -> Any:
    """A call of mla_decode as an operator. A pair for q is concatenated: traced tensors have no addresses to tell that
    its halves lie side by side."""
    if isinstance(q, tuple):
        q = torch.cat(q, -1)
    given = (q, kv_cache, block_tables, seq_lens, cu_seqlens_q, *_scale_arguments(pair), *options)
    if out is None and lse is None and workspace is None:
        results = torch.ops.tsmla.mla_decode(*given)
        return results if return_lse else results[0]
    shapes = _fake_results(q, options[0])
    out = shapes[0] if out is None else out
    lse = shapes[1] if lse is None and return_lse else lse
    torch.ops.tsmla.mla_decode_into(*given, out, lse, None if workspace is None else workspace.buffer)
    return (out, lse) if return_lse else out


# ---- mla_prefill


@torch.library.custom_op("tsmla::mla_prefill", mutates_args=(), schema=f"({_PREFILL}) -> (Tensor, Tensor)")
@_without_keeping
def prefill_op(*arguments: Any) -> Results:
    """(out, lse) of mla_prefill."""
    from tsmla_bridge import prefill

    out, lse = prefill.run(*_prefill_arguments(arguments, True))
    assert lse is not None
    return out, lse


@prefill_op.register_fake
def _(q: Any, k: Any, v: Any, *arguments: Any) -> Results:
    return _fake_results(q, v.shape[-1])


@torch.library.custom_op(
    "tsmla::mla_prefill_into",
    mutates_args=("out", "lse"),
    schema=f"({_PREFILL}, Tensor(a!) out, Tensor(b!)? lse) -> ()",
)
@_without_keeping
def prefill_into_op(*arguments: Any) -> None:
    """mla_prefill, its results written to `out` and, if it is given, `lse`."""
    from tsmla_bridge import prefill

    *given, out, lse = arguments
    prefill.run(*_prefill_arguments(given, lse is not None, out, lse))


@prefill_into_op.register_fake
def _(*arguments: Any) -> None:
    return None


def call_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    offsets: tuple[torch.Tensor, torch.Tensor],
    pair: Pair,
    options: tuple[Any, ...],
    return_lse: bool,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> Any:
    """A call of mla_prefill as an operator."""
    given = (q, k, v, *offsets, *_scale_arguments(pair), *options)
    if out is None and lse is None:
        results = torch.ops.tsmla.mla_prefill(*given)
        return results if return_lse else results[0]
    shapes = _fake_results(q, v.shape[-1])
    out = shapes[0] if out is None else out
    lse = shapes[1] if lse is None and return_lse else lse
    torch.ops.tsmla.mla_prefill_into(*given, out, lse)
    return (out, lse) if return_lse else out


# ---- the cache, and merging


@torch.library.custom_op(
    "tsmla::write_kv_cache",
    mutates_args=("kv_cache",),
    schema="(Tensor(a!) kv_cache, Tensor latent, Tensor? k_rope, Tensor slot_mapping, Tensor? kv_scale_tensor,"
    " float? kv_scale, str? implementation) -> ()",
)
@_without_keeping
def write_op(
    kv_cache: Any, latent: Any, k_rope: Any, slot_mapping: Any, tensor: Any, number: Any, implementation: str | None
) -> None:
    """write_kv_cache, in place."""
    from tsmla_bridge import kv_cache as module

    module.write(kv_cache, latent, k_rope, slot_mapping, number if tensor is None else tensor, implementation)


@write_op.register_fake
def _(*arguments: Any) -> None:
    return None


@torch.library.custom_op(
    "tsmla::gather_kv_cache",
    mutates_args=(),
    schema="(Tensor kv_cache, Tensor block_tables, Tensor starts, Tensor lens, SymInt total_len,"
    " Tensor? kv_scale_tensor, float? kv_scale, ScalarType? out_dtype, str? implementation) -> Tensor",
)
@_without_keeping
def gather_op(
    kv_cache: Any,
    block_tables: Any,
    starts: Any,
    lens: Any,
    total_len: int,
    tensor: Any,
    number: Any,
    out_dtype: Any,
    implementation: str | None,
) -> torch.Tensor:
    """gather_kv_cache."""
    from tsmla_bridge import kv_cache as module

    scale = number if tensor is None else tensor
    return module.gather(kv_cache, block_tables, starts, lens, total_len, scale, out_dtype, implementation)


@gather_op.register_fake
def _(kv_cache: Any, block_tables: Any, starts: Any, lens: Any, total_len: Any, *options: Any) -> Any:
    dtype = options[2]
    return kv_cache.new_empty((total_len, kv_cache.shape[-1]), dtype=dtype or _out_dtype(kv_cache))


@torch.library.custom_op(
    "tsmla::merge_attention_states",
    mutates_args=(),
    schema="(Tensor[] outs, Tensor[] lses, str? implementation) -> (Tensor, Tensor)",
)
def merge_op(outs: Any, lses: Any, implementation: str | None) -> Results:
    """merge_attention_states."""
    from tsmla_bridge import merge

    return merge.run(outs, lses, implementation)


@merge_op.register_fake
def _(outs: Any, lses: Any, implementation: str | None) -> Results:
    dense = torch.contiguous_format
    return torch.empty_like(outs[0], memory_format=dense), torch.empty_like(lses[0], memory_format=dense)


# ---- what they share


def _refuse(name: str, alternative: str) -> Any:
    def backward(context: Any, *gradients: Any) -> NoReturn:
        raise contract.not_differentiable(name, alternative)

    return backward


decode_op.register_autograd(
    _refuse("mla_decode", "train through expanded attention, or use implementation='reference' on plain tensors")
)
prefill_op.register_autograd(_refuse("mla_prefill", "use implementation='reference' on plain tensors"))
gather_op.register_autograd(_refuse("gather_kv_cache", "an eager call has one"))
merge_op.register_autograd(_refuse("merge_attention_states", "an eager call has one"))


def scale_arguments(scale: Any) -> tuple[torch.Tensor | None, float | None]:
    """A scale as an operator takes it: a tensor or a number."""
    return (scale, None) if isinstance(scale, torch.Tensor) else (None, scale)


def _scale_arguments(pair: Pair) -> tuple[torch.Tensor | None, float, float]:
    return (pair, 1.0, 1.0) if isinstance(pair, torch.Tensor) else (None, *pair)


def _pair(scales: torch.Tensor | None, logit_scale: float, out_scale: float) -> Pair:
    return (logit_scale, out_scale) if scales is None else scales


def _prefill_arguments(arguments: Any, return_lse: bool, out: Any = None, lse: Any = None) -> tuple[Any, ...]:
    """prefill.run's arguments from the operator's, with one pair in place of the three that carry it."""
    from tsmla_bridge.prefill import Inputs

    *inputs, scales, logit_scale, out_scale, max_q_len, max_kv_len, causal, implementation = arguments
    options = (max_q_len, max_kv_len, causal, implementation)
    return (Inputs(*inputs), _pair(scales, logit_scale, out_scale), options, return_lse, out, lse)


def _fake_results(q: torch.Tensor, width: int) -> Results:
    """New tensors of attention's shapes and dtypes; lse as the contract has it."""
    lse = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*q.shape[:-1], width), dtype=_out_dtype(q)), q.new_empty(q.shape[:-1], dtype=lse)


def _out_dtype(tensor: torch.Tensor) -> torch.dtype:
    return tensors.DTYPES[contract.attention_out_dtype(tensors.dtype_name(tensor.dtype))]

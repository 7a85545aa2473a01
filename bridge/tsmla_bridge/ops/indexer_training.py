"""indexer_selected_logits and indexer_loss on torch tensors: what trains the indexer of DeepSeek-V3.2 and V4.

Both are computed in torch operations, block by block, and their gradients compute the blocks again. They run eagerly,
under torch.compile and in CUDA graphs.
"""

from __future__ import annotations

from typing import Any

import torch

from tsmla_bridge import indexer_reference, operators
from tsmla_bridge.indexer_reference import Attention, Index, Where
from tsmla_bridge.runtime import data_checks, scales, tensors
from tsmla_bridge.runtime.tensors import Scale
from tsmla_kernels import contract
from tsmla_kernels.contract import values
from tsmla_kernels.contract.indexer import (
    IndexerLossSpec,
    SelectedLogitsSpec,
    indexer_loss_spec,
    indexer_selected_logits_spec,
)

_SEVERAL_TIMES = "train on the first one; tsmla_jax's implementation='reference' can be differentiated several times"


def indexer_selected_logits(
    q: torch.Tensor,
    weights: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    lengths: torch.Tensor | None = None,
    *,
    implementation: str | None = None,
) -> torch.Tensor:
    """The indexer's score of the keys in the slots selected for each query token, as tsmla_jax.indexer_selected_logits
    defines it; differentiable in q, weights and k_cache.

    Args:
      q: [T, Hi, Di]; float16, bfloat16, float32 or float64.
      weights: [T, Hi] float32 or float64, constants folded in.
      k_cache: [P, Z, Di] plain keys of such a dtype; packed keys and values of 8 bits are refused.
      indices: [T, K] int32 slots, page * Z + offset; -1 selects nothing.
      lengths: [T] int32, the active columns of each row; None: all K.
      implementation: "reference" (torch operations by blocks of tokens and columns) or None, which is the same.

    Returns:
      [T, K] float32 (float64 for float64 weights), -inf in a column that selects no key.
    Raises:
      TypeError, ValueError: an argument is not legal; the message names it, what it got and what is legal.
      NotImplementedError: the named implementation can't run this call; or it is inside torch.func.grad, vjp, jvp or
        torch.vmap; or a tensor that it is differentiable in has a tangent of forward mode; or a second derivative is
        asked for.
    """
    _check_implementation("indexer_selected_logits", implementation)
    if not torch.compiler.is_compiling():
        _check_tensors(q=q, weights=weights, k_cache=k_cache, indices=indices)
        _check_optional(lengths=lengths)
        operators.refuse_transformed("indexer_selected_logits", otherwise="")
        operators.refuse_tangents("indexer_selected_logits", (q, weights, k_cache))
    logits: torch.Tensor = torch.ops.tsmla.indexer_selected_logits(q, weights, k_cache, indices, lengths)
    return logits


def indexer_loss(
    index_q: torch.Tensor,
    index_weights: torch.Tensor,
    index_cache: torch.Tensor,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    lse: torch.Tensor,
    *,
    softmax_scale: Scale,
    indices: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    block_tables: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    implementation: str | None = None,
) -> torch.Tensor:
    """The loss of DeepSeek-V3.2's indexer for each query token, KL(p || softmax(I)) over its keys, as
    tsmla_jax.indexer_loss defines it; differentiable only in the indexer's tensors.

    Args:
      index_q: [T, Hi, Di], the indexer's queries; float16, bfloat16, float32 or float64.
      index_weights: [T, Hi] float32 or float64, constants folded in.
      index_cache: [P, Z, Di], the indexer's keys.
      q: [T, H, D], the attention's queries against kv_cache, as sparse_mla takes them.
      kv_cache: [P, Z, D], the attention's keys. Values of 8 bits are refused in all of these.
      lse: [T, H] float32 or float64, natural logarithm, without sinks: sparse_mla's, or mla_prefill's in the dense
        warm-up.
      softmax_scale: the attention's, a number, or a float32 or float64 scalar tensor.
      indices: [T, K] int32 slots, page * Z + offset; -1 selects nothing.
      lengths: [T] int32, the active columns of indices; None: all K.
      block_tables, seq_lens, cu_seqlens_q: without indices, the keys that each token sees, as in indexer_logits.
      sinks: [H] float16, bfloat16, float32 or float64, V4's, or None.
      implementation: "reference" (torch operations by blocks of tokens and keys) or None, which is the same.

    Returns:
      [T] float32 (float64 for float64 index_weights), at least 0; 0 for tokens without a key, and where
      exp(score - lse) is 0 in float32 for every key and head.
    Raises:
      TypeError, ValueError: an argument is not legal; the message names it, what it got and what is legal.
      NotImplementedError: the named implementation can't run this call; or it is inside torch.func.grad, vjp, jvp or
        torch.vmap; or a tensor that it is differentiable in has a tangent of forward mode; or a second derivative is
        asked for.
    """
    _check_implementation("indexer_loss", implementation)
    scales.check("softmax_scale", softmax_scale, optional=False)
    if not torch.compiler.is_compiling():
        _check_tensors(
            index_q=index_q, index_weights=index_weights, index_cache=index_cache, q=q, kv_cache=kv_cache, lse=lse
        )  # fmt: skip
        _check_optional(
            indices=indices, lengths=lengths, block_tables=block_tables, seq_lens=seq_lens, cu_seqlens_q=cu_seqlens_q,
            sinks=sinks,
        )  # fmt: skip
        operators.refuse_transformed("indexer_loss", otherwise="")
        operators.refuse_tangents("indexer_loss", (index_q, index_weights, index_cache))
    # No gradient passes through the attention's side.
    attention = [None if x is None else x.detach() for x in (q, kv_cache, lse, sinks)]
    scale = softmax_scale.detach() if isinstance(softmax_scale, torch.Tensor) else softmax_scale
    where = (indices, lengths, block_tables, seq_lens, cu_seqlens_q)
    loss: torch.Tensor = torch.ops.tsmla.indexer_loss(
        index_q, index_weights, index_cache, *attention, *where, *operators.scale_arguments(scale)
    )[0]
    return loss


def _check_implementation(name: str, implementation: str | None) -> None:
    if implementation == "cute":
        raise contract.not_runnable(name, implementation, ["there is no kernel for this operation yet"])
    if implementation not in (None, "reference"):
        raise contract.unknown_implementation(implementation, ("cute", "reference"))


def _check_tensors(**given: Any) -> None:
    """TypeError unless all are tensors: the operator's own error would not say what is legal."""
    for name, value in given.items():
        tensors.describe(name, value)


def _check_optional(**given: Any) -> None:
    """TypeError unless each is a tensor or None."""
    _check_tensors(**{name: value for name, value in given.items() if value is not None})


# ---- the operators


def _selected_spec(
    q: torch.Tensor,
    weights: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    lengths: torch.Tensor | None,
) -> SelectedLogitsSpec:
    given: dict[str, Any] = {"q": q, "weights": weights, "k_cache": k_cache, "indices": indices, "lengths": lengths}
    return tensors.describe_call(indexer_selected_logits_spec, **given)


def _selected_logits(*arrays: Any) -> torch.Tensor:
    spec = _selected_spec(*arrays)
    _check_selected(spec, *arrays[3:])
    return indexer_reference.selected_logits(spec, *arrays)


def _check_selected(spec: SelectedLogitsSpec, indices: torch.Tensor, lengths: torch.Tensor | None) -> None:
    slots = spec.cache.num_pages * spec.cache.page_size

    def check(spec: Any, *arrays: Any) -> None:
        values.selected(spec.num_selected, slots, *arrays)

    data_checks.check(check, spec, indices, lengths)


def _selected_backward(d_logits: torch.Tensor, *arrays: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return indexer_reference.selected_logits_backward(_selected_spec(*arrays), d_logits, *arrays)


_SELECTED = "Tensor q, Tensor weights, Tensor k_cache, Tensor indices, Tensor? lengths"
selected_operator = operators.register("indexer_selected_logits", _selected_logits, f"({_SELECTED}) -> Tensor")
selected_backward_operator = operators.register(
    "indexer_selected_logits_backward",
    _selected_backward,
    f"(Tensor d_logits, {_SELECTED}) -> (Tensor, Tensor, Tensor)",
)


def _save_selected(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate_selected(ctx: Any, d_logits: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return *selected_backward_operator(d_logits.contiguous(), *ctx.saved_tensors), None, None


def _fake_selected(q: Any, weights: Any, k_cache: Any, indices: Any, *_: Any) -> Any:
    return weights.new_empty(indices.shape)


def _fake_gradients(*arrays: Any) -> Any:
    return tuple(x.new_empty(x.shape) for x in arrays)


selected_operator.register_autograd(_differentiate_selected, setup_context=_save_selected)
operators.register_fake(selected_operator, _fake_selected)
operators.register_fake(selected_backward_operator, lambda d_logits, *arrays: _fake_gradients(*arrays[:3]))
operators.refuse_backward(selected_backward_operator, "the gradient of indexer_selected_logits", _SEVERAL_TIMES)

_INDEX, _ATTENTION, _WHERE = 3, 4, 5


def _loss_call(arrays: tuple[Any, ...]) -> tuple[IndexerLossSpec, Index, Attention, Where]:
    """The spec of a call and its tensors by name, from the operator's arguments."""
    index, rest = Index(*arrays[:_INDEX]), arrays[_INDEX:]
    where = Where(*rest[_ATTENTION : _ATTENTION + _WHERE])
    scale = operators.scale_of(*rest[_ATTENTION + _WHERE :])
    assert scale is not None
    q, kv_cache, lse, sinks = rest[:_ATTENTION]
    attention = Attention(q=q, kv_cache=kv_cache, lse=lse, sinks=sinks, scale=scale)
    spec = tensors.describe_call(
        indexer_loss_spec,
        index_q=index.q,
        index_weights=index.weights,
        index_cache=index.cache,
        q=attention.q,
        kv_cache=attention.kv_cache,
        lse=attention.lse,
        sinks=attention.sinks,
        softmax_scale=scale,
        **where._asdict(),
    )
    return spec, index, attention, where


def _loss(*arrays: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    spec, index, attention, where = _loss_call(arrays)
    if where.indices is not None:
        _check_selected(spec.index, where.indices, where.lengths)
    else:
        data_checks.check(
            values.indexer_logits, spec.all_logits, where.seq_lens, where.block_tables, where.cu_seqlens_q
        )
    return indexer_reference.loss(spec, index, attention, where)


def _loss_backward(d_loss: torch.Tensor, mass: torch.Tensor, choice_lse: torch.Tensor, *arrays: Any) -> Any:
    spec, index, attention, where = _loss_call(arrays)
    return indexer_reference.loss_backward(spec, (d_loss, mass, choice_lse), index, attention, where)


_LOSS = (
    "Tensor index_q, Tensor index_weights, Tensor index_cache, Tensor q, Tensor kv_cache, Tensor lse, Tensor? sinks,"
    " Tensor? indices, Tensor? lengths, Tensor? block_tables, Tensor? seq_lens, Tensor? cu_seqlens_q,"
    " Tensor? softmax_scale_tensor, float? softmax_scale"
)
loss_operator = operators.register("indexer_loss", _loss, f"({_LOSS}) -> (Tensor, Tensor, Tensor)")
loss_backward_operator = operators.register(
    "indexer_loss_backward",
    _loss_backward,
    f"(Tensor d_loss, Tensor mass, Tensor choice_lse, {_LOSS}) -> (Tensor, Tensor, Tensor)",
)


def _save_loss(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(*output[1:], *inputs[:-1])
    ctx.number = inputs[-1]


def _differentiate_loss(
    ctx: Any, d_loss: torch.Tensor, d_mass: torch.Tensor, d_choice_lse: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    found = loss_backward_operator(d_loss.contiguous(), *ctx.saved_tensors, ctx.number)
    return *found, *(None for _ in ctx.needs_input_grad[_INDEX:])


def _fake_loss(index_q: Any, index_weights: Any, *_: Any) -> Any:
    return tuple(index_weights.new_empty(index_weights.shape[:1]) for _ in range(3))


loss_operator.register_autograd(_differentiate_loss, setup_context=_save_loss)
operators.register_fake(loss_operator, _fake_loss)
operators.register_fake(loss_backward_operator, lambda *arrays: _fake_gradients(*arrays[3:6]))
operators.refuse_backward(loss_backward_operator, "the gradient of indexer_loss", _SEVERAL_TIMES)

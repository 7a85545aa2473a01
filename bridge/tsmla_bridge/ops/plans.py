"""Plans of attention calls: what their shapes, strides, dtypes and options decide, worked out once and kept.

A plan knows that the arguments are legal, which kernel runs and where its workspaces lie. Scales, lengths, tables and
addresses belong to the call and are never part of a plan. decode_plans.py and sparse_plans.py make them.

A plan is found at two speeds. Most calls are like the one before (the layers of a model), so the tensors are first
compared with those of the latest call that had the same options (`latest`). If they differ, or torch.compile or a mode
of torch's must see the call, all their properties are looked up (`find`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch.autograd import forward_ad

from tsmla_bridge.runtime import tensors
from tsmla_bridge.runtime.results import ResultLayout
from tsmla_kernels.contract import DecodeSpec
from tsmla_kernels.contract.sparse import SparseMLASpec

MAX_PLANS = 4096
"""How many plans are kept, one for each combination of shapes, strides, dtypes and options. At that number all are
dropped and made anew."""

Spec = TypeVar("Spec", DecodeSpec, SparseMLASpec)


class Plan(Generic[Spec]):
    """Facts that calls of the same shapes, strides, dtypes, devices and options share.

    is_like: whether tensors are like those of the latest call of this plan in which none required a gradient.
    """

    def __init__(self, spec: Spec, q: torch.Tensor) -> None:
        self.spec: Spec = spec
        self.layout = ResultLayout.of(q, spec.latent_dim, spec.out_dtype, spec.lse_dtype)
        self.is_like: Callable[..., bool] = lambda *tensors: False


_plans: dict[Any, Any] = {}  # the plans of all operations: no two operations have equal options

latest_plans: dict[tuple[Any, ...], Any] = {}
"""The latest plan of each key: options, or the latest_key that `find` was given."""


def latest(options: tuple[Any, ...], *given: Any) -> Any | None:
    """The plan of the latest call with these options if the tensors are like that call's; else None."""
    if forward_ad._current_level >= 0:  # a tangent does not show in a tensor's properties
        return None
    try:
        plan = latest_plans[options]
        return plan if plan.is_like(*given) else None
    except (KeyError, TypeError):  # no such call, an option without a hash, or the latest had more or fewer tensors
        return None


def find(inputs: Any, options: Any, make: Callable[[Any, Any], Any], latest_key: Any = None) -> Any:
    """The plan of a call of any operation: the one that was made for tensors and options like these, or make(inputs,
    options).

    Args:
      inputs: a NamedTuple of the call's tensors, None for those that it lacks.
      options: a NamedTuple of its other arguments. The plan is not kept if one is a tensor or has no hash.
      latest_key: what the latest plan is kept under; the options by default.
    """
    types = tuple(map(type, options))
    if any(issubclass(kind, torch.Tensor) for kind in types):
        return make(inputs, options)  # a tensor's hash is of its identity, and its value may change
    try:
        properties = [
            None
            if tensor is None
            else (tensor.shape, tensor.dtype, tensor.device, tensor.is_contiguous() or tensor.stride())
            for tensor in inputs
        ]
        # The options' types are in the key because True equals 1 and 8.0 equals 8, but only one of the two is legal.
        key = (options, *types, *properties)
        plan = _plans.get(key)
    except (AttributeError, TypeError):  # an argument that is no tensor, or an option without a hash
        return make(inputs, options)
    if plan is None:
        plan = make(inputs, options)
        if len(_plans) >= MAX_PLANS:
            _plans.clear()
            latest_plans.clear()
        _plans[key] = plan
    given = [tensor for tensor in inputs if tensor is not None]
    # one that requires a gradient may have to be traced, which the plan doesn't tell
    if not any(tensor.requires_grad for tensor in given):
        if not plan.is_like(*given):
            plan.is_like = tensors.likeness(*given)
        latest_plans[options if latest_key is None else latest_key] = plan
    return plan

"""Common parts of the operators of torch.library, by which torch.compile, torch.export and dispatch modes know the
operations.

An operation's module in ops/ registers its operators beside its eager function. Most eager calls on plain tensors go
past them: the dispatcher and its Python bindings would cost more than all the rest of a call. A pair of scales arrives
as the two numbers that the kernels multiply by, or as one tensor [2] of them; a single scale as a number or a tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad

from tsmla_bridge.runtime import scales, tensors
from tsmla_bridge.runtime.results import Computed
from tsmla_bridge.runtime.scales import Pair
from tsmla_bridge.runtime.tensors import Scale
from tsmla_bridge.runtime.workspace import Workspace
from tsmla_kernels import contract
from tsmla_kernels.contract.attention import attention_lse_dtype

PAIR_SCHEMA = "Tensor? scales, float logit_scale, float out_scale"
"""The parameters of a schema that carry a pair of scales; `pair_arguments` makes their arguments."""

SCALE_SCHEMA = "Tensor? kv_scale_tensor, float? kv_scale"
"""The parameters of a schema that carry one scale; `scale_arguments` makes their arguments."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_watching = torch._C._len_torch_dispatch_stack  # the number of active dispatch modes
_transformation = torch._C._functorch.peek_interpreter_stack  # the innermost active transform of torch.func
_VMAP = torch._C._functorch.TransformType.Vmap
_DERIVATIVES = (torch._C._functorch.TransformType.Grad, torch._C._functorch.TransformType.Jvp)


def is_traced(*values: Any, derivatives: bool = True) -> bool:
    """Whether a call on these values must be seen as one operator. It must if a dispatch mode is active or torch.vmap
    is the innermost transform, or if one of the tensors is of a subclass other than Parameter (a fake tensor, say), has
    no memory, or, unless derivatives=False, is on a GPU and asks for a derivative. Of a pair of tensors the first one
    is looked at."""
    if _watching() or ((transformation := _transformation()) is not None and transformation.key() == _VMAP):
        return True
    for value in values:
        kind = type(value)
        if kind is tuple and value:
            value = value[0]
            kind = type(value)
        if kind in _PLAIN:
            if value.is_meta or (derivatives and value.is_cuda and _is_derived(value)):
                return True
        elif isinstance(value, torch.Tensor):
            return True
    return False


def register(name: str, function: Callable[..., Any], schema: str, writes: Sequence[str] = ()) -> Any:
    """The operator tsmla::name with this schema, which calls `function` with its arguments by position. One that writes
    to its arguments `writes` returns nothing. Pairs of scales that a call writes are not kept for later calls: their
    memory may belong to a graph. torch.vmap is refused."""

    def run(*arguments: Any) -> Any:
        with scales.none_kept():
            return function(*arguments)

    operator = torch.library.custom_op(f"tsmla::{name}", run, mutates_args=writes, schema=schema)
    operator.register_vmap(functools.partial(_refuse_vmap, name))
    if writes:
        register_fake(operator, lambda *arguments: None)
    return operator


def register_fake(operator: Any, results: Callable[..., Any]) -> None:
    """Let `results` make the operator's results where its tensors have no memory. ValueError unless all tensors, but
    for those in lists, are on the device of the first: the results of a call on a "meta" tensor among others would
    never be written."""
    names = [argument.name for argument in operator._opoverload._schema.arguments]

    def run(*arguments: Any) -> Any:
        given = {name: value for name, value in zip(names, arguments, strict=False) if isinstance(value, torch.Tensor)}
        for name, value in given.items():
            tensors.same_device(names[0], next(iter(given.values())), {name: value})
        return results(*arguments)

    operator.register_fake(run)


def _refuse_vmap(name: str, info: Any, in_dims: Any, *arguments: Any) -> NoReturn:
    raise NotImplementedError(
        f"{name}: got tensors under torch.vmap, which it has no rule for; call it once, with the requests, tokens or"
        " rows of all calls one after the other"
    )


def refuse_transformed(name: str, otherwise: str = ", or pass implementation='reference'") -> None:
    """NotImplementedError inside torch.func.grad, vjp and jvp, for which an operator's derivative has no rule."""
    if (transformation := _transformation()) is not None and transformation.key() in _DERIVATIVES:
        raise NotImplementedError(
            f"{name}: got tensors under torch.func.grad, vjp or jvp, which it has no rule for; take its gradient by"
            f" torch.autograd.grad or backward{otherwise}"
        )


def refuse_backward(operator: Any, name: str, alternative: str) -> None:
    """Make the operator's derivative raise NotImplementedError."""

    def backward(context: Any, *gradients: Any) -> NoReturn:
        raise contract.not_differentiable(name, alternative)

    operator.register_autograd(backward)


def refuse_derivative(name: str, *values: Any) -> None:
    """NotImplementedError if one of these, tensors or not, asks for a derivative, in reverse or in forward mode. The
    operation `name` writes in place or quantises, so it would drop the derivative."""
    if asks_for_derivative(*values):
        raise contract.not_differentiable(name, "call it under torch.no_grad(), or on detached tensors")


def asks_for_derivative(*values: Any) -> bool:
    """Whether one of these, tensors or not, has or wants a derivative, in reverse or in forward mode; never under
    torch.no_grad()."""
    return torch.is_grad_enabled() and any(
        getattr(value, "requires_grad", False) or _is_dual(value) for value in values
    )


def derivative_reasons(*values: Any) -> list[str]:
    """The reason against a kernel without a derivative if one of these, tensors or not, asks for a derivative."""
    return ["a derivative is asked for; the kernel has none"] if asks_for_derivative(*values) else []


def _is_derived(tensor: torch.Tensor) -> bool:
    """Whether a derivative is asked for: in reverse mode, or in forward mode, which torch.no_grad() does not end."""
    return (tensor.requires_grad and torch.is_grad_enabled()) or _is_dual(tensor)


def _is_dual(value: Any) -> bool:
    """Whether it is a tensor with a tangent of forward-mode differentiation."""
    if forward_ad._current_level < 0 or torch.compiler.is_compiling() or not isinstance(value, torch.Tensor):
        return False
    return forward_ad.unpack_dual(value).tangent is not None


def scale_arguments(scale: Any) -> tuple[torch.Tensor | None, float | None]:
    """A scale as an operator takes it: a tensor or a number."""
    return (scale, None) if isinstance(scale, torch.Tensor) else (None, tensors.as_number(scale))


def scale_of(scale_tensor: torch.Tensor | None, number: float | None) -> Scale | None:
    """The scale from which `scale_arguments` made these two."""
    return number if scale_tensor is None else scale_tensor


def pair_arguments(pair: Pair) -> tuple[torch.Tensor | None, float, float]:
    """A pair of scales as an operator takes it: a tensor [2] or two numbers."""
    return (pair, 1.0, 1.0) if isinstance(pair, torch.Tensor) else (None, *pair)


def pair_of(pair_tensor: torch.Tensor | None, *numbers: float) -> Pair:
    """The pair from which `pair_arguments` made these."""
    return numbers if pair_tensor is None else pair_tensor  # type: ignore[return-value]


def register_attention(
    name: str,
    run: Callable[..., Any],
    parameters: str,
    width: Callable[..., int],
    memory: Sequence[str],
    third: Callable[..., torch.Tensor] | None = None,
) -> Any:
    """Register tsmla::name, which returns out, lse and perhaps a third result, and tsmla::{name}_into, which writes
    them to the caller's memory. Returns the first.

    Args:
      name: the operator's name, without its namespace.
      run: takes the arguments by position, and return_lse (True by default) and those of `memory` (None by default) by
        keyword; returns the results.
      parameters: the parameters in the schema, without parentheses.
      width: takes the arguments; returns the size of out's last axis.
      memory: what {name}_into takes after the arguments: ("out", "lse"), and "workspace" or "max_logits" or both.
      third: takes the arguments; returns a tensor like the third result, if there is one.
    """
    aliases = zip("abcd", memory, strict=False)
    written = ", ".join(f"Tensor({alias}!){'' if which == 'out' else '?'} {which}" for alias, which in aliases)

    def run_into(*arguments: Any) -> None:
        places = dict(zip(memory, arguments[-len(memory) :], strict=True))
        if (buffer := places.get("workspace")) is not None:
            places["workspace"] = Workspace.of(buffer)
        run(*arguments[: -len(memory)], return_lse=places["lse"] is not None, **places)

    operator = register(name, run, f"({parameters}) -> (Tensor, Tensor{', Tensor' * (third is not None)})")
    register(f"{name}_into", run_into, f"({parameters}, {written}) -> ()", writes=memory)

    def new(*arguments: Any) -> tuple[torch.Tensor, ...]:
        results = new_results(arguments[0], width(*arguments))
        return results if third is None else (*results, third(*arguments))

    register_fake(operator, new)
    return operator


def call_attention(
    name: str,
    arguments: tuple[Any, ...],
    width: int,
    return_lse: bool,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    *workspace: Workspace | None,
    max_logits: bool | None = None,
) -> Any:
    """Call an operator that `register_attention` made, the one that writes to memory if any is given. The query is the
    first of the arguments, and out has `width` columns.

    max_logits: whether the call returns greatest logits, the operator's third result; None if the operator has no third
      result.
    """
    refuse_tangents(name, arguments)
    tensors.check_lse_asked_for(return_lse, lse)
    buffers = [None if memory is None else memory.buffer for memory in workspace]
    if out is None and lse is None and not any(buffer is not None for buffer in buffers):
        out, lse, *third = getattr(torch.ops.tsmla, name)(*arguments)
    else:
        new_out, new_lse = new_results(arguments[0], width)
        out = new_out if out is None else out
        lse = new_lse if lse is None and return_lse else lse
        third = [] if max_logits is None else [new_max_logits(arguments[0]) if max_logits else None]
        getattr(torch.ops.tsmla, f"{name}_into")(*arguments, out, lse, *buffers, *third)
    return those_asked_for(out, lse if return_lse else None, *(third if max_logits else ()))


def refuse_tangents(name: str, arguments: Sequence[Any]) -> None:
    """NotImplementedError if an argument has a tangent of forward mode, which the dispatcher and the kernels would
    drop."""
    if forward_ad._current_level >= 0 and any(map(_is_dual, arguments)):
        raise contract.not_differentiable(name, "call it on tensors without a tangent of forward mode")


def new_max_logits(q: torch.Tensor) -> torch.Tensor:
    """A new tensor for the greatest logits of a call with this query."""
    return q.new_empty(q.shape[:2], dtype=lse_dtype(q))


def those_asked_for(*results: torch.Tensor | None) -> Any:
    """The value that a call returns: its only result, or the tuple of its results. None is no result."""
    found = tuple(x for x in results if x is not None)
    return found if len(found) > 1 else found[0]


def new_results(q: torch.Tensor, width: int) -> Computed:
    """New tensors of the shapes and dtypes that attention with this query gives."""
    return q.new_empty((*q.shape[:-1], width), dtype=out_dtype(q)), q.new_empty(q.shape[:-1], dtype=lse_dtype(q))


def lse_dtype(q: torch.Tensor) -> torch.dtype:
    """The dtype of the log-sum-exps of attention with this query."""
    return tensors.DTYPES[attention_lse_dtype(tensors.dtype_name(q.dtype))]


def out_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype of results computed from this tensor."""
    return tensors.DTYPES[contract.attention_out_dtype(tensors.dtype_name(tensor.dtype))]

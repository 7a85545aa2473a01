"""Operators of mla_prefill and mla_prefill_kv, and the choice of the calls that go to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from tsmla_bridge import operators
from tsmla_bridge.ops import prefill_launch
from tsmla_bridge.ops.prefill_launch import Gradients, Inputs, PrefillOptions, Saved
from tsmla_bridge.runtime import loaded_kernels, scales
from tsmla_bridge.runtime.results import Computed, Results
from tsmla_bridge.runtime.scales import Pair
from tsmla_kernels.contract import PrefillSpec

NUM_INPUTS = 8
"""The number of tensors of a call: q with its keys and values, two tensors of offsets, two of a selection, and the
sinks. The last three may be None."""


class Asked(NamedTuple):
    """Which results a call wants, and the memory for them."""

    return_lse: bool
    out: torch.Tensor | None
    lse: torch.Tensor | None


class Form(NamedTuple):
    """One of the two operations.

    name: the operation's name.
    inputs: the class of its tensors.
    spec: makes the spec from (inputs, options, scales by name).
    run: makes the results of a checked call from (spec, inputs, pair, implementation, return_lse, out, lse,
      max_logits).
    gradients: makes the gradients from (inputs, pair, options, saved).
    value_width: takes the first three inputs; returns the size of out's last axis.
    run_eagerly: `run` for calls past the operators, which may take views that the operators don't; None is `run`
      itself.
    """

    name: str
    inputs: Callable[..., Any]
    spec: Callable[[Any, PrefillOptions, Mapping[str, Any]], PrefillSpec]
    run: Callable[..., Results]
    gradients: Callable[[Any, Pair, PrefillOptions, Saved], Gradients]
    value_width: Callable[..., int]
    run_eagerly: Callable[..., Results] | None = None


class Operators(NamedTuple):
    """The operators that return the results and the gradients of a form, as torch.library made them."""

    forward: Any
    backward: Any


def call(
    form: Form, inputs: Inputs, options: PrefillOptions, given_scales: Mapping[str, Any], asked: Asked
) -> torch.Tensor | Computed:
    """Run a call of the public function. One that is traced, or has a derivative and does not name the reference, goes
    to the operator; others go past it."""
    values = inputs[:3]
    traced = torch.compiler.is_compiling() or operators.is_traced(*values, derivatives=False)
    spec = None if traced else form.spec(inputs, options, given_scales)
    if traced:
        for name, scale in given_scales.items():
            scales.check(name, scale, optional=name != "softmax_scale")
    differentiable = (*values, inputs.sinks, *given_scales.values())
    derived = torch.is_grad_enabled() and prefill_launch.derivative_asked_for(*differentiable)
    by_operator = spec is None or (derived and options.implementation != "reference")
    if by_operator and derived:
        if not torch.compiler.is_compiling():
            operators.refuse_transformed(form.name)
        prefill_launch.check_derivable(given_scales, {"out": asked.out, "lse": asked.lse})
    others = (given_scales.get(name) for name in ("q_scale", "k_scale", "v_scale"))
    pair = scales.product(given_scales["softmax_scale"], *others)
    if spec is not None and not by_operator:
        if not loaded_kernels.is_by_definition(options.implementation, inputs.q.device):
            operators.refuse_tangents(form.name, differentiable)
        run = form.run_eagerly or form.run
        max_logits = operators.new_max_logits(inputs.q) if options.max_logits else None
        out, lse = run(spec, inputs, pair, options.implementation, *asked, max_logits)
        return operators.those_asked_for(out, lse, max_logits)
    arguments = (*inputs, *operators.pair_arguments(pair), *options)
    width = form.value_width(*values)
    return operators.call_attention(form.name, arguments, width, *asked, max_logits=options.max_logits)


def register(form: Form) -> Operators:
    """Register the operators of a form: one returns the results, one writes them to the caller's memory, and
    one returns the gradients."""

    def unpacked(*arguments: Any) -> tuple[Any, Pair, PrefillOptions]:
        inputs, others = form.inputs(*arguments[:NUM_INPUTS]), arguments[NUM_INPUTS:]
        return inputs, operators.pair_of(*others[:3]), PrefillOptions(*others[3:])

    def run(*arguments: Any, return_lse: bool = True, max_logits: torch.Tensor | None = None, **memory: Any) -> Any:
        inputs, pair, options = unpacked(*arguments)
        spec = form.spec(inputs, options, {"softmax_scale": 1.0})
        max_logits = third(*arguments) if max_logits is None else max_logits
        places = (memory.get("out"), memory.get("lse"), max_logits if options.max_logits else None)
        results = form.run(spec, inputs, pair, options.implementation, return_lse, *places)
        return *results, max_logits

    def third(*arguments: Any) -> torch.Tensor:
        """A new tensor for the greatest logits; without elements if the call doesn't return them."""
        inputs, _, options = unpacked(*arguments)
        return operators.new_max_logits(inputs.q if options.max_logits else inputs.q[:0])

    def run_backward(
        dout: torch.Tensor, dlse: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor, *given: Any
    ) -> Any:
        inputs, pair, options = unpacked(*given)
        return all_gradients(form.gradients(inputs, pair, options, Saved(out, lse, dout, dlse)))

    def all_gradients(found: Gradients) -> tuple[torch.Tensor, ...]:
        """The gradients as an operator returns them; without sinks, their gradient is a tensor without elements."""
        return *found[:3], found.first.new_empty(0) if found.sinks is None else found.sinks

    names = form.inputs._fields  # type: ignore[attr-defined]
    optional = form.inputs._field_defaults  # type: ignore[attr-defined]
    tensors = ", ".join(f"Tensor{'?' if name in optional else ''} {name}" for name in names)
    parameters = f"{tensors}, {operators.PAIR_SCHEMA}, {prefill_launch.OPTIONS_SCHEMA}"
    forward = operators.register_attention(
        form.name, run, parameters, lambda *arguments: form.value_width(*arguments[:3]),
        memory=("out", "lse", "max_logits"), third=third,
    )  # fmt: skip
    given = "Tensor dout, Tensor? dlse, Tensor out, Tensor lse"
    backward = operators.register(
        f"{form.name}_backward", run_backward, f"({given}, {parameters}) -> (Tensor, Tensor, Tensor, Tensor)"
    )
    operators.refuse_backward(
        backward, f"the gradient of {form.name}", "use implementation='reference' on plain tensors"
    )

    def fake_backward(dout: Any, dlse: Any, out: Any, lse: Any, *given: Any) -> tuple[torch.Tensor, ...]:
        inputs, *_ = unpacked(*given)
        return all_gradients(prefill_launch.new_gradients(inputs))

    operators.register_fake(backward, fake_backward)

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        tensors_given = NUM_INPUTS + 1  # the inputs, then the scales
        ctx.save_for_backward(*output[:2], *inputs[:tensors_given])
        ctx.numbers = inputs[tensors_given:]
        ctx.set_materialize_grads(False)

    def differentiate(ctx: Any, dout: Any, dlse: Any, *_: Any) -> tuple[torch.Tensor | None, ...]:
        dout = torch.zeros_like(ctx.saved_tensors[0]) if dout is None else dout
        *found, d_sinks = backward(dout, dlse, *ctx.saved_tensors, *ctx.numbers)
        gradients: list[torch.Tensor | None] = [None for _ in ctx.needs_input_grad]
        gradients[:3] = found
        if d_sinks.numel():
            gradients[NUM_INPUTS - 1] = d_sinks
        return tuple(gradients)

    forward.register_autograd(differentiate, setup_context=save)
    return Operators(forward, backward)

"""The derivative of the sparse kernel's calls: the kernel of the gradient if it can run, else XLA's loop."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from tsmla_jax.ops import transforms
from tsmla_jax.ops.kernel_call import kernel_call
from tsmla_jax.ops.sparse_mla import gradient
from tsmla_jax.ops.sparse_mla.call import Planned, Results, fold_caches
from tsmla_kernels import contract
from tsmla_kernels.catalog import SPARSE_MLA_BACKWARD
from tsmla_kernels.contract.sparse import SparseMLASpec, sparse_gradient_reasons
from tsmla_kernels.sm90.sparse_backward.config import backward_workspaces, sparse_backward_config

Saved = tuple[tuple[jax.Array, ...], Results]
"""The operands and the results of a call."""


class _Arrays(NamedTuple):
    """The arrays that the kernel reads, in the order of `transformable`: arrays that the calls of one vmap share come
    last.
    """

    q: Any
    caches: tuple[Any, ...]
    indices: Any
    lengths: Any
    out: Any
    lse: Any
    d_out: Any
    d_lse: Any
    sinks: Any
    scales: Any

    @property
    def given(self) -> tuple[Any, ...]:
        """The arrays that the call has."""
        return tuple(x for x in (self.q, *self.caches, *self[2:]) if x is not None)

    @classmethod
    def split(cls, call: Planned, arrays: Sequence[Any]) -> _Arrays:
        """The arrays by name."""
        rest = list(arrays)
        return cls(
            q=rest.pop(0),
            caches=tuple(rest.pop(0) for _ in call.spec.caches),
            indices=rest.pop(0),
            lengths=rest.pop(0) if call.lengths else None,
            out=rest.pop(0),
            lse=rest.pop(0),
            d_out=rest.pop(0),
            d_lse=rest.pop(0),
            sinks=rest.pop(0) if call.sinks else None,
            scales=rest.pop(0),
        )


def why_no_kernel(spec: SparseMLASpec, arch: str) -> list[str]:
    """The reasons why the kernel can't compute the gradient of this call; empty if it can."""
    return SPARSE_MLA_BACKWARD.arch_reasons(arch) or SPARSE_MLA_BACKWARD.reasons(spec)


def note(spec: SparseMLASpec, arch: str) -> str:
    """Which backward pass a differentiated call runs, for `explain`."""
    if refused := sparse_gradient_reasons(spec):
        return f"it has no derivative: {'; '.join(refused)}"
    reasons = why_no_kernel(spec, arch)
    return f"its derivative is that of xla: {'; '.join(reasons)}" if reasons else "its derivative is a kernel too"


def backward(call: Planned, saved: Saved, cotangents: Results) -> tuple[jax.Array | None, ...]:
    """The cotangents of a call's operands, in the operands' order. saved: the operands and the results."""
    arrays, results = saved
    x = call.split(arrays)
    spec = call.spec.with_sizes_of(x.q.shape, [cache.shape for cache in x.caches], x.indices.shape)
    (out, lse, *_), (d_out, d_lse, *_) = results, cotangents
    given = _Arrays(x.q, x.caches, x.indices, x.lengths, out, lse, d_out, d_lse, x.sinks, x.scales)
    found = (_in_xla if why_no_kernel(spec, call.arch) else _by_kernel)(call, spec, given)
    lengths = (None,) if call.lengths else ()
    sinks = (found.sinks,) if call.sinks else ()
    # The caches' scales are constants in a call that has a gradient, so their cotangents are 0.
    scales = jnp.zeros(x.scales.shape, x.scales.dtype).at[0].set(found.logit_scale.astype(x.scales.dtype))
    return (found.q, *found.caches, None, *lengths, *sinks, scales)


def _in_xla(call: Planned, spec: SparseMLASpec, x: _Arrays) -> gradient.Gradients:
    tokens, heads, _ = x.q.shape
    lengths = jnp.full((tokens,), x.indices.shape[1], jnp.int32) if x.lengths is None else x.lengths
    sinks = jnp.full((heads,), -jnp.inf, jnp.float32) if x.sinks is None else x.sinks
    operands = gradient.SavedOperands(x.q, x.caches, x.indices, lengths, sinks, x.scales[0])
    return gradient.gradients(spec, operands, (x.out, x.lse), (x.d_out, x.d_lse))


def _by_kernel(call: Planned, spec: SparseMLASpec, x: _Arrays) -> gradient.Gradients:
    d_q, *others = _transformable(call)(*x.given)
    caches = tuple(others[: len(x.caches)])
    d_sinks = others[-1].sum(0) if call.sinks else jnp.zeros((), jnp.float32)
    # The logits are linear in q as in their scale, so both gradients give the same dot product.
    return gradient.Gradients(d_q, caches, d_sinks, transforms.sum_of_products(d_q, x.q) / x.scales[0])


def _refuse_second_derivative(*_: jax.Array) -> NoReturn:
    raise contract.not_differentiable("the gradient of sparse_mla", "use implementation='reference'")


@functools.cache
def _transformable(call: Planned) -> Callable[..., tuple[jax.Array, ...]]:
    """The kernel as a function of _Arrays: the gradients of q and of the caches, and with sinks the tokens' shares [T,
    H] of the sinks' gradient."""
    names = [letters for letters, _ in zip(("p z e", "u y f"), call.spec.caches, strict=False)]
    lengths, sinks = ["t"] * call.lengths, ["h"] * call.sinks
    rule = ["t h d", *names, "t k", *lengths, "t h l", "t h", "t h l", "t h", *sinks, "c"]
    results = ["t h d", *names, *["t h"] * call.sinks]
    return transforms.transformable(
        functools.partial(_on_one_device, call),
        rule=f"{', '.join(rule)} -> {', '.join(results)}",
        fixed=("d", *" ".join(names).split(), "k", "l", "c"),
        partition=functools.partial(_partition, call),
        fold=functools.partial(_fold, call),
        shared=1 + call.sinks,
        derivative=_refuse_second_derivative,
        summed=transforms.Summed(tuple(range(1, 1 + len(names))), (0, 1)),
    )


def _on_one_device(call: Planned, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The kernel on the arrays of one device."""
    x = _Arrays.split(call, arrays)
    spec = call.spec.with_sizes_of(x.q.shape, [cache.shape for cache in x.caches], x.indices.shape)
    config = sparse_backward_config(spec, lengths=call.lengths, sinks=call.sinks)
    slots = sum(cache.num_slots for cache in spec.caches)
    workspaces = backward_workspaces(config, spec.num_tokens, spec.num_heads, spec.num_selected, slots)
    optional = tuple(array for array in (x.lengths, x.sinks) if array is not None)
    shapes = (
        x.q.shape,
        *(cache.shape for cache in x.caches),
        *((x.lse.shape,) if call.sinks else ()),
        *(shape for shape, _ in workspaces.values()),
    )
    found = kernel_call(
        SPARSE_MLA_BACKWARD,
        config,
        (x.q, *x.caches, x.indices, *optional, x.scales, x.out, x.lse, x.d_out, x.d_lse),
        shapes,
        arch=call.arch,
    )
    return tuple(found[: -len(workspaces)])


def _fold(call: Planned, run: Callable[..., Any], axis_size: int, *arrays: jax.Array) -> tuple[jax.Array, ...] | None:
    """vmap's axis V, leading in all arrays but the scales and the sinks, becomes V * T tokens of one call. Returns None
    if there are more slots than int32 can count.
    """
    x = _Arrays.split(call, arrays)
    folded = fold_caches(call, axis_size, x.caches, x.indices)
    if folded is None:
        return None
    caches, indices = folded
    rows = {
        name: None if (array := getattr(x, name)) is None else transforms.fold_rows(array)
        for name in ("q", "lengths", "out", "lse", "d_out", "d_lse")
    }
    d_q, *others = run(*x._replace(caches=caches, indices=indices, **rows).given)
    shapes = [x.q.shape, *(cache.shape for cache in x.caches), x.lse.shape]
    return tuple(found.reshape(shape) for found, shape in zip((d_q, *others), shapes, strict=False))


def _partition(call: Planned, shapes: Sequence[Any]) -> transforms.Partition:
    """The sharding along tokens and heads; everything else is whole."""
    named = _Arrays.split(call, list(map(transforms.named_axes, shapes)))
    rows, terms = P(named.q[0], named.q[1], None), P(named.q[0], named.q[1])
    caches = tuple(P(None, None, None) for _ in call.spec.caches)
    lengths, sinks = P(named.q[0]) if call.lengths else None, P(named.q[1]) if call.sinks else None
    given = _Arrays(
        q=rows, caches=caches, indices=P(named.q[0], None), lengths=lengths, out=rows, lse=terms, d_out=rows,
        d_lse=terms, sinks=sinks, scales=P(None),
    )  # fmt: skip
    return given.given, (rows, *caches, *((terms,) if call.sinks else ()))

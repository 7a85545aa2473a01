"""sparse_mla by the CuTe DSL kernel: its operands, the folding of vmap's axis into tokens, and the partitioning."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from tsmla_jax.ops import device, transforms
from tsmla_jax.ops.inputs import Scale, Scales, as_scale, attention_of_no_keys
from tsmla_jax.ops.kernel_call import kernel_call
from tsmla_jax.ops.sparse_mla import backward, blackwell
from tsmla_jax.ops.sparse_mla.call import Operands, Planned, Results, fold_caches
from tsmla_kernels import contract
from tsmla_kernels.catalog import SPARSE_MLA, SPARSE_MLA_SM100
from tsmla_kernels.contract.sparse import SparseMLASpec, sparse_gradient_reasons
from tsmla_kernels.kernel import Kernel, written_for
from tsmla_kernels.sm90.sparse.record import serving, workspaces_of
from tsmla_kernels.sm90.sparse.union_config import sparse_form
from tsmla_kernels.sm100 import sparse_config as sm100


def kernel() -> Kernel:
    """The kernel of the architecture for which calls are compiled here."""
    return written_for(device.target_arch(), SPARSE_MLA, SPARSE_MLA_SM100)


def why_not(spec: SparseMLASpec) -> list[str]:
    """The reasons why no kernel can run this call; empty if one can."""
    found = device.why_not(kernel()) + kernel().reasons(spec)
    if kernel() is SPARSE_MLA_SM100 and not found:
        found += device.why_not_made(kernel(), sm100.sparse_config(spec))
    return found


def notes(spec: SparseMLASpec) -> list[str]:
    """Notes for users: the form in which the kernel would run this call, and why; and which derivative the call has."""
    if kernel().reasons(spec):
        return []
    if kernel() is SPARSE_MLA_SM100:
        return [sm100.NOTICE, *([sm100.WIDENS] if sm100.widens(spec) else [])]
    form, arch = sparse_form(spec), device.target_arch()
    derivative = [] if arch is None or device.why_not(SPARSE_MLA) else [backward.note(spec, arch)]
    return [f"form {form.name}: {form.why}", *derivative]


def sparse_mla(
    q: jax.Array,
    caches: tuple[jax.Array, ...],
    indices: jax.Array,
    lengths: jax.Array | None,
    sinks: jax.Array | None,
    scales: Scales,
    kv_scales: tuple[Scale | None, ...],
    *,
    spec: SparseMLASpec,
) -> Results:
    """out, lse and, if the spec has them, max_logits as the public sparse_mla documents them. Reverse-mode
    differentiable over plain caches without scales."""
    if 0 in (spec.num_tokens, spec.num_selected):
        out, lse = attention_of_no_keys(q, spec.latent_dim, spec)
        return out, lse, *[lse] * spec.max_logits
    arch, factors = device.arch_for(kernel()), _factors(scales, kv_scales)
    known = isinstance(factors, np.ndarray)
    call = Planned(
        spec=spec.without_sizes(), lengths=lengths is not None, sinks=sinks is not None,
        has_gradient=not sparse_gradient_reasons(spec, kv_scales), arch=arch, num_sms=device.num_sms(arch),
        static_scales=tuple(map(float, factors)) if known and arch in SPARSE_MLA_SM100.archs else None,
    )  # fmt: skip
    sinks = None if sinks is None else sinks.astype(jnp.float32)
    operands = Operands(q, caches, indices, lengths, sinks, factors)
    run = _differentiable if call.has_gradient else _transformable
    results: Results = run(call)(*operands.given)
    return results


def _factors(scales: Scales, kv_scales: tuple[Scale | None, ...]) -> jax.Array | np.ndarray:
    """The kernel's operand, float32 [3]: softmax_scale * q_scale, kv_scale and compressed_kv_scale. Python numbers are
    multiplied here, so that they reach the device as a constant."""
    given = (scales.softmax, scales.q, *kv_scales, None)[:4]
    softmax, q, first, second = (1.0 if scale is None else scale for scale in given)
    if all(isinstance(scale, float | int) for scale in (softmax, q, first, second)):
        return np.array([softmax * q, first, second], np.float32)
    logits = Scales(softmax, q).logits(jnp.float32)
    return jnp.stack([logits, as_scale(first, jnp.float32), as_scale(second, jnp.float32)])


@functools.cache
def _differentiable(call: Planned) -> Callable[..., Any]:
    """`_transformable` with a derivative in reverse mode."""
    return transforms.with_backward(_transformable(call), functools.partial(backward.backward, call))


@functools.cache
def _transformable(call: Planned) -> Callable[..., Any]:
    """The call as a function (q, kv_cache, [compressed_kv_cache,] indices, [lengths,] [sinks,] scales) -> Results.

    q and sinks can be split along heads, q and the rows of indices along tokens. Caches are whole: any token may name
    any page.
    """
    names = [" ".join(letters[: cache.rank]) for letters, cache in zip(("pze", "uyf"), call.spec.caches, strict=False)]
    rule = ["t h d", *names, "t k", *["t"] * call.lengths, *["h"] * call.sinks, "c"]
    fixed = ("d", *" ".join(names).split(), "k", "c", "l")
    return transforms.transformable(
        functools.partial(_on_one_device, call),
        rule=f"{', '.join(rule)} -> t h l{', t h' * call.num_rows}",
        fixed=fixed,
        partition=functools.partial(_partition, call),
        fold=functools.partial(_fold, call),
        shared=1 + call.sinks,
        unexpanded=tuple(range(1, 1 + len(call.spec.caches))),  # a cache that all of vmap's calls share stays one
        derivative=functools.partial(_refuse_derivative, call),
    )


def _refuse_derivative(call: Planned, *_: jax.Array) -> NoReturn:
    if call.has_gradient:  # then this is a second derivative
        raise contract.not_differentiable("the gradient of sparse_mla", "use implementation='reference'")
    reasons = sparse_gradient_reasons(call.spec) or ["kv_scale: got a scale; a gradient needs None"]
    raise contract.not_differentiable("sparse_mla", f"{'; '.join(reasons)}; use implementation='reference'")


def _on_one_device(call: Planned, *arrays: jax.Array) -> Results:
    """The kernel on the arrays of one device."""
    operands = call.split(arrays)
    shapes = [cache.shape for cache in operands.caches]
    spec = call.spec.with_sizes_of(operands.q.shape, shapes, operands.indices.shape)
    if call.arch in SPARSE_MLA_SM100.archs:
        return blackwell.on_one_device(operands, spec=spec, static_scales=call.static_scales, arch=call.arch)
    found = serving(spec, lengths=call.lengths, sinks=call.sinks)
    parts = found.launches(spec.num_tokens, spec.num_selected)

    def launch(first: Any, stop: Any) -> Results:
        """The rows of tokens first to stop - 1."""
        mine = operands if len(parts) == 1 else operands.tokens(first, stop)
        rows = (stop - first) * spec.num_heads
        workspaces = workspaces_of(found.config, call.num_sms, stop - first, spec.num_selected)
        out, *others = kernel_call(
            found.kernel,
            found.config,
            mine._replace(q=mine.q.reshape(rows, spec.head_dim)).given,
            ((rows, spec.latent_dim), *[(rows,)] * call.num_rows, *(shape for shape, _ in workspaces.values())),
            arch=call.arch,
        )
        shape = (stop - first, spec.num_heads)
        return out.reshape(*shape, spec.latent_dim), *(x.reshape(shape) for x in others[: call.num_rows])

    results = [launch(first, stop) for first, stop in parts]
    return results[0] if len(parts) == 1 else tuple(map(jnp.concatenate, zip(*results, strict=True)))


def _fold(call: Planned, run: Callable[..., Results], axis_size: int, *arrays: jax.Array) -> Results | None:
    """vmap's axis V, leading in all arrays but the scales, the sinks and a shared cache, becomes V * T tokens of one
    call. Returns None if there are more slots than int32 can count."""
    operands = call.split(arrays)
    folded = fold_caches(call, axis_size, operands.caches, operands.indices)
    if folded is None:
        return None
    caches, indices = folded
    out, *others = run(
        *Operands(
            transforms.fold_rows(operands.q),
            caches,
            indices,
            None if operands.lengths is None else operands.lengths.reshape(-1),
            operands.sinks,
            operands.scales,
        ).given
    )
    tokens = operands.q.shape[:2]
    return out.reshape(*tokens, *out.shape[1:]), *(x.reshape(*tokens, *x.shape[1:]) for x in others)


def _partition(call: Planned, shapes: Sequence[Any]) -> transforms.Partition:
    """The sharding along tokens and heads; everything else is whole."""
    named = call.split(list(map(transforms.named_axes, shapes)))
    tokens = named.q[0] or transforms.axes_apart(named.indices[0] or (named.lengths or (None,))[0], named.q[1])
    heads = named.q[1] or transforms.axes_apart((named.sinks or (None,))[0], tokens)
    rows = P(tokens, heads, None)
    caches = tuple(P(*(None,) * cache.rank) for cache in call.spec.caches)
    lengths, sinks = P(tokens) if call.lengths else None, P(heads) if call.sinks else None
    given = Operands(rows, caches, P(tokens, None), lengths, sinks, P(None)).given
    return given, (rows, *[P(tokens, heads)] * call.num_rows)

"""sparse_mla by the CuTe DSL kernel: its operands, how vmap's axis becomes tokens, and what is partitioned."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from tsmla_jax.ops import device, transforms
from tsmla_jax.ops.inputs import Scale, Scales, as_scale, attention_of_no_keys
from tsmla_jax.ops.kernel_call import kernel_call
from tsmla_kernels import contract
from tsmla_kernels.catalog import SPARSE_MLA
from tsmla_kernels.contract.sparse import SparseMLASpec
from tsmla_kernels.sm90.sparse.config import launches, sparse_config, workspace_shapes

Results = tuple[jax.Array, jax.Array]


def why_not(spec: SparseMLASpec) -> list[str]:
    """The reasons why the kernel can't run this call; empty if it can."""
    return device.why_not(SPARSE_MLA) + SPARSE_MLA.reasons(spec)


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
    """out and lse as the public sparse_mla documents them; both are always returned. Not differentiable."""
    if 0 in (spec.num_tokens, spec.num_selected):
        return attention_of_no_keys(q, spec.latent_dim, spec)
    arch = device.arch_for(SPARSE_MLA)
    call = _Planned(spec.without_sizes(), lengths is not None, sinks is not None, arch, device.num_sms(arch))
    sinks = None if sinks is None else sinks.astype(jnp.float32)
    operands = _Operands(q, caches, indices, lengths, sinks, _factors(scales, kv_scales))
    results: Results = _transformable(call)(*operands.given)
    return results


class _Planned(NamedTuple):
    """A call's spec without sizes, and the GPU that it is planned for. lengths, sinks: whether the call has these
    operands."""

    spec: SparseMLASpec
    lengths: bool
    sinks: bool
    arch: str
    num_sms: int

    def split(self, arrays: Sequence[Any]) -> _Operands:
        """The operands by name."""
        q, *rest = arrays
        count = len(self.spec.caches)
        caches, (indices, *others) = tuple(rest[:count]), rest[count:]
        lengths = others[0] if self.lengths else None
        return _Operands(q, caches, indices, lengths, others[-2] if self.sinks else None, others[-1])


class _Operands(NamedTuple):
    """The arrays of a call, in the order of the kernel's operands."""

    q: Any
    caches: tuple[Any, ...]
    indices: Any
    lengths: Any
    sinks: Any
    scales: Any

    @property
    def given(self) -> tuple[Any, ...]:
        """Those that the call has."""
        every = (self.q, *self.caches, self.indices, self.lengths, self.sinks, self.scales)
        return tuple(array for array in every if array is not None)

    def tokens(self, first: int, stop: int) -> _Operands:
        """The operands of tokens first to stop - 1."""
        mine = slice(first, stop)
        lengths = None if self.lengths is None else self.lengths[mine]
        return self._replace(q=self.q[mine], indices=self.indices[mine], lengths=lengths)


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
def _transformable(call: _Planned) -> Callable[..., Any]:
    """The call as a function (q, kv_cache, [compressed_kv_cache,] indices, [lengths,] [sinks,] scales) -> (out, lse).

    Heads split q and sinks, tokens split q and their rows of indices; any token may name any page of a cache.
    """
    names = [" ".join(letters[: cache.rank]) for letters, cache in zip(("pze", "uyf"), call.spec.caches, strict=False)]
    rule = ["t h d", *names, "t k", *["t"] * call.lengths, *["h"] * call.sinks, "c"]
    fixed = ("d", *" ".join(names).split(), "k", "c", "l")
    return transforms.transformable(
        functools.partial(_on_one_device, call),
        rule=f"{', '.join(rule)} -> t h l, t h",
        fixed=fixed,
        partition=functools.partial(_partition, call),
        fold=functools.partial(_fold, call),
        shared=1 + call.sinks,
        unexpanded=tuple(range(1, 1 + len(call.spec.caches))),  # a cache that all of vmap's calls share stays one
        derivative=_refuse_derivative,
    )


def _refuse_derivative(*_: jax.Array) -> NoReturn:
    raise contract.not_differentiable("sparse_mla", "use implementation='reference' ('xla' has none either)")


def _on_one_device(call: _Planned, *arrays: jax.Array) -> Results:
    """The kernel on the arrays of one device."""
    operands = call.split(arrays)
    shapes = [cache.shape for cache in operands.caches]
    spec = call.spec.with_sizes_of(operands.q.shape, shapes, operands.indices.shape)
    config = sparse_config(spec, lengths=call.lengths, sinks=call.sinks)
    parts = launches(config, spec.num_tokens, spec.num_selected)

    def launch(first: Any, stop: Any) -> Results:
        """The rows of tokens first to stop - 1."""
        mine = operands if len(parts) == 1 else operands.tokens(first, stop)
        rows = (stop - first) * spec.num_heads
        workspaces = workspace_shapes(config, call.num_sms, stop - first, spec.num_selected)
        out, lse, *_ = kernel_call(
            SPARSE_MLA,
            config,
            mine._replace(q=mine.q.reshape(rows, spec.head_dim)).given,
            ((rows, spec.latent_dim), (rows,), *(shape for shape, _ in workspaces.values())),
            arch=call.arch,
        )
        shape = (stop - first, spec.num_heads)
        return out.reshape(*shape, spec.latent_dim), lse.reshape(shape)

    results = [launch(first, stop) for first, stop in parts]
    outs, lses = zip(*results, strict=True)
    return results[0] if len(parts) == 1 else (jnp.concatenate(outs), jnp.concatenate(lses))


def _fold(call: _Planned, run: Callable[..., Results], axis_size: int, *arrays: jax.Array) -> Results | None:
    """vmap's axis V, leading in all arrays but the scales, the sinks and a shared cache, becomes V * T tokens of one
    call. None if there are more slots than int32 can count."""
    operands = call.split(arrays)
    columns = operands.indices.shape[-1]
    bounds = (0, columns) if call.spec.compressed is None else (0, call.spec.window, columns)
    caches, slots = [], []
    for i, (layout, cache) in enumerate(zip(call.spec.caches, operands.caches, strict=True)):
        section = operands.indices[..., bounds[i] : bounds[i + 1]]
        if cache.ndim > layout.rank:
            each = cache.shape[1] * layout.span
            if not isinstance(each, int) or axis_size * each > transforms.MAX_SLOTS:
                return None
            first = jnp.arange(axis_size, dtype=jnp.int32)[:, None, None] * each
            section = jnp.where((section >= 0) & (section < each), section + first, -1)
            cache = transforms.fold_rows(cache)
        caches.append(cache)
        slots.append(section)
    out, lse = run(
        *_Operands(
            transforms.fold_rows(operands.q),
            tuple(caches),
            transforms.fold_rows(jnp.concatenate(slots, -1)),
            None if operands.lengths is None else operands.lengths.reshape(-1),
            operands.sinks,
            operands.scales,
        ).given
    )
    tokens = operands.q.shape[:2]
    return out.reshape(*tokens, *out.shape[1:]), lse.reshape(*tokens, *lse.shape[1:])


def _partition(call: _Planned, shapes: Sequence[Any]) -> transforms.Partition:
    """The sharding along tokens and heads, everything else whole."""
    named = call.split(list(map(transforms.named_axes, shapes)))
    tokens = named.q[0] or named.indices[0] or (named.lengths or (None,))[0]
    heads = named.q[1] or (named.sinks or (None,))[0]
    rows = P(tokens, heads, None)
    caches = tuple(P(*(None,) * cache.rank) for cache in call.spec.caches)
    lengths, sinks = P(tokens) if call.lengths else None, P(heads) if call.sinks else None
    return _Operands(rows, caches, P(tokens, None), lengths, sinks, P(None)).given, (rows, P(tokens, heads))

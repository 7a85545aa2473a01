"""mla_decode by the CuTe DSL kernels: their operands, the folding of vmap's axis into requests, and the
partitioning.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from tsmla_jax.ops import device, transforms
from tsmla_jax.ops.inputs import Scales
from tsmla_jax.ops.kernel_call import kernel_call
from tsmla_jax.ops.mla_decode import blackwell
from tsmla_jax.ops.ragged import row_owner
from tsmla_kernels import contract
from tsmla_kernels.catalog import MLA_DECODE, MLA_DECODE_SM100
from tsmla_kernels.contract import DecodeSpec
from tsmla_kernels.sm90.decode import config as sm90_decode
from tsmla_kernels.sm100 import config as sm100
from tsmla_kernels.sm100.dense_arrays import DecodeArrays

Results = tuple[jax.Array, jax.Array]


def why_not(spec: DecodeSpec) -> list[str]:
    """The reasons why no kernel can run this call; empty if one can."""
    on_blackwell = device.target_arch() in MLA_DECODE_SM100.archs
    kernel = MLA_DECODE_SM100 if on_blackwell else MLA_DECODE
    reasons = device.why_not(kernel) + kernel.reasons(spec)
    for name in ("num_heads", "max_q_len"):
        if not isinstance(getattr(spec, name), int):
            reasons.append(f"{name} is {getattr(spec, name)}; the kernels are compiled for a number")
    if on_blackwell and not reasons:
        reasons += device.why_not_made(kernel, sm100.decode_config(spec))
    return reasons


def notes(spec: DecodeSpec) -> list[str]:
    """Notes for users about this architecture's kernels."""
    return [sm100.NOTICE, sm100.FINITE] if device.target_arch() in MLA_DECODE_SM100.archs else []


def mla_decode(
    q: jax.Array,
    kv_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    cu_seqlens_q: jax.Array | None,
    visible_lens: jax.Array | None,
    scales: Scales,
    *,
    spec: DecodeSpec,
) -> Results:
    """out and lse as the public mla_decode documents them; both are always returned. Not differentiable."""
    arch = device.arch_for(MLA_DECODE)
    call = _Planned(spec.without_sizes(), arch, device.num_sms(arch))
    optional = [array for array in (cu_seqlens_q, visible_lens) if array is not None]
    operand = scales.operand()
    if arch in MLA_DECODE_SM100.archs:
        seq_lens = blackwell.behind_check(spec, kv_cache, block_tables, seq_lens)
        if isinstance(operand, np.ndarray):
            call = call._replace(static_scales=(float(operand[0]), float(operand[1])))
    results: Results = _transformable(call)(q, kv_cache, block_tables, seq_lens, *optional, operand)
    return results


class Pieces(NamedTuple):
    """Results of mla_decode's first kernel alone.

    Attributes:
      latents: [N, L], the rows of row tiles that were not cut.
      partial_out, partial_lse, split_info: the workspaces, as the kernel's config describes them.
    """

    latents: jax.Array
    partial_out: jax.Array
    partial_lse: jax.Array
    split_info: jax.Array


def unmerged(
    q: jax.Array, kv_cache: jax.Array, block_tables: jax.Array, seq_lens: jax.Array, scales: Scales, *, spec: DecodeSpec
) -> Pieces:
    """The pieces of a call that is neither ragged nor batch_invariant, for the caller to merge. Only on Hopper; not
    partitioned automatically."""
    arch = device.arch_for(MLA_DECODE)
    config = sm90_decode.decode_config(dataclasses.replace(spec, merged=False))
    rows = math.prod(q.shape[:-1])
    workspaces = sm90_decode.workspace_shapes(config, device.num_sms(arch), spec.batch, spec.max_pages)
    inputs: tuple[Any, ...] = (q.reshape(rows, spec.head_dim), kv_cache, block_tables, seq_lens, seq_lens)
    shapes = ((rows, spec.latent_dim), (rows,), *(shape for shape, _ in workspaces.values()))
    latents, _, *others = kernel_call(MLA_DECODE, config, (*inputs, jnp.asarray(scales.operand())), shapes, arch=arch)
    return Pieces(latents, *others)


class _Planned(NamedTuple):
    """A call's spec without sizes, and the GPU that it is planned for. static_scales: the scales, if a kernel takes
    them by value."""

    spec: DecodeSpec
    arch: str
    num_sms: int
    static_scales: tuple[float, float] | None = None

    def optional(self, others: Sequence[jax.Array]) -> tuple[jax.Array | None, jax.Array | None]:
        """cu_seqlens_q and visible_lens from the arrays after seq_lens; each is None if the call has none."""
        ragged = self.spec.ragged
        return others[0] if ragged else None, others[int(ragged)] if self.spec.visible_lens else None


# An array can be split along heads, if it has them, and along requests. The cache is whole: any request may name any
# page. Ragged rows can't be split by requests: where a request ends is known only on the device.
_SHARDING_RULES = {
    False: (
        "b s h d, p z e, b m, b, {}c -> b s h l, b s h",
        ("s", "d", "p", "z", "e", "m", "c", "l"),
    ),
    True: (
        "t h d, p z e, b m, b, o, {}c -> t h l, t h",
        ("t", "d", "p", "z", "e", "b", "m", "o", "c", "l"),
    ),
}


@functools.cache
def _transformable(call: _Planned) -> Callable[..., Any]:
    """The call as a function (q, kv_cache, block_tables, seq_lens, [cu_seqlens_q,] [visible_lens,] scales) -> (out,
    lse)."""
    rule, fixed = _SHARDING_RULES[call.spec.ragged]
    visible_lens = "" if not call.spec.visible_lens else "t, " if call.spec.ragged else "b s, "
    return transforms.transformable(
        functools.partial(_on_one_device, call),
        rule=rule.format(visible_lens),
        fixed=fixed,
        partition=functools.partial(_partition, call),
        fold=functools.partial(_fold, call),
        shared=1,
        unexpanded=(1,),  # a cache that all of vmap's calls share stays one
        derivative=_refuse_derivative,
    )


def _refuse_derivative(*_: jax.Array) -> NoReturn:
    raise contract.not_differentiable(
        "mla_decode",
        "train through mla_prefill (expanded attention), or use implementation='reference' ('xla' has none either)",
    )


def _on_one_device(
    call: _Planned, q: jax.Array, kv_cache: jax.Array, block_tables: jax.Array, seq_lens: jax.Array, *others: jax.Array
) -> Results:
    """The kernel on the arrays of one device, which may have only a part of the heads and requests. others:
    cu_seqlens_q (in ragged calls), visible_lens (if the call has them) and the scales.
    """
    (cu_seqlens_q, visible_lens), scales = call.optional(others), others[-1]
    spec = call.spec.with_sizes_of(q.shape, kv_cache.shape, block_tables.shape)
    if call.arch in MLA_DECODE_SM100.archs:
        return blackwell.on_one_device(
            DecodeArrays(q, kv_cache, block_tables, seq_lens, cu_seqlens_q, visible_lens),
            scales,
            spec=spec,
            static_scales=call.static_scales,
            arch=call.arch,
            num_sms=call.num_sms,
        )
    config = sm90_decode.decode_config(spec)

    def launch(first: Any, stop: Any) -> Results:
        """The rows of requests first to stop - 1. In a ragged call, rows of the other requests are in the result but
        not written.
        """
        mine = slice(first, stop)
        rows_of = q if spec.ragged else q[mine]
        rows = math.prod(rows_of.shape[:-1])
        workspaces = sm90_decode.workspace_shapes(config, call.num_sms, stop - first, spec.max_pages)
        # The kernel always has an operand for offsets; calls that are not ragged pass seq_lens, which it does not read.
        offsets = seq_lens[mine] if cu_seqlens_q is None else cu_seqlens_q[first : stop + 1]
        visible: tuple[jax.Array, ...] = ()
        if visible_lens is not None:
            visible = (visible_lens if spec.ragged else visible_lens[mine].reshape(-1),)
        query = rows_of.reshape(rows, spec.head_dim)
        out, lse, *_ = kernel_call(
            MLA_DECODE,
            config,
            (query, kv_cache, block_tables[mine], seq_lens[mine], offsets, *visible, scales),
            ((rows, spec.latent_dim), (rows,), *(shape for shape, _ in workspaces.values())),
            arch=call.arch,
        )
        return out.reshape(*rows_of.shape[:-1], spec.latent_dim), lse.reshape(rows_of.shape[:-1])

    parts = sm90_decode.launches(config, spec.batch, spec.max_pages)
    results = [launch(first, stop) for first, stop in parts]
    if cu_seqlens_q is None:
        outs, lses = zip(*results, strict=True)
        return results[0] if len(parts) == 1 else (jnp.concatenate(outs), jnp.concatenate(lses))
    # The kernel walks requests: it doesn't write rows of no request, and may write rows from position max_q_len on.
    request, position, owned = row_owner(cu_seqlens_q, spec.total_q_len)
    kept = owned & (position < spec.max_q_len)
    out, lse = results[0]
    for (first, _), (later_out, later_lse) in zip(parts[1:], results[1:], strict=True):
        later = request >= first
        out, lse = jnp.where(later[:, None, None], later_out, out), jnp.where(later[:, None], later_lse, lse)
    out = jnp.where(kept[:, None, None], out, jnp.zeros((), out.dtype))
    return out, jnp.where(kept[:, None], lse, -jnp.inf)


def _fold(
    call: _Planned,
    run: Callable[..., Results],
    axis_size: int,
    q: jax.Array,
    kv_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    *others: jax.Array,
) -> Results:
    """vmap's axis V, leading in all arrays but the scales and a shared cache, becomes V * B requests of one call."""
    batch, max_pages = block_tables.shape[1:]
    if kv_cache.ndim == 4:
        pages = kv_cache.shape[1]
        kv_cache = kv_cache.reshape(axis_size * pages, *kv_cache.shape[2:])
        block_tables = block_tables + (jnp.arange(axis_size, dtype=jnp.int32) * pages)[:, None, None]
    scales = others[-1]
    cu_seqlens_q, visible_lens = call.optional(others)
    optional = []
    if cu_seqlens_q is not None:
        offsets, fillers = _fold_offsets(cu_seqlens_q, q.shape[1], call.spec.max_q_len)
        optional = [offsets]
        block_tables = jnp.pad(block_tables, ((0, 0), (0, fillers), (0, 0)))
        seq_lens = jnp.pad(seq_lens, ((0, 0), (0, fillers)))
        batch += fillers
    if visible_lens is not None:
        optional.append(visible_lens.reshape(axis_size * visible_lens.shape[1], *visible_lens.shape[2:]))
    out, lse = run(
        q.reshape(axis_size * q.shape[1], *q.shape[2:]),
        kv_cache,
        block_tables.reshape(axis_size * batch, max_pages),
        seq_lens.reshape(axis_size * batch),
        *optional,
        scales,
    )
    split = (axis_size, q.shape[1])
    return out.reshape(*split, *out.shape[1:]), lse.reshape(*split, *lse.shape[1:])


def _fold_offsets(offsets: jax.Array, total: int, max_q_len: int) -> tuple[jax.Array, int]:
    """The offsets of one packing of V * `total` rows, from cu_seqlens_q [V, B + 1] of V packings of `total` rows each.

    Rows that a packing leaves unused at its end must not become part of its last request: they go to requests without
    keys, each at most max_q_len long. How many such requests each packing gets is the second result.
    """
    num_packings = offsets.shape[0]
    fillers = -(-total // max_q_len)
    ends = offsets[:, -1:] + jnp.arange(1, fillers + 1, dtype=jnp.int32) * max_q_len
    offsets = jnp.concatenate([offsets, jnp.minimum(ends, total)], axis=1)
    starts = jnp.arange(num_packings, dtype=jnp.int32)[:, None] * total
    folded = (offsets[:, :-1] + starts).reshape(-1)
    return jnp.concatenate([folded, jnp.full((1,), num_packings * total, jnp.int32)]), fillers


def _partition(call: _Planned, shapes: Sequence[Any]) -> transforms.Partition:
    """The sharding of q along heads and requests; everything else is whole."""
    q, _, tables, lens, *_ = map(transforms.named_axes, shapes)
    if call.spec.ragged:
        rows, visible = P(None, q[1], None), [P(None)] * call.spec.visible_lens
        inputs = (rows, P(None, None, None), P(None, None), P(None), P(None), *visible, P(None))
        return inputs, (rows, P(None, q[1]))
    batch = q[0] or transforms.axes_apart(tables[0] or lens[0], q[2])
    rows, visible = P(batch, None, q[2], None), [P(batch, None)] * call.spec.visible_lens
    inputs = (rows, P(None, None, None), P(batch, None), P(batch), *visible, P(None))
    return inputs, (rows, P(batch, None, q[2]))

"""mla_decode by the CuTe DSL kernels: their operands, and what jax's transformations make of a call.

From the outside in: derivatives are refused (custom_jvp), vmap folds its axis into the batch (custom_vmap),
partitioning splits heads and batch (custom_partitioning), and what remains is one custom call on the shapes of one
device.

A program over several devices is exported through shard_map: automatic partitioning calls back into this process, which
jax can't serialise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tsmla_jax.ops import cute_call
from tsmla_jax.ops.arrays import as_scale
from tsmla_jax.ops.mla_decode import blackwell
from tsmla_jax.ops.ragged import row_owner
from tsmla_kernels import contract
from tsmla_kernels.catalog import MLA_DECODE, MLA_DECODE_SM100
from tsmla_kernels.contract import DecodeSpec
from tsmla_kernels.sm90.decode import config as sm90_decode
from tsmla_kernels.sm100 import config as sm100

Results = tuple[jax.Array, jax.Array]


def why_not(spec: DecodeSpec) -> list[str]:
    """The reasons why no kernel can run this call; empty if one can."""
    on_blackwell = cute_call.target_arch() in MLA_DECODE_SM100.archs
    kernel, rules = (MLA_DECODE_SM100, sm100) if on_blackwell else (MLA_DECODE, sm90_decode)
    reasons = cute_call.why_not(kernel) + rules.decode_reasons(spec)
    for name in ("num_heads", "max_q_len"):
        if not isinstance(getattr(spec, name), int):
            reasons.append(f"{name} is {getattr(spec, name)}; the kernels are compiled for a number")
    if on_blackwell and not reasons:
        reasons += cute_call.why_not_made(kernel, sm100.decode_config(spec))
    return reasons


def why_not_by_default(spec: DecodeSpec) -> list[str]:
    """The reasons against the kernels that stand only when implementation is None."""
    return cute_call.why_not_by_default()


def notes(spec: DecodeSpec) -> list[str]:
    """What is to be known of the kernels of this architecture."""
    return [sm100.NOTICE, sm100.FINITE] if cute_call.target_arch() in MLA_DECODE_SM100.archs else []


def mla_decode(
    q: jax.Array,
    kv_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    *,
    spec: DecodeSpec,
    softmax_scale: float | jax.Array,
    cu_seqlens_q: jax.Array | None,
    q_scale: float | jax.Array | None,
    kv_scale: float | jax.Array | None,
) -> Results:
    """out and lse as the public mla_decode documents them; both are always returned. Not differentiable."""
    arch = cute_call.target_arch()
    if arch is None:
        raise contract.not_runnable("mla_decode", "cute", why_not(spec))
    call = _Call(
        max_q_len=spec.max_q_len if spec.ragged else None,
        latent_dim=spec.latent_dim,
        causal=spec.causal,
        batch_invariant=spec.batch_invariant,
        arch=arch,
        num_sms=cute_call.num_sms(arch),
    )
    ragged = () if cu_seqlens_q is None else (cu_seqlens_q,)
    scales = _scales(softmax_scale, q_scale, kv_scale)
    if arch in MLA_DECODE_SM100.archs:
        seq_lens = blackwell.behind_check(spec, kv_cache, block_tables, seq_lens)
        if isinstance(scales, np.ndarray):
            call = replace(call, static_scales=(float(scales[0]), float(scales[1])))
    return _transformable(call)(q, kv_cache, block_tables, seq_lens, *ragged, scales)


def _scales(
    softmax_scale: float | jax.Array, q_scale: float | jax.Array | None, kv_scale: float | jax.Array | None
) -> jax.Array | np.ndarray:
    """The kernel's operand: what logits and what outputs are multiplied by. Python numbers are multiplied here, so that
    they reach the device as a constant and cost no computation there."""
    given = (softmax_scale, 1.0 if q_scale is None else q_scale, 1.0 if kv_scale is None else kv_scale)
    if all(isinstance(scale, float | int) for scale in given):
        return np.array([given[0] * given[1] * given[2], given[2]], np.float32)
    softmax, query, key = (as_scale(scale, jnp.float32) for scale in given)
    return jnp.stack([softmax * query * key, key])


@dataclass(frozen=True)
class _Call:
    """What is static in a call beside its shapes. max_q_len is None where S is q's second axis; static_scales are the
    scales where a kernel takes them by value."""

    max_q_len: int | None
    latent_dim: int
    causal: bool
    batch_invariant: bool
    arch: str
    num_sms: int
    static_scales: tuple[float, float] | None = None

    @property
    def ragged(self) -> bool:
        return self.max_q_len is not None


@functools.cache
def _transformable(call: _Call) -> Callable[..., Results]:
    """The call as a function (q, kv_cache, block_tables, seq_lens, [cu_seqlens_q,] scales) -> (out, lse)."""
    # custom_partitioning reads the parameters' number from the signature.
    if call.ragged:

        def on_device(q: Any, kv: Any, tables: Any, lens: Any, offsets: Any, scales: Any) -> Results:
            return _on_one_device(call, q, kv, tables, lens, offsets, scales)

    else:

        def on_device(q: Any, kv: Any, tables: Any, lens: Any, scales: Any) -> Results:  # type: ignore[misc]
            return _on_one_device(call, q, kv, tables, lens, None, scales)

    partitioned = custom_partitioning(on_device)
    rule, fixed = _SHARDING_RULES[call.ragged]
    partitioned.def_partition(
        partition=functools.partial(_partition, call, on_device),
        infer_sharding_from_operands=functools.partial(_infer_shardings, call),
        sharding_rule=rule,
        need_replication_factors=fixed,
    )
    batched = custom_vmap(lambda *arrays: partitioned(*arrays))
    batched.def_vmap(functools.partial(_fold_vmap, call))
    refusing = jax.custom_jvp(lambda *arrays: batched(*arrays))
    refusing.defjvp(_refuse_derivative)
    return jax.jit(refusing)


def _refuse_derivative(primals: Any, tangents: Any) -> tuple[Any, Any]:
    raise contract.not_differentiable(
        "mla_decode",
        "train through mla_prefill (expanded attention), or use implementation='reference' ('xla' has none either)",
    )


# ---- the custom call


def _on_one_device(
    call: _Call,
    q: jax.Array,
    kv_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    cu_seqlens_q: jax.Array | None,
    scales: jax.Array,
) -> Results:
    """The kernel on the arrays of one device, whose number of heads and requests may be a part of the whole."""
    *tokens, num_heads, head_dim = q.shape
    total_q_len = tokens[0] if call.ragged else tokens[0] * tokens[1]
    num_pages, page_size, _ = kv_cache.shape
    batch, max_pages = block_tables.shape
    dtype, kv_dtype = jnp.dtype(q.dtype).name, jnp.dtype(kv_cache.dtype).name
    spec = DecodeSpec(
        batch=batch,
        total_q_len=total_q_len,
        max_q_len=call.max_q_len if call.ragged else tokens[1],
        num_heads=num_heads,
        latent_dim=call.latent_dim,
        rope_dim=head_dim - call.latent_dim,
        num_pages=num_pages,
        page_size=page_size,
        max_pages=max_pages,
        q_dtype=dtype,
        kv_dtype=kv_dtype,
        ragged=call.ragged,
        causal=call.causal,
        return_lse=True,
        batch_invariant=call.batch_invariant,
    )
    if call.arch in MLA_DECODE_SM100.archs:
        arrays = (q, kv_cache, block_tables, seq_lens, cu_seqlens_q, scales)
        static_scales = call.static_scales
        return blackwell.on_one_device(
            *arrays, spec=spec, static_scales=static_scales, arch=call.arch, num_sms=call.num_sms
        )
    config = sm90_decode.decode_config(spec)
    rows = total_q_len * num_heads
    workspaces = sm90_decode.workspace_shapes(config, call.num_sms, batch, max_pages)
    offsets = seq_lens if cu_seqlens_q is None else cu_seqlens_q  # the kernel's operand is there in both cases
    out, lse, *_ = cute_call.cute_call(
        MLA_DECODE,
        config,
        (q.reshape(rows, head_dim), kv_cache, block_tables, seq_lens, offsets, scales),
        ((rows, call.latent_dim), (rows,), *(shape for shape, _ in workspaces.values())),
        arch=call.arch,
    )
    out, lse = out.reshape(*tokens, num_heads, call.latent_dim), lse.reshape(*tokens, num_heads)
    if cu_seqlens_q is not None:
        # The kernel walks requests: it doesn't write rows of none, and max_q_len is only its bound.
        _, position, owned = row_owner(cu_seqlens_q, total_q_len)
        kept = owned & (position < spec.max_q_len)
        out = jnp.where(kept[:, None, None], out, jnp.zeros((), out.dtype))
        lse = jnp.where(kept[:, None], lse, -jnp.inf)
    return out, lse


# ---- vmap


def _fold_vmap(
    call: _Call, axis_size: int, in_batched: Sequence[bool], *arrays: jax.Array
) -> tuple[Results, tuple[bool, bool]]:
    """vmap's axis V, leading where an array has it, becomes V * B requests of one call."""
    if in_batched[-1]:
        # One call has one pair of scales, so calls that differ in them can't be one.
        whole = [
            a if b else jnp.broadcast_to(a, (axis_size, *a.shape)) for a, b in zip(arrays, in_batched, strict=True)
        ]
        return lax.map(lambda each: _transformable(call)(*each), tuple(whole)), (True, True)
    q, kv_cache, block_tables, seq_lens = (
        array if batched or i == 1 else jnp.broadcast_to(array, (axis_size, *array.shape))
        for i, (array, batched) in enumerate(zip(arrays[:4], in_batched[:4], strict=True))
    )
    batch, max_pages = block_tables.shape[1:]
    if in_batched[1]:
        pages = kv_cache.shape[1]
        kv_cache = kv_cache.reshape(axis_size * pages, *kv_cache.shape[2:])
        block_tables = block_tables + (jnp.arange(axis_size, dtype=jnp.int32) * pages)[:, None, None]
    ragged: tuple[jax.Array, ...] = ()
    if call.ragged:
        offsets = _broadcast(arrays[4], in_batched[4], axis_size)
        offsets, fillers = _fold_offsets(offsets, q.shape[1], call.max_q_len or 1)
        ragged = (offsets,)
        block_tables = jnp.pad(block_tables, ((0, 0), (0, fillers), (0, 0)))
        seq_lens = jnp.pad(seq_lens, ((0, 0), (0, fillers)))
        batch += fillers
    out, lse = _transformable(call)(
        q.reshape(axis_size * q.shape[1], *q.shape[2:]),
        kv_cache,
        block_tables.reshape(axis_size * batch, max_pages),
        seq_lens.reshape(axis_size * batch),
        *ragged,
        arrays[-1],
    )
    split = (axis_size, q.shape[1])
    return (out.reshape(*split, *out.shape[1:]), lse.reshape(*split, *lse.shape[1:])), (True, True)


def _broadcast(array: jax.Array, batched: bool, axis_size: int) -> jax.Array:
    return array if batched else jnp.broadcast_to(array, (axis_size, *array.shape))


def _fold_offsets(offsets: jax.Array, total: int, max_q_len: int) -> tuple[jax.Array, int]:
    """cu_seqlens_q [V, B + 1] over V packings of `total` rows each -> the offsets of all of them as one packing.

    Rows that a packing leaves unused at its end must not become part of its last request: they go to requests without
    keys, `fillers` of them for each packing (returned too), each no longer than max_q_len."""
    num_packings = offsets.shape[0]
    fillers = -(-total // max_q_len)
    ends = offsets[:, -1:] + jnp.arange(1, fillers + 1, dtype=jnp.int32) * max_q_len
    offsets = jnp.concatenate([offsets, jnp.minimum(ends, total)], axis=1)
    starts = jnp.arange(num_packings, dtype=jnp.int32)[:, None] * total
    folded = (offsets[:, :-1] + starts).reshape(-1)
    return jnp.concatenate([folded, jnp.full((1,), num_packings * total, jnp.int32)]), fillers


# ---- partitioning

# Heads split everything but the cache; requests split everything of theirs but the cache, whose pages any of them may
# name. Ragged rows can't be split by requests: where one ends is only known on the device.
_SHARDING_RULES = {
    False: (
        "b s h d, p z e, b m, b, c -> b s h l, b s h",
        ("s", "d", "p", "z", "e", "m", "c", "l"),
    ),
    True: (
        "t h d, p z e, b m, b, o, c -> t h l, t h",
        ("t", "d", "p", "z", "e", "b", "m", "o", "c", "l"),
    ),
}


def _shardings(call: _Call, mesh: Any, shapes: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, Any]]:
    """Operands' and results' shardings: q's along heads and requests, everything else whole."""
    spec = cute_call.named_axes(shapes[0])
    heads_axis = 1 if call.ragged else 2
    heads = spec[heads_axis]
    batch = None if call.ragged else spec[0] or cute_call.named_axes(shapes[2])[0] or cute_call.named_axes(shapes[3])[0]
    operands: tuple[P, ...]
    if call.ragged:
        operands = (P(None, heads, None), P(None, None, None), P(None, None), P(None), P(None), P(None))
        results = (P(None, heads, None), P(None, heads))
    else:
        operands = (P(batch, None, heads, None), P(None, None, None), P(batch, None), P(batch), P(None))
        results = (P(batch, None, heads, None), P(batch, None, heads))
    named = functools.partial(NamedSharding, mesh)
    return tuple(map(named, operands)), (named(results[0]), named(results[1]))


def _partition(
    call: _Call, on_device: Callable[..., Results], mesh: Any, arg_shapes: Sequence[Any], result_shape: Any
) -> tuple[Any, ...]:
    operands, results = _shardings(call, mesh, arg_shapes)
    return mesh, on_device, results, operands


def _infer_shardings(call: _Call, mesh: Any, arg_shapes: Sequence[Any], result_shape: Any) -> tuple[Any, Any]:
    return _shardings(call, mesh, arg_shapes)[1]

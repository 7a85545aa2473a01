"""merge_attention_states by the CuTe DSL kernel: one custom call whose results are the first part's memory, where that
has no further use.

From the outside in: the derivative is that of "xla" (custom_vjp), vmap's axis is one more axis of rows (custom_vmap),
partitioning splits rows as the first part's are (custom_partitioning), and what remains is one custom call on the rows
of one device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tsmla_jax.ops import cache_call, cute_call
from tsmla_jax.ops.loops import carry
from tsmla_jax.ops.merge_attention_states import xla
from tsmla_jax.ops.merge_attention_states.xla import Parts, State
from tsmla_kernels import contract
from tsmla_kernels.catalog import MERGE_ATTENTION_STATES
from tsmla_kernels.contract import MergeSpec
from tsmla_kernels.merge import config as merge_rules


def why_not(spec: MergeSpec) -> list[str]:
    """The reasons why the kernel can't run this call; empty if it can."""
    return cute_call.why_not(MERGE_ATTENTION_STATES) + merge_rules.merge_reasons(spec)


def why_not_by_default(spec: MergeSpec) -> list[str]:
    """The reasons against the kernel that stand only when implementation is None."""
    return cache_call.why_not_by_default()


def merge_attention_states(outs: Parts, lses: Parts, *, spec: MergeSpec) -> State:
    """out and lse, as the public merge_attention_states documents them."""
    arch = cute_call.target_arch()
    if arch is None:
        raise contract.not_runnable("merge_attention_states", "cute", why_not(spec))
    if 0 in spec.rows:
        return outs[0], lses[0]
    # Typed alike before the custom derivative, as its cotangents are.
    alike = (tuple(carry(x, *outs, *lses) for x in parts) for parts in (outs, lses))
    return _differentiable(spec, arch)(*alike)


@functools.cache
def _differentiable(spec: MergeSpec, arch: str) -> Callable[[Parts, Parts], State]:
    """The call as a function (outs, lses) -> (out, lse)."""
    run = _transformable(merge_rules.merge_config(spec), arch)

    def forward(outs: Parts, lses: Parts) -> tuple[State, tuple[Parts, Parts, jax.Array]]:
        result = run(*outs, *lses)
        return result, (outs, lses, result[0])

    merge = jax.custom_vjp(lambda outs, lses: run(*outs, *lses))
    merge.defvjp(forward, functools.partial(xla.backward, spec))
    return merge


@functools.cache
def _transformable(config: merge_rules.MergeConfig, arch: str) -> Callable[..., State]:
    """The call without its derivative: a function (N outs, N lses) -> (out, lse)."""
    parts = config.parts

    def on_device(*arrays: jax.Array) -> State:
        outs, lses = arrays[:parts], arrays[parts:]
        rows = [x.reshape(-1, config.head_dim) for x in outs] + [x.reshape(-1) for x in lses]
        shapes = rows[0].shape, rows[-1].shape
        out, lse = cute_call.cute_call(MERGE_ATTENTION_STATES, config, rows, shapes, arch=arch)
        return out.reshape(outs[0].shape), lse.reshape(lses[0].shape)

    def shardings(mesh: Any, shapes: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, Any]]:
        """Operands' and results' shardings: rows as those of the first part, columns whole."""
        rows = cute_call.named_axes(shapes[0])[:-1]
        out, lse = NamedSharding(mesh, P(*rows, None)), NamedSharding(mesh, P(*rows))
        return (out,) * parts + (lse,) * parts, (out, lse)

    def split(mesh: Any, shapes: Sequence[Any], _: Any) -> tuple[Any, ...]:
        operands, results = shardings(mesh, shapes)
        return mesh, on_device, results, operands

    partitioned = custom_partitioning(on_device)
    partitioned.def_partition(
        partition=split,
        infer_sharding_from_operands=lambda mesh, shapes, _: shardings(mesh, shapes)[1],
        sharding_rule=f"{', '.join(['... l'] * parts + ['...'] * parts)} -> ... l, ...",
        need_replication_factors=("l",),
    )
    batched = custom_vmap(lambda *arrays: partitioned(*arrays))

    @batched.def_vmap
    def over_axis(axis_size: int, in_batched: Sequence[bool], *arrays: jax.Array) -> tuple[State, tuple[bool, bool]]:
        whole = [
            array if given else jnp.broadcast_to(array, (axis_size, *array.shape))
            for array, given in zip(arrays, in_batched, strict=True)
        ]
        return run(*whole), (True, True)

    run: Callable[..., State] = jax.jit(batched)
    return run

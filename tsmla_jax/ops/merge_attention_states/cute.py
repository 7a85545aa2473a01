"""merge_attention_states by the CuTe DSL kernel: one custom call. Its results overwrite the first part's memory if the
program does not use that part again. The derivative is that of "xla", vmap's axis is one more axis of rows, and rows
are partitioned as those of the first part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from tsmla_jax.ops import device, transforms
from tsmla_jax.ops.kernel_call import kernel_call
from tsmla_jax.ops.merge_attention_states import xla
from tsmla_jax.ops.merge_attention_states.xla import Parts, State
from tsmla_kernels.catalog import MERGE_ATTENTION_STATES
from tsmla_kernels.contract import MergeSpec
from tsmla_kernels.merge import config as merge_rules


def why_not(spec: MergeSpec) -> list[str]:
    """The reasons why the kernel can't run this call; empty if it can."""
    return device.why_not(MERGE_ATTENTION_STATES) + MERGE_ATTENTION_STATES.reasons(spec)


def merge_attention_states(outs: Parts, lses: Parts, *, spec: MergeSpec) -> State:
    """out and lse, as the public merge_attention_states documents them."""
    if 0 in spec.rows:
        return outs[0], lses[0]
    merged: State = _differentiable(spec, device.arch_for(MERGE_ATTENTION_STATES))(*outs, *lses)
    return merged


@functools.cache
def _differentiable(spec: MergeSpec, arch: str) -> Callable[..., Any]:
    """The call as a function (N outs, N lses) -> (out, lse)."""

    def backward(saved: tuple[Parts, State], cotangents: State) -> Parts:
        operands, (out, _) = saved
        parts = operands[: spec.num_parts], operands[spec.num_parts :], out
        d_outs, d_lses = xla.backward(spec, parts, cotangents)
        return d_outs + d_lses

    return transforms.with_backward(_transformable(merge_rules.merge_config(spec), arch), backward)


@functools.cache
def _transformable(config: merge_rules.MergeConfig, arch: str) -> Callable[..., Any]:
    """The call without its derivative."""
    parts = config.parts

    def on_device(*arrays: jax.Array) -> State:
        outs, lses = arrays[:parts], arrays[parts:]
        rows = [x.reshape(-1, config.head_dim) for x in outs] + [x.reshape(-1) for x in lses]
        shapes = rows[0].shape, rows[-1].shape
        out, lse = kernel_call(MERGE_ATTENTION_STATES, config, rows, shapes, arch=arch)
        return out.reshape(outs[0].shape), lse.reshape(lses[0].shape)

    def partition(shapes: Sequence[Any]) -> transforms.Partition:
        """The sharding: rows as in the first part, columns whole."""
        rows = transforms.named_axes(shapes[0])[:-1]
        out, lse = P(*rows, None), P(*rows)
        return (out,) * parts + (lse,) * parts, (out, lse)

    return transforms.transformable(
        on_device,
        rule=f"{', '.join(['... l'] * parts + ['...'] * parts)} -> ... l, ...",
        fixed=("l",),
        partition=partition,
        fold=lambda run, axis_size, *arrays: run(*arrays),
    )

"""mla_prefill_kv by the CuTe DSL kernels. The Hopper kernel reads kv and k_rope in place; for dtypes and widths that it
can't read so, and on Blackwell, k and v are made first and go to mla_prefill's kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from tsmla_jax.ops import device, transforms
from tsmla_jax.ops.inputs import Scales
from tsmla_jax.ops.mla_prefill import backward
from tsmla_jax.ops.mla_prefill import cute as prefill
from tsmla_jax.ops.mla_prefill.call import (
    Cotangents,
    Planned,
    Results,
    Saved,
    planned,
    refuse_second_derivative,
)
from tsmla_jax.ops.mla_prefill_kv import reference
from tsmla_kernels.catalog import MLA_PREFILL
from tsmla_kernels.contract import PrefillSpec
from tsmla_kernels.sm90.prefill import config as sm90_prefill
from tsmla_kernels.sm90.prefill.record import SHARED_ROPE_DIM


def mla_prefill_kv(
    q: jax.Array,
    kv: jax.Array,
    k_rope: jax.Array,
    cu_seqlens_q: jax.Array,
    cu_seqlens_kv: jax.Array,
    scales: Scales,
    *selection: jax.Array,
    spec: PrefillSpec,
    sinks: jax.Array | None = None,
) -> Results:
    """out, lse and, if the spec has them, max_logits as the public mla_prefill_kv documents them. spec: the spec of the
    call on k and v. Reverse-mode differentiable.
    """
    if device.why_not(MLA_PREFILL) or sm90_prefill.shared_rope_reasons(spec, k_rope.shape[1]):
        attend, offsets = prefill.mla_prefill, (cu_seqlens_q, cu_seqlens_kv)
        return reference.mla_prefill_kv(
            q, kv, k_rope, *offsets, scales, *selection, spec=spec, sinks=sinks, attend=attend
        )
    operand = scales.operand()
    run = _differentiable(planned(spec, operand))
    given = (q, kv, k_rope) if sinks is None else (q, kv, k_rope, sinks.astype(jnp.float32))
    results: Results = run(*given, operand, cu_seqlens_q, cu_seqlens_kv, *selection)
    return results


@functools.cache
def _differentiable(call: Planned) -> Callable[..., Any]:
    """The call as a function (q, kv, k_rope, [sinks,] scales, cu_seqlens_q, cu_seqlens_kv, *selection) -> Results.
    Under vmap there is one call after another.
    """

    def on_device(q: jax.Array, kv: jax.Array, k_rope: jax.Array, *others: jax.Array) -> Results:
        sinks, (scales, *offsets), selection = call.split(others)
        spec = call.spec_of(q, kv, offsets[0])
        inputs = (q, kv, k_rope, *offsets, *selection, *sinks, scales)
        return prefill.on_hopper(call, spec, inputs, k_rope.shape[1])

    run = transforms.transformable(
        on_device,
        rule=f"t h k, s h w, s r{', h' * call.spec.sinks}, c, b, b{', n m, t' * call.spec.selection}"
        f" -> t h v, t h{', t h' * call.spec.max_logits}",
        fixed=("t", "k", "s", "w", "r", "c", "b", *("n", "m") * call.spec.selection, "v"),
        partition=functools.partial(_partition, call),
        derivative=refuse_second_derivative,
    )

    def derivative(saved: Saved, cotangents: Results) -> Cotangents:
        (q, kv, k_rope, *others), results = saved
        expand = functools.partial(reference.expand, k_dim=q.shape[2])
        _, (_, *offsets), _ = call.split(others)
        spec = call.spec_of(q, kv, offsets[0])
        if k_rope.shape[1] == SHARED_ROPE_DIM and not backward.why_no_kernel(spec, call.arch):
            return backward.by_kernel(call, saved, cotangents)
        (k, v), contract_keys = jax.vjp(expand, kv, k_rope)
        saved = ((q, k, v, *others), results)
        d_q, d_k, d_v, *rest = backward.backward(call, saved, cotangents)
        return d_q, *contract_keys((d_k, d_v)), *rest

    return transforms.with_backward(run, derivative)


def _partition(call: Planned, shapes: Sequence[Any]) -> transforms.Partition:
    """The sharding of q along heads; everything else is whole."""
    heads = transforms.named_axes(shapes[0])[1]
    rows = P(None, heads, None)
    sinks, *others = call.split(shapes[3:])
    shared = tuple(P(*(None,) * len(shape.shape)) for shapes in others for shape in shapes)
    results = (rows, *[P(None, heads)] * call.num_rows)
    return (rows, rows, P(None, None), *(P(heads) for _ in sinks), *shared), results

"""merge_attention_states: one attention result from partial results over disjoint keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from tsmla_jax.ops.inputs import describe
from tsmla_jax.ops.operation import Implementation, Operation, Preference, row_specs
from tsmla_kernels import contract

if TYPE_CHECKING:
    from tsmla_jax.array_types import Array, Float


def merge_attention_states(
    outs: Sequence[Float[Array, "*rows L"]] | Float[Array, "N ... L"],
    lses: Sequence[Float[Array, "*rows"]] | Float[Array, "N ..."],
    *,
    implementation: Preference = None,
) -> tuple[Float[Array, "*rows L"], Float[Array, "*rows"]]:
    """The exact merge of attention over disjoint sets of keys: weights exp(lse_i - logsumexp(lse)).

    The same merge as merge_attn_states in vLLM and FlashInfer's cascade, for chunked context, split keys and context
    parallelism.

    Args:
      outs: N partial results [..., H, L], a sequence or one array with N in front; float16, bfloat16, float32 or
        float64.
      lses: their logsumexps [..., H], natural logarithm; float32 or float64. An lse of -inf, or of +inf as
        FlashAttention and FlashMLA write it, means that the part saw no key: its out is then ignored, even if it is
        NaN.
      implementation: "cute", "xla", "reference", several of these in order, or None for the best; see `explain`.

    Returns:
      out [..., H, L] in outs' dtype and lse [..., H] in lses'; a row that no part saw is 0 with lse -inf. Computed in
      float32, or in float64 if outs or lses are. Differentiable in outs and lses.

    Raises:
      TypeError, ValueError: an argument is not legal.
      NotImplementedError: the named implementation can't run this call.
    """
    spec, chosen = OPERATION.choose(**locals())
    # Parts are taken by index: iterating over a sharded array loses its sharding.
    arrays = tuple(tuple(jnp.asarray(parts[i]) for i in range(spec.num_parts)) for parts in (outs, lses))
    return chosen.call(arrays, lambda: row_specs(arrays[0][0]), spec=spec)


def _spec(outs: Sequence[jax.Array] | jax.Array, lses: Sequence[jax.Array] | jax.Array) -> contract.MergeSpec:
    return contract.merge_spec(outs=_parts("outs", outs), lses=_parts("lses", lses))


def _parts(name: str, parts: Sequence[jax.Array] | jax.Array) -> list[contract.Array]:
    if isinstance(parts, list | tuple):
        return [describe(f"{name}[{i}]", part) for i, part in enumerate(parts)]
    stacked = describe(name, parts)
    if not stacked.shape or not isinstance(stacked.shape[0], int):
        raise ValueError(
            f"{name}: got an array of shape {stacked.shape}; its first axis, the parts, must be a static int"
        )
    return [contract.Array(stacked.shape[1:], stacked.dtype)] * stacked.shape[0]


def _implementations() -> Mapping[str, Implementation]:
    from tsmla_jax.ops import device
    from tsmla_jax.ops.merge_attention_states import cute, reference, xla

    return {
        "cute": Implementation(cute.merge_attention_states, cute.why_not, device.why_not_untested),
        "xla": Implementation(xla.merge_attention_states),
        "reference": Implementation(reference.merge_attention_states),
    }


OPERATION = Operation(merge_attention_states, _spec, _implementations)

"""indexer_loss: how far the V3.2 indexer's choice is from what the attention looks at, and its gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from tsmla_jax.ops.inputs import Scale, check_mesh_axis, describe_call
from tsmla_jax.ops.operation import Implementation, Operation, Preference, row_specs
from tsmla_jax.ops.selected import checks
from tsmla_kernels.contract import indexer as indexer_contract

if TYPE_CHECKING:
    from tsmla_jax.array_types import Array, Float, Int32


def indexer_loss(
    index_q: Float[Array, "T Hi Di"],
    index_weights: Float[Array, "T Hi"],
    index_cache: Float[Array, "P Z Di"],
    q: Float[Array, "T H D"],
    kv_cache: Float[Array, "P Z D"],
    lse: Float[Array, "T H"],
    *,
    softmax_scale: Scale,
    indices: Int32[Array, "T K"] | None = None,
    lengths: Int32[Array, " T"] | None = None,
    block_tables: Int32[Array, "B M"] | None = None,
    seq_lens: Int32[Array, " B"] | None = None,
    cu_seqlens_q: Int32[Array, " B+1"] | None = None,
    sinks: Float[Array, " H"] | None = None,
    head_axis: str | None = None,
    implementation: Preference = None,
) -> Float[Array, " T"]:
    """The loss of DeepSeek-V3.2's indexer, for each query token; differentiable in the indexer's arguments.

    loss[t] = KL(p[t] || softmax(I[t])) over the token's keys. I are the indexer's logits of these keys
    (indexer_selected_logits). p are the attention's probabilities, summed over its heads and divided by their sum over
    the keys; no gradient passes through them.

    The keys are those of `indices` (sparse training), or all keys of the token's text by `block_tables` (the dense
    warm-up). Slots and pages are those of both caches. In V4 they are those of compressed entries, and lse, which is of
    the window and the entries together, and `sinks` weigh the heads.

    Args:
      index_q: [T, Hi, Di], the indexer's queries; float16, bfloat16, float32 or float64.
      index_weights: [T, Hi] float32 or float64, constants folded in.
      index_cache: [P, Z, Di], the indexer's keys.
      q: [T, H, D], the attention's queries against kv_cache, as sparse_mla takes them.
      kv_cache: [P, Z, D], the attention's keys. Values of 8 bits are refused in all of these.
      lse: [T, H] float32 or float64, natural logarithm, without sinks: sparse_mla's, or mla_prefill's in the dense
        warm-up. -inf in tokens without a key.
      softmax_scale: the attention's, float or float32 scalar array.
      indices: [T, K] int32 slots, page * Z + offset; -1 selects nothing.
      lengths: [T] int32, the active columns of indices; None: all K.
      block_tables, seq_lens, cu_seqlens_q: without indices, the keys that each token sees, as in indexer_logits.
      sinks: [H], V4's, or None.
      head_axis: under shard_map, the mesh axis whose devices have different heads of q, lse and sinks; probabilities
        are summed over it. Everything else, the loss included, is the same on its devices.
      implementation: "xla" (blocks of tokens and of keys), "reference", or None for the best that can run; see
        `explain`.

    Returns:
      [T] float32 (float64 for float64 index_weights), at least 0 (in "reference" but for rounding), natural logarithm;
      0 for tokens without a key, and where exp(score - lse) is 0 in float32 for every key and head (in V4 beside a
      window that has all weight). V3.2's report sums it over tokens and layers, and detaches the indexer's input from
      the model's graph.

    Derivatives: index_q, index_weights and index_cache in reverse mode; 0 in q, kv_cache, lse and sinks. The memory
      beside the operands is two values a token, one sum for each number of a key, and a block of keys.

    Raises:
      TypeError, ValueError: an argument is not legal; under TSMLA_CHECK=1 also a slot, a length or a page out of range.
      NotImplementedError: the named implementation can't run this call.
    """
    spec, chosen = OPERATION.choose(**locals())
    lengths, seq_lens, block_tables, cu_seqlens_q = (
        None if x is None else jnp.asarray(x) for x in (lengths, seq_lens, block_tables, cu_seqlens_q)
    )
    where: tuple[Any, ...]
    if indices is not None:
        num_slots = spec.index.cache.as_plain().num_slots
        where = (checks.selected(spec.num_columns, num_slots, jnp.asarray(indices), lengths), lengths)
    else:
        assert seq_lens is not None and block_tables is not None  # the spec says so
        seq_lens = checks.indexer_logits(spec.all_logits, seq_lens, block_tables, cu_seqlens_q)
        where = (block_tables, seq_lens, cu_seqlens_q)
    index = tuple(map(jnp.asarray, (index_q, index_weights, index_cache)))
    # No gradient passes through the attention's side.
    attention = [None if x is None else jax.lax.stop_gradient(jnp.asarray(x)) for x in (q, kv_cache, lse, sinks)]
    scale = jax.lax.stop_gradient(jnp.asarray(softmax_scale, jnp.float32))
    arrays = (index, (*attention, scale), where)
    loss: Array = chosen.call(arrays, lambda: row_specs(index[1])[1], spec=spec, head_axis=head_axis)
    return loss


def _spec(*, head_axis: str | None = None, **arguments: Any) -> indexer_contract.IndexerLossSpec:
    check_mesh_axis("head_axis", head_axis)
    return describe_call(indexer_contract.indexer_loss_spec, **arguments)


def _implementations() -> Mapping[str, Implementation]:
    from tsmla_jax.ops.indexer_loss import reference, xla

    return {
        "xla": Implementation(xla.indexer_loss),
        "reference": Implementation(reference.indexer_loss),
    }


OPERATION = Operation(indexer_loss, _spec, _implementations)

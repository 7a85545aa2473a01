"""sparse_mla: absorbed attention over selected cache slots, for V3.2 and V4, decode and prefill in one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

import jax.numpy as jnp

from tsmla_jax.ops.inputs import Scale, Scales, describe_call
from tsmla_jax.ops.mla_prefill.results import asked_for
from tsmla_jax.ops.operation import Implementation, Operation, Preference, row_specs
from tsmla_jax.ops.selected import checks
from tsmla_kernels import contract
from tsmla_kernels.contract import sparse as sparse_contract

if TYPE_CHECKING:
    from tsmla_jax.array_types import Array, Float, Int32


@overload
def sparse_mla(
    q: Float[Array, "T H D"],
    kv_cache: Array,
    indices: Int32[Array, "T K"],
    lengths: Int32[Array, " T"] | None = None,
    *,
    softmax_scale: Scale,
    latent_dim: int = 512,
    sinks: Float[Array, " H"] | None = None,
    compressed_kv_cache: Array | None = None,
    window: int | None = None,
    page_size: int | None = None,
    page_span: int | None = None,
    compressed_page_size: int | None = None,
    compressed_page_span: int | None = None,
    q_scale: Scale | None = None,
    kv_scale: Scale | None = None,
    compressed_kv_scale: Scale | None = None,
    return_lse: Literal[False] = False,
    batch_invariant: bool = False,
    form: str = "auto",
    tokens_per_request: int | None = None,
    deterministic: bool = False,
    return_max_logits: Literal[False] = False,
    implementation: Preference = None,
) -> Float[Array, "T H L"]: ...


@overload
def sparse_mla(
    q: Float[Array, "T H D"],
    kv_cache: Array,
    indices: Int32[Array, "T K"],
    lengths: Int32[Array, " T"] | None = None,
    *,
    softmax_scale: Scale,
    latent_dim: int = 512,
    sinks: Float[Array, " H"] | None = None,
    compressed_kv_cache: Array | None = None,
    window: int | None = None,
    page_size: int | None = None,
    page_span: int | None = None,
    compressed_page_size: int | None = None,
    compressed_page_span: int | None = None,
    q_scale: Scale | None = None,
    kv_scale: Scale | None = None,
    compressed_kv_scale: Scale | None = None,
    return_lse: Literal[True],
    batch_invariant: bool = False,
    form: str = "auto",
    tokens_per_request: int | None = None,
    deterministic: bool = False,
    return_max_logits: Literal[False] = False,
    implementation: Preference = None,
) -> tuple[Float[Array, "T H L"], Float[Array, "T H"]]: ...


@overload
def sparse_mla(
    q: Float[Array, "T H D"],
    kv_cache: Array,
    indices: Int32[Array, "T K"],
    lengths: Int32[Array, " T"] | None = None,
    *,
    softmax_scale: Scale,
    latent_dim: int = 512,
    sinks: Float[Array, " H"] | None = None,
    compressed_kv_cache: Array | None = None,
    window: int | None = None,
    page_size: int | None = None,
    page_span: int | None = None,
    compressed_page_size: int | None = None,
    compressed_page_span: int | None = None,
    q_scale: Scale | None = None,
    kv_scale: Scale | None = None,
    compressed_kv_scale: Scale | None = None,
    return_lse: Literal[False] = False,
    batch_invariant: bool = False,
    form: str = "auto",
    tokens_per_request: int | None = None,
    deterministic: bool = False,
    return_max_logits: Literal[True],
    implementation: Preference = None,
) -> tuple[Float[Array, "T H L"], Float[Array, "T H"]]: ...


@overload
def sparse_mla(
    q: Float[Array, "T H D"],
    kv_cache: Array,
    indices: Int32[Array, "T K"],
    lengths: Int32[Array, " T"] | None = None,
    *,
    softmax_scale: Scale,
    latent_dim: int = 512,
    sinks: Float[Array, " H"] | None = None,
    compressed_kv_cache: Array | None = None,
    window: int | None = None,
    page_size: int | None = None,
    page_span: int | None = None,
    compressed_page_size: int | None = None,
    compressed_page_span: int | None = None,
    q_scale: Scale | None = None,
    kv_scale: Scale | None = None,
    compressed_kv_scale: Scale | None = None,
    return_lse: Literal[True],
    batch_invariant: bool = False,
    form: str = "auto",
    tokens_per_request: int | None = None,
    deterministic: bool = False,
    return_max_logits: Literal[True],
    implementation: Preference = None,
) -> tuple[Float[Array, "T H L"], Float[Array, "T H"], Float[Array, "T H"]]: ...


def sparse_mla(
    q: Float[Array, "T H D"],
    kv_cache: Array,
    indices: Int32[Array, "T K"],
    lengths: Int32[Array, " T"] | None = None,
    *,
    softmax_scale: Scale,
    latent_dim: int = 512,
    sinks: Float[Array, " H"] | None = None,
    compressed_kv_cache: Array | None = None,
    window: int | None = None,
    page_size: int | None = None,
    page_span: int | None = None,
    compressed_page_size: int | None = None,
    compressed_page_span: int | None = None,
    q_scale: Scale | None = None,
    kv_scale: Scale | None = None,
    compressed_kv_scale: Scale | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    form: str = "auto",
    tokens_per_request: int | None = None,
    deterministic: bool = False,
    return_max_logits: bool = False,
    implementation: Preference = None,
) -> Float[Array, "T H L"] | tuple[Array, ...]:
    """Attention of each query token over the cache slots selected for it; one key head, values are the keys' latent.

    out = softmax(softmax_scale * q . kv[indices]) kv[indices, :L], over the valid indices of the row.

    Axes: T query tokens, H query heads (any number), D key width, L latent width, K selected slots a token, P pages,
    Z tokens a page. DeepSeek-V3.2 has D = 576, L = 512 and softmax_scale 192^-0.5 (times yarn's); V4 has D = L = 512.

    Args:
      q: [T, H, D]; float16, bfloat16, float32, float64 or float8_e4m3fn.
      kv_cache: plain [P, Z, D] of floats or float8_e4m3fn; uint8 [P, Z, 656], V3.2 packed rows; or uint8
        [P, page_bytes], V4 packed pages.
      indices: [T, K] int32 slots, page * Z + offset. -1 selects nothing. A slot given twice counts twice. With two
        caches K is a multiple of 4.
      lengths: [T] int32, how many columns of each row are active; the columns after them are never used. None: all K.
      softmax_scale: factor of the logits, float or float32 scalar array, may be traced.
      latent_dim: L; the first L columns of a key are its value.
      sinks: [H], for each head a logit that takes weight and has no value: out is multiplied by 1 / (1 + exp(sink -
        lse)).
      compressed_kv_cache: a second cache, of any layout. The first `window` columns of indices then select from
        kv_cache and the others from this one (rows as build_mixed_sparse_indices makes them).
      window: static; given with compressed_kv_cache and only then.
      page_size: how many rows of a page are used: by default 64 for V4 pages, Z for other layouts.
      page_span: slots between two pages, for packed V4 pages whose slots were remapped (see remap_slots).
      compressed_page_size, compressed_page_span: the same for the second cache.
      q_scale, kv_scale, compressed_kv_scale: q holds query / q_scale and the caches kv / scale; None is 1. Packed rows
        bring their own scales and take no other.
      return_lse: also return the logsumexp of the scaled logits, without the sink.
      batch_invariant: a token's rows are bitwise the same whatever other tokens are in the call.
      form: how the Hopper kernel gathers: "direct", each token for itself; or "union", in groups of neighbouring
        tokens, whose heads add up to 64, or to 32 over plain rows of 576 columns of 16 bits: a group gathers the union
        of its slots once if the device finds that its tokens share enough of them.
        "auto" chooses by the call's sizes; `explain` tells what and why. The other implementations take no notice.
      tokens_per_request: how many neighbouring tokens are of one request, which "auto" considers: 1 in a decoding step
        of one token a request, whose tokens share little. None: not known, or a prompt.
      deterministic: the gradients of two equal calls are equal bit by bit. Without it "cute" adds the caches' gradients
        in an order that may differ between calls; with it the kernel adds them as integers, whose scales take one more
        pass over the selected keys. XLA's loop adds in a fixed order only on CPUs.
      return_max_logits: also return the greatest scaled logit of each row and head, as `mla_prefill` does. "cute" has
        it on Hopper, for queries of 16 bits; its logits are within 2**-11 (0.0005).
      implementation: "cute", "xla" (blocks of tokens and of slots), "reference", or None for the best that can run; see
        `explain`. "cute" on Hopper takes bf16 and f16 queries over V3.2 rows, V4 pages and plain rows of
        float8_e4m3fn, bf16 and f16. Over V3.2 and plain float8_e4m3fn rows it takes float8_e4m3fn queries too, which
        the tensor cores multiply in fp8.

    Returns:
      out [T, H, L] in q's dtype, bfloat16 when q is fp8; with return_lse also lse [T, H], float32 (float64 for
      float64), natural logarithm; with return_max_logits then max_logits [T, H] in lse's dtype, -inf in a row of no
      valid index, NaN if lse is, without a derivative. Every form computes the softmax over the selection, and none
      computes dense attention in its place; forms differ in rounding alone, and with "union" a token's rounding depends
      on its neighbours. What rounding the queries to e4m3 costs is in docs/guides/fp8.md: 1 to 6 % of out, by the
      spread of the logits. A row of no valid index gives out 0 and lse -inf. NaN in a slot that isn't selected never
      reaches a result.

    Derivatives: over plain caches of 16 bits or more, reverse mode in q, the caches, sinks, softmax_scale and q_scale,
    from the saved out and lse, in memory linear in T and in the caches' slots. "cute" has a kernel for the gradient on
    Hopper, for float16 and bfloat16 with D 576 or 512 and L 512; a scale's gradient is NaN there if the scale is 0.
    Otherwise its derivative is that of "xla". Other caches, fp8 queries, kv_scale and compressed_kv_scale raise
    NotImplementedError. "reference" differentiates in every mode. vmap, jit, jax.export and shard_map over heads or
    tokens work with all of them; "cute" is also partitioned automatically over heads and tokens, without moving a
    cache, and jax.export needs disabled_checks=export_disabled_checks() for it.

    Raises:
      TypeError, ValueError: an argument is not legal; the message names it, what it got and what is legal.
        Under TSMLA_CHECK=1 also: a slot outside its cache, a length outside of 0 to K, or, when lengths are given, a -1
        before the end of a row (the end of a row's window may be filled with -1).
      NotImplementedError: the named implementation can't run this call.
    """
    spec, chosen = OPERATION.choose(**locals())
    q = jnp.asarray(q)
    lengths, sinks = (None if x is None else jnp.asarray(x) for x in (lengths, sinks))
    indices = checks.sparse_mla(spec, jnp.asarray(indices), lengths)
    given = (kv_cache,) if compressed_kv_cache is None else (kv_cache, compressed_kv_cache)
    caches, kv_scales = tuple(map(jnp.asarray, given)), (kv_scale, compressed_kv_scale)[: len(given)]
    scales = Scales(softmax_scale, q_scale)
    arrays = (q, caches, indices, lengths, sinks, scales, kv_scales)

    def specs() -> tuple[Any, ...]:
        rows, each = row_specs(q)
        return rows, each, *[each] * spec.max_logits

    return asked_for(chosen.call(arrays, specs, spec=spec), return_lse)


def _spec(*, return_lse: bool = False, **arguments: Any) -> sparse_contract.SparseMLASpec:
    contract.static_bool("return_lse", return_lse)
    return describe_call(sparse_contract.sparse_mla_spec, **arguments)


def _implementations() -> Mapping[str, Implementation]:
    from tsmla_jax.ops import device
    from tsmla_jax.ops.sparse_mla import cute, reference, xla

    return {
        "cute": Implementation(cute.sparse_mla, cute.why_not, device.why_not_untested, cute.notes),
        "xla": Implementation(xla.sparse_mla),
        "reference": Implementation(reference.sparse_mla),
    }


OPERATION = Operation(sparse_mla, _spec, _implementations)

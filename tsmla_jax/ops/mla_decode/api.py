"""mla_decode: absorbed multi-head latent attention over a paged cache."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Literal, overload

import jax.numpy as jnp

from tsmla_jax.ops import checks
from tsmla_jax.ops.inputs import Scale, Scales, attention_of_no_keys, describe_call
from tsmla_jax.ops.operation import Implementation, Operation, Preference, row_specs
from tsmla_kernels import contract

if TYPE_CHECKING:
    from tsmla_jax.array_types import Array, Float, Int32


@overload
def mla_decode(
    q: Float[Array, "*tokens H D"],
    kv_cache: Float[Array, "P Z D"],
    block_tables: Int32[Array, "B M"],
    seq_lens: Int32[Array, " B"],
    *,
    softmax_scale: Scale,
    latent_dim: int = 512,
    cu_seqlens_q: Int32[Array, " B+1"] | None = None,
    max_q_len: int | None = None,
    causal: bool = True,
    visible_lens: Int32[Array, "*tokens"] | None = None,
    q_scale: Scale | None = None,
    kv_scale: Scale | None = None,
    return_lse: Literal[False] = False,
    batch_invariant: bool = False,
    fp8_probabilities: bool = False,
    implementation: Preference = None,
) -> Float[Array, "*tokens H L"]: ...


@overload
def mla_decode(
    q: Float[Array, "*tokens H D"],
    kv_cache: Float[Array, "P Z D"],
    block_tables: Int32[Array, "B M"],
    seq_lens: Int32[Array, " B"],
    *,
    softmax_scale: Scale,
    latent_dim: int = 512,
    cu_seqlens_q: Int32[Array, " B+1"] | None = None,
    max_q_len: int | None = None,
    causal: bool = True,
    visible_lens: Int32[Array, "*tokens"] | None = None,
    q_scale: Scale | None = None,
    kv_scale: Scale | None = None,
    return_lse: Literal[True],
    batch_invariant: bool = False,
    fp8_probabilities: bool = False,
    implementation: Preference = None,
) -> tuple[Float[Array, "*tokens H L"], Float[Array, "*tokens H"]]: ...


def mla_decode(
    q: Float[Array, "*tokens H D"],
    kv_cache: Float[Array, "P Z D"],
    block_tables: Int32[Array, "B M"],
    seq_lens: Int32[Array, " B"],
    *,
    softmax_scale: Scale,
    latent_dim: int = 512,
    cu_seqlens_q: Int32[Array, " B+1"] | None = None,
    max_q_len: int | None = None,
    causal: bool = True,
    visible_lens: Int32[Array, "*tokens"] | None = None,
    q_scale: Scale | None = None,
    kv_scale: Scale | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    fp8_probabilities: bool = False,
    implementation: Preference = None,
) -> Float[Array, "*tokens H L"] | tuple[Float[Array, "*tokens H L"], Float[Array, "*tokens H"]]:
    """Attention of the last tokens of each request over that request's latent cache (absorbed MLA, one key head).

    out = softmax(softmax_scale * q . kv) latent, with q the absorbed query [q_nope W_UK | q_rope]; apply W_UV after it.
    The formulation is DeepSeek-V2's (arXiv:2405.04434); the masks are those of the decode step in vLLM and SGLang.

    Axes: B requests, S query tokens a request, T query tokens over all requests, H query heads, L latent width, R rope
    width, D = L + R, P pages, Z tokens a page, M pages a request at most.

    Args:
      q: [B, S, H, D], or ragged [T, H, D] with cu_seqlens_q and max_q_len; float16, bfloat16, float8_e4m3fn, or
        float32 / float64 (not in the kernels). Latent columns first, rope last. Rows past cu_seqlens_q[B] are padding.
      kv_cache: [P, Z, D], latent first, rope last; q's dtype or float8_e4m3fn (any of these dtypes with q of
        float32 or float64).
      block_tables: [B, M] int32, the pages of each request in order; entries past its last page are never used.
      seq_lens: [B] int32, keys of each request, its new tokens included; 0 is legal.
      softmax_scale: factor of the logits, float or float32 scalar array, may be traced; DeepSeek's is (128 + 64)^-0.5
        times the square of yarn's mscale, never D^-0.5.
      latent_dim: L, at least D / 2; the first L columns of a cache row are also its value. R = 0 (L = D) is legal.
      cu_seqlens_q: [B + 1] int32, row where each request's query tokens start, and their end; with ragged q only.
      max_q_len: static bound on the query tokens of one request; required with cu_seqlens_q. Rows past it give 0, -inf.
        With q [B, S, H, D] None or S.
      causal: query i of S sees key j iff j < seq_len - (S - 1) + i; without causal iff j < seq_len.
      visible_lens: [B, S] or, with ragged q, [T] int32, in place of the causal rule (causal stays True): a token with
        the entry n sees the first min(n, seq_len) keys of its request, and none if n is negative. Made for keys that
        are dealt out to several devices (vLLM's and SGLang's decode context parallelism): there the causal rule does
        not say how many of a device's keys a token sees.
      q_scale, kv_scale: q holds query / q_scale and kv_cache holds kv / kv_scale (fp8 usually); None is 1. Float or
        float32 scalar array; always the call's own, never kept from an earlier call. Scales are from 2^-126 to 2^126,
        so that float32 holds their reciprocals too; numbers are checked, and an array with another value gives rows
        without meaning.
      return_lse: also return the logsumexp of the scaled logits.
      batch_invariant: a request's rows are bitwise the same whatever else is in the batch.
      fp8_probabilities: "cute" on Hopper may round the softmax's terms to float8_e4m3fn before it multiplies them by
        values: faster with many rows (S * H), less exact. With q of float8_e4m3fn only; others never round them.
      implementation: "cute", "xla", "reference", several of these in order, or None for the best; see `explain`.

    Returns:
      out [B, S, H, L] (or [T, H, L]) in q's dtype, bfloat16 when q is fp8; with return_lse also lse [B, S, H] (or [T,
      H]), float32 (float64 for float64), natural logarithm. A row that sees no key gives out 0 and lse -inf. With fp8
      q, "cute" on Hopper has its scores from fp8 tensor cores: lse is off by up to D / 32 * 2^-13 of the greatest
      score.

    Slots past seq_lens and unused entries of the table may hold anything. NaN or an infinity in the key of a new
    token reaches the queries that see it; with "cute" it also reaches queries of the same request from which the causal
    mask or visible_lens hides the key. A row whose scores are all -inf (because the query overflowed, say) is NaN; in
    "cute", here and in the other attention operations, it is a row that sees no key. "cute" subtracts a row's greatest
    score in float32: where scores times softmax_scale pass 2^24 in size, a row's weights may be anything. Unsound
    lengths, pages and offsets (negative, decreasing, past their end) read nothing outside the arrays, and give rows
    without meaning that differ between implementations and front ends; TSMLA_CHECK=1 raises instead.

    Derivatives: implementation="reference" can be differentiated; "xla" and "cute" raise NotImplementedError (train
    through mla_prefill). vmap, jit, eval_shape, jax.export and shard_map over heads or batch work with all of them;
    "cute" is also partitioned automatically over heads and batch, without moving the cache, and jax.export needs
    disabled_checks=tsmla_jax.export_disabled_checks() for it.

    Raises:
      TypeError, ValueError: an argument is not legal; the message names it, what it got and what is legal.
      NotImplementedError: the named implementation can't run this call; the message gives every reason.
    """
    spec, chosen = OPERATION.choose(**locals())
    q, kv_cache, block_tables, seq_lens = map(jnp.asarray, (q, kv_cache, block_tables, seq_lens))
    cu_seqlens_q = None if cu_seqlens_q is None else jnp.asarray(cu_seqlens_q)
    visible_lens = None if visible_lens is None else jnp.asarray(visible_lens)
    seq_lens = checks.decode(spec, seq_lens, block_tables, cu_seqlens_q, visible_lens)
    if 0 in (spec.batch, spec.total_q_len, spec.max_pages, spec.num_pages):  # nobody, or no key
        out, lse = attention_of_no_keys(q, latent_dim, spec)
    else:
        scales = Scales(softmax_scale, q_scale, kv_scale, kv_scale)
        arrays = (q, kv_cache, block_tables, seq_lens, cu_seqlens_q, visible_lens, scales)
        out, lse = chosen.call(arrays, lambda: row_specs(q), spec=spec)
    return (out, lse) if return_lse else out


def _implementations() -> Mapping[str, Implementation]:
    from tsmla_jax.ops import device
    from tsmla_jax.ops.mla_decode import cute, reference, xla

    return {
        "cute": Implementation(cute.mla_decode, cute.why_not, device.why_not_untested, cute.notes),
        "xla": Implementation(xla.mla_decode),
        "reference": Implementation(reference.mla_decode),
    }


OPERATION = Operation(mla_decode, partial(describe_call, contract.decode_spec), _implementations)

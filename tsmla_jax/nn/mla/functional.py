"""The MLA layer as functions of a plain parameter pytree, for engines and users without Flax.

Axes: B requests, S new tokens a request, T new tokens in all (ragged, packed one request after the other), E hidden
width, H heads, N / R / V the nope, rope and value widths of a head, L latent width, D = L + R, P pages, Z page size,
M pages a request at most.

Parameters are the pytree of `tsmla_jax.nn.param_shapes`, or `fold` of it. A layer computes the heads that its arrays
have: under `shard_map` over heads the result is the partial sum over the local heads, for the caller to `jax.lax.psum`;
under `jax.jit` with parameters placed by `param_specs`, XLA adds that sum itself.

Every function has static shapes and works under `jax.jit` (config, max_q_len, context_chunk, context_passes and all
options that aren't arrays are static) and `jax.eval_shape`; `prefill` has a gradient.
"""

from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp

import tsmla_jax
from tsmla_jax.nn import context_parallel
from tsmla_jax.nn.checkpoints.weights import Params
from tsmla_jax.nn.inputs import check_config, check_params, check_texts, check_tokens
from tsmla_jax.nn.mla.config import MLAConfig
from tsmla_jax.nn.mla.projections import absorb_q as absorb_q
from tsmla_jax.nn.mla.projections import expand_joint_kv as expand_joint_kv
from tsmla_jax.nn.mla.projections import fold as fold
from tsmla_jax.nn.mla.projections import project_latent as project_latent
from tsmla_jax.nn.mla.projections import project_latent_unrotated as project_latent_unrotated
from tsmla_jax.nn.mla.projections import project_low_rank_q as project_low_rank_q
from tsmla_jax.nn.mla.projections import project_out as project_out
from tsmla_jax.nn.mla.projections import project_q as project_q
from tsmla_jax.nn.mla.projections import project_values as project_values
from tsmla_jax.nn.mla.projections import unfold as unfold
from tsmla_jax.nn.mla.rope import query_scale, rope_cos_sin
from tsmla_jax.nn.mla.shapes import param_shapes
from tsmla_jax.nn.step import Step, check_step, needed_when_ragged, ragged_positions
from tsmla_jax.nn.step import slots_of as slots_of
from tsmla_jax.ops.inputs import check_mesh_axis, describe, describe_ints
from tsmla_jax.ops.loops import carry
from tsmla_jax.ops.operation import Preference
from tsmla_jax.ops.quantize import quantize_q
from tsmla_jax.ops.transforms import without_derivative
from tsmla_kernels import contract


def check_layer(params: Params, config: MLAConfig) -> None:
    """Raises a TypeError or ValueError unless the config is an MLAConfig, and params have all weights of
    `param_shapes` or are folded."""
    check_config(config, MLAConfig)
    check_params(params, param_shapes(config))


def prefill(
    params: Params,
    config: MLAConfig,
    x: jax.Array,
    *,
    cu_seqlens_q: jax.Array,
    max_q_len: int,
    deterministic: bool = False,
    context_axis: str | None = None,
    implementation: Preference = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Causal attention of whole prompts in the expanded form; no cache is read or written. Differentiable.

    Args:
        params: see `tsmla_jax.nn.param_shapes`.
        config: the layer's shape.
        x: [T, E], requests packed one after the other.
        cu_seqlens_q: [B + 1] i32, where each request starts; tokens from cu_seqlens_q[B] on are padding.
        max_q_len: static bound of a request's length.
        deterministic, implementation: passed to `tsmla_jax.mla_prefill_kv`.
        context_axis: a mesh axis whose devices all have x and share the work: each attends for a part of the tokens.
            A derivative taken inside `jax.shard_map` is to be averaged over these devices.

    Returns:
        y [T, E], and latent [T, L] and k_rope [T, R] for `tsmla_jax.write_kv_cache`. Padding rows have no meaning.

    Raises:
        TypeError, ValueError: an argument is not legal (a wrong rank, width or dtype), or a weight is missing.
        NotImplementedError: no named implementation can run the call.
    """
    check_layer(params, config)
    check_tokens(x, config.hidden_size, "T E")
    check_mesh_axis("context_axis", context_axis)
    check_texts(cu_seqlens_q, max_q_len)
    cu_seqlens_q = jnp.asarray(cu_seqlens_q)
    starts = jnp.zeros(cu_seqlens_q.shape[0] - 1, jnp.int32)
    _, positions = ragged_positions(cu_seqlens_q, starts, x.shape[0])
    cos, sin = rope_cos_sin(config, positions)
    latent, k_rope = project_latent(params, config, x, cos, sin)
    own = [x, cos, sin] if (scale := query_scale(config, positions)) is None else [x, cos, sin, scale]
    own_q, own_kv, own_max_q_len = cu_seqlens_q, cu_seqlens_q, max_q_len
    if context_axis is not None:
        own_q, own_kv = context_parallel.own_offsets(cu_seqlens_q, x.shape[0], context_axis)
        own = [context_parallel.own_rows(rows, context_axis) for rows in own]
        own_max_q_len = min(max_q_len, own[0].shape[0])
    q = jnp.concatenate(project_q(params, config, *own), axis=-1)
    out = tsmla_jax.mla_prefill_kv(  # an array, as no lse is asked for
        q,
        expand_joint_kv(params, latent),
        k_rope,
        cu_seqlens_q=own_q,
        cu_seqlens_kv=own_kv,
        max_q_len=own_max_q_len,
        max_kv_len=max_q_len,
        softmax_scale=config.softmax_scale,
        deterministic=deterministic,
        implementation=implementation,
    )
    y = project_out(params, config, out, own[0])
    if context_axis is not None:
        y = context_parallel.gather_rows(y, x.shape[0], context_axis)
    return y, latent, k_rope


def prefill_with_context(
    params: Params,
    config: MLAConfig,
    x: jax.Array,
    kv_cache: jax.Array,
    step: Step,
    *,
    context_chunk: int,
    context_passes: int | None = None,
    kv_scale: float | jax.Array | None = None,
    context_axis: str | None = None,
    implementation: Preference = None,
) -> tuple[jax.Array, jax.Array]:
    """New tokens that also attend to the tokens in the cache: chunked prefill, or a shared prefix.

    The new tokens' causal part runs in the expanded form. The cached context is taken in passes of `context_chunk`
    tokens of every request: each is gathered, dequantised, expanded by W_UK and W_UV, attended to without a mask, and
    merged by lse. So the chunk bounds the memory beyond the cache, however long the context is. The device counts the
    passes that the longest context needs, unless their number is given. New tokens see each other unquantised even if
    the cache is fp8.

    Args:
        params, config: as in `prefill`.
        x: [T, E] new tokens, requests packed one after the other.
        kv_cache: [P, Z, D].
        step: a step of ragged tokens; a request without context (all its tokens are new) is legal.
        context_chunk: static, how many tokens of each request's context one pass takes.
        context_passes: static, how many passes to run, enough for the longest context; a GPU then runs them without
            asking the host. y is NaN if there are too few. None counts the passes on the device.
        kv_scale: the scale of an fp8 cache.
        context_axis: a mesh axis whose devices share the keys of every request (`nn.context_parallel`) and all have x.
            A device takes context_chunk / N of its keys at a time (in whole pages) for the queries of all tokens, and
            computes the causal part for its share of the tokens. The step is made with the same axis.
        implementation: passed to `tsmla_jax.mla_prefill_kv`.

    Returns:
        y [T, E] and the cache with the new tokens written (in place if it is donated).

    Raises:
        TypeError, ValueError: an argument is not legal (a wrong rank, width or dtype, a dense step, a step of another
            context_axis or page size, a context_chunk below 1), or a weight is missing.
        NotImplementedError: a derivative is asked for under jax.jit, where the passes that are needed are not known;
            or no named implementation can run the call.
    """
    check_layer(params, config)
    check_tokens(x, config.hidden_size, "T E")
    context_chunk = contract.static_int("context_chunk", context_chunk, minimum=1)
    context_passes = None if context_passes is None else contract.static_int("context_passes", context_passes)
    _check_step(config, step, kv_cache, context_axis)
    cos, sin = rope_cos_sin(config, positions := step.positions(x.shape[:-1]))
    block_tables, context_lens = step.block_tables, step.context_lens
    cu_seqlens_q, max_q_len = needed_when_ragged(step.cu_seqlens_q), needed_when_ragged(step.max_q_len)
    q = jnp.concatenate(project_q(params, config, x, cos, sin, query_scale(config, positions)), axis=-1)
    latent, k_rope = project_latent(params, config, x, cos, sin)

    def attend(
        q: jax.Array, keys: tuple[jax.Array, jax.Array], offsets: tuple[jax.Array, jax.Array], most: int, causal: bool
    ) -> tuple[jax.Array, jax.Array]:
        out, lse = tsmla_jax.mla_prefill_kv(
            q,
            expand_joint_kv(params, keys[0]),
            keys[1],
            cu_seqlens_q=offsets[0],
            cu_seqlens_kv=offsets[1],
            max_q_len=max_q_len if context_axis is None else min(max_q_len, q.shape[0]),
            max_kv_len=most,
            softmax_scale=config.softmax_scale,
            causal=causal,
            return_lse=True,
            implementation=implementation,
        )
        # Partial results are merged once per chunk: at least in fp32, so that rounding doesn't grow with the context.
        return out.astype(jnp.promote_types(out.dtype, jnp.float32)), lse

    held = context_parallel.held_context(context_lens, context_chunk, context_axis, kv_cache.shape[1])
    if context_axis is None:
        out, lse = attend(q, (latent, k_rope), (cu_seqlens_q, cu_seqlens_q), max_q_len, causal=True)
    else:
        own_q, own_x = (context_parallel.own_rows(rows, context_axis) for rows in (q, x))
        own_offsets = context_parallel.own_offsets(cu_seqlens_q, x.shape[0], context_axis)
        own = attend(own_q, (latent, k_rope), own_offsets, max_q_len, causal=True)
        out = jnp.zeros((*q.shape[:2], own[0].shape[-1]), own[0].dtype)
        lse = jnp.full(q.shape[:2], -jnp.inf, own[1].dtype)

    def add_chunk(index: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        out, lse, cache = state
        starts = jnp.minimum(index * held.chunk, held.lens)
        lens = jnp.minimum(held.lens - starts, held.chunk)
        # The barrier ties the cache to this pass: otherwise XLA's CPU backend widens a whole 16-bit cache ahead of the
        # loop. Only the barrier's result is used from here on: two live values of one buffer would cost a copy.
        cache, starts = jax.lax.optimization_barrier((cache, starts))
        rows = tsmla_jax.gather_kv_cache(
            cache,
            block_tables,
            starts,
            lens,
            total_len=context_lens.shape[0] * held.chunk,
            kv_scale=kv_scale,
            out_dtype=latent.dtype,
        )
        cached, cached_rope = jnp.split(rows, [config.kv_lora_rank], axis=-1)
        cu_seqlens_kv = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(lens, dtype=jnp.int32)])
        chunk_out, chunk_lse = attend(q, (cached, cached_rope), (cu_seqlens_q, cu_seqlens_kv), held.chunk, causal=False)
        return *tsmla_jax.merge_attention_states([out, chunk_out], [lse, chunk_lse]), cache

    needed = (jnp.max(held.most_lens, initial=0) + held.chunk - 1) // held.chunk
    # The loop carries the cache, so that the write after the loop finds the donated buffer and needs no copy.
    where = (kv_cache, block_tables, context_lens)
    initial = (carry(out, *where), carry(lse, *where), carry(kv_cache, *where))
    passes = needed if context_passes is None else context_passes
    out, lse, kv_cache = jax.lax.fori_loop(0, passes, add_chunk, initial)
    out += jnp.where(needed > passes, jnp.nan, 0).astype(out.dtype)  # passes that are too few leave keys out
    out = without_derivative(out, needed, "prefill_with_context", "train with prefill, on whole texts without a cache")
    kv_cache = tsmla_jax.write_kv_cache(kv_cache, latent, k_rope, step.slot_mapping, kv_scale=kv_scale)
    if context_axis is None:
        return project_out(params, config, out.astype(q.dtype), x), kv_cache
    # Devices exchange results rounded to the dtype of activations: with 16 bits that is half the bytes of float32.
    here, own = (out.astype(q.dtype), lse), (own[0].astype(q.dtype), own[1])
    y = project_out(params, config, context_parallel.merge_own_rows(*here, context_axis, own)[0], own_x)
    return context_parallel.gather_rows(y, x.shape[0], context_axis), kv_cache


def decode(
    params: Params,
    config: MLAConfig,
    x: jax.Array,
    kv_cache: jax.Array,
    step: Step,
    *,
    kv_scale: float | jax.Array | None = None,
    q_scale: float | jax.Array | None = None,
    batch_invariant: bool = False,
    context_axis: str | None = None,
    implementation: Preference = None,
) -> tuple[jax.Array, jax.Array]:
    """A decode step in the absorbed form: writes the new tokens' latents, then attends over the latent cache.

    It takes one new token a request, several (MTP, speculative verify), or a different number for each (ragged).

    Args:
        params, config: as in `prefill`.
        x: [B, S, E] with a dense step, or [T, E] with a ragged one.
        kv_cache: [P, Z, D].
        step: the new tokens and where they belong.
        kv_scale: the scale of an fp8 cache.
        q_scale: quantises the absorbed queries to float8_e4m3fn (q / q_scale), for a cache of that dtype; None leaves
            them in x's dtype.
        batch_invariant, implementation: passed to `tsmla_jax.mla_decode`. With parameters of `batch_invariant.wrap` the
            rest of the layer doesn't depend on the batch either.
        context_axis: a mesh axis whose devices share the keys of every request (`nn.context_parallel`) and all have x;
            the step is made with the same axis.

    Returns:
        y in x's shape, and the cache with the new tokens written (in place if it is donated).

    Raises:
        TypeError, ValueError: an argument is not legal (a wrong rank, width or dtype, a dense step for ragged x or the
            reverse, a step of another context_axis or page size), or a weight is missing.
        NotImplementedError: no named implementation can run the call.
    """
    check_layer(params, config)
    check_tokens(x, config.hidden_size, "T E", "B S E")
    _check_step(config, step, kv_cache, context_axis)
    positions = step.positions(x.shape[:-1])
    cos, sin = rope_cos_sin(config, positions)
    latent, k_rope = project_latent(params, config, x, cos, sin)
    kv_cache = tsmla_jax.write_kv_cache(
        kv_cache,
        latent.reshape(-1, latent.shape[-1]),
        k_rope.reshape(-1, k_rope.shape[-1]),
        step.slot_mapping.reshape(-1),
        kv_scale=kv_scale,
    )
    queries = project_q(params, config, x, cos, sin, query_scale(config, positions))
    q = quantize_q(absorb_q(params, *queries), q_scale)
    options: dict[str, Any] = {
        "softmax_scale": config.softmax_scale,
        "latent_dim": config.kv_lora_rank,
        "cu_seqlens_q": step.cu_seqlens_q,
        "max_q_len": step.max_q_len,
        "q_scale": q_scale,
        "kv_scale": kv_scale,
        "batch_invariant": batch_invariant,
        "implementation": implementation,
    }

    def values(out: jax.Array) -> jax.Array:
        return project_values(params, out.astype(latent.dtype))

    project = partial(project_out, params, config)
    where = (kv_cache, step.block_tables, step.seq_lens)
    if context_axis is None:
        return project(values(cast(jax.Array, tsmla_jax.mla_decode(q, *where, **options))), x), kv_cache
    out, lse = context_parallel.mla_decode(q, *where, context_axis=context_axis, **options)
    y = context_parallel.project_merged(out, lse, context_axis, project, x.reshape(-1, x.shape[-1]), heads=values)
    return y.reshape(x.shape), kv_cache


def _check_step(config: MLAConfig, step: Step, kv_cache: jax.Array, context_axis: str | None) -> None:
    cache = describe("kv_cache", kv_cache)
    if contract.rules.cache_shape(cache)[2] != config.cache_dim:
        got = contract.rules.show(cache.shape)
        raise ValueError(f"kv_cache: got shape {got}; legal: [P, Z, D] with D = {config.cache_dim}, the config's")
    check_step(step, Step, "Step.dense or Step.ragged")
    step.check_axis(context_axis)
    step.check_pages("kv_cache", kv_cache)
    describe_ints("seq_lens", step.seq_lens, "B")
    if step.cu_seqlens_q is not None:
        describe_ints("cu_seqlens_q", step.cu_seqlens_q, "B + 1")

"""The bounds on a context that a prefill step is compiled with: few different ones, so that programs are few."""

from __future__ import annotations

import jax.numpy as jnp

from tsmla_jax.generate.config import ModelConfig
from tsmla_jax.generate.plan import Plan
from tsmla_jax.generate.session import ContextPasses
from tsmla_jax.nn import MLAConfig
from tsmla_jax.nn.v32 import V32Config
from tsmla_jax.nn.v32.mask import mask_reasons, mask_refusals, step_sizes
from tsmla_kernels.contract import FP8
from tsmla_kernels.contract.forms import selected_form

MAX_EXPANDED_BYTES = 1 << 29
"""The most bytes of keys and values that a layer of a prefill step expands at once from the latents of a context. One
chunk of tokens is expanded at once even if it has more bytes."""


def reach_of(cached: int, chunk: int) -> int:
    """The smallest of 1, 4, 8, 16, ... chunks that holds `cached` tokens: a coarse bound, so that programs are few."""
    reach = chunk if cached <= chunk else 4 * chunk
    while reach < cached:
        reach *= 2
    return reach


def bound_of_context(config: ModelConfig, plan: Plan, *, chunk: int, cached: int) -> int | None:
    """The bound on `cached` (`reach_of`) if V3.2's layers take the mask form for a chunk after that many cached tokens;
    None if they take another form, and for other models."""
    attention = config.attention
    if not isinstance(attention, V32Config):
        return None
    reasons = mask_refusals(quantised=plan.q_dtype == FP8, shared_keys=plan.mesh.context > 1)
    reasons += mask_reasons(attention, plan.dtype)
    reach = reach_of(cached, chunk)
    sizes = step_sizes(attention, tokens=chunk, requests=1, longest=reach + chunk)
    form = selected_form(sizes, reasons=reasons)
    return reach if form.name == "mask" else None


def context_passes(config: ModelConfig, plan: Plan, *, chunk: int, cached: int) -> ContextPasses | None:
    """How many passes a prefill step makes over a context, and how many tokens each pass takes: the fewest of
    1, 2, 4, ... passes that MAX_EXPANDED_BYTES allows. Their results are merged one by one. None if each layer is a
    program of its own, and for V3.2 and V4."""
    attention = config.attention
    if not plan.at_once or not isinstance(attention, MLAConfig):
        return None
    width = attention.num_attention_heads * (attention.qk_nope_head_dim + attention.v_head_dim)
    fits = MAX_EXPANDED_BYTES * plan.mesh.context // (width * jnp.dtype(plan.dtype).itemsize)
    reach = reach_of(cached, chunk)
    at_once = reach
    while at_once > max(fits, chunk):
        at_once //= 2
    return ContextPasses(at_once, reach // at_once)

"""Which implementation runs each operation of a step, and why no better one: `tsmla_jax.explain` on its shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import tsmla_jax
from tsmla_jax.nn import MLAConfig
from tsmla_jax.ops.dispatch import Explanation
from tsmla_kernels import contract


@dataclass(frozen=True)
class Choice:
    """The implementation of one operation.

    Attributes:
      op: the operation's name.
      implementation: what runs it.
      why: what was asked for, or why each implementation that is tried before it can't run.
    """

    op: str
    implementation: str
    why: str


def explain_step(
    config: MLAConfig,
    *,
    dtype: Any,
    cache: Any,
    batch: int,
    max_pages: int,
    chunk: int,
    max_q_len: int,
    implementation: str | None,
) -> list[Choice]:
    """The choices for prefill (chunk tokens) and decode (max_q_len tokens a request) over `cache`.

    Args:
      config: the attention.
      dtype: of the activations.
      cache: one layer's cache, or its shape and dtype.
      batch, max_pages: of the decode step.
      chunk, max_q_len: tokens of a prefill step, tokens of one request in a decode step.
      implementation: what the step asks for.

    Raises:
      ValueError: no implementation has that name.
      NotImplementedError: it can't run this, with every reason.
    """

    def array(*shape: int, dtype: Any = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def integers(*shape: int) -> jax.ShapeDtypeStruct:
        return array(*shape, dtype=jnp.int32)

    heads, num_tokens = config.num_attention_heads, batch * max_q_len
    scale = None if cache.dtype != jnp.float8_e4m3fn else array(dtype=jnp.float32)
    prefill = tsmla_jax.explain(
        "mla_prefill",
        array(chunk, heads, config.qk_head_dim),
        array(chunk, heads, config.qk_head_dim),
        array(chunk, heads, config.v_head_dim),
        cu_seqlens_q=integers(2),
        cu_seqlens_kv=integers(2),
        max_q_len=chunk,
        max_kv_len=chunk,
        softmax_scale=config.softmax_scale,
        return_lse=True,
        implementation=implementation,
    )
    decode = tsmla_jax.explain(
        "mla_decode",
        array(num_tokens, heads, config.cache_dim),
        array(*cache.shape, dtype=cache.dtype),
        integers(batch, max_pages),
        integers(batch),
        softmax_scale=config.softmax_scale,
        latent_dim=config.kv_lora_rank,
        cu_seqlens_q=integers(batch + 1),
        max_q_len=max_q_len,
        kv_scale=scale,
        implementation=implementation,
    )
    return [_choice(explanation, implementation) for explanation in (prefill, decode)]


def _choice(explanation: Explanation, implementation: str | None) -> Choice:
    if explanation.chosen is None:
        reasons: list[str] = [f"{name}: {'; '.join(why)}" for name, why in explanation.reasons.items()]
        if implementation is not None:
            reasons = [*explanation.reasons[implementation]]
        raise contract.not_runnable(explanation.op, str(implementation), reasons)
    if implementation is not None:
        return Choice(explanation.op, explanation.chosen, "as asked for")
    refused = []
    for name, why in explanation.reasons.items():
        if name == explanation.chosen:
            break
        refused.append(f"not {name}: {'; '.join(why)}")
    return Choice(explanation.op, explanation.chosen, "; ".join(refused) or "the best there is")

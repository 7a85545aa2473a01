"""MLA as a Flax nnx layer, which calls `tsmla_jax.nn.functional` with the layer's parameters.

Linen users wrap the class with `flax.nnx.bridge.ToLinen` (examples/linen_layer.py).
"""

import jax
import jax.numpy as jnp

from tsmla_jax.nn.inputs import check_tokens
from tsmla_jax.nn.layer import AttentionLayer
from tsmla_jax.nn.mla import functional
from tsmla_jax.nn.mla.weights import WEIGHTS
from tsmla_jax.nn.step import Step, needed_when_ragged, refuse_ragged_arguments
from tsmla_jax.ops.operation import Preference


class MLAttention(AttentionLayer):
    """One multi-head latent attention layer, from an `MLAConfig`.

    It has the arguments and errors of `AttentionLayer`.
    """

    _weights = WEIGHTS

    def __call__(
        self,
        x: jax.Array,
        *,
        cu_seqlens_q: jax.Array | None = None,
        max_q_len: int | None = None,
        deterministic: bool = False,
        implementation: Preference = None,
    ) -> jax.Array:
        """Causal attention within x, without a cache, as in training. Differentiable.

        Args:
            x: [B, S, E], or ragged [T, E] with cu_seqlens_q [B + 1] i32 and a static max_q_len.
            deterministic, implementation: passed to `tsmla_jax.mla_prefill_kv`.

        Returns:
            y in x's shape.

        Raises:
            TypeError, ValueError, NotImplementedError: as `functional.prefill`; ValueError also if cu_seqlens_q or
                max_q_len is missing for ragged x, or given with x [B, S, E].
        """
        check_tokens(x, self.config.hidden_size, "B S E", "T E")
        flat = x.reshape(-1, x.shape[-1])
        if x.ndim == 3:
            refuse_ragged_arguments(cu_seqlens_q, max_q_len)
            cu_seqlens_q, max_q_len = jnp.arange(x.shape[0] + 1, dtype=jnp.int32) * x.shape[1], x.shape[1]
        cu_seqlens_q, max_q_len = needed_when_ragged(cu_seqlens_q), needed_when_ragged(max_q_len)
        y, *_ = self.prefill(
            flat,
            cu_seqlens_q=cu_seqlens_q,
            max_q_len=max_q_len,
            deterministic=deterministic,
            implementation=implementation,
        )
        return y.reshape(x.shape)

    def prefill(
        self,
        x: jax.Array,
        *,
        cu_seqlens_q: jax.Array,
        max_q_len: int,
        deterministic: bool = False,
        context_axis: str | None = None,
        implementation: Preference = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Attention over whole prompts without a cache; arguments, results and errors are those of
        `functional.prefill`.
        """
        return functional.prefill(
            self.params,
            self.config,
            x,
            cu_seqlens_q=cu_seqlens_q,
            max_q_len=max_q_len,
            deterministic=deterministic,
            context_axis=context_axis,
            implementation=implementation,
        )

    def prefill_with_context(
        self,
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
        """Attention of new tokens with cached context; arguments, results and errors are those of
        `functional.prefill_with_context`.
        """
        return functional.prefill_with_context(
            self.params,
            self.config,
            x,
            kv_cache,
            step,
            context_chunk=context_chunk,
            context_passes=context_passes,
            kv_scale=kv_scale,
            context_axis=context_axis,
            implementation=implementation,
        )

    def decode(
        self,
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
        """A decode step in the absorbed form; arguments, results and errors are those of `functional.decode`."""
        return functional.decode(
            self.params,
            self.config,
            x,
            kv_cache,
            step,
            kv_scale=kv_scale,
            q_scale=q_scale,
            batch_invariant=batch_invariant,
            context_axis=context_axis,
            implementation=implementation,
        )

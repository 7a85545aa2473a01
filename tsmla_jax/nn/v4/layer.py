"""DeepSeek-V4's attention as a Flax nnx layer."""

import jax

from tsmla_jax.nn.layer import AttentionLayer
from tsmla_jax.nn.v4.functional import V4Cache, attend
from tsmla_jax.nn.v4.prefill import V4Prefill, prefill
from tsmla_jax.nn.v4.step import V4Step
from tsmla_jax.nn.v4.weights import WEIGHTS
from tsmla_jax.ops.operation import Preference


class V4Attention(AttentionLayer):
    """One DeepSeek-V4 attention layer, from a `V4Config`.

    It has the arguments and errors of `AttentionLayer`.
    """

    _weights = WEIGHTS

    def __call__(
        self,
        x: jax.Array,
        cache: V4Cache,
        step: V4Step,
        *,
        kv_scale: float | jax.Array | None = None,
        q_scale: float | jax.Array | None = None,
        context_axis: str | None = None,
        implementation: Preference = None,
    ) -> tuple[jax.Array, V4Cache]:
        """Prefill, chunked prefill and decode; see `tsmla_jax.nn.v4.attend`. Returns y and the caches."""
        return attend(
            self.params,
            self.config,
            x,
            cache,
            step,
            kv_scale=kv_scale,
            q_scale=q_scale,
            context_axis=context_axis,
            implementation=implementation,
        )

    def prefill(
        self,
        x: jax.Array,
        *,
        cu_seqlens_q: jax.Array,
        max_q_len: int,
        cos_sin: jax.Array,
        selected: jax.Array | None = None,
        index_loss: bool = True,
        implementation: Preference = None,
    ) -> V4Prefill:
        """Attention over whole texts, with a gradient; see `tsmla_jax.nn.v4.prefill`."""
        return prefill(
            self.params,
            self.config,
            x,
            cu_seqlens_q=cu_seqlens_q,
            max_q_len=max_q_len,
            cos_sin=cos_sin,
            selected=selected,
            index_loss=index_loss,
            implementation=implementation,
        )

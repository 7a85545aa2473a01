"""The attention of DeepSeek-V3.2 and GLM-5 as a Flax nnx layer."""

import jax

from tsmla_jax.nn.layer import AttentionLayer
from tsmla_jax.nn.step import Step
from tsmla_jax.nn.v32.functional import V32Cache, attend
from tsmla_jax.nn.v32.prefill import V32Prefill, prefill
from tsmla_jax.nn.v32.weights import WEIGHTS
from tsmla_jax.ops.operation import Preference


class V32Attention(AttentionLayer):
    """One attention layer of DeepSeek-V3.2 or GLM-5, from a `V32Config`.

    It has the arguments and errors of `AttentionLayer`.
    """

    _weights = WEIGHTS

    def __call__(
        self,
        x: jax.Array,
        cache: V32Cache,
        step: Step,
        *,
        kv_scale: float | jax.Array | None = None,
        q_scale: float | jax.Array | None = None,
        context_axis: str | None = None,
        selected: jax.Array | None = None,
        form: str | None = None,
        implementation: Preference = None,
    ) -> tuple[jax.Array, V32Cache]:
        """Prefill, chunked prefill and decode; see `tsmla_jax.nn.v32.attend`. Returns y and the caches."""
        return attend(
            self.params,
            self.config,
            x,
            cache,
            step,
            selected=selected,
            kv_scale=kv_scale,
            q_scale=q_scale,
            context_axis=context_axis,
            form=form,
            implementation=implementation,
        )

    def prefill(
        self,
        x: jax.Array,
        *,
        cu_seqlens_q: jax.Array,
        max_q_len: int,
        selected: jax.Array | None = None,
        dense: bool = False,
        index_loss: bool = True,
        form: str | None = None,
        implementation: Preference = None,
    ) -> V32Prefill:
        """Attention over whole texts, with a gradient; see `tsmla_jax.nn.v32.prefill`."""
        return prefill(
            self.params,
            self.config,
            x,
            cu_seqlens_q=cu_seqlens_q,
            max_q_len=max_q_len,
            selected=selected,
            dense=dense,
            index_loss=index_loss,
            form=form,
            implementation=implementation,
        )

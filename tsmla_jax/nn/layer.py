"""MLA as a Flax nnx layer: the parameters as `nnx.Param`, the computation from `tsmla_jax.nn.functional`.

The cache is an argument and a result, not state of the layer: an engine owns one cache for all layers and requests, and
donates it to its step. Linen users wrap the class with `flax.nnx.bridge.ToLinen` (examples/linen_layer.py).
"""

from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tsmla_jax.nn import functional
from tsmla_jax.nn.checkpoint import Checkpoint
from tsmla_jax.nn.config import MLAConfig
from tsmla_jax.nn.hf import load_hf_attention
from tsmla_jax.nn.params import Params, check_params, init_params, param_shapes


class MLAttention(nnx.Module):
    """One multi-head latent attention layer.

    Args:
        config: its shape.
        params: the pytree of `param_shapes`, as `load_hf_attention` returns it; None draws random ones.
        dtype: of random parameters.
        rngs: source of random parameters; not needed with params.

    Raises:
        ValueError: params lacks a name, has one too many or a wrong shape; or neither params nor rngs is given.
    """

    def __init__(
        self,
        config: MLAConfig,
        *,
        params: Params | None = None,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs | None = None,
    ) -> None:
        self.config = config
        if params is None:
            if rngs is None:
                raise ValueError("MLAttention needs params, or rngs to draw them")
            params = init_params(rngs.params(), config, dtype)
        check_params(params, config)
        for name, value in params.items():
            setattr(self, name, nnx.Param(value))

    @classmethod
    def from_hf(
        cls, checkpoint_dir: str | Path | Checkpoint, layer: int, *, dtype: DTypeLike | None = None
    ) -> "MLAttention":
        """The layer `layer` of a Hugging Face checkpoint; arguments and errors of `load_hf_attention`."""
        checkpoint = checkpoint_dir if isinstance(checkpoint_dir, Checkpoint) else Checkpoint(checkpoint_dir)
        config = MLAConfig.from_hf(checkpoint.directory)
        return cls(config, params=load_hf_attention(checkpoint, layer, config=config, dtype=dtype))

    @property
    def params(self) -> dict[str, jax.Array]:
        """The parameters as the plain pytree that `tsmla_jax.nn.functional` takes."""
        return {name: getattr(self, name)[...] for name in param_shapes(self.config)}

    def __call__(
        self,
        x: jax.Array,
        *,
        cu_seqlens_q: jax.Array | None = None,
        max_q_len: int | None = None,
        implementation: str | None = None,
    ) -> jax.Array:
        """Causal attention within x, without a cache, as in training. Differentiable.

        Args:
            x: [B, S, E], or ragged [T, E] with cu_seqlens_q [B + 1] i32 and a static max_q_len.
            implementation: of `tsmla_jax.mla_prefill`.

        Returns:
            y in x's shape.

        Raises:
            ValueError: a wrong rank or width, or cu_seqlens_q and max_q_len missing for ragged x.
        """
        if x.ndim == 3:
            if cu_seqlens_q is not None or max_q_len is not None:
                raise ValueError("cu_seqlens_q and max_q_len go with ragged x [T, E]; x [B, S, E] must have neither")
            batch, length, hidden = x.shape
            cu_seqlens_q = jnp.arange(batch + 1, dtype=jnp.int32) * length
            flat = x.reshape(batch * length, hidden)
            y, _, _ = self.prefill(flat, cu_seqlens_q=cu_seqlens_q, max_q_len=length, implementation=implementation)
            return y.reshape(x.shape)
        if cu_seqlens_q is None or max_q_len is None:
            raise ValueError("ragged x [T, E] needs cu_seqlens_q and max_q_len")
        return self.prefill(x, cu_seqlens_q=cu_seqlens_q, max_q_len=max_q_len, implementation=implementation)[0]

    def prefill(
        self, x: jax.Array, *, cu_seqlens_q: jax.Array, max_q_len: int, implementation: str | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Whole prompts, no cache; see `functional.prefill`. Returns y, latent and k_rope."""
        return functional.prefill(
            self.params,
            self.config,
            x,
            cu_seqlens_q=cu_seqlens_q,
            max_q_len=max_q_len,
            implementation=implementation,
        )

    def prefill_with_context(
        self,
        x: jax.Array,
        kv_cache: jax.Array,
        *,
        cu_seqlens_q: jax.Array,
        max_q_len: int,
        block_tables: jax.Array,
        context_lens: jax.Array,
        slot_mapping: jax.Array,
        context_chunk: int,
        kv_scale: float | jax.Array | None = None,
        implementation: str | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """New tokens on top of cached context; see `functional.prefill_with_context`. Returns y and the cache."""
        return functional.prefill_with_context(
            self.params,
            self.config,
            x,
            kv_cache,
            cu_seqlens_q=cu_seqlens_q,
            max_q_len=max_q_len,
            block_tables=block_tables,
            context_lens=context_lens,
            slot_mapping=slot_mapping,
            context_chunk=context_chunk,
            kv_scale=kv_scale,
            implementation=implementation,
        )

    def decode(
        self,
        x: jax.Array,
        kv_cache: jax.Array,
        *,
        block_tables: jax.Array,
        seq_lens: jax.Array,
        slot_mapping: jax.Array,
        cu_seqlens_q: jax.Array | None = None,
        max_q_len: int | None = None,
        kv_scale: float | jax.Array | None = None,
        q_scale: float | jax.Array | None = None,
        batch_invariant: bool = False,
        implementation: str | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """A decode step in the absorbed form; see `functional.decode`. Returns y and the cache."""
        return functional.decode(
            self.params,
            self.config,
            x,
            kv_cache,
            block_tables=block_tables,
            seq_lens=seq_lens,
            slot_mapping=slot_mapping,
            cu_seqlens_q=cu_seqlens_q,
            max_q_len=max_q_len,
            kv_scale=kv_scale,
            q_scale=q_scale,
            batch_invariant=batch_invariant,
            implementation=implementation,
        )

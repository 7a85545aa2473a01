"""SkyRL tx's DeepSeek-V3 attention with a latent cache, on tsmla_jax.

    import latent_attention
    latent_attention.install()        # before a model is made

The module has the parameters of tx's `DeepseekV3Attention`, under the same names: checkpoints, LoRA adapters and
shardings stay as they are. What changes:

- Training and prompts run `mla_prefill_kv`, forward and backward: keys and values are read where kv_b_proj left them, V
  is not padded to the width of K, and no score matrix is made.
- The cache holds 576 elements a token (the normed latent, then the rotated rope columns) in place of every head's keys
  and values, 40,960 of DeepSeek-V3. It lies in KVCache.keys as [B, S, 1, 576]; KVCache.values are [B, S, 1, 0].
- Decoding runs `mla_decode` on that cache, whose rows are cut into pages. Each step absorbs kv_b_proj into queries and
  results, each sequence with its own adapter: adapters change while they are trained.

A layer computes, and caches, in its parameters' dtype. Batches are right-padded, as tx makes them. Rows of padding give
0, where tx's mask gives them some average of values; nothing reads either. Works with skyrl-tx 0.3.0 and with the
package skyrl, where tx lives since.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.sharding import get_abstract_mesh

import tsmla_jax
from tsmla_jax.nn import Segments, Step, segment_attention_kv

try:
    from skyrl.tx.models import deepseekv3
except ModuleNotFoundError as error:
    if error.name not in ("skyrl", "skyrl.tx"):
        raise
    try:
        from tx.models import deepseekv3
    except ModuleNotFoundError as missing:
        missing.add_note("This module changes SkyRL tx: pip install skyrl-tx (examples/skyrl_tx/README.md).")
        raise missing from None

PAGE_SIZES = (64, 32, 16)
"""The page sizes that the kernels read, the best first. tx's lengths are multiples of 16."""


class Split(NamedTuple):
    """How a mesh splits arrays [B, ...], and those [B, T, H, ...] that have heads."""

    sequences: P
    heads: P


WHOLE = Split(P(), P())


class Tokens(NamedTuple):
    """A layer's projections of its tokens: q_nope [B, T, H, N] and the rotated q_rope [B, T, H, R]; and what is cached,
    the normed latent [B, T, L] and the rotated k_rope [B, T, R]."""

    q_nope: jax.Array
    q_rope: jax.Array
    latent: jax.Array
    k_rope: jax.Array


class Adapters(NamedTuple):
    """The LoRA of kv_b_proj for each sequence: its weight is kv_b_proj's and scale a @ b.

    a [B, L, r], b [B, r, H, N + V], scale [B].
    """

    a: jax.Array
    b: jax.Array
    scale: jax.Array

    def transposed(self, x: jax.Array, columns: slice) -> jax.Array:
        """x [B, T, H, columns] times the transpose of the weight's `columns` of each head: [B, T, H, L]."""
        low = jnp.einsum("bthn,brhn->bthr", x, self.b[..., columns])
        return jnp.einsum("bthr,blr->bthl", low * self.scale[:, None, None, None], self.a)

    def times(self, x: jax.Array, columns: slice) -> jax.Array:
        """x [B, T, H, L] times the weight's `columns` of each head: [B, T, H, columns]."""
        low = jnp.einsum("bthl,blr->bthr", x, self.a)
        return jnp.einsum("bthr,brhv->bthv", low * self.scale[:, None, None, None], self.b[..., columns])


class LatentAttention(deepseekv3.DeepseekV3Attention):
    """Multi-head latent attention on tsmla_jax's kernels, in place of tx's `DeepseekV3Attention`.

    Axes: B sequences, T tokens, S slots of the cache, H heads, N / R / V the nope, rope and value widths of a head, L
    the latent width, r the rank of an adapter.
    """

    implementation: str | None = None
    """The implementation of `tsmla_jax.mla_prefill_kv` and `mla_decode`; None is the best that can run."""

    def __call__(
        self,
        x: jax.Array,
        *,
        attention_mask: jax.Array,
        positions: jax.Array,
        adapter_indices: jax.Array | None = None,
        kv_cache: tuple[jax.Array, jax.Array] | None = None,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """The layer over whole prompts, or over new tokens and the cache before them.

        Args:
            x: [B, T, E], sequences padded behind their tokens.
            attention_mask: [B, T] without a cache, which shows the padding; not read with one.
            positions: [B, T] or [1, T].
            adapter_indices: [B], the LoRA adapter of each sequence, or None.
            kv_cache: this layer's [B, S, 1, L + R] and [B, S, 1, 0]. The tokens of x are written at their positions,
                and each attends to what stands before it.

        Returns:
            [B, T, E], and the cache: of x's tokens, or the given one with x's tokens written.
        """
        rows = x.shape[:2]
        # tx's router weighs in f32, so that behind its experts hidden states are f32 in a model of 16 bits, too.
        x = x.astype(self.kv_b_proj.kernel[...].dtype)
        positions = jnp.broadcast_to(positions, rows)
        tokens = self._project(x, positions, adapter_indices)
        if kv_cache is None:
            heads = self._prefill(tokens, attention_mask, adapter_indices)
            cache = jnp.concatenate([tokens.latent, tokens.k_rope], axis=-1)[:, :, None]
        else:
            heads, cache = self._decode(tokens, kv_cache[0], positions, adapter_indices)
        y = self.o_proj(heads.reshape(*rows, -1), adapter_indices=adapter_indices)
        return y, (cache, jnp.zeros((*cache.shape[:3], 0), cache.dtype))

    def _project(self, x: jax.Array, positions: jax.Array, adapter_indices: jax.Array | None) -> Tokens:
        """Tokens x [B, T, E] at positions [B, T]."""
        if self.q_lora_rank is None:
            q = self.q_proj(x, adapter_indices=adapter_indices)
        else:
            low = self.q_a_layernorm(self.q_a_proj(x, adapter_indices=adapter_indices))
            q = self.q_b_proj(low, adapter_indices=adapter_indices)
        q = q.reshape(*x.shape[:2], self.num_heads, self.qk_head_dim)
        q_nope, q_rope = jnp.split(q, [self.qk_nope_head_dim], axis=-1)
        joint = self.kv_a_proj_with_mqa(x, adapter_indices=adapter_indices)
        latent, k_rope = jnp.split(joint, [self.kv_lora_rank], axis=-1)
        k_rope = self.rotary_emb(k_rope[:, :, None], positions)[:, :, 0]
        return Tokens(q_nope, self.rotary_emb(q_rope, positions), self.kv_a_layernorm(latent), k_rope)

    def _prefill(self, tokens: Tokens, attention_mask: jax.Array, adapter_indices: jax.Array | None) -> jax.Array:
        """Head outputs [B, T, H, V] of whole sequences, in the expanded form."""
        latent = tokens.latent
        kv = self.kv_b_proj(latent, adapter_indices=adapter_indices)
        kv = kv.reshape(*latent.shape[:2], self.num_heads, self.qk_nope_head_dim + self.v_head_dim)
        return attend_to_prompts(
            jnp.concatenate([tokens.q_nope, tokens.q_rope], axis=-1),
            kv,
            tokens.k_rope,
            attention_mask.astype(bool),
            split=self._split(latent.shape[0]),
            softmax_scale=self.scaling,
            implementation=self.implementation,
        )

    def _decode(
        self, tokens: Tokens, cache: jax.Array, positions: jax.Array, adapter_indices: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Head outputs [B, T, H, V] of new tokens over the cache [B, S, 1, L + R], in the absorbed form, and the cache
        with them."""
        keys, values = slice(self.qk_nope_head_dim), slice(self.qk_nope_head_dim, None)
        weight = self.kv_b_proj.kernel[...].reshape(self.kv_lora_rank, self.num_heads, -1)
        adapters = self._adapters(adapter_indices)
        q = jnp.einsum("bthn,lhn->bthl", tokens.q_nope, weight[..., keys])
        if adapters is not None:
            q = q + adapters.transposed(tokens.q_nope, keys)
        out, cache = attend_to_cache(
            jnp.concatenate([q, tokens.q_rope], axis=-1),
            cache,
            tokens.latent,
            tokens.k_rope,
            positions[:, -1].astype(jnp.int32) + 1,
            split=self._split(q.shape[0]),
            softmax_scale=self.scaling,
            implementation=self.implementation,
        )
        heads_out = jnp.einsum("bthl,lhv->bthv", out, weight[..., values])
        if adapters is not None:
            heads_out = heads_out + adapters.times(out, values)
        return heads_out, cache

    def _adapters(self, adapter_indices: jax.Array | None) -> Adapters | None:
        """kv_b_proj's adapters of a batch; None without LoRA."""
        layer = self.kv_b_proj
        if adapter_indices is None or layer.max_lora_adapters == 0:
            return None
        a, b, scale = (x[...][adapter_indices] for x in (layer.lora_A, layer.lora_B, layer.lora_scaling))
        return Adapters(a, b.reshape(*b.shape[:2], self.num_heads, -1), scale)

    def _split(self, batch: int) -> Split:
        """The split over tx's mesh: sequences over fsdp where they divide, heads over tp if the config shards them."""
        axes = get_abstract_mesh().shape
        rows = "fsdp" if "fsdp" in axes and batch % axes["fsdp"] == 0 else None
        heads = "tp" if "tp" in axes and self.config.shard_attention_heads else None
        return Split(P(rows), P(rows, None, heads))


# Jitted, so that all layers share one trace, and calls outside of jit, which tx's tests make, one program.
@partial(jax.jit, static_argnames=("split", "softmax_scale", "implementation"))
def attend_to_prompts(
    q: jax.Array,
    kv: jax.Array,
    k_rope: jax.Array,
    mask: jax.Array,
    *,
    split: Split = WHOLE,
    softmax_scale: float,
    implementation: str | None = None,
) -> jax.Array:
    """Causal attention of whole sequences.

    Args:
        q: [B, T, H, N + R].
        kv: [B, T, H, N + V].
        k_rope: [B, T, R].
        mask: [B, T] bool, the tokens that are no padding.

    Returns:
        [B, T, H, V], 0 for padding.
    """

    def attend(q: jax.Array, kv: jax.Array, k_rope: jax.Array, mask: jax.Array) -> jax.Array:
        segments = Segments.from_ids(mask, max_segments=1)
        return segment_attention_kv(q, kv, k_rope, segments, softmax_scale=softmax_scale, implementation=implementation)

    sequences, heads = split
    return _on_each_device(attend, (heads, heads, sequences, sequences), heads)(q, kv, k_rope, mask)


@partial(jax.jit, static_argnames=("split", "softmax_scale", "implementation"))
def attend_to_cache(
    q: jax.Array,
    cache: jax.Array,
    latent: jax.Array,
    k_rope: jax.Array,
    seq_lens: jax.Array,
    *,
    split: Split = WHOLE,
    softmax_scale: float,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Write new tokens to a dense cache, whose rows are cut into pages, and attend over it.

    Args:
        q: [B, T, H, L + R], absorbed.
        cache: [B, S, 1, L + R].
        latent, k_rope: [B, T, L] and [B, T, R], of the last T tokens of each sequence.
        seq_lens: [B] i32, these included; at most S.

    Returns:
        [B, T, H, L], and the cache with the new tokens: in place where XLA can, as in a jitted loop that carries it.
    """
    slots, width = cache.shape[1], cache.shape[-1]
    page_size = next((size for size in PAGE_SIZES if slots % size == 0), slots)

    def attend(
        q: jax.Array, cache: jax.Array, latent: jax.Array, k_rope: jax.Array, seq_lens: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        pages = cache.reshape(-1, page_size, width)
        block_tables = jnp.arange(pages.shape[0], dtype=jnp.int32).reshape(q.shape[0], -1)
        step = Step.dense(block_tables, seq_lens, new_tokens=q.shape[1], page_size=page_size)
        rows = (x.reshape(-1, x.shape[-1]) for x in (latent, k_rope))
        pages = tsmla_jax.write_kv_cache(pages, *rows, step.slot_mapping.reshape(-1))
        out = tsmla_jax.mla_decode(
            q,
            pages,
            block_tables,
            seq_lens,
            softmax_scale=softmax_scale,
            latent_dim=latent.shape[-1],
            implementation=implementation,
        )
        return out, pages.reshape(cache.shape)

    sequences, heads = split
    run = _on_each_device(attend, (heads, *[sequences] * 4), (heads, sequences))
    return run(q, cache, latent, k_rope, seq_lens)


def install(implementation: str | None = None) -> None:
    """Make tx's DeepSeek-V3 models with `LatentAttention` from now on; those that exist keep their own.

    implementation: of the operations, for all layers; None is the best that can run each call.
    """
    LatentAttention.implementation = implementation
    deepseekv3.DeepseekV3Attention = LatentAttention


def _on_each_device(
    function: Callable[..., jax.Array | tuple[jax.Array, ...]], in_specs: tuple[P, ...], out_specs: P | tuple[P, ...]
) -> Callable[..., jax.Array | tuple[jax.Array, ...]]:
    """The function on each device's sequences and heads; as it is where there is no mesh. Pages and ragged offsets
    count through the sequences at hand, so automatic partitioning would gather them."""
    if get_abstract_mesh().empty:
        return function
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs)

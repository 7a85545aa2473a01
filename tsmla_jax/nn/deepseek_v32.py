"""DeepSeek-V3.2's attention: MLA over the tokens that a lightning indexer chooses, as functions of a parameter pytree.

One function, `attend`, is prefill, chunked prefill, decode and speculative verify: new tokens of every request, packed;
their latents and indexer keys are written first, then each chooses its keys from the cache and attends to them in the
absorbed form. Axes: T new tokens in all, B requests, E hidden width, H heads, Hi indexer heads, Di indexer width,
P pages, Z page size, M pages a request at most.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

import tsmla_jax
from tsmla_jax.nn import functional
from tsmla_jax.nn.checkpoint import Checkpoint
from tsmla_jax.nn.config import MLAConfig, hf_field, read_hf_config
from tsmla_jax.nn.hf import hf_attention_shapes, params_from_hf
from tsmla_jax.nn.params import Params, param_shapes, param_specs
from tsmla_jax.nn.rope import rope_cos_sin
from tsmla_jax.sparse import checks
from tsmla_jax.sparse.indexer import fold_weights

_NORM_EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class V32Config:
    """One V3.2 attention layer.

    Attributes:
        mla: the attention itself; needs q_lora_rank, from whose normed output the indexer's queries come.
        index_n_heads, index_head_dim: Hi and Di; the first qk_rope_head_dim columns of Di are rotated, as halves.
        index_topk: how many keys a token attends to at most.
    """

    mla: MLAConfig
    index_n_heads: int = 64
    index_head_dim: int = 128
    index_topk: int = 2048

    def __post_init__(self) -> None:
        for name in ("index_n_heads", "index_head_dim", "index_topk"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
                raise ValueError(f"V32Config: {name}={value!r} must be a positive integer")
        if self.mla.q_lora_rank is None:
            raise ValueError("V32Config: mla.q_lora_rank must not be None: the indexer reads the low-rank query")
        if self.index_head_dim < self.mla.qk_rope_head_dim:
            raise ValueError(
                f"V32Config: {self.index_head_dim=} must be at least qk_rope_head_dim = {self.mla.qk_rope_head_dim}"
            )

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | str | Path) -> V32Config:
        """Reads the attention's fields of a Hugging Face config; arguments and errors of `MLAConfig.from_hf`."""
        fields, where = read_hf_config(source)
        sizes = {name: hf_field(fields, name, int, where) for name in ("index_n_heads", "index_head_dim", "index_topk")}
        return cls(MLAConfig.from_hf(fields if isinstance(source, Mapping) else source), **sizes)


class V32Cache(NamedTuple):
    """One layer's caches; both are addressed by the same slots.

    kv       [P, Z, L + R] of floats or float8_e4m3fn, or uint8 [P, Z, 656], the packed layout
    indexer  uint8 [P, Z, Di + 4] (fp8 keys), or [P, Z, Di] of floats (keys as they are)
    """

    kv: jax.Array
    indexer: jax.Array


def v32_param_shapes(config: V32Config) -> dict[str, tuple[int, ...]]:
    """Those of `tsmla_jax.nn.params.param_shapes`, and indexer_wq_b [rank, Hi, Di], indexer_wk [E, Di],
    indexer_k_norm [Di] and its bias indexer_k_norm_bias, indexer_weights_proj [E, Hi]."""
    heads, width, hidden = config.index_n_heads, config.index_head_dim, config.mla.hidden_size
    return {
        **param_shapes(config.mla),
        "indexer_wq_b": (cast(int, config.mla.q_lora_rank), heads, width),
        "indexer_wk": (hidden, width),
        "indexer_k_norm": (width,),
        "indexer_k_norm_bias": (width,),
        "indexer_weights_proj": (hidden, heads),
    }


def v32_param_specs(config: V32Config, heads_axis: str | None) -> dict[str, PartitionSpec]:
    """Those of `tsmla_jax.nn.params.param_specs`; the indexer is replicated, as its cache is: every device must choose
    the same keys. Under `shard_map`, `attend` returns the partial sum over the local heads, for the caller to psum."""
    specs = dict.fromkeys(v32_param_shapes(config), PartitionSpec())
    return {**specs, **param_specs(config.mla, heads_axis)}


def v32_hf_shapes(config: V32Config) -> dict[str, tuple[int, ...]]:
    """Names below `self_attn.` and shapes ([out, in]) of one layer in a Hugging Face checkpoint."""
    heads, width, hidden = config.index_n_heads, config.index_head_dim, config.mla.hidden_size
    return {
        **hf_attention_shapes(config.mla),
        "indexer.wq_b.weight": (heads * width, cast(int, config.mla.q_lora_rank)),
        "indexer.wk.weight": (width, hidden),
        "indexer.k_norm.weight": (width,),
        "indexer.k_norm.bias": (width,),
        "indexer.weights_proj.weight": (heads, hidden),
    }


def v32_params_from_hf(
    config: V32Config, tensors: Mapping[str, Any], dtype: DTypeLike | None = None
) -> dict[str, jax.Array]:
    """Parameters from the arrays of one layer by their name below `self_attn.`.

    Raises ValueError for a tensor that is missing or has another shape than `v32_hf_shapes` says.
    """
    params = params_from_hf(config.mla, tensors, dtype)
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for name, shape in v32_hf_shapes(config).items():
        if not name.startswith("indexer."):
            continue
        if name not in tensors:
            raise ValueError(f"tensor {name!r} is missing")
        arrays[name] = np.asarray(tensors[name])
        if arrays[name].shape != shape:
            raise ValueError(f"tensor {name!r} must have shape {shape}, got {arrays[name].shape}")
    heads, width = config.index_n_heads, config.index_head_dim
    indexer = {
        "indexer_wq_b": arrays["indexer.wq_b.weight"].T.reshape(-1, heads, width),
        "indexer_wk": arrays["indexer.wk.weight"].T,
        "indexer_k_norm": arrays["indexer.k_norm.weight"],
        "indexer_k_norm_bias": arrays["indexer.k_norm.bias"],
        "indexer_weights_proj": arrays["indexer.weights_proj.weight"].T,
    }
    return {**params, **{name: jnp.asarray(array, dtype=dtype) for name, array in indexer.items()}}


def load_hf_v32_attention(
    checkpoint_dir: str | Path | Checkpoint,
    layer: int,
    *,
    config: V32Config | None = None,
    dtype: DTypeLike | None = None,
    prefix: str = "model.layers.{layer}.self_attn.",
) -> dict[str, jax.Array]:
    """The parameters of one V3.2 layer from safetensors; arguments and errors of `load_hf_attention`."""
    if layer < 0:
        raise ValueError(f"{layer=} must be >= 0")
    checkpoint = checkpoint_dir if isinstance(checkpoint_dir, Checkpoint) else Checkpoint(checkpoint_dir)
    config = V32Config.from_hf(checkpoint.directory) if config is None else config
    start = prefix.format(layer=layer)
    tensors = {
        name: checkpoint.read(start + name, shape=shape, dtype=dtype) for name, shape in v32_hf_shapes(config).items()
    }
    return v32_params_from_hf(config, tensors)


def init_v32_cache(
    config: V32Config,
    num_pages: int,
    page_size: int,
    *,
    kv_dtype: DTypeLike = jnp.bfloat16,
    indexer_dtype: DTypeLike = jnp.uint8,
) -> V32Cache:
    """Empty caches; kv_dtype uint8 is the packed layout of 656 bytes (latent 512, rope 64), indexer_dtype uint8 fp8
    keys."""
    packed_kv, packed_keys = jnp.dtype(kv_dtype) == jnp.uint8, jnp.dtype(indexer_dtype) == jnp.uint8
    if packed_kv and (config.mla.kv_lora_rank, config.mla.qk_rope_head_dim) != (512, 64):
        raise ValueError(
            f"kv_dtype: got uint8 with kv_lora_rank={config.mla.kv_lora_rank}, "
            f"qk_rope_head_dim={config.mla.qk_rope_head_dim}; the packed layout holds 512 and 64"
        )
    kv_width = 656 if packed_kv else config.mla.cache_dim
    key_width = config.index_head_dim + (4 if packed_keys else 0)
    return V32Cache(
        jnp.zeros((num_pages, page_size, kv_width), kv_dtype),
        jnp.zeros((num_pages, page_size, key_width), indexer_dtype),
    )


def attend(
    params: Params,
    config: V32Config,
    x: jax.Array,
    cache: V32Cache,
    *,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    cu_seqlens_q: jax.Array,
    slot_mapping: jax.Array,
    kv_scale: float | jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, V32Cache]:
    """Attention of new tokens over what they choose of their requests' tokens, their own included.

    Args:
        params: see `v32_param_shapes`.
        x: [T, E], requests packed one after the other.
        cache: holds the tokens before the new ones.
        block_tables: [B, M] i32.
        seq_lens: [B] i32, the new tokens included.
        cu_seqlens_q: [B + 1] i32, where each request's new tokens start; tokens from cu_seqlens_q[B] on are padding.
        slot_mapping: [T] i32, where the new tokens go (`functional.slots_of`); -1 is not written.
        kv_scale: of a float8_e4m3fn kv cache.
        implementation: of `tsmla_jax.sparse_mla` and `tsmla_jax.indexer_logits`.

    Returns:
        y [T, E] and the caches with the new tokens written (in place if donated). Rows of padding mean nothing.
    """
    mla = config.mla
    cu_seqlens_q = checks.cu_seqlens(jnp.asarray(cu_seqlens_q), x.shape[0])
    _, positions = functional.ragged_positions(cu_seqlens_q, seq_lens - jnp.diff(cu_seqlens_q), x.shape[0])
    cos, sin = rope_cos_sin(mla, positions)
    latent, k_rope = functional.project_latent(params, mla, x, cos, sin)
    if cache.kv.dtype == jnp.uint8:
        kv = tsmla_jax.write_packed_kv_cache(cache.kv, latent, k_rope, slot_mapping)
    else:
        kv = tsmla_jax.write_kv_cache(cache.kv, latent, k_rope, slot_mapping, kv_scale=kv_scale)
    keys = tsmla_jax.write_indexer_cache(cache.indexer, _indexer_keys(params, config, x, cos, sin), slot_mapping)

    page_size = kv.shape[1]
    rows = tsmla_jax.expand_decode_metadata(seq_lens, block_tables, jnp.diff(cu_seqlens_q), total_tokens=x.shape[0])
    q_index, weights = _indexer_queries(params, config, x, cos, sin, quantise=keys.dtype == jnp.uint8)
    logits = tsmla_jax.indexer_logits(
        q_index, weights, keys, rows.block_tables, rows.seq_lens, implementation=implementation
    )
    chosen = tsmla_jax.select_topk(logits, rows.seq_lens, min(config.index_topk, logits.shape[1]))
    out = tsmla_jax.sparse_mla(
        functional.absorb_q(params, *functional.project_q(params, mla, x, cos, sin)),
        kv,
        tsmla_jax.positions_to_slots(chosen, rows.block_tables, page_size),
        softmax_scale=mla.softmax_scale,
        latent_dim=mla.kv_lora_rank,
        kv_scale=kv_scale,
        implementation=implementation,
    )
    heads = jnp.einsum("thl,hvl->thv", cast(jax.Array, out).astype(x.dtype), params["w_uv"])
    return functional.project_out(params, mla, heads), V32Cache(kv, keys)


def _indexer_keys(params: Params, config: V32Config, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Layer-normed and rotated keys [T, Di]."""
    k = (x @ params["indexer_wk"]).astype(jnp.float32)
    k = k - k.mean(-1, keepdims=True)
    k = k * jax.lax.rsqrt((k * k).mean(-1, keepdims=True) + _NORM_EPS)
    k = k * params["indexer_k_norm"] + params["indexer_k_norm_bias"]
    return _rotate_halves(k, cos, sin)


def _indexer_queries(
    params: Params, config: V32Config, x: jax.Array, cos: jax.Array, sin: jax.Array, *, quantise: bool
) -> tuple[jax.Array, jax.Array]:
    """Queries [T, Hi, Di] and the head weights with every constant folded in [T, Hi]."""
    low = x @ params["q_a_proj"]
    if config.mla.attention_bias:
        low = low + params["q_a_proj_bias"]
    low = functional.rms_norm(low, params["q_a_layernorm"], config.mla.a_layernorm_eps)
    q = jnp.einsum("tr,rhd->thd", low, params["indexer_wq_b"])
    q = _rotate_halves(q.astype(jnp.float32), cos[:, None], sin[:, None])
    weights = x @ params["indexer_weights_proj"]
    if quantise:
        return tsmla_jax.indexer_quantize(q, weights)
    return q, fold_weights(weights, config.index_head_dim)


def _rotate_halves(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rope on the first columns of x, pairs (i, i + R / 2): the indexer's own order, unlike the attention's."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)

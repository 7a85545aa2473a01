"""sglang-jax's DeepSeek attention on NVIDIA GPUs: an MLA backend and its latent cache on the operations of tsmla_jax.

sglang-jax's own MLA backend is a TPU kernel. Here are the same three pieces of its interface for any backend of jax,
Hopper's kernels included: the attention backend that its layers call, the pool that holds the pages, and a ModelRunner
that makes both for `--attention-backend fa` of an MLA model. `install` makes its server use them; launch_server.py is
that server.

Written against sgl-project/sglang-jax at commit cddbf6f (2026-08-21), with jax 0.10.2, and run on a CPU under its own
scheduler; not run on a GPU yet. docs/guides/sglang-jax.md says what it lacks for DeepSeek on GPUs besides.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import register_pytree_node_class
from sgl_jax.srt.layers.attention.hybrid_linear_attn_backend import attn_backend_wrapper
from sgl_jax.srt.layers.attention.mla_backend import MLAAttentionBackend
from sgl_jax.srt.layers.radix_attention import RadixAttention
from sgl_jax.srt.managers import tp_worker
from sgl_jax.srt.mem_cache.memory_pool import KVCache, MLATokenToKVPool
from sgl_jax.srt.model_executor.forward_batch_info import ForwardBatch
from sgl_jax.srt.model_executor.model_runner import ModelRunner

import tsmla_jax

logger = logging.getLogger(__name__)


class TsmlaMLABackend(MLAAttentionBackend):
    """Absorbed MLA over a paged latent cache: writes the new tokens' latents, then attends over the cache.

    The batches' metadata are the parent's, which hold nothing of a TPU: page indices without gaps between requests,
    and where each request's tokens and pages start. `MLAAttentionBackend.__call__` documents the arguments.
    """

    def __init__(self, *, max_request_len: int, implementation: str | None = None, **parent: Any) -> None:
        """max_request_len: the most tokens of a request, which set the width of a block table; implementation: as in
        tsmla_jax.mla_decode; parent: MLAAttentionBackend's arguments."""
        super().__init__(vmem_limit_bytes=0, **parent)  # a TPU's, which the parent would ask a TPU for
        self.max_pages = -(-max_request_len // self.page_size)
        self.implementation = implementation

    def explain(self, dtype: jnp.dtype) -> str:
        """Which implementation decodes on this machine, and why the others can't."""
        width = self.kv_lora_rank + self.qk_rope_head_dim
        heads = self.num_heads // self.mesh.shape["tensor"]
        shapes = (
            ((1, 1, heads, width), dtype),
            ((1, self.page_size, width), dtype),
            ((1, 1), jnp.int32),
            ((1,), jnp.int32),
        )
        operands = (jax.ShapeDtypeStruct(*shape) for shape in shapes)
        options = {"latent_dim": self.kv_lora_rank, "softmax_scale": 1.0, "implementation": self.implementation}
        return str(tsmla_jax.explain("mla_decode", *operands, **options))

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        token_to_kv_pool: KVCache,
        *,
        q_rope: jax.Array,
        k_rope: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """q [T, H, L] absorbed, q_rope [T, H, R], k = v [T, 1, L], k_rope [T, 1, R] -> out [T, H, L] and the layer's
        cache [P, Z, L + R]. Raises NotImplementedError for a layer with a sliding window or capped logits, ValueError
        for arrays of other widths or a pool of other pages."""
        del v  # the latent, as k is
        if layer.sliding_window_size or layer.logit_cap:
            raise NotImplementedError(
                f"layer {layer.layer_id}: got sliding_window_size={layer.sliding_window_size} and"
                f" logit_cap={layer.logit_cap}; tsmla_jax.mla_decode has neither"
            )
        for name, array, width in (
            ("q", q, self.kv_lora_rank),
            ("q_rope", q_rope, self.qk_rope_head_dim),
            ("k", k, self.kv_lora_rank),
            ("k_rope", k_rope, self.qk_rope_head_dim),
        ):
            if array.shape[-1] != width:
                raise ValueError(f"{name}: got shape {array.shape}; legal: {width} columns")
        kv_cache = token_to_kv_pool.get_fused_kv_buffer(layer.layer_id)
        if kv_cache.shape[1] != self.page_size:
            raise ValueError(f"token_to_kv_pool: got pages of {kv_cache.shape[1]} tokens; legal: {self.page_size}")
        rows, heads = P("data"), P("data", "tensor")
        metadata = self.forward_metadata
        attend = jax.shard_map(
            self._on_one_device(forward_batch.forward_mode.is_decode(), layer.scaling),
            in_specs=(heads, heads, rows, rows, rows, rows, rows, rows, rows, rows),
            out_specs=(heads, rows),
            check_vma=False,
        )
        return attend(
            q,
            q_rope,
            jax.sharding.reshard(k.reshape(-1, self.kv_lora_rank), rows),
            jax.sharding.reshard(k_rope.reshape(-1, self.qk_rope_head_dim), rows),
            kv_cache,
            forward_batch.out_cache_loc,
            metadata.seq_lens,
            metadata.page_indices,
            metadata.cu_q_lens,
            metadata.cu_kv_lens,
        )

    def _on_one_device(self, decode: bool, softmax_scale: float) -> Callable[..., tuple[jax.Array, jax.Array]]:
        """The step of one device: `data` splits the requests over devices, and `tensor` the heads."""

        def attend(
            q_nope: jax.Array,
            q_rope: jax.Array,
            latent: jax.Array,
            k_rope: jax.Array,
            kv_cache: jax.Array,
            slots: jax.Array,
            seq_lens: jax.Array,
            page_indices: jax.Array,
            cu_q_lens: jax.Array,
            cu_kv_lens: jax.Array,
        ) -> tuple[jax.Array, jax.Array]:
            kv_cache = tsmla_jax.write_kv_cache(
                kv_cache, latent, k_rope, slots, implementation=self.implementation
            )  # in place: the runner donates its pools
            block_tables = tables_of(page_indices, cu_kv_lens // self.page_size, self.max_pages)
            q = jnp.concatenate([q_nope, q_rope], axis=-1)
            ragged = {} if decode else {"cu_seqlens_q": cu_q_lens, "max_q_len": q.shape[0]}
            out = tsmla_jax.mla_decode(
                q[:, None] if decode else q,
                kv_cache,
                block_tables,
                seq_lens,
                softmax_scale=softmax_scale,
                latent_dim=self.kv_lora_rank,
                implementation=self.implementation,
                **ragged,
            )
            return out.reshape(q_nope.shape), kv_cache

        return attend

    @staticmethod
    def get_max_running_reqests(max_context_len: int, page_size: int) -> int:  # sic
        """Requests at a time as far as the kernels are concerned: the runner's own limit."""
        return 4096


def tables_of(page_indices: jax.Array, page_starts: jax.Array, max_pages: int) -> jax.Array:
    """Ragged page indices [N], where those of request b begin at page_starts[b] -> block tables [B, max_pages].

    Entries past a request's last page are other requests' pages, which mla_decode doesn't read.
    """
    entry = page_starts[:-1, None] + jnp.arange(max_pages, dtype=jnp.int32)
    return page_indices[jnp.minimum(entry, page_indices.shape[0] - 1)]


@register_pytree_node_class
class TsmlaMLATokenToKVPool(MLATokenToKVPool):
    """The latent cache as mla_decode takes it, [P, Z, L + R] a layer: 576 columns, where a TPU's has 640."""

    def _shape(self) -> tuple[int, int, int]:
        # Page 0 of each data-parallel rank is the engine's own, for tokens of no request.
        num_pages = self.size // self.page_size + self.dp_size
        return num_pages, self.page_size, self.kv_lora_rank + self.qk_rope_head_dim

    def _buffer_bytes(self) -> int:
        pages, page_size, width = self._shape()
        return pages * page_size * width * jnp.dtype(self.dtype).itemsize

    def _create_buffers(self) -> None:
        if self.indexer_key_dim:
            raise NotImplementedError("indexer_key_dim: this pool has no keys of an indexer (--attention-backend fa)")
        self.nope_dim, self.rope_dim = self.kv_lora_rank, self.qk_rope_head_dim  # the columns of get_kv_buffer
        self.kv_dim = self.nope_dim + self.rope_dim
        self.kv_sharding = NamedSharding(self.mesh, P("data", None, None))
        allocate = jax.jit(lambda: jnp.zeros(self._shape(), self.dtype), out_shardings=self.kv_sharding)
        self.kv_buffer = [allocate() for _ in range(self.layer_num)]
        self.indexer_key_buffer: list[jax.Array] = []


class TsmlaModelRunner(ModelRunner):
    """sglang-jax's ModelRunner, with this backend and pool for MLA models that run with `--attention-backend fa`."""

    @property
    def _is_ours(self) -> bool:
        return self.use_mla_backend and self.server_args.attention_backend == "fa"

    def _get_attention_backend(self) -> Any:
        if not self._is_ours:
            return super()._get_attention_backend()
        config = self.model_config.hf_text_config
        backend = TsmlaMLABackend(
            max_request_len=self.model_config.context_len + 4,  # the width of ReqToTokenPool's rows
            num_attn_heads=self.num_attn_heads,
            kv_lora_rank=config.kv_lora_rank,
            qk_nope_head_dim=config.qk_nope_head_dim,
            qk_rope_head_dim=config.qk_rope_head_dim,
            v_head_dim=config.v_head_dim,
            page_size=self.page_size,
            mesh=self.mesh,
        )
        logger.info("attention by tsmla_jax\n%s", backend.explain(self.model_config.dtype))
        return attn_backend_wrapper(self, backend)

    def _maybe_wrap_hybrid_kv_pool(self, token_to_kv_pool_class: type, **parameters: Any) -> KVCache:
        if self._is_ours:
            token_to_kv_pool_class = TsmlaMLATokenToKVPool
        return super()._maybe_wrap_hybrid_kv_pool(token_to_kv_pool_class, **parameters)

    def _compute_cell_size(self) -> int:
        """Bytes of a token in all layers."""
        if not self._is_ours:
            return super()._compute_cell_size()
        config = self.model_config.hf_text_config
        width = config.kv_lora_rank + config.qk_rope_head_dim
        return width * jnp.dtype(self.kv_cache_dtype).itemsize * self._kv_pool_layer_count()


def install() -> None:
    """Make the workers that this process starts run their models by TsmlaModelRunner."""
    tp_worker.ModelRunner = TsmlaModelRunner

"""The sparse MLA backend for vLLM: latent attention over the keys that the indexer selected, on Hopper, for models with
DeepSeek-V3.2's sparse attention (GLM-5 among them).

vLLM defines the classes and their hooks (vllm/model_executor/layers/attention/sparse_mla_attention.py). vLLM's own
layer runs the indexer and writes both caches; the backend gets a buffer of selected positions. This module is imported
when the backend is chosen, not when it is registered.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import vllm
import vllm._custom_ops as vllm_ops
import vllm.envs as envs
import vllm.model_executor.layers.attention.sparse_mla_attention as vllm_sparse
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadata
from vllm.v1.attention.backends.mla import sparse_utils

from tsmla_bridge.engines import versions
from tsmla_bridge.engines.vllm import slots
from tsmla_bridge.engines.vllm.common import (
    DIMENSIONS,
    FP8_CACHES,
    HEADS_FIRST,
    SHORT_EXTEND,
    HopperBackend,
    HopperImpl,
    align_blocks,
    asked_by,
    kv_dtype,
    layers_of,
)
from tsmla_bridge.engines.vllm.step import LayerScales, OncePerStep
from tsmla_bridge.ops import sparse_mla as op
from tsmla_bridge.runtime import devices, tensors
from tsmla_bridge.runtime.tensors import dtype_name
from tsmla_kernels.catalog import SPARSE_MLA
from tsmla_kernels.contract.layouts import V32_PACKED
from tsmla_kernels.contract.rules import Array
from tsmla_kernels.contract.sparse import SparseMLASpec, sparse_mla_spec
from tsmla_kernels.sm90.decode import config as sm90_decode

PACKED_CACHE = "fp8_ds_mla"  # vLLM's name for DeepSeek-V3.2's rows of 656 bytes
PACKED_HEAD_SIZE = V32_PACKED.latent_dim + V32_PACKED.rope_dim
SEVERAL = 2  # tokens_per_request of calls with several tokens a request: larger numbers choose the same kernel

versions.warn_if_untested(versions.VLLM, vllm.__version__)


def describe(
    head_size: int,
    dtype: torch.dtype,
    kv_cache_dtype: str | None,
    *,
    num_heads: int = 1,
    num_tokens: int = 1,
    num_selected: int = 1,
    batch_invariant: bool = False,
    tokens_per_request: int | None = None,
) -> SparseMLASpec:
    """The spec of a call with vLLM's names for its properties. Pages have no size here: slots are row numbers."""
    if kv_cache_dtype == PACKED_CACHE:
        cache = Array((1, 1, V32_PACKED.row_bytes), "uint8")
    else:
        cache = Array((1, 1, head_size), kv_dtype(kv_cache_dtype, dtype))
    return sparse_mla_spec(
        q=Array((num_tokens, num_heads, head_size), dtype_name(dtype)),
        kv_cache=cache,
        indices=Array((num_tokens, num_selected), "int32"),
        latent_dim=DIMENSIONS[head_size][0],
        batch_invariant=batch_invariant,
        tokens_per_request=tokens_per_request,
    )


class TsmlaMLASparseBackend(HopperBackend):
    """The sparse backend."""

    supported_kv_cache_dtypes: ClassVar[list[str]] = [*HopperBackend.supported_kv_cache_dtypes, PACKED_CACHE]

    @staticmethod
    def get_builder_cls() -> type[TsmlaMLASparseMetadataBuilder]:
        return TsmlaMLASparseMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type[TsmlaMLASparseImpl]:
        return TsmlaMLASparseImpl

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """The shape of a layer's cache. vLLM asks for it up to 0.28; later it follows from the layer's spec."""
        return num_blocks, block_size, V32_PACKED.row_bytes if cache_dtype_str == PACKED_CACHE else head_size

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Pages of several layers that share memory must lie whole rows apart (vLLM 0.32 and later)."""
        return align_blocks(spec)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [576, 512]

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        *others: Any,
    ) -> str | None:
        """The reasons against a model and a cache, the kernel's among them; None if there are none."""
        if not use_sparse:
            return "this is tsmla's sparse backend; TSMLA, or CUSTOM without TSMLA_VLLM=sparse, is the dense one"
        if head_size not in cls.get_supported_head_sizes():
            return f"the head size is {head_size}; tsmla's sparse attention takes 576 (512 + 64) or 512 (512 + 0)"
        if kv_cache_dtype == PACKED_CACHE and head_size != PACKED_HEAD_SIZE:
            return f"the head size is {head_size}; rows of {PACKED_CACHE} hold {PACKED_HEAD_SIZE} (512 + 64)"
        if kv_cache_dtype == PACKED_CACHE and dtype != torch.bfloat16:
            return (
                f"the dtype is {dtype_name(dtype)}; rope columns in rows of {PACKED_CACHE} are read as bfloat16, and"
                " vLLM writes the bits of the model's dtype there"
            )
        num_heads, reasons = 1, []
        config = get_current_vllm_config_or_none()
        if config is not None and config.model_config is not None:
            parallel = config.parallel_config
            # Context parallelism gathers the heads of its ranks.
            num_heads = config.model_config.get_num_attention_heads(parallel) * parallel.decode_context_parallel_size
            if getattr(config.attention_config, "hisparse_config", None) is not None:
                reasons.append("HiSparse keeps the cache on the host, which tsmla's sparse attention doesn't read")
        spec = describe(head_size, dtype, kv_cache_dtype, num_heads=num_heads)
        return "; ".join(reasons + SPARSE_MLA.reasons(spec)) or None


if hasattr(vllm_sparse, "SparseMLACommonMetadata"):

    @dataclass(kw_only=True)
    class TsmlaMLASparseMetadata(vllm_sparse.SparseMLACommonMetadata):
        """A step's metadata, which vLLM's builder fills.

        scales: the factors of the layers with a plain fp8 cache.
        """

        scales: LayerScales | None = None
        step: OncePerStep = field(default_factory=OncePerStep)

else:  # vLLM 0.29 and earlier, where every backend declares what the builder fills

    @dataclass(kw_only=True)
    class TsmlaMLASparseMetadata(AttentionMetadata):  # type: ignore[no-redef]
        """A step's metadata, which vLLM's builder fills.

        scales: the factors of the layers with a plain fp8 cache.
        """

        num_reqs: int
        max_query_len: int
        max_seq_len: int
        num_actual_tokens: int
        query_start_loc: torch.Tensor
        slot_mapping: torch.Tensor
        block_table: torch.Tensor
        req_id_per_token: torch.Tensor
        seq_lens: torch.Tensor
        block_size: int
        topk_tokens: int
        num_decodes: int
        num_prefills: int
        num_decode_tokens: int
        prefill_max_seq_len: int
        prefill: Any
        cp_kv_cache_interleave_size: int
        scales: LayerScales | None = None
        step: OncePerStep = field(default_factory=OncePerStep)


class TsmlaMLASparseMetadataBuilder(vllm_sparse.SparseMLACommonMetadataBuilder[TsmlaMLASparseMetadata]):
    """Builds a step's metadata as vLLM does: the kernel makes its schedule on the device, from the lengths of rows."""

    metadata_cls = TsmlaMLASparseMetadata
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.batch_invariant = bool(envs.VLLM_BATCH_INVARIANT)
        self.layers = layers_of(vllm_config, layer_names)
        self.scales = LayerScales(
            {name: layer for name, layer in self.layers.items() if layer.kv_cache_dtype in FP8_CACHES},
            device,
            lambda softmax, q, k: (softmax, k, torch.ones_like(k)),
        )
        # The selected positions say what a token sees, so requests may have any number of tokens.
        self._init_reorder_batch_threshold(SHORT_EXTEND, supports_spec_as_decode=True, supports_dcp_with_varlen=True)
        if device.type == "cuda":
            self._compile(devices.index_of(device))
        versions.say_active(versions.VLLM, "sparse MLA runs on this backend")

    def _compile(self, index: int) -> None:
        """Load the kernels that these layers' calls ask for, from the cache on disk or compiled, so that no request
        waits for the compiler."""
        head_size = self.mla_dims.kv_lora_rank + self.mla_dims.qk_rope_head_dim
        for asked in asked_by(self.layers.values()):
            for num_tokens, per_request in itertools.product(op.WARM_TOKENS, (1, SEVERAL)):
                spec = describe(
                    head_size, asked.dtype, asked.kv_cache_dtype, num_heads=asked.num_heads * self.dcp_world_size,
                    num_tokens=num_tokens, num_selected=self.topk_tokens, batch_invariant=self.batch_invariant,
                    tokens_per_request=per_request,
                )  # fmt: skip
                # The layer hands a query over in two tensors; context parallelism gathers it in one.
                in_two = self.dcp_world_size == 1 and self.mla_dims.qk_rope_head_dim > 0
                heads_first = HEADS_FIRST and sm90_decode.reads_heads_first(asked.num_heads) and num_tokens > 1
                op.warm(spec, index, lengths=True, split_q=in_two, heads_first=heads_first)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> TsmlaMLASparseMetadata:
        metadata: TsmlaMLASparseMetadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        metadata.scales = self.scales
        if self.batch_invariant:
            # vLLM expands a batch's prompts if all of them are short, so one request would choose for another. Here
            # prompts are never expanded.
            metadata.prefill, metadata.prefill_max_seq_len = None, metadata.topk_tokens + 1
        return metadata


class TsmlaMLASparseImpl(HopperImpl, vllm_sparse.SparseMLACommonImpl[TsmlaMLASparseMetadata]):
    """The sparse attention of one layer. If no prompt of a step has more than index_topk tokens, so that all of them
    see all their keys, the step's prompts take vLLM's dense prefill, unless batches are to be invariant."""

    kind = "sparse"

    def __init__(self, *arguments: Any, **mla: Any) -> None:
        super().__init__(*arguments, **mla)
        if self.topk_indices_buffer is None:
            raise ValueError("topk_indices_buffer: got None, and no indexer; sparse attention needs one of them")
        self._pairs_read: dict[tuple[int, int, int], bool] = {}
        self.supports_quant_query_input = False  # so that queries keep 16 bits, which the kernel takes over every cache

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: TsmlaMLASparseMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Latent attention of the first T tokens over the positions in vLLM's buffer of selected ones.

        q: [T, H, L + R], or the pair [T, H, L] and [T, H, R], which is joined unless the kernel reads it as it is.
        Returns out [T, H, L] and, in context parallelism, lse [T, H] (natural logarithm)."""
        parts: tuple[torch.Tensor, ...] = q if isinstance(q, tuple) else (q,)
        if len(parts) == 2 and parts[1].shape[-1] == 0:
            parts = parts[:1]
        rows, step = _rows(kv_c_and_k_pe_cache)
        # A request of a prompt or of drafts has several tokens; the kernel for 2 is also the one for more.
        per_request = min(max(attn_metadata.max_query_len, 1), SEVERAL)
        joins = len(parts) == 2 and not self._reads_pair(len(parts[0]), parts[0].shape[1], per_request)
        selected = self._selected(parts, attn_metadata, step, joins)
        if selected.joined is not None:
            parts = (selected.joined,)
        if len(parts) == 1 or not tensors.is_heads_first(parts[0]):
            parts = (parts[0].contiguous(), *parts[1:])
        is_fp8, return_lse = rows.dtype == torch.float8_e4m3fn, self.need_to_return_lse_for_decode
        softmax_scale: Any = self.scale
        if is_fp8:
            assert attn_metadata.scales is not None
            softmax_scale = attn_metadata.scales.of(layer.layer_name, attn_metadata.step)
        results: Any = op.sparse_mla(
            parts if len(parts) == 2 else parts[0],
            rows,
            selected.slots,
            selected.counts,
            softmax_scale=softmax_scale,
            latent_dim=self.kv_lora_rank,
            kv_scale=layer._k_scale if is_fp8 else None,
            return_lse=return_lse,
            batch_invariant=self.batch_invariant,
            tokens_per_request=per_request,
        )
        return results if return_lse else (results, None)

    def _reads_pair(self, num_tokens: int, num_heads: int, per_request: int) -> bool:
        """Whether the kernel that serves such a call reads a query in two tensors."""
        key = num_tokens, num_heads, per_request
        if key not in self._pairs_read:
            spec = describe(
                self.head_size, self.dtype, self.kv_cache_dtype, num_heads=num_heads, num_tokens=num_tokens,
                num_selected=self.topk_indices_buffer.shape[1], batch_invariant=self.batch_invariant,
                tokens_per_request=per_request,
            )  # fmt: skip
            self._pairs_read[key] = op.reads_pair(spec)
        return self._pairs_read[key]

    def _selected(
        self, q: tuple[torch.Tensor, ...], metadata: TsmlaMLASparseMetadata, step: int, joins: bool
    ) -> slots.Selected:
        """The rows of the cache that the tokens' selected positions lie in, and how many of their columns count; and,
        if `joins`, q's two parts in one tensor. `step` is the number of rows from one page to the next."""
        parts = (q[0], q[-1]) if joins else None
        positions = self.topk_indices_buffer[: len(q[0])]
        requests = metadata.req_id_per_token[: len(positions)]
        group = getattr(self, "index_group", None)
        if self.dcp_world_size > 1:
            strided = {"BLOCK_STRIDE_ROWS": step} if _counts_rows_between_pages() else {}
            rows, counts = sparse_utils.triton_filter_and_convert_dcp_index(
                requests,
                metadata.block_table,
                positions,
                dcp_size=self.dcp_world_size,
                dcp_rank=self.dcp_rank,
                cp_kv_cache_interleave_size=metadata.cp_kv_cache_interleave_size,
                BLOCK_SIZE=metadata.block_size,
                NUM_TOPK_TOKENS=positions.shape[1],
                return_valid_counts=True,
                **strided,
            )
        elif group is not None and group.num_layers > 1 and metadata.num_decode_tokens >= len(positions):
            # Layers that share an indexer's result convert it once.
            rows, counts = self._convert_logical_to_physical_topk(
                positions, metadata, block_stride_rows=step, return_valid_counts=True
            )
        else:
            pages = slots.Pages(metadata.block_table, metadata.block_size, step)
            return slots.selected(positions, requests, pages, parts)
        return slots.Selected(rows, counts, None if parts is None else _joined(parts, self.kv_lora_rank))


def _joined(q: tuple[torch.Tensor, torch.Tensor], latent_dim: int) -> torch.Tensor:
    """A query's latent and rope parts as one tensor: by vLLM's own kernel if it takes them, else by torch."""
    latent, rope = q
    has_kernel = latent.is_cuda and hasattr(torch.ops._C_cache_ops, "concat_mla_q")
    if not has_kernel or latent.dtype != torch.bfloat16 or (latent_dim, rope.shape[-1]) != (512, 64):
        return tensors.joined(q, latent_dim)
    out = latent.new_empty(*latent.shape[:-1], latent_dim + rope.shape[-1])
    vllm_ops.concat_mla_q(latent, rope, out)
    return out


def _counts_rows_between_pages() -> bool:
    """Whether this vLLM's slots count the rows between two pages. Up to 0.28 pages lie side by side."""
    return hasattr(sparse_utils, "flat_kv_row_view")


def _rows(cache: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A cache [P, Z, D] as pages of one row, [N, 1, D], the rows between its pages included; and the number of rows
    from the start of one page to the next."""
    num_pages, page_size, width = cache.shape
    step, rest = divmod(cache.stride(0), width)
    if rest or cache.stride()[1:] != (width, 1):
        raise ValueError(
            f"kv_cache: got strides {cache.stride()}; legal: rows side by side, and pages whole rows of {width} apart"
        )
    if num_pages > 1 and step != page_size and not _counts_rows_between_pages():
        raise ValueError(
            f"kv_cache: got pages {step} rows apart; legal in this version of vLLM: {page_size}, a page's rows"
        )
    count = (num_pages - 1) * step + page_size
    return cache.as_strided((count, 1, width), (width, width, 1)), step

"""The MLA decode backend for vLLM: dense latent attention over its paged cache on Hopper.

vLLM defines the classes and their hooks (vllm/model_executor/layers/attention/mla_attention.py). This module is
imported when the backend is chosen, not when it is registered.
"""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import vllm
import vllm.envs as envs
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport

from tsmla_bridge.engines import versions
from tsmla_bridge.engines.context_parallel import Deal, visible_keys
from tsmla_bridge.engines.vllm.common import (
    DIMENSIONS,
    FP8_CACHES,
    HEADS_FIRST,
    PAGE_SIZES,
    SHORT_EXTEND,
    HopperBackend,
    HopperImpl,
    align_blocks,
    asked_by,
    kv_dtype,
    layers_of,
)
from tsmla_bridge.engines.vllm.step import LayerScales, OncePerStep
from tsmla_bridge.ops import mla_decode as op
from tsmla_bridge.runtime import devices, tensors
from tsmla_kernels.catalog import MLA_DECODE
from tsmla_kernels.contract import DecodeSpec
from tsmla_kernels.sm90.decode import config as sm90_decode

versions.warn_if_untested(versions.VLLM, vllm.__version__)


def takes_fp8_queries(kv_cache_dtype: str | None, dtype: torch.dtype) -> bool:
    """Whether queries are quantised, as the cache is. Only the queries of bfloat16 models are: a call with fp8 queries
    returns bfloat16, which vLLM multiplies by weights of the model's dtype. TSMLA_VLLM_FP8_QUERIES=0 leaves all queries
    in 16 bits."""
    wanted = os.environ.get("TSMLA_VLLM_FP8_QUERIES", "1") != "0"
    return wanted and kv_cache_dtype in FP8_CACHES and dtype == torch.bfloat16


def describe(
    head_size: int, page_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, **changed: Any
) -> DecodeSpec:
    """The spec of a decode call with vLLM's names for its properties; `changed` are fields of the spec."""
    latent_dim, rope_dim = DIMENSIONS[head_size]
    cache = kv_dtype(kv_cache_dtype, dtype)
    fields: dict[str, Any] = {
        "batch": 1, "total_q_len": 1, "max_q_len": 1, "num_heads": 1, "latent_dim": latent_dim, "rope_dim": rope_dim,
        "num_pages": 1, "page_size": page_size, "max_pages": 1, "kv_dtype": cache,
        "q_dtype": cache if takes_fp8_queries(kv_cache_dtype, dtype) else tensors.dtype_name(dtype),
        "ragged": False, "causal": True, "batch_invariant": False,
    }  # fmt: skip
    return DecodeSpec(**(fields | changed))


class TsmlaMLABackend(HopperBackend):
    """The dense backend."""

    @staticmethod
    def get_builder_cls() -> type[TsmlaMLAMetadataBuilder]:
        return TsmlaMLAMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type[TsmlaMLAImpl]:
        return TsmlaMLAImpl

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(DIMENSIONS)

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Blocks that also hold pages of other sizes, as a draft model's layers have them, must be whole pages apart:
        the kernels count in pages. vLLM can be asked for that from 0.32 on."""
        spec = super().customize_spec(spec)
        return align_blocks(spec, math.gcd(spec.block_size, max(PAGE_SIZES)))

    @classmethod
    def supports_non_causal(cls) -> bool:
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
        if use_sparse:
            return "this is tsmla's dense backend; TSMLA_SPARSE, or CUSTOM with TSMLA_VLLM=sparse, is the sparse one"
        if head_size not in DIMENSIONS:
            legal = ", ".join(f"{size} ({latent} + {rope})" for size, (latent, rope) in DIMENSIONS.items())
            return f"the head size is {head_size}; tsmla takes {legal}"
        page_size = next((size for size in PAGE_SIZES if (block_size or size) % size == 0), block_size or 0)
        reasons = MLA_DECODE.reasons(describe(head_size, page_size, dtype, kv_cache_dtype))
        return "; ".join(reasons) or None


@dataclass(kw_only=True)
class TsmlaMLADecodeMetadata(MLACommonDecodeMetadata):
    """A step's decode part.

    q_len: query tokens of every request, if all have the same number and there is a kernel for it; None for a ragged
      step.
    max_q_len: a bound on a request's query tokens.
    interleave: keys that a rank of the context takes at a time.
    scales: the factors of the layers with an fp8 cache.
    """

    query_start_loc: torch.Tensor
    q_len: int | None
    max_q_len: int
    interleave: int
    scales: LayerScales
    step: OncePerStep = field(default_factory=OncePerStep)

    def visible_lens(self, num_tokens: int, world: int, rank: int) -> torch.Tensor:
        """How many of the rank's keys each query token sees, [T], in causal calls of several tokens a request in
        context parallelism."""
        all_lens, deal = self.dcp_tot_seq_lens, Deal(world, rank, self.interleave)
        assert all_lens is not None
        return self.step.take(
            "visible_lens",
            self.seq_lens.device,
            lambda: visible_keys(self.query_start_loc, all_lens, self.seq_lens, num_tokens, deal),
        )

    def in_pages(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's cache and the block table. If blocks hold other layers' pages too, the cache is all pages up to the
        last block's, side by side, and the table counts all of them: it is multiplied once a step, not in every
        layer."""
        step = tensors.page_step(kv_cache)
        if step == 1:
            return kv_cache, self.block_table
        num_pages, page_size, head_dim = kv_cache.shape
        pages = kv_cache.as_strided(
            ((num_pages - 1) * step + 1, page_size, head_dim), (page_size * head_dim, head_dim, 1)
        )
        table = self.step.take(("pages", step), kv_cache.device, lambda: self.block_table * step)
        return pages, table


class TsmlaMLAMetadata(MLACommonMetadata[TsmlaMLADecodeMetadata]):
    pass


class TsmlaMLAMetadataBuilder(MLACommonMetadataBuilder[TsmlaMLAMetadata]):
    """Builds a step's metadata: the kernels make their schedule on the device, so there is little to build."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN
    supports_non_causal_multi_token_decode: ClassVar[bool] = True
    supports_non_causal_multi_token_dcp: ClassVar[bool] = True
    reorder_batch_threshold: int = SHORT_EXTEND

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        self.batch_invariant = bool(envs.VLLM_BATCH_INVARIANT)
        if self.batch_invariant:
            # vLLM decodes a prompt's last chunk if the chunk has no more tokens than this threshold. With a larger
            # threshold, the kernel that decodes the other requests would depend on whether such a chunk runs beside
            # them. With speculative decoding vLLM raises the threshold to one token and the drafts.
            self.reorder_batch_threshold = 1
        super().__init__(
            kv_cache_spec, layer_names, vllm_config, device, TsmlaMLAMetadata, supports_dcp_with_varlen=True
        )
        self.layers = layers_of(vllm_config, layer_names)
        self.scales = LayerScales(
            {name: layer for name, layer in self.layers.items() if layer.kv_cache_dtype in FP8_CACHES},
            device,
            lambda softmax, q, k: (softmax * q * k, k),
        )
        speculative = vllm_config.speculative_config
        drafts = 0 if speculative is None else speculative.num_speculative_tokens or 0
        # The query lengths that kernels are compiled for: equal ones of all requests, and bounds on unequal ones.
        self.uniform_q_lens = {1, 1 + drafts}
        self.max_q_lens = sorted({1 + drafts, self.reorder_batch_threshold} - {1})
        if self._has_non_causal_blocks():
            self.uniform_q_lens |= {drafts} - {0}  # a block of drafts alone
        if self.batch_invariant and drafts:
            # One kernel for all numbers of drafts: two kernels could round the same request's results differently.
            self.uniform_q_lens, self.max_q_lens = set(), [self.reorder_batch_threshold]
        if device.type == "cuda":
            self._compile(devices.index_of(device))
        versions.say_active(versions.VLLM, "MLA decode runs on this backend")

    def _has_non_causal_blocks(self) -> bool:
        """Whether a draft model's blocks, which see all keys, are among the calls of these layers."""
        return bool(getattr(self, "non_causal_multi_token_decode", False))

    def _compile(self, index: int) -> None:
        """Load the kernels that these layers' calls ask for, from the cache on disk or compiled, so that no request
        waits for the compiler. Nothing is loaded where no kernel has the head size, or a block is no page."""
        page_size = self.kv_cache_spec.block_size
        head_size = self.mla_dims.kv_lora_rank + self.mla_dims.qk_rope_head_dim
        if head_size not in DIMENSIONS or page_size not in PAGE_SIZES:
            return
        for asked in asked_by(self.layers.values()):
            for q_len, ragged, causal in self._lengths():
                spec = describe(
                    head_size, page_size, asked.dtype, asked.kv_cache_dtype,
                    num_heads=asked.num_heads * self.dcp_world_size, batch_invariant=self.batch_invariant,
                    max_q_len=q_len, total_q_len=q_len, ragged=ragged, causal=causal,
                    visible_lens=self.dcp_world_size > 1 and causal and (ragged or q_len > 1),
                )  # fmt: skip
                self._warm(spec, index)

    def _lengths(self) -> list[tuple[int, bool, bool]]:
        """The kinds of calls: a query length or a bound on it, whether it is a bound, and whether the call is causal.
        Layers with blocks that see all keys have causal calls, too: short extends."""
        lengths = [(q_len, False) for q_len in sorted(self.uniform_q_lens)]
        lengths += [(bound, True) for bound in self.max_q_lens]
        rules = (False, True) if self._has_non_causal_blocks() else (True,)
        return [(*length, causal) for causal in rules for length in lengths if causal is rules[0] or length[0] > 1]

    def _warm(self, spec: DecodeSpec, index: int) -> None:
        # The layer hands a query of 16 bits over in two tensors; context parallelism gathers it in one.
        in_two = self.dcp_world_size == 1 and spec.rope_dim > 0 and spec.q_dtype != "float8_e4m3fn"
        reads = in_two and HEADS_FIRST and sm90_decode.reads_heads_first(spec.num_heads)
        heads_first = reads and not spec.batch_invariant  # with batch invariance the layer copies such a query
        # One token's heads lie in the same order either way.
        if not heads_first or (spec.max_q_len == 1 and not spec.ragged):
            op.warm(spec, index, split_q=in_two)
        if heads_first:
            op.warm(spec, index, split_q=True, heads_first=True)

    def _build_decode(  # called by keyword; the parameters differ from version to version
        self,
        *,
        block_table_tensor: torch.Tensor,
        seq_lens_device: torch.Tensor,
        query_start_loc_cpu: torch.Tensor,
        query_start_loc_device: torch.Tensor,
        num_decode_tokens: int,
        dcp_tot_seq_lens_device: torch.Tensor | None,
        **others: Any,
    ) -> TsmlaMLADecodeMetadata:
        starts: list[int] = query_start_loc_cpu.tolist()
        q_lens = [stop - start for start, stop in itertools.pairwise(starts)]
        most = max(1, *q_lens)
        # Padding of a CUDA graph: requests without tokens, after the others. num_decode_tokens may count rows for them.
        last = max((i for i, count in enumerate(q_lens) if count), default=-1)
        rows, rest = divmod(num_decode_tokens, most)
        uniform = (
            most in self.uniform_q_lens
            and all(count == most for count in q_lens[: last + 1])
            and not rest
            and last < rows <= len(q_lens)
        )
        requests = rows if uniform else len(q_lens)
        return TsmlaMLADecodeMetadata(
            block_table=block_table_tensor[:requests],
            seq_lens=seq_lens_device[:requests],
            dcp_tot_seq_lens=None if dcp_tot_seq_lens_device is None else dcp_tot_seq_lens_device[:requests],
            query_start_loc=query_start_loc_device[: requests + 1],
            q_len=most if uniform else None,
            max_q_len=next((bound for bound in self.max_q_lens if bound >= most), most),
            interleave=self.cp_kv_cache_interleave_size,
            scales=self.scales,
        )


class TsmlaMLAImpl(HopperImpl, MLACommonImpl[TsmlaMLAMetadata]):
    """The decode attention of one layer."""

    kind = "decode"

    def __init__(self, *arguments: Any, **mla: Any) -> None:
        super().__init__(*arguments, **mla)
        self.supports_quant_query_input = takes_fp8_queries(self.kv_cache_dtype, self.dtype)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: TsmlaMLAMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Latent attention of the decode tokens.

        q: [T, H, L + R], or the pair [T, H, L] and [T, H, R], which the kernel reads as two tensors; fp8 if the
        layer quantised it. Returns out [T, H, L] and, in context parallelism, lse [T, H] (natural logarithm)."""
        decode, fp8 = attn_metadata.decode, torch.float8_e4m3fn
        parts: tuple[torch.Tensor, ...] = q if isinstance(q, tuple) else (q,)
        # A layer's factors (LayerScales) contain q's scale only if its queries are quantised.
        if (parts[0].dtype == fp8) != self.supports_quant_query_input:
            legal = fp8 if self.supports_quant_query_input else self.dtype
            raise ValueError(f"q: got {parts[0].dtype}; legal: {legal}")
        if len(parts) == 2 and parts[1].shape[-1] == 0:
            parts = parts[:1]
        num_tokens, num_heads, _ = parts[0].shape
        causal = getattr(attn_metadata, "causal", True)  # vLLM 0.26 has only causal calls
        q_len = decode.q_len
        options: dict[str, Any] = {}
        if self.dcp_world_size > 1 and causal and q_len != 1:
            visible_lens = decode.visible_lens(num_tokens, self.dcp_world_size, self.dcp_rank)
            options["visible_lens"] = visible_lens if q_len is None else visible_lens.view(-1, q_len)
        if q_len is None:
            options |= {"cu_seqlens_q": decode.query_start_loc, "max_q_len": decode.max_q_len}
        else:
            parts = tuple(part.view(-1, q_len, num_heads, part.shape[-1]) for part in parts)
        if len(parts) == 1 or self.batch_invariant or not tensors.is_heads_first(parts[0]):
            parts = (parts[0].contiguous(), *parts[1:])
        pages, block_table = decode.in_pages(kv_c_and_k_pe_cache)
        return_lse = self.need_to_return_lse_for_decode
        results: Any = op.mla_decode(
            parts if len(parts) == 2 else parts[0],
            pages,
            block_table,
            decode.seq_lens,
            softmax_scale=decode.scales.of(layer.layer_name, decode.step) if pages.dtype == fp8 else self.scale,
            latent_dim=self.kv_lora_rank,
            causal=causal,
            q_scale=layer._q_scale if parts[0].dtype == fp8 else None,
            kv_scale=layer._k_scale if pages.dtype == fp8 else None,
            return_lse=return_lse,
            batch_invariant=self.batch_invariant,
            **options,
        )
        out, lse = results if return_lse else (results, None)
        out = out.view(num_tokens, num_heads, self.kv_lora_rank)
        return out, None if lse is None else lse.view(num_tokens, num_heads)

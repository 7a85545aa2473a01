"""The attention backend for SGLang: dense MLA over its paged pool on Hopper.

The class and its hooks are SGLang's (sglang/srt/layers/attention/base_attn_backend.py). Imported when the backend is
chosen, not when it is registered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sglang
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.models.deepseek_common.attention_backend_handler import (
    AttentionBackendRegistry,
    AttnForwardMethod,
    is_in_breakable_cuda_graph,
    is_in_tc_piecewise_cuda_graph,
)
from sglang.srt.models.deepseek_common.utils import FORWARD_ABSORB_CORE_ATTENTION_BACKENDS
from sglang.srt.runtime_context import get_parallel, get_spec

from tsmla_bridge.engines import versions
from tsmla_bridge.engines.sglang import NAME
from tsmla_bridge.ops import mla_decode, mla_prefill
from tsmla_bridge.runtime import devices
from tsmla_bridge.runtime.tensors import dtype_name, row_step
from tsmla_kernels import contract
from tsmla_kernels.catalog import MLA_DECODE, MLA_PREFILL
from tsmla_kernels.contract import DecodeSpec, PrefillSpec

Results = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

versions.warn_if_untested(versions.SGLANG, sglang.__version__)


def forward_method(attention: Any, forward_batch: Any) -> Any:
    """How an MLA layer runs a batch: prompts expanded, with their cached prefix in chunks; the rest absorbed. A graph
    of prefill has one way alone, the absorbed one, whose shapes don't depend on the lengths."""
    if is_in_tc_piecewise_cuda_graph() or is_in_breakable_cuda_graph():
        return AttnForwardMethod.MLA
    prefix = sum(forward_batch.extend_prefix_lens_cpu or [0])
    if forward_batch.forward_mode.is_extend_without_speculative() and (
        not attention.disable_chunked_prefix_cache or prefix == 0
    ):
        return AttnForwardMethod.MHA_CHUNKED_KV
    return AttnForwardMethod.MLA


AttentionBackendRegistry.register(NAME, forward_method)


def _readable(latent: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A query's two parts as the kernel reads them: where they lie, or in one tensor where the product over heads left
    the latent part as [H, T, L]."""
    if rope.shape[-1] and row_step(rope) and latent.is_contiguous():
        return latent, rope
    return (torch.cat((latent, rope), -1),)


@dataclass
class Metadata:
    """What the layers of a step share. q_len: query tokens of every request, or None where cu_seqlens_q tells them
    apart, at most max_q_len of each."""

    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    q_len: int | None
    cu_seqlens_q: torch.Tensor | None = None
    max_q_len: int | None = None


class TsmlaBackend(AttentionBackend):
    """Decode, target verify, draft extend and prefill of one model runner."""

    # Tables are sized by the longest context, and lengths are read on the device.
    needs_cpu_seq_lens: bool = False

    def __init__(self, runner: Any) -> None:
        super().__init__()
        config = runner.model_config
        self.page_size: int = runner.page_size
        self.max_context_len: int = config.context_len
        # The model's code reads the pools here.
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token: torch.Tensor = runner.req_to_token_pool.req_to_token
        self.kv_index_translator = runner.kv_index_translator
        self.device = torch.device(runner.device)
        self.data_type = self.kv_cache_dtype = runner.kv_cache_dtype
        self.dtype = runner.dtype
        self.latent_dim: int = config.kv_lora_rank
        self.rope_dim: int = config.qk_rope_head_dim
        self.num_draft_tokens: int = get_spec().speculative_num_draft_tokens or 0
        self.num_heads: int = config.num_attention_heads // get_parallel().attn_tp_size
        self.forward_metadata: Metadata | None = None
        self._check(runner)
        self._take_rope_apart(config)
        if self.device.type == "cuda":
            self._compile((config.qk_nope_head_dim + self.rope_dim, config.v_head_dim))
        versions.say_active(versions.SGLANG, "MLA attention runs on this backend")

    def _check(self, runner: Any) -> None:
        """ValueError or NotImplementedError for what this backend can't serve."""
        if not runner.use_mla_backend:
            raise ValueError(f"--attention-backend {NAME}: got a model without MLA; it serves MLA models alone")
        if (topk := getattr(get_spec(), "speculative_eagle_topk", None) or 1) > 1:
            raise ValueError(f"--speculative-eagle-topk: got {topk}; {NAME} verifies chains of drafts alone, topk 1")
        if (dcp_size := get_parallel().attn_dcp_size) > 1:
            raise NotImplementedError(f"--dcp-size: got {dcp_size}; {NAME} serves 1, no decode context parallelism")
        if self.kv_index_translator is not None and self.kv_index_translator.reads_are_translated:
            raise NotImplementedError(f"--attention-backend {NAME}: the unified memory pool is not served")
        if reasons := MLA_DECODE.reasons(self._decode_spec(1)):
            said = "; pass --page-size 64" if self.page_size not in (16, 32, 64, 128) else ""
            raise NotImplementedError(f"{contract.not_runnable('mla_decode', 'cute', reasons)}{said}")

    def _take_rope_apart(self, config: Any) -> None:
        """Have the model hand over latent and rope columns as they are, without a concatenation: by name, which the
        models' code looks up. Not for a model that scales its queries by position (Llama 4's way), which it does to
        concatenated ones alone."""
        scaled = getattr(getattr(config, "hf_config", None), "llama_4_scaling", None)
        if scaled is None and NAME not in FORWARD_ABSORB_CORE_ATTENTION_BACKENDS:
            FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.append(NAME)

    def _decode_spec(self, q_len: int) -> DecodeSpec:
        return DecodeSpec(
            batch=1, total_q_len=q_len, max_q_len=q_len, num_heads=self.num_heads, latent_dim=self.latent_dim,
            rope_dim=self.rope_dim, num_pages=1, page_size=self.page_size, max_pages=1, q_dtype=dtype_name(self.dtype),
            kv_dtype=dtype_name(self.data_type), ragged=False, causal=True, batch_invariant=False,
        )  # fmt: skip

    def _compile(self, head_dims: tuple[int, int]) -> None:
        """Load the kernels of decode, verify and prefill, so that no request waits for the compiler."""
        index = devices.index_of(self.device)
        for q_len in {1, self.num_draft_tokens or 1}:
            for split_q in (False, True):
                mla_decode.warm(self._decode_spec(q_len), index, split_q=split_q)
        name = dtype_name(self.dtype)
        for causal in (True, False):
            spec = PrefillSpec(
                batch=1, total_q_len=1, total_kv_len=1, max_q_len=1, max_kv_len=1, num_heads=1,
                qk_head_dim=head_dims[0], v_head_dim=head_dims[1], q_dtype=name, kv_dtype=name, causal=causal,
            )  # fmt: skip
            if not MLA_PREFILL.reasons(spec):
                for wide_v in (False, True):  # new tokens, and the cached prefix
                    mla_prefill.warm(spec, index, wide_v=wide_v)

    # ---- metadata of a step

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """A step outside of graphs."""
        mode, lens = forward_batch.forward_mode, forward_batch.seq_lens
        if mode.is_decode_or_idle():
            self.forward_metadata = self._metadata(forward_batch, lens, 1)
        elif mode.is_target_verify():
            self.forward_metadata = self._metadata(forward_batch, lens + self.num_draft_tokens, self.num_draft_tokens)
        elif mode.is_draft_extend_v2():
            # Every request has num_draft_tokens rows, the last ones padding behind its new tokens.
            lens = lens - forward_batch.extend_seq_lens + self.num_draft_tokens
            self.forward_metadata = self._metadata(forward_batch, lens, self.num_draft_tokens)
        else:
            starts = torch.zeros(len(lens) + 1, dtype=torch.int32, device=lens.device)
            torch.cumsum(forward_batch.extend_seq_lens, 0, out=starts[1:])
            metadata = self._metadata(forward_batch, lens, None)
            metadata.cu_seqlens_q, metadata.max_q_len = starts, max(forward_batch.extend_seq_lens_cpu)
            self.forward_metadata = metadata

    def _metadata(self, forward_batch: Any, lens: torch.Tensor, q_len: int | None) -> Metadata:
        bound = self.max_context_len if forward_batch.seq_lens_cpu is None else int(forward_batch.seq_lens_cpu.max())
        width = self._pages(bound + self.num_draft_tokens)
        return Metadata(self._tables(forward_batch.req_pool_indices, width), lens.to(torch.int32), q_len)

    def _pages(self, num_tokens: int) -> int:
        return -(-min(num_tokens, self.req_to_token.shape[1]) // self.page_size)

    def _tables(self, requests: torch.Tensor, width: int) -> torch.Tensor:
        """The pages [B, width] of these rows of SGLang's table of tokens; entries behind a request are garbage."""
        firsts = self.req_to_token[:, : width * self.page_size : self.page_size]
        return torch.div(firsts[requests], self.page_size, rounding_mode="floor").to(torch.int32)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Memory that graphs read; each step is written there before its replay."""
        width = self._pages(self.max_context_len + self.num_draft_tokens)
        self.graph_tables = torch.zeros((max_bs, width), dtype=torch.int32, device=self.device)
        self.graph_lens = torch.ones(max_bs, dtype=torch.int32, device=self.device)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """A step before a graph's capture or replay."""
        mode, batch = forward_batch.forward_mode, forward_batch.batch_size
        if not (mode.is_decode_or_idle() or mode.is_target_verify() or mode.is_draft_extend_v2()):
            self.init_forward_metadata(forward_batch)
            return
        q_len = 1 if mode.is_decode_or_idle() else self.num_draft_tokens
        lens = forward_batch.seq_lens[:batch]
        if mode.is_target_verify():  # the lengths of draft extend come with the drafts counted
            lens = lens + self.num_draft_tokens
        tables, seq_lens = self.graph_tables[:batch], self.graph_lens[:batch]
        tables.copy_(self._tables(forward_batch.req_pool_indices[:batch], tables.shape[1]))
        seq_lens.copy_(lens)
        self.forward_metadata = Metadata(tables, seq_lens, q_len)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    # ---- a layer's attention

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        """Absorbed attention. q: [T, H * (L + R)], or [T, H * L] with q_rope [T, H, R]. Returns out [T, H * L]."""
        if others:
            raise NotImplementedError(f"{', '.join(others)}: {NAME} takes none")
        if k is not None and save_kv_cache:
            self._save(layer, forward_batch, k, v, k_rope)
        heads, head_dim = layer.tp_q_head_num, layer.head_dim
        query: tuple[torch.Tensor, ...] = (q.view(-1, heads, head_dim if q_rope is None else layer.v_head_dim),)
        if q_rope is not None:
            query = _readable(query[0], q_rope.view(-1, heads, head_dim - layer.v_head_dim))
        metadata = self.forward_metadata
        assert metadata is not None
        tokens = query[0].shape[0]
        ragged: dict[str, Any] = {}
        if metadata.q_len is None:
            bound = 1 << (metadata.max_q_len or 1).bit_length()  # few kernels for all lengths
            ragged = {"cu_seqlens_q": metadata.cu_seqlens_q, "max_q_len": bound}
        else:
            query = tuple(part.view(-1, metadata.q_len, heads, part.shape[-1]) for part in query)
        out: Any = mla_decode.mla_decode(
            query if len(query) == 2 else query[0].contiguous(),
            # Of fp8, too, without a scale: the pool converts what it is given, and the checkpoint's scale of the layer
            # has no part in that.
            self.token_to_kv_pool.get_key_buffer(layer.layer_id).view(-1, self.page_size, head_dim),
            metadata.block_tables,
            metadata.seq_lens,
            softmax_scale=layer.scaling,
            latent_dim=self.latent_dim,
            **ragged,
        )
        return out.reshape(tokens, heads * self.latent_dim)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
        **others: Any,
    ) -> Results:
        """Absorbed attention of verified tokens, drafts and captured prompts, as forward_decode's; and expanded
        attention of prompts, [T, H, K] over [Tk, H, K] and [Tk, H, V]: out [T, H, V], with lse [T, H] (natural
        logarithm) where forward_batch.mha_return_lse asks for it."""
        if layer.head_dim == self.latent_dim + self.rope_dim and layer.v_head_dim == self.latent_dim:
            return self.forward_decode(q, k, v, layer, forward_batch, save_kv_cache, q_rope, k_rope, **others)
        assert k is not None and v is not None
        if save_kv_cache:
            self._save(layer, forward_batch, k, v, k_rope)
        metadata = self.forward_metadata
        assert metadata is not None and metadata.cu_seqlens_q is not None and metadata.max_q_len is not None
        starts, most, causal = metadata.cu_seqlens_q, metadata.max_q_len, True
        if forward_batch.attn_attend_prefix_cache:
            chunk, causal = forward_batch.prefix_chunk_idx, False
            starts = forward_batch.prefix_chunk_cu_seq_lens[chunk]
            most = forward_batch.prefix_chunk_max_seq_lens[chunk]
        heads = layer.tp_q_head_num
        results: Results = mla_prefill.mla_prefill(
            q.view(-1, heads, layer.head_dim).contiguous(),
            k.view(-1, heads, layer.head_dim).to(q.dtype).contiguous(),
            v.view(-1, heads, layer.v_head_dim).to(q.dtype),  # read where it lies, in a wider tensor too
            cu_seqlens_q=metadata.cu_seqlens_q,
            cu_seqlens_kv=starts.to(torch.int32),
            max_q_len=metadata.max_q_len,
            max_kv_len=int(most),
            softmax_scale=layer.scaling,
            causal=causal,
            return_lse=bool(forward_batch.mha_return_lse),
        )
        return results

    def _save(self, layer: Any, forward_batch: Any, k: Any, v: Any, k_rope: Any) -> None:
        """Write new tokens to the pool: latent and rope apart, or side by side in k."""
        place = KVWriteLoc.for_batch(forward_batch)
        if k_rope is not None:
            self.token_to_kv_pool.set_mla_kv_buffer(layer, place, k, k_rope)
        else:
            self.token_to_kv_pool.set_kv_buffer(layer, place, k, v)

"""The attention backend for SGLang: dense MLA over its paged pool on Hopper.

SGLang defines the class and its hooks (sglang/srt/layers/attention/base_attn_backend.py). This module is imported when
the backend is chosen, not when it is registered.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import sglang
import torch
from sglang.srt.configs.model_config import is_deepseek_dsa
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.models.deepseek_common.attention_backend_handler import (
    AttentionBackendRegistry,
    AttnForwardMethod,
    is_in_breakable_cuda_graph,
    is_in_tc_piecewise_cuda_graph,
)
from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mla
from sglang.srt.models.deepseek_common.utils import FORWARD_ABSORB_CORE_ATTENTION_BACKENDS
from sglang.srt.runtime_context import get_parallel, get_schedule, get_spec

from tsmla_bridge.engines import versions
from tsmla_bridge.engines.context_parallel import Deal, visible_keys_of_last
from tsmla_bridge.engines.sglang import NAME
from tsmla_bridge.ops import mla_decode, mla_prefill
from tsmla_bridge.runtime import devices
from tsmla_bridge.runtime.tensors import dtype_name, row_step
from tsmla_kernels import contract
from tsmla_kernels.catalog import MLA_DECODE, MLA_PREFILL
from tsmla_kernels.contract import DecodeSpec, PrefillSpec

Results = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

# The name of this function begins with an underscore in SGLang 0.5.17.
_IS_BASE_E = getattr(forward_mla, "is_mla_dcp_lse_base_on_e", None) or forward_mla._is_mla_dcp_lse_base_on_e
# Turns our lse, a natural logarithm, into one of the base in which SGLang merges the ranks' results. SGLang knows the
# names of the backends whose base is e, and takes 2 for all others.
LSE_FACTOR = 1.0 if _IS_BASE_E(NAME) else math.log2(math.e)

versions.warn_if_untested(versions.SGLANG, sglang.__version__)


def forward_method(attention: Any, forward_batch: Any) -> Any:
    """How an MLA layer runs a batch. Batches of prompts are expanded, with their cached prefixes in chunks; if chunks
    are disabled, a batch in which any prompt has a prefix is absorbed. All other batches are absorbed, and so are
    prompts in a CUDA graph of prefill, because the shapes of the absorbed form don't depend on the lengths."""
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
    """A query's two parts as the kernel reads them: where they lie, or joined in one tensor if the latent part isn't
    contiguous (a product over heads gives such a part), or the rope part is empty or has rows that the kernel can't
    read."""
    if rope.shape[-1] and row_step(rope) and latent.is_contiguous():
        return latent, rope
    return (torch.cat((latent, rope), -1),)


def _write_place(forward_batch: Any) -> Any:
    """Where a batch's keys are written, as the pool takes it: up to SGLang 0.5.21 the slots alone."""
    for_batch = getattr(KVWriteLoc, "for_batch", None)
    return forward_batch.out_cache_loc if for_batch is None else for_batch(forward_batch)


def _hf_configs(config: Any) -> list[Any]:
    """A model's Hugging Face configurations: its own, and its text part's where it has one."""
    found = (getattr(config, name, None) for name in ("hf_config", "hf_text_config"))
    return [each for each in found if each is not None]


def _scales_queries(config: Any) -> bool:
    """Whether a model scales its queries by position (Llama 4's way)."""
    return any(getattr(each, "llama_4_scaling", None) is not None for each in _hf_configs(config))


class Pages(NamedTuple):
    """A buffer's rows in pages: which row each slot gets, [P * Z] int64, and each request's pages, [B, M] int32."""

    rows: torch.Tensor
    block_tables: torch.Tensor


def _in_pages(starts: torch.Tensor, rows: torch.Tensor, lens: list[int], page_size: int) -> Pages:
    """Put each request's rows into pages of its own. Slots past a request's end repeat its last row.

    Args:
      starts: [B + 1] int32, where each request begins in `rows`, and the end.
      rows: [N] int32, the rows of all requests, one request after the other.
      lens: the requests' lengths, on the host.
    """
    counts = [-(-n // page_size) for n in lens]
    lengths = starts.diff()
    pages = torch.div(lengths + page_size - 1, page_size, rounding_mode="floor")
    first = pages.cumsum(0) - pages
    slot = torch.arange(sum(counts) * page_size, device=rows.device)
    request = torch.arange(len(lens), device=rows.device)
    request = request.repeat_interleave(pages * page_size, output_size=len(slot))
    offset = torch.minimum(slot - first[request] * page_size, lengths[request] - 1)
    tables = first[:, None] + torch.arange(max(counts), device=rows.device)
    return Pages(rows[starts[request] + offset].long(), tables.to(torch.int32))


@dataclass
class Metadata:
    """Values that the layers of a step share.

    Attributes:
      block_tables: [B, M] int32, the pages of each request.
      seq_lens: [B] int32, the keys of each request; unless q_len is None, only the keys that this rank holds.
      q_len: the query tokens of every request; None in a step of prompts.
      cu_seqlens_q, max_q_len: if q_len is None, [B + 1] int32, the first query token of each request and the end, and a
        bound on a request's query tokens.
      visible_lens: [B, q_len] int32, how many of this rank's keys each token sees; None unless keys are dealt out to
        several ranks and q_len is 2 or more.
      gathered: the pages of SGLang's buffer of all ranks' keys, once a layer has asked for them."""

    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    q_len: int | None
    cu_seqlens_q: torch.Tensor | None = None
    max_q_len: int | None = None
    visible_lens: torch.Tensor | None = None
    gathered: Pages | None = None


class TsmlaBackend(AttentionBackend):
    """Decode, target verify, draft extend and prefill of one model runner."""

    # Without lengths on the host, tables are sized by the longest context.
    needs_cpu_seq_lens: bool = False
    has_scaled_queries: ClassVar[bool] = False  # whether any model of this process has them

    def __init__(self, runner: Any) -> None:
        super().__init__()
        config = runner.model_config
        self.page_size: int = runner.page_size
        self.max_context_len: int = config.context_len
        # The model's code reads the pools here.
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token: torch.Tensor = runner.req_to_token_pool.req_to_token
        # SGLang 0.5.17 has no translator. Later versions have one, which translates only for the unified memory pool.
        self.kv_index_translator = getattr(runner, "kv_index_translator", None)
        self.device = torch.device(runner.device)
        self.data_type = self.kv_cache_dtype = runner.kv_cache_dtype
        self.dtype = runner.dtype
        self.latent_dim: int = config.kv_lora_rank
        self.rope_dim: int = config.qk_rope_head_dim
        self.num_draft_tokens: int = get_spec().speculative_num_draft_tokens or 0
        parallel = get_parallel()
        self.num_heads: int = config.num_attention_heads // parallel.attn_tp_size
        # Decode context parallelism: key i of a request is key i // world of rank i % world.
        self.deal = Deal(parallel.attn_dcp_size, parallel.attn_dcp_rank, 1)
        # One bound on the lengths of absorbed prompts, so that one kernel serves all: it does not change a result.
        self.longest = 1 << (max(1, self.max_context_len) - 1).bit_length()
        self.forward_metadata: Metadata | None = None
        self._check(runner)
        self._take_rope_apart(config)
        if self.device.type == "cuda":
            self._compile((config.qk_nope_head_dim + self.rope_dim, config.v_head_dim))
        versions.say_active(versions.SGLANG, "MLA attention runs on this backend")

    def _check(self, runner: Any) -> None:
        """ValueError or NotImplementedError for what this backend can't serve."""
        if not runner.use_mla_backend:
            raise ValueError(f"--attention-backend {NAME}: got a model without MLA; it serves only MLA models")
        self._check_model(runner.model_config)
        if (topk := getattr(get_spec(), "speculative_eagle_topk", None) or 1) > 1:
            raise ValueError(f"--speculative-eagle-topk: got {topk}; {NAME} verifies only chains of drafts, topk 1")
        if (corpus := getattr(get_spec(), "speculative_ngram_external_corpus_path", None)) is not None:
            raise ValueError(
                f"--speculative-ngram-external-corpus-path: got {corpus}; {NAME} verifies only chains of drafts, and"
                " drafts from two sources are a tree"
            )
        if self.deal.world > 1:
            self._check_context_parallel(runner)
        if self.kv_index_translator is not None and self.kv_index_translator.is_translating:
            raise NotImplementedError(f"--attention-backend {NAME}: the unified memory pool is not served")
        if reasons := MLA_DECODE.reasons(self._decode_spec(1)):
            said = "; pass --page-size 64" if self.page_size not in (16, 32, 64, 128) else ""
            raise NotImplementedError(f"{contract.not_runnable('mla_decode', 'cute', reasons)}{said}")

    def _check_model(self, config: Any) -> None:
        """ValueError or NotImplementedError for a model with layers that don't attend to all keys: SGLang leaves that
        check to the backend. A model with an indexer would run without its indexer, for which the backend has no
        metadata."""
        if any(map(is_deepseek_dsa, _hf_configs(config))):
            raise ValueError(
                f"--attention-backend {NAME}: got a model with DeepSeek's sparse attention (V3.2, GLM-5); pass"
                f" --attention-backend dsa. {NAME} attends to all keys"
            )
        latent_dim = getattr(config, "swa_kv_lora_rank", self.latent_dim)
        if getattr(config, "is_hybrid_swa", False) or latent_dim != self.latent_dim:
            raise NotImplementedError(
                f"--attention-backend {NAME}: got a model with sliding windows; legal: layers that attend to all keys"
            )

    def _check_call(self, layer: Any, others: dict[str, Any]) -> None:
        """NotImplementedError for attention that no kernel here has, by a layer's properties or a call's arguments."""
        if others:
            raise NotImplementedError(f"{', '.join(others)}: {NAME} takes no such argument")
        if (
            layer.sliding_window_size != -1
            or layer.logit_cap
            or layer.is_cross_attention
            or layer.attn_type is not AttentionType.DECODER
        ):
            raise NotImplementedError(
                f"--attention-backend {NAME}: layer {layer.layer_id} has sliding_window_size"
                f" {layer.sliding_window_size}, logit_cap {layer.logit_cap}, is_cross_attention"
                f" {layer.is_cross_attention}, attn_type {layer.attn_type.value}; legal: -1, 0, False, decoder"
            )

    def _check_context_parallel(self, runner: Any) -> None:
        """NotImplementedError for what SGLang's own code for MLA does not do right in decode context parallelism."""
        version = sglang.__version__
        if not hasattr(KVWriteLoc, "for_batch"):
            said = f"legal with {NAME} in SGLang {version}: 1; later versions' ranks are served"
            raise NotImplementedError(f"--dcp-size: got {self.deal.world}; {said}")
        for is_so, said in (
            # forward_absorb_prepare gathers queries only in decode and target verify.
            (getattr(runner, "is_draft_worker", False), "a draft model, whose queries are not gathered over the ranks"),
            # forward_absorb_core scales only concatenated queries, and for those it doesn't merge the ranks' results.
            (
                _scales_queries(runner.model_config),
                "a model with queries scaled by position (llama_4_scaling), whose parts are not merged",
            ),
            # set_mla_kv_buffer_kernel_norope writes each key on every rank, to the slot that it has without ranks.
            (self.rope_dim == 0, "a model without rope columns, whose keys are not dealt out to the ranks"),
        ):
            if is_so:
                said = f"{said} by SGLang {version}"
                raise NotImplementedError(f"--dcp-size: got {self.deal.world}; legal with {NAME}: 1 for {said}")

    def _take_rope_apart(self, config: Any) -> None:
        """Enter this backend's name in the list of backends to which models hand latent and rope columns as they are,
        not concatenated. In a process with a model that scales its queries by position, be it a draft or a target, the
        name is taken out: such a model scales only concatenated queries."""
        if _scales_queries(config):
            TsmlaBackend.has_scaled_queries = True
        names = FORWARD_ABSORB_CORE_ATTENTION_BACKENDS
        if TsmlaBackend.has_scaled_queries:
            names[:] = [name for name in names if name != NAME]
        elif NAME not in names:
            names.append(NAME)

    def _decode_spec(self, q_len: int) -> DecodeSpec:
        """The spec of a decode or verify call: a rank attends with all ranks' queries to the keys that it holds."""
        return DecodeSpec(
            batch=1, total_q_len=q_len, max_q_len=q_len, num_heads=self.num_heads * self.deal.world,
            latent_dim=self.latent_dim, rope_dim=self.rope_dim, num_pages=1, page_size=self.page_size, max_pages=1,
            q_dtype=dtype_name(self.dtype), kv_dtype=dtype_name(self.data_type), ragged=False, causal=True,
            batch_invariant=False, visible_lens=self.deal.world > 1 and q_len > 1,
        )  # fmt: skip

    def _prompt_spec(self) -> DecodeSpec:
        """The spec of absorbed attention of prompts, in which each rank attends with its own heads to all keys."""
        return dataclasses.replace(
            self._decode_spec(self.longest), num_heads=self.num_heads, ragged=True, visible_lens=False
        )

    def _compile(self, head_dims: tuple[int, int]) -> None:
        """Load the kernels of decode, verify and prefill, so that no request waits for the compiler."""
        index = devices.index_of(self.device)
        specs = [self._decode_spec(q_len) for q_len in sorted({1, self.num_draft_tokens or 1})]
        # SGLang has no graphs of prefill in context parallelism, and expands prompts unless it is told not to.
        if self.deal.world == 1 or get_schedule().disable_chunked_prefix_cache:
            specs.append(self._prompt_spec())
        for decode in specs:
            for split_q in (False, True):
                mla_decode.warm(decode, index, split_q=split_q)
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
        """Prepare a step outside of graphs, or a step of prompts in one."""
        mode, lens = forward_batch.forward_mode, forward_batch.seq_lens
        if mode.is_decode_or_idle():
            self.forward_metadata = self._metadata(forward_batch, lens, 1)
        elif mode.is_target_verify():
            self.forward_metadata = self._metadata(forward_batch, lens + self.num_draft_tokens, self.num_draft_tokens)
        elif mode.is_draft_extend_v2():
            # Every request has num_draft_tokens rows, the last ones padding after its new tokens.
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
        tables = self._tables(forward_batch.req_pool_indices, width)
        if q_len is None:
            return Metadata(tables, lens.to(torch.int32), None)
        seq_lens, visible_lens = self._lens_here(lens, q_len)
        return Metadata(tables, seq_lens, q_len, visible_lens=visible_lens)

    def _lens_here(self, lens: torch.Tensor, q_len: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """How many keys of each request this rank holds, [B] int32, if all ranks hold `lens`; and how many of the held
        keys each of the last q_len tokens sees, [B, q_len] int32, or None where the causal rule says it."""
        if self.deal.world == 1:
            return lens.to(torch.int32), None
        visible_lens = visible_keys_of_last(lens, q_len, self.deal)
        return visible_lens[:, -1].contiguous(), visible_lens if q_len > 1 else None

    @property
    def _page_span(self) -> int:
        """How many of a request's tokens an entry of its block table stands for: a page on each rank."""
        return self.page_size * self.deal.world

    def _pages(self, num_tokens: int) -> int:
        return -(-min(num_tokens, self.req_to_token.shape[1]) // self._page_span)

    def _tables(self, requests: torch.Tensor, width: int) -> torch.Tensor:
        """The pages [B, width] of these rows of SGLang's table of tokens, whose slots count the keys of all ranks;
        entries past a request's pages are garbage."""
        firsts = self.req_to_token[:, : width * self._page_span : self._page_span]
        return torch.div(firsts[requests], self._page_span, rounding_mode="floor").to(torch.int32)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate the memory that graphs read; each step is written there before its replay."""
        width = self._pages(self.max_context_len + self.num_draft_tokens)
        self.graph_tables = torch.zeros((max_bs, width), dtype=torch.int32, device=self.device)
        self.graph_lens = torch.ones(max_bs, dtype=torch.int32, device=self.device)
        self.graph_visible = self.graph_lens.new_ones((max_bs, max(self.num_draft_tokens, 1)))

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Prepare a step before a graph's capture or replay."""
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
        here, visible_lens = self._lens_here(lens, q_len)
        seq_lens.copy_(here)
        if visible_lens is not None:
            visible_lens = self.graph_visible[:batch].copy_(visible_lens)
        self.forward_metadata = Metadata(tables, seq_lens, q_len, visible_lens=visible_lens)

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
    ) -> Results:
        """Absorbed attention of q [T, H * (L + R)], or [T, H * L] with q_rope [T, H, R]. Returns out [T, H * L]. In
        decode context parallelism decode and verify have the heads of all ranks, and also return lse [T, H] of this
        rank's keys, in the base of SGLang's merge."""
        self._check_call(layer, others)
        if k is not None and save_kv_cache:
            self._save(layer, forward_batch, k, v, k_rope)
        heads, head_dim = layer.tp_q_head_num, layer.head_dim
        query: tuple[torch.Tensor, ...] = (q.view(-1, heads, head_dim if q_rope is None else layer.v_head_dim),)
        if q_rope is not None:
            query = _readable(query[0], q_rope.view(-1, heads, head_dim - layer.v_head_dim))
        metadata = self.forward_metadata
        assert metadata is not None
        tokens, tables = query[0].shape[0], metadata.block_tables
        is_part = self.deal.world > 1 and metadata.q_len is not None
        options: dict[str, Any] = {"visible_lens": metadata.visible_lens, "return_lse": is_part}
        if is_part and heads != self.num_heads * self.deal.world:
            raise NotImplementedError(
                f"--dcp-size: got {self.deal.world}; legal with {NAME}: 1 for a model whose queries are not gathered"
                f" over the ranks: they have {heads} heads, not {self.num_heads * self.deal.world}"
            )
        # No kv_scale, even over an fp8 cache: the pool converts keys without dividing by the checkpoint's scale.
        cache = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        if metadata.q_len is None:
            # A capture before the first request may have more tokens than a context has.
            bound = max(self.longest, metadata.max_q_len or 1)
            options |= {"cu_seqlens_q": metadata.cu_seqlens_q, "max_q_len": bound}
            if self.deal.world > 1:
                cache, tables = self._gathered(forward_batch, metadata)
        else:
            query = tuple(part.view(-1, metadata.q_len, heads, part.shape[-1]) for part in query)
        results: Any = mla_decode.mla_decode(
            query if len(query) == 2 else query[0].contiguous(),
            cache.view(-1, self.page_size, head_dim),
            tables,
            metadata.seq_lens,
            softmax_scale=layer.scaling,
            latent_dim=self.latent_dim,
            **options,
        )
        if not is_part:
            return results.reshape(tokens, heads * self.latent_dim)
        out, lse = results
        return out.reshape(tokens, heads * self.latent_dim), lse.view(tokens, heads) * LSE_FACTOR

    def _gathered(self, forward_batch: Any, metadata: Metadata) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys of prompts in pages, [P * Z, D], and the tables [B, M] of the pages. SGLang gathers them from all
        ranks for each layer, into a buffer that has first what was cached of all requests and then what is new."""
        context = forward_batch.attn_dcp_metadata
        if metadata.gathered is None:
            new, cached = forward_batch.extend_seq_lens_cpu, forward_batch.extend_prefix_lens_cpu
            lens = [int(a) + int(b) for a, b in zip(new, cached, strict=True)]
            metadata.gathered = _in_pages(context.dcp_kv_indptr, context.dcp_kv_indices, lens, self.page_size)
        buffer = context.dcp_kv_buffer.flatten(1)
        # As integers: not every release of torch indexes fp8.
        return buffer.view(torch.int32)[metadata.gathered.rows].view(buffer.dtype), metadata.gathered.block_tables

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
        """Attention of several tokens a request.

        Where the layer has the widths of absorbed attention (verified tokens, drafts, prompts that `forward_method`
        runs absorbed) this is forward_decode. Other prompts are expanded: q [T, H, K], k [Tk, H, K] and v [Tk, H, V]
        make out [T, H, V], with lse [T, H] (natural logarithm) if forward_batch.mha_return_lse is set."""
        if layer.head_dim == self.latent_dim + self.rope_dim and layer.v_head_dim == self.latent_dim:
            return self.forward_decode(q, k, v, layer, forward_batch, save_kv_cache, q_rope, k_rope, **others)
        self._check_call(layer, others)
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
        results: Results = mla_prefill.mla_prefill(  # type: ignore[call-overload]  # mypy expands no bool
            q.view(-1, heads, layer.head_dim).contiguous(),
            k.view(-1, heads, layer.head_dim).to(q.dtype).contiguous(),
            v.view(-1, heads, layer.v_head_dim).to(q.dtype),  # may be columns of a wider tensor
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
        place = _write_place(forward_batch)
        if k_rope is not None:
            self.token_to_kv_pool.set_mla_kv_buffer(layer, place, k, k_rope)
        else:
            self.token_to_kv_pool.set_kv_buffer(layer, place, k, v)

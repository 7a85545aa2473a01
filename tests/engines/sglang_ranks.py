"""SGLang's decode context parallelism on CPU tensors: the layers of several ranks in one process, each with this
project's backend and a pool of its own."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch

# Before sglang, which does not import without what it prepares.
from tests.engines.sglang_model import EXTEND, HEADS, LATENT, ROPE, SCALE, Batch, Model, Ranks, settings

# isort: split
from sglang.kernels.ops.attention.kv_indices import create_chunked_prefix_cache_kv_indices
from sglang.srt.layers.dcp.planner import prepare_decode_context_parallel_metadata
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_mla import DeepseekMLAForwardMixin
from sglang.srt.runtime_context import get_parallel

from tsmla_bridge.engines.sglang import NAME

Result = TypeVar("Result")


class Waiting(Exception):
    """A rank needs what another one has not computed yet."""


class Group:
    """The collectives of a rank, as SGLang's GroupCoordinator has them. sent: what each rank gave to each call."""

    def __init__(self, sent: dict[tuple[int, int], torch.Tensor], world: int, rank: int) -> None:
        self.sent, self.world_size, self.rank_in_group, self.calls = sent, world, rank, 0

    def _parts(self, given: torch.Tensor) -> list[torch.Tensor]:
        self.sent[self.calls, self.rank_in_group] = given.clone()
        found = [self.sent.get((self.calls, rank)) for rank in range(self.world_size)]
        parts = [part for part in found if part is not None]
        if len(parts) < self.world_size:
            raise Waiting
        self.calls += 1
        return parts

    def all_gather(self, given: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat(self._parts(given), dim)

    def all_gather_into_tensor(self, out: torch.Tensor, given: torch.Tensor) -> None:
        assert given.is_contiguous() and out.is_contiguous()
        out.copy_(torch.cat(self._parts(given)))

    def all_to_all_single(self, out: torch.Tensor, given: torch.Tensor) -> None:
        assert given.is_contiguous() and out.is_contiguous()
        out.copy_(torch.cat([part.chunk(self.world_size)[self.rank_in_group] for part in self._parts(given)]))

    def reduce_scatter_along_dim(self, given: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.stack(self._parts(given)).sum(0).chunk(self.world_size, dim)[self.rank_in_group]


class Cluster:
    """The ranks of a model. Between them they have HEADS * world heads."""

    def __init__(self, world: int, *, comm: str = "a2a", **options: Any) -> None:
        self.world, self.comm = world, comm
        self.models = [Model(ranks=Ranks(world, rank, None, comm), **options) for rank in range(world)]
        self.mqa = RadixAttention(HEADS * world, LATENT + ROPE, SCALE, num_kv_heads=1, layer_id=0, v_head_dim=LATENT)

    def batches(self, *arguments: Any) -> list[Batch]:
        """The same batch for every rank, whose pool has the keys that SGLang gives to it."""
        batches = []
        for model in self.models:
            torch.manual_seed(1)
            batches.append(model.batch(*arguments))
        return batches

    def run(self, work: Callable[[Model, Batch], Result], batches: list[Batch]) -> list[Result]:
        """What each rank's work gives. Who has to wait for another rank begins anew."""
        sent: dict[tuple[int, int], torch.Tensor] = {}
        results: dict[int, Result] = {}
        while len(results) < self.world:
            before = len(sent)
            for rank, (model, batch) in enumerate(zip(self.models, batches, strict=True)):
                if rank in results:
                    continue
                model.ranks = Ranks(self.world, rank, Group(sent, self.world, rank), self.comm)
                try:
                    with settings(model.drafts, model.ranks):
                        results[rank] = work(model, batch)
                except Waiting:
                    pass
            assert results or len(sent) > before, "the ranks wait for each other"
        return [results[rank] for rank in range(self.world)]

    def attend(
        self, batches: list[Batch], q: torch.Tensor, *, planned: bool = False, replicated: bool = False
    ) -> torch.Tensor:
        """Absorbed attention of q [T, HEADS * world, L + R] by DeepSeek's own method, which gathers what the ranks need
        of each other, calls the layer and merges: out [T, HEADS * world, L]. planned: the backends have their
        metadata. replicated: every rank computes the queries of all, --dcp-replicate-q-proj."""

        def work(model: Model, batch: Batch) -> torch.Tensor:
            with forward_context(ForwardContext(model.backend)):
                if batch.forward.forward_mode is EXTEND:
                    batch.forward.attn_dcp_metadata = _gathering(model, batch.forward)
                if not planned:
                    model.backend.init_forward_metadata(batch.forward)
                with get_parallel().override(dcp_replicate_q_proj=replicated):
                    return self._layer(model, batch, q)

        return torch.cat(self.run(work, batches), 1)

    def prefill(self, batches: list[Batch], q: torch.Tensor) -> torch.Tensor:
        """Expanded attention of q [T, HEADS * world, K] by DeepSeek's own chunked method: out [T, HEADS * world, V]."""

        def work(model: Model, batch: Batch) -> torch.Tensor:
            return model.prefill(batch, _heads(q, model.ranks.rank))

        return torch.cat(self.run(work, batches), 1)

    def want(self, batches: list[Batch], q: torch.Tensor) -> np.ndarray:
        """attend's, in float64."""
        return self.models[0].want(batches[0], q)[0]

    def want_expanded(self, batches: list[Batch], q: torch.Tensor) -> np.ndarray:
        """prefill's, in float64."""
        ranks = enumerate(zip(self.models, batches, strict=True))
        return np.concatenate([model.want_expanded(batch, _heads(q, rank)) for rank, (model, batch) in ranks], 1)

    def _layer(self, model: Model, batch: Batch, q: torch.Tensor) -> torch.Tensor:
        """[T, HEADS, L] of one rank. Its projections are the identity: those of the layer's input give q and the new
        keys, and that of the output nothing but out."""
        latent, rope = model.fresh(batch)
        identity = torch.eye(LATENT, dtype=q.dtype).expand(HEADS * self.world, -1, -1).contiguous()
        attention = SimpleNamespace(
            dcp_size=self.world, use_dsa=False, q_lora_rank=None, num_local_heads=HEADS, kv_lora_rank=LATENT,
            qk_nope_head_dim=LATENT, qk_rope_head_dim=ROPE, qk_head_dim=LATENT + ROPE, v_head_dim=LATENT,
            q_proj=lambda x: (_heads(q, model.ranks.rank).flatten(1), None), q_b_proj_replicated_forward=lambda x: q,
            kv_a_proj_with_mqa=lambda x: (torch.cat((latent, rope), -1).flatten(1), None),
            kv_a_layernorm=lambda x: x, o_proj=lambda x: (x, None), w_kc=identity[:HEADS], w_vc=identity[:HEADS],
            w_kc_qrep=identity, rotary_emb=None, use_deep_gemm_bmm=False, current_attention_backend=NAME,
            next_skip_topk=None, attn_mqa=model.mqa, attn_mqa_for_dcp_decode=self.mqa, layer_id=0,
        )  # fmt: skip
        for name, method in vars(DeepseekMLAForwardMixin).items():
            if callable(method):
                setattr(attention, name, method.__get__(attention))
        state = attention.forward_absorb_prepare(None, torch.empty(len(q), 0), batch.forward, None)
        return attention.forward_absorb_core(*state).view(-1, HEADS, LATENT)


def _heads(q: torch.Tensor, rank: int) -> torch.Tensor:
    return q[:, rank * HEADS :][:, :HEADS]


def _gathering(model: Model, forward: Any) -> Any:
    """What SGLang's runner and DeepSeek's model prepare for a batch of prompts."""
    return prepare_decode_context_parallel_metadata(
        seq_lens=forward.seq_lens, extend_prefix_lens=forward.extend_prefix_lens,
        extend_prefix_lens_cpu=forward.extend_prefix_lens_cpu, extend_seq_lens=forward.extend_seq_lens,
        req_pool_indices=forward.req_pool_indices, req_to_token=model.req_to_token, seq_lens_sum=forward.seq_lens_sum,
        kv_buffer_shape=model.pool.get_kv_buffer_shape()[0], kv_cache_dtype=model.kv_dtype, kv_cache_device="cpu",
        create_chunked_prefix_cache_kv_indices_fn=create_chunked_prefix_cache_kv_indices,
    )  # fmt: skip

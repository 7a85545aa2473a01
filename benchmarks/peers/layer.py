"""The engines' kernels of one decode step of a V3.2 attention layer, in the order in which vLLM launches them.

For `cases/sparse_layer.py`; needs a GPU, Triton, vLLM's libraries (its operators _C and _C_cache_ops, FlashMLA,
DeepGEMM) and SGLang's. Rope works in place, so that inputs are rotated anew at every run. Two steps that engines leave
to their compilers are here as one kernel each: the scales folded into the head weights, and positions to slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from benchmarks.peers import sparse

if TYPE_CHECKING:
    from benchmarks.cases.sparse_layer import Layer, LayerStep

FP8_MAX = 448.0


@triton.jit
def slots_of(positions, tables, slots, width, K: tl.constexpr, Z: tl.constexpr):
    """A row of positions through its row of the block table."""
    row, column = tl.program_id(0), tl.arange(0, K)
    position = tl.load(positions + row * K + column)
    page = tl.load(tables + row * width + position // Z, mask=position >= 0, other=0)
    tl.store(slots + row * K + column, tl.where(position >= 0, page * Z + position % Z, -1))


class PeerLayer:
    """The parts of a step as functions of its LayerStep, in the order of the calls; they write buffers of this object.

    topk: "vllm_cooperative" (up to 32 tokens), "vllm_persistent" or "sgl". attention: "flashmla" or "legacy".
    """

    def __init__(self, layer: Layer, step: LayerStep, topk: str, attention: str) -> None:
        self.layer, (tokens, heads, width) = layer, step.q_latent.shape
        self.index_heads, index_dim = step.index_q.shape[1:]
        device = step.q_latent.device
        new = {"device": device}
        # Operators of vLLM take int64 positions and slots, and angles in the queries' dtype.
        self.positions = torch.arange(tokens, **new)
        self.cos_sin = torch.cat((layer.cos, layer.sin), 1).to(step.q_rope.dtype)
        self.slots_64 = layer.slot_mapping.long()
        self.one = torch.ones(1, **new)
        self.q8 = torch.empty(tokens, self.index_heads, index_dim, dtype=torch.float8_e4m3fn, **new)
        self.q_scale = torch.empty(tokens * self.index_heads, 1, dtype=torch.float32, **new)
        self.weights = torch.empty(tokens, self.index_heads, dtype=torch.float32, **new)
        self.constant = index_dim**-0.5 * self.index_heads**-0.5
        self.chosen = torch.full((tokens, layer.k), -1, dtype=torch.int32, **new)
        self.slots = torch.full((tokens, 1, layer.k), 0, dtype=torch.int32, **new)
        self.work = torch.zeros(1 << 20, dtype=torch.uint8, **new)
        padded = 64 if heads <= 64 else 128
        self.q = torch.zeros(tokens, 1, padded, width + step.q_rope.shape[2], dtype=step.q_latent.dtype, **new)
        self.heads = heads
        self.longest = layer.block_tables.shape[1] * layer.keys.shape[1]
        self.score = sparse.deep_gemm_paged(
            self.q8[:, None], layer.keys, self.weights, layer.seq_lens[:, None], layer.block_tables, self.longest
        )
        # DeepGEMM writes new logits in each call: those of this one tell the top-k its sizes alone.
        self.topk = topk
        self.logits = self.score()
        self.attend = sparse.v32(attention, self.q, layer.kv, self.slots, layer.softmax_scale)

    def rope(self, step: LayerStep) -> None:
        """Of queries and the new key, pairs of neighbouring columns."""
        q, k = step.q_rope.view(len(self.positions), -1), step.k_rope
        torch.ops._C.rotary_embedding(self.positions, q, k, k.shape[1], self.cos_sin, False)

    def write_kv(self, step: LayerStep) -> None:
        torch.ops._C_cache_ops.concat_and_cache_mla(
            step.latent, step.k_rope, self.layer.kv, self.slots_64, "fp8_ds_mla", self.one
        )

    def rope_index(self, step: LayerStep) -> None:
        """Of the indexer's queries and its new key, pairs of columns i and i + 32 of the first 64."""
        q, k = step.index_q.view(len(self.positions), -1), step.index_k
        torch.ops._C.rotary_embedding(self.positions, q, k, k.shape[1], self.cos_sin, True)

    def write_keys(self, step: LayerStep) -> None:
        width = step.index_k.shape[1]
        torch.ops._C_cache_ops.indexer_k_quant_and_cache(step.index_k, self.layer.keys, self.slots_64, width, "ue8m0")

    def quantize(self, step: LayerStep) -> None:
        rows, width = step.index_q.view(-1, step.index_q.shape[2]), step.index_q.shape[2]
        q8 = self.q8.view(rows.shape)
        torch.ops._C.per_token_group_fp8_quant(
            rows, q8, self.q_scale, width, 1e-10, -FP8_MAX, FP8_MAX, True, False, False
        )

    def fold_weights(self, step: LayerStep) -> None:
        """One kernel: the constants are folded into the weights of a layer when it is loaded."""
        torch.mul(step.index_weights, self.q_scale.view(self.weights.shape), out=self.weights)

    def indexer_logits(self, step: LayerStep) -> None:
        self.logits = self.score()

    def select_topk(self, step: LayerStep) -> None:
        sparse.topk(self.topk, self.logits, self.layer.seq_lens, self.layer.k, sparse.Memory(self.chosen, self.work,
                    self.longest))()  # fmt: skip

    def positions_to_slots(self, step: LayerStep) -> None:
        tables = self.layer.block_tables
        slots_of[(len(tables),)](
            self.chosen, tables, self.slots, tables.shape[1], self.layer.k, self.layer.kv.shape[1], num_warps=8
        )

    def join_q(self, step: LayerStep) -> None:
        """One kernel; the heads that FlashMLA wants beyond ours stay 0."""
        torch.cat((step.q_latent, step.q_rope), 2, out=self.q[:, 0, : self.heads])

    def sparse_mla(self, step: LayerStep) -> None:
        self.out = self.attend()[0]

    def __call__(self, step: LayerStep) -> None:
        for part in (
            self.rope, self.write_kv, self.rope_index, self.write_keys, self.quantize, self.fold_weights,
            self.indexer_logits, self.select_topk, self.positions_to_slots, self.join_q, self.sparse_mla,
        ):  # fmt: skip
            part(step)

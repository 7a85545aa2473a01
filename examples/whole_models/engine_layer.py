"""The engines' kernels of one decode step of a V3.2 attention layer, in the order in which vLLM launches them.

For `sparse_layer.py`; needs a GPU, Triton, vLLM's libraries (its operators _C and _C_cache_ops, FlashMLA,
DeepGEMM) and SGLang's. Rope works in place, so that inputs are rotated anew at every run. Two steps that engines leave
to their compilers are here as one kernel each: the scales folded into the head weights, and positions to slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from benchmarks.floors import PAGE, ROPE
from benchmarks.peers import sparse

if TYPE_CHECKING:
    from examples.whole_models.sparse_layer import Layer, LayerStep

FP8_MAX = 448.0


@triton.jit
def slots_of(positions, tables, slots, width, K: tl.constexpr, Z: tl.constexpr):
    """A row of positions through its row of the block table."""
    row, column = tl.program_id(0), tl.arange(0, K)
    position = tl.load(positions + row * K + column)
    page = tl.load(tables + row * width + position // Z, mask=position >= 0, other=0)
    tl.store(slots + row * K + column, tl.where(position >= 0, page * Z + position % Z, -1))


class PeerLayer:
    """A step as a function of its LayerStep; it writes buffers of this object.

    topk: "vllm_cooperative" (up to 32 tokens), "vllm_persistent" or "sgl". attention: "flashmla" or "legacy".
    """

    def __init__(self, layer: Layer, step: LayerStep, topk: str, attention: str) -> None:
        self.layer, (tokens, heads, width) = layer, step.q_latent.shape
        index_heads, self.index_dim = step.index_q.shape[1:]
        new = {"device": step.q_latent.device}
        # Operators of vLLM take int64 positions and slots, and angles in the queries' dtype.
        self.positions = torch.arange(tokens, **new)
        self.cos_sin = torch.cat((layer.cos, layer.sin), 1).to(step.q_rope.dtype)
        self.slots_64, self.one = layer.slot_mapping.long(), torch.ones(1, **new)
        self.q8 = torch.empty(tokens, index_heads, self.index_dim, dtype=torch.float8_e4m3fn, **new)
        self.q_scale = torch.empty(tokens * index_heads, 1, dtype=torch.float32, **new)
        self.weights = torch.empty(tokens, index_heads, dtype=torch.float32, **new)
        self.slots = torch.full((tokens, 1, layer.k), 0, dtype=torch.int32, **new)
        chosen = torch.full((tokens, layer.k), -1, dtype=torch.int32, **new)
        self.q = torch.zeros(tokens, 1, 64 if heads <= 64 else 128, width + ROPE, dtype=step.q_latent.dtype, **new)
        longest, self.topk = layer.block_tables.shape[1] * PAGE, topk
        self.memory = sparse.Memory(chosen, torch.zeros(1 << 20, dtype=torch.uint8, **new), longest)
        self.score = sparse.deep_gemm_paged(
            self.q8[:, None], layer.keys, self.weights, layer.seq_lens[:, None], layer.block_tables, longest
        )
        self.attend = sparse.v32(attention, self.q, layer.kv, self.slots, layer.softmax_scale)

    def __call__(self, step: LayerStep) -> None:
        layer, kernels, cache_kernels = self.layer, torch.ops._C, torch.ops._C_cache_ops
        rows = self.q8.view(-1, self.index_dim)
        # Rope: pairs of neighbouring columns; in the indexer columns i and i + 32 of the first 64.
        rope = (self.positions, step.q_rope.flatten(1), step.k_rope, ROPE, self.cos_sin)
        kernels.rotary_embedding(*rope, False)
        cache_kernels.concat_and_cache_mla(
            step.latent, step.k_rope, layer.kv, self.slots_64, "fp8_ds_mla", self.one
        )  # fmt: skip
        rope = (self.positions, step.index_q.flatten(1), step.index_k, self.index_dim, self.cos_sin)
        kernels.rotary_embedding(*rope, True)
        cache_kernels.indexer_k_quant_and_cache(step.index_k, layer.keys, self.slots_64, self.index_dim, "ue8m0")
        kernels.per_token_group_fp8_quant(
            step.index_q.view(rows.shape), rows, self.q_scale, self.index_dim, 1e-10, -FP8_MAX, FP8_MAX, True, False,
            False,
        )  # fmt: skip
        # The constants are folded into the weights of a layer when it is loaded.
        torch.mul(step.index_weights, self.q_scale.view(self.weights.shape), out=self.weights)
        sparse.topk(self.topk, self.score(), layer.seq_lens, layer.k, self.memory)()
        tables = layer.block_tables
        slots_of[(len(tables),)](
            self.memory.chosen, tables, self.slots, tables.shape[1], layer.k, PAGE, num_warps=8
        )  # fmt: skip
        # The heads that FlashMLA wants beyond ours stay 0.
        torch.cat((step.q_latent, step.q_rope), 2, out=self.q[:, 0, : step.q_latent.shape[1]])
        self.attend()

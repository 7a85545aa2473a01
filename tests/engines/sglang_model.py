"""SGLang's own pools, layers and DeepSeek forward methods on CPU tensors, around this project's backend.

Imports sglang, unpacked from its wheel. Its Triton kernels run in Triton's interpreter. Only those that another kernel
replaces on a GPU are stood in for: writing to the pool, and merging partial results of prompts.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch

# torchvision's compiled operators, without which its Python part doesn't import.
for name in ("nms", "qnms"):
    torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


class NoKernels(ModuleType):
    """sgl-kernel, whose names SGLang 0.5.17 imports on a CPU too. Nothing calls them."""

    __path__: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


if importlib.util.find_spec("sgl_kernel") is None:
    for name in ("sgl_kernel", "sgl_kernel.flash_mla", "sgl_kernel.flash_attn"):
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            sys.modules[name] = NoKernels(name)

import sglang.srt.layers.attention.merge_state as merge_state  # noqa: E402
import sglang.srt.mem_cache.memory_pool as memory_pool  # noqa: E402
from sglang.srt.layers.radix_attention import AttentionType as AttentionType  # noqa: E402
from sglang.srt.layers.radix_attention import RadixAttention  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode  # noqa: E402
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context  # noqa: E402
from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mha  # noqa: E402
from sglang.srt.models.deepseek_common.utils import (  # noqa: E402
    FORWARD_ABSORB_CORE_ATTENTION_BACKENDS as FORWARD_ABSORB_CORE_ATTENTION_BACKENDS,
)
from sglang.srt.runtime_context import get_context, get_parallel, get_spec  # noqa: E402
from sglang.srt.runtime_context import get_schedule as get_schedule  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

from tests.engines import kernel_inputs  # noqa: E402
from tests.oracles import attention as oracle  # noqa: E402
from tsmla_bridge.engines.sglang import create_backend  # noqa: E402

HEADS, LATENT, ROPE, NOPE, V_DIM, PAGE, CONTEXT = 4, 512, 64, 128, 128, 64, 512
SCALE = (NOPE + ROPE) ** -0.5
SPARE = 4  # rows of the request pool in use before the batch's


with tempfile.TemporaryDirectory() as folder:  # SGLang 0.5.17 reads the model's configuration at once
    Path(folder, "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    get_context().set_server_args(ServerArgs(model_path=folder, device="cpu"))


class Batch(NamedTuple):
    """Requests of `lens` keys. Their last `new` tokens are queries; the pool has the keys before them."""

    new: list[int]
    lens: list[int]
    rows: list[torch.Tensor]  # latent and rope of each request's keys, in the pool's precision
    forward: Any


class Ranks(NamedTuple):
    """The ranks over which the keys of a request are dealt out, and which of them this is.

    group: what SGLang calls for their collectives; comm: the --dcp-comm-backend, which 0.5.17 has none of."""

    world: int = 1
    rank: int = 0
    group: Any = None
    comm: str = "a2a"


ALONE = Ranks()


class Model:
    """A rank's runner as the backend sees it, and an attention layer of DeepSeek's in both forms. A rank has HEADS."""

    def __init__(
        self,
        *,
        drafts: int = 0,
        kv_dtype: torch.dtype = torch.bfloat16,
        page_size: int = PAGE,
        ranks: Ranks = ALONE,
    ) -> None:
        torch.manual_seed(0)
        self.kv_dtype, self.drafts, self.ranks = kv_dtype, drafts, ranks
        pool = memory_pool.MLATokenToKVPool(
            size=64 * PAGE, page_size=page_size, dtype=kv_dtype, kv_lora_rank=LATENT, qk_rope_head_dim=ROPE,
            layer_num=1, device="cpu", enable_memory_saver=False,
        )  # fmt: skip
        self.pool = pool
        self.req_to_token = torch.zeros(SPARE + 8, CONTEXT, dtype=torch.int32)
        self.runner = SimpleNamespace(
            page_size=page_size, device="cpu", kv_cache_dtype=kv_dtype, dtype=torch.bfloat16, use_mla_backend=True,
            req_to_token_pool=SimpleNamespace(req_to_token=self.req_to_token, size=8), token_to_kv_pool=pool,
            **self.translator(pool, page_size),
            model_config=SimpleNamespace(
                context_len=CONTEXT, kv_lora_rank=LATENT, qk_rope_head_dim=ROPE, qk_nope_head_dim=NOPE,
                v_head_dim=V_DIM, num_attention_heads=HEADS * ranks.world,
            ),
        )  # fmt: skip
        with settings(drafts, ranks):
            self.backend = create_backend(self.runner)
        self.mqa = RadixAttention(HEADS, LATENT + ROPE, SCALE, num_kv_heads=1, layer_id=0, v_head_dim=LATENT)
        self.mha = RadixAttention(HEADS, NOPE + ROPE, SCALE, num_kv_heads=HEADS, layer_id=0, v_head_dim=V_DIM)
        self.weight = torch.randn(HEADS, NOPE + V_DIM, LATENT, dtype=torch.bfloat16) * LATENT**-0.5

    def translator(self, pool: Any, page_size: int) -> dict[str, Any]:
        """The runner's translator of indices, which SGLang 0.5.17 has none of."""
        if importlib.util.find_spec("sglang.srt.mem_cache.kv_index_translator") is None:
            return {}
        from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator

        made = KVIndexTranslator(
            req_to_token=self.req_to_token, token_to_kv_pool_allocator=None, token_to_kv_pool=pool,
            page_size=page_size, device="cpu",
        )  # fmt: skip
        return {"kv_index_translator": made}

    def batch(self, mode: Any, new: list[int], lens: list[int], counted: list[int]) -> Batch:
        """A batch of this mode; seq_lens are `counted`."""
        rows, loc = [], []
        size = self.runner.page_size * self.ranks.world  # as SGLang's allocator has it
        per_request = -(-CONTEXT // size)
        pages = 1 + torch.randperm(len(lens) * per_request).view(len(lens), -1)
        for b, (n, fresh) in enumerate(zip(lens, new, strict=True)):
            slots = (pages[b][:, None] * size + torch.arange(size)).flatten()[:CONTEXT]
            self.req_to_token[SPARE + b] = slots.to(torch.int32)
            row = torch.randn(n, LATENT + ROPE, dtype=torch.bfloat16)
            if self.kv_dtype != torch.bfloat16:
                row = row.to(self.kv_dtype).to(torch.bfloat16)
            rows.append(row)
            cached, new_slots = slots[:n].split([n - fresh, fresh])
            if len(cached):
                parts = row[: len(cached), None].split([LATENT, ROPE], -1)
                with settings(self.drafts, self.ranks):
                    self.pool.set_mla_kv_buffer(self.mqa, cached, *parts)
            loc.append(new_slots)
        forward = ForwardBatch(
            forward_mode=mode, batch_size=len(lens), input_ids=torch.zeros(sum(new), dtype=torch.int64),
            req_pool_indices=SPARE + torch.arange(len(lens)), seq_lens=torch.tensor(counted),
            out_cache_loc=torch.cat(loc), seq_lens_sum=sum(counted),
        )  # fmt: skip
        forward.seq_lens_cpu = torch.tensor(counted)
        forward.extend_seq_lens, forward.extend_seq_lens_cpu = torch.tensor(new), new
        prefix = [n - fresh for n, fresh in zip(lens, new, strict=True)]
        forward.extend_prefix_lens, forward.extend_prefix_lens_cpu = torch.tensor(prefix), prefix
        return Batch(new, lens, rows, forward)

    def fresh(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Latent [T, 1, L] and rope [T, 1, R] of the new tokens."""
        rows = torch.cat([row[len(row) - n :] for row, n in zip(batch.rows, batch.new, strict=True)])[:, None]
        return rows[..., :LATENT], rows[..., LATENT:]

    def attend(self, batch: Batch, q: torch.Tensor, **split: Any) -> Any:
        """Absorbed attention of q [T, H, L + R] by the layer; `split` as SGLang passes rope apart."""
        latent, rope = self.fresh(batch)
        with settings(self.drafts, self.ranks), forward_context(ForwardContext(self.backend)):
            self.backend.init_forward_metadata(batch.forward)
            if split.get("apart"):
                latent_q = q[..., :LATENT].contiguous()
                if not split.get("dense"):  # as the product over heads leaves it
                    latent_q = latent_q.transpose(0, 1).contiguous().transpose(0, 1)
                parts = latent_q, q[..., LATENT:]
                return self.mqa(parts[0], latent, latent, batch.forward, q_rope=parts[1], k_rope=rope)
            return self.mqa(q.flatten(1), torch.cat((latent, rope), -1), latent, batch.forward)

    def prefill(self, batch: Batch, q: torch.Tensor) -> torch.Tensor:
        """Expanded attention of q [T, H, K] by DeepSeek's own chunked method: out [T, H, V]."""
        attention = SimpleNamespace(
            attn_mha=self.mha, num_local_heads=HEADS, v_head_dim=V_DIM, qk_nope_head_dim=NOPE, kv_lora_rank=LATENT,
            qk_rope_head_dim=ROPE, qk_head_dim=NOPE + ROPE, o_proj=lambda x: (x, None),
            kv_b_proj=lambda x: (self.expanded(x).flatten(1), None),
        )  # fmt: skip
        for name, method in vars(forward_mha.DeepseekMHAForwardMixin).items():
            if callable(method):
                setattr(attention, name, method.__get__(attention))
        latent, rope = self.fresh(batch)
        wide = self.expanded(latent[:, 0])
        k = torch.cat((wide[..., :NOPE], rope.expand(-1, HEADS, -1)), -1)
        with settings(self.drafts, self.ranks), forward_context(ForwardContext(self.backend)):
            self.backend.init_forward_metadata(batch.forward)
            out = attention.forward_normal_chunked_kv_core(q, k, wide[..., NOPE:], batch.forward)
        return out.view(-1, HEADS, V_DIM)

    def expanded(self, latent: torch.Tensor) -> torch.Tensor:
        return torch.einsum("hwl,tl->thw", self.weight, latent)

    # ---- in float64

    def want(self, batch: Batch, q: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Absorbed: out [T, H, L] and lse [T, H]."""
        arrays = []
        starts = [np.cumsum([0, *counts]).astype(np.int32) for counts in (batch.new, batch.lens)]
        rows = torch.cat(batch.rows).double()[:, None].expand(-1, q.shape[1], -1)
        arrays = (q.double(), rows, rows[..., :LATENT])
        return oracle.prefill(*(x.numpy() for x in arrays), *starts, scale=SCALE, causal=True)

    def want_expanded(self, batch: Batch, q: torch.Tensor) -> np.ndarray:
        """Expanded, of keys and values in the layer's precision: out [T, H, V]."""
        rows = torch.cat(batch.rows)
        wide = self.expanded(rows[:, :LATENT]).double()
        k = torch.cat((wide[..., :NOPE], rows[:, None, LATENT:].double().expand(-1, HEADS, -1)), -1)
        starts = [np.cumsum([0, *counts]).astype(np.int32) for counts in (batch.new, batch.lens)]
        arrays = (q.double(), k, wide[..., NOPE:])
        return oracle.prefill(*(x.numpy() for x in arrays), *starts, scale=SCALE, causal=True)[0]


class settings:
    """SGLang's runtime as a server publishes it: the number of drafts, and the ranks."""

    def __init__(self, drafts: int, ranks: Ranks = ALONE, topk: int = 1) -> None:
        world, rank, group, comm = ranks
        fields: dict[str, Any] = {
            "tp_size": world, "attn_tp_size": world, "moe_tp_size": world, "dcp_size": world, "attn_dcp_size": world,
            "dcp_rank": rank, "attn_dcp_rank": rank, "dcp_enabled": world > 1, "dcp_group": group,
        }  # fmt: skip
        if world > 1 and comm:
            fields["dcp_comm_backend"] = comm
        self.parallel = get_parallel().override(**fields)
        self.spec = get_spec().override(speculative_num_draft_tokens=drafts or None, speculative_eagle_topk=topk)

    def __enter__(self) -> None:
        self.parallel.__enter__()
        self.spec.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.spec.__exit__(*error)
        self.parallel.__exit__(*error)


# ---- in place of SGLang's and sgl-kernel's kernels: with their dtypes, and the memory that they touch


def _write(
    buffer: torch.Tensor, loc: torch.Tensor, nope: torch.Tensor, rope: torch.Tensor, *, reserved_skip_index: int = 0
) -> None:
    """set_mla_kv_buffer: rows of one stride, 16 bytes at a time; nothing goes to the slot that is for padding. Slots
    count the keys of all ranks, which take turns."""
    parts, parallel = [], get_parallel()
    for part in (nope, rope):
        assert part.dtype == buffer.dtype and part.shape[:-1].numel() == len(loc) and part.stride(-1) == 1
        assert part.data_ptr() % 16 == 0 and part.stride(0) * part.element_size() % 16 == 0
        parts.append(part.as_strided((len(loc), part.shape[-1]), (part.stride(0), 1)))
    kept = (loc != reserved_skip_index) & (loc % parallel.attn_dcp_size == parallel.attn_dcp_rank)
    buffer.view(len(buffer), -1)[loc[kept] // parallel.attn_dcp_size] = torch.cat(parts, -1)[kept]


def _merge(
    a: torch.Tensor, a_lse: torch.Tensor, b: torch.Tensor, b_lse: torch.Tensor, out: torch.Tensor, out_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """merge_state_v2 and merge_state_triton: all arrays are read as dense, whatever their strides are; natural
    logarithms; of an infinite lse, of either sign, no weight."""
    parts = torch.stack([_dense(x, out.shape, out.dtype).float() for x in (a, b)])
    lses = torch.stack([_dense(x, out.shape[:2], torch.float32) for x in (a_lse, b_lse)])
    lses = lses.where(~lses.isinf(), -torch.inf)
    weights = (lses - lses.amax(0)).exp()
    merged = (parts * (weights / weights.sum(0))[..., None]).sum(0)
    _dense(out, out.shape, out.dtype).copy_(merged)
    _dense(out_lse, out.shape[:2], torch.float32).copy_(lses.logsumexp(0))
    return out, out_lse


def _dense(x: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    assert x.shape == shape and x.dtype == dtype and x.data_ptr() % 16 == 0
    return x.as_strided(shape, torch.empty(shape, device="meta").stride())


sharded = hasattr(memory_pool, "set_mla_kv_buffer_dcp_sharded_triton")
setattr(memory_pool, "set_mla_kv_buffer_dcp_sharded_triton" if sharded else "set_mla_kv_buffer_triton", _write)
merge_state.merge_state_triton = forward_mha.merge_state_v2 = _merge
kernel_inputs.demand()
EXTEND, DECODE, VERIFY = ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.TARGET_VERIFY
DRAFT_EXTEND = ForwardMode.DRAFT_EXTEND_V2

"""vLLM's own MLA layer, metadata builder and backends on CPU tensors, around this project's plug-in.

Imports vllm, unpacked from a wheel without its compiled files. Only what those compile is stood in for: writing and
reading the cache, and merging partial results.
"""

from __future__ import annotations

import inspect
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch

import tests.engines.cpu_vllm  # noqa: F401  (first: it makes vllm believe that this is its platform)
import tsmla_bridge
from tests.engines import kernel_inputs
from tests.oracles import attention as oracle
from tsmla_bridge.engines import vllm as plugin

import vllm._custom_ops as custom_ops  # isort: skip
import vllm.model_executor.layers.attention.mla_attention as mla_attention  # isort: skip
import vllm.v1.attention.ops.triton_merge_attn_states as triton_merge_attn_states  # isort: skip
from vllm.config import (  # isort: skip
    CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig, set_current_vllm_config,
)  # fmt: skip
from vllm.distributed import init_distributed_environment, initialize_model_parallel  # isort: skip
from vllm.forward_context import set_forward_context  # isort: skip
from vllm.model_executor.layers.linear import ColumnParallelLinear  # isort: skip
from vllm.v1.attention.backend import CommonAttentionMetadata  # isort: skip

from tsmla_bridge.engines.vllm.decode import TsmlaMLABackend  # isort: skip
from tsmla_bridge.engines.vllm.prefill import TsmlaMLAPrefillBackend  # isort: skip

HEADS, NOPE, V_DIM, PAGE = 4, 128, 128, 64
NAME = "model.0.attn"
MODEL = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 256,
    "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
    "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": 64, "v_head_dim": V_DIM,
    "vocab_size": 1000, "max_position_embeddings": 4096, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "first_k_dense_replace": 1, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}  # fmt: skip


def known(callee: Any, **arguments: Any) -> dict[str, Any]:
    """Those of the arguments that this version's function takes."""
    return {name: value for name, value in arguments.items() if name in inspect.signature(callee).parameters}


def start() -> None:
    """vLLM's process groups, of one process, and its plug-ins."""
    plugin.register()
    file = tempfile.mktemp()
    with set_current_vllm_config(configuration()):
        init_distributed_environment(1, 0, f"file://{file}", 0, "gloo")
        initialize_model_parallel(1, 1)


def configuration(cache_dtype: str = "auto", dtype: str = "bfloat16", page_size: int = PAGE, **model: Any) -> Any:
    """vLLM's configuration of a model of one MLA layer, on the CPU."""
    folder = tempfile.mkdtemp()
    Path(folder, "config.json").write_text(json.dumps(MODEL | model))
    config = VllmConfig(
        model_config=ModelConfig(
            model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype=dtype, max_model_len=1024
        ),
        cache_config=CacheConfig(block_size=page_size, cache_dtype=cache_dtype),
        parallel_config=ParallelConfig(),
        scheduler_config=SchedulerConfig.default_factory(
            max_num_seqs=8, max_num_batched_tokens=1024, max_model_len=1024, is_encoder_decoder=False
        ),
        device_config=DeviceConfig(device="cpu"),
    )
    config.cache_config.block_size = page_size  # the CPU's platform takes its own
    return config


class Batch(NamedTuple):
    """Requests of `lens` keys whose last `new` tokens are queries: latent and rope of all keys of each request."""

    new: list[int]
    lens: list[int]
    q: torch.Tensor
    latents: list[torch.Tensor]
    ropes: list[torch.Tensor]

    @property
    def fresh(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Latent and rope of the new tokens, packed."""
        parts = [[x[len(x) - n :] for x, n in zip(of, self.new, strict=True)] for of in (self.latents, self.ropes)]
        return torch.cat(parts[0]), torch.cat(parts[1])


class Layer:
    """An MLAAttention layer of vLLM with this project's backends, and what a model runner does around it.

    Attributes:
      backend: of the layer. model: what its model's configuration has beside MODEL. arguments: the layer's own, beside
        those of every layer.
    """

    backend: Any = TsmlaMLABackend
    model: Mapping[str, Any] = {}

    def arguments(self) -> dict[str, Any]:
        return {}

    def __init__(
        self, *, latent: int = 512, rope: int = 64, cache_dtype: str = "auto", drafts: int = 0,
        page_size: int = PAGE, dtype: str = "bfloat16",
    ) -> None:  # fmt: skip
        torch.manual_seed(0)
        self.latent, self.rope, self.page_size = latent, rope, page_size
        self.dtype = getattr(torch, dtype)
        self.scale = (NOPE + rope) ** -0.5
        widths = {"kv_lora_rank": latent, "qk_rope_head_dim": rope}
        self.config = configuration(cache_dtype, dtype, page_size, **widths, **self.model)
        if drafts:
            self.config.speculative_config = SimpleNamespace(
                num_speculative_tokens=drafts, parallel_drafting=False, method="deepseek_mtp"
            )
        self.is_packed = cache_dtype == "fp8_ds_mla"
        self.cache_dtype = torch.float8_e4m3fn if cache_dtype.startswith("fp8") else self.dtype
        make = mla_attention.MLAAttention
        given = known(make.__init__, prefill_backend_cls=TsmlaMLAPrefillBackend)
        mla_attention.get_mla_prefill_backend = lambda config: TsmlaMLAPrefillBackend
        with set_current_vllm_config(self.config):
            torch.set_default_dtype(self.dtype)
            self.kv_b = ColumnParallelLinear(latent, HEADS * (NOPE + V_DIM), bias=False, prefix="model.0.kv_b")
            self.kv_b.weight.data.normal_(0, latent**-0.5)
            self.layer = make(
                num_heads=HEADS, scale=self.scale, qk_nope_head_dim=NOPE, qk_rope_head_dim=rope, v_head_dim=V_DIM,
                q_lora_rank=None, kv_lora_rank=latent, kv_b_proj=self.kv_b, cache_config=self.config.cache_config,
                prefix=NAME, attn_backend=self.backend, **self.arguments(), **given,
            )  # fmt: skip
            self.kv_b.quant_method.process_weights_after_loading(self.kv_b)
            self.layer.process_weights_after_loading(self.dtype)
            torch.set_default_dtype(torch.float32)
            self.builder = self.make_builder()
        self.impl = self.layer.impl
        self.impl.do_kv_cache_update = self._write
        self.layer.use_direct_call = True

    def make_builder(self) -> Any:
        spec = self.layer.get_kv_cache_spec(self.config)
        return self.backend.get_builder_cls()(spec, [NAME], self.config, torch.device("cpu"))

    def _write(self, latent: Any, rope: Any, cache: Any, slots: Any, *others: Any) -> None:
        scale = self.layer._k_scale if self.cache_dtype != self.dtype else None
        rope = rope.reshape(len(latent), self.rope)
        assert slots.dtype == torch.int64
        if self.is_packed:
            assert rope.dtype == torch.bfloat16  # vLLM's kernel copies the bits of any dtype of 16
            tsmla_bridge.write_packed_kv_cache(cache, latent, rope, slots.flatten())
        else:
            tsmla_bridge.write_kv_cache(cache.view(self.cache_dtype), latent, rope, slots.flatten(), kv_scale=scale)

    def batch(self, new: list[int], lens: list[int]) -> Batch:
        latents = [torch.randn(n, self.latent, dtype=self.dtype) for n in lens]
        ropes = [torch.randn(n, self.rope, dtype=self.dtype) for n in lens]
        return Batch(new, lens, torch.randn(sum(new), HEADS, NOPE + self.rope, dtype=self.dtype), latents, ropes)

    def tables(self, batch: Batch) -> torch.Tensor:
        most = max(1, *(-(-n // self.page_size) for n in batch.lens))
        return 1 + torch.arange(len(batch.lens) * most, dtype=torch.int32).view(-1, most)

    def cache(self, batch: Batch, keys: Any = range) -> torch.Tensor:
        """A cache with the batch's context, the new tokens not yet in it. keys(n): the keys among n that lie here."""
        tables = self.tables(batch)
        cache = torch.zeros(tables.numel() + 1, self.page_size, self.latent + self.rope, dtype=self.dtype)
        for b, (n, new) in enumerate(zip(batch.lens, batch.new, strict=True)):
            for at, j in enumerate(keys(n - new)):
                row = torch.cat([batch.latents[b][j], batch.ropes[b][j]])
                cache[tables[b, at // self.page_size], at % self.page_size] = row
        if self.is_packed:
            packed = torch.zeros(*cache.shape[:2], 656, dtype=torch.uint8)
            rows = cache.view(-1, cache.shape[-1])
            slots = torch.arange(len(rows), dtype=torch.int32)
            return tsmla_bridge.write_packed_kv_cache(packed, rows[:, : self.latent], rows[:, self.latent :], slots)
        if self.cache_dtype == self.dtype:
            return cache
        return (cache.float() / self.layer._k_scale).to(self.cache_dtype).view(torch.uint8)

    def metadata(self, batch: Batch, padding: tuple[int, int] = (0, 0), **changed: Any) -> Any:
        """What the builder makes of the batch, padded by (requests, tokens) as for a CUDA graph."""
        starts = [0, *np.cumsum(batch.new).tolist()]
        starts += [starts[-1]] * padding[0]
        lens = torch.tensor([*batch.lens, *[0] * padding[0]], dtype=torch.int32)
        tables = self.tables(batch)
        tables = torch.cat([tables, tables[:1].expand(padding[0], -1)])
        common = {
            "query_start_loc": torch.tensor(starts, dtype=torch.int32), "seq_lens": lens, "num_reqs": len(lens),
            "query_start_loc_cpu": torch.tensor(starts, dtype=torch.int32), "max_query_len": max(batch.new),
            "num_actual_tokens": starts[-1] + padding[1], "max_seq_len": max(batch.lens), "causal": True,
            "block_table_tensor": tables, "slot_mapping": self.slots(batch), "seq_lens_cpu_upper_bound": lens,
            "is_prefilling": torch.tensor([n > 1 for n in batch.new]),
        }  # fmt: skip
        return self.builder.build(0, CommonAttentionMetadata(**known(CommonAttentionMetadata, **common | changed)))

    def slots(self, batch: Batch) -> torch.Tensor:
        tables, size = self.tables(batch), self.page_size
        at = [(b, j) for b, (n, new) in enumerate(zip(batch.lens, batch.new, strict=True)) for j in range(n - new, n)]
        return torch.tensor([int(tables[b, j // size]) * size + j % size for b, j in at])  # int64, as vLLM's are

    def run(self, batch: Batch) -> tuple[torch.Tensor, Any]:
        """The layer's output [T, H, V] and the metadata."""
        with set_current_vllm_config(self.config):
            metadata = self.metadata(batch)
            self.layer.kv_cache = self.cache(batch)
            with set_forward_context({NAME: metadata}, self.config, slot_mapping={NAME: self.slots(batch)}):
                latent, rope = batch.fresh
                shape = torch.Size((len(batch.q), HEADS * V_DIM))
                out = self.layer(batch.q, latent, rope.unsqueeze(1), output_shape=shape)
        return out.view(-1, HEADS, V_DIM), metadata

    def want(self, batch: Batch) -> np.ndarray:
        """The layer's output in float64, expanded."""
        weight = self.kv_b.weight.double().view(HEADS, NOPE + V_DIM, self.latent)
        keys, values = [], []
        for latent, rope in zip(batch.latents, batch.ropes, strict=True):
            wide = torch.einsum("hpl,tl->thp", weight, latent.double())
            rope = rope.double()[:, None].expand(-1, HEADS, -1)
            keys.append(torch.cat([wide[..., :NOPE], rope], -1))
            values.append(wide[..., NOPE:])
        starts = [np.cumsum([0, *counts]).astype(np.int32) for counts in (batch.new, batch.lens)]
        arrays = (batch.q.double(), torch.cat(keys), torch.cat(values))
        out, _ = oracle.prefill(*(x.numpy() for x in arrays), *starts, scale=self.scale, causal=True)
        return out

    def error(self, batch: Batch) -> float:
        """The largest error of the layer's output, as a part of the largest value."""
        want = self.want(batch)
        return float(np.abs(self.run(batch)[0].double().numpy() - want).max() / np.abs(want).max())


# ---- around the implementation alone


def filled(layer: Layer, batch: Batch, keys: Any = range) -> torch.Tensor:
    """The cache with all of the batch's keys, or with those of the first n that `keys(n)` returns."""
    return layer.cache(batch._replace(new=[0] * len(batch.new)), keys)


def decoded(
    layer: Layer, q: torch.Tensor, cache: torch.Tensor, batch: Batch, causal: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Latent attention of these queries [T, H, L + R] in float64: out [T, H, L] and lse [T, H]."""
    queries = np.split(q.double().numpy(), np.cumsum(batch.new)[:-1])
    outs, lses = oracle.decode(
        queries, cache.double().numpy(), layer.tables(batch).numpy(), batch.lens, scale=layer.scale,
        latent_dim=layer.latent, causal=causal,
    )  # fmt: skip
    return np.concatenate(outs), np.concatenate(lses)


@contextmanager
def context_parallel(layer: Layer, world: int, rank: int, interleave: int) -> Iterator[None]:
    """The layer's builder and implementation as one rank of several have them."""
    builder, impl = layer.builder, layer.impl
    before = builder.dcp_world_size, builder.cp_kv_cache_interleave_size
    builder.dcp_world_size, builder.cp_kv_cache_interleave_size = world, interleave
    impl.dcp_world_size, impl.dcp_rank, impl.need_to_return_lse_for_decode = world, rank, True
    try:
        yield
    finally:
        builder.dcp_world_size, builder.cp_kv_cache_interleave_size = before
        impl.dcp_world_size, impl.dcp_rank, impl.need_to_return_lse_for_decode = 1, 0, False


# ---- in place of vLLM's compiled operations (csrc/libtorch_stable, csrc in old versions)
# They take the same dtypes, and touch the same memory: where those compute addresses from sizes, these do too, whatever
# a tensor's strides are.


def _gather(
    src_cache: torch.Tensor, dst: torch.Tensor, block_table: torch.Tensor, cu_seq_lens: torch.Tensor, *others: Any,
    **named: Any,
) -> None:  # fmt: skip
    """gather_and_maybe_dequant_cache (cache_kernels.cu). Its rows begin with a page."""
    starts = named.get("seq_starts", named.get("starts"))
    assert {block_table.dtype, cu_seq_lens.dtype, starts.dtype} == {torch.int32} and block_table.stride(-1) == 1
    assert dst.shape[-1] in (320, 512, 576) and dst.stride(-1) == 1 and src_cache.stride(-1) == 1
    lens = cu_seq_lens.diff().to(torch.int32)
    begin = starts[: len(lens)]
    assert not (begin % src_cache.shape[1]).any()
    cache, scale = src_cache, None
    if src_cache.dtype in (torch.uint8, torch.float8_e4m3fn):
        assert named["kv_cache_dtype"].startswith("fp8") and named["scale"].dtype == torch.float32
        cache, scale = src_cache.view(torch.float8_e4m3fn), float(named["scale"])
    count = int(lens.sum())
    dst[:count] = tsmla_bridge.gather_kv_cache(
        cache, block_table[: len(lens)].contiguous(), begin, lens, total_len=count, kv_scale=scale, out_dtype=dst.dtype
    )


def _merge(
    output: torch.Tensor, prefix_output: torch.Tensor, prefix_lse: torch.Tensor, suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor, output_lse: torch.Tensor | None = None, prefill_tokens_with_context: int | None = None,
) -> None:  # fmt: skip
    """merge_attn_states (attention/merge_attn_states.cu): of an infinite lse, of either sign, no weight; tokens behind
    those with context are the suffix's."""
    shape, step = output.shape, prefix_output.stride(1)
    assert suffix_output.stride(1) == step  # vLLM's own check: the suffix is read by the prefix's
    assert {prefix_output.dtype, suffix_output.dtype} == {output.dtype}
    merged = _rows(output, shape, output.stride(1))
    (first, second), lses = (
        [_rows(x, shape, step).float() for x in (prefix_output, suffix_output)],
        [_as_read(lse, shape) for lse in (prefix_lse, suffix_lse)],
    )
    parts = torch.stack([lse.where(lse.isfinite() | lse.isnan(), -torch.inf) for lse in lses])
    most = parts.amax(0)
    empty = most == -torch.inf
    weights = (parts - most.where(~empty, 0)).exp()
    total = weights.sum(0)
    shares = (weights / total).transpose(1, 2)[..., None]
    got = torch.where(empty.T[..., None], first, first * shares[0] + second * shares[1])
    got_lse = torch.where(empty, -torch.inf, total.log() + most)
    count = shape[0] if prefill_tokens_with_context is None else prefill_tokens_with_context
    got[count:], got_lse[:, count:] = second[count:], lses[1][:, count:]
    merged.copy_(got)
    if output_lse is not None:
        _as_read(output_lse, shape).copy_(got_lse)


def _rows(x: torch.Tensor, shape: torch.Size, step: int) -> torch.Tensor:
    """Results [T, H, V] as that kernel finds them: it takes the heads' stride alone, and reads 16 bytes at once."""
    assert x.shape == shape and x.data_ptr() % 16 == 0 and step * x.element_size() % 16 == 0
    return x.as_strided(shape, (shape[1] * step, step, 1))


def _as_read(lse: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """An lse [H, T] as that kernel finds its values. Until the engine handed over slices of a larger tensor (0.30),
    that was row after row, whatever the tensor's strides are."""
    assert lse.shape == (shape[1], shape[0]) and lse.dtype == torch.float32
    return lse if takes_slices else lse.as_strided(lse.shape, (lse.shape[1], 1))


takes_slices = "lse.stride" in inspect.getsource(triton_merge_attn_states.merge_attn_states)


def _mask_empty_context(
    lse: torch.Tensor, output: torch.Tensor, starts: torch.Tensor, key_starts: torch.Tensor
) -> None:
    """What the Triton kernel writes to the rows of requests without keys is there already."""
    for begin, end, keys in zip(starts[:-1], starts[1:], key_starts.diff(), strict=True):
        assert keys or (not output[begin:end].any() and lse[:, begin:end].eq(-torch.inf).all())


custom_ops.gather_and_maybe_dequant_cache = custom_ops.gather_mla_context_cache_cpu = _gather
mla_attention.merge_attn_states = _merge
if hasattr(mla_attention, "mask_empty_context"):
    mla_attention.mask_empty_context = _mask_empty_context
kernel_inputs.demand()

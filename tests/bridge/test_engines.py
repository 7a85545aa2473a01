"""The engines' own code, or its calls, on tsmla_bridge.tokenspeed_mla: on CPU tensors, and on a GPU if there is one."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import tsmla_bridge
from tests.bridge import engines
from tests.bridge.inputs import Inputs, assert_close, inputs
from tests.oracles import attention as oracle
from tests.oracles.attention import fp8_lse_error
from tsmla_bridge import tokenspeed_mla
from tsmla_kernels.contract import DecodeSpec
from tsmla_kernels.sm90.decode import config as sm90_decode

HEADS, SCALE = 4, 192**-0.5
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BF16 = 2**-7  # bf16's own step, of results of size one
FP8_LSE = {"cpu": 1e-4, "cuda": fp8_lse_error(576)}
LAYER = SimpleNamespace(_q_scale_float=0.5, _k_scale_float=0.25)


@pytest.fixture
def vllm() -> Iterator[tuple[ModuleType, ModuleType]]:
    sources = engines.vllm_sources()
    if sources is None:
        pytest.skip("needs vLLM's backend files (TSMLA_ENGINE_SOURCES names a folder with them, or vllm is installed)")
    with engines.vllm_backend(sources, tokenspeed_mla) as modules:
        yield modules


def fp8(lens: list[int], **shape: Any) -> Inputs:
    return inputs(
        lens, q_dtype="float8_e4m3fn", kv_dtype="float8_e4m3fn", latent_dim=512, rope_dim=64, heads=HEADS,
        **({"page_size": 64} | shape),
    )  # fmt: skip


def skip_without_kernel(device: str, dtype: str, q_len: int = 1) -> None:
    """Skip a GPU test of a dtype that the decode kernel doesn't take."""
    spec = DecodeSpec(
        batch=1, total_q_len=q_len, max_q_len=q_len, num_heads=HEADS, latent_dim=512, rope_dim=64,
        num_pages=1, page_size=64, max_pages=1, q_dtype=dtype, kv_dtype=dtype, ragged=False, causal=True,
        batch_invariant=False,
    )  # fmt: skip
    if device == "cuda" and (reasons := sm90_decode.decode_reasons(spec)):
        pytest.skip("; ".join(reasons))


def test_stand_ins_go_and_what_was_imported_meanwhile_stays() -> None:
    """cutlass, say, whose library aborts the process when it is loaded a second time."""
    if (sources := engines.vllm_sources()) is None:
        pytest.skip("needs vLLM's backend files")
    before = set(sys.modules)
    with engines.vllm_backend(sources, tokenspeed_mla):
        assert sys.modules["tokenspeed_mla"] is tokenspeed_mla
        sys.modules["imported_meanwhile"] = ModuleType("imported_meanwhile")
    assert sys.modules.pop("imported_meanwhile", None) is not None
    assert {name for name in set(sys.modules) - before if name.startswith(("vllm", "tokenspeed_mla"))} == set()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("q_len", [1, 3])
def test_vllm_decodes(vllm: Any, device: str, q_len: int) -> None:
    skip_without_kernel(device, "float8_e4m3fn", q_len)
    case = fp8([70, 129, 1, 64], s=q_len)
    impl = engines.decode_impl(vllm[0], heads=HEADS, scale=SCALE)
    q, cache, tables, lens = (x.to(device) for x in case.arrays)
    metadata = engines.decode_metadata(tables, lens, 4 * q_len)
    out, lse = impl.forward_mqa(q.view(-1, HEADS, 576), cache, metadata, LAYER)
    want_out, want_lse = case.want(scale=SCALE, q_scale=0.5, kv_scale=0.25)
    assert out.dtype == torch.bfloat16
    assert_close(out.cpu(), want_out.reshape(-1, HEADS, 512), BF16)
    assert_close(lse.cpu(), want_lse.reshape(-1, HEADS) / math.log(2), FP8_LSE[device])
    halves = q.view(-1, HEADS, 576)
    again, _ = impl.forward_mqa((halves[..., :512], halves[..., 512:]), cache, metadata, LAYER)
    assert torch.equal(again, out)


@pytest.mark.parametrize("device", DEVICES)
def test_vllm_decodes_in_context_parallel(vllm: Any, device: str) -> None:
    skip_without_kernel(device, "float8_e4m3fn")
    lens, world = [70, 5, 129], 2
    case = fp8(lens)
    want_out, want_lse = case.want(scale=SCALE, q_scale=0.5, kv_scale=0.25)
    outs, lses = [], []
    for rank in range(world):
        shard = fp8([len(range(rank, n, world)) for n in lens])
        cache = shard.kv_cache.view(torch.uint8)
        for b, n in enumerate(lens):
            for at, j in enumerate(range(rank, n, world)):
                row = case.kv_cache.view(torch.uint8)[case.block_tables[b, j // 64], j % 64]
                cache[shard.block_tables[b, at // 64], at % 64] = row
        _, shard_cache, tables, local = (x.to(device) for x in shard.arrays)
        impl = engines.decode_impl(vllm[0], heads=HEADS, scale=SCALE, world=world, rank=rank)
        metadata = engines.decode_metadata(tables, local, len(lens), all_lens=case.seq_lens.to(device))
        out, lse = impl.forward_mqa(case.q.to(device).view(-1, HEADS, 576), shard_cache, metadata, LAYER)
        outs.append(out.float())
        lses.append(lse * math.log(2))
    out, lse = tsmla_bridge.merge_attention_states(outs, lses)
    assert_close(out.cpu(), want_out[:, 0], BF16)
    assert_close(lse.cpu(), want_lse[:, 0], FP8_LSE[device])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_vllm_prefills_with_context(vllm: Any, device: str, dtype: torch.dtype) -> None:
    """New tokens causally, a chunk of cached context without a mask, and the two merged by lse."""
    generator = torch.Generator().manual_seed(0)
    new, context = [5, 0, 70], [33, 7, 0]
    totals = [n + c for n, c in zip(new, context, strict=True)]
    cu = {name: np.cumsum([0, *of]).astype(np.int32) for name, of in (("q", new), ("c", context), ("kv", totals))}
    q = torch.randn(75, HEADS, 192, generator=generator).to(dtype)
    k, kv_b = (torch.randn(115, HEADS, n, generator=generator).to(dtype) for n in (192, 256))
    v = kv_b[..., 128:]  # as kv_b's output is split: a view
    index = [cu["kv"][b] + np.arange(totals[b]) for b in range(3)]
    old = torch.from_numpy(np.concatenate([index[b][: context[b]] for b in range(3)]))
    fresh = torch.from_numpy(np.concatenate([index[b][context[b] :] for b in range(3)]))

    offsets = {name: torch.from_numpy(value).to(device) for name, value in cu.items()}
    backend = vllm[1].TokenspeedMLAPrefillBackend(HEADS, SCALE, 512, 128, 64, 128, vllm_config=None)
    chunk = SimpleNamespace(seq_lens=[offsets["c"].diff()], cu_seq_lens=[offsets["c"]], max_seq_lens=[max(context)])
    metadata = SimpleNamespace(query_start_loc=offsets["q"], max_query_len=max(new), chunked_context=chunk)
    backend.prepare_metadata(metadata)
    q, k, v = q.to(device), k.to(device), v.to(device)

    def rows(x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        return x.view(torch.uint8)[which].view(dtype)  # not every torch indexes fp8

    first = backend.run_prefill_new_tokens(q, rows(k, fresh), rows(v, fresh), return_softmax_lse=True)
    second = backend.run_prefill_context_chunk(0, q, rows(k, old), rows(v, old))
    out, lse = tsmla_bridge.merge_attention_states(
        [first[0].float(), second[0].float()], [first[1].t().contiguous(), second[1].t().contiguous()]
    )
    arrays = [x.float().cpu().numpy() for x in (q, k, v)]
    want_out, want_lse = oracle.prefill(*arrays, cu["q"], cu["kv"], scale=SCALE, causal=True)
    # The kernels round probabilities to the inputs' dtype, and tensor cores add products of fp8 with fewer bits.
    narrow = dtype == torch.float8_e4m3fn and device == "cuda"
    assert_close(out.cpu(), want_out, 2**-3 if narrow else 2**-6)
    assert_close(lse.cpu(), want_lse, 1e-3 if narrow else 1e-4)


# ---- SGLang 0.5.22's TokenspeedMLABackend, by the calls that it makes


def sglang_workspace(device: str, heads: int) -> torch.Tensor:
    sms = tokenspeed_mla.get_num_sm(torch.device(device))
    return torch.empty(sms * heads * 8 * (512 + 1) * 4, dtype=torch.int8, device=device)


def sglang_decode(
    case: Inputs, device: str, *, query: torch.Tensor | None = None, lens: torch.Tensor, max_seq_len: int
) -> torch.Tensor:
    """_run_decode_kernel: the pool of all tokens seen as pages, the cache with its head axis, pdl on."""
    pool = case.kv_cache.view(-1, 1, 576).to(device)
    return tokenspeed_mla.tokenspeed_mla_decode(
        query=case.q.to(device) if query is None else query,
        kv_cache=pool.view(-1, 64, 576).unsqueeze(1),
        workspace_buffer=sglang_workspace(device, HEADS),
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        block_tables=case.block_tables.to(device),
        seq_lens=lens.to(device),
        max_seq_len=max_seq_len,
        softmax_scale=SCALE,
        output_scale=1.0,
        enable_pdl=True,
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("drafts", [0, 4])
def test_sglang_decodes_and_verifies(device: str, dtype: str, drafts: int) -> None:
    """One token a request, or the drafts of each, whose keys seq_lens doesn't count yet."""
    skip_without_kernel(device, dtype, max(1, drafts))
    lens = [70, 129, 3]
    case = inputs(
        [n + drafts for n in lens], s=max(1, drafts), q_dtype=dtype, kv_dtype=dtype, latent_dim=512, rope_dim=64,
        heads=HEADS, page_size=64,
    )  # fmt: skip
    seq_lens = torch.tensor(lens) + drafts  # int64, as the engine keeps them; converted before the call
    out = sglang_decode(case, device, lens=seq_lens.to(torch.int32), max_seq_len=1024 + drafts)
    assert_close(out.cpu(), case.want(scale=SCALE)[0], BF16)
    out.view(-1, HEADS * 512)  # what the engine does with it next


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_sglang_extends_drafts(device: str, dtype: str) -> None:
    """Uneven new tokens, padded after the real ones in a buffer made for more, seq_lens as if all had the most."""
    new, most, buffer_len = [2, 4, 1], 4, 6
    skip_without_kernel(device, dtype, most)
    case = inputs(
        [70, 129, 3], q_lens=new, s=most, q_dtype=dtype, kv_dtype=dtype, latent_dim=512, rope_dim=64, heads=HEADS,
        page_size=64,
    )  # fmt: skip
    buffer = torch.zeros(8, buffer_len, HEADS, 576, dtype=case.q.dtype)
    first = 0
    for b, count in enumerate(new):
        buffer[b, :count] = case.q[first : first + count]
        first += count
    padded = buffer.to(device)[:3, :most]
    lens = case.seq_lens - torch.tensor(new, dtype=torch.int32) + most
    # The last rows are padding and lie past the real keys; the table must have pages for them.
    clean = dataclasses.replace(
        case,
        kv_cache=case.kv_cache.float().nan_to_num().to(case.kv_cache.dtype),
        block_tables=torch.where(case.block_tables < 2**30, case.block_tables, 0),
    )
    out = sglang_decode(clean, device, query=padded, lens=lens, max_seq_len=1024 + most).cpu()
    got = torch.cat([out[b, :count] for b, count in enumerate(new)])
    assert_close(got, case.want(scale=SCALE)[0], BF16)


def test_sglang_compiles_prefill_ahead() -> None:
    """Its constructor, with that package's private names."""
    module = tokenspeed_mla.mla_prefill
    emulation = module._enable_ex2_emulation()
    for causal, return_lse in ((True, True), (True, False), (False, True)):
        config = (torch.float8_e4m3fn, 192, 128, causal, return_lse, True, emulation)
        if config not in module._compiled_kernels:
            module._compiled_kernels[config] = module._compile_prefill_kernel(
                torch.float8_e4m3fn, 192, 128, causal, return_lse, use_pdl=True, enable_ex2_emulation=emulation
            )

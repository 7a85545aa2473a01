"""tsmla_bridge.tokenspeed_mla: the package's surface, and what its functions mean, on CPU tensors and the stand-in."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import math
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tsmla_bridge
from tests.bridge.inputs import Inputs, assert_close, inputs, served
from tests.emulator.launcher import Gpu
from tests.oracles import attention as oracle
from tsmla_bridge import blackwell, tokenspeed_mla
from tsmla_bridge.tokenspeed_mla import (
    get_num_sm,
    mla_kv_pack_quantize_fp8,
    tokenspeed_mla_decode,
    tokenspeed_mla_prefill,
    warmup_compile_prefill,
)

# name: (module, [(parameter, default)]); "" is no default, "*" begins those by keyword alone. Of the package's 2.0.4.
SURFACE = {
    "tokenspeed_mla_decode": (
        "mla_decode",
        "query kv_cache workspace_buffer kv_lora_rank qk_rope_head_dim block_tables seq_lens max_seq_len softmax_scale"
        " output_scale=1.0 out=None is_var_seq=True causal_mask=True window_left=-1 enable_pdl=False return_lse=False"
        " causal_seqs=None cp_world=1 cp_rank=0 cp_interleave_size=1 * min_split_kv=1 local_visible_lens=None",
    ),
    "tokenspeed_mla_prefill": (
        "mla_prefill",
        "query key value seq_lens cum_seq_lens max_seq_len batch_size softmax_scale is_causal=True return_lse=False"
        " cum_seq_lens_q=None max_seq_len_q=None enable_pdl=False out=None",
    ),
    "warmup_compile_prefill": ("mla_prefill", "q_dtype=torch.float8_e4m3fn d_qk=192 d_v=128 enable_pdl=False"),
    "_compile_prefill_kernel": (
        "mla_prefill",
        "q_dtype head_dim_qk head_dim_v is_causal return_lse use_pdl=False enable_ex2_emulation=True",
    ),
    "_enable_ex2_emulation": ("mla_prefill", ""),
    "mla_kv_pack_quantize_fp8": (
        "mla_kv_pack_quantize_fp8",
        "k_nope k_pe v k_scale_inv=1.0 v_scale_inv=1.0 k_out=None v_out=None fp8_dtype=torch.float8_e4m3fn"
        " enable_pdl=False",
    ),
    "get_num_sm": ("utils", "device"),
}
PUBLIC = {name for name in SURFACE if not name.startswith("_")}


def signature(function: Any) -> str:
    """The parameters as SURFACE writes them, of a function or of its definition in a file that may not be imported."""
    if not isinstance(function, ast.FunctionDef):
        function = next(iter(ast.parse(inspect.getsource(function)).body))
    arguments = function.args
    defaults = [None] * (len(arguments.args) - len(arguments.defaults)) + arguments.defaults
    given = zip(arguments.args + arguments.kwonlyargs, defaults + arguments.kw_defaults, strict=True)
    written = [a.arg + (f"={ast.unparse(default)}" if default else "") for a, default in given]
    if arguments.kwonlyargs:
        written.insert(len(arguments.args), "*")
    return " ".join(written)


@pytest.mark.parametrize("name", SURFACE)
def test_signatures(name: str) -> None:
    module, parameters = SURFACE[name]
    ours = importlib.import_module(f"tsmla_bridge.tokenspeed_mla.{module}")
    assert signature(getattr(ours, name)) == parameters
    assert set(tokenspeed_mla.__all__) == PUBLIC
    if name in PUBLIC:
        assert getattr(tokenspeed_mla, name) is getattr(ours, name)


@pytest.mark.parametrize("name", SURFACE)
def test_signatures_are_those_of_the_installed_package(name: str) -> None:
    spec = importlib.util.find_spec("tokenspeed_mla")
    if spec is None or spec.origin is None:
        pytest.skip("needs the package tokenspeed-mla (its sources alone do)")
    module, parameters = SURFACE[name]
    source = ast.parse((Path(spec.origin).parent / f"{module}.py").read_text())
    (found,) = (node for node in source.body if isinstance(node, ast.FunctionDef) and node.name == name)
    assert signature(found) == parameters
    (exported,) = (
        ast.literal_eval(node.value)
        for node in ast.parse(Path(spec.origin).read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    assert set(exported) == PUBLIC


# ---- decode

WORKSPACE = torch.empty(1 << 16, dtype=torch.int8)


def run(case: Inputs, *, output_scale: float = 1.0, **options: Any) -> Any:
    """A call with lse, as engines make it."""
    return tokenspeed_mla_decode(
        query=options.pop("query", case.q),
        kv_cache=options.pop("kv_cache", case.kv_cache),
        workspace_buffer=WORKSPACE,
        kv_lora_rank=case.case.latent_dim,
        qk_rope_head_dim=case.q.shape[-1] - case.case.latent_dim,
        block_tables=options.pop("block_tables", case.block_tables),
        seq_lens=options.pop("seq_lens", case.seq_lens),
        max_seq_len=max(1, int(case.seq_lens.max())),
        softmax_scale=case.case.scale,
        output_scale=output_scale,
        return_lse=True,
        **options,
    )


def visible_keys(case: Inputs, ranges: Any) -> tuple[np.ndarray, np.ndarray]:
    """out and lse (base 2) where query token i of request b sees the keys ranges(b, i), by the oracle."""
    arrays, latent_dim, page = case.case, case.case.latent_dim, case.kv_cache.shape[1]
    out, lse = np.zeros((*case.q.shape[:-1], latent_dim)), np.full(case.q.shape[:-1], -np.inf)
    for b, i, h in np.ndindex(lse.shape):
        slots = [(arrays.block_tables[b, j // page], j % page) for j in ranges(b, i)]
        keys = np.asarray([arrays.kv_cache[slot] for slot in slots], np.float64).reshape(-1, case.q.shape[-1])
        query = arrays.q[b, i, h].astype(np.float64)
        out[b, i, h], lse[b, i, h] = oracle.attend(query, keys, keys[:, :latent_dim], arrays.scale)
    return out, lse / math.log(2)


def in_window(case: Inputs, window: int) -> tuple[np.ndarray, np.ndarray]:
    """What three query tokens a request give that see `window` keys before their own."""
    lens = case.seq_lens.tolist()
    return visible_keys(case, lambda b, i: range(max(0, lens[b] - 3 - window + i), max(0, lens[b] - 2 + i)))


TOKEN_LENS = torch.tensor([[0, 5, 2], [33, 1, 40], [3, 0, -1]], dtype=torch.int32)


def by_token(case: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """What the query tokens give that see TOKEN_LENS keys, or all there are."""
    lens = np.minimum(TOKEN_LENS.numpy(), case.seq_lens.numpy()[:, None])
    return visible_keys(case, lambda b, i: range(max(0, lens[b, i])))


def assert_right(got: Any, want: Any, tolerance: float = 2e-5) -> None:
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, tolerance)


@pytest.mark.parametrize("causal", [True, False])
def test_decode(causal: bool) -> None:
    case = inputs([5, 33, 0, 2], s=3)
    out, lse = run(case, output_scale=2.0, causal_mask=causal, seq_lens=case.seq_lens.long())
    want_out, want_lse = case.want(causal=causal)
    assert_right((out, lse), (2 * want_out, want_lse / math.log(2)))
    # As the package's are: an engine takes views of them.
    assert out.is_contiguous() and lse.is_contiguous() and (out.dtype, lse.dtype) == (case.q.dtype, torch.float32)


def test_decode_in_fp8() -> None:
    case = inputs([5, 33], q_dtype="float8_e4m3fn", kv_dtype="float8_e4m3fn")
    out, lse = run(case, output_scale=0.5, kv_cache=case.kv_cache[:, None])
    want_out, want_lse = case.want()
    assert out.dtype == torch.bfloat16
    assert_close(out, want_out / 2, 2**-7)
    assert_close(lse, want_lse / math.log(2), 2e-5)


@pytest.mark.parametrize("window", [2, 7, 100])
def test_window(window: int) -> None:
    case = inputs([5, 33, 0, 2], s=3)
    want = in_window(case, window)
    assert_right(run(case, window_left=window), want)
    place = torch.full((4, 3, *want[0].shape[2:]), torch.nan)
    out, lse = run(case, window_left=window, out=place)
    assert out is place
    assert_right((out, lse), want)


def shards(case: Inputs, world: int, interleave: int) -> list[Inputs]:
    """The keys of `case` dealt to ranks, each with a cache and tables of its own."""
    page, (batch, _) = case.kv_cache.shape[1], case.block_tables.shape
    dealt = []
    for rank in range(world):
        mine = [[j for j in range(int(n)) if j // interleave % world == rank] for n in case.seq_lens.tolist()]
        shard = inputs([len(keys) for keys in mine], s=case.q.shape[1], seed=rank)
        for b in range(batch):
            for at, j in enumerate(mine[b]):
                row = case.kv_cache[case.block_tables[b, j // page], j % page]
                shard.kv_cache[shard.block_tables[b, at // page], at % page] = row
        dealt.append(shard)
    return dealt


@pytest.mark.parametrize(("world", "interleave"), [(2, 1), (3, 4)])
@pytest.mark.parametrize("options", [{}, {"window_left": 9}, {"causal_mask": False}])
def test_ranks_merge_to_the_whole(world: int, interleave: int, options: dict[str, Any]) -> None:
    case = inputs([37, 5, 0], s=3)
    want = run(case, **options)
    parts = [
        run(
            shard, query=case.q, causal_seqs=case.seq_lens, cp_world=world, cp_rank=rank,
            cp_interleave_size=interleave, **options,
        )
        for rank, shard in enumerate(shards(case, world, interleave))
    ]  # fmt: skip
    out, lse = tsmla_bridge.merge_attention_states([part for part, _ in parts], [lse * math.log(2) for _, lse in parts])
    assert_right((out, lse / math.log(2)), [part.numpy() for part in want])
    assert any((lse == -torch.inf).any() for _, lse in parts)  # some rank held nothing that was visible


def test_lens_of_each_token() -> None:
    case = inputs([5, 33, 0], s=3)
    assert_right(run(case, local_visible_lens=TOKEN_LENS), by_token(case))


@pytest.mark.parametrize("window", [-1, 3])
def test_tables_without_entries(window: int) -> None:
    case = inputs([5, 33], s=2)
    nothing = {"block_tables": case.block_tables[:, :0], "seq_lens": torch.zeros(2, dtype=torch.int32)}
    out, lse = run(case, window_left=window, **nothing)
    assert not out.any() and torch.all(lse == -torch.inf)


def test_query_and_out_with_gaps() -> None:
    case = inputs([5, 33], s=2)
    want = run(case)
    buffer = torch.full((4, 5, *case.q.shape[2:]), torch.nan)
    query = buffer[:2, :2]
    query.copy_(case.q)
    place = torch.full((2, 3, *want[0].shape[2:]), torch.nan)
    out, lse = run(case, query=query, out=place[:, :2])
    assert out.data_ptr() == place.data_ptr() and torch.all(place[:, 2].isnan())
    assert torch.equal(out, want[0]) and torch.equal(lse, want[1])
    dense = torch.empty_like(want[0])
    assert run(case, out=dense)[0] is dense and torch.equal(dense, want[0])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"min_split_kv": 0}, "min_split_kv: got 0; legal: an int from 1 to 256"),
        ({"min_split_kv": 2.0}, "min_split_kv: got 2.0"),
        ({"max_seq_len": 0}, "max_seq_len: got 0; legal: an int >= 1"),
        ({"softmax_scale": -0.1}, "softmax_scale: got -0.1; legal: a positive number"),
        ({"output_scale": float("nan")}, "output_scale: got nan; legal: a positive number"),
        ({"window_left": -2}, "window_left: got -2; legal: -1, or at least S - 1 = 2"),
        ({"window_left": 1}, "window_left: got 1; legal: -1, or at least S - 1 = 2"),
        ({"cp_world": 0}, "cp_world: got 0"),
        ({"cp_interleave_size": 0}, "cp_interleave_size: got 0"),
        ({"cp_rank": 1}, "cp_rank: got 1; legal: 0 to cp_world - 1 = 0"),
        ({"cp_world": 2}, "causal_seqs: got None; with cp_world = 2"),
        ({"workspace_buffer": torch.empty(8)}, "workspace_buffer: got dtype torch.float32; legal: torch.int8"),
        ({"kv_lora_rank": 16, "qk_rope_head_dim": 32}, "kv_lora_rank: got 16; legal: at least qk_rope_head_dim = 32"),
        ({"kv_lora_rank": 40}, "query: got shape .* D = kv_lora_rank"),
        ({"kv_cache": torch.zeros(4, 16, 48).half()}, "kv_cache: got dtype torch.float16; it must be query's"),
        ({"query": torch.zeros(2, 2, 48)}, "query: got shape"),
        ({"local_visible_lens": torch.zeros(2, 3)}, "local_visible_lens: got torch.float32"),
        (
            {"local_visible_lens": torch.zeros(2, 3, dtype=torch.int32), "window_left": 4},
            "local_visible_lens: got a tensor with window_left = 4, cp_world = 1 and causal_seqs None",
        ),
        ({"block_tables": torch.zeros(1, 3, dtype=torch.int32)}, "seq_lens: got shape"),  # uneven queries in an engine
        (
            {"block_tables": torch.zeros(1, 3, dtype=torch.int32), "window_left": 4},
            r"block_tables: got shape \[1, 3\]; axis 0 must be 2 \(B from query\)",
        ),
        ({"seq_lens": torch.tensor([5.0, 33.0])}, "seq_lens: got dtype torch.float32; legal: torch.int32, torch.int64"),
        ({"query": torch.zeros(1, 3, 2, 48)}, r"^query: got shape \[1, 3, 2, 48\]; its B = 1 must equal"),
        ({"out": torch.zeros(2, 3, 2, 32).bfloat16()}, "out: got bfloat16"),
        ({"out": torch.zeros(2, 3, 2, 32).half(), "window_left": 3}, "out: got float16; legal: float32"),
        ({"out": torch.zeros(2, 3, 2, 64).double()[..., :32]}, "out: got float64; legal: float32"),
        ({"out": torch.zeros(3, 2, 2, 32), "window_left": 3}, r"out: got shape \(3, 2, 2, 32\); legal: \(2, 3"),
        ({"out": torch.zeros(2, 2, 3, 2, 64)[..., :32]}, "out: got shape"),
        ({"out": torch.zeros(2, 3, 2, 32, device="meta")}, "out: got a tensor on meta"),
    ],
)
def test_what_is_refused(changed: dict[str, Any], message: str) -> None:
    case = inputs([5, 33], s=3)
    legal = {
        "query": case.q, "kv_cache": case.kv_cache, "workspace_buffer": WORKSPACE, "kv_lora_rank": 32,
        "qk_rope_head_dim": 16, "block_tables": case.block_tables, "seq_lens": case.seq_lens, "max_seq_len": 33,
        "softmax_scale": 0.1,
    }  # fmt: skip
    out = tokenspeed_mla_decode(**legal)
    with pytest.raises(ValueError, match="out: got memory of query; legal: memory"):
        tokenspeed_mla_decode(**legal, out=case.q.view(-1)[: out.numel()].view(out.shape))
    with pytest.raises(ValueError, match=message):
        tokenspeed_mla_decode(**(legal | changed))


def test_decode_by_the_kernel(gpu: Gpu) -> None:
    case = served([5, 33, 0], s=2)
    want_out, want_lse = case.want()
    for size, inside in ((1 << 23, True), (16, False)):
        whole = torch.empty(size + 256, dtype=torch.int8)
        buffer = whole[-whole.data_ptr() % 256 :][:size]
        out, lse = tokenspeed_mla_decode(
            case.q, case.kv_cache[:, None], buffer, 256, 64, case.block_tables, case.seq_lens, 33, case.case.scale,
            return_lse=True,
        )  # fmt: skip
        assert_close(out, want_out, 2**-7)
        assert_close(lse, want_lse / math.log(2), 1e-4)
        operands = gpu.operands
        there = range(buffer.data_ptr(), buffer.data_ptr() + buffer.numel())
        assert (operands["partial_out"].data_ptr() in there) == inside
        assert operands["kv_cache"].data_ptr() == case.kv_cache.data_ptr()


def test_masks_of_each_token_by_the_kernel(gpu: Gpu) -> None:
    case = served([5, 33, 0], s=3)
    place = torch.empty(3, 3, 3, 256, dtype=torch.bfloat16)
    got = run(case, local_visible_lens=TOKEN_LENS, out=place)
    assert got[0].data_ptr() == place.data_ptr() == gpu.operands["out"].data_ptr()
    assert_right(got, by_token(case), 2**-7)
    launches = len(gpu.launches)
    run(case, window_left=32)  # all keys lie in it: as if there were none
    assert len(gpu.launches) == launches + 1 and len(gpu.operands["seq_lens"]) == 3


@pytest.mark.parametrize("window", [2, 14, 15, 16, 17, 40])
def test_a_window_by_the_kernel(gpu: Gpu, window: int) -> None:
    """The kernel gets tables that begin with the first whole page, and the page before them is not lost."""
    dtype = "float8_e4m3fn" if window in (15, 40) else "bfloat16"
    case = inputs([5, 33, 0, 2, 48, 64], s=3, q_dtype=dtype, kv_dtype=dtype, latent_dim=256, rope_dim=64)
    want = in_window(case, window)
    for b, length in enumerate(case.seq_lens.tolist()):  # what lies before the window is not read
        for j in range(length - 3 - window):
            case.kv_cache[case.block_tables[b, j // 16], j % 16] = torch.nan
    pool = torch.full((len(case.kv_cache), 2, *case.kv_cache.shape[1:]), torch.nan).to(case.kv_cache.dtype)
    pool[:, 1] = case.kv_cache
    for cache in (case.kv_cache, case.kv_cache[:, None], pool[:, 1]):
        assert_right(run(case, kv_cache=cache, window_left=window), want, 2**-6)
    assert gpu.launches


# ---- prefill


def packed(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    q, k, kv = (torch.randn(n, 2, w, generator=generator).to(dtype) for n, w in ((5, 24), (9, 24), (9, 40)))
    return q, k, kv[..., 24:], torch.tensor([0, 4, 4, 9], dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("causal", [True, False])
def test_prefill(dtype: torch.dtype, causal: bool) -> None:
    q, k, v, cu_kv = packed(dtype)
    assert not v.is_contiguous()
    cu_q = torch.tensor([0, 2, 3, 5])
    arrays = [x.float().numpy() for x in (q, k, v)]
    want = oracle.prefill(*arrays, cu_q.numpy(), cu_kv.numpy(), scale=0.2, causal=causal)
    options = {"is_causal": causal, "return_lse": True, "cum_seq_lens_q": cu_q, "max_seq_len_q": 2}
    out, lse = tokenspeed_mla_prefill(q, k, v, cu_kv, cu_kv, 5, 3, 0.2, **options)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert out.is_contiguous() and lse.is_contiguous()
    assert_close(out, want[0], 2**-6)
    assert_close(lse, want[1], 2e-5)
    place = torch.empty_like(out)
    assert tokenspeed_mla_prefill(q, k, v, cu_kv, cu_kv, 5, 3, 0.2, out=place, **options)[0] is place
    assert torch.equal(place, out)


@pytest.mark.parametrize(
    ("out", "error"),
    [
        (torch.empty(5, 2, 8, dtype=torch.bfloat16), ValueError),
        (torch.empty(5, 2, 16), TypeError),
        (torch.empty(5, 2, 16, dtype=torch.bfloat16, device="meta"), ValueError),
        (torch.empty(2, 5, 16, dtype=torch.bfloat16).transpose(0, 1), ValueError),
    ],
)
def test_prefill_refuses_a_wrong_out(out: torch.Tensor, error: type[Exception]) -> None:
    q, k, v, cu = packed(torch.bfloat16)
    cu_q = torch.tensor([0, 2, 3, 5], dtype=torch.int32)
    with pytest.raises(error, match="out: got"):
        tokenspeed_mla_prefill(q, k, v, cu, cu, 5, 3, 0.2, cum_seq_lens_q=cu_q, max_seq_len_q=2, out=out)


def test_prefills_errors_name_the_packages_arguments() -> None:
    q, k, v, cu = packed(torch.float32)
    legal: dict[str, Any] = {"query": q, "key": k, "value": v, "seq_lens": cu, "cum_seq_lens": cu}
    for changed, message in (
        ({"key": k[:, :1]}, r"^key: got shape \[9, 1, 24\]; its heads and head_dim must equal query's"),
        ({"value": v.half()}, "^value: got dtype float16; query, key and value must have one dtype"),
        ({"cum_seq_lens": cu[None]}, "^cum_seq_lens: got shape"),
        ({"cum_seq_lens_q": cu[None], "max_seq_len_q": -1}, "^max_seq_len_q: got -1"),
        ({"is_causal": 1}, "^is_causal: got int"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            tokenspeed_mla_prefill(**legal | {"max_seq_len": 5, "batch_size": 3, "softmax_scale": 0.2} | changed)


def test_warming_up_costs_nothing_without_a_gpu() -> None:
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        warmup_compile_prefill(q_dtype=dtype, d_qk=192, d_v=128, enable_pdl=False)
    warmup_compile_prefill()


# ---- the rest


@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_pack_and_quantize(fp8: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(8)
    kv = torch.randn(5, 3, 20, generator=generator).bfloat16() * 400
    k_nope, v, k_pe = kv[..., :12], kv[..., 12:], torch.randn(5, 1, 4, generator=generator).bfloat16()
    k, packed_v = mla_kv_pack_quantize_fp8(k_nope, k_pe, v, 0.5, 2.0, fp8_dtype=fp8)
    greatest = torch.finfo(fp8).max
    want = torch.cat((k_nope, k_pe.expand(-1, 3, -1)), -1).float() * 0.5
    assert torch.equal(k.float(), want.clamp(-greatest, greatest).to(fp8).float())
    assert torch.equal(packed_v.float(), (v.float() * 2).clamp(-greatest, greatest).to(fp8).float())
    assert k.is_contiguous() and packed_v.is_contiguous() and k.dtype == packed_v.dtype == fp8
    places = torch.empty(5, 3, 32, dtype=fp8)[..., :16], torch.empty_like(packed_v)
    got = mla_kv_pack_quantize_fp8(k_nope, k_pe[:, 0], v, 0.5, 2.0, *places, fp8_dtype=fp8)
    assert got[0] is places[0] and got[1] is places[1]
    assert torch.equal(places[0].float(), k.float()) and torch.equal(places[1].float(), packed_v.float())


def test_pack_and_quantize_refuses() -> None:
    k, pe, v = torch.zeros(5, 3, 12), torch.zeros(5, 4), torch.zeros(5, 3, 8)
    for arguments, options, message in (
        ((k, pe, v), {"fp8_dtype": torch.bfloat16}, "fp8_dtype: got"),
        ((k[0], pe, v), {}, "k_nope: got shape"),
        ((k, pe[:3], v), {}, r"k_pe: got shape \[3, 4\]; legal: \[T, R\] or \[T, 1, R\] with T = 5"),
        ((pe[:, None], k[:, 0], v[:, :1]), {}, r"k_pe: got shape \[5, 12\]; legal: R at most N = 4"),
        ((k, pe, v[:, :2]), {}, "v: got shape"),
        ((k, pe, v), {"k_out": torch.zeros(5, 3, 16)}, "k_out: got torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            mla_kv_pack_quantize_fp8(*arguments, **options)


def test_multiprocessors() -> None:
    assert get_num_sm(torch.device("cpu")) == 1


INSTALLED = """
import tsmla_bridge
ours = tsmla_bridge.install_as_tokenspeed_mla()
assert tsmla_bridge.install_as_tokenspeed_mla() is ours
import importlib.util, tokenspeed_mla
from tokenspeed_mla import tokenspeed_mla_decode, get_num_sm
from tokenspeed_mla.mla_prefill import tokenspeed_mla_prefill, _compiled_kernels
from tokenspeed_mla.mla_kv_pack_quantize_fp8 import mla_kv_pack_quantize_fp8
from tokenspeed_mla.utils import get_num_sm as again
assert tokenspeed_mla is ours and again is get_num_sm and importlib.util.find_spec("tokenspeed_mla") is not None
assert tokenspeed_mla.mla_prefill._enable_ex2_emulation() is False
assert ours.mla_kv_pack_quantize_fp8 is mla_kv_pack_quantize_fp8
import sys
assert not {"jax", "cutlass"} & set(sys.modules)
"""


def test_installed_under_the_packages_name() -> None:
    path = ":".join(entry for entry in sys.path if entry)
    done = subprocess.run([sys.executable, "-c", INSTALLED], env={"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_it_is_not_installed_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenspeed_mla", types.ModuleType("tokenspeed_mla"))
    with pytest.raises(RuntimeError, match="tokenspeed_mla was imported already"):
        tsmla_bridge.install_as_tokenspeed_mla()


# ---- Blackwell, where the real package runs the calls


def test_on_blackwell_the_real_package_runs(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.capability = (10, 0)
    asked: list[tuple[Any, ...]] = []
    real = types.ModuleType("tokenspeed_mla")
    real.tokenspeed_mla_decode = lambda *given, **named: asked.append((*given, named))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tokenspeed_mla", real)
    case = inputs([5, 33], q_dtype="bfloat16", kv_dtype="bfloat16", latent_dim=512, rope_dim=64, page_size=32)
    run(case, output_scale=2.0)
    ((query, kv_cache, *_, named),) = asked
    assert query is case.q and kv_cache is case.kv_cache and "local_visible_lens" in named
    assert not gpu.launches


def test_on_blackwell_without_the_package(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.capability = (10, 3)
    case = inputs([5], q_dtype="bfloat16", kv_dtype="bfloat16", latent_dim=512, rope_dim=64, page_size=32)
    monkeypatch.delitem(sys.modules, "tokenspeed_mla", raising=False)  # another test may have imported it
    monkeypatch.setattr(blackwell.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NotImplementedError, match="the package tokenspeed-mla runs the call, and it isn't installed"):
        run(case)
    monkeypatch.setitem(sys.modules, "tokenspeed_mla", tokenspeed_mla)
    with pytest.raises(NotImplementedError, match="was replaced by tsmla_bridge's module"):
        run(case)
